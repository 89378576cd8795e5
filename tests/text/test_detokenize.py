"""Streamed text, joined, is the text of a whole decode, and never half a character or a piece of a stop string."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from kveik.text.detokenize import Detokenizer, Piece
from kveik.text.gguf_vocabulary import tokenizer_from_gguf
from kveik.text.tokenizer import Tokenizer
from tests.seeds import over_seeds
from tests.text.vocabularies import (
    NASTY,
    byte_ids,
    byte_level_tokenizer,
    real_tokenizer,
    sentencepiece_metadata,
)

CatalogueFile = Callable[[str], Path]
PEPPER = "\U0001f336"


def byte_level() -> Tokenizer:
    return byte_level_tokenizer()


def sentencepiece() -> Tokenizer:
    return tokenizer_from_gguf(sentencepiece_metadata())


SMALL = pytest.mark.parametrize("make", [byte_level, sentencepiece])


def streamed(detokenizer: Detokenizer, tokens: Sequence[int], chance: random.Random | None = None) -> list[Piece]:
    """Push the tokens, one by one or in random groups; the last piece is what `finish` gives."""
    pieces, start = [], 0
    while start < len(tokens):
        count = 1 if chance is None else chance.randint(1, 4)
        pieces.append(detokenizer.push(tokens[start : start + count]))
        start += count
    return [*pieces, Piece(detokenizer.finish())]


def joined(pieces: list[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


def random_tokens(tokenizer: Tokenizer, chance: random.Random) -> list[int]:
    """Any ids: whole words, stray bytes, pieces of characters, special tokens and ids that do not exist."""
    tokens: list[int] = []
    for _ in range(chance.randint(1, 12)):
        kind = chance.random()
        if kind < 0.4:
            tokens.append(chance.randrange(tokenizer.vocab_size))
        elif kind < 0.6:
            tokens += tokenizer.encode(chance.choice(["é", "你好", PEPPER, " the yeast", "\n"]), add_special=False)
        elif kind < 0.8:
            # Overlong forms, lone continuations, surrogates, truncated characters.
            wild = [
                b"\xc0\x80",
                b"\x80",
                b"\xed\xa0\x80",
                b"\xf0\x9f\x8c",
                b"\xe4\xbd",
                b"\xff",
                b"\xf4\x90\x80\x80",
                b"\xe2\x28\xa1",
            ]
            tokens += byte_ids(tokenizer, chance.choice(wild))
        elif kind < 0.9:
            tokens.append(chance.choice(sorted(tokenizer.special_ids)))
        else:
            tokens.append(chance.choice([-1, tokenizer.vocab_size, 10**9]))
    return tokens


def fuzz(tokenizer: Tokenizer, seeds: range) -> None:
    by_byte = byte_ids(tokenizer, bytes(range(256)))
    assert len(set(by_byte)) == 256
    for seed in seeds:
        chance = random.Random(seed)
        tokens, skip = random_tokens(tokenizer, chance), chance.random() < 0.5
        pieces = streamed(Detokenizer(tokenizer, skip_special=skip), tokens, chance)
        assert joined(pieces) == tokenizer.decode(tokens, skip_special=skip), f"seed {seed}"
        assert sum(piece.tokens for piece in pieces) == len(tokens)


@SMALL
def test_any_ids_stream_to_the_text_of_a_whole_decode(make: Callable[[], Tokenizer]) -> None:
    fuzz(make(), range(1000))


@pytest.mark.slow
@SMALL
def test_any_ten_thousand_sequences_stream_to_the_text_of_a_whole_decode(make: Callable[[], Tokenizer]) -> None:
    fuzz(make(), range(1000, 11000))


@pytest.mark.model
@pytest.mark.parametrize("name", ["smollm2-135m", "qwen2.5-coder-0.5b", "gemma-3-270m"])
def test_real_vocabularies_stream_nasty_text_unchanged(catalogue_file: CatalogueFile, name: str) -> None:
    tokenizer = real_tokenizer(catalogue_file(name))
    for text in NASTY:
        tokens = tokenizer.encode(text, add_special=False)
        pieces = streamed(Detokenizer(tokenizer, skip_special=False), tokens)
        assert joined(pieces) == tokenizer.decode(tokens, skip_special=False)
        assert "\ufffd" not in joined(pieces) or "\ufffd" in text
    chance = random.Random(0)
    for _ in range(300):
        tokens = [chance.randrange(tokenizer.vocab_size) for _ in range(30)]
        assert joined(streamed(Detokenizer(tokenizer), tokens, chance)) == tokenizer.decode(tokens)


@SMALL
def test_a_character_over_several_tokens_comes_whole(make: Callable[[], Tokenizer]) -> None:
    tokenizer = make()
    tokens = byte_ids(tokenizer, f"a{PEPPER}ď".encode())
    pieces = streamed(Detokenizer(tokenizer), tokens)
    assert [piece.text for piece in pieces] == ["a", "", "", "", PEPPER, "", "ď", ""]


@SMALL
@pytest.mark.parametrize("kept", [1, 2, 3])
def test_a_character_cut_off_by_the_end_is_one_replacement_mark(make: Callable[[], Tokenizer], kept: int) -> None:
    tokenizer = make()
    tokens = byte_ids(tokenizer, b"a" + PEPPER.encode()[:kept])
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.push(tokens).text == "a"
    assert detokenizer.finish() == "\ufffd"
    assert detokenizer.finish() == ""
    assert tokenizer.decode(tokens) == "a\ufffd"


@SMALL
def test_nothing_waits_longer_than_a_character(make: Callable[[], Tokenizer]) -> None:
    tokenizer = make()
    for lead in (b"\xf0\x9f\x8c", b"\x80\x80\x80", b"\xff\xff\xff", b"\xe4\xe4\xe4"):
        detokenizer = Detokenizer(tokenizer)
        detokenizer.push(byte_ids(tokenizer, lead))
        text = detokenizer.push(byte_ids(tokenizer, b"x")).text
        assert text.endswith("x")


# After a prompt.


@SMALL
def test_the_output_finishes_the_prompts_last_character_and_repeats_none_of_the_prompt(make: Callable[[], Tokenizer]) -> None:
    tokenizer = make()
    prompt = [*tokenizer.encode("Hello world "), *byte_ids(tokenizer, PEPPER.encode()[:2])]
    detokenizer = Detokenizer(tokenizer, prompt=prompt)
    assert detokenizer.push(byte_ids(tokenizer, PEPPER.encode()[2:3])).text == ""
    assert detokenizer.push(byte_ids(tokenizer, PEPPER.encode()[3:] + b"!")).text == PEPPER + "!"
    assert detokenizer.finish() == ""


@SMALL
@pytest.mark.parametrize("output", [b"x", b"\xe4\xbd\xa0", b"\xff"])
def test_a_prompt_character_that_the_output_does_not_finish_leaves_no_mark(
    make: Callable[[], Tokenizer], output: bytes
) -> None:
    tokenizer = make()
    prompt = byte_ids(tokenizer, b"a" + PEPPER.encode()[:2])
    pieces = streamed(Detokenizer(tokenizer, prompt=prompt), byte_ids(tokenizer, output))
    assert joined(pieces) == output.decode("utf-8", "replace")


@SMALL
def test_an_output_that_is_empty_after_an_unfinished_prompt_is_empty(make: Callable[[], Tokenizer]) -> None:
    tokenizer = make()
    detokenizer = Detokenizer(tokenizer, prompt=byte_ids(tokenizer, PEPPER.encode()[:3]))
    assert detokenizer.push([]) == Piece("", None, 0)
    assert detokenizer.finish() == ""


@over_seeds(20)
@SMALL
def test_prompt_and_output_together_are_the_text_of_both(make: Callable[[], Tokenizer], seed: int) -> None:
    """Cut valid text anywhere, inside characters too: what comes before the cut plus the streamed rest is the whole."""
    tokenizer, chance = make(), random.Random(seed)
    text = "".join(chance.choices(["é", "你", PEPPER, "a", " ", "\n"], k=20))
    tokens = byte_ids(tokenizer, text.encode())
    cut = chance.randrange(1, len(tokens))
    before = text.encode()[:cut].decode("utf-8", "ignore")
    assert before + joined(streamed(Detokenizer(tokenizer, prompt=tokens[:cut]), tokens[cut:])) == text


def test_the_first_space_is_taken_only_from_the_start_of_a_text() -> None:
    tokenizer = sentencepiece()
    tokens = tokenizer.encode("the yeast", add_special=False)
    assert tokenizer.token_bytes(tokens[0]).startswith(b" ")
    start = tokenizer.special_id("<s>")
    assert start is not None
    assert joined(streamed(Detokenizer(tokenizer), tokens)) == "the yeast"
    assert joined(streamed(Detokenizer(tokenizer, prompt=[start]), tokens)) == "the yeast"
    assert joined(streamed(Detokenizer(tokenizer, prompt=tokenizer.encode("for")), tokens)) == " the yeast"


# Special tokens.


def test_special_tokens_show_only_when_asked_for() -> None:
    tokenizer = byte_level()
    tokens = tokenizer.encode("<|start|>hi<think><|end|>")
    assert joined(streamed(Detokenizer(tokenizer), tokens)) == "hi<think>"
    assert joined(streamed(Detokenizer(tokenizer, skip_special=False), tokens)) == "<|start|>hi<think><|end|>"


def test_a_hidden_special_token_does_not_break_a_character() -> None:
    tokenizer = byte_level()
    end = tokenizer.special_id("<|end|>")
    assert end is not None
    first, second = byte_ids(tokenizer, "é".encode())
    assert joined(streamed(Detokenizer(tokenizer), [first, end, second])) == "é"


# Stop strings.


def spelled(tokenizer: Tokenizer, *texts: str) -> list[list[int]]:
    return [byte_ids(tokenizer, text.encode()) for text in texts]


def test_a_stop_string_that_ends_inside_a_push_stops_there() -> None:
    tokenizer = byte_level()
    (token,) = tokenizer.encode(" the", add_special=False)
    assert Detokenizer(tokenizer, stops=["th"]).push([token]) == Piece(" ", "th", 1)
    assert Detokenizer(tokenizer, stops=["th"], include_stop=True).push([token]) == Piece(" th", "th", 1)


def test_no_character_of_a_stop_string_is_sent_before_it_is_complete() -> None:
    tokenizer = byte_level()
    detokenizer = Detokenizer(tokenizer, stops=["DEFGHIJ"])
    groups = spelled(tokenizer, "ABC", "DEF", "G", "HI", "J", "K")
    pieces = [detokenizer.push(group) for group in groups]
    assert [piece.text for piece in pieces] == ["ABC", "", "", "", "", ""]
    assert pieces[4] == Piece("", "DEFGHIJ", 1)
    assert pieces[5] == Piece("", None, 0)
    assert detokenizer.finish() == ""


def test_text_held_back_for_a_stop_string_that_did_not_come_is_sent() -> None:
    tokenizer = byte_level()
    detokenizer = Detokenizer(tokenizer, stops=["DEFGHIJ"])
    assert [detokenizer.push(group).text for group in spelled(tokenizer, "DEF", "G", "HI", "K")] == ["", "", "", "DEFGHIK"]
    assert detokenizer.push(byte_ids(tokenizer, b"DEF")).text == ""
    assert detokenizer.finish() == "DEF"


def test_tokens_after_the_completing_one_are_not_counted() -> None:
    tokenizer = byte_level()
    piece = Detokenizer(tokenizer, stops=["c"]).push(byte_ids(tokenizer, b"abcdef"))
    assert piece == Piece("ab", "c", 3)


def test_a_stop_string_across_a_hidden_special_token_counts() -> None:
    tokenizer = byte_level()
    end = tokenizer.special_id("<|end|>")
    assert end is not None
    a, b = byte_ids(tokenizer, b"ab")
    assert Detokenizer(tokenizer, stops=["ab"]).push([a, end, b]) == Piece("", "ab", 3)


def test_a_shown_special_token_is_found_as_text() -> None:
    tokenizer = byte_level()
    detokenizer = Detokenizer(tokenizer, skip_special=False, stops=["<|end|>"])
    assert detokenizer.push(tokenizer.encode("hi<|end|>")).stop == "<|end|>"


@pytest.mark.parametrize(
    ("minimum", "expected"), [(0, ("", 1)), (1, ("X", 2)), (2, ("XX", 3)), (3, ("XXX", 4)), (4, ("XXXX", None))]
)
def test_stop_strings_count_only_after_the_first_tokens(minimum: int, expected: tuple[str, int | None]) -> None:
    tokenizer = byte_level()
    detokenizer = Detokenizer(tokenizer, stops=["X"], min_tokens=minimum)
    pieces = streamed(detokenizer, byte_ids(tokenizer, b"XXXX"))
    ended = next((index for index, piece in enumerate(pieces, 1) if piece.stop is not None), None)
    assert (joined(pieces), ended) == expected


def test_the_first_tokens_are_sent_although_they_spell_a_stop_string() -> None:
    tokenizer = byte_level()
    detokenizer = Detokenizer(tokenizer, stops=["END"], min_tokens=3)
    assert detokenizer.push(byte_ids(tokenizer, b"END")) == Piece("END", None, 3)


def reference(tokenizer: Tokenizer, tokens: list[int], stops: list[str], include: bool) -> tuple[str, str | None, int]:
    """The slow model: decode ever more tokens whole, until some stop string is in the text."""
    for count in range(1, len(tokens) + 1):
        # What is not yet a whole character is not yet text.
        data = b"".join(tokenizer.token_bytes(token) for token in tokens[:count] if token not in tokenizer.special_ids)
        text = tokenizer.decode(tokens[:count])
        for lost in range(1, min(4, len(data) + 1)):
            if data[-lost] >= 0xC0 and _wanted_bytes(data[-lost]) > lost and text.endswith("\ufffd"):
                text = text[:-1]
                break
        ends = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
        if ends:
            end, _, stop = min(ends)
            return (text[:end] if include else text[: end - len(stop)]), stop, count
    return tokenizer.decode(tokens), None, len(tokens)


def _wanted_bytes(lead: int) -> int:
    return 2 if lead < 0xE0 else 3 if lead < 0xF0 else 4


@pytest.mark.parametrize("include", [False, True])
@SMALL
def test_a_thousand_random_outputs_stop_as_the_whole_text_does(make: Callable[[], Tokenizer], include: bool) -> None:
    tokenizer = make()
    words = ["a", "b", "ab", "é", "你", PEPPER, " ", "the", "\n", "aab"]
    stopped = 0
    for seed in range(500):
        chance = random.Random(seed)
        tokens: list[int] = []
        for _ in range(chance.randint(1, 15)):
            word = chance.choice(words)
            whole = chance.random() < 0.5
            tokens += tokenizer.encode(word, add_special=False) if whole else byte_ids(tokenizer, word.encode())
        stops = ["".join(chance.choices(words, k=chance.randint(1, 3))) for _ in range(chance.randint(1, 3))]
        pieces = streamed(Detokenizer(tokenizer, stops=stops, include_stop=include), tokens, chance)
        text, stop, count = reference(tokenizer, tokens, stops, include)
        assert joined(pieces) == text, f"seed {seed}"
        assert next((piece.stop for piece in pieces if piece.stop), None) == stop, f"seed {seed}"
        assert sum(piece.tokens for piece in pieces) == count, f"seed {seed}"
        stopped += stop is not None
    # Both outcomes are well represented.
    assert 100 < stopped < 490


def test_one_push_of_everything_and_many_pushes_of_one_agree() -> None:
    tokenizer = byte_level()
    tokens = tokenizer.encode("\n".join(NASTY), add_special=False)
    for stops in ([], ["fox jumps"], ["\n\n\n\n\n"], ["never there"]):
        whole, single = Detokenizer(tokenizer, stops=stops), Detokenizer(tokenizer, stops=stops)
        piece = whole.push(tokens)
        assert piece.text + whole.finish() == joined(streamed(single, tokens))
