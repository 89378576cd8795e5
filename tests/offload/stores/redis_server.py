"""A real Redis or Valkey server on a free port of this machine, which can be killed, frozen and started again."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import redis

PROGRAM = shutil.which("redis-server") or shutil.which("valkey-server")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """One server; its port stays the same over restarts."""

    def __init__(self, *options: str) -> None:
        assert PROGRAM is not None
        self.port = free_port()
        self.options = options
        self.process: subprocess.Popen[bytes] | None = None
        self.client = redis.Redis(port=self.port)
        self.start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def tell(self, *command: bytes | str | int) -> Any:
        """What it answers to somebody else."""
        return self.client.execute_command(*command)

    def start(self) -> None:
        """Return when it listens."""
        command = [PROGRAM or "", "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        self.process = subprocess.Popen([*command, *self.options], stdout=subprocess.DEVNULL)
        while self.process.poll() is None:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            time.sleep(0.01)
        raise AssertionError("the server did not start")

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """It accepts connections, and answers nobody."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)
        yield
        self.process.send_signal(signal.SIGCONT)


@contextmanager
def running(*options: str) -> Iterator[Server]:
    """A server for one test; the test is skipped where there is none to run."""
    if PROGRAM is None:
        pytest.skip("neither redis-server nor valkey-server is installed")
    server = Server(*options)
    try:
        yield server
    finally:
        server.client.close()
        server.kill()
