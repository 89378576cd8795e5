"""GGUF vocabularies give the ids of the models' own tokenizers."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Regex, pre_tokenizers
from tokenizers import Tokenizer as Core
from transformers import AutoTokenizer, Qwen2Tokenizer
from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer

from kveik.errors import ModelBroken, Unsupported
from kveik.text.gguf_vocabulary import tokenizer_from_gguf
from tests.text.vocabularies import (
    NASTY,
    PROSE,
    byte_level_metadata,
    metadata_of,
    real_tokenizer,
    sentencepiece_metadata,
    sentencepiece_model,
    tokens_of,
)

CatalogueFile = Callable[[str], Path]
MODELS = ["smollm2-135m", "qwen2.5-coder-0.5b", "gemma-3-270m"]


def transformers_core(metadata: dict[str, object], architecture: str) -> Core:
    """What transformers makes of the same GGUF keys, without its reader, which needs 4 to 20 s per file."""
    names = {"model": "tokenizer_type", "pre": "pre_tokenizer_type", "add_space_prefix": "add_prefix_space"}
    keys = {key.removeprefix("tokenizer.ggml."): value for key, value in metadata.items()}
    core: Core = convert_gguf_tokenizer(architecture, {names.get(key, key): value for key, value in keys.items()})[0]
    return core


def original_core(name: str, metadata: dict[str, object]) -> Core:
    """The tokenizer as the model's own tokenizer.json has it.

    transformers' conversion of GGUF vocabularies deviates from it in three known ways. It merges runs of spaces longer than the
    31 of Gemma's longest piece, where SentencePiece takes the longest piece first. It takes GPT-2's cut for `smollm`, where
    the original (HuggingFaceTB/SmolLM2) first isolates each digit; and it leaves out the NFC normalizer of Qwen2, which its
    own Qwen2Tokenizer class has. The originals count: the models were trained with them.
    """
    if name == "gemma-3-270m":
        core = transformers_core(metadata, "gemma3")
        core.pre_tokenizer = pre_tokenizers.Split(Regex("\u2581{2,31}"), behavior="isolated")
        return core
    if name == "smollm2-135m":
        core = transformers_core(metadata, "llama")
        single = pre_tokenizers.Digits(individual_digits=True)
        core.pre_tokenizer = pre_tokenizers.Sequence([single, pre_tokenizers.ByteLevel(add_prefix_space=False)])
        return core
    converted = transformers_core(metadata, "qwen2")
    vocab = {text: token for token, text in enumerate(tokens_of(metadata)) if not text.startswith("[PAD")}
    merges = metadata["tokenizer.ggml.merges"]
    assert isinstance(merges, list)
    original = Qwen2Tokenizer(vocab=vocab, merges=[tuple(merge.split(" ")) for merge in merges])
    added = converted.get_added_tokens_decoder().values()
    original.add_tokens(list(added))
    core = original.backend_tokenizer
    assert isinstance(core, Core)
    return core


@pytest.mark.model
@pytest.mark.parametrize("name", MODELS)
def test_ids_equal_the_original_tokenizers_on_nasty_text(catalogue_file: CatalogueFile, name: str) -> None:
    path = catalogue_file(name)
    ours, original = real_tokenizer(path), original_core(name, metadata_of(path))
    for text in [*NASTY, "\n".join(NASTY), PROSE * 20]:
        ids = ours.encode(text, add_special=False)
        assert ids == original.encode(text, add_special_tokens=False).ids, repr(text[:80])
        assert ours.decode(ids, skip_special=False) == original.decode(ids, skip_special_tokens=False)
        assert ours.decode(ids) == original.decode(ids)


@pytest.mark.model
def test_smollm_isolates_digits_where_the_plain_gpt2_cut_would_not(catalogue_file: CatalogueFile) -> None:
    path = catalogue_file("smollm2-135m")
    ours, converted = real_tokenizer(path), transformers_core(metadata_of(path), "llama")
    assert len(ours.encode("12345")) == 5
    assert ours.encode("no digits here, can't be") == converted.encode("no digits here, can't be").ids
    assert ours.encode("year 1984") == [*ours.encode("year"), *ours.encode(" "), *ours.encode("1984")]


@pytest.mark.model
def test_qwen_composes_characters_before_cutting(catalogue_file: CatalogueFile) -> None:
    ours = real_tokenizer(catalogue_file("qwen2.5-coder-0.5b"))
    assert ours.encode("cafe\u0301") == ours.encode("café")


@pytest.mark.model
@pytest.mark.parametrize(("name", "size"), list(zip(MODELS, [49152, 151665, 262144], strict=True)))
def test_the_vocabulary_has_its_real_tokens_and_no_padding(catalogue_file: CatalogueFile, name: str, size: int) -> None:
    ours = real_tokenizer(catalogue_file(name))
    assert ours.vocab_size == size
    assert ours.token_bytes(size - 1) != b""
    assert ours.token_bytes(size) == b""


@pytest.mark.model
@pytest.mark.parametrize(
    ("name", "bos", "eos", "starts"),
    [("smollm2-135m", 1, {0, 2}, []), ("qwen2.5-coder-0.5b", 151643, {151643, 151645}, []), ("gemma-3-270m", 2, {1, 106}, [2])],
)
def test_start_and_end_tokens_are_the_files(
    catalogue_file: CatalogueFile, name: str, bos: int, eos: set[int], starts: list[int]
) -> None:
    ours = real_tokenizer(catalogue_file(name))
    assert ours.bos == bos
    assert ours.eos_ids == eos
    assert ours.encode("") == starts
    assert ours.encode("", add_special=False) == []


@pytest.mark.model
def test_a_vocabulary_of_262144_tokens_is_ready_in_seconds(catalogue_file: CatalogueFile) -> None:
    metadata = metadata_of(catalogue_file("gemma-3-270m"))
    start = time.process_time()
    tokenizer_from_gguf(metadata)
    # 1.7 s of CPU on an idle core; twice that on a busy machine. A quadratic slip takes minutes.
    assert time.process_time() - start < 6


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize("name", MODELS)
def test_ids_equal_transformers_reading_the_same_file(catalogue_file: CatalogueFile, name: str) -> None:
    path = catalogue_file(name)
    theirs = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    ours = real_tokenizer(path)
    # In digits (SmolLM), decomposed characters (Qwen) and long runs (Gemma), transformers' conversion leaves the originals.
    odd = ("\u0301", "\u0300", " " * 32)
    plain = [text for text in NASTY if not any(c.isnumeric() for c in text) and not any(part in text for part in odd)]
    assert len(plain) > 12
    for text in plain:
        assert ours.encode(text) == theirs(text)["input_ids"], repr(text[:80])


@pytest.mark.slow
@pytest.mark.model
def test_both_qwen_files_hold_the_same_tokenizer(catalogue_file: CatalogueFile) -> None:
    small, large = (metadata_of(catalogue_file(f"qwen2.5-coder-{size}")) for size in ("0.5b", "1.5b"))
    keys = {key for key in small if key.startswith("tokenizer.ggml.")}
    assert keys == {key for key in large if key.startswith("tokenizer.ggml.")}
    assert all(small[key] == large[key] for key in keys)


# SentencePiece: the library itself is the oracle.


@pytest.mark.parametrize("prefix", [True, False])
def test_scores_alone_give_the_ids_of_sentencepiece(prefix: bool) -> None:
    ours, model = tokenizer_from_gguf(sentencepiece_metadata(prefix)), sentencepiece_model(prefix)
    plain = [text for text in NASTY if "<" not in text and "\x00" not in text]
    texts = [*plain, *PROSE.splitlines(), *(line[start:] for line in PROSE.splitlines() for start in range(0, len(line), 7))]
    assert len(texts) > 60
    for text in texts:
        assert ours.encode(text, add_special=False) == model.encode(text), repr(text[:80])
        assert ours.decode(ours.encode(text)) == model.decode(model.encode(text))


def test_what_no_piece_covers_is_written_in_bytes() -> None:
    ours = tokenizer_from_gguf(sentencepiece_metadata(prefix=False))
    ids = ours.encode("你", add_special=False)
    assert [ours.token_bytes(token) for token in ids] == [b"\xe4", b"\xbd", b"\xa0"]
    assert ours.decode(ids) == "你"


def test_control_pieces_are_never_made_from_plain_text() -> None:
    ours, model = tokenizer_from_gguf(sentencepiece_metadata()), sentencepiece_model()
    text = "<s>a</s> <turn> <unk> <0x41>"
    assert ours.encode(text, add_special=False, parse_special=False) == model.encode(text)
    assert not ours.special_ids & set(ours.encode(text, add_special=False, parse_special=False))
    assert {ours.special_id("<s>"), ours.special_id("</s>"), ours.special_id("<turn>")} <= set(ours.encode(text))


def test_user_defined_pieces_are_found_in_any_text() -> None:
    ours = tokenizer_from_gguf(sentencepiece_metadata())
    tag = ours.token_id("<tag>")
    assert tag in ours.encode("a<tag>b", parse_special=False)
    assert tag not in ours.special_ids
    assert ours.decode(ours.encode("a<tag>b")) == "a<tag> b"  # the prefix space stands at every start of plain text


# Pre-tokenizers by name.


def test_an_unknown_pre_tokenizer_is_refused_by_name() -> None:
    with pytest.raises(Unsupported, match="'unknown-xyz'"):
        tokenizer_from_gguf(byte_level_metadata(pre="unknown-xyz"))


@pytest.mark.parametrize("pre", [None, "default"])
def test_an_absent_pre_tokenizer_is_refused_for_a_vocabulary_nobody_knows(pre: str | None) -> None:
    with pytest.raises(Unsupported, match=r"tokenizer\.ggml\.pre"):
        tokenizer_from_gguf(byte_level_metadata(pre=pre))


@pytest.mark.model
@pytest.mark.parametrize("name", ["smollm2-135m", "qwen2.5-coder-0.5b"])
def test_an_absent_pre_tokenizer_is_recovered_from_known_merges(catalogue_file: CatalogueFile, name: str) -> None:
    path = catalogue_file(name)
    silent = {key: value for key, value in metadata_of(path).items() if key != "tokenizer.ggml.pre"}
    recovered, known = tokenizer_from_gguf(silent), real_tokenizer(path)
    assert [recovered.encode(text) for text in NASTY] == [known.encode(text) for text in NASTY]
    merges = silent["tokenizer.ggml.merges"]
    assert isinstance(merges, list)
    with pytest.raises(Unsupported, match=r"absent"):
        tokenizer_from_gguf({**silent, "tokenizer.ggml.merges": merges[:-1]})


@pytest.mark.parametrize(("pre", "whole"), [("llama-bpe", True), ("tekken", True), ("gpt-2", False), ("qwen2", False)])
def test_a_word_that_is_a_token_is_taken_whole_where_the_vocabulary_comes_from_tiktoken(pre: str, whole: bool) -> None:
    tokens = [*tokens_of(byte_level_metadata()), "zyzzyva"]  # no merge leads to it
    ours = tokenizer_from_gguf(byte_level_metadata(pre=pre, tokens=tokens, token_type=[1] * len(tokens)))
    assert (ours.encode("zyzzyva") == [len(tokens) - 1]) is whole
    assert ours.decode(ours.encode("zyzzyva")) == "zyzzyva"


# Start and end tokens.


@pytest.mark.parametrize("add", [True, False, None])
@pytest.mark.parametrize("present", [True, False])
@pytest.mark.parametrize("model", ["llama", "gpt2"])
def test_bos_follows_the_key_and_is_never_a_default(model: str, present: bool, add: bool | None) -> None:
    make = sentencepiece_metadata if model == "llama" else byte_level_metadata
    bos = tokens_of(make()).index("<s>" if model == "llama" else "<|start|>")
    ours = tokenizer_from_gguf(make(bos_token_id=bos if present else None, add_bos_token=add))
    wanted = present and (add if add is not None else model == "llama")
    plain = ours.encode("Hi", add_special=False)
    assert ours.encode("Hi") == ([bos] if wanted else []) + plain
    assert ours.bos == (bos if present else None)


@pytest.mark.parametrize("present", [True, False])
@pytest.mark.parametrize("add", [True, False, None])
def test_eos_is_appended_only_when_the_key_says_so(present: bool, add: bool | None) -> None:
    eos = tokens_of(byte_level_metadata()).index("<|end|>")
    ours = tokenizer_from_gguf(byte_level_metadata(eos_token_id=eos if present else None, add_eos_token=add))
    assert ours.encode("Hi") == ours.encode("Hi", add_special=False) + ([eos] if present and add else [])


def test_every_named_end_token_counts() -> None:
    tokens = tokens_of(byte_level_metadata())
    named = {"eos_token_id": tokens.index("<|start|>"), "eot_token_id": tokens.index("<think>")}
    ours = tokenizer_from_gguf(byte_level_metadata(**named))
    # <|end|> is a control token known to end a turn, whatever the keys say.
    assert ours.eos_ids == {tokens.index("<|start|>"), tokens.index("<think>"), tokens.index("<|end|>")}


# Token types.


def test_control_tokens_are_one_id_from_a_template_and_plain_text_from_a_user() -> None:
    ours = tokenizer_from_gguf(byte_level_metadata())
    start = ours.special_id("<|start|>")
    assert start is not None
    assert ours.encode("<|start|>hi") == [start, *ours.encode("hi")]
    plain = ours.encode("<|start|>hi", parse_special=False)
    assert start not in plain
    assert ours.decode(plain) == "<|start|>hi"


def test_without_types_only_named_ids_are_special() -> None:
    tokens = tokens_of(byte_level_metadata())
    ours = tokenizer_from_gguf(byte_level_metadata(token_type=None, eos_token_id=tokens.index("<|end|>")))
    assert ours.special_ids == {tokens.index("<|end|>")}


# Files that contradict themselves.


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"tokens": None}, "no vocabulary"),
        ({"tokens": []}, "no vocabulary"),
        ({"merges": None}, "no merges"),
        ({"merges": []}, r"list of merges is empty .*, and \d+ of its tokens"),
        ({"merges": ["nowhere tobefound"]}, "do not fit"),
        ({"token_type": [1, 2]}, "2 types"),
        ({"bos_token_id": 10**6}, "bos_token_id is 1000000"),
        ({"eos_token_id": -1}, "eos_token_id is -1"),
    ],
)
def test_a_contradictory_vocabulary_is_refused(keys: dict[str, object], sentence: str) -> None:
    with pytest.raises(ModelBroken, match=sentence):
        tokenizer_from_gguf(byte_level_metadata(**keys))


def test_a_vocabulary_of_single_bytes_needs_no_merges() -> None:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizer_from_gguf(byte_level_metadata(tokens=letters, token_type=[1] * len(letters), merges=[]))
    assert tokenizer.decode(tokenizer.encode("Gjær", add_special=False)) == "Gjær"
    assert len(tokenizer.encode("Gjær", add_special=False)) == 5


def test_a_token_that_occurs_twice_is_refused() -> None:
    tokens = tokens_of(byte_level_metadata())
    with pytest.raises(ModelBroken, match="different"):
        tokenizer_from_gguf(byte_level_metadata(tokens=[*tokens[:-1], tokens[0]]))


def test_a_sentencepiece_vocabulary_needs_a_score_for_each_token() -> None:
    with pytest.raises(ModelBroken, match="score"):
        tokenizer_from_gguf(sentencepiece_metadata(scores=[0.0]))


def test_another_kind_of_vocabulary_is_refused_by_name() -> None:
    with pytest.raises(Unsupported, match="'bert'"):
        tokenizer_from_gguf(byte_level_metadata(model="bert"))


def test_whitespace_removal_is_refused_because_it_changes_text() -> None:
    with pytest.raises(Unsupported, match="remove_extra_whitespaces"):
        tokenizer_from_gguf(sentencepiece_metadata(remove_extra_whitespaces=True))
