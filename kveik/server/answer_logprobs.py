"""Log-probabilities in the formats of completions, chats and vLLM. Strict JSON: values below the floor become the floor."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from kveik.request.request import TokenLogprob
from kveik.server.call_limits import LOGPROB_FLOOR
from kveik.text.detokenize import Detokenizer
from kveik.text.tokenizer import Tokenizer

Scored = tuple[int, TokenLogprob | None]
"""A token and its log-probability; None for a prompt's first token."""

_MAX_ADDED = 2
"""Special tokens that tokenizers put in front of a text or behind it, at most."""


def _finite(logprob: float) -> float:
    # Written so that NaN becomes the floor too.
    return logprob if logprob >= LOGPROB_FLOOR else LOGPROB_FLOOR


class Placement:
    """Offsets of tokens in the returned text of one choice. A token added the text from its offset to the next.

    Tokens inside a character share that character's offset, and the last of them adds it. A token that the text omits adds
    nothing. In a stream, tokens wait until the text before them is sent, because a stop string may still remove it.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], *, skip_special: bool, echo: str | None) -> None:
        """`echo`: the prompt's text, where the answer repeats it."""
        self._echo = _echo_offsets(prompt, echo, tokenizer, skip_special) if echo is not None else []
        self._detokenizer = Detokenizer(tokenizer, prompt=prompt, skip_special=skip_special)
        self._next = len(echo or "")
        self._sent = 0
        self._held: list[tuple[Scored, int]] = []

    def take(self, scored: Sequence[Scored], *, echoed: int, text: str, last: bool) -> list[tuple[Scored, int]]:
        """Add new tokens, the first `echoed` of them the prompt's, and new text. Returns tokens to show now, with offsets."""
        self._sent += len(text)
        self._held += zip(scored[:echoed], self._echo, strict=False)
        for entry in scored[echoed:]:
            self._held.append((entry, self._next))
            self._next += len(self._detokenizer.push([entry[0]]).text)
        if last:
            ready = [(entry, min(offset, self._sent)) for entry, offset in self._held]
        else:
            ready = [(entry, offset) for entry, offset in self._held if offset <= self._sent]
        # Offsets never decrease, so the ready tokens are the first ones.
        del self._held[: len(ready)]
        return ready


def _echo_offsets(prompt: Sequence[int], text: str, tokenizer: Tokenizer, skip_special: bool) -> list[int]:
    """Returns offsets of a prompt's tokens in its text. The text is shown as received: with special tokens that it spells,
    without the start token added in front. Where a normalizer changed it, offsets are those of the changed text, up to its end.
    """
    shown = _pieces(prompt, tokenizer, skip_special)
    if "".join(shown) != text:
        edges = [(first, len(prompt) - last) for last in range(_MAX_ADDED + 1) for first in range(_MAX_ADDED + 1)]
        for first, end in edges:
            inner = _pieces(prompt[first:end], tokenizer, False)
            if "".join(inner) == text:
                shown = [""] * min(first, len(prompt)) + inner
                break
    offsets = [0, *itertools.accumulate(map(len, shown))]
    offsets += [len(text)] * (len(prompt) + 1 - len(offsets))
    return [min(offset, len(text)) for offset in offsets[: len(prompt)]]


def _pieces(tokens: Sequence[int], tokenizer: Tokenizer, skip_special: bool) -> list[str]:
    detokenizer = Detokenizer(tokenizer, skip_special=skip_special)
    return [detokenizer.push([token]).text for token in tokens]


def completion_logprobs(placed: Sequence[tuple[Scored, int]], tokenizer: Tokenizer, *, top: int) -> dict[str, object]:
    """Returns OpenAI's legacy format, of tokens with their offsets.

    `top_logprobs` holds the `top` likeliest tokens of every place and the chosen one, also where it is not among them.
    """
    tokens = [tokenizer.token_text(token) for (token, _), _ in placed]
    entries = [entry for (_, entry), _ in placed]
    pairs = zip(entries, tokens, strict=True)
    tops = [None if entry is None else _top_by_text(entry, text, tokenizer, top) for entry, text in pairs]
    return {
        "tokens": tokens,
        "token_logprobs": [None if entry is None else _finite(entry.logprob) for entry in entries],
        "top_logprobs": tops if top else None,
        "text_offset": [offset for _, offset in placed],
    }


def _top_by_text(entry: TokenLogprob, text: str, tokenizer: Tokenizer, top: int) -> dict[str, float]:
    # Several tokens can have one text (parts of a character); the likeliest of them is reported.
    by_text: dict[str, float] = {}
    for token, logprob in entry.top[:top]:
        by_text.setdefault(tokenizer.token_text(token), _finite(logprob))
    by_text.setdefault(text, _finite(entry.logprob))
    return by_text


def chat_logprobs(scored: Sequence[Scored], tokenizer: Tokenizer, *, top: int) -> list[dict[str, object]]:
    """Returns OpenAI's chat format: one entry per token, with its bytes and the `top` likeliest."""
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
    """Returns vLLM's format: per prompt token None or {id: {logprob, rank, decoded_token}}, rank only where known."""
    return [None if entry is None else _by_id(entry, tokenizer, top) for entry in entries]


def _by_id(entry: TokenLogprob, tokenizer: Tokenizer, top: int) -> dict[str, object]:
    ranked = {token: (logprob, rank) for rank, (token, logprob) in enumerate(entry.top[:top], start=1)}
    chosen = {entry.token: ranked.get(entry.token, (entry.logprob, None))}
    return {
        str(token): {"logprob": _finite(logprob), "rank": rank, "decoded_token": tokenizer.token_text(token)}
        for token, (logprob, rank) in (chosen | ranked).items()
    }
