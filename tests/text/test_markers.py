"""Markers are told apart from text that looks like them."""

from __future__ import annotations

import random
import re
import time

import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as Core

from kveik.errors import BadValue
from kveik.text.markers import Markers, unused_character
from kveik.text.messages import ToolArguments
from kveik.text.token_bytes import BYTE_LEVEL
from kveik.text.tokenizer import Tokenizer
from tests.seeds import over_seeds
from tests.text.vocabularies import byte_level_core, byte_level_tokenizer

DOT = "\u00b7"


@over_seeds(300)
def test_no_marker_survives_in_any_text_and_removing_the_sentinel_restores_it(seed: int) -> None:
    chance = random.Random(seed)
    texts = {"".join(chance.choices("ab<>", k=chance.randint(2, 5))) for _ in range(4)}
    markers = Markers({text: index for index, text in enumerate(sorted(texts))})
    parts = ["".join(chance.choices("ab<>", k=chance.randint(0, 8))) for _ in range(3)]
    disarmed = [markers.disarm_text(part, DOT) for part in parts]
    assert [part.replace(DOT, "") for part in disarmed] == parts
    # Side by side, in any order, and with a part left out.
    for joined in ("".join(disarmed), "".join(reversed(disarmed)), disarmed[0] + disarmed[2]):
        assert not any(text in joined for text in texts)


def test_ordinary_text_is_given_back_as_it_is() -> None:
    markers = Markers({"<|end|>": 1})
    for text in ("", "Hello", "a < b > c", "|end", "<|end |>", " < "):
        assert markers.disarm_text(text, DOT) == text


def test_every_string_in_a_value_is_disarmed_and_nothing_else_changes() -> None:
    markers = Markers({"<|end|>": 1})
    value = {"a": ["<|end|>", 1, None, True, 2.5], "<|end|>": ToolArguments({"x": "<|end|>"}, '{"x":"<|end|>"}')}
    disarmed = markers.disarm(value, DOT)
    assert disarmed == {"a": [f"<{DOT}|end|>", 1, None, True, 2.5], f"<{DOT}|end|>": {"x": f"<{DOT}|end|>"}}
    assert isinstance(disarmed, dict)
    assert str(disarmed[f"<{DOT}|end|>"]) == f'{{"x":"<{DOT}|end|>"}}'


def test_of_markers_that_begin_alike_the_longest_is_meant() -> None:
    core = Core.from_str(byte_level_core())
    core.add_special_tokens(["<|end|>!", "<|e"])
    tokenizer = Tokenizer(core, BYTE_LEVEL)
    ids = {text: tokenizer.special_id(text) or -1 for text in ("<|end|>", "<|end|>!", "<|e")}
    assert Markers(ids).encode("<|end|>!<|end|><|e", tokenizer, DOT) == [ids["<|end|>!"], ids["<|end|>"], ids["<|e"]]


def test_markers_that_take_the_space_around_them_do_so_here_too() -> None:
    core = Core.from_str(byte_level_core())
    core.add_special_tokens(
        [AddedToken("<|l|>", lstrip=True, normalized=False), AddedToken("<|r|>", rstrip=True, normalized=False)]
    )
    tokenizer = Tokenizer(core, BYTE_LEVEL)
    ids = {text: tokenizer.special_id(text) or -1 for text in ("<|l|>", "<|r|>")}
    text = "the  <|l|> yeast <|r|>  \n is <|r|> <|l|> kept"
    assert Markers(ids).encode(text, tokenizer, DOT) == tokenizer.encode(text)


def test_without_markers_all_is_text() -> None:
    tokenizer = byte_level_tokenizer()
    assert Markers({}).disarm_text("<|end|>", DOT) == "<|end|>"
    assert Markers({}).encode("<|end|>", tokenizer, DOT) == tokenizer.encode("<|end|>")


def test_thousands_of_markers_cost_no_more_than_a_few() -> None:
    markers = Markers({f"<unused{index}>": index for index in range(6000)})
    text = "<unused" * 20_000
    start = time.process_time()
    assert markers.disarm_text(text, DOT) == text + DOT
    # Trying 6000 markers at each of 20,000 places takes ten seconds and more.
    assert time.process_time() - start < 2


def test_the_sentinel_is_a_character_that_nobody_uses() -> None:
    first = unused_character("a")
    assert unused_character({"k": [first, {chr(ord(first) + 1): 3}]}) not in (first, chr(ord(first) + 1))
    assert unused_character(ToolArguments({}, first)) != first
    assert re.fullmatch("[\U000f0000-\U000ffffd]", first)


def test_messages_that_use_every_candidate_are_refused() -> None:
    with pytest.raises(BadValue, match="private-use"):
        unused_character("".join(map(chr, range(0xF0000, 0xFFFFE))))
