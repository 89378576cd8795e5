"""Listening sockets of a host and port, opened before slow work begins."""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Sequence

from kveik.errors import Unreachable

BACKLOG = 2048
_ABSENT = frozenset({errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL})
"""Errors of a family or an address that this machine does not have."""


def listen(host: str, port: int) -> list[socket.socket]:
    """Returns one listening socket for each address of the host, all on one port; port 0 lets the system choose it.

    `localhost` is its address in either family, whatever the system's table of hosts says. An address that this machine lacks
    is skipped where another works.

    Raises:
        Unreachable: no address exists, or the port is taken or not allowed.
    """
    try:
        found = [
            (family, address)
            for name in (("127.0.0.1", "::1") if host == "localhost" else (host,))
            for family, _, _, _, address in socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
        ]
    except OSError as error:
        raise Unreachable(f"The host {host} cannot be resolved. Give an address of this machine with --host.") from error
    sockets: list[socket.socket] = []
    absent: OSError | None = None
    with contextlib.ExitStack() as undo:
        for family, address in dict.fromkeys(found):
            chosen = sockets[0].getsockname()[1] if sockets else port
            try:
                sock = undo.enter_context(_listening(family, (address[0], chosen, *address[2:])))
            except OSError as error:
                absent = error
                if error.errno not in _ABSENT:
                    raise Unreachable(_refusal(host, chosen, error)) from error
            else:
                sockets.append(sock)
        if absent is not None and not sockets:
            raise Unreachable(_refusal(host, port, absent)) from absent
        undo.pop_all()
    return sockets


def _listening(family: int, address: tuple[object, ...]) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(BACKLOG)
    except OSError:
        sock.close()
        raise
    sock.setblocking(False)
    return sock


def _refusal(host: str, port: int, error: OSError) -> str:
    if error.errno in _ABSENT:
        return f"This machine has no address {host} ({error.strerror}, port {port}). Give one that it has with --host."
    return f"Port {port} on {host} is not available ({error.strerror}). Choose another with --port."


def addresses(sockets: Sequence[socket.socket]) -> str:
    """Returns the bound addresses as `127.0.0.1:8000, [::1]:8000`."""
    names = [sock.getsockname()[:2] for sock in sockets]
    return ", ".join(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in names)
