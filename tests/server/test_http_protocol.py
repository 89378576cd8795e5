"""Connections on which nothing happens, or no HTTP."""

from __future__ import annotations

import contextlib
import json
import socket
import time

import httpx
import pytest
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from kveik.server import http_protocol, http_server
from tests.server.fakes import Running, running


def connect(server: Running) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=10)


def test_bytes_that_are_no_http_get_the_usual_shape() -> None:
    with running() as server, connect(server) as raw:
        raw.sendall(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n")
        head, _, body = raw.recv(4096).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400 ")
        assert json.loads(body)["error"]["type"] == "invalid_request_error"
        assert raw.recv(4096) == b""


@pytest.mark.parametrize("sent", [b"", b"POST /v1/comp", b"GET /health HTTP/1.1\r\nhost: x\r\nx-slow: "])
def test_a_head_that_does_not_arrive_ends_the_connection(sent: bytes) -> None:
    with running(stall_seconds=0.3) as server, connect(server) as raw:
        raw.sendall(sent)
        begun = time.monotonic()
        assert _closed(raw)
        assert 0.2 < time.monotonic() - begun < 3


def test_a_second_head_that_does_not_arrive_ends_the_connection_too() -> None:
    with running(stall_seconds=0.3) as server, connect(server) as raw:
        raw.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert raw.recv(4096).startswith(b"HTTP/1.1 200 ")
        raw.sendall(b"GET /hea")
        assert _closed(raw)


@pytest.mark.parametrize(
    "parts",
    [
        [b"GET /health HTTP/1.1\r\nhost: x\r\nx-long: ", b"a" * 1000],
        [b"GET /health HTTP/1.1\r\nhost: x\r\n", b"x-many: " + b"a" * 990 + b"\r\n"],
        [b"GET /", b"a" * 1000],
    ],
)
def test_a_head_is_refused_once_it_is_too_large(parts: list[bytes]) -> None:
    with running() as server, connect(server) as raw:
        raw.sendall(parts[0])
        # A little more than allowed, so that nothing lies unread when the server closes.
        for _ in range(http_protocol.MAX_HEAD_BYTES // 1000 + 1):
            raw.sendall(parts[1])
        received = _until_closed(raw)
    assert received.startswith(b"HTTP/1.1 431 ")
    assert json.loads(received.partition(b"\r\n\r\n")[2])["error"]["type"] == "invalid_request_error"


def test_what_follows_a_chunked_body_is_bounded_too() -> None:
    with running() as server, connect(server) as raw:
        with contextlib.suppress(ConnectionError):
            raw.sendall(b"POST /tokenize HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n0\r\nx-trailer: ")
            raw.sendall(b"a" * (8 << 20))
        assert server.until(lambda: not server.server.connections)


def test_the_parser_never_sees_more_of_a_head_than_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = 0
    feed = HttpToolsProtocol.data_received

    def counting(self: HttpToolsProtocol, data: bytes) -> None:
        nonlocal seen
        seen += len(data)
        feed(self, data)

    monkeypatch.setattr(HttpToolsProtocol, "data_received", counting)
    with running() as server, connect(server) as raw:
        with contextlib.suppress(ConnectionError):
            raw.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nx-long: " + b"a" * (8 << 20))
        assert server.until(lambda: not server.server.connections)
    assert seen <= http_protocol.MAX_HEAD_BYTES


def test_large_bodies_and_heads_within_the_limit_are_read_on_one_connection() -> None:
    with running() as server, httpx.Client(base_url=server.url, timeout=20) as client:
        for _ in range(5):
            parts = (b'{"prompt": "', *(b"a" * 300 for _ in range(1000)), b'"}')
            headers = {"x-long": "a" * 60_000, "content-type": "application/json"}
            answer = client.post("/tokenize", content=iter(parts), headers=headers)
            assert answer.json()["count"] == 300_001


@pytest.mark.parametrize("hosts", [b"", b"host: x\r\nhost: y\r\n"])
def test_a_request_without_exactly_one_host_is_400(hosts: bytes) -> None:
    with running() as server, connect(server) as raw:
        raw.sendall(b"GET /health HTTP/1.1\r\n" + hosts + b"\r\n")
        received = _until_closed(raw)
        assert received.startswith(b"HTTP/1.1 400 ")
        assert "Host" in json.loads(received.partition(b"\r\n\r\n")[2])["error"]["message"]


@pytest.mark.parametrize("stream", [True, False])
def test_an_answer_over_http_1_0_ends_with_its_connection_and_has_no_chunks(stream: bool) -> None:
    with running() as server, connect(server) as raw:
        body = json.dumps({"prompt": "Hello", "max_tokens": 5, "stream": stream}).encode()
        head = f"POST /v1/completions HTTP/1.0\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        raw.sendall(head.encode() + body)
        told, _, answer = _until_closed(raw).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in told.lower()
    assert answer.startswith(b"data: {" if stream else b"{")
    assert answer.endswith(b"data: [DONE]\n\n" if stream else b"}")


def test_a_whole_answer_that_nobody_reads_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "KEEP_ALIVE_SECONDS", 1)
    with running(stall_seconds=0.2, max_model_len=4096) as server, connect(server) as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        body = json.dumps({"prompt": "Hello", "n": 128, "max_tokens": 400, "logprobs": 20}).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        raw.sendall(head.encode() + body)
        assert server.until(lambda: server.state.gauges.statuses[200] == 1, seconds=60)
        assert server.until(lambda: not server.server.connections, seconds=10)


def test_an_answer_that_is_read_slowly_but_steadily_arrives_whole() -> None:
    with running(stall_seconds=0.5) as server:
        body = {"prompt": "Hello", "n": 64, "max_tokens": 100, "logprobs": 5, "stream": True}
        received = 0
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=20) as answer:
            for number, part in enumerate(answer.iter_raw(65536)):
                received += len(part)
                if number % 10 == 0:
                    time.sleep(0.02)
                last = part
        assert last.endswith(b"data: [DONE]\n\n")
        assert received > 1_000_000
        assert server.door.aborted == []


def _until_closed(raw: socket.socket) -> bytes:
    received = b""
    with contextlib.suppress(ConnectionError):
        while part := raw.recv(65536):
            received += part
    return received


def _closed(raw: socket.socket) -> bool:
    try:
        return raw.recv(4096) == b""
    except ConnectionError:
        return True
