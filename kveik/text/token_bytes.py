"""Bytes of a token, in the two spellings that vocabularies use. Independent of models and files.

Byte-level (GPT-2): every byte is written as one printable character, so that a token's text is its bytes in disguise.
SentencePiece: text is written as it is, a space as U+2581 (▁), and a byte that no token covers as `<0xAB>`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from kveik.errors import Unsupported

SPACE_MARK = "\u2581"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """Character -> byte, as `bytes_to_unicode` of GPT-2 draws it: printable Latin-1 stays, the rest moves to U+0100 on."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in set(plain)]
    return {chr(byte): byte for byte in plain} | {chr(0x100 + index): byte for index, byte in enumerate(moved)}


BYTE_OF = _byte_alphabet()
CHARACTER_OF = {byte: character for character, byte in BYTE_OF.items()}


@dataclass(frozen=True, slots=True)
class Spelling:
    """A vocabulary's way of writing bytes as text."""

    byte_level: bool = False
    space_mark: str | None = None
    """The character in place of a space; None: a space is a space."""

    byte_tokens: bool = False
    """Whether `<0xAB>` stands for one byte."""

    leading_space: bool = False
    """Whether the encoder puts a space in front of a text, which decoding takes away again."""

    def bytes_of(self, text: str) -> bytes:
        """The bytes of an ordinary token spelled `text`."""
        if self.byte_level:
            try:
                return bytes([BYTE_OF[character] for character in text])
            except KeyError:
                return text.encode("utf-8", "replace")
        if self.byte_tokens and len(text) == 6 and (match := _BYTE_TOKEN.fullmatch(text)):
            return bytes([int(match[1], 16)])
        if self.space_mark is not None:
            text = text.replace(self.space_mark, " ")
        return text.encode("utf-8", "replace")


BYTE_LEVEL = Spelling(byte_level=True)


def spelling_of_decoder(decoder: Mapping[str, object] | None) -> Spelling:
    """The spelling behind the `decoder` of a tokenizer.json. Raises `Unsupported`, naming the part we do not read."""
    parts = _flatten(decoder)
    kinds = [str(part.get("type")) for part in parts]
    if kinds == ["ByteLevel"]:
        return BYTE_LEVEL
    mark: str | None = None
    leading = False
    for kind, part in zip(kinds, parts, strict=True):
        if kind == "Replace" and part.get("content") == " " and isinstance(pattern := part.get("pattern"), dict):
            mark = str(pattern.get("String"))
        elif kind == "Metaspace":
            mark = str(part.get("replacement"))
            leading = part.get("prepend_scheme", "always") != "never"
        elif kind == "Strip" and part.get("content") == " " and part.get("stop") == 0:
            leading = part.get("start") == 1
        elif kind not in ("ByteFallback", "Fuse"):
            raise Unsupported(f"The tokenizer's decoder is made of {', '.join(kinds) or 'nothing'}; '{kind}' is not supported.")
    if not kinds:
        raise Unsupported("The tokenizer has no decoder; ByteLevel and SentencePiece-like ones are supported.")
    return Spelling(space_mark=mark, byte_tokens="ByteFallback" in kinds, leading_space=leading)


def _flatten(decoder: Mapping[str, object] | None) -> list[Mapping[str, object]]:
    if decoder is None:
        return []
    inner = decoder.get("decoders")
    if decoder.get("type") == "Sequence" and isinstance(inner, list):
        return [part for each in inner for part in _flatten(each)]
    return [decoder]


class TokenBytes:
    """Token id -> bytes, computed when first asked for; never larger than the vocabulary."""

    def __init__(
        self, spelling: Spelling, text_of: Callable[[int], str | None], added: Collection[int], vocab_size: int
    ) -> None:
        """`text_of` gives a token's text; the ids in `added` (special and user-defined) are written in plain text."""
        self.spelling = spelling
        self._text_of = text_of
        self._added = added
        self._vocab_size = vocab_size
        self._known: dict[int, bytes] = {}

    def __getitem__(self, token: int) -> bytes:
        """The token's bytes; none for an id that is not in the vocabulary."""
        found = self._known.get(token)
        return self._learn(token) if found is None else found

    def _learn(self, token: int) -> bytes:
        # Ids beyond the vocabulary are not remembered: only a vocabulary is bounded.
        if not 0 <= token < self._vocab_size:
            return b""
        text = self._text_of(token)
        if text is None:
            spelled = b""
        elif token in self._added and self.spelling.byte_level:
            # An added token such as <é> is text, although each of its characters is also in the byte alphabet.
            spelled = text.encode("utf-8", "replace")
        else:
            spelled = self.spelling.bytes_of(text)
        self._known[token] = spelled
        return spelled
