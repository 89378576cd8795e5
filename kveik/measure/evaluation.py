"""What a measurement of quality found, as values, and how they follow from the distances of single positions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kveik.measure.distance import Distances

MARGIN_ERRORS = 2.0
"""Standard errors on either side of a loss: about 95 times in 100 the true one lies between."""


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two configurations, and what it thought of the text."""

    settings: Mapping[str, str]
    """Where the two differ, as typed on the command line."""

    dtype: str
    kv_cache_dtype: str
    weights: str
    """How they are multiplied."""

    weight_bytes: int
    cache_bytes_per_token: int
    """Of one token in every layer's cache."""

    perplexity: float
    entropy: float
    """Mean over the text, in nats."""

    tail: float
    """Mean share of probability on tokens below `distance.TAIL`."""


@dataclass(frozen=True, slots=True)
class Divergence:
    """KL(baseline || configuration) over the whole vocabulary, in nats, over the text's positions."""

    mean: float
    median: float
    p90: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True)
class GreedyAgreement:
    """Answers that both wrote to the same prompts, the likeliest token each time."""

    prompts: int
    new_tokens: int
    """Of each answer."""

    equal_share: float
    """Of an answer's tokens, those before the first difference; mean over the answers."""

    identical: int
    """Answers without any difference."""

    first_differences: tuple[int | None, ...]
    """Per prompt: how many tokens are equal before the first that differs; None where none does."""

    @classmethod
    def of(cls, baseline: Sequence[Sequence[int]], found: Sequence[Sequence[int]]) -> GreedyAgreement:
        """Answers of equal length, prompt by prompt; at least one."""
        firsts = [
            next((place for place, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), None)
            for ours, theirs in zip(baseline, found, strict=True)
        ]
        length = len(baseline[0])
        shares = [1.0 if first is None else first / length for first in firsts]
        return cls(len(firsts), length, sum(shares) / len(shares), firsts.count(None), tuple(firsts))


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A configuration held against a baseline over one text."""

    model: str
    text: str
    origin: str
    tokens: int
    """Positions whose next token is known: what every mean is over."""

    context: int
    windows: int
    chunk: int
    """Tokens that were computed together; later chunks read the keys and values that earlier ones stored."""

    baseline: Side
    configuration: Side
    loss_percent: float
    """How much larger the perplexity is."""

    margin_percent: float
    """Of the loss: `MARGIN_ERRORS` standard errors of the mean difference, position by position."""

    tolerance_percent: float
    top1_agreement: float
    """Share of positions where both think the same token the likeliest."""

    divergence: Divergence
    temperature_shift: float
    """As if the baseline were drawn at temperature 1 plus this, to first order of its entropy."""

    greedy: GreedyAgreement | None
    """None where no answers were asked for."""

    @property
    def within_tolerance(self) -> bool:
        return self.loss_percent <= self.tolerance_percent

    @property
    def decided(self) -> bool:
        """Whether the whole of the margin lies on one side of the tolerance."""
        return self.same or abs(self.loss_percent - self.tolerance_percent) >= self.margin_percent

    @property
    def same(self) -> bool:
        """Whether both computed the very same numbers."""
        return self.divergence.max == 0 and self.loss_percent == 0


def divergence_of(found: Distances) -> Divergence:
    """The figures over all positions."""
    median, p90, p99 = np.quantile(found.divergence, (0.5, 0.9, 0.99)).tolist()
    return Divergence(float(found.divergence.mean()), median, p90, p99, float(found.divergence.max()))


def loss_of(found: Distances) -> tuple[float, float]:
    """How much larger the perplexity is, and the margin of that, in percent.

    Both models read the same tokens, so their difference is known far better than either perplexity: what makes a text easy or
    hard falls out. Positions are taken as independent, which neighbours are not quite.
    """
    difference = found.loss - found.loss_baseline
    mean = float(difference.mean())
    error = float(difference.std(ddof=1)) / math.sqrt(len(difference)) if len(difference) > 1 else math.inf
    return 100 * math.expm1(mean), 100 * math.exp(mean) * MARGIN_ERRORS * error


def shift_of(found: Distances) -> float:
    """See `Evaluation.temperature_shift`; 0 where the baseline is certain everywhere."""
    spread = float(found.spread_baseline.mean())
    return float((found.entropy - found.entropy_baseline).mean()) / spread if spread > 0 else 0.0
