"""A server that answers whatever it is asked with the same bytes."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def answering(reply: bytes) -> Iterator[str]:
    """Its address. Without a reply it hangs up."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=_accept, args=(listener, reply), daemon=True).start()
        yield f"redis://127.0.0.1:{listener.getsockname()[1]}/0"
        # Who waits in `accept` does not notice that the socket is closed.
        listener.shutdown(socket.SHUT_RDWR)


def _accept(listener: socket.socket, reply: bytes) -> None:
    with contextlib.suppress(OSError):
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=_answer, args=(connection, reply), daemon=True).start()


def _answer(connection: socket.socket, reply: bytes) -> None:
    with connection, contextlib.suppress(OSError):
        while reply and connection.recv(1 << 16):
            connection.sendall(reply)
