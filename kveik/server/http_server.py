"""Uvicorn around the application: port, signals, and a shutdown that lets running requests end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence

import uvicorn

from kveik.config import ServerConfig
from kveik.server.http_protocol import HttpProtocol
from kveik.server.openapi import App
from kveik.server.sockets import BACKLOG, listen
from kveik.server.state import ServerState
from kveik.server.traffic import Traffic

log = logging.getLogger(__name__)

FAREWELL_SECONDS = 5
"""Seconds in which aborted calls can finish their answers, before their connections are closed."""

_POLL_SECONDS = 0.02


def serve(
    app: App, config: ServerConfig, on_ready: Callable[[str], None], sockets: Sequence[socket.socket] | None = None
) -> None:
    """Serve until SIGINT or SIGTERM, then drain; a second signal aborts what still runs.

    `on_ready` gets the address once connections are answered. `sockets`: opened before; None: the configuration's are opened
    now. Blocks; call it in the main thread, where signals arrive.

    Raises:
        Unreachable: the port cannot be had.
    """
    _allow_many_connections()
    HttpServer(app, config, on_ready, sockets).run()


def _allow_many_connections() -> None:
    # Every connection is an open file, and the usual soft limit of 1024 is less than the queue holds.
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # macOS calls its limit infinite and then refuses it.
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class HttpServer:
    """One server and its stop. `run` blocks; `stop` may come from any thread, any number of times."""

    def __init__(
        self, app: App, config: ServerConfig, on_ready: Callable[[str], None], sockets: Sequence[socket.socket] | None = None
    ) -> None:
        self._app = app
        self._sockets = sockets
        self._config = config
        self._on_ready = on_ready
        self._loop: asyncio.AbstractEventLoop | None = None
        self._uvicorn: uvicorn.Server | None = None
        self._stops = 0
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()

    def run(self) -> None:
        """Serve until told to stop.

        Raises:
            Unreachable: the port cannot be had.
        """
        sockets = self._sockets or listen(self._config.host, self._config.port)
        self._uvicorn = server = _Uvicorn(_uvicorn_config(self._app, self._config))
        with contextlib.ExitStack() as closing, asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
            for sock in sockets:
                closing.enter_context(sock)
            runner.run(self._main(server, sockets))

    @property
    def connections(self) -> int:
        """Connections that are open, idle ones included."""
        return len(self._uvicorn.server_state.connections) if self._uvicorn else 0

    def stop(self) -> None:
        """Drain and end; the second time, without waiting for running requests. Harmless after the end."""
        # A closed loop raises RuntimeError, and may close between any check and the call.
        with contextlib.suppress(RuntimeError):
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._on_stop)

    def _on_stop(self) -> None:
        self._stops += 1
        self._stop.set()
        if self._stops > 1:
            self._hurry.set()

    async def _main(self, server: uvicorn.Server, sockets: Sequence[socket.socket]) -> None:
        self._loop = asyncio.get_running_loop()
        with _signals(self._loop, self._on_stop):
            serving = asyncio.create_task(server.serve(sockets=list(sockets)))
            # If it ends by itself, do not wait for a signal.
            serving.add_done_callback(lambda _: self._stop.set())
            while not server.started and not serving.done():
                await asyncio.sleep(_POLL_SECONDS)
            self._on_ready(_url(self._config.host, sockets[0]))
            await self._stop.wait()
            await self._drain()
            server.should_exit = True
            await serving

    async def _drain(self) -> None:
        """Refuse new calls, let the open ones end, abort those that last too long."""
        state: ServerState = self._app.state.server
        traffic = state.traffic
        traffic.draining = True
        log.info("draining: calls=%d drain_seconds=%g", traffic.calls, self._config.drain_seconds)
        await self._quiet(traffic, self._config.drain_seconds, self._hurry)
        if traffic.calls:
            log.info("drain timeout, aborting: calls=%d", traffic.calls)
            traffic.abort()
            await self._quiet(traffic, FAREWELL_SECONDS, asyncio.Event())

    async def _quiet(self, traffic: Traffic, seconds: float, hurry: asyncio.Event) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while traffic.calls and not hurry.is_set():
                    await asyncio.sleep(_POLL_SECONDS)


class _Uvicorn(uvicorn.Server):
    """Uvicorn without its own signal handling, which would close the port before the calls have ended."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _uvicorn_config(app: App, config: ServerConfig) -> uvicorn.Config:
    class Protocol(HttpProtocol):
        stall_seconds = config.stall_seconds
        linger_bytes = config.max_body_bytes

    return uvicorn.Config(
        app,
        http=Protocol,
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="warning",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=config.keep_alive_seconds,  # type: ignore[arg-type]  # only ever given to call_later
        timeout_graceful_shutdown=FAREWELL_SECONDS,
    )


@contextlib.contextmanager
def _signals(loop: asyncio.AbstractEventLoop, on_signal: Callable[[], None]) -> Iterator[None]:
    # Signals reach the main thread only; a server in another one is stopped by `stop`.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    try:
        yield
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


def _url(host: str, sock: socket.socket) -> str:
    port = sock.getsockname()[1]
    reachable = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{reachable}:{port}"
