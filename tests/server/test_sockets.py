"""Listening sockets: every address of a host, one port, and one sentence for each reason why there is none."""

from __future__ import annotations

import errno
import os
import socket

import pytest

from kveik.errors import Unreachable
from kveik.server.sockets import addresses, listen


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


def close(sockets: list[socket.socket]) -> None:
    for sock in sockets:
        sock.close()


def test_one_address_is_one_socket_that_answers_at_once_and_is_named_as_it_was_bound() -> None:
    sockets = listen("127.0.0.1", 0)
    port = sockets[0].getsockname()[1]
    assert addresses(sockets) == f"127.0.0.1:{port}"
    socket.create_connection(("127.0.0.1", port), timeout=5).close()
    close(sockets)


def test_a_port_that_listens_already_is_refused_with_its_number() -> None:
    sockets = listen("127.0.0.1", 0)
    port = sockets[0].getsockname()[1]
    with pytest.raises(Unreachable, match=rf"^Port {port} on 127\.0\.0\.1 is not available .*--port\.$"):
        listen("127.0.0.1", port)
    close(sockets)


def resolve_to(monkeypatch: pytest.MonkeyPatch, *families: tuple[int, tuple[object, ...]]) -> None:
    found = [(family, socket.SOCK_STREAM, 6, "", address) for family, address in families]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)


@pytest.mark.skipif(not has_ipv6(), reason="there is no IPv6 here")
def test_localhost_answers_in_both_families_on_one_port() -> None:
    sockets = listen("localhost", 0)
    port = sockets[0].getsockname()[1]
    for family, host in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
        with socket.socket(family) as client:
            client.connect((host, port))
    assert addresses(sockets) == f"127.0.0.1:{port}, [::1]:{port}"
    close(sockets)


class WithoutIpv6(socket.socket):
    """A machine that has no such family."""

    def __init__(self, family: int = socket.AF_INET, *rest: int, **more: object) -> None:
        if family == socket.AF_INET6:
            raise OSError(errno.EAFNOSUPPORT, os.strerror(errno.EAFNOSUPPORT))
        super().__init__(family, *rest)


def test_without_ipv6_localhost_listens_on_the_family_that_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "socket", WithoutIpv6)
    sockets = listen("localhost", 0)
    assert [sock.family for sock in sockets] == [socket.AF_INET]
    close(sockets)


def test_without_ipv6_its_address_is_refused_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "socket", WithoutIpv6)
    with pytest.raises(Unreachable, match=r"^This machine has no address :: \(.*\). Give one that it has with --host\.$"):
        listen("::", 0)


def test_an_address_of_which_one_family_is_taken_is_refused_and_nothing_is_left_listening(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken = listen("127.0.0.1", 0)
    port = taken[0].getsockname()[1]
    resolve_to(monkeypatch, (socket.AF_INET, ("127.0.0.2", port)), (socket.AF_INET, ("127.0.0.1", port)))
    with pytest.raises(Unreachable, match="Choose another with --port"):
        listen("somehost", port)
    with socket.socket() as client, pytest.raises(ConnectionRefusedError):
        client.connect(("127.0.0.2", port))
    close(taken)
