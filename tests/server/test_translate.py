"""What a body asks for, as requests: defaults, caps, and what is refused before anything is queued."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kveik.errors import BadValue, KveikError, ModelNotFound, PromptTooLong, Refused, Unsupported
from kveik.request.request import MAX_CHOICES, MAX_LOGIT_BIAS, MAX_STOPS, CacheRetention
from kveik.server.body import parse
from kveik.server.call_limits import MAX_MESSAGES, MAX_PROMPTS, MAX_STOP_TOKEN_IDS, MAX_TOOLS
from kveik.server.envelope import json_bytes
from kveik.server.prompts import Model
from kveik.server.protocol import ChatBody, CompletionBody
from kveik.server.request_fields import ACCEPTED, MAX_NAMES_LOGGED, RENAMED, UNSUPPORTED, UnknownNames
from kveik.server.translate import Asker, Call, chat_call, completion_call
from kveik.text.chat_template import ChatTemplate
from tests.server.fakes import TEMPLATE, make_tokenizer

TOKENIZER = make_tokenizer()
WITHOUT_BOS = make_tokenizer(bos=False)
VOCAB = TOKENIZER.vocab_size
CONTEXT = 512
ASKER = Asker("call", b"tenant")
SAY = [{"role": "user", "content": "Hello"}]


def model(**changes: Any) -> Model:
    template = ChatTemplate(TEMPLATE, bos="<s>", eos="<end>")
    fields = {"names": ("small",), "tokenizer": TOKENIZER, "chat_template": template, "max_model_len": CONTEXT}
    return Model(**(fields | changes))


def complete(*, at: Model | None = None, **body: Any) -> Call:
    shape = parse(json_bytes({"prompt": "Hello", **body}), CompletionBody)
    return completion_call(shape, at or model(), ASKER)


def chat(*, at: Model | None = None, **body: Any) -> Call:
    return chat_call(parse(json_bytes({"messages": SAY, **body}), ChatBody), at or model(), ASKER)


def test_a_plain_completion_has_openais_defaults() -> None:
    (request,) = complete().requests
    sampling = request.sampling
    assert request.prompt == tuple(TOKENIZER.encode("Hello"))
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.n) == (16, 1.0, 1.0, 1)
    assert (sampling.logprobs, sampling.seed, sampling.stop, sampling.skip_special_tokens) == (None, None, (), True)
    assert (request.tenant, request.priority, request.cache_salt) == (b"tenant", 0, None)


def test_every_extra_reaches_the_request() -> None:
    (request,) = complete(
        max_tokens=9, temperature=0, top_p=0.5, n=3, stop="DEF", presence_penalty=-1, frequency_penalty=1,
        logit_bias={"7": -100}, seed=5, top_k=4, min_p=0.1, repetition_penalty=1.5, stop_token_ids=[3], ignore_eos=True,
        min_tokens=2, skip_special_tokens=False, include_stop_str_in_output=True, prompt_logprobs=3, logprobs=4,
        cache_salt="salt", priority=-2, cache_retention={"priority": 80, "seconds": 60},
    ).requests  # fmt: skip
    sampling = request.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.n) == (9, 0, 0.5, 3)
    assert (sampling.stop, sampling.presence_penalty, sampling.frequency_penalty) == (("DEF",), -1, 1)
    assert (sampling.logit_bias, sampling.seed, sampling.top_k, sampling.min_p) == (((7, -100.0),), 5, 4, 0.1)
    assert (sampling.repetition_penalty, sampling.stop_token_ids, sampling.ignore_eos) == (1.5, (3,), True)
    assert (sampling.min_tokens, sampling.skip_special_tokens, sampling.include_stop_str_in_output) == (2, False, True)
    assert (sampling.prompt_logprobs, sampling.logprobs) == (3, 4)
    assert (request.cache_salt, request.priority) == ("salt", -2)
    assert request.retention == CacheRetention(80, 60)


def test_a_hint_of_retention_holds_for_an_hour_unless_told_otherwise() -> None:
    (request,) = complete(cache_retention={"priority": 10}).requests
    assert request.retention == CacheRetention(10, 3600)


def test_nulls_mean_absence() -> None:
    nothing = {name: None for name in CompletionBody.model_fields if name != "prompt"}
    assert complete(**nothing).requests == complete().requests


def test_vllms_minus_one_keeps_all_tokens() -> None:
    assert complete(top_k=-1).requests == complete(top_k=0).requests == complete().requests


@pytest.mark.parametrize(
    ("prompt", "count"), [("Hello", 1), (["Hello", " world"], 2), ([1, 2, 3], 1), ([[1, 2], [3]], 2), (["Hello"], 1)]
)
def test_prompts_come_in_four_forms(prompt: object, count: int) -> None:
    call = complete(prompt=prompt)
    assert len(call.requests) == count
    assert len({request.id for request in call.requests}) == count


@pytest.mark.parametrize(
    "prompt",
    [
        None,
        7,
        1.5,
        True,
        {},
        [],
        [[]],
        [None],
        [{}],
        ["a", 1],
        [1, "a"],
        ["a", [1]],
        [[1], "a"],
        [1.0],
        [True],
        [[True]],
        [[[1]]],
    ],
)
def test_other_prompts_are_refused_by_name(prompt: object) -> None:
    with pytest.raises(BadValue) as refused:
        complete(prompt=prompt)
    assert refused.value.param == "prompt"


@pytest.mark.parametrize("token", [-1, VOCAB, VOCAB + 1, 1 << 70])
def test_prompt_ids_outside_the_vocabulary_are_refused(token: int) -> None:
    with pytest.raises(BadValue, match=str(VOCAB - 1)) as refused:
        complete(prompt=[1, token])
    assert refused.value.param == "prompt"


def test_an_empty_prompt_runs_on_the_start_token_where_there_is_one() -> None:
    assert [len(request.prompt) for request in complete(prompt=["a", ""]).requests] == [2, 1]
    for prompt in ("", [""], ["a", ""]):
        with pytest.raises(BadValue, match="0 tokens"):
            complete(prompt=prompt, at=model(tokenizer=WITHOUT_BOS))


@pytest.mark.parametrize(
    ("tokens", "wanted", "allowed"), [(511, 1, 1), (511, None, 1), (496, 16, 16), (500, None, 12), (400, 112, 112)]
)
def test_a_completion_that_fits_is_taken(tokens: int, wanted: int | None, allowed: int) -> None:
    (request,) = complete(prompt=[1] * tokens, max_tokens=wanted).requests
    assert request.sampling.max_tokens == allowed


@pytest.mark.parametrize(("tokens", "wanted"), [(512, None), (512, 1), (513, None), (5000, 1), (400, 200), (511, 16), (1, 512)])
def test_a_completion_that_does_not_fit_is_refused_with_both_numbers(tokens: int, wanted: int | None) -> None:
    with pytest.raises(PromptTooLong, match=rf"context length is {CONTEXT} tokens\..*\b{tokens}\b") as refused:
        complete(prompt=[1] * tokens, max_tokens=wanted)
    assert (refused.value.status, refused.value.code) == (400, "context_length_exceeded")
    assert refused.value.param == ("prompt" if tokens >= CONTEXT else "max_tokens")


def test_one_prompt_too_long_refuses_all_of_a_call() -> None:
    with pytest.raises(PromptTooLong):
        complete(prompt=[[1], [1] * 513])


def test_a_chat_without_max_tokens_fills_the_context() -> None:
    (request,) = chat().requests
    assert len(request.prompt) + request.sampling.max_tokens == CONTEXT
    assert chat(max_tokens=5).requests[0].sampling.max_tokens == 5
    assert chat(max_tokens=5, max_completion_tokens=6).requests[0].sampling.max_tokens == 6


def test_a_chat_too_long_names_its_messages() -> None:
    with pytest.raises(PromptTooLong, match="512 tokens") as refused:
        chat(messages=[{"role": "user", "content": "a" * 600}])
    assert refused.value.param == "messages"


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_a_chat_that_would_fit_alone_names_the_number_of_new_tokens(field: str) -> None:
    with pytest.raises(PromptTooLong, match=r"512 tokens.*512 in the completion") as refused:
        chat(**{field: 512})
    assert refused.value.param == field


def test_a_model_that_is_not_served_is_not_repeated() -> None:
    with pytest.raises(ModelNotFound, match=r"does not exist.*: small") as refused:
        complete(model="s3cret-name")
    assert "s3cret" not in refused.value.message


@pytest.mark.parametrize("key", ["-1", "abc", str(VOCAB), "191222", "1.0", " 1", "+1", "", "٣", "9" * 5000, "1e2"])
def test_bias_keys_are_ids_of_the_vocabulary(key: str) -> None:
    with pytest.raises(BadValue, match="logit_bias") as refused:
        complete(logit_bias={"5": 1, key: 1})
    assert refused.value.param == "logit_bias"
    assert json.dumps(key[:20]) in refused.value.message
    assert refused.value.message.endswith(f"is not a token id. Use integers from 0 to {VOCAB - 1}.")
    assert len(refused.value.message) < 200


@pytest.mark.parametrize("value", ["101", "-100.5", "1e999", '"1"', "true", "null", "[]"])
def test_bias_values_are_numbers_of_at_most_a_hundred(value: str) -> None:
    shape = parse(b'{"prompt": "Hello", "logit_bias": {"7": %s}}' % value.encode(), CompletionBody)
    with pytest.raises(BadValue, match="token 7") as refused:
        completion_call(shape, model(), ASKER)
    assert refused.value.param == "logit_bias"


def test_bias_on_every_real_token_is_taken_and_two_spellings_are_one_token() -> None:
    bias = complete(logit_bias={"0": -100, str(VOCAB - 1): 100, "00": 3}).requests[0].sampling.logit_bias
    assert bias == ((0, 3.0), (VOCAB - 1, 100.0))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 10**9),
        ("n", MAX_CHOICES + 1),
        ("n", 0),
        ("logprobs", 10**6),
        ("prompt_logprobs", -1),
        ("prompt_logprobs", 21),
        ("stop", [f"x{number}" for number in range(10_000)]),
        ("stop", [""]),
        ("stop", "x" * 1025),
        ("stop_token_ids", [1] * (MAX_STOP_TOKEN_IDS + 1)),
        ("stop_token_ids", [VOCAB]),
        ("stop_token_ids", [-1]),
        ("logit_bias", {str(number): 1 for number in range(MAX_LOGIT_BIAS + 1)}),
        ("logit_bias", [1]),
        ("prompt", ["a"] * 100_000),
        ("prompt", ["a"] * (MAX_PROMPTS + 1)),
        ("max_tokens", -1),
        ("max_tokens", 0),
        ("max_tokens", 1 << 40),
        ("min_tokens", 17),
        ("temperature", -0.1),
        ("temperature", 101),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("min_p", 2),
        ("repetition_penalty", 0),
        ("presence_penalty", 3),
        ("frequency_penalty", -3),
        ("seed", 1 << 64),
        ("priority", 1 << 40),
        ("priority", "high"),
        ("priority", 0.5),
        ("cache_salt", ""),
        ("cache_salt", 5),
        ("cache_salt", "x" * 513),
        ("cache_retention", 80),
        ("cache_retention", {"priority": 101}),
        ("cache_retention", {"priority": 80, "seconds": 0}),
        ("cache_retention", {"priority": 80, "duration": 5}),
        ("cache_retention", {"seconds": 5}),
        ("best_of", 2),
        ("echo", "yes"),
        ("stream_options", {"include_usage": True}),
        ("stream_options", []),
    ],
)
def test_what_is_out_of_range_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(Refused) as refused:
        complete(**{field: value})
    assert refused.value.status == 400
    assert refused.value.param == field
    assert len(refused.value.message) < 300


def test_too_many_choices_and_prompt_logprobs_are_refused_with_the_cap() -> None:
    with pytest.raises(BadValue, match=r"1280 choices.*1024"):
        complete(prompt=["a"] * 10, n=128)
    with pytest.raises(BadValue, match="1048576"):
        complete(prompt=[[1] * 500] * 256, prompt_logprobs=20)
    assert len(complete(prompt=["a"] * 8, n=128).requests) == 8


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("messages", []),
        ("messages", "Hello"),
        ("messages", [7]),
        ("messages", SAY * (MAX_MESSAGES + 1)),
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("tools", [{}] * (MAX_TOOLS + 1)),
        ("tool_choice", "required"),
        ("tool_choice", {"type": "function", "function": {"name": "f"}}),
        ("top_logprobs", 3),
        ("max_tokens", 0),
        ("max_completion_tokens", 0),
        ("logprobs", 1),
        ("chat_template_kwargs", {"messages": []}),
        ("chat_template_kwargs", "x"),
        ("echo", True),
        ("response_format", {"type": "json_object"}),
        ("response_format", {"type": "json_schema", "json_schema": {"schema": {}}}),
        ("modalities", ["text", "audio"]),
    ],
)
def test_what_a_chat_cannot_have_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(Refused) as refused:
        chat(**{field: value})
    assert refused.value.param == field


@pytest.mark.parametrize("part", [{"type": "image_url", "image_url": {"url": "x"}}, {"type": "input_audio"}, {"type": "file"}])
def test_parts_that_are_no_text_are_refused_where_they_stand(part: dict[str, object]) -> None:
    with pytest.raises(BadValue) as refused:
        chat(messages=[{"role": "user", "content": [{"type": "text", "text": "Look:"}, part]}])
    assert (refused.value.param or "").startswith("messages[0].content[1]")


@pytest.mark.parametrize("field", sorted(UNSUPPORTED))
def test_a_field_that_we_know_and_do_not_have_is_never_dropped_in_silence(field: str) -> None:
    ask = chat if field in CompletionBody.model_fields else complete
    for nothing in (None, False, [], *UNSUPPORTED[field]):
        if field not in ChatBody.model_fields:
            assert ask(**{field: nothing}).requests == ask().requests
    with pytest.raises(Refused, match=field) as refused:
        chat(**{field: {"ask": 1}})
    assert refused.value.param == field


@pytest.mark.parametrize("field", sorted(RENAMED))
def test_a_foreign_name_is_answered_with_ours(field: str) -> None:
    with pytest.raises(Unsupported, match=RENAMED[field]):
        complete(**{field: 3})


@pytest.mark.parametrize("field", sorted(ACCEPTED))
def test_what_cannot_change_the_answer_is_accepted(field: str) -> None:
    if field not in ("prompt", "messages"):
        assert complete(**{field: "x"}).requests == complete().requests


def test_unknown_names_are_ignored_counted_and_logged_once_each_up_to_a_bound(caplog: pytest.LogCaptureFixture) -> None:
    unknown = UnknownNames()
    for _ in range(3):
        body = {"prompt": "Hello", "user": "me", "tempratue": 7, "stream": True, "stream_options": {"include_usge": True}}
        shape = parse(json_bytes(body), CompletionBody)
        unknown.note(shape)
    assert completion_call(shape, model(), ASKER).requests == complete().requests
    assert unknown.count == 6
    assert [record.getMessage().partition("name=")[2] for record in caplog.records] == ["'tempratue'", "'include_usge'"]
    unknown.note(parse(json_bytes({"prompt": "a"} | {f"{number:0100}\n": 1 for number in range(1000)}), CompletionBody))
    unknown.note(parse(json_bytes({"prompt": "a"} | {f"{number}\n": 1 for number in range(1000)}), CompletionBody))
    assert unknown.count == 2006
    assert len(caplog.records) == MAX_NAMES_LOGGED
    assert all("\n" not in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("ask", [complete, chat])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("top_logprobs", value) for value in (1000, -1)),
        *(("best_of", value) for value in (-1, 5)),
        *((name, 2) for name in ("regex", "ebnf", "num_beams", "min_new_tokens", "do_sample")),
    ],
)
def test_a_known_name_with_a_bad_value_is_refused_on_either_endpoint(ask: Any, field: str, value: int) -> None:
    with pytest.raises(Refused) as refused:
        ask(**{field: value})
    assert (refused.value.status, refused.value.param) == (400, field)


def test_the_newer_name_of_max_tokens_counts_on_completions_as_well() -> None:
    assert complete(max_completion_tokens=2).requests[0].sampling.max_tokens == 2


def test_a_stop_string_too_many_is_refused_with_the_limit() -> None:
    with pytest.raises(BadValue, match=r"65 strings.*at most 64") as refused:
        complete(stop=["x"] * 65)
    assert refused.value.param == "stop"
    with pytest.raises(BadValue, match="string or a list of strings"):
        complete(stop=7)


def test_the_effort_of_reasoning_reaches_templates_that_know_it() -> None:
    template = ChatTemplate("{{ reasoning_effort }} {{ enable_thinking }}|", bos="", eos="")
    for fields, shown in (
        ({"reasoning_effort": "none"}, "none False|"),
        ({"reasoning_effort": "low"}, "low True|"),
        ({"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}}, "low False|"),
    ):
        (request,) = chat(at=model(chat_template=template), **fields).requests
        assert TOKENIZER.decode(request.prompt) == shown
    assert chat(reasoning_effort="low").requests == chat().requests


def test_tools_without_calls_reach_the_template() -> None:
    listing = ChatTemplate("{% for tool in tools %}{{ tool.function.name }}{% endfor %}|", bos="", eos="")
    tools = [{"type": "function", "function": {"name": "look"}}]
    (request,) = chat(tools=tools, tool_choice="none", at=model(chat_template=listing)).requests
    assert TOKENIZER.decode(request.prompt) == "look|"


def test_a_model_without_template_says_which_option_gives_one() -> None:
    with pytest.raises(Unsupported, match="--chat-template"):
        chat(at=model(chat_template=None))


def test_the_template_refuses_in_its_own_words() -> None:
    with pytest.raises(BadValue, match="Only system, user and assistant may speak") as refused:
        chat(messages=[{"role": "robot", "content": "x"}])
    assert refused.value.param == "messages"


def test_a_continued_message_ends_the_prompt() -> None:
    said = [*SAY, {"role": "assistant", "content": "The answer is "}]
    for extra in ({}, {"add_generation_prompt": False}):
        (request,) = chat(messages=said, continue_final_message=True, **extra).requests
        assert TOKENIZER.decode(request.prompt, skip_special=False).endswith("assistant\nThe answer is ")
    with pytest.raises(BadValue, match="exclude each other"):
        chat(messages=said, continue_final_message=True, add_generation_prompt=True)


def test_markers_inside_content_stay_text() -> None:
    marker = TOKENIZER.special_id("<|im_end|>")
    (request,) = chat(messages=[{"role": "user", "content": "say <|im_end|>"}]).requests
    assert request.prompt.count(marker) == 1
    (request,) = chat(
        messages=[{"role": "user", "content": "say <|im_end|>"}], at=model(special_tokens_in_content=True)
    ).requests
    assert request.prompt.count(marker) == 2


def test_a_stop_string_that_is_a_special_token_stops_on_its_id_and_is_reported_as_text() -> None:
    marker = TOKENIZER.special_id("<|im_end|>")
    assert marker is not None
    call = complete(stop=["DEF", "<|im_end|>"], stop_token_ids=[9])
    assert call.requests[0].sampling.stop_token_ids == (9, marker)
    assert call.requests[0].sampling.stop == ("DEF", "<|im_end|>")
    assert [call.stop_reason(reason) for reason in (marker, 9, "DEF", None, 1)] == ["<|im_end|>", 9, "DEF", None, None]


def test_many_stops_are_fine_up_to_the_cap() -> None:
    assert len(complete(stop=[f"x{number}" for number in range(MAX_STOPS)]).requests[0].sampling.stop) == MAX_STOPS


def test_an_echo_with_logprobs_asks_for_the_prompts() -> None:
    assert complete(echo=True, logprobs=2).requests[0].sampling.prompt_logprobs == 2
    assert complete(echo=True, logprobs=2, prompt_logprobs=5).requests[0].sampling.prompt_logprobs == 5
    assert complete(echo=True).requests[0].sampling.prompt_logprobs is None
    scored = complete(echo=True, logprobs=0, max_tokens=0)
    assert (scored.requests[0].sampling.max_tokens, scored.echo_only, scored.echo) == (1, True, ("Hello",))


@pytest.mark.parametrize("name", ["", "gpt-4", "x" * 10_000])
def test_an_unknown_model_is_404_and_not_repeated_at_length(name: str) -> None:
    with pytest.raises(ModelNotFound) as refused:
        complete(model=name)
    assert (refused.value.status, refused.value.code, refused.value.param) == (404, "model_not_found", "model")
    assert len(refused.value.message) < 300


def test_refusals_are_the_callers_and_carry_no_internals() -> None:
    for body in ({"max_tokens": "x"}, {"prompt": 7}, {"logit_bias": {"x": 1}}, {"stop": [""]}):
        with pytest.raises(KveikError) as refused:
            complete(**body)
        assert "pydantic" not in refused.value.message
        assert refused.value.status == 400
