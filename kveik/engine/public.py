"""Reads the files of --public-prefix as the tokens that requests will have."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from kveik.errors import BadValue, Refused
from kveik.text.chat_template import ChatTemplate, Message, chat_tokens
from kveik.text.tokenizer import Tokenizer


def public_tokens(files: Sequence[str], tokenizer: Tokenizer, template: ChatTemplate | None) -> list[tuple[int, ...]]:
    """Returns one prefix per file. Raises BadValue, with the file's name, where it is malformed.

    .json: a list of token ids, or a list of chat messages, which the model's template writes; anything else is text, as a
    completion's prompt is. What a tokenizer makes of the very end may depend on what follows; such a token is not shared.
    """
    return [tuple(_read(Path(name), tokenizer, template)) for name in files]


def _read(path: Path, tokenizer: Tokenizer, template: ChatTemplate | None) -> Sequence[int]:
    try:
        text = path.read_text(encoding="utf-8")
        tokens = _of_json(json.loads(text), tokenizer, template) if path.suffix == ".json" else tokenizer.encode(text)
    except (OSError, ValueError, Refused) as error:
        raise BadValue(f"The file {path} of --public-prefix cannot be read: {error}", param="public_prefix") from error
    if not tokens:
        raise BadValue(f"The file {path} of --public-prefix is empty.", param="public_prefix")
    return tokens


def _of_json(content: object, tokenizer: Tokenizer, template: ChatTemplate | None) -> Sequence[int]:
    """Returns the tokens. Raises ValueError where the content is neither ids nor messages."""
    if not isinstance(content, list):
        raise ValueError("it must be a list of token ids or of messages.")
    if all(type(token) is int and 0 <= token < tokenizer.vocab_size for token in content):
        return content
    if not all(isinstance(message, dict) and isinstance(message.get("role"), str) for message in content):
        raise ValueError(f"it must be a list of token ids in [0, {tokenizer.vocab_size}) or of messages.")
    if template is None:
        raise ValueError("the model has no chat template that could write these messages.")
    messages: list[Message] = content
    return chat_tokens(template, tokenizer, messages, add_generation_prompt=False)
