"""Shapes of OpenAI's request bodies and answers, with vLLM's extensions. Strict: a number in quotes is refused.

Fields beyond a shape are kept aside (`model_extra`) for `request_fields`.
Prompts, stop strings and bias entries are checked in `prompts` and `translate`: one error names the limit, rather than
one error for each of a million entries.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from kveik.observe.tiers import TierSnapshot
from kveik.request.request import (
    MAX_CHOICES,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_PRIORITY,
    MAX_RETENTION_SECONDS,
    MAX_SALT_CHARACTERS,
    MAX_SEED,
    MAX_STOP_CHARACTERS,
    MAX_STOPS,
    MIN_SEED,
)
from kveik.server.call_limits import (
    MAX_DETOKENIZE_TOKENS,
    MAX_MESSAGES,
    MAX_PROMPTS,
    MAX_STOP_TOKEN_IDS,
    MAX_TOOLS,
)

_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}

PromptField = Annotated[
    Any,
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": MAX_PROMPTS},
                _IDS,
                {"type": "array", "items": _IDS, "minItems": 1, "maxItems": MAX_PROMPTS},
            ]
        }
    ),
]
BiasField = Annotated[
    Any,
    WithJsonSchema(
        {
            "anyOf": [
                {
                    "type": "object",
                    "propertyNames": {"pattern": "^[0-9]+$"},
                    "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
                    "maxProperties": MAX_LOGIT_BIAS,
                },
                {"type": "null"},
            ]
        }
    ),
]
_PART = {"type": "object", "required": ["type", "text"], "properties": {"type": {"const": "text"}, "text": {"type": "string"}}}
_CONTENT = {"anyOf": [{"type": "string"}, {"type": "array", "items": _PART}, {"type": "null"}]}
MessageField = Annotated[
    dict[str, Any],
    WithJsonSchema(
        {
            "type": "object",
            "required": ["role"],
            "properties": {"role": {"type": "string", "minLength": 1}, "content": _CONTENT},
        }
    ),
]
"""Checked by `kveik.text.messages`."""

_STOP = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARACTERS}
_STOPS = {"anyOf": [_STOP, {"type": "array", "items": _STOP, "maxItems": MAX_STOPS}, {"type": "null"}]}
StopField = Annotated[Any, WithJsonSchema(_STOPS)]


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, protected_namespaces=())

    model: str | None = None
    """One of the served names; absent: the first."""


class StreamOptions(BaseModel):
    """Additional content of a stream."""

    model_config = ConfigDict(strict=True, extra="allow")

    include_usage: bool | None = None
    """Send one more chunk, without choices, that holds the usage."""

    continuous_usage_stats: bool | None = None
    """With `include_usage`: every chunk holds the usage so far."""


class RetentionBody(BaseModel):
    """Retention of the blocks that this request leaves in the cache."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    priority: int = Field(ge=0, le=100)
    """35 is the default. Blocks above it are evicted after all others, blocks below it before."""

    seconds: float = Field(3600, gt=0, le=MAX_RETENTION_SECONDS)
    """Seconds after the request's end for which it holds."""


class GenerationBody(_Body):
    """Fields of both endpoints."""

    max_tokens: int | None = Field(None, ge=0, le=1 << 30)
    max_completion_tokens: int | None = Field(None, ge=1, le=1 << 30)
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: StopField = None
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: BiasField = None
    # In the description too: readers of JSON that use doubles round the schema's limits.
    seed: int | None = Field(None, ge=MIN_SEED, le=MAX_SEED, description=f"From {MIN_SEED} to {MAX_SEED}.")
    top_k: int | None = Field(None, ge=-1, le=1 << 30)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    stop_token_ids: Annotated[list[int], Field(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = Field(None, ge=0, le=1 << 30)
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    cache_salt: str | None = Field(None, min_length=1, max_length=MAX_SALT_CHARACTERS)
    priority: int | None = Field(None, ge=-MAX_PRIORITY, le=MAX_PRIORITY)
    cache_retention: RetentionBody | None = None


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    prompt: PromptField
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    best_of: int | None = Field(None, ge=1, le=MAX_CHOICES)
    add_special_tokens: bool | None = None


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    messages: list[MessageField] = Field(min_length=1, max_length=MAX_MESSAGES)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Annotated[list[dict[str, Any]], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    """For chat templates that use it, with `enable_thinking`."""


class TokenizeBody(_Body):
    """POST /tokenize: a prompt, or the messages of a chat."""

    return_token_strs: bool | None = None

    prompt: str | None = None
    messages: Annotated[list[MessageField], Field(min_length=1, max_length=MAX_MESSAGES)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Annotated[list[dict[str, Any]], Field(max_length=MAX_TOOLS)] | None = None


class DetokenizeBody(_Body):
    """POST /detokenize."""

    tokens: list[int] = Field(max_length=MAX_DETOKENIZE_TOKENS)


class PromptTokensDetails(BaseModel):
    cached_tokens: int


class Usage(BaseModel):
    """Tokens of one call: every prompt once, the new tokens of all choices together."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class CompletionLogprobs(BaseModel):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class PromptLogprob(BaseModel):
    logprob: float
    rank: int | None
    decoded_token: str


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None = None


class _Answer(BaseModel):
    id: str
    created: int
    model: str
    system_fingerprint: str
    usage: Usage


class CompletionAnswer(_Answer):
    object: str
    choices: list[CompletionChoice]


class TopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int] | None


class ChatLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    content: list[ChatLogprob] | None


class ChatMessage(BaseModel):
    role: str
    content: str | None
    refusal: str | None


class ChatChoice(BaseModel):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None


class ChatAnswer(_Answer):
    object: str
    choices: list[ChatChoice]
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None = None


class ModelCard(BaseModel):
    id: str
    object: str
    created: int
    owned_by: str
    root: str
    max_model_len: int


class ModelList(BaseModel):
    object: str
    data: list[ModelCard]


class TokenizerInfo(BaseModel):
    """Special tokens and chat template, for clients that apply the template by themselves."""

    tokenizer_class: str
    model_max_length: int
    vocab_size: int
    bos_token: str | None
    eos_token: str | None
    unk_token: str | None
    pad_token: str | None
    chat_template: str | None


class TokenizeAnswer(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None
    """The tokens' texts, where `return_token_strs` is true."""


class DetokenizeAnswer(BaseModel):
    prompt: str


class StatusAnswer(BaseModel):
    draining: bool
    facts: dict[str, str]
    counts: dict[str, float]
    prompt_tokens: dict[str, int]
    """Prompt tokens by source of keys and values: computed, cached (in the pool), or a tier's name."""

    tiers: list[TierSnapshot]
    """Tiers, from the nearest to the pool down."""


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(BaseModel):
    """Body of every error."""

    error: ErrorDetail
