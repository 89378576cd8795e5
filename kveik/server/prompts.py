"""Prompts and messages as token ids. Pure; long text belongs in a thread."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kveik.errors import BadValue, PromptTooLong, Unsupported
from kveik.server.call_limits import MAX_PROMPTS
from kveik.server.protocol import ChatBody, TokenizeBody
from kveik.text.chat_template import ChatTemplate, chat_tokens
from kveik.text.detokenize import Detokenizer
from kveik.text.tokenizer import Tokenizer
from kveik.words import counted

TEMPLATE_OWN = frozenset({"messages", "tools", "add_generation_prompt", "continue_final_message", "bos_token", "eos_token"})
"""Template variables that `chat_template_kwargs` may not overwrite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """Properties of the model that requests depend on."""

    names: tuple[str, ...]
    """Names that the model is served under; answers have the first by default."""

    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    max_model_len: int
    """Tokens of prompt and output together."""

    special_tokens_in_content: bool = False


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt, and the text of its echo, where one is requested."""

    tokens: tuple[int, ...]
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptReading:
    """Options for reading a prompt."""

    add_special: bool = True
    """True where text gets the model's start and end tokens."""

    echo: bool = False
    """True where the answer repeats the prompt, so that ids must become text."""

    skip_special: bool = True
    """True where that text omits special tokens."""


def check_tokens(tokens: list[Any], vocab: int, param: str) -> None:
    """Check that every entry is an id of the vocabulary.

    Raises:
        BadValue: an entry is not.
    """
    for token in tokens:
        # bool is an int in Python, but no token id.
        if type(token) is not int:
            raise BadValue(f"`{param}` has an entry that is not a token id. Use integers from 0 to {vocab - 1}.", param=param)
        if not 0 <= token < vocab:
            raise BadValue(f"`{param}` has a token id outside the vocabulary. Use integers from 0 to {vocab - 1}.", param=param)


def completion_prompts(prompt: object, model: Model, how: PromptReading) -> list[Prompt]:
    """Returns the prompts of a string, a list of strings, a list of ids or a list of lists of ids.

    Raises:
        BadValue: it is none of these, is empty, or has ids outside the vocabulary.
        PromptTooLong: one has more tokens than the context.
    """
    return [_one_prompt(item, model, how) for item in _as_list(prompt)]


def _as_list(prompt: object) -> list[Any]:
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list):
        raise BadValue(
            "`prompt` must be a string, a list of strings, a list of token ids or a list of such lists.", param="prompt"
        )
    if not prompt:
        raise BadValue("`prompt` is an empty list. Give at least 1 prompt.", param="prompt")
    if not isinstance(prompt[0], str | list):
        return [prompt]
    if len(prompt) > MAX_PROMPTS:
        raise BadValue(
            f"`prompt` has {counted(len(prompt), 'prompt')}. Send at most {MAX_PROMPTS} in one call.", param="prompt"
        )
    if any(type(item) is not type(prompt[0]) for item in prompt):
        raise BadValue("`prompt` mixes strings with lists of token ids. Send one kind per call.", param="prompt")
    return prompt


def _one_prompt(item: str | list[Any], model: Model, how: PromptReading) -> Prompt:
    if isinstance(item, str):
        check_text(item, model, "prompt")
        tokens = model.tokenizer.encode(item, add_special=how.add_special)
        check_prompt(tokens, model, "prompt")
        return Prompt(tuple(tokens), item)
    # The length first: it is cheap, and bounds the check of every id.
    check_prompt(item, model, "prompt")
    check_tokens(item, model.tokenizer.vocab_size, "prompt")
    return Prompt(tuple(item), _echo(item, model.tokenizer, how.skip_special) if how.echo else "")


def _echo(tokens: list[int], tokenizer: Tokenizer, skip_special: bool) -> str:
    # Not a plain decode: a character that the prompt begins and the output completes belongs to the output.
    return Detokenizer(tokenizer, skip_special=skip_special).push(tokens).text


def check_text(text: str, model: Model, param: str) -> None:
    """Refuse a text far longer than the context before it is tokenised, which would cost seconds and gigabytes.

    Raises:
        PromptTooLong: with a lower bound of its tokens.
        BadValue: the text has half of a surrogate pair.
    """
    least = model.tokenizer.more_than(text, model.max_model_len)
    if least is not None:
        raise PromptTooLong(tokens=least, allowed=model.max_model_len, prompt_field=param, at_least=True)


def check_prompt(tokens: list[Any], model: Model, param: str) -> None:
    """Refuse an empty prompt, and one longer than the context."""
    if not tokens:
        raise BadValue("The prompt is empty: it has 0 tokens. Give at least 1.", param=param)
    if len(tokens) > model.max_model_len:
        raise PromptTooLong(tokens=len(tokens), allowed=model.max_model_len, prompt_field=param)


def new_tokens(tokens: int, wanted: int | None, default: int | None, model: Model, params: tuple[str, str]) -> int:
    """Returns the number of new tokens for a prompt of `tokens`; `default` where the request has none.

    `params`: the fields of the prompt and of the number. Raises:
        PromptTooLong: the context cannot hold both; `param` is the number's where the prompt alone fits.
    """
    prompt, number = params
    room = model.max_model_len - tokens
    if wanted is None and room > 0:
        return room if default is None else min(default, room)
    if wanted is None or wanted > room:
        raise PromptTooLong(
            tokens=tokens, allowed=model.max_model_len, wanted=wanted or 1, prompt_field=prompt, wanted_field=number
        )
    return wanted


def chat_prompt(body: ChatBody | TokenizeBody, model: Model, limit: int) -> list[int]:
    """Returns the tokens of the messages, written by the model's chat template.

    Raises:
        PromptTooLong: they have far more than `limit` tokens. A few more are returned.
        Unsupported: the model has no chat template.
        BadValue: the messages are malformed, or the template refuses them with a message of its own.
    """
    if model.chat_template is None:
        raise Unsupported(
            "This model has no chat template. Start the server with --chat-template FILE, or use /v1/completions."
        )
    _check_contents(body.messages or [], model.tokenizer, limit)
    generate, go_on = _turn(body.add_generation_prompt, body.continue_final_message)
    try:
        return chat_tokens(
            model.chat_template,
            model.tokenizer,
            body.messages or [],
            tools=body.tools or None,
            add_generation_prompt=generate,
            continue_final_message=go_on,
            variables=_variables(body),
            special_tokens_in_content=model.special_tokens_in_content,
            limit=limit,
        )
    except BadValue as error:
        error.param = error.param or "messages"
        raise


def _check_contents(messages: list[dict[str, Any]], tokenizer: Tokenizer, limit: int) -> None:
    # Before the template has copied them. Templates omit the assistant's earlier reasoning, so it does not count.
    contents = [message.get("content") for message in messages if message.get("role") != "assistant"]
    least = sum(tokenizer.least_tokens(content) for content in contents if isinstance(content, str))
    # Every message's share was rounded up, and neighbours may share a token.
    if least - len(contents) > limit:
        raise PromptTooLong(tokens=least - len(contents), allowed=limit, prompt_field="messages", at_least=True)


def _turn(add_generation_prompt: bool | None, continue_final_message: bool | None) -> tuple[bool, bool]:
    """Returns (open the assistant's turn, continue the last message); never both."""
    if add_generation_prompt and continue_final_message:
        raise BadValue(
            "`add_generation_prompt` and `continue_final_message` exclude each other. Set one of them to false.",
            param="continue_final_message",
        )
    go_on = bool(continue_final_message)
    return (not go_on if add_generation_prompt is None else add_generation_prompt), go_on


def _variables(body: ChatBody | TokenizeBody) -> Mapping[str, Any]:
    kwargs = body.chat_template_kwargs or {}
    taken = TEMPLATE_OWN.intersection(kwargs)
    if taken:
        raise BadValue(
            f"`chat_template_kwargs` may not set {sorted(taken)[0]}. Use the field of that name.", param="chat_template_kwargs"
        )
    effort = body.reasoning_effort if isinstance(body, ChatBody) else None
    # As in vLLM: templates that use neither variable are not affected.
    return kwargs if effort is None else {"reasoning_effort": effort, "enable_thinking": effort != "none", **kwargs}
