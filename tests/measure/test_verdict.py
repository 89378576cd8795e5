"""Sentences of an evaluation: on the loss, and on sampling."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from kveik.measure.distance import Divergence, distances, divergence_of, loss_of, shift_of
from kveik.measure.verdict import Evaluation, GreedyAgreement, Side, quality_sentence, sampling_sentence
from tests.seeds import over_seeds

SIDE = Side({}, "bfloat16", "bfloat16", "as they are", 1, 1, perplexity=10.0, entropy=2.0, tail=0.01)
FOUND = Evaluation(
    model="m",
    text="english",
    origin="a text",
    tokens=1000,
    context=100,
    windows=10,
    chunk=50,
    baseline=SIDE,
    configuration=SIDE,
    loss_percent=0.2,
    margin_percent=0.1,
    tolerance_percent=0.5,
    top1_agreement=0.99,
    divergence=Divergence(mean=0.004, median=0.003, p90=0.01, p99=0.02, max=0.1),
    temperature_shift=0.0,
    greedy=None,
)


@pytest.mark.parametrize(
    ("loss", "margin", "words"),
    [
        (0.2, 0.1, "Perplexity rose by 0.20 % (± 0.10), within the tolerance of 0.5 %."),
        (0.7, 0.1, "Perplexity rose by 0.70 % (± 0.10), beyond the tolerance of 0.5 %."),
        (-0.7, 0.1, "Perplexity fell by 0.70 % (± 0.10), within the tolerance of 0.5 %."),
    ],
)
def test_the_loss_is_held_against_the_tolerance(loss: float, margin: float, words: str) -> None:
    assert quality_sentence(replace(FOUND, loss_percent=loss, margin_percent=margin)) == words


@pytest.mark.parametrize("loss", [0.45, 0.55])
def test_a_text_too_short_to_decide_says_how_much_longer_it_must_be(loss: float) -> None:
    sentence = quality_sentence(replace(FOUND, loss_percent=loss))
    assert "is within the tolerance of 0.5 % is not decided" in sentence
    assert "four times as many --tokens halve" in sentence


@pytest.mark.parametrize("margin", [math.inf, math.nan])
def test_a_margin_that_is_no_number_decides_nothing(margin: float) -> None:
    assert "not decided" in quality_sentence(replace(FOUND, margin_percent=margin))


def test_the_edge_of_the_tolerance_is_within_it() -> None:
    assert replace(FOUND, loss_percent=0.5).within_tolerance
    assert not replace(FOUND, loss_percent=0.5001).within_tolerance


def moved(mean: float, *, shift: float = 0.0, tail: float = 0.01, p99: float = 0.02) -> str:
    divergence = replace(FOUND.divergence, mean=mean, p99=p99)
    side = replace(SIDE, tail=tail)
    return sampling_sentence(replace(FOUND, divergence=divergence, temperature_shift=shift, configuration=side))


def test_what_hardly_moved_needs_no_watching() -> None:
    expected = "Sampling: nothing to watch; mean KL is 0.0005 nats, so at most 1.6 % of probability lies elsewhere."
    assert moved(0.0005) == expected
    assert "1 position in 100 moved by 0.3 nats" in moved(0.0005, p99=0.3)


def test_a_flatter_distribution_asks_for_a_lower_temperature_and_a_sharper_one_for_a_higher() -> None:
    assert "flatter, as the baseline is at temperature 1.04: lower the temperature to 0.96" in moved(0.005, shift=0.04)
    assert "sharper, as the baseline is at temperature 0.96: raise the temperature to 1.04" in moved(0.005, shift=-0.04)
    assert "temperature and top-p may stay" in moved(0.005, shift=0.004)


def test_a_fatter_tail_asks_for_top_p_and_a_thinner_one_does_not() -> None:
    assert "hold 1.20 % of its draws instead of 1.00 %: cut them off with a top-p of 0.95 or less" in moved(0.005, tail=0.012)
    assert "top-p of 0.9 or less" in moved(0.005, tail=0.095)
    assert "top-p may stay" in moved(0.005, tail=0.008)


def test_the_further_it_moved_the_graver_the_words() -> None:
    assert "The same seeds give other texts" not in moved(0.009)
    assert "The same seeds give other texts. It is neither" in moved(0.02)
    assert "temperature 0.7 and top-p 0.95, or less" in moved(0.02)
    assert "another model to draw from" in moved(0.2)


@over_seeds(5)
def test_draws_differ_at_most_as_often_as_the_sentence_says(seed: int) -> None:
    """Pinsker's inequality, and Jensen's over positions, on distributions that were measured."""
    chance = torch.Generator().manual_seed(seed)
    baseline = torch.randn(50, 300, generator=chance) * 2
    logits = baseline + torch.randn(50, 300, generator=chance) * 0.3
    kl = divergence_of(distances(baseline, logits, torch.zeros(50, dtype=torch.int64)))
    differing = (torch.softmax(baseline, -1) - torch.softmax(logits, -1)).abs().sum(-1) / 2
    assert 0.5 * math.sqrt(kl.mean / 2) < float(differing.mean()) <= math.sqrt(kl.mean / 2)


@pytest.mark.parametrize("temperature", [0.97, 1.03])
def test_a_baseline_drawn_hotter_or_colder_is_recognised(temperature: float) -> None:
    baseline = torch.randn(100, 2000, generator=torch.Generator().manual_seed(1)) * 3
    found = distances(baseline, baseline / temperature, torch.zeros(100, dtype=torch.int64))
    assert 1 + shift_of(found) == pytest.approx(temperature, abs=0.002)


def test_the_margin_covers_the_true_loss_about_as_often_as_it_says() -> None:
    chance = np.random.default_rng(0)
    vocab, count = 50, 400
    baseline = torch.tensor(chance.normal(size=(count, vocab)) * 2, dtype=torch.float32)
    logits = baseline + torch.tensor(chance.normal(size=(count, vocab)) * 0.1, dtype=torch.float32)
    chances = torch.softmax(baseline, -1)
    # Tokens drawn from the baseline itself, so the true mean loss is its divergence from the configuration.
    true = 100 * math.expm1(float(distances(baseline, logits, torch.zeros(count, dtype=torch.int64)).divergence.mean()))
    generator = torch.Generator().manual_seed(0)
    covered = 0
    for _ in range(200):
        targets = torch.multinomial(chances, 1, generator=generator)[:, 0]
        loss, margin = loss_of(distances(baseline, logits, targets))
        covered += abs(loss - true) <= margin
    assert 180 <= covered <= 199


def test_greedy_agreement_is_counted_up_to_the_first_difference() -> None:
    agreement = GreedyAgreement.of([(1, 2, 3, 4), (1, 2, 3, 4), (1, 2, 3, 4)], [(1, 2, 3, 4), (1, 9, 3, 4), (9, 2, 3, 4)])
    assert agreement.first_differences == (None, 1, 0)
    assert (agreement.identical, agreement.prompts, agreement.new_tokens) == (1, 3, 4)
    assert agreement.equal_share == pytest.approx((1 + 0.25 + 0) / 3)
