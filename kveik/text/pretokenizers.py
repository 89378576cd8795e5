"""Ways in which byte-level vocabularies cut text into words before merging, by their GGUF name (`tokenizer.ggml.pre`).

Patterns are those of the models' own tokenizer.json files (llama.cpp quotes them in llama-vocab.cpp), so that ids are equal to
the originals'. A name that is not here is refused: a wrong cut costs quality without any error (perplexity 15.5 instead of 6.2
in one public report).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers
from tokenizers.normalizers import Normalizer
from tokenizers.pre_tokenizers import PreTokenizer

from kveik.errors import Unsupported
from kveik.words import counted

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK_CJK = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_DEEPSEEK_V3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK_CODER = ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+")


@dataclass(frozen=True, slots=True)
class PreTokenization:
    """One way of cutting text."""

    cut: Callable[[], PreTokenizer]
    normalizer: Callable[[], Normalizer] | None = None
    whole_words: bool = False
    """Whether a word that is a token as a whole is taken without merging (`ignore_merges`, as tiktoken vocabularies want)."""


def _split(*patterns: str) -> Callable[[], PreTokenizer]:
    """Isolate what each pattern matches, one after the other, then write bytes as characters."""
    return lambda: pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in patterns),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _byte_level() -> PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _single_digits() -> PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _byte_level()])


def _deepseek_coder() -> PreTokenizer:
    splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in _DEEPSEEK_CODER]
    ending = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([*splits, pre_tokenizers.Digits(individual_digits=True), ending])


def _falcon() -> PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Punctuation(behavior="contiguous"),
            _byte_level(),
            pre_tokenizers.Digits(individual_digits=False),
            pre_tokenizers.Split(Regex("[0-9][0-9][0-9]"), behavior="isolated"),
        ]
    )


_GPT2_CUT = PreTokenization(_byte_level)
_LLAMA3_CUT = PreTokenization(_split(_LLAMA3), whole_words=True)
_QWEN2_CUT = PreTokenization(_split(_QWEN2), normalizers.NFC)
_DIGITS_CUT = PreTokenization(_single_digits)

BY_NAME: dict[str, PreTokenization] = {
    "gpt-2": _GPT2_CUT,
    "phi-2": _GPT2_CUT,
    "llama3": _LLAMA3_CUT,
    "llama-v3": _LLAMA3_CUT,
    "llama-bpe": _LLAMA3_CUT,
    "falcon3": _LLAMA3_CUT,
    "qwen2": _QWEN2_CUT,
    "deepseek-r1-qwen": PreTokenization(_split(_QWEN2)),
    "smollm": _DIGITS_CUT,
    "starcoder": _DIGITS_CUT,
    "refact": _DIGITS_CUT,
    "command-r": PreTokenization(_single_digits, normalizers.NFC),
    "tekken": PreTokenization(_split(_TEKKEN), whole_words=True),
    "deepseek-coder": PreTokenization(_deepseek_coder),
    "deepseek-v3": PreTokenization(_split(r"\p{N}{1,3}", _DEEPSEEK_CJK, _DEEPSEEK_V3)),
    "falcon": PreTokenization(_falcon),
}

# Files older than `tokenizer.ggml.pre` say nothing, or "default". Only a vocabulary known merge by merge is recognised then.
BY_MERGES: dict[str, str] = {
    "aea6ed50becdb3beed814d2fde2dea2e655d1039addf269d74a4708ce2ed4d63": "smollm",  # SmolLM2, 48,900 merges
    "bbeef245f0b03a9613753068e5799c2496290005594c68f09eed68feedbe6d1f": "qwen2",  # Qwen2 and Qwen2.5, 151,387 merges
}


def merges_signature(merges: Sequence[str]) -> str:
    """SHA-256 over the merges as GGUF writes them, one a line: stays the same when a fine-tune adds tokens."""
    return hashlib.sha256("\n".join(merges).encode("utf-8", "surrogatepass")).hexdigest()


def pre_tokenization(name: str | None, merges: Sequence[str]) -> PreTokenization:
    """The cut for `tokenizer.ggml.pre`. Raises `Unsupported` for a name we do not know, or none with unknown merges."""
    if name is None or name == "default":
        known = BY_MERGES.get(merges_signature(merges))
        if known is None:
            raise Unsupported(
                f"The file does not say how its vocabulary cuts text (tokenizer.ggml.pre is {name or 'absent'}), and its "
                f"{counted(len(merges), 'merge')} unknown to kveik. Convert the model again with a current converter."
            )
        return BY_NAME[known]
    if name not in BY_NAME:
        raise Unsupported(
            f"The pre-tokenizer '{name[:60]}' (tokenizer.ggml.pre) is not supported; known: {', '.join(BY_NAME)}."
        )
    return BY_NAME[name]
