"""Servers that answer whatever they are asked with the same bytes, or what is right in a way that is not."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import BinaryIO

Answered = Callable[[bytes, bytes], Iterable[bytes | float]]
"""Of a command and its right answer: what is sent, in pieces, and how many seconds it sleeps between them."""

HANG_UP = float("inf")
"""In place of seconds."""


@contextmanager
def answering(reply: bytes) -> Iterator[str]:
    """Its address. Without a reply it hangs up."""

    def serve(connection: socket.socket) -> None:
        while reply and connection.recv(1 << 16):
            connection.sendall(reply)

    with _listening(serve) as url:
        yield url


class Keeper:
    """Keeps what it is told to, and answers as `answered` would have it."""

    def __init__(self) -> None:
        self.kept: dict[bytes, bytes] = {}
        self.answered: Answered = lambda command, answer: [answer]
        self.bytes_sent = 0
        self.connections = 0
        self.reads = True

    @contextmanager
    def serving(self) -> Iterator[str]:
        """Its address."""
        with _listening(self._serve) as url:
            yield url

    def _serve(self, connection: socket.socket) -> None:
        self.connections += 1
        with connection.makefile("rb") as asked:
            while self.reads and (line := asked.readline()):
                parts = [_part(asked) for _ in range(int(line[1:]))]
                for piece in self.answered(parts[0], self._answer(*parts)):
                    if isinstance(piece, bytes):
                        connection.sendall(piece)
                        self.bytes_sent += len(piece)
                    elif piece == HANG_UP:
                        return
                    else:
                        time.sleep(piece)
            while not self.reads:
                time.sleep(0.01)

    def _answer(self, command: bytes, name: bytes = b"", *rest: bytes) -> bytes:
        match command:
            case b"GETRANGE" | b"GET":
                value = self.kept.get(name, b"")
                return b"$%d\r\n%b\r\n" % (len(value), value)
            case b"EXISTS":
                return b":%d\r\n" % (name in self.kept)
            case b"UNLINK":
                return b":%d\r\n" % (self.kept.pop(name, None) is not None)
            case b"SET":
                self.kept[name] = rest[0]
        return b"+OK\r\n"


def _part(asked: BinaryIO) -> bytes:
    content = asked.read(int(asked.readline()[1:]))
    asked.read(2)
    return content


@contextmanager
def _listening(serve: Callable[[socket.socket], None]) -> Iterator[str]:
    """The address of a server that serves each connection in a thread of its own."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=_accept, args=(listener, serve), daemon=True).start()
        yield f"redis://127.0.0.1:{listener.getsockname()[1]}/0"
        # Who waits in `accept` does not notice that the socket is closed.
        listener.shutdown(socket.SHUT_RDWR)


def _accept(listener: socket.socket, serve: Callable[[socket.socket], None]) -> None:
    with contextlib.suppress(OSError):
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=_close_after, args=(connection, serve), daemon=True).start()


def _close_after(connection: socket.socket, serve: Callable[[socket.socket], None]) -> None:
    with connection, contextlib.suppress(OSError):
        # As servers do, or a second answer waits until the first one was acknowledged.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        serve(connection)
