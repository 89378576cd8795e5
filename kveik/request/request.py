"""Requests and their parameters: immutable, and checked once, when they are created."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from kveik.errors import BadValue
from kveik.words import counted

MAX_CHOICES = 128
MAX_STOPS = 64
MAX_STOP_CHARACTERS = 1024
MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 1024
MAX_SALT_CHARACTERS = 512
MAX_RETENTION_SECONDS = 30 * 86_400
MAX_PRIORITY = 1 << 31
"""Priorities lie in [-MAX_PRIORITY, MAX_PRIORITY]."""

MIN_SEED, MAX_SEED = -(1 << 63), (1 << 64) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Parameters of sampling and of stopping.

    Order, as in vLLM: bias, repetition penalty, frequency and presence penalty, temperature, top_k, min_p, top_p. top_k and
    min_p commute; top_p looks at what they left. With equal probabilities the lower token id comes first.
    """

    max_tokens: int
    """New tokens at most, per choice; at least 1."""

    temperature: float = 1.0
    """0 is greedy; otherwise logits are divided by it."""

    top_k: int = 0
    """Keep the k likeliest tokens; 0 keeps all."""

    top_p: float = 1.0
    """Keep the smallest set of tokens whose probabilities reach this sum; in (0, 1]."""

    min_p: float = 0.0
    """Remove tokens below this share of the likeliest token's probability; in [0, 1]."""

    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in prompt or output; > 0."""

    presence_penalty: float = 0.0
    """Subtracted once for every token that the output already has; in [-2, 2]."""

    frequency_penalty: float = 0.0
    """Subtracted per occurrence in the output; in [-2, 2]."""

    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, bias in [-100, 100]) pairs; -100 makes the token impossible."""

    seed: int | None = None
    """Makes sampling repeatable, whatever else is in the batch; any 64-bit integer."""

    logprobs: int | None = None
    """Report the chosen token's log-probability and this many of the likeliest; up to 20. They belong to the model's own
    distribution, before bias, penalties, temperature and filters; at least -9999."""

    prompt_logprobs: int | None = None
    """The same for each prompt token; such a request computes its whole prompt and uses no prefix match."""

    n: int = 1
    """Choices to generate from the one prompt."""

    stop: tuple[str, ...] = ()
    """Strings that end the text; they are not part of it unless `include_stop_str_in_output`."""

    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end the text, also under `ignore_eos`."""

    min_tokens: int = 0
    """New tokens before any stop condition counts."""

    ignore_eos: bool = False
    """Continue past the model's own end tokens."""

    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""

    include_stop_str_in_output: bool = False
    """Keep the stop string in the text."""

    def __post_init__(self) -> None:
        for name, low, high in _RANGES:
            _check_range(name, getattr(self, name), low, high)
        if not 0 < self.top_p <= 1:
            raise BadValue(f"top_p is {self.top_p}; it must be above 0 and at most 1.", param="top_p")
        if not self.repetition_penalty > 0:
            raise BadValue(f"repetition_penalty is {self.repetition_penalty}; it must be above 0.", param="repetition_penalty")
        if self.min_tokens > self.max_tokens:
            raise BadValue(
                f"min_tokens is {self.min_tokens}; it must be at most max_tokens, {self.max_tokens}.", param="min_tokens"
            )
        _check_stops(self.stop)
        _check_bias(self.logit_bias)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


_RANGES: tuple[tuple[str, float, float], ...] = (
    ("max_tokens", 1, 1 << 30),
    ("temperature", 0, 100),
    ("top_k", 0, 1 << 30),
    ("min_p", 0, 1),
    ("repetition_penalty", 0, 100),
    ("presence_penalty", -2, 2),
    ("frequency_penalty", -2, 2),
    ("seed", MIN_SEED, MAX_SEED),
    ("logprobs", 0, MAX_LOGPROBS),
    ("prompt_logprobs", 0, MAX_LOGPROBS),
    ("n", 1, MAX_CHOICES),
    ("min_tokens", 0, 1 << 30),
)


def _check_range(name: str, value: float | None, low: float, high: float) -> None:
    if value is None:
        return
    # Written so that NaN fails too.
    if not (low <= value <= high) or math.isinf(value):
        raise BadValue(f"{name} is {value}; it must be between {low} and {high}.", param=name)


def _check_stops(stops: tuple[str, ...]) -> None:
    if len(stops) > MAX_STOPS:
        raise BadValue(f"stop has {counted(len(stops), 'string')}; at most {MAX_STOPS} are allowed.", param="stop")
    for stop in stops:
        if not 0 < len(stop) <= MAX_STOP_CHARACTERS:
            raise BadValue(
                f"a stop string has {counted(len(stop), 'character')}; it must have 1 to {MAX_STOP_CHARACTERS}.", param="stop"
            )


def _check_bias(bias: tuple[tuple[int, float], ...]) -> None:
    if len(bias) > MAX_LOGIT_BIAS:
        raise BadValue(f"logit_bias has {counted(len(bias), 'entry')}; at most {MAX_LOGIT_BIAS}.", param="logit_bias")
    for token, value in bias:
        if not -100 <= value <= 100:
            raise BadValue(f"logit_bias for token {token} is {value}; it must be in [-100, 100].", param="logit_bias")


@dataclass(frozen=True, slots=True)
class CacheRetention:
    """Retention of the blocks that a request leaves in the cache."""

    priority: int
    """0 to 100; 35 is the default. Blocks above it are evicted after all others, blocks below it before."""

    seconds: float
    """Seconds after the request's end for which a priority above 35 holds."""

    def __post_init__(self) -> None:
        _check_range("cache_retention.priority", self.priority, 0, 100)
        _check_range("cache_retention.seconds", self.seconds, 0, MAX_RETENTION_SECONDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt, its parameters and its tenant."""

    id: str
    """The server's own id; never the client's."""

    prompt: tuple[int, ...]
    """Token ids, at least one; the server has checked them against the vocabulary and the context."""

    sampling: SamplingParams

    priority: int = 0
    """Lower is served earlier under `--scheduling-policy priority`."""

    tenant: bytes = b""
    """Digest of the API key; part of every block key. Empty: no keys are configured."""

    cache_salt: str | None = None
    """The caller's own salt, on top of the tenant's."""

    retention: CacheRetention | None = None

    media_hash: bytes | None = None
    """Digest of the media behind the prompt's placeholders; None: text only."""

    echo: bool = field(default=False)
    """True where the answer repeats the prompt's text. The scheduler ignores it."""

    def __post_init__(self) -> None:
        if not self.prompt:
            raise BadValue("The prompt is empty: it has 0 tokens, and at least 1 is needed.", param="prompt")
        _check_range("priority", self.priority, -MAX_PRIORITY, MAX_PRIORITY)
        if self.cache_salt is not None and not 0 < len(self.cache_salt) <= MAX_SALT_CHARACTERS:
            raise BadValue(
                f"cache_salt has {counted(len(self.cache_salt), 'character')}; it must have 1 to {MAX_SALT_CHARACTERS}.",
                param="cache_salt",
            )


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The log-probability (natural, always finite) of one token, and of the likeliest ones, best first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
