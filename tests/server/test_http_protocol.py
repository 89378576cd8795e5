"""Connections on which nothing happens, or no HTTP."""

from __future__ import annotations

import contextlib
import json
import socket
import time

import httpx
import pytest

from kveik.config import ServerConfig
from kveik.server import http_protocol
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
    feed = http_protocol.HttpProtocol._feed

    def counting(self: http_protocol.HttpProtocol, data: bytes) -> None:
        nonlocal seen
        seen += len(data)
        feed(self, data)

    monkeypatch.setattr(http_protocol.HttpProtocol, "_feed", counting)
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


def test_http_1_0_answers_have_a_length_and_go_on_where_the_client_asks_for_it() -> None:
    body = json.dumps({"prompt": "Hello", "max_tokens": 5}).encode()
    head = f"POST /v1/completions HTTP/1.0\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
    with running() as server, connect(server) as raw:
        for _ in range(3):
            raw.sendall(head.encode() + b"Connection: Keep-Alive\r\n\r\n" + body)
            told, _, answer = raw.recv(65536).partition(b"\r\n\r\n")
            assert told.startswith(b"HTTP/1.1 200 ")
            assert b"connection: keep-alive" in told.lower()
            assert f"content-length: {len(answer)}".encode() in told.lower()
        raw.sendall(head.encode() + b"\r\n" + body)
        told, _, answer = _until_closed(raw).partition(b"\r\n\r\n")
        assert b"connection: close" in told.lower()
        assert answer.endswith(b"}")


OFFERS = (
    b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQCAAAAAAIAAAAA\r\n",
    b"Connection: keep-alive, Upgrade\r\nUpgrade: websocket\r\n",
)


@pytest.mark.parametrize("offer", OFFERS, ids=["h2c", "websocket"])
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("chunked", [False, True])
def test_an_offer_of_another_protocol_is_declined_and_the_request_answered_once(
    offer: bytes, late: bool, chunked: bool, caplog: pytest.LogCaptureFixture
) -> None:
    body = json.dumps({"prompt": "Hello", "max_tokens": 5}).encode()
    length = b"transfer-encoding: chunked" if chunked else b"content-length: %d" % len(body)
    sent = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body) if chunked else body
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n" + offer + length + b"\r\n\r\n"
    with running() as server, connect(server) as raw:
        for part in (head, sent) if late else (head + sent,):
            raw.sendall(part)
            time.sleep(0.05 * late)
        assert raw.recv(65536).startswith(b"HTTP/1.1 200 ")
        raw.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close, upgrade\r\nupgrade: h2c\r\n\r\n")
        assert _until_closed(raw).startswith(b"HTTP/1.1 200 ")
        assert [request.sampling.max_tokens for request in server.door.submitted] == [5]
    assert [record.getMessage() for record in caplog.records if record.levelname != "INFO"] == []


@pytest.mark.parametrize("framing", [b"content-length: 4294967296", b"transfer-encoding: chunked"])
@pytest.mark.parametrize("key", ["right", "wrong"])
def test_a_body_that_goes_on_after_the_answer_is_cut_soon(framing: bytes, key: str) -> None:
    limit, sent = 64 * 1024, 0
    piece = b"a" * 65536 if b"length" in framing else b"10000\r\n" + b"a" * 65536 + b"\r\n"
    with running(max_body_bytes=limit, api_key=("right",)) as server, connect(server) as raw:
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\ncontent-type: application/json\r\n"
        raw.sendall(head.encode() + framing + b"\r\n\r\n" + piece)
        if b"chunked" in framing:
            raw.sendall(piece)
        assert raw.recv(65536).startswith(b"HTTP/1.1 413 " if key == "right" else b"HTTP/1.1 401 ")
        with contextlib.suppress(ConnectionError):
            while sent < 1 << 30:
                raw.sendall(piece)
                sent += len(piece)
        assert server.until(lambda: not server.server.connections)
    # The limit once more, and what the two kernels hold.
    assert sent < 32 << 20


def test_a_body_that_stops_after_the_answer_is_waited_for_briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "LINGER_SECONDS", 0.2)
    with running(max_body_bytes=2000) as server, connect(server) as raw:
        raw.sendall(b"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 5000\r\n\r\n{")
        assert raw.recv(65536).startswith(b"HTTP/1.1 413 ")
        assert _closed(raw)


def test_a_body_that_ends_soon_after_the_answer_leaves_the_connection_usable() -> None:
    with running(max_body_bytes=2000) as server, connect(server) as raw:
        raw.sendall(b"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 2001\r\n\r\n{")
        assert raw.recv(65536).startswith(b"HTTP/1.1 413 ")
        raw.sendall(b" " * 2000 + b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert raw.recv(65536).startswith(b"HTTP/1.1 200 ")


def test_an_idle_connection_stays_for_the_seconds_that_are_set() -> None:
    assert ServerConfig().keep_alive_seconds == 75
    with running(keep_alive_seconds=1.0) as server, connect(server) as raw:
        for pause in (0.0, 0.5, 0.7):
            time.sleep(pause)
            raw.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            assert raw.recv(65536).startswith(b"HTTP/1.1 200 ")
        assert _closed(raw)


def test_a_whole_answer_that_nobody_reads_is_given_up() -> None:
    with running(stall_seconds=0.2, keep_alive_seconds=1, max_model_len=4096) as server, connect(server) as raw:
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
