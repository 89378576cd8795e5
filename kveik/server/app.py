"""ASGI application: routes, keys, errors as answers, and one log line per call."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections import deque

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kveik import __version__
from kveik.errors import Broken, KveikError, Refused
from kveik.server import info, routes
from kveik.server.auth import OPEN_PATHS, Authenticate, Tenants
from kveik.server.envelope import INTERNAL, error_response, json_response, shape
from kveik.server.openapi import App
from kveik.server.state import ServerState
from kveik.server.traffic import DoorGauges, Traffic

log = logging.getLogger(__name__)
access = logging.getLogger("kveik.access")

CLIENT_GONE = 499
"""nginx's status for a client that left before the answer, in log and metrics."""

PER_TURN = 16
"""Calls that begin in one turn of the event loop: about 10 ms of work."""

_HTTP_MESSAGES = {
    404: "This path does not exist. GET /docs lists all paths.",
    405: "This path does not support this method. Use one of those in the Allow header.",
}

DESCRIPTION = """OpenAI's API, with vLLM's extras, over a paged, shared and explainable key/value cache.

With `--api-key` set, every path needs `Authorization: Bearer KEY`, except `/`, `/status`, `/health`, `/metrics`, `/version`,
`/docs` and `/openapi.json`, which stay open for people, probes and scrapers.
"""


def create_app(state: ServerState) -> App:
    """The ASGI application over one engine."""
    app = App(
        title="kveik", version=__version__, description=DESCRIPTION, docs_url=None, redoc_url=None, redirect_slashes=False
    )
    app.state.server = state
    app.include_router(routes.router)
    app.include_router(info.router)
    app.add_exception_handler(KveikError, _known)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_middleware(Authenticate, tenants=Tenants(state.config.api_key, state.secret), refused=state.refused)
    # Added last, so it is the outermost.
    app.add_middleware(Watch, traffic=state.traffic, gauges=state.gauges)
    return app


async def _known(request: Request, error: Exception) -> Response:
    assert isinstance(error, KveikError)
    if isinstance(error, Broken):
        log.error("call failed: status=%d code=%s error=%s", error.status, error.code, error.message)
    if isinstance(error, Refused):
        state: ServerState = request.app.state.server
        state.refused(error)
    return error_response(error)


async def _http(request: Request, error: Exception) -> Response:
    # Starlette's own errors: 404 and 405, with Allow in the headers.
    assert isinstance(error, HTTPException)
    headers = dict(error.headers or {})
    if "Allow" in headers:
        methods = {*headers["Allow"].split(", "), "OPTIONS"}
        headers["Allow"] = ", ".join(sorted(methods | ({"HEAD"} if "GET" in methods else set())))
        if request.method == "OPTIONS":
            return Response(status_code=204, headers=headers)
    message = _HTTP_MESSAGES.get(error.status_code, "The request cannot be answered.")
    return json_response(shape(message, error.status_code), status=error.status_code, headers=headers)


async def _invalid(request: Request, error: Exception) -> Response:
    return json_response(shape("The path or query of the request is not valid.", 400), status=400)


class Watch:
    """ASGI: counts calls, writes the access log, and answers unexpected exceptions with 500 and no details.

    HEAD is answered as GET, whose body the HTTP protocol leaves out; slashes are merged and one at the end is dropped, as nginx
    and most routers do.

    One line per call, without query, body or key; calls on open paths (probes, scrapers, the page) only at debug level.
    """

    def __init__(self, app: ASGIApp, traffic: Traffic, gauges: DoorGauges) -> None:
        self._app = app
        self._traffic = traffic
        self._gauges = gauges
        self._turnstile = Turnstile()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = 0
        path = re.sub("/{2,}", "/", scope["path"]).rstrip("/") or "/"
        plain = {**scope, "path": path, "method": "GET" if scope["method"] == "HEAD" else scope["method"]}

        async def noting(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        started, counted = time.monotonic(), path not in OPEN_PATHS
        self._traffic.calls += counted
        try:
            if counted:
                await self._turnstile.enter()
            await self._app(plain, receive, noting)
        except ClientDisconnect:
            status = CLIENT_GONE
        except Exception:
            log.exception("call failed with an unexpected exception: method=%s", scope["method"])
            if not status:
                await error_response(INTERNAL)(plain, receive, noting)
        finally:
            self._traffic.calls -= counted
            if counted:
                self._gauges.ended(status)
            _log_access(scope, status, time.monotonic() - started, logging.INFO if counted else logging.DEBUG)


def _log_access(scope: Scope, status: int, seconds: float, level: int) -> None:
    # The raw path: decoded, it could hold line breaks and forge log lines.
    path = scope.get("raw_path", b"").decode("ascii", "backslashreplace")[:100]
    client = (scope.get("client") or ("-",))[0]
    access.log(level, "%s %s %s %d %.0f ms", client, scope["method"], path, status, 1000 * seconds)


class Turnstile:
    """Calls pass in the order in which they came, at most `per_turn` in each turn of the event loop.

    Without it, thousands of calls that arrive in one turn are all parsed and refused before anything else is looked at,
    which takes seconds. Between two turns the loop looks at its sockets, so a probe waits for a few turns only.
    """

    def __init__(self, per_turn: int = PER_TURN) -> None:
        self._per_turn = per_turn
        self._left = per_turn
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._turning = False

    async def enter(self) -> None:
        """Return when it is this call's turn; at once where few calls arrive."""
        loop = asyncio.get_running_loop()
        self._turn_soon(loop)
        if self._left and not self._waiting:
            self._left -= 1
            return
        turn = loop.create_future()
        self._waiting.append(turn)
        await turn

    def _turn_soon(self, loop: asyncio.AbstractEventLoop) -> None:
        if not self._turning:
            self._turning = True
            loop.call_soon(self._turn, loop)

    def _turn(self, loop: asyncio.AbstractEventLoop) -> None:
        self._turning = False
        self._left = self._per_turn
        while self._waiting and self._left:
            turn = self._waiting.popleft()
            # A call that was cancelled while waiting uses no turn.
            if not turn.done():
                turn.set_result(None)
                self._left -= 1
        if self._left < self._per_turn:
            self._turn_soon(loop)
