"""OpenAI's bodies as the engine's requests. Pure: what we cannot do is refused here, with the number that matters.

Past this file nobody checks again. Choices that are ours, where OpenAI and vLLM leave them open:
max_tokens absent fills the context for chats, and is 16 or what the context leaves for completions; a max_tokens that the
context cannot hold is refused, not cut; a stop string that is a special token's text also stops on that token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from kveik.errors import BadValue, ModelNotFound
from kveik.request.request import MAX_LOGIT_BIAS, CacheRetention, Request, SamplingParams
from kveik.server.call_limits import MAX_CHOICES_PER_CALL, MAX_PROMPT_LOGPROBS
from kveik.server.prompts import (
    Model,
    Prompt,
    PromptReading,
    chat_prompt,
    check_prompt,
    check_tokens,
    completion_prompts,
    new_tokens,
)
from kveik.server.protocol import ChatBody, CompletionBody, GenerationBody
from kveik.server.request_fields import refuse_foreign
from kveik.text.tokenizer import Tokenizer
from kveik.words import counted

COMPLETION_TOKENS = 16
"""OpenAI's default for /v1/completions."""

TOKENS_UNKNOWN = 1 << 30
"""Stands in for max_tokens until the prompt's length is known."""


@dataclass(frozen=True, slots=True)
class Asker:
    """Who asks, and the id that we gave the call."""

    id: str
    tenant: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One HTTP call: its requests, one per prompt, and what the answer must show."""

    id: str
    model: str
    requests: tuple[Request, ...]
    stream: bool
    include_usage: bool
    prompt_logprobs: int | None
    """How many likeliest tokens the answer shows per prompt token in vLLM's field of that name; None: no such field."""

    stop_texts: Mapping[int, str]
    """Stop tokens that stand for stop strings of the caller's."""

    echo: tuple[str, ...] | None = None
    """The prompts' texts, where the answer repeats them."""

    echo_only: bool = field(default=False)
    """max_tokens was 0: the one token that the engine makes at least is neither shown nor counted."""

    @property
    def n(self) -> int:
        """Choices per prompt."""
        return self.requests[0].sampling.n

    @property
    def logprobs(self) -> int | None:
        """How many of the likeliest tokens the answer shows for every token; None: no log-probabilities."""
        return self.requests[0].sampling.logprobs

    @property
    def prompt_tokens(self) -> int:
        return sum(len(request.prompt) for request in self.requests)

    def stop_reason(self, reason: str | int | None) -> str | int | None:
        """Which of the caller's own conditions ended a choice; None for the model's end tokens."""
        if not isinstance(reason, int):
            return reason
        if reason in self.stop_texts:
            return self.stop_texts[reason]
        return reason if reason in self.requests[0].sampling.stop_token_ids else None


def completion_call(body: CompletionBody, model: Model, asker: Asker) -> Call:
    """POST /v1/completions.

    Raises:
        Refused: something in it cannot be done. Of several prompts none is queued then.
    """
    name = served_name(body.model, model)
    refuse_foreign(body.model_extra or {})
    _check_completion(body)
    stop_texts = _stop_texts(body, model.tokenizer)
    # An echo with log-probabilities shows the prompt's as well.
    shown = [k for k in (body.prompt_logprobs, body.logprobs if body.echo else None) if k is not None]
    sampling = replace(
        _sampling(body, model.tokenizer, stop_texts), logprobs=body.logprobs, prompt_logprobs=max(shown, default=None)
    )
    how = PromptReading(
        add_special=body.add_special_tokens is not False,
        echo=bool(body.echo),
        skip_special=sampling.skip_special_tokens,
    )
    prompts = completion_prompts(body.prompt, model, how)
    _check_size(prompts, sampling)
    wanted = 1 if body.max_tokens == 0 else body.max_tokens
    rooms = [new_tokens(len(prompt.tokens), wanted, COMPLETION_TOKENS, model, ("prompt", "max_tokens")) for prompt in prompts]
    return Call(
        id=asker.id,
        model=name,
        requests=_requests(body, asker, sampling, prompts, rooms),
        stream=bool(body.stream),
        include_usage=_include_usage(body),
        prompt_logprobs=body.prompt_logprobs,
        stop_texts=stop_texts,
        echo=tuple(prompt.text for prompt in prompts) if body.echo else None,
        echo_only=body.max_tokens == 0,
    )


def chat_call(body: ChatBody, model: Model, asker: Asker) -> Call:
    """POST /v1/chat/completions.

    Raises:
        Refused: something in it cannot be done.
    """
    name = served_name(body.model, model)
    refuse_foreign(body.model_extra or {})
    _check_chat(body)
    stop_texts = _stop_texts(body, model.tokenizer)
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    sampling = replace(_sampling(body, model.tokenizer, stop_texts), logprobs=logprobs, prompt_logprobs=body.prompt_logprobs)
    tokens = chat_prompt(body, model, model.max_model_len)
    check_prompt(tokens, model, "messages")
    prompts = [Prompt(tuple(tokens))]
    _check_size(prompts, sampling)
    newer = body.max_completion_tokens
    wanted, wanted_as = (body.max_tokens, "max_tokens") if newer is None else (newer, "max_completion_tokens")
    room = new_tokens(len(tokens), wanted, None, model, ("messages", wanted_as))
    return Call(
        id=asker.id,
        model=name,
        requests=_requests(body, asker, sampling, prompts, [room]),
        stream=bool(body.stream),
        include_usage=_include_usage(body),
        prompt_logprobs=body.prompt_logprobs,
        stop_texts=stop_texts,
    )


def served_name(name: str | None, model: Model) -> str:
    """The name to answer under; without one, the first.

    Raises:
        ModelNotFound: it is not served here.
    """
    if name is not None and name not in model.names:
        raise ModelNotFound(model.names)
    return name or model.names[0]


def _check_completion(body: CompletionBody) -> None:
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise BadValue("best_of is not supported by this server; leave it out, or equal to n.", param="best_of")
    if body.max_tokens == 0 and not body.echo:
        raise BadValue("max_tokens is 0; without echo it must be at least 1.", param="max_tokens")
    if body.stream and body.prompt_logprobs is not None:
        raise BadValue("prompt_logprobs cannot be streamed; echo with logprobs can.", param="prompt_logprobs")


def _check_chat(body: ChatBody) -> None:
    if body.max_tokens == 0:
        raise BadValue("max_tokens is 0; it must be at least 1.", param="max_tokens")
    if body.top_logprobs is not None and not body.logprobs:
        raise BadValue("top_logprobs needs logprobs to be true.", param="top_logprobs")
    if body.stream and body.prompt_logprobs is not None:
        raise BadValue("prompt_logprobs cannot be streamed.", param="prompt_logprobs")
    if body.tool_choice not in (None, "none", "auto"):
        raise BadValue("tool_choice can only be 'none' here: tool calls are not parsed.", param="tool_choice")
    if body.tools and body.tool_choice != "none":
        raise BadValue("tools are not supported unless tool_choice is 'none': tool calls are not parsed.", param="tools")


def _check_size(prompts: list[Prompt], sampling: SamplingParams) -> None:
    choices = len(prompts) * sampling.n
    if choices > MAX_CHOICES_PER_CALL:
        raise BadValue(
            f"The call asks for {counted(choices, 'choice')}, prompts times n; at most {MAX_CHOICES_PER_CALL}.", param="n"
        )
    if sampling.prompt_logprobs is None:
        return
    entries = sum(len(prompt.tokens) for prompt in prompts) * (sampling.prompt_logprobs + 1)
    if entries > MAX_PROMPT_LOGPROBS:
        raise BadValue(
            f"The call asks for {entries} log-probabilities of prompt tokens; at most {MAX_PROMPT_LOGPROBS}.",
            param="prompt_logprobs",
        )


def _include_usage(body: GenerationBody) -> bool:
    options = body.stream_options
    if options is None:
        return False
    if not body.stream:
        raise BadValue("stream_options can only be given with stream true.", param="stream_options")
    if (options.model_extra or {}).get("continuous_usage_stats"):
        raise BadValue("stream_options.continuous_usage_stats is not supported by this server.", param="stream_options")
    return bool(options.include_usage)


def _requests(
    body: GenerationBody, asker: Asker, sampling: SamplingParams, prompts: list[Prompt], rooms: list[int]
) -> tuple[Request, ...]:
    hint = body.cache_retention
    return tuple(
        Request(
            id=f"{asker.id}-{index}",
            prompt=prompt.tokens,
            sampling=replace(sampling, max_tokens=room),
            priority=body.priority or 0,
            tenant=asker.tenant,
            cache_salt=body.cache_salt,
            retention=None if hint is None else CacheRetention(hint.priority, hint.seconds),
        )
        for index, (prompt, room) in enumerate(zip(prompts, rooms, strict=True))
    )


def _sampling(body: GenerationBody, tokenizer: Tokenizer, stop_texts: Mapping[int, str]) -> SamplingParams:
    """Everything but log-probabilities and max_tokens, which need more than the body."""
    check_tokens(body.stop_token_ids or [], tokenizer.vocab_size, "stop_token_ids")
    return SamplingParams(
        max_tokens=TOKENS_UNKNOWN,
        n=body.n or 1,
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        # vLLM's -1 means the same as its 0: keep all.
        top_k=max(0, body.top_k or 0),
        min_p=body.min_p or 0.0,
        repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        logit_bias=_logit_bias(body.logit_bias, tokenizer.vocab_size),
        seed=body.seed,
        stop=_stops(body),
        stop_token_ids=tuple(dict.fromkeys((*(body.stop_token_ids or ()), *stop_texts))),
        min_tokens=body.min_tokens or 0,
        ignore_eos=bool(body.ignore_eos),
        include_stop_str_in_output=bool(body.include_stop_str_in_output),
        skip_special_tokens=body.skip_special_tokens is not False,
    )


def _stops(body: GenerationBody) -> tuple[str, ...]:
    return (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())


def _stop_texts(body: GenerationBody, tokenizer: Tokenizer) -> dict[int, str]:
    # As text a special token is empty, so a stop string of its name would never be found there.
    ids = {tokenizer.special_id(stop): stop for stop in _stops(body)}
    return {token: stop for token, stop in ids.items() if token is not None}


def _logit_bias(entries: Any, vocab: int) -> tuple[tuple[int, float], ...]:
    if entries is None:
        return ()
    if not isinstance(entries, dict):
        raise BadValue("logit_bias must be an object of token ids and numbers.", param="logit_bias")
    if len(entries) > MAX_LOGIT_BIAS:
        raise BadValue(f"logit_bias has {counted(len(entries), 'entry')}; at most {MAX_LOGIT_BIAS}.", param="logit_bias")
    # Through a dictionary, because '1' and '01' are one token.
    checked = (_bias_entry(key, value, vocab, place) for place, (key, value) in enumerate(entries.items(), 1))
    return tuple(dict(checked).items())


def _bias_entry(key: str, value: Any, vocab: int, place: int) -> tuple[int, float]:
    # Integers may be named; any other key is text of the caller's, which no error repeats.
    if not (key.isascii() and key.isdigit() and len(key) < 20):
        raise BadValue(
            f"logit_bias has a key, the {place}. of its entries, that is no token id in [0, {vocab}).", param="logit_bias"
        )
    if int(key) >= vocab:
        raise BadValue(f"logit_bias has the key {int(key)}; keys are token ids in [0, {vocab}).", param="logit_bias")
    # Written so that NaN and infinities fail too; bool is an int in Python, but no number in JSON.
    if type(value) not in (int, float) or not -100 <= value <= 100:
        raise BadValue(f"logit_bias for token {int(key)} must be a number in [-100, 100].", param="logit_bias")
    return int(key), float(value)
