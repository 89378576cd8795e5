"""Tokens to text as they come: never half a character nor a piece of a stop string, always the text of a whole decode."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass

from kveik.text.stops import StopFinder
from kveik.text.tokenizer import Tokenizer

_utf8 = codecs.getincrementaldecoder("utf-8")
# A UTF-8 character has at most 4 bytes, so an unfinished one at most 3.
_UNFINISHED_BYTES = 3


@dataclass(frozen=True, slots=True)
class Piece:
    """Result of one push."""

    text: str
    """Text that is safe to send now."""

    stop: str | None = None
    """The stop string that ended the text, where one did."""

    tokens: int = 0
    """Pushed tokens that belong to the output: up to and including the one that completed the stop string."""


class Detokenizer:
    """The text of one choice, from its tokens.

    All pieces and `finish()`, joined, are `Tokenizer.decode` of all tokens, up to the first stop string:

        bytes     | sent ............ | held: may become a stop string | unfinished character |
                                                                         <= 3 bytes, in the UTF-8 decoder

    After a prompt, the text continues the prompt's: an unfinished character at the prompt's end is finished by the output, and
    the space that decoding takes from a text's start is kept. Work per push is proportional to the new text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        prompt: Sequence[int] = (),
        skip_special: bool = True,
        stops: Sequence[str] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        """`stops` count only when completed by a token after the first `min_tokens` ones."""
        self._bytes = tokenizer.bytes
        self._special = tokenizer.special_ids if skip_special else frozenset()
        self._finder = StopFinder(stops) if stops else None
        self._include_stop = include_stop
        self._uncounted = min_tokens
        self._held = ""
        self._ended = False
        self._decoder = _utf8("replace")
        ending = self._ending_of(prompt)
        self._from_prompt = _unfinished(ending)
        self._at_start = tokenizer.spelling.leading_space and not ending

    def push(self, tokens: Sequence[int]) -> Piece:
        """Take new tokens in. After a stop string nothing more comes."""
        if self._ended:
            return Piece("")
        if self._finder is None:
            joined = b"".join([self._bytes[token] for token in tokens if token not in self._special])
            return Piece(self._characters(joined), None, len(tokens))
        return self._push_watched(tokens, self._finder)

    def finish(self) -> str:
        """The end of the output: what was held back, once. A character that stays unfinished is one U+FFFD."""
        if self._ended:
            return ""
        self._ended = True
        rest, self._held = self._held + self._decoder.decode(b"", final=True), ""
        return rest

    def _push_watched(self, tokens: Sequence[int], finder: StopFinder) -> Piece:
        sent: list[str] = []
        for count, token in enumerate(tokens, 1):
            fresh = "" if token in self._special else self._characters(self._bytes[token])
            self._uncounted -= 1
            if not fresh:
                continue
            match = finder.feed(fresh, counts=self._uncounted < 0)
            if match is not None:
                self._ended = True
                text = self._held + fresh[: match.end]
                sent.append(text if self._include_stop else text[: -len(match.stop)])
                return Piece("".join(sent), match.stop, count)
            text = self._held + fresh
            safe = len(text) - finder.pending
            self._held = text[safe:]
            sent.append(text[:safe])
        return Piece("".join(sent), None, len(tokens))

    def _characters(self, fresh: bytes) -> str:
        """The characters that these bytes complete."""
        if not fresh:
            return ""
        if self._at_start:
            self._at_start = False
            fresh = fresh.removeprefix(b" ")
        if self._from_prompt:
            fresh, self._from_prompt = self._joined_to_prompt(fresh), b""
        return self._decoder.decode(fresh)

    def _joined_to_prompt(self, fresh: bytes) -> bytes:
        """The prompt's unfinished bytes in front, if the output goes on with them; else they were the prompt's own fault."""
        try:
            _utf8("strict").decode(self._from_prompt + fresh[:1])
        except UnicodeDecodeError:
            return fresh
        return self._from_prompt + fresh

    def _ending_of(self, prompt: Sequence[int]) -> bytes:
        """At least the last bytes of the prompt's text, as far as a character can reach back; empty when it has no text."""
        ending = b""
        for token in reversed(prompt):
            if token not in self._special:
                ending = self._bytes[token] + ending
            if len(ending) >= _UNFINISHED_BYTES:
                break
        return ending


def _unfinished(ending: bytes) -> bytes:
    """The bytes at the end that begin a character without finishing it."""
    for count in range(min(_UNFINISHED_BYTES, len(ending)), 0, -1):
        tail = ending[-count:]
        try:
            if _utf8("strict").decode(tail) == "":
                return tail
        except UnicodeDecodeError:
            continue
    return b""
