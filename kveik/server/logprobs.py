"""Log-probabilities in the three forms that clients know. Always strict JSON: what is below the floor stands at the floor."""

from __future__ import annotations

from collections.abc import Sequence

from kveik.request.request import TokenLogprob
from kveik.server.limits import LOGPROB_FLOOR
from kveik.text.tokenizer import Tokenizer

Scored = tuple[int, TokenLogprob | None]
"""A token, and its log-probability; None for a prompt's first token, which nothing predicts."""


def _finite(logprob: float) -> float:
    # Written so that NaN ends at the floor too.
    return logprob if logprob >= LOGPROB_FLOOR else LOGPROB_FLOOR


def completion_logprobs(
    scored: Sequence[Scored], tokenizer: Tokenizer, *, top: int, offset: int, skip_special: bool
) -> tuple[dict[str, object], int]:
    """OpenAI's legacy form, and the offset in the text at which the next token begins.

    `top_logprobs` holds the `top` likeliest tokens of every place and the chosen one, also where it is not among them.
    """
    tokens, logprobs, tops, offsets = [], [], [], []
    for token, entry in scored:
        text = tokenizer.token_text(token)
        tokens.append(text)
        logprobs.append(None if entry is None else _finite(entry.logprob))
        tops.append(None if entry is None else _top_by_text(entry, text, tokenizer, top))
        offsets.append(offset)
        # A special token that the text leaves out takes no room in it.
        offset += 0 if skip_special and token in tokenizer.special_ids else len(text)
    return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": tops if top else None, "text_offset": offsets}, offset


def _top_by_text(entry: TokenLogprob, text: str, tokenizer: Tokenizer, top: int) -> dict[str, float]:
    # Several tokens can have one text (parts of a character); the likeliest of them keeps the place.
    found: dict[str, float] = {}
    for token, logprob in entry.top[:top]:
        found.setdefault(tokenizer.token_text(token), _finite(logprob))
    found.setdefault(text, _finite(entry.logprob))
    return found


def chat_logprobs(scored: Sequence[Scored], tokenizer: Tokenizer, *, top: int) -> list[dict[str, object]]:
    """OpenAI's chat form: one entry per token, with its bytes and the `top` likeliest."""
    return [
        {
            **_chat_entry(token, entry.logprob, tokenizer),
            "top_logprobs": [_chat_entry(other, logprob, tokenizer) for other, logprob in entry.top[:top]],
        }
        for token, entry in scored
        if entry is not None
    ]


def _chat_entry(token: int, logprob: float, tokenizer: Tokenizer) -> dict[str, object]:
    return {
        "token": tokenizer.token_text(token),
        "logprob": _finite(logprob),
        "bytes": list(tokenizer.token_bytes(token)),
    }


def prompt_logprobs(
    entries: Sequence[TokenLogprob | None], tokenizer: Tokenizer, *, top: int
) -> list[dict[str, object] | None]:
    """vLLM's form: per prompt token None or {id: {logprob, rank, decoded_token}}. A rank beyond the likeliest is not known."""
    return [None if entry is None else _by_id(entry, tokenizer, top) for entry in entries]


def _by_id(entry: TokenLogprob, tokenizer: Tokenizer, top: int) -> dict[str, object]:
    ranked = {token: (logprob, rank) for rank, (token, logprob) in enumerate(entry.top[:top], start=1)}
    chosen = {entry.token: ranked.get(entry.token, (entry.logprob, None))}
    return {
        str(token): {"logprob": _finite(logprob), "rank": rank, "decoded_token": tokenizer.token_text(token)}
        for token, (logprob, rank) in (chosen | ranked).items()
    }
