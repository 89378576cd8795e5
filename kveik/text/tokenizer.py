"""Text to token ids and back. Wraps a `tokenizers.Tokenizer`; independent of weights, requests and templates."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import tokenizers

from kveik.errors import BadValue, ModelBroken
from kveik.text.token_bytes import CHARACTER_OF, Spelling, TokenBytes, spelling_of_decoder
from kveik.words import counted

# A few markers sets are in use at once (one per chat template, and the plain one); more would be a leak.
_MAX_VARIANTS = 8

_SLICE_CHARACTERS = 1 << 16
_LOST_AT_A_CUT = 256
"""Tokens given away for every cut between two slices. A cut divides one token, seldom into more than a few."""

_PLAUSIBLE_BYTES = 8
"""Bytes per token up to which a text may well fit, so that counting slices first would be work done twice."""

_BLANKS = re.compile(r"\s+")


class Tokenizer:
    """A vocabulary, its way of cutting text, and its special tokens. Immutable to its users; safe to share among threads."""

    def __init__(
        self,
        core: tokenizers.Tokenizer,
        spelling: Spelling,
        *,
        bos: int | None = None,
        eos_ids: Collection[int] = (),
        before: Sequence[int] = (),
        after: Sequence[int] = (),
        named: Mapping[str, str] | None = None,
    ) -> None:
        """`before` and `after` go around every text encoded with `add_special`, on top of what `core` itself adds.

        `named` holds the texts of tokens with a role, as templates name them: bos_token, eos_token, unk_token, pad_token.
        """
        # A tokenizer.json may ask for truncation or padding, which would silently change a prompt.
        core.no_truncation()
        core.no_padding()
        self._core = core
        self._before, self._after = tuple(before), tuple(after)
        self._added = core.get_added_tokens_decoder()
        self._variants: dict[frozenset[int], tokenizers.Tokenizer] = {}
        vocab = core.get_vocab(with_added_tokens=True)
        self.vocab_size = 1 + max(vocab.values(), default=-1)
        """Highest id + 1; a model's head may be padded beyond it."""
        self._reach = _reach(core, spelling, max(map(len, vocab), default=1))
        self.bos = bos
        self.eos_ids = frozenset(eos_ids)
        self.special_ids = frozenset(token for token, added in self._added.items() if added.special)
        self.named: Mapping[str, str] = dict(named or {})
        self._special_by_text = {self._added[token].content: token for token in self.special_ids}
        self.bytes = TokenBytes(spelling, core.id_to_token, frozenset(self._added), self.vocab_size)

    @property
    def spelling(self) -> Spelling:
        return self.bytes.spelling

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """The ids of `text`, with the model's own start and end tokens if `add_special`.

        Without `parse_special`, text that reads like a special token is cut like any other text. User-defined tokens (tags,
        runs of newlines) are part of the vocabulary's text and are found either way. Raises `BadValue` for lone surrogates.
        """
        excluded = frozenset() if parse_special else self.special_ids
        ids = self.encode_without(text, excluded, add_special=add_special)
        return [*self._before, *ids, *self._after] if add_special else ids

    def encode_without(self, text: str, excluded: frozenset[int], *, add_special: bool = False) -> list[int]:
        """As `encode`, but with the added tokens in `excluded` not recognised in the text."""
        _check_characters(text)
        ids = _encode(self._variant(excluded), text, add_special)
        if excluded.isdisjoint(ids):
            return ids
        # Some tokenizer.json files have merges that end in a special token, such as "<" with "s>".
        return [part for token in ids for part in (self._spelled_out(token) if token in excluded else [token])]

    def least_tokens(self, text: str) -> int:
        """A bound that costs nothing: `text` has at least this many tokens.

        For refusing texts of many megabytes that no context holds without cutting them, which can take minutes. 0 where a
        normalizer or a token may swallow any number of characters.
        """
        return -(-len(text) // self._reach) if self._reach is not None else 0

    def more_than(self, text: str, limit: int) -> int | None:
        """A number of tokens beyond `limit` that `text` has at least; None where it may have fewer.

        For refusing what no context holds with little work and memory: by `least_tokens`, and else slice by slice, until it is
        too much. A text of up to 8 `limit` bytes is not looked at, for to encode it is as cheap. Raises as `encode` does.
        """
        least = self.least_tokens(text)
        if least > limit:
            return least
        _check_characters(text)
        if len(text.encode("utf-8")) <= max(_SLICE_CHARACTERS, _PLAUSIBLE_BYTES * limit):
            return None
        least = 0
        for start in range(0, len(text), _SLICE_CHARACTERS):
            piece = text[start : start + _SLICE_CHARACTERS]
            # A token that swallows the spaces beside it swallows them in one slice, and not in the next.
            piece = _BLANKS.sub(" ", piece) if self._reach is None else piece
            least += max(0, len(_encode(self._core, piece, False)) - _LOST_AT_A_CUT)
            if least > limit:
                return least
        return None

    def decode(self, tokens: Sequence[int], *, skip_special: bool = True) -> str:
        """The text of these tokens. Bytes that are not UTF-8 become U+FFFD, one per maximal subpart (Unicode 15, section 3.9).

        Ids outside the vocabulary have no text. `tokenizers` itself replaces a whole run of byte tokens, byte by byte, when any
        of it is invalid; that would change text already streamed, so we do not.
        """
        special = self.special_ids if skip_special else frozenset()
        known = self.bytes
        joined = b"".join([known[token] for token in tokens if token not in special])
        if self.spelling.leading_space and joined.startswith(b" "):
            joined = joined[1:]
        return joined.decode("utf-8", "replace")

    def token_text(self, token: int) -> str:
        """One token as readable text; U+FFFD where it holds only a part of a character."""
        return self.bytes[token].decode("utf-8", "replace")

    def token_bytes(self, token: int) -> bytes:
        """The bytes that the token adds to a text; none for an id outside the vocabulary."""
        return self.bytes[token]

    def special_id(self, text: str) -> int | None:
        """The special token that is written exactly like this, if there is one."""
        return self._special_by_text.get(text)

    def token_id(self, text: str) -> int | None:
        """The token whose vocabulary entry is exactly this text, if there is one."""
        found: int | None = self._core.token_to_id(text)
        return found

    def added_tokens(self) -> Mapping[int, tokenizers.AddedToken]:
        """Special and user-defined tokens, by id, with their matching rules."""
        return self._added

    def _spelled_out(self, token: int) -> list[int]:
        """A special token's text, character by character, as tokens of its own; a character without any is left out."""
        spelled: list[int | None] = []
        for character in self._added[token].content:
            whole = None if self.spelling.byte_level else self.token_id(character)
            if whole is not None:
                spelled.append(whole)
            elif self.spelling.byte_level:
                spelled += [self.token_id(CHARACTER_OF[byte]) for byte in character.encode()]
            else:
                spelled += [self.token_id(f"<0x{byte:02X}>") for byte in character.encode()]
        return [part for part in spelled if part is not None]

    def _variant(self, excluded: frozenset[int]) -> tokenizers.Tokenizer:
        """The core with some added tokens left out. It shares the model, so that only the matching of added tokens is built."""
        if not excluded:
            return self._core
        variant = self._variants.get(excluded)
        if variant is None:
            variant = _without(self._core, [added for token, added in self._added.items() if token not in excluded])
            if len(self._variants) < _MAX_VARIANTS:
                self._variants[excluded] = variant
        return variant


def _without(core: tokenizers.Tokenizer, kept: list[tokenizers.AddedToken]) -> tokenizers.Tokenizer:
    variant = tokenizers.Tokenizer(core.model)
    for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        if getattr(core, part) is not None:
            setattr(variant, part, getattr(core, part))
    variant.add_tokens(kept)
    return variant


def _encode(core: tokenizers.Tokenizer, text: str, add_special: bool) -> list[int]:
    """The ids, found without holding the interpreter: `encode` would stop every other thread, seconds long for megabytes."""
    try:
        ids: list[int] = core.encode_batch_fast([text], add_special_tokens=add_special)[0].ids
    except BaseException as error:
        # pyo3's PanicException is no Exception and cannot be imported. The patterns' engine gives up on runs of ten million.
        if type(error).__name__ != "PanicException":
            raise
        raise BadValue(f"The text, {counted(len(text), 'character')}, is too uniform to be cut into tokens.") from None
    return ids


def _reach(core: tokenizers.Tokenizer, spelling: Spelling, longest: int) -> int | None:
    """Characters of a text that one token can stand for at most; None when there is no such bound.

    A vocabulary that covers every byte spells a token in at least as many characters as it stands for. Composition (NFC) makes
    one character of at most four (Unicode has none with a longer canonical decomposition).
    """
    covers_all = spelling.byte_level or spelling.byte_tokens
    swallows = any(added.lstrip or added.rstrip for added in core.get_added_tokens_decoder().values())
    normalizer = json.loads(core.normalizer.__getstate__()) if core.normalizer is not None else {"type": "Nothing"}
    kinds = {part["type"] for part in normalizer.get("normalizers", [normalizer])}
    if not covers_all or swallows or not kinds <= {"Nothing", "NFC", "Prepend", "Replace"}:
        return None
    if any(part.get("pattern", {"String": " "}) != {"String": " "} for part in normalizer.get("normalizers", [normalizer])):
        return None
    return longest * (4 if "NFC" in kinds else 1)


def _check_characters(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        raise BadValue(
            f"The text holds U+{code:04X} at character {error.start}, half of a surrogate pair, which is not a character."
        ) from None


def tokenizer_from_folder(folder: Path) -> Tokenizer:
    """The tokenizer of a model folder in Hugging Face layout.

    Start and end tokens are added as tokenizer.json's own post-processor says. End tokens are the union of what
    tokenizer_config.json, config.json and generation_config.json name. Raises `ModelBroken` when tokenizer.json is missing or
    cannot be read, `Unsupported` for a decoder that we do not know.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelBroken("The model folder has no tokenizer.json.")
    try:
        core = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the Rust side raises a bare Exception, whatever is wrong
        raise ModelBroken(f"tokenizer.json cannot be read: {str(error)[:200]}.") from error
    decoder = json.loads(core.decoder.__getstate__()) if core.decoder is not None else None
    settings = read_json(folder / "tokenizer_config.json")
    named = {role: text for role in _ROLES if (text := _token_text(settings.get(role))) is not None}
    bos = core.token_to_id(named["bos_token"]) if "bos_token" in named else None
    return Tokenizer(core, spelling_of_decoder(decoder), bos=bos, eos_ids=_eos_ids(core, named, folder), named=named)


_ROLES = ("bos_token", "eos_token", "unk_token", "pad_token")


def _eos_ids(core: tokenizers.Tokenizer, named: Mapping[str, str], folder: Path) -> set[int]:
    found: set[int] = set()
    if "eos_token" in named and (token := core.token_to_id(named["eos_token"])) is not None:
        found.add(token)
    for name in ("config.json", "generation_config.json"):
        value = read_json(folder / name).get("eos_token_id")
        # bool is an int in Python, and `true` is not a token.
        found.update(v for v in (value if isinstance(value, list) else [value]) if isinstance(v, int) and v is not True)
    return found


def _token_text(value: object) -> str | None:
    """tokenizer_config.json writes a token as a string, or as an object with its matching rules."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def read_json(path: Path) -> dict[str, object]:
    """The object in a JSON file; empty when there is no such file. Raises `ModelBroken` when it is not an object."""
    try:
        content = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ModelBroken(f"{path.name} cannot be read as JSON.") from error
    if not isinstance(content, dict):
        raise ModelBroken(f"{path.name} holds no JSON object.")
    return content
