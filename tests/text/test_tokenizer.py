"""Tokenizers from model folders, and what every tokenizer promises."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Core
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from kveik.errors import BadValue, ModelBroken, Unsupported
from kveik.text.gguf_vocabulary import tokenizer_from_gguf
from kveik.text.token_bytes import BYTE_LEVEL, BYTE_OF, Spelling
from kveik.text.tokenizer import Tokenizer, tokenizer_from_folder
from tests.text.vocabularies import (
    NASTY,
    byte_ids,
    byte_level_core,
    byte_level_metadata,
    byte_level_tokenizer,
    real_tokenizer,
    sentencepiece_metadata,
)

CatalogueFile = Callable[[str], Path]


def saved(folder: Path, core: Core, **files: dict[str, object]) -> Path:
    folder.mkdir(exist_ok=True)
    core.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def core_of(tokenizer: Tokenizer) -> Core:
    return tokenizer._variant(frozenset())


def byte_level() -> Core:
    return Core.from_str(byte_level_core())


def with_bos(core: Core) -> Core:
    token = core.token_to_id("<|start|>")
    core.post_processor = processors.TemplateProcessing(single="<|start|> $A", special_tokens=[("<|start|>", token)])
    return core


def metaspace() -> Core:
    """SentencePiece as newer tokenizer.json files write it: a Metaspace on both sides."""
    core = core_of(tokenizer_from_gguf(sentencepiece_metadata()))
    core.normalizer = None
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    core.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first")])
    return core


def sentencepiece() -> Core:
    return core_of(tokenizer_from_gguf(sentencepiece_metadata()))


CORES = pytest.mark.parametrize("make", [byte_level, lambda: with_bos(byte_level()), sentencepiece, metaspace])


@CORES
def test_a_folders_ids_and_text_equal_transformers(tmp_path: Path, make: Callable[[], Core]) -> None:
    folder = saved(tmp_path, make(), tokenizer_config={"tokenizer_class": "PreTrainedTokenizerFast"})
    ours, theirs = tokenizer_from_folder(folder), AutoTokenizer.from_pretrained(folder)
    for text in [*NASTY, "<|start|>a<|end|><think>", "<turn>x<tag>y"]:
        assert ours.encode(text) == theirs(text)["input_ids"]
        ids = ours.encode(text, add_special=False)
        assert ids == theirs(text, add_special_tokens=False)["input_ids"]
        for skip in (True, False):
            assert ours.decode(ids, skip_special=skip) == theirs.decode(ids, skip_special_tokens=skip)


@pytest.mark.model
@pytest.mark.parametrize("name", ["smollm2-135m", "qwen2.5-coder-0.5b", pytest.param("gemma-3-270m", marks=pytest.mark.slow)])
def test_a_real_vocabulary_saved_as_a_folder_is_the_same_tokenizer(
    catalogue_file: CatalogueFile, tmp_path: Path, name: str
) -> None:
    ours = real_tokenizer(catalogue_file(name))
    PreTrainedTokenizerFast(tokenizer_object=core_of(ours)).save_pretrained(tmp_path)
    again, theirs = tokenizer_from_folder(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert again.vocab_size == ours.vocab_size
    assert again.special_ids == ours.special_ids
    assert again.spelling == ours.spelling
    for text in NASTY:
        ids = again.encode(text, add_special=False)
        assert ids == ours.encode(text, add_special=False) == theirs(text, add_special_tokens=False)["input_ids"]
        assert again.decode(ids) == ours.decode(ids)
        assert again.encode(text, parse_special=False) == ours.encode(text, add_special=False, parse_special=False)


def test_end_tokens_are_the_union_of_all_files(tmp_path: Path) -> None:
    core = byte_level()
    start, end, think = (core.token_to_id(text) for text in ("<|start|>", "<|end|>", "<think>"))
    folder = saved(
        tmp_path,
        core,
        tokenizer_config={"eos_token": {"content": "<|end|>"}, "bos_token": "<|start|>"},
        config={"eos_token_id": start},
        generation_config={"eos_token_id": [end, think]},
    )
    ours = tokenizer_from_folder(folder)
    assert ours.eos_ids == {start, end, think}
    assert ours.bos == start
    assert ours.named == {"bos_token": "<|start|>", "eos_token": "<|end|>"}


def test_end_tokens_that_are_no_ids_are_left_out(tmp_path: Path) -> None:
    folder = saved(tmp_path, byte_level(), config={"eos_token_id": None}, generation_config={"eos_token_id": [True, "x", 7]})
    assert tokenizer_from_folder(folder).eos_ids == {7}


def test_truncation_and_padding_in_the_file_do_not_change_a_prompt(tmp_path: Path) -> None:
    core = byte_level()
    core.enable_truncation(4)
    core.enable_padding(length=64)
    ours = tokenizer_from_folder(saved(tmp_path, core))
    text = "a long text, longer than four tokens"
    assert ours.decode(ours.encode(text)) == text


def test_ids_with_gaps_count_up_to_the_highest(tmp_path: Path) -> None:
    core = Core(models.BPE(vocab={"a": 0, "b": 7}, merges=[]))
    core.decoder = decoders.ByteLevel()
    ours = tokenizer_from_folder(saved(tmp_path, core))
    assert ours.vocab_size == 8
    assert [ours.token_bytes(token) for token in range(9)] == [b"a", *[b""] * 6, b"b", b""]


def test_a_folder_without_a_tokenizer_is_a_broken_model(tmp_path: Path) -> None:
    with pytest.raises(ModelBroken, match=r"no tokenizer\.json"):
        tokenizer_from_folder(tmp_path)


@pytest.mark.parametrize("content", ["", "{", "{}", "[]", '{"model": {"type": "Nothing"}}'])
def test_a_tokenizer_that_cannot_be_read_is_a_broken_model(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelBroken, match="cannot be read"):
        tokenizer_from_folder(tmp_path)


@pytest.mark.parametrize(
    ("decoder", "name"), [(decoders.WordPiece(), "WordPiece"), (decoders.CTC(), "CTC"), (None, "no decoder")]
)
def test_a_decoder_we_do_not_know_is_refused_by_name(tmp_path: Path, decoder: decoders.Decoder | None, name: str) -> None:
    core = Core(models.BPE(vocab={"a": 0}, merges=[]))
    if decoder is not None:
        core.decoder = decoder
    with pytest.raises(Unsupported, match=name):
        tokenizer_from_folder(saved(tmp_path, core))


# Text in.


@pytest.mark.parametrize("text", ["\ud800", "a\udc00b", "\ud83d", "ok \udfff"])
def test_half_a_surrogate_pair_is_refused_with_its_place(text: str) -> None:
    with pytest.raises(BadValue, match=r"U\+D[89CDEF][0-9A-F]{2} at character \d"):
        byte_level_tokenizer().encode(text)


@pytest.mark.parametrize("make", [byte_level_tokenizer, lambda: tokenizer_from_gguf(sentencepiece_metadata())])
def test_valid_text_comes_back_unchanged(make: Callable[[], Tokenizer]) -> None:
    tokenizer = make()
    for text in NASTY:
        plain = tokenizer.encode(text, add_special=False, parse_special=False)
        # A literal U+2581 is a space to SentencePiece.
        wanted = text if tokenizer.spelling.byte_level else text.replace("\u2581", " ")
        assert tokenizer.decode(plain) == wanted


def test_plain_encoding_leaves_the_shared_tokenizer_as_it_was() -> None:
    tokenizer = byte_level_tokenizer()
    before = tokenizer.encode("<|start|>x")
    assert tokenizer.encode("<|start|>x", parse_special=False) != before
    assert tokenizer.encode("<|start|>x") == before


def test_threads_may_share_a_tokenizer() -> None:
    tokenizer = byte_level_tokenizer()
    texts = [f"<|start|>{text}<|end|>" for text in NASTY]
    wanted = [(tokenizer.encode(text), tokenizer.encode(text, parse_special=False)) for text in texts]
    wrong: list[str] = []

    def work() -> None:
        fresh = [(tokenizer.encode(text), tokenizer.encode(text, parse_special=False)) for text in texts]
        wrong.extend(text for text, got, want in zip(texts, fresh, wanted, strict=True) if got != want)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_variants_without_some_markers_are_bounded() -> None:
    tokenizer = byte_level_tokenizer()
    for size in range(40):
        tokenizer.encode_without("x", frozenset(range(size)))
    assert len(tokenizer._variants) <= 8


def test_a_normalizer_also_holds_for_plain_encoding() -> None:
    core = byte_level()
    core.normalizer = normalizers.NFC()
    from_core = Tokenizer(core, byte_level_tokenizer().spelling)
    assert from_core.encode("e\u0301", parse_special=False) == from_core.encode("é")


def test_a_special_token_that_merges_could_make_is_still_spelled_out_as_plain_text() -> None:
    vocab = {
        text: token for token, text in enumerate(["<s>", "<", "s", ">", "s>", "\u2581", *(f"<0x{b:02X}>" for b in range(256))])
    }
    core = Core(models.BPE(vocab=vocab, merges=[("s", ">"), ("<", "s>")], byte_fallback=True))
    core.normalizer = normalizers.Replace(" ", "\u2581")
    core.add_special_tokens(["<s>"])
    tokenizer = Tokenizer(core, Spelling(space_mark="\u2581", byte_tokens=True))
    assert tokenizer.encode("<s> <s>") == [0, vocab["\u2581"], 0]
    plain = tokenizer.encode("<s> <s>", parse_special=False)
    assert 0 not in plain
    assert tokenizer.decode(plain) == "<s> <s>"


def test_other_threads_run_while_a_long_text_is_cut() -> None:
    tokenizer, done = byte_level_tokenizer(), threading.Event()
    ticks: list[float] = []

    def tick() -> None:
        while not done.wait(0.001):
            ticks.append(time.perf_counter())

    ticker = threading.Thread(target=tick)
    ticker.start()
    ticks.append(time.perf_counter())
    tokenizer.encode("the yeast is 123 kept. " * 20_000)  # about a quarter of a second of work
    ticks.append(time.perf_counter())
    done.set()
    ticker.join()
    silences = [after - before for before, after in itertools.pairwise(sorted(ticks))]
    # Holding the interpreter leaves one silence of nearly the whole time.
    assert max(silences) < (ticks[-1] - ticks[0]) / 2


def test_the_cheap_bound_allows_for_characters_that_are_composed() -> None:
    vocab = dict(BYTE_OF)
    core = Core(models.BPE(vocab=vocab, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.normalizer = normalizers.NFC()
    tokenizer = Tokenizer(core, BYTE_LEVEL)
    text = "\u03b1\u0313\u0300\u0345" * 10  # four characters that NFC makes one of three bytes
    assert len(tokenizer.encode(text)) == 30
    assert 0 < tokenizer.least_tokens(text) <= 30


@pytest.mark.parametrize("make", [byte_level_tokenizer, lambda: tokenizer_from_gguf(sentencepiece_metadata())])
def test_the_cheap_bound_never_exceeds_the_tokens(make: Callable[[], Tokenizer]) -> None:
    tokenizer = make()
    for text in [*NASTY, "the yeast is kept" * 1000]:
        assert tokenizer.least_tokens(text) <= len(tokenizer.encode(text, add_special=False))
    assert tokenizer.least_tokens("x" * 1_000_000) > 10_000


@pytest.mark.model
@pytest.mark.parametrize("name", ["smollm2-135m", "qwen2.5-coder-0.5b", "gemma-3-270m"])
def test_a_count_slice_by_slice_never_exceeds_the_tokens(catalogue_file: CatalogueFile, name: str) -> None:
    tokenizer = real_tokenizer(catalogue_file(name))
    for part in ["a ", "the yeast is kept; 1234567, \n\n\t", "x", " ", "é日本 ", "<|im_end|>\n", "-=" * 40]:
        text = part * (200_000 // len(part))
        tokens = len(tokenizer.encode(text, add_special=False))
        assert tokenizer.more_than(text, tokens) is None
        told = tokenizer.more_than(text, tokens // 10)
        assert told is None or tokens // 10 < told <= tokens
        if part == "a ":
            assert told is not None


def test_a_text_whose_spaces_a_token_swallows_is_not_counted_with_them() -> None:
    core = byte_level()
    core.add_tokens([AddedToken("<|r|>", rstrip=True)])
    tokenizer = Tokenizer(core, BYTE_LEVEL)
    text = "<|r|>" + " " * 1_000_000
    assert len(tokenizer.encode(text)) == 1
    assert tokenizer.more_than(text, 1) is None
    assert tokenizer.more_than("xyz " * 100_000, 1000) is not None


@pytest.mark.model
@pytest.mark.parametrize("name", ["smollm2-135m", "qwen2.5-coder-0.5b", "gemma-3-270m"])
def test_the_cheap_bound_holds_for_the_longest_tokens_there_are(catalogue_file: CatalogueFile, name: str) -> None:
    tokenizer = real_tokenizer(catalogue_file(name))
    longest = sorted(range(tokenizer.vocab_size), key=lambda token: -len(tokenizer.token_text(token)))[:50]
    for text in [*(tokenizer.token_text(token) * 50 for token in longest), "\u1f82" * 500, "\u03b1\u0313\u0300\u0345" * 500]:
        assert tokenizer.least_tokens(text) <= len(tokenizer.encode(text, add_special=False))
    assert tokenizer.least_tokens("x" * 16_000_000) > 10_000


def test_there_is_no_cheap_bound_where_characters_may_vanish() -> None:
    core = byte_level()
    core.add_tokens([AddedToken("<|r|>", rstrip=True)])
    assert Tokenizer(core, BYTE_LEVEL).least_tokens("x" * 10**6) == 0
    core = byte_level()
    core.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Strip()])
    assert Tokenizer(core, BYTE_LEVEL).least_tokens("x" * 10**6) == 0
    core.normalizer = normalizers.Replace(Regex(" +"), " ")
    assert Tokenizer(core, BYTE_LEVEL).least_tokens("x" * 10**6) == 0


@pytest.mark.slow
@pytest.mark.model
def test_a_run_that_the_patterns_engine_gives_up_on_is_the_callers_fault(catalogue_file: CatalogueFile) -> None:
    tokenizer = real_tokenizer(catalogue_file("qwen2.5-coder-0.5b"))
    with pytest.raises(BadValue, match="12000000 characters"):
        tokenizer.encode(" " * 12_000_000)
    assert tokenizer.decode(tokenizer.encode("still here")) == "still here"


# Tokens out.


def test_a_tokens_text_is_readable_and_its_bytes_are_exact() -> None:
    tokenizer = byte_level_tokenizer()
    first, second = byte_ids(tokenizer, "é".encode())
    assert (tokenizer.token_bytes(first), tokenizer.token_bytes(second)) == (b"\xc3", b"\xa9")
    assert tokenizer.token_text(first) == "\ufffd"
    (the,) = tokenizer.encode(" the", add_special=False)
    assert tokenizer.token_text(the) == " the"
    end = tokenizer.special_id("<|end|>")
    assert end is not None
    assert tokenizer.token_text(end) == "<|end|>"


@pytest.mark.parametrize("token", [-1, 10**6, 2**40])
def test_ids_outside_the_vocabulary_have_no_text(token: int) -> None:
    tokenizer = byte_level_tokenizer()
    assert tokenizer.token_bytes(token) == b""
    assert tokenizer.token_text(token) == ""
    assert tokenizer.decode([token]) == ""


def test_an_added_token_of_characters_in_the_byte_alphabet_is_text() -> None:
    core = byte_level()
    core.add_special_tokens([AddedToken("<é>", normalized=False)])
    tokenizer = Tokenizer(core, byte_level_tokenizer().spelling)
    token = tokenizer.special_id("<é>")
    assert token is not None
    # tokenizers' own decoder takes é for the byte 0xE9 here and gives a replacement mark.
    assert tokenizer.decode([token], skip_special=False) == "<é>"


def test_special_ids_are_found_by_their_exact_text_only() -> None:
    tokenizer = byte_level_tokenizer()
    assert tokenizer.special_id("<|end|>") in tokenizer.special_ids
    assert tokenizer.special_id("<|end|> ") is None
    assert tokenizer.special_id("the") is None
    # A tag is text: a stop string finds it in the output.
    assert tokenizer.special_id("<think>") is None


@pytest.mark.model
@pytest.mark.parametrize("name", ["smollm2-135m", "qwen2.5-coder-0.5b", "gemma-3-270m"])
def test_the_bytes_of_all_tokens_are_those_of_the_librarys_decoder(catalogue_file: CatalogueFile, name: str) -> None:
    tokenizer = real_tokenizer(catalogue_file(name))
    core = core_of(tokenizer)
    for token in range(0, tokenizer.vocab_size, 7):
        assert tokenizer.token_text(token) == core.decode([token], skip_special_tokens=False)


def test_invalid_bytes_become_one_mark_per_maximal_subpart() -> None:
    tokenizer = tokenizer_from_gguf(sentencepiece_metadata(prefix=False))
    for data in (b"\xe4\xbd", b"\xe4\xbda", b"\xf0\x9f\x8cx\x80", b"\xe4\xbd\xa0\xff", b"\xc0\x80"):
        assert tokenizer.decode(byte_ids(tokenizer, data)) == data.decode("utf-8", "replace")


def test_gguf_and_folder_agree_on_what_is_special(tmp_path: Path) -> None:
    from_gguf = tokenizer_from_gguf(byte_level_metadata())
    from_folder = tokenizer_from_folder(saved(tmp_path, byte_level()))
    assert from_gguf.special_ids == from_folder.special_ids
    for text in NASTY:
        assert from_gguf.encode(text) == from_folder.encode(text)
