"""From bytes to shapes: broken bodies get 400, 413 or 415 in the usual shape, at once, and change nothing."""

from __future__ import annotations

import gzip
import json
import socket
from collections.abc import Iterator

import httpx
import pytest
from starlette.datastructures import Headers

from kveik.errors import BadValue, WrongMediaType
from kveik.server.body import check_media_type, parse
from kveik.server.protocol import CompletionBody
from tests.server.fakes import Running, running

JSON = {"content-type": "application/json"}
BROKEN = {
    "no JSON": b"{x}",
    "nothing": b"",
    "a list": b"[]",
    "null": b"null",
    "a number": b"123",
    "a string": b'"s"',
    "nested 100,000 deep": b"[" * 100_000,
    "nested 100,000 deep in an object": b'{"prompt":' * 100_000,
    "gzip": gzip.compress(b'{"prompt": "Hello"}'),
    "a byte order mark": b'\xef\xbb\xbf{"prompt": "Hello"}',
    "NaN": b'{"prompt": "Hello", "temperature": NaN}',
    "Infinity": b'{"prompt": "Hello", "temperature": Infinity}',
    "-Infinity in a field that nobody knows": b'{"prompt": "Hello", "x": [-Infinity]}',
    "a number beyond floats": b'{"prompt": "Hello", "temperature": 1e999}',
    "a number of 10,000 digits": b'{"prompt": "Hello", "seed": ' + b"9" * 10_000 + b"}",
    "no UTF-8": b'{"prompt": "\xff"}',
    "half a surrogate pair": b'{"prompt": "\\ud800"}',
    "a comma too many": b'{"prompt": "Hello",}',
    "UTF-16": '{"prompt": "Hello"}'.encode("utf-16"),
    "two objects": b'{"prompt": "Hello"}{}',
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_body_is_refused_at_once(client: httpx.Client, server: Running, name: str) -> None:
    submitted = len(server.door.streams)
    answer = client.post("/v1/completions", content=BROKEN[name], headers=JSON)
    assert (server.state.bodies.held_bytes, server.state.traffic.streams) == (0, 0)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert set(error) == {"message", "type", "param", "code"}
    assert "Traceback" not in answer.text
    assert "kveik/" not in answer.text
    assert len(server.door.streams) == submitted
    assert client.post("/v1/completions", json={"prompt": "Hello", "max_tokens": 1}).status_code == 200


@pytest.mark.parametrize("value", ["NaN", "-Infinity", '[1, {"x": NaN}]'])
def test_a_number_that_json_does_not_have_names_its_field(value: str) -> None:
    with pytest.raises(BadValue, match="`logit_bias`") as refused:
        parse(b'{"prompt": "a", "logit_bias": %s}' % value.encode(), CompletionBody)
    assert refused.value.param == "logit_bias"
    with pytest.raises(BadValue, match=r"^A field"):
        parse(b'{"prompt": "a", "s3cret": %s}' % value.encode(), CompletionBody)


def test_duplicate_keys_are_no_error_and_the_last_one_counts() -> None:
    assert parse(b'{"prompt": "a", "prompt": "b"}', CompletionBody).prompt == "b"


@pytest.mark.parametrize("value", ['"7"', "true", "7.5", "[7]", "{}", '"abc"'])
def test_a_number_is_a_number_and_the_field_is_named(value: str) -> None:
    with pytest.raises(BadValue, match=r"^max_tokens: ") as refused:
        parse(b'{"prompt": "a", "max_tokens": %s}' % value.encode(), CompletionBody)
    assert refused.value.param == "max_tokens"


def test_an_integer_is_good_enough_for_a_float() -> None:
    assert parse(b'{"prompt": "a", "temperature": 1}', CompletionBody).temperature == 1.0


@pytest.mark.parametrize("kind", ["application/json", "Application/JSON; charset=utf-8", "application/problem+json"])
def test_json_by_any_of_its_names_is_read(kind: str) -> None:
    check_media_type(Headers({"content-type": kind, "content-encoding": "identity"}))
    assert kind.lower().split(";")[0].endswith("json")


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"content-type": ""},
        {"content-type": "text/plain"},
        {"content-type": "application/x-www-form-urlencoded"},
        {"content-type": "multipart/form-data; boundary=x"},
        {"content-type": "application/json; charset=latin-1"},
        {"content-type": "application/json", "content-encoding": "gzip"},
        {"content-type": "json"},
    ],
)
def test_other_media_types_are_refused(headers: dict[str, str]) -> None:
    with pytest.raises(WrongMediaType) as refused:
        check_media_type(Headers(headers))
    assert refused.value.status == 415


def test_a_missing_content_type_is_415_in_the_usual_shape(client: httpx.Client) -> None:
    answer = client.post("/v1/completions", content=b'{"prompt": "Hello"}')
    assert answer.status_code == 415
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_a_body_that_says_it_is_too_large_is_refused_before_it_is_read(server: Running) -> None:
    with _connection(server) as raw:
        raw.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n")
        raw.sendall(b"content-length: 99999999999\r\n\r\n")
        assert raw.recv(4096).startswith(b"HTTP/1.1 413 ")


def test_a_chunked_body_is_cut_off_at_the_limit(server: Running) -> None:
    sent = 0

    def endless() -> Iterator[bytes]:
        nonlocal sent
        yield b'{"prompt": "'
        for _ in range(64):
            sent += 1
            yield b"a" * 1024 * 256

    answer = httpx.post(f"{server.url}/v1/completions", content=endless(), headers=JSON, timeout=20)
    assert answer.status_code == 413
    assert "4194304" in answer.json()["error"]["message"]
    assert server.state.bodies.held_bytes == 0


def test_a_chunked_body_that_breaks_off_leaves_nothing_behind(server: Running) -> None:
    with _connection(server) as raw:
        raw.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n")
        raw.sendall(b'transfer-encoding: chunked\r\n\r\n20\r\n{"prompt": "Hel')
        assert server.until(lambda: server.state.traffic.calls == 1)
    assert server.until(lambda: server.state.traffic.calls == 0)
    assert server.state.bodies.held_bytes == 0


def test_a_body_that_does_not_arrive_is_given_up() -> None:
    with running(stall_seconds=0.2) as server, _connection(server) as raw:
        raw.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 50\r\n\r\n{"
        )
        answer = raw.recv(4096)
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert json.loads(answer.split(b"\r\n\r\n", 1)[1])["error"]["type"] == "timeout_error"
        # The rest of that body must not be taken for a request of its own.
        assert b"connection: close" in answer


def test_bodies_in_flight_share_one_budget() -> None:
    with running(max_body_bytes=4096) as server:
        server.state.bodies.held_bytes = server.state.bodies.total_bytes
        refused = httpx.post(f"{server.url}/v1/completions", json={"prompt": "Hello"})
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        server.state.bodies.held_bytes = 0
        assert httpx.post(f"{server.url}/v1/completions", json={"prompt": "Hello"}).status_code == 200


def _connection(server: Running) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=10)
