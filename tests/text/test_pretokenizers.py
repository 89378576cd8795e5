"""Each named cut divides text as the models' own tokenizers do."""

from __future__ import annotations

import pytest
from tokenizers import Regex, pre_tokenizers
from transformers import CohereTokenizer, GPT2Tokenizer, PreTrainedTokenizerFast, Qwen2Tokenizer
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from kveik.errors import Unsupported
from kveik.text.pretokenizers import BY_NAME, pre_tokenization
from kveik.text.token_bytes import BYTE_OF
from tests.text.vocabularies import NASTY

TEXT = "can't 12345 I'LL  \n\n é"


def words(name: str, text: str) -> list[str]:
    """The pieces of the text, as text again."""
    pieces = BY_NAME[name].cut().pre_tokenize_str(text)
    return [bytes(BYTE_OF[character] for character in piece).decode("utf-8", "replace") for piece, _ in pieces]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gpt-2", ["can", "'t", " 12345", " I", "'", "LL", "  \n\n", " é"]),
        ("smollm", ["can", "'t", " ", "1", "2", "3", "4", "5", " I", "'", "LL", "  \n\n", " é"]),
        ("qwen2", ["can", "'t", " ", "1", "2", "3", "4", "5", " I", "'LL", "  \n\n", " é"]),
        ("llama-bpe", ["can", "'t", " ", "123", "45", " I", "'LL", "  \n\n", " é"]),
        ("tekken", ["can", "'t", " ", "1", "2", "3", "4", "5", " I", "'LL", "  \n\n", " é"]),
        ("deepseek-v3", ["can", "'t", " ", "123", "45", " I", "'LL", "  \n\n", " é"]),
        ("deepseek-coder", ["can", "'", "t", " ", "1", "2", "3", "4", "5", " I", "'", "LL", "  ", "\n", "\n", " é"]),
        ("falcon", ["can", "'", "t", " ", "123", "45", " I", "'", "LL", "  \n\n", " é"]),
    ],
)
def test_contractions_digits_spaces_and_lines_are_cut_as_the_name_says(name: str, expected: list[str]) -> None:
    assert words(name, TEXT) == expected


@pytest.mark.parametrize("name", sorted(set(GGUF_PRE_TOKENIZER_SPLITS) & set(BY_NAME)))
def test_cuts_that_transformers_knows_are_the_same(name: str) -> None:
    split = pre_tokenizers.Split(Regex(GGUF_PRE_TOKENIZER_SPLITS[name]), behavior="isolated")
    theirs = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    for text in NASTY:
        assert BY_NAME[name].cut().pre_tokenize_str(text) == theirs.pre_tokenize_str(text)


@pytest.mark.parametrize(
    ("name", "original"), [("gpt-2", GPT2Tokenizer), ("qwen2", Qwen2Tokenizer), ("command-r", CohereTokenizer)]
)
def test_cuts_and_normalizers_are_those_of_the_models_own_tokenizer_classes(
    name: str, original: type[PreTrainedTokenizerFast]
) -> None:
    theirs, ours = original().backend_tokenizer, BY_NAME[name]
    for text in NASTY:
        assert ours.cut().pre_tokenize_str(text) == theirs.pre_tokenizer.pre_tokenize_str(text)
        normal = text if theirs.normalizer is None else theirs.normalizer.normalize_str(text)
        assert (text if ours.normalizer is None else ours.normalizer().normalize_str(text)) == normal


@pytest.mark.parametrize("name", BY_NAME)
def test_no_cut_loses_or_changes_a_character(name: str) -> None:
    for text in NASTY:
        pieces = BY_NAME[name].cut().pre_tokenize_str(text)
        assert bytes(BYTE_OF[character] for piece, _ in pieces for character in piece).decode() == text


def test_an_unknown_name_is_refused_and_the_known_ones_are_listed() -> None:
    with pytest.raises(Unsupported, match=r"'unknown-xyz'.*qwen2"):
        pre_tokenization("unknown-xyz", [])


def test_a_very_long_name_is_not_repeated_whole() -> None:
    with pytest.raises(Unsupported) as refused:
        pre_tokenization("x" * 10_000, [])
    assert len(refused.value.message) < 600
