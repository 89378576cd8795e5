"""Connections on which nothing happens, or no HTTP."""

from __future__ import annotations

import json
import socket
import time

import httpx
import pytest

from kveik.server import serve
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


def test_a_whole_answer_that_nobody_reads_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "KEEP_ALIVE_SECONDS", 1)
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


def _closed(raw: socket.socket) -> bool:
    try:
        return raw.recv(4096) == b""
    except ConnectionError:
        return True
