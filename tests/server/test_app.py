"""Errors of every kind have one shape, and the log has one line per call."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import httpx
import pytest

from kveik.errors import BadValue, Broken, KveikError, ModelNotFound, NotAuthorized, Overloaded, PromptTooLong, Refused
from kveik.observe.events import RequestRefused
from kveik.server.envelope import envelope, error_response
from tests.server.fakes import FakeDoor, Running, running

CASES: dict[str, tuple[str, str, dict[str, Any], int, str | None, str | None]] = {
    "an unknown path": ("GET", "/v1/nothing", {}, 404, None, None),
    "an unknown path with a slash": ("GET", "/v1/models/x/?x=<b>", {}, 404, "model", "model_not_found"),
    "a wrong method": ("GET", "/v1/completions", {}, 405, None, None),
    "another wrong method": ("DELETE", "/v1/models", {}, 405, None, None),
    "an unknown model": ("POST", "/v1/completions", {"json": {"model": "x", "prompt": "a"}}, 404, "model", "model_not_found"),
    "no messages": ("POST", "/v1/chat/completions", {"json": {"model": "small"}}, 400, "messages", None),
    "messages of a wrong type": ("POST", "/v1/chat/completions", {"json": {"messages": "SECRET"}}, 400, "messages", None),
    "a message that is none": ("POST", "/v1/chat/completions", {"json": {"messages": ["SECRET"]}}, 400, "messages", None),
    "no prompt": ("POST", "/v1/completions", {"json": {}}, 400, "prompt", None),
    "a wrong type": ("POST", "/v1/completions", {"json": {"prompt": "a", "n": "SECRET"}}, 400, "n", None),
    "no JSON": (
        "POST",
        "/v1/completions",
        {"content": b"SECRET", "headers": {"content-type": "application/json"}},
        400,
        None,
        None,
    ),
    "a form": ("POST", "/v1/completions", {"data": {"prompt": "SECRET"}}, 415, None, None),
}


@pytest.mark.parametrize("name", CASES)
def test_every_error_has_the_one_shape_and_repeats_nothing(client: httpx.Client, name: str) -> None:
    method, path, extra, status, param, code = CASES[name]
    answer = client.request(method, path, **extra)
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/json"
    body = answer.json()
    assert list(body) == ["error"]
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert (body["error"]["param"], body["error"]["code"]) == (param, code)
    assert isinstance(body["error"]["message"], str)
    assert len(body["error"]["message"]) > 10
    assert "SECRET" not in answer.text


def test_a_wrong_method_says_which_ones_are_right(client: httpx.Client) -> None:
    assert client.get("/v1/completions").headers["allow"] == "OPTIONS, POST"
    assert client.post("/v1/models").headers["allow"] == "GET, HEAD, OPTIONS"


READABLE = ("/", "/status", "/health", "/metrics", "/version", "/docs", "/openapi.json", "/v1/models", "/tokenizer_info")


@pytest.mark.parametrize("path", READABLE)
def test_head_is_get_without_a_body(client: httpx.Client, path: str) -> None:
    head, whole = client.head(path), client.get(path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-length"] == str(len(whole.content))
    assert head.headers["content-type"] == whole.headers["content-type"]


def test_options_names_the_methods_without_a_key_and_is_no_failed_key() -> None:
    refused: list[Refused] = []
    with running(refused=refused.append, api_key=("key",)) as server, httpx.Client(base_url=server.url) as client:
        for path, methods in (("/v1/completions", "OPTIONS, POST"), ("/metrics", "GET, HEAD, OPTIONS")):
            answer = client.options(path)
            assert (answer.status_code, answer.headers["allow"], answer.content) == (204, methods, b"")
        assert refused == []
        assert client.post("/v1/completions", json={"prompt": "Hello"}).status_code == 401


def test_slashes_too_many_lead_to_the_same_path(client: httpx.Client) -> None:
    body = {"prompt": "Hello", "max_tokens": 1}
    for path in ("/v1/completions/", "//v1//completions", "/v1/completions//"):
        # Whole, because a client takes the first segment of //v1 for a host.
        assert client.post(f"{str(client.base_url).rstrip('/')}{path}", json=body).status_code == 200
    assert client.get("/metrics/").status_code == client.get("/v1/models/small/").status_code == 200


def test_what_is_not_built_counts_as_unsupported() -> None:
    refused: list[Refused] = []
    with running(refused=refused.append) as server, httpx.Client(base_url=server.url) as client:
        for extra in ({"suffix": "x"}, {"best_of": 2}, {"n_predict": 3}):
            assert client.post("/v1/completions", json={"prompt": "Hello"} | extra).status_code == 400
    assert [RequestRefused.because_of(error).reason for error in refused] == ["unsupported"] * 3


def test_every_refusal_is_told_with_its_reason_and_probes_are_none() -> None:
    refused: list[Refused] = []
    with running(refused=refused.append, api_key=("key",)) as server, httpx.Client(base_url=server.url) as client:
        client.post("/v1/completions", json={"prompt": "Hello"})
        client.headers["authorization"] = "Bearer key"
        for body in ({"prompt": "Hello"}, {"prompt": 7}, {"prompt": "a" * 600}, {"prompt": "a", "model": "x"}):
            client.post("/v1/completions", json=body)
        server.door.room = 0
        client.post("/v1/completions", json={"prompt": "Hello"})
        server.state.traffic.draining = True
        assert client.get("/health").status_code == 503
    assert [type(error) for error in refused] == [NotAuthorized, BadValue, PromptTooLong, ModelNotFound, Overloaded]


@pytest.mark.parametrize("stream", [True, False])
def test_what_nobody_foresaw_is_500_without_details(stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    def script(request: Any, choice: int) -> Any:
        raise ZeroDivisionError("in /secret/place.py")

    with running(script) as server, httpx.Client(base_url=server.url) as client:
        answer = client.post("/v1/completions", json={"prompt": "a", "stream": stream})
        assert answer.status_code == 500
        assert answer.json()["error"]["type"] == "server_error"
        assert "secret" not in answer.text
        assert "Traceback" not in answer.text
        server.door.script = FakeDoor(server.tokenizer).script
        assert client.post("/v1/completions", json={"prompt": "a", "stream": stream}).status_code == 200
    failures = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert len(failures) == 1
    assert failures[0].exc_info is not None


def test_a_stream_that_fails_for_an_unforeseen_reason_says_so_without_details() -> None:
    def script(request: Any, choice: int) -> Any:
        yield 1
        raise ZeroDivisionError("in /secret/place.py")

    with running(script) as server:
        answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "a", "stream": True})
        assert answer.status_code == 200
        assert '"type":"server_error"' in answer.text
        assert "secret" not in answer.text
        assert "[DONE]" not in answer.text


def test_every_call_has_one_line_in_the_log_with_its_status(caplog: pytest.LogCaptureFixture, server: Running) -> None:
    caplog.set_level(logging.INFO)
    httpx.post(f"{server.url}/v1/completions?secret=1", json={"prompt": "Hello"})
    httpx.get(f"{server.url}/v1/nothing%0Aforged%20line")
    httpx.get(f"{server.url}/health")
    assert server.until(lambda: len(_access_lines(caplog)) == 2)
    first, second = _access_lines(caplog)
    assert first.startswith("127.0.0.1 POST /v1/completions 200 ")
    assert second.startswith("127.0.0.1 GET /v1/nothing%0Aforged%20line 404 ")


def _access_lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "kveik.access"]


def all_errors(base: type[KveikError] = KveikError) -> list[type[KveikError]]:
    return [base, *(found for child in base.__subclasses__() for found in all_errors(child))]


@pytest.mark.parametrize("kind", all_errors(), ids=lambda kind: kind.__name__)
def test_every_error_of_the_tree_has_a_type_that_fits_its_status(kind: type[KveikError]) -> None:
    error = kind.__new__(kind)
    Exception.__init__(error, "what went wrong")
    shape = envelope(error)["error"]
    assert isinstance(shape, dict)
    assert shape["message"] == "what went wrong"
    assert (shape["type"] == "server_error") == issubclass(kind, Broken) or kind is KveikError


def test_a_time_to_come_back_is_at_least_a_second() -> None:
    assert error_response(Overloaded("full", retry_after=0)).headers["retry-after"] == "1"
    assert error_response(Overloaded("stopping", retry_after=30, status=503)).status_code == 503


def test_hundreds_of_calls_at_once_are_all_answered_or_told_to_come_back() -> None:
    with running(step_seconds=0.001) as server:
        server.door.room = 150

        async def ask_all() -> list[httpx.Response]:

            async with httpx.AsyncClient(base_url=server.url, timeout=30, limits=httpx.Limits(max_connections=200)) as client:
                asks = [client.post("/v1/completions", json={"prompt": "Hello", "max_tokens": 4}) for _ in range(200)]
                return await asyncio.gather(*asks)

        statuses = [answer.status_code for answer in asyncio.run(ask_all())]
        assert statuses.count(200) == 150
        assert statuses.count(429) == 50
        assert server.state.traffic.calls == 0
