"""Distances between distributions, against their definitions in float64 and against distributions that are known."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from kveik.errors import Broken
from kveik.measure.distance import TAIL, Distances, distances
from tests.bounds import CONFIDENCE, FLOAT32, LANES, LIBRARY, log_norm_bound
from tests.seeds import over_seeds


def rows(seed: int, scale: float = 3.0, count: int = 6, vocab: int = 5000) -> torch.Tensor:
    return torch.randn(count, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def allowed_of(baseline: torch.Tensor, logits: torch.Tensor) -> dict[str, np.ndarray]:
    """How far float32 puts each distance off, [rows]."""
    norm = torch.maximum(log_norm_bound(baseline), log_norm_bound(logits)).numpy()
    logs, others = torch.log_softmax(baseline.double(), -1).numpy(), torch.log_softmax(logits.double(), -1).numpy()
    lanes = CONFIDENCE * math.sqrt(logs.shape[1] / LANES**2 + LANES) * FLOAT32

    def of_sum(one: np.ndarray, factors: np.ndarray, common: np.ndarray | float, own: np.ndarray | float) -> np.ndarray:
        """Of probabilities times factors. What all factors are off by alike, and each by itself, in units."""
        terms = np.exp(one) * factors
        alike = norm[:, 0] * np.abs(terms.sum(1)) + common
        each = np.abs(terms) * (np.abs(one) + LIBRARY + 1) + np.exp(one) * own
        return alike + CONFIDENCE * FLOAT32 * np.sqrt((each**2).sum(1)) + lanes * np.abs(terms).sum(1)

    entropy = of_sum(logs, logs, norm[:, 0], np.abs(logs))
    away = logs - (np.exp(logs) * logs).sum(1, keepdims=True)
    steepness = 2 * np.abs(away)
    moved = (norm[:, 0] + entropy) * (np.exp(logs) * steepness).sum(1)
    return {
        "loss_baseline": (norm + FLOAT32 * np.abs(logs)).max(1),
        "loss": (norm + FLOAT32 * np.abs(others)).max(1),
        "divergence": of_sum(logs, logs - others, 2 * norm[:, 0], np.abs(logs) + np.abs(others) + np.abs(logs - others)),
        "entropy_baseline": entropy,
        "entropy": of_sum(others, others, norm[:, 0], np.abs(others)),
        "spread_baseline": of_sum(logs, away**2, moved, steepness * (np.abs(logs) + np.abs(away))),
        "tail_baseline": of_sum(logs, np.where(logs < math.log(TAIL), 1, 0), 0.0, 0.0),
        "tail": of_sum(others, np.where(others < math.log(TAIL), 1, 0), 0.0, 0.0),
    }


@over_seeds(5)
def test_every_distance_is_what_its_definition_says(seed: int) -> None:
    baseline, logits = rows(seed), rows(seed) + 0.3 * rows(seed + 100, 1.0)
    targets = torch.arange(6) * 7
    found = distances(baseline, logits, targets)
    p, q = torch.softmax(baseline.double(), -1).numpy(), torch.softmax(logits.double(), -1).numpy()
    line = np.arange(6)
    entropy = -(p * np.log(p)).sum(1)
    expected = {
        "loss_baseline": -np.log(p[line, targets.numpy()]),
        "loss": -np.log(q[line, targets.numpy()]),
        "divergence": (p * np.log(p / q)).sum(1),
        "entropy_baseline": entropy,
        "entropy": -(q * np.log(q)).sum(1),
        "spread_baseline": (p * (np.log(p) + entropy[:, None]) ** 2).sum(1),
        "tail_baseline": np.where(p < TAIL, p, 0).sum(1),
        "tail": np.where(q < TAIL, q, 0).sum(1),
        "same_top": (p.argmax(1) == q.argmax(1)).astype(float),
    }
    allowed = allowed_of(baseline, logits)
    for name, column in expected.items():
        off = np.abs(getattr(found, name) - column)
        assert (off <= allowed.get(name, 0)).all(), f"{name} is off by {off.max():.3g}, where {allowed.get(name)} is allowed"


def test_the_logits_are_left_as_they_were() -> None:
    baseline, logits = rows(1), rows(2)
    distances(baseline, logits, torch.zeros(6, dtype=torch.int64))
    assert torch.equal(baseline, rows(1))
    assert torch.equal(logits, rows(2))


def test_a_distribution_is_at_no_distance_from_itself() -> None:
    found = distances(rows(3), rows(3).clone(), torch.zeros(6, dtype=torch.int64))
    assert not found.divergence.any()
    assert found.same_top.all()
    assert (found.loss == found.loss_baseline).all()


def test_two_coins_are_as_far_apart_as_paper_says() -> None:
    fair, bent = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.9, 0.1]]).log()
    found = distances(fair, bent, torch.tensor([1]))
    assert found.divergence[0] == pytest.approx(0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(0.5 / 0.1), rel=1e-5)
    assert found.loss[0] == pytest.approx(math.log(10), rel=1e-5)
    assert found.entropy_baseline[0] == pytest.approx(math.log(2), rel=1e-6)
    assert found.spread_baseline[0] == pytest.approx(0, abs=1e-9)


def test_the_spread_is_how_fast_entropy_grows_with_temperature() -> None:
    logits, step = rows(4).double(), 1e-4

    def entropy(temperature: float) -> torch.Tensor:
        return torch.distributions.Categorical(logits=logits / temperature).entropy()

    slope = (entropy(1 + step) - entropy(1 - step)) / (2 * step)
    found = distances(rows(4), rows(4), torch.zeros(6, dtype=torch.int64))
    np.testing.assert_allclose(found.spread_baseline, slope.numpy(), rtol=1e-4)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("which", [0, 1])
def test_a_value_that_is_not_finite_is_told_and_not_averaged(bad: float, which: int) -> None:
    both = [rows(5), rows(6)]
    both[which][2, 17] = bad
    with pytest.raises(Broken, match="not finite"):
        distances(*both, torch.zeros(6, dtype=torch.int64))


def test_parts_are_joined_in_order() -> None:
    whole = distances(rows(7), rows(8), torch.arange(6))
    parts = [distances(rows(7)[part], rows(8)[part], torch.arange(6)[part]) for part in (slice(0, 2), slice(2, 6))]
    joined = Distances.joined(parts)
    assert len(joined) == 6
    np.testing.assert_allclose(joined.loss, whole.loss, rtol=1e-6)
    np.testing.assert_allclose(joined.divergence, whole.divergence, rtol=1e-5)
