"""Merges rebuilt from scores are those that transformers rebuilds, in the same order."""

from __future__ import annotations

import random

import pytest
from transformers.tokenization_utils_base import generate_merges

from kveik.text.gguf_vocabulary import merges_from_scores
from tests.seeds import over_seeds


@pytest.mark.parametrize("ties", [False, True])
@over_seeds(50)
def test_merges_and_their_order_equal_those_of_transformers(seed: int, ties: bool) -> None:
    chance = random.Random(seed)
    texts = ["a", "b", "c", *sorted({"".join(chance.choices("abc", k=chance.randint(2, 6))) for _ in range(60)})]
    chance.shuffle(texts)
    scores = (
        [float(chance.randrange(5)) for _ in texts]
        if ties
        else [-float(score) for score in chance.sample(range(999), len(texts))]
    )
    theirs = generate_merges({text: token for token, text in enumerate(texts)}, dict(zip(texts, scores, strict=True)))
    assert len(theirs) > 20
    assert merges_from_scores(texts, scores, first=[], ordinary=range(len(texts))) == theirs


def test_merges_of_user_defined_pieces_come_first_whatever_their_score() -> None:
    texts, scores = ["a", "b", "aa", "ab"], [0.0, 0.0, -1000.0, -1.0]
    assert merges_from_scores(texts, scores, first=[2], ordinary=[0, 1, 3]) == [("a", "a"), ("a", "b")]


def test_pieces_that_merging_may_not_make_have_no_merges() -> None:
    assert merges_from_scores(["<", "s>", "<s>"], [0.0, -1.0, -2.0], first=[], ordinary=[0, 1]) == []
