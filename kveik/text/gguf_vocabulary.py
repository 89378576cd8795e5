"""Tokenizers from the vocabulary inside a GGUF file: byte-level BPE (`gpt2`) and SentencePiece BPE (`llama`).

Works on plain metadata (GGUF key -> Python value); knows nothing of the file itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import groupby

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from kveik.errors import ModelBroken, Unsupported
from kveik.text.pretokenizers import pre_tokenization
from kveik.text.token_bytes import BYTE_LEVEL, SPACE_MARK, Spelling
from kveik.text.tokenizer import Tokenizer
from kveik.words import counted

Merge = tuple[str, str]


class TokenType(IntEnum):
    """llama.cpp's `llama_token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


# Control tokens that end a turn or a text, by their exact text. A GGUF file has one eos id, while the originals'
# generation_config.json often names several (Qwen2.5: <|im_end|> and <|endoftext|>); llama.cpp keeps the same kind of list.
END_TEXTS = frozenset(
    {
        "<|im_end|>",
        "<|endoftext|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end_of_text|>",
        "<|end|>",
        "<end_of_turn>",
        "<\uff5cend\u2581of\u2581sentence\uff5c>",
    }
)
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_ROLES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """The checked keys. texts: one per id, without the padding that only fills up the model's head; by_type: their ids."""

    texts: Sequence[str]
    by_type: Mapping[int, list[int]]
    metadata: Mapping[str, object]

    def get(self, name: str) -> object:
        return self.metadata.get(f"tokenizer.ggml.{name}")

    def id_of(self, role: str) -> int | None:
        """The token id under `<role>_token_id`, or None when the file names none. Never a default."""
        value = self.get(f"{role}_token_id")
        if value is None:
            return None
        if not isinstance(value, int) or not 0 <= value < len(self.texts):
            raise ModelBroken(
                f"tokenizer.ggml.{role}_token_id is {value}; the vocabulary has {counted(len(self.texts), 'token')}."
            )
        return value

    def flag(self, name: str, absent: bool) -> bool:
        value = self.get(name)
        return absent if value is None else bool(value)

    def ids(self, *types: TokenType) -> list[int]:
        return sorted(token for kind in types for token in self.by_type.get(kind, ()))


def tokenizer_from_gguf(metadata: Mapping[str, object]) -> Tokenizer:
    """The tokenizer that `tokenizer.ggml.*` describes.

    `add_bos_token` and `add_eos_token` are followed; absent, SentencePiece vocabularies start with BOS and others do not. A
    token id that the file does not name is not guessed. Raises `Unsupported` for a model or pre-tokenizer we do not know,
    `ModelBroken` for lists that are missing or contradict each other.
    """
    vocabulary = _read(metadata)
    model = vocabulary.get("model")
    if model == "gpt2":
        core, spelling, sentencepiece = _byte_level_core(vocabulary), BYTE_LEVEL, False
    elif model == "llama":
        core, spelling, sentencepiece = *_sentencepiece_core(vocabulary), True
    else:
        raise Unsupported(
            f"The vocabulary type '{str(model)[:60]}' (tokenizer.ggml.model) is not supported; gpt2 and llama are."
        )
    _add_special(core, vocabulary, sentencepiece=sentencepiece)
    bos, eos = vocabulary.id_of("bos"), vocabulary.id_of("eos")
    with_bos = vocabulary.flag("add_bos_token", absent=sentencepiece) and bos is not None
    with_eos = vocabulary.flag("add_eos_token", absent=False) and eos is not None
    return Tokenizer(
        core,
        spelling,
        bos=bos,
        eos_ids=_end_ids(vocabulary),
        before=[bos] if with_bos and bos is not None else [],
        after=[eos] if with_eos and eos is not None else [],
        named={name: vocabulary.texts[token] for name, role in _ROLES.items() if (token := vocabulary.id_of(role)) is not None},
    )


def _read(metadata: Mapping[str, object]) -> _Vocabulary:
    texts = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(texts, list) or not texts:
        raise ModelBroken("The file has no vocabulary (tokenizer.ggml.tokens).")
    types = metadata.get("tokenizer.ggml.token_type")
    if types is None:
        types = [TokenType.NORMAL] * len(texts)
    if not isinstance(types, list) or len(types) != len(texts):
        found = len(types) if isinstance(types, list) else 0
        raise ModelBroken(
            f"The vocabulary has {counted(len(texts), 'token')} but {counted(found, 'type')} (tokenizer.ggml.token_type)."
        )
    size = len(texts)
    # Converters pad the list to the height of the model's head with unused [PADn]; those are no tokens.
    while size and types[size - 1] == TokenType.UNUSED and texts[size - 1] == f"[PAD{size - 1}]":
        size -= 1
    texts = texts[:size]
    if len(set(texts)) != size:
        raise ModelBroken(f"The vocabulary has {counted(size, 'token')} but only {len(set(texts))} different ones.")
    by_type: dict[int, list[int]] = {}
    for token, kind in enumerate(types[:size]):
        by_type.setdefault(kind, []).append(token)
    return _Vocabulary(texts, by_type, metadata)


def _byte_level_core(vocabulary: _Vocabulary) -> tokenizers.Tokenizer:
    merges = vocabulary.get("merges")
    if not isinstance(merges, list):
        raise ModelBroken("The byte-level vocabulary has no merges (tokenizer.ggml.merges).")
    long = sum(len(vocabulary.texts[token]) > 1 for token in vocabulary.by_type.get(TokenType.NORMAL, ()))
    if long and not merges:
        raise ModelBroken(
            f"The byte-level vocabulary's list of merges is empty (tokenizer.ggml.merges), and {long} of its tokens can only "
            "be made by merging. Convert the model again with a current converter."
        )
    pre = vocabulary.get("pre")
    cutting = pre_tokenization(str(pre) if pre is not None else None, merges)
    core = tokenizers.Tokenizer(_bpe(vocabulary.texts, [_pair(merge) for merge in merges], ignore_merges=cutting.whole_words))
    if cutting.normalizer is not None:
        core.normalizer = cutting.normalizer()
    core.pre_tokenizer = cutting.cut()
    core.decoder = decoders.ByteLevel()
    return core


def _pair(merge: str) -> tuple[str, str]:
    # A byte-level vocabulary writes a space as another character, so that the one in a merge only separates.
    left, _, right = merge.partition(" ")
    return left, right


def _sentencepiece_core(vocabulary: _Vocabulary) -> tuple[tokenizers.Tokenizer, Spelling]:
    """SentencePiece's BPE picks the best-scored piece that two neighbours make; merges in that order do the same."""
    scores = vocabulary.get("scores")
    if not isinstance(scores, list) or len(scores) < len(vocabulary.texts):
        raise ModelBroken("The SentencePiece vocabulary has no score for each token (tokenizer.ggml.scores).")
    if vocabulary.flag("remove_extra_whitespaces", absent=False):
        raise Unsupported("tokenizer.ggml.remove_extra_whitespaces is not supported: it would change the text.")
    # Converters write user-defined runs of spaces, as Gemma has them, with real spaces.
    texts = [SPACE_MARK * len(text) if _is_run(text) else text for text in vocabulary.texts]
    if len(set(texts)) != len(texts):
        raise ModelBroken("The SentencePiece vocabulary holds one piece twice, once with spaces and once with U+2581.")
    user_defined = vocabulary.ids(TokenType.USER_DEFINED)
    ordinary = vocabulary.ids(TokenType.NORMAL, TokenType.UNUSED)
    merges = merges_from_scores(texts, scores, first=user_defined, ordinary=ordinary)
    unknown = vocabulary.id_of("unknown")
    unknown = next(iter(vocabulary.ids(TokenType.UNKNOWN)), None) if unknown is None else unknown
    core = tokenizers.Tokenizer(
        _bpe(texts, merges, unk_token=None if unknown is None else texts[unknown], fuse_unk=True, byte_fallback=True)
    )
    if runs := sorted((texts[token] for token in user_defined if _is_run(texts[token])), key=len, reverse=True):
        core.pre_tokenizer = pre_tokenizers.Split(Regex("|".join(runs)), behavior="isolated")
        _check_runs(core, runs)
    marked = normalizers.Replace(" ", SPACE_MARK)
    leading = vocabulary.flag("add_space_prefix", absent=True)
    core.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE_MARK), marked]) if leading else marked
    parts = [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    core.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if leading else parts)
    return core, Spelling(space_mark=SPACE_MARK, byte_tokens=True, leading_space=leading)


def _is_run(text: str) -> bool:
    """Whether it is nothing but spaces, in either spelling."""
    return (bool(text) and text.strip(" ") == "") or (len(text) > 1 and text.strip(SPACE_MARK) == "")


def _check_runs(core: tokenizers.Tokenizer, runs: Sequence[str]) -> None:
    """SentencePiece finds the longest run whole before it merges; here it is cut out, and then made by merging."""
    for run in runs:
        if core.encode(run, add_special_tokens=False).tokens != [run]:
            raise Unsupported(
                f"The vocabulary has a user-defined run of {counted(len(run), 'space')} that its shorter pieces do not make."
            )


def _bpe(texts: Sequence[str], merges: Sequence[tuple[str, str]], **options: object) -> models.BPE:
    vocab = {text: token for token, text in enumerate(texts)}
    try:
        return models.BPE(vocab=vocab, merges=merges, **options)
    except Exception as error:  # the Rust side raises a bare Exception for a merge of tokens that are not there
        raise ModelBroken(f"The vocabulary's merges do not fit its tokens: {str(error)[:200]}.") from error


def _add_special(core: tokenizers.Tokenizer, vocabulary: _Vocabulary, *, sentencepiece: bool) -> None:
    """Make control tokens special, and user-defined ones found whole in any text.

    In a SentencePiece vocabulary, user-defined runs of spaces are left to `_sentencepiece_core`: as added tokens they would be
    found in raw text, before a space is put in front of it.
    """
    special = set(vocabulary.ids(TokenType.CONTROL, TokenType.UNKNOWN))
    special.update(token for role in ("bos", "eos") if (token := vocabulary.id_of(role)) is not None)
    core.add_special_tokens([AddedToken(vocabulary.texts[token], normalized=False, special=True) for token in sorted(special)])
    plain = [vocabulary.texts[token] for token in vocabulary.ids(TokenType.USER_DEFINED) if token not in special]
    # Of several that begin at one place, the longest is found.
    core.add_tokens([AddedToken(text, normalized=False) for text in plain if not (sentencepiece and _is_run(text))])


def _end_ids(vocabulary: _Vocabulary) -> set[int]:
    named = {vocabulary.id_of(key.removesuffix("_token_id")) for key in _END_KEYS}
    known = {token for token in vocabulary.ids(TokenType.CONTROL) if vocabulary.texts[token] in END_TEXTS}
    return {token for token in named if token is not None} | known


def merges_from_scores(
    texts: Sequence[str], scores: Sequence[float], *, first: Sequence[int], ordinary: Sequence[int]
) -> list[Merge]:
    """Returns the merges of a SentencePiece vocabulary, which has scores instead, best first.

    texts, scores [vocabulary]; `first` are ids whose merges precede all others (user-defined pieces, which SentencePiece finds
    before it merges), `ordinary` the ids that merging may make. Control and byte pieces are in neither: SentencePiece never
    makes them from text. Order: score, higher first; among equals the longer left part, as `generate_merges` of transformers
    (Apache-2.0) has it, so that ids agree.
    """
    known = frozenset(texts)
    best_first = sorted(ordinary, key=lambda token: -scores[token])
    in_front = _splits((texts[token] for token in first), known)
    if len({scores[token] for token in ordinary}) == len(ordinary):
        return in_front + _splits((texts[token] for token in best_first), known)
    for _, equals in groupby(best_first, key=lambda token: scores[token]):
        candidates = _splits((texts[token] for token in equals), known)
        in_front += sorted(candidates, key=lambda merge: (-len(merge[0]), -len(merge[1])))
    return in_front


def _splits(texts: Iterable[str], known: frozenset[str]) -> list[Merge]:
    """Cuts each text into two known pieces in every way, longest left part first.

    One flat comprehension that looks at the right part first, which is less often known: 1.4 million cuts in 0.7 s.
    """
    return [
        (left, right)
        for text in texts
        for cut in range(len(text) - 1, 0, -1)
        if (right := text[cut:]) in known and (left := text[:cut]) in known
    ]
