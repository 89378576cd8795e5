"""Clients that go away, do not read, or read slowly: their requests end at once, and nobody else notices."""

from __future__ import annotations

import json
import logging
import socket
import struct
import time
from typing import Any

import httpx
import pytest

from tests.server.fakes import Running, running

PATHS = ("/v1/completions", "/v1/chat/completions")


def send(server: Running, path: str, **fields: Any) -> socket.socket:
    """Ask, and leave the answer unread."""
    body = json.dumps({"prompt": "Hello", "messages": [{"role": "user", "content": "Hello"}], **fields}).encode()
    host, port = server.url.removeprefix("http://").split(":")
    raw = socket.create_connection((host, int(port)), timeout=10)
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    raw.sendall(head.encode() + body)
    return raw


def leave(raw: socket.socket, *, reset: bool = False) -> None:
    if reset:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    raw.close()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("reset", [True, False])
@pytest.mark.parametrize("n", [1, 4])
def test_a_client_that_leaves_in_the_middle_ends_its_request(path: str, stream: bool, reset: bool, n: int) -> None:
    with running(step_seconds=0.005) as server:
        raw = send(server, path, stream=stream, n=n, max_tokens=400)
        assert server.until(lambda: bool(server.door.streams) and server.door.streams[0].read_tokens > 3 * n)
        leave(raw, reset=reset)
        assert server.until(lambda: len(server.door.aborted) == 1, seconds=1)
        assert server.until(lambda: server.state.traffic.calls == 0)
        assert server.door.streams[0].read_tokens < 400 * n


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_the_queue_ends_its_request(path: str, stream: bool) -> None:
    with running() as server:
        server.door.hold = True
        raw = send(server, path, stream=stream)
        assert server.until(lambda: len(server.door.streams) == 1)
        leave(raw)
        assert server.until(lambda: len(server.door.aborted) == 1, seconds=1)
        assert server.until(lambda: server.state.traffic.calls == 0)
        server.door.hold = False


def test_a_client_that_leaves_ends_all_prompts_of_its_call() -> None:
    with running(step_seconds=0.005) as server:
        raw = send(server, PATHS[0], prompt=["a", "b", "c"], max_tokens=400, stream=True)
        assert server.until(lambda: len(server.door.streams) == 3)
        leave(raw)
        assert server.until(lambda: len(server.door.aborted) == 3, seconds=1)


def test_two_hundred_departures_leave_nothing_behind_and_no_flood_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    with running(step_seconds=0.005) as server:
        for number in range(200):
            leave(send(server, PATHS[number % 2], stream=number % 3 == 0, max_tokens=400), reset=number % 5 == 0)
        assert server.until(lambda: server.state.traffic.calls == 0 and server.state.traffic.streams == 0, seconds=5)
        assert all(stream.aborted for stream in server.door.streams)
        assert httpx.post(server.url + PATHS[0], json={"prompt": "Hello", "max_tokens": 2}).status_code == 200
    assert caplog.records == []


@pytest.mark.parametrize("stream", [True, False])
def test_an_answer_that_was_read_to_its_end_is_not_aborted(stream: bool) -> None:
    with running() as server:
        httpx.post(server.url + PATHS[0], json={"prompt": "Hello", "max_tokens": 4, "stream": stream})
        assert server.until(lambda: server.state.traffic.calls == 0)
        assert len(server.door.streams) == 1
        assert server.door.aborted == []
        assert not server.door.streams[0].aborted


def test_a_client_that_never_reads_is_dropped_and_holds_up_nobody() -> None:
    with running(stall_seconds=0.3) as server:
        idle = send(server, PATHS[0], prompt="Hello", logprobs=20, n=128, max_tokens=500, stream=True)
        assert server.until(lambda: server.state.traffic.calls == 1)
        begun = time.monotonic()
        assert httpx.post(server.url + PATHS[0], json={"prompt": "Hello", "max_tokens": 2}, timeout=5).status_code == 200
        assert time.monotonic() - begun < 2
        assert server.until(lambda: len(server.door.aborted) == 1, seconds=10)
        assert server.until(lambda: server.state.traffic.calls == 0)
        # It stopped far before the end: what nobody reads is not made.
        assert server.door.streams[0].read_tokens < 128 * 500 / 2
        # What the kernel had taken still arrives; then the connection is over, in the middle of the answer.
        with idle:
            received = b"".join(iter(lambda: idle.recv(1 << 20), b""))
        assert not received.endswith(b"0\r\n\r\n")
