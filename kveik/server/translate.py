"""Translates OpenAI's request bodies into the engine's requests. Pure: a body that cannot be served is refused here.

Later stages check nothing again. Choices of this server, where OpenAI and vLLM leave them open: without max_tokens a chat fills
the context, and a completion has 16 tokens or as many as the context leaves; a max_tokens that the context cannot hold is
refused, not cut; a stop string that is a special token's text also stops on that token.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from kveik.errors import BadValue, ModelNotFound, Unsupported
from kveik.request.request import MAX_LOGIT_BIAS, MAX_STOPS, CacheRetention, Request, SamplingParams
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
from kveik.server.protocol import ChatBody, CompletionBody, GenerationBody, StreamOptions
from kveik.server.request_fields import refuse_unsupported
from kveik.text.tokenizer import Tokenizer
from kveik.words import counted

COMPLETION_TOKENS = 16
"""OpenAI's default for /v1/completions."""

MAX_KEY_SHOWN = 20
"""Characters of a wrong `logit_bias` key that an error repeats."""

TOKENS_UNKNOWN = 1 << 30
"""Placeholder for max_tokens until the prompt's length is known."""


@dataclass(frozen=True, slots=True)
class Asker:
    """Id of a call, and its tenant."""

    id: str
    tenant: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One HTTP call: its requests, one per prompt, and the parts that its answer shows."""

    id: str
    model: str
    requests: tuple[Request, ...]
    stream: bool
    include_usage: bool
    continuous_usage: bool
    """Every chunk of the stream holds the usage so far."""

    prompt_logprobs: int | None
    """Likeliest tokens per prompt token in vLLM's field of that name; None: no such field."""

    stop_texts: Mapping[int, str]
    """Stop tokens -> the caller's stop strings with the same text."""

    echo: tuple[str, ...] | None = None
    """The prompts' texts, where the answer repeats them."""

    echo_only: bool = field(default=False)
    """True where max_tokens is 0: the one token that the engine makes at least is neither shown nor counted."""

    @property
    def n(self) -> int:
        """Choices per prompt."""
        return self.requests[0].sampling.n

    @property
    def logprobs(self) -> int | None:
        """Likeliest tokens that the answer shows for every token; None: no log-probabilities."""
        return self.requests[0].sampling.logprobs

    @property
    def prompt_tokens(self) -> int:
        return sum(len(request.prompt) for request in self.requests)

    def stop_reason(self, reason: str | int | None) -> str | int | None:
        """Returns the caller's stop string or stop token that ended a choice; None for the model's end tokens."""
        if not isinstance(reason, int):
            return reason
        if reason in self.stop_texts:
            return self.stop_texts[reason]
        return reason if reason in self.requests[0].sampling.stop_token_ids else None


def completion_call(body: CompletionBody, model: Model, asker: Asker) -> Call:
    """Returns the call of a POST /v1/completions.

    Raises:
        Refused: a part of it cannot be served. Of several prompts none is queued then.
    """
    name = served_name(body.model, model)
    refuse_unsupported(body.model_extra or {})
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
    wanted, field = _wanted(body)
    wanted = 1 if wanted == 0 else wanted
    rooms = [new_tokens(len(prompt.tokens), wanted, COMPLETION_TOKENS, model, ("prompt", field)) for prompt in prompts]
    options = _stream_options(body)
    return Call(
        id=asker.id,
        model=name,
        requests=_requests(body, asker, sampling, prompts, rooms),
        stream=bool(body.stream),
        include_usage=options.include_usage is True,
        continuous_usage=options.include_usage is True and options.continuous_usage_stats is True,
        prompt_logprobs=body.prompt_logprobs,
        stop_texts=stop_texts,
        echo=tuple(prompt.text for prompt in prompts) if body.echo else None,
        echo_only=_wanted(body)[0] == 0,
    )


def chat_call(body: ChatBody, model: Model, asker: Asker) -> Call:
    """Returns the call of a POST /v1/chat/completions.

    Raises:
        Refused: a part of it cannot be served.
    """
    name = served_name(body.model, model)
    refuse_unsupported(body.model_extra or {})
    _check_chat(body)
    stop_texts = _stop_texts(body, model.tokenizer)
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    sampling = replace(_sampling(body, model.tokenizer, stop_texts), logprobs=logprobs, prompt_logprobs=body.prompt_logprobs)
    tokens = chat_prompt(body, model, model.max_model_len)
    check_prompt(tokens, model, "messages")
    prompts = [Prompt(tuple(tokens))]
    _check_size(prompts, sampling)
    wanted, field = _wanted(body)
    room = new_tokens(len(tokens), wanted, None, model, ("messages", field))
    options = _stream_options(body)
    return Call(
        id=asker.id,
        model=name,
        requests=_requests(body, asker, sampling, prompts, [room]),
        stream=bool(body.stream),
        include_usage=options.include_usage is True,
        continuous_usage=options.include_usage is True and options.continuous_usage_stats is True,
        prompt_logprobs=body.prompt_logprobs,
        stop_texts=stop_texts,
    )


def served_name(name: str | None, model: Model) -> str:
    """Returns the model name for the answer; without one in the request, the first.

    Raises:
        ModelNotFound: the server does not serve it.
    """
    if name is not None and name not in model.names:
        raise ModelNotFound(model.names)
    return name or model.names[0]


def _wanted(body: GenerationBody) -> tuple[int | None, str]:
    """Returns the requested number of new tokens, and its field; the newer name counts where both are given."""
    if body.max_completion_tokens is not None:
        return body.max_completion_tokens, "max_completion_tokens"
    return body.max_tokens, "max_tokens"


def _check_completion(body: CompletionBody) -> None:
    extra = body.model_extra or {}
    if extra.get("top_logprobs"):
        raise Unsupported("`top_logprobs` is a field of chats. Use `logprobs` with a number here.", param="top_logprobs")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise Unsupported("`best_of` is not supported by this server. Leave it out, or equal to `n`.", param="best_of")
    if _wanted(body)[0] == 0 and not body.echo:
        raise BadValue("`max_tokens` is 0. Without `echo` it must be at least 1.", param="max_tokens")
    if body.stream and body.prompt_logprobs is not None:
        raise Unsupported("`prompt_logprobs` cannot be streamed. Use `echo` with `logprobs`.", param="prompt_logprobs")


def _check_chat(body: ChatBody) -> None:
    if _wanted(body)[0] == 0:
        raise BadValue("`max_tokens` is 0. It must be at least 1.", param="max_tokens")
    if body.top_logprobs and not body.logprobs:
        raise BadValue("`top_logprobs` needs `logprobs` to be true.", param="top_logprobs")
    if body.stream and body.prompt_logprobs is not None:
        raise Unsupported("`prompt_logprobs` cannot be streamed. Set `stream` to false.", param="prompt_logprobs")
    if body.tool_choice not in (None, "none", "auto"):
        raise Unsupported('Tool calls are not parsed by this server. Set `tool_choice` to "none".', param="tool_choice")
    if body.tools and body.tool_choice != "none":
        raise Unsupported('Tool calls are not parsed by this server. Set `tool_choice` to "none".', param="tools")


def _check_size(prompts: list[Prompt], sampling: SamplingParams) -> None:
    choices = len(prompts) * sampling.n
    if choices > MAX_CHOICES_PER_CALL:
        raise BadValue(
            f"The call requests {counted(choices, 'choice')} (prompts times `n`). Request at most {MAX_CHOICES_PER_CALL}.",
            param="n",
        )
    if sampling.prompt_logprobs is None:
        return
    entries = sum(len(prompt.tokens) for prompt in prompts) * (sampling.prompt_logprobs + 1)
    if entries > MAX_PROMPT_LOGPROBS:
        raise BadValue(
            f"The call requests {entries} log-probabilities of prompt tokens. Request at most {MAX_PROMPT_LOGPROBS}.",
            param="prompt_logprobs",
        )


def _stream_options(body: GenerationBody) -> StreamOptions:
    if body.stream_options is not None and not body.stream:
        raise BadValue("`stream_options` needs `stream` to be true.", param="stream_options")
    return body.stream_options or StreamOptions()


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
    """Returns all parameters but log-probabilities and max_tokens, which need more than the body."""
    check_tokens(body.stop_token_ids or [], tokenizer.vocab_size, "stop_token_ids")
    return SamplingParams(
        max_tokens=TOKENS_UNKNOWN,
        n=body.n or 1,
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        # vLLM's -1 means the same as 0: keep all.
        top_k=max(0, body.top_k or 0),
        min_p=body.min_p or 0.0,
        repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        logit_bias=_logit_bias(body.logit_bias, tokenizer.vocab_size),
        seed=body.seed,
        stop=_stops(body.stop),
        stop_token_ids=tuple(dict.fromkeys((*(body.stop_token_ids or ()), *stop_texts))),
        min_tokens=body.min_tokens or 0,
        ignore_eos=bool(body.ignore_eos),
        include_stop_str_in_output=bool(body.include_stop_str_in_output),
        skip_special_tokens=body.skip_special_tokens is not False,
    )


def _stops(stop: Any) -> tuple[str, ...]:
    stops = [] if stop is None else [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or not all(isinstance(one, str) for one in stops):
        raise BadValue("`stop` must be a string or a list of strings.", param="stop")
    if len(stops) > MAX_STOPS:
        raise BadValue(f"`stop` has {counted(len(stops), 'string')}. Give at most {MAX_STOPS}.", param="stop")
    return tuple(stops)


def _stop_texts(body: GenerationBody, tokenizer: Tokenizer) -> dict[int, str]:
    # A special token's text is empty, so a stop string of its name would never match there.
    ids = {tokenizer.special_id(stop): stop for stop in _stops(body.stop)}
    return {token: stop for token, stop in ids.items() if token is not None}


def _logit_bias(entries: Any, vocab: int) -> tuple[tuple[int, float], ...]:
    if entries is None:
        return ()
    if not isinstance(entries, dict):
        raise BadValue("`logit_bias` must be an object of token ids and numbers.", param="logit_bias")
    if len(entries) > MAX_LOGIT_BIAS:
        raise BadValue(f"`logit_bias` has {counted(len(entries), 'entry')}. Give at most {MAX_LOGIT_BIAS}.", param="logit_bias")
    # Through a dictionary, because '1' and '01' are one token.
    return tuple(dict(_bias_entry(key, value, vocab) for key, value in entries.items()).items())


def _bias_entry(key: str, value: Any, vocab: int) -> tuple[int, float]:
    if not (key.isascii() and key.isdigit() and len(key) < 20 and int(key) < vocab):
        shown = json.dumps(key[:MAX_KEY_SHOWN])
        raise BadValue(f"`logit_bias` key {shown} is not a token id. Use integers from 0 to {vocab - 1}.", param="logit_bias")
    # Written so that NaN and infinities fail too; bool is an int in Python, but not a number in JSON.
    if type(value) not in (int, float) or not -100 <= value <= 100:
        raise BadValue(f"`logit_bias` for token {int(key)} must be a number from -100 to 100.", param="logit_bias")
    return int(key), float(value)
