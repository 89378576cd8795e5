"""Completions and chats over HTTP, whole and streamed: both say the same."""

from __future__ import annotations

import itertools
import json
import random
import threading
from typing import Any

import httpx
import pytest

from kveik.errors import NonFiniteLogits
from kveik.text.tokenizer import Tokenizer
from tests.seeds import over_seeds
from tests.server.fakes import Running, exactly, make_tokenizer, running

TOKENIZER = make_tokenizer()
END = TOKENIZER.special_id("<end>")
TURN = TOKENIZER.special_id("<|im_end|>")
assert END is not None
assert TURN is not None
PATHS = ("/v1/completions", "/v1/chat/completions")


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special=False)


def body_for(path: str, **fields: Any) -> dict[str, Any]:
    ask = {"prompt": "Hello"} if path == PATHS[0] else {"messages": [{"role": "user", "content": "Hello"}]}
    return ask | {"model": "small"} | fields


def chunks_of(answer: httpx.Response) -> list[dict[str, Any]]:
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    events = [line for line in answer.text.split("\n\n") if line]
    assert all(event.startswith("data: ") for event in events)
    assert events[-1] == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in events[:-1]]


def texts_of(chunks: list[dict[str, Any]]) -> dict[int, str]:
    texts: dict[int, str] = {}
    for choice in itertools.chain.from_iterable(chunk["choices"] for chunk in chunks):
        new = choice["text"] if "text" in choice else choice["delta"].get("content", "")
        texts[choice["index"]] = texts.get(choice["index"], "") + new
    return texts


def endings_of(chunks: list[dict[str, Any]]) -> dict[int, tuple[str, object]]:
    """Finish and stop reason per choice, with the promise that nothing comes after them."""
    endings: dict[int, tuple[str, object]] = {}
    for choice in itertools.chain.from_iterable(chunk["choices"] for chunk in chunks):
        assert choice["index"] not in endings
        if choice["finish_reason"] is not None:
            endings[choice["index"]] = (choice["finish_reason"], choice["stop_reason"])
    return endings


def both_ways(client: httpx.Client, path: str, **fields: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    whole = client.post(path, json=body_for(path, **fields))
    assert whole.status_code == 200, whole.text
    options = {"stream": True, "stream_options": {"include_usage": True}}
    return whole.json(), chunks_of(client.post(path, json=body_for(path, **fields) | options))


def test_a_completion_has_openais_shape(client: httpx.Client) -> None:
    answer = client.post("/v1/completions", json={"prompt": "Hello", "max_tokens": 4, "temperature": 0}).json()
    assert answer["object"] == "text_completion"
    assert answer["id"].startswith("cmpl-")
    assert (answer["model"], answer["system_fingerprint"]) == ("small", "fp_test")
    choice = {"index": 0, "text": "Hello world. the", "logprobs": None, "finish_reason": "length", "stop_reason": None}
    assert answer["choices"] == [choice]
    details = {"cached_tokens": 0}
    usage = {"prompt_tokens": 2, "completion_tokens": 4, "total_tokens": 6, "prompt_tokens_details": details}
    assert answer["usage"] == usage


def test_a_chat_has_openais_shape(client: httpx.Client) -> None:
    answer = client.post("/v1/chat/completions", json=body_for(PATHS[1], max_tokens=2, model="org/small")).json()
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    assert answer["model"] == "org/small"
    message = {"role": "assistant", "content": "Hello world", "refusal": None}
    ending = {"finish_reason": "length", "stop_reason": None}
    assert answer["choices"] == [{"index": 0, "message": message, "logprobs": None, **ending}]


def test_the_first_chunk_of_every_choice_of_a_chat_has_its_role(client: httpx.Client) -> None:
    chunks = chunks_of(client.post(PATHS[1], json=body_for(PATHS[1], n=3, max_tokens=3, stream=True)))
    seen: set[int] = set()
    for chunk in chunks:
        assert chunk["object"] == "chat.completion.chunk"
        for choice in chunk["choices"]:
            assert ("role" in choice["delta"]) == (choice["index"] not in seen)
            seen.add(choice["index"])
    assert seen == {0, 1, 2}


@pytest.mark.parametrize("path", PATHS)
def test_usage_of_a_stream_equals_that_of_the_whole(client: httpx.Client, path: str) -> None:
    whole, chunks = both_ways(client, path, n=3, max_tokens=5)
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == whole["usage"]
    assert whole["usage"]["completion_tokens"] == 15
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert {chunk["id"] for chunk in chunks} == {chunks[0]["id"]}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "options", [{}, {"stream_options": None}, {"stream_options": {}}, {"stream_options": {"include_usage": False}}]
)
def test_nobody_gets_usage_that_nobody_asked_for(client: httpx.Client, path: str, options: dict[str, Any]) -> None:
    chunks = chunks_of(client.post(path, json=body_for(path, stream=True, max_tokens=3, **options)))
    assert all("usage" not in chunk and chunk["choices"] for chunk in chunks)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, None])
def test_stream_options_without_a_stream_are_refused(client: httpx.Client, path: str, stream: bool | None) -> None:
    answer = client.post(path, json=body_for(path, stream=stream, stream_options={"include_usage": True}))
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "stream_options"


def test_tokens_found_in_the_cache_are_told(client: httpx.Client, server: Running) -> None:
    server.door.cached_tokens = 1
    whole, chunks = both_ways(client, PATHS[0], max_tokens=2)
    server.door.cached_tokens = 0
    assert whole["usage"]["prompt_tokens_details"] == {"cached_tokens": 1} == chunks[-1]["usage"]["prompt_tokens_details"]


ENDINGS = {
    "its end token": ([*ids("Hello"), END], {}, "Hello", ("stop", None)),
    "a stop string": ([*ids("Hello"), *ids("DEF"), *ids(" world")], {"stop": "E"}, "HelloD", ("stop", "E")),
    "a stop string, kept": (ids("HelloDEF"), {"stop": "E", "include_stop_str_in_output": True}, "HelloDE", ("stop", "E")),
    "a stop token": ([*ids("Hello"), *ids(" 42")], {"stop_token_ids": ids(" 42")}, "Hello", ("stop", ids(" 42")[0])),
    "a special token given as text": ([*ids("Hello"), TURN], {"stop": "<|im_end|>"}, "Hello", ("stop", "<|im_end|>")),
    "max_tokens": (ids("Hello world Hello"), {"max_tokens": 2}, "Hello world", ("length", None)),
    "max_tokens inside a character": (ids("Hello\U0001f336"), {"max_tokens": 3}, "Hello\ufffd", ("length", None)),
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", ENDINGS)
def test_a_choice_ends_the_same_way_whole_and_streamed(path: str, name: str) -> None:
    script, fields, text, ending = ENDINGS[name]
    with running(exactly(script)) as server, httpx.Client(base_url=server.url) as client:
        whole, chunks = both_ways(client, path, **fields)
    choice = whole["choices"][0]
    assert (choice.get("text") or choice["message"]["content"]) == text == texts_of(chunks)[0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ending == endings_of(chunks)[0]


@over_seeds(6)
def test_streamed_text_joined_is_the_text_of_the_whole(seed: int) -> None:
    chance = random.Random(seed)
    pieces = [*ids("é\U0001f336Hello world the DEFGHI 42"), END, TURN, 0, 255]
    lines = [[chance.choice(pieces) for _ in range(30)] for _ in range(8)]

    def script(request: Any, choice: int) -> Any:
        return iter(lines[(len(request.prompt) + choice) % len(lines)])

    with running(script) as server, httpx.Client(base_url=server.url) as client:
        for _ in range(8):
            fields = {
                "n": chance.choice([1, 3]),
                "max_tokens": chance.choice([1, 7, 40]),
                "stop": chance.sample(["DEFG", "o w", "é", "the"], chance.randrange(3)),
                "ignore_eos": chance.random() < 0.5,
                "skip_special_tokens": chance.random() < 0.5,
                "include_stop_str_in_output": chance.random() < 0.5,
                "min_tokens": chance.choice([0, 1]),
            }
            for path in PATHS:
                prompts = {"prompt": ["a", "bc", "def"]} if path == PATHS[0] else {}
                whole, chunks = both_ways(client, path, **fields, **prompts)
                written = {c["index"]: c.get("text", c.get("message", {}).get("content")) for c in whole["choices"]}
                assert texts_of(chunks) | dict.fromkeys(written.keys() - texts_of(chunks).keys(), "") == written
                assert endings_of(chunks) == {c["index"]: (c["finish_reason"], c["stop_reason"]) for c in whole["choices"]}
                assert chunks[-1]["usage"] == whole["usage"]


def test_several_prompts_answer_in_the_order_of_prompt_and_choice(client: httpx.Client) -> None:
    body = {"prompt": ["Hello", " world", "."], "n": 2, "max_tokens": 2, "echo": True}
    answer = client.post("/v1/completions", json=body).json()
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    starts = [choice["text"].removesuffix("Hello world") for choice in answer["choices"]]
    assert starts == ["Hello", "Hello", " world", " world", ".", "."]
    assert answer["usage"]["prompt_tokens"] == 6


@pytest.mark.parametrize("prompt", ["Hello", ids("Hello")])
def test_an_echo_starts_with_the_prompt_and_its_logprobs(client: httpx.Client, prompt: object) -> None:
    whole, chunks = both_ways(client, PATHS[0], prompt=prompt, echo=True, logprobs=2, max_tokens=2)
    choice = whole["choices"][0]
    assert choice["text"] == "HelloHello world" == texts_of(chunks)[0]
    logprobs = choice["logprobs"]
    start = ["<s>"] if isinstance(prompt, str) else []
    assert logprobs["tokens"] == [*start, "Hello", "Hello", " world"]
    assert logprobs["token_logprobs"][0] is None
    assert all(value is not None for value in logprobs["token_logprobs"][1:])
    assert logprobs["text_offset"] == [*([0] if start else []), 0, 5, 10]
    streamed = [c["logprobs"] for chunk in chunks for c in chunk["choices"]]
    for key in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
        assert list(itertools.chain.from_iterable(part[key] for part in streamed)) == logprobs[key]


def test_a_character_that_begins_in_the_prompt_and_ends_in_the_output_is_told_once() -> None:
    pepper = ids("\U0001f336")
    assert len(pepper) == 4
    with running(exactly([*pepper[2:], *ids("Hello")])) as server, httpx.Client(base_url=server.url) as client:
        fields = {"prompt": [*ids("Hello"), *pepper[:2]], "max_tokens": 3}
        for echo, text in ((False, "\U0001f336Hello"), (True, "Hello\U0001f336Hello")):
            whole, chunks = both_ways(client, PATHS[0], echo=echo, **fields)
            assert whole["choices"][0]["text"] == text == texts_of(chunks)[0]


@pytest.mark.parametrize(("skip", "start"), [(True, "Hello"), (False, "<s>Hello")])
def test_an_echo_of_ids_shows_special_tokens_as_the_output_does(client: httpx.Client, skip: bool, start: str) -> None:
    fields = {"prompt": TOKENIZER.encode("Hello"), "max_tokens": 1, "echo": True, "skip_special_tokens": skip, "logprobs": 0}
    choice = client.post(PATHS[0], json=fields).json()["choices"][0]
    assert choice["text"] == start + "Hello"
    assert choice["logprobs"]["text_offset"][-1] == len(start)


def test_an_echo_without_new_tokens_scores_the_prompt_alone(client: httpx.Client) -> None:
    whole, chunks = both_ways(client, PATHS[0], echo=True, logprobs=1, max_tokens=0)
    choice = whole["choices"][0]
    assert choice["text"] == "Hello" == texts_of(chunks)[0]
    assert choice["logprobs"]["tokens"] == ["<s>", "Hello"]
    assert whole["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize("skip", [True, False])
def test_logprobs_are_one_per_token_and_strict_json(client: httpx.Client, skip: bool) -> None:
    answer = client.post(PATHS[0], json=body_for(PATHS[0], logprobs=3, max_tokens=4, top_k=1, skip_special_tokens=skip))
    logprobs = json.loads(answer.text, parse_constant=lambda name: pytest.fail(name))["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["Hello", " world", ".", " the"]
    assert logprobs["token_logprobs"] == [-0.25] * 4
    assert all(text in top for text, top in zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True))
    assert -9999.0 in logprobs["top_logprobs"][0].values()


def test_chat_logprobs_are_the_same_whole_and_streamed(client: httpx.Client) -> None:
    whole, chunks = both_ways(client, PATHS[1], logprobs=True, top_logprobs=2, max_tokens=4)
    content = whole["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == ["Hello", " world", ".", " the"]
    assert all(len(entry["top_logprobs"]) == 2 for entry in content)
    streamed = [c["logprobs"]["content"] for chunk in chunks for c in chunk["choices"] if c["logprobs"]]
    assert list(itertools.chain.from_iterable(streamed)) == content


@pytest.mark.parametrize("path", PATHS)
def test_prompt_logprobs_come_in_vllms_form(client: httpx.Client, path: str) -> None:
    answer = client.post(path, json=body_for(path, prompt_logprobs=1, max_tokens=1)).json()
    entries = (answer["choices"][0] if path == PATHS[0] else answer)["prompt_logprobs"]
    assert len(entries) == answer["usage"]["prompt_tokens"]
    assert entries[0] is None
    assert all(len(entry) in (1, 2) for entry in entries[1:])


@pytest.mark.parametrize("path", PATHS)
def test_a_choice_that_fails_is_500_whole_and_an_error_event_streamed(path: str) -> None:
    with running(exactly([*ids("Hello"), NonFiniteLogits()])) as server, httpx.Client(base_url=server.url) as client:
        whole = client.post(path, json=body_for(path))
        assert whole.status_code == 500
        error = whole.json()["error"]
        assert (error["type"], error["code"]) == ("server_error", "non_finite_logits")
        assert "not finite" in error["message"]
        streamed = client.post(path, json=body_for(path, stream=True))
        assert streamed.status_code == 200
        events = [json.loads(line.removeprefix("data: ")) for line in streamed.text.split("\n\n") if line]
        assert events[-1] == whole.json()
        assert texts_of(events[:-1]) == {0: "Hello"}
        assert endings_of(events[:-1]) == {}
        assert "[DONE]" not in streamed.text
        assert server.until(lambda: server.state.traffic.calls == 0)


def test_a_failing_prompt_ends_the_others_of_its_call() -> None:
    def script(request: Any, choice: int) -> Any:
        return iter([NonFiniteLogits()]) if request.id.endswith("-1") else itertools.cycle(ids("Hello"))

    with running(script, step_seconds=0.01) as server, httpx.Client(base_url=server.url) as client:
        answer = client.post(PATHS[0], json={"prompt": ["a", "b", "c"], "max_tokens": 400})
        assert answer.status_code == 500
        assert server.until(lambda: len(server.door.aborted) == 3)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [True, False])
def test_a_full_queue_is_429_with_a_time_to_come_back(path: str, stream: bool) -> None:
    with running() as server:
        server.door.room = 0
        answer = httpx.post(server.url + path, json=body_for(path, stream=stream))
        assert answer.status_code == 429
        assert answer.headers["retry-after"] == "7"
        assert answer.json()["error"]["type"] == "rate_limit_error"


def test_a_call_is_queued_as_a_whole_or_not_at_all() -> None:
    with running() as server:
        server.door.room = 2
        answer = httpx.post(server.url + PATHS[0], json={"prompt": ["a", "b", "c"]})
        assert answer.status_code == 429
        assert server.door.streams == [], "it is judged before its first prompt is queued"


@pytest.mark.parametrize("path", PATHS)
def test_continuous_usage_stats_put_the_usage_so_far_into_every_chunk(client: httpx.Client, path: str) -> None:
    ask = {"max_tokens": 5, "stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    body = ask | ({"prompt": "Hello"} if path == PATHS[0] else {"messages": [{"role": "user", "content": "Hello"}]})
    lines = client.post(path, json=body).text.split("\n\n")
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 5
    assert len(set(counts)) > 2
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {chunks[-1]["usage"]["prompt_tokens"]}


@pytest.mark.parametrize("stream", [True, False])
def test_the_status_of_a_prompt_too_long_is_decided_before_the_stream(
    client: httpx.Client, server: Running, stream: bool
) -> None:
    submitted = len(server.door.streams)
    answer = client.post(PATHS[0], json={"prompt": "a" * 600, "max_tokens": 1, "stream": stream})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
    assert "512" in error["message"]
    assert "601" in error["message"]
    assert len(server.door.streams) == submitted


def test_long_text_is_worked_on_in_a_thread_and_probes_are_answered_meanwhile(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, probed = threading.Event(), threading.Event()
    least_tokens = Tokenizer.least_tokens

    def waiting(tokenizer: Tokenizer, text: str) -> int:
        begun.set()
        assert probed.wait(30), "the probe was not answered while the text was being worked on"
        return least_tokens(tokenizer, text)

    monkeypatch.setattr(Tokenizer, "least_tokens", waiting)
    answers: list[httpx.Response] = []
    body = {"messages": [{"role": "user", "content": "a b " * 200_000}]}
    asking = threading.Thread(target=lambda: answers.append(httpx.post(server.url + PATHS[1], json=body, timeout=60)))
    asking.start()
    assert begun.wait(30)
    assert httpx.get(server.url + "/health", timeout=20).status_code == 200
    probed.set()
    asking.join()
    assert answers[0].json()["error"]["code"] == "context_length_exceeded"


def test_a_model_without_template_still_completes() -> None:
    with running(template=False) as server, httpx.Client(base_url=server.url) as client:
        refused = client.post(PATHS[1], json=body_for(PATHS[1]))
        assert refused.status_code == 400
        assert "--chat-template" in refused.json()["error"]["message"]
        assert client.post(PATHS[0], json=body_for(PATHS[0])).status_code == 200
        assert client.get("/v1/models").status_code == 200
        assert client.get("/health").status_code == 200


def test_an_aborted_choice_says_so_whole_and_streamed() -> None:
    with running(step_seconds=0.01) as server, httpx.Client(base_url=server.url) as client:
        for stream in (False, True):

            def cut(server: Running = server) -> None:
                server.until(lambda: bool(server.door.streams) and server.door.streams[-1].read_tokens > 2)
                server.door.streams[-1].abort()

            server.door.streams.clear()
            cutter = threading.Thread(target=cut)
            cutter.start()
            answer = client.post(PATHS[0], json=body_for(PATHS[0], max_tokens=400, stream=stream))
            cutter.join()
            assert answer.status_code == 200
            reason = endings_of(chunks_of(answer))[0][0] if stream else answer.json()["choices"][0]["finish_reason"]
            assert reason == "abort"
