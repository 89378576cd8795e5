"""What OpenAI's own client, which most programs are written with, gets from the server."""

from __future__ import annotations

import asyncio
import math

import openai
import pytest

from tests.contract.conftest import KEY, Served

PROMPT = "Hello world. the answer"
MESSAGES = [{"role": "user", "content": "Hello"}]


def complete(client: openai.OpenAI, served: Served, **fields: object) -> object:
    return client.completions.create(**({"model": served.model, "prompt": PROMPT, "temperature": 0, "max_tokens": 12} | fields))


def chat(client: openai.OpenAI, served: Served, **fields: object) -> object:
    return client.chat.completions.create(
        **({"model": served.model, "messages": MESSAGES, "temperature": 0, "max_tokens": 12} | fields)
    )


def test_models_can_be_listed_and_asked_for(client: openai.OpenAI, served: Served) -> None:
    names = [model.id for model in client.models.list()]
    assert served.model in names
    assert client.models.retrieve(served.model).id == served.model
    with pytest.raises(openai.NotFoundError) as refused:
        client.models.retrieve("no-such-model")
    assert refused.value.code == "model_not_found"


def test_a_completion_has_text_a_reason_and_usage(client: openai.OpenAI, served: Served) -> None:
    answer = complete(client, served, extra_body={"ignore_eos": True})
    assert answer.object == "text_completion"
    (choice,) = answer.choices
    assert choice.text
    assert choice.finish_reason == "length"
    assert answer.usage.completion_tokens == 12
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 12
    assert answer.usage.prompt_tokens_details.cached_tokens >= 0


def test_a_chat_has_a_message_a_reason_and_usage(client: openai.OpenAI, served: Served) -> None:
    answer = chat(client, served, max_tokens=None, max_completion_tokens=9, extra_body={"ignore_eos": True})
    assert answer.object == "chat.completion"
    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.finish_reason == "length"
    assert answer.usage.completion_tokens == 9


def test_a_streamed_completion_says_what_the_whole_one_says(client: openai.OpenAI, served: Served) -> None:
    whole = complete(client, served)
    chunks = list(complete(client, served, stream=True, stream_options={"include_usage": True}))
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == whole.choices[0].text
    reasons = [choice.finish_reason for chunk in chunks for choice in chunk.choices]
    assert reasons[-1] == whole.choices[0].finish_reason
    assert set(reasons[:-1]) <= {None}
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_a_streamed_chat_says_what_the_whole_one_says(client: openai.OpenAI, served: Served) -> None:
    whole = chat(client, served)
    chunks = list(chat(client, served, stream=True, stream_options={"include_usage": True}))
    deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
    assert deltas[0].role == "assistant"
    assert all(delta.role is None for delta in deltas[1:])
    assert "".join(delta.content or "" for delta in deltas) == whole.choices[0].message.content
    reasons = [choice.finish_reason for chunk in chunks for choice in chunk.choices]
    assert reasons[-1] == whole.choices[0].finish_reason
    assert set(reasons[:-1]) <= {None}
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_the_clients_own_stream_helper_puts_the_chat_together(client: openai.OpenAI, served: Served) -> None:
    # The helper refuses answers that were cut, so this one ends at a stop string.
    text = chat(client, served).choices[0].message.content
    ask = {"model": served.model, "messages": MESSAGES, "temperature": 0, "max_tokens": 12, "stop": text[-3:]}
    with client.chat.completions.stream(**ask, stream_options={"include_usage": True}) as stream:
        stream.until_done()
        final = stream.get_final_completion()
    whole = client.chat.completions.create(**ask)
    assert final.choices[0].message.content == whole.choices[0].message.content == text[: text.index(text[-3:])]
    assert final.choices[0].finish_reason == "stop"
    assert final.usage.completion_tokens == whole.usage.completion_tokens


def test_choices_of_a_greedy_prompt_are_alike_and_the_prompt_is_counted_once(client: openai.OpenAI, served: Served) -> None:
    single = complete(client, served, extra_body={"ignore_eos": True})
    answer = complete(client, served, n=3, extra_body={"ignore_eos": True})
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert {choice.text for choice in answer.choices} == {single.choices[0].text}
    assert answer.usage.prompt_tokens == single.usage.prompt_tokens
    assert answer.usage.completion_tokens == 3 * single.usage.completion_tokens


def test_a_seed_repeats_an_answer(client: openai.OpenAI, served: Served) -> None:
    texts = {chat(client, served, temperature=1, seed=7).choices[0].message.content for _ in range(2)}
    assert len(texts) == 1


def test_a_stop_string_ends_the_text_before_it(client: openai.OpenAI, served: Served) -> None:
    text = complete(client, served).choices[0].text
    stop = text[len(text) // 2 :][:3]
    whole = complete(client, served, stop=[stop])
    assert whole.choices[0].text == text[: text.index(stop)]
    assert whole.choices[0].finish_reason == "stop"
    streamed = list(complete(client, served, stop=[stop], stream=True))
    assert "".join(choice.text for chunk in streamed for choice in chunk.choices) == whole.choices[0].text


def test_several_prompts_are_answered_in_order(client: openai.OpenAI, served: Served) -> None:
    prompts = [PROMPT, "the", "Hello"]
    answer = complete(client, served, prompt=prompts, echo=True, max_tokens=3)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    for prompt, choice in zip(prompts, answer.choices, strict=True):
        assert choice.text.startswith(prompt)


def test_token_ids_are_a_prompt_too(client: openai.OpenAI, served: Served) -> None:
    tokens = client.post("../tokenize", body={"prompt": PROMPT}, cast_to=object)["tokens"]
    by_ids = complete(client, served, prompt=tokens)
    assert by_ids.choices[0].text == complete(client, served).choices[0].text
    assert by_ids.usage.prompt_tokens == len(tokens)


def test_logprobs_of_a_completion_line_up_with_its_text(client: openai.OpenAI, served: Served) -> None:
    choice = complete(client, served, logprobs=3, max_tokens=5, extra_body={"ignore_eos": True}).choices[0]
    logprobs = choice.logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.top_logprobs) == len(logprobs.text_offset) == 5
    assert all(math.isfinite(value) and value <= 0 for value in logprobs.token_logprobs)
    assert all(token in top for token, top in zip(logprobs.tokens, logprobs.top_logprobs, strict=True))
    assert logprobs.text_offset[0] == 0


def test_an_echo_has_the_prompts_logprobs_in_front(client: openai.OpenAI, served: Served) -> None:
    answer = complete(client, served, logprobs=1, max_tokens=2, echo=True, extra_body={"ignore_eos": True})
    logprobs = answer.choices[0].logprobs
    assert answer.choices[0].text.startswith(PROMPT)
    assert len(logprobs.tokens) == answer.usage.prompt_tokens + 2
    assert logprobs.token_logprobs[0] is None
    assert all(math.isfinite(value) for value in logprobs.token_logprobs[1:])


def test_logprobs_of_a_chat_are_per_token_with_the_likeliest(client: openai.OpenAI, served: Served) -> None:
    choice = chat(client, served, logprobs=True, top_logprobs=2, max_tokens=4, extra_body={"ignore_eos": True}).choices[0]
    assert len(choice.logprobs.content) == 4
    for entry in choice.logprobs.content:
        assert math.isfinite(entry.logprob)
        assert len(entry.top_logprobs) == 2
        assert entry.bytes is not None


def test_vllms_extras_are_taken(client: openai.OpenAI, served: Served) -> None:
    extras = {
        "top_k": 5, "min_p": 0.01, "repetition_penalty": 1.1, "stop_token_ids": [1], "ignore_eos": True, "min_tokens": 1,
        "skip_special_tokens": False, "include_stop_str_in_output": True, "cache_salt": "mine", "priority": 1,
    }  # fmt: skip
    assert chat(client, served, extra_body=extras).choices[0].finish_reason in ("length", "stop")
    assert complete(client, served, extra_body=extras).choices[0].finish_reason in ("length", "stop")


def test_a_prompt_too_long_is_a_bad_request_with_both_numbers(client: openai.OpenAI, served: Served) -> None:
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as refused:
            complete(client, served, max_tokens=served.max_model_len, stream=stream)
        assert refused.value.code == "context_length_exceeded"
        assert str(served.max_model_len) in refused.value.message


def test_an_unknown_model_is_not_found(client: openai.OpenAI, served: Served) -> None:
    with pytest.raises(openai.NotFoundError) as refused:
        chat(client, served, model="gpt-4o")
    assert (refused.value.code, refused.value.param) == ("model_not_found", "model")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1),
        ("n", 0),
        ("logit_bias", {"99999999": 1}),
        ("response_format", {"type": "json_object"}),
        ("tools", [{"type": "function", "function": {"name": "f", "parameters": {}}}]),
    ],
)
def test_a_bad_field_is_a_bad_request_that_names_it(client: openai.OpenAI, served: Served, field: str, value: object) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        chat(client, served, **{field: value})
    assert refused.value.param == field
    assert refused.value.type == "invalid_request_error"


def test_a_wrong_key_is_an_authentication_error(served: Served) -> None:
    with openai.OpenAI(base_url=served.base_url, api_key="sk-wrong", max_retries=0) as stranger:
        with pytest.raises(openai.AuthenticationError) as refused:
            chat(stranger, served)
        assert refused.value.code == "invalid_api_key"


def test_a_stream_can_be_left_in_the_middle(client: openai.OpenAI, served: Served) -> None:
    for _ in range(3):
        with chat(client, served, max_tokens=100, stream=True, extra_body={"ignore_eos": True}) as stream:
            assert next(iter(stream)).choices[0].delta.role == "assistant"
    assert chat(client, served).choices[0].message.content


def test_many_at_once_get_each_their_own_answer(served: Served) -> None:
    async def ask_all() -> list[str]:
        async with openai.AsyncOpenAI(base_url=served.base_url, api_key=KEY, max_retries=0, timeout=120) as client:

            async def ask(number: int) -> str:
                prompt = f"{number}: the answer is"
                answer = await client.completions.create(
                    model=served.model, prompt=prompt, echo=True, max_tokens=4, temperature=0
                )
                return answer.choices[0].text

            return await asyncio.gather(*(ask(number) for number in range(16)))

    for number, text in enumerate(asyncio.run(ask_all())):
        assert text.startswith(f"{number}: the answer is")
