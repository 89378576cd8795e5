"""Figures of an evaluation, and the verdict on them: one sentence on the loss and one on sampling from the model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kveik.measure.distance import TAIL, Divergence

UNMOVED = 2e-3
MOVED = 1e-2
ANOTHER = 1e-1
"""Mean divergences, in nats, between the answers of `sampling_sentence`."""

OUTLIER = 0.1
"""Divergence of the worst hundredth of positions that is worth a word though the mean is small."""

SHIFT = 0.01
"""Change of temperature that is worth a word: one hundredth, the last digit that people set."""

FATTER = 1.05
"""Growth of the tail that is worth a word."""


@dataclass(frozen=True, slots=True)
class Side:
    """Facts of one of the two configurations, and its figures on the text."""

    settings: Mapping[str, str]
    """Where the two differ, as typed on the command line."""

    dtype: str
    kv_cache_dtype: str
    weights: str
    """Arithmetic of the products with them."""

    weight_bytes: int
    cache_bytes_per_token: int
    """Of one token in every layer's cache."""

    perplexity: float
    entropy: float
    """Mean over the text, in nats."""

    tail: float
    """Mean share of probability on tokens below `distance.TAIL`."""


@dataclass(frozen=True, slots=True)
class GreedyAgreement:
    """Comparison of the greedy answers to the same prompts."""

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
    """Figures of a configuration compared with a baseline over one text."""

    model: str
    text: str
    origin: str
    tokens: int
    """Positions whose next token is known. Every mean is over these."""

    context: int
    windows: int
    chunk: int
    """Tokens that were computed together; later chunks read the keys and values that earlier ones stored."""

    baseline: Side
    configuration: Side
    loss_percent: float
    """Rise of the perplexity."""

    margin_percent: float
    """Of the loss: `distance.MARGIN_ERRORS` standard errors of the mean difference, position by position."""

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
        """True if the whole margin lies on one side of the tolerance."""
        return self.same or abs(self.loss_percent - self.tolerance_percent) >= self.margin_percent

    @property
    def same(self) -> bool:
        """True if both computed exactly the same numbers."""
        return self.divergence.max == 0 and self.loss_percent == 0


def quality_sentence(evaluation: Evaluation) -> str:
    """Says if the loss is within the tolerance, and if the text was long enough to decide it."""
    loss, margin, tolerance = evaluation.loss_percent, evaluation.margin_percent, evaluation.tolerance_percent
    if evaluation.same:
        return "The two configurations compute the very same numbers on this text; there is nothing to lose."
    moved = "rose" if loss > 0 else "fell"
    figure = f"Perplexity {moved} by {abs(loss):.2f} % (± {margin:.2f})"
    if not evaluation.decided:
        return (
            f"{figure}; whether that is within the tolerance of {tolerance:g} % is not decided: the margin reaches across it, "
            "and four times as many --tokens halve the margin."
        )
    return f"{figure}, {'within' if evaluation.within_tolerance else 'beyond'} the tolerance of {tolerance:g} %."


def sampling_sentence(evaluation: Evaluation) -> str:
    """Says what to watch when tokens are sampled rather than chosen greedily.

    By Pinsker's inequality two distributions at divergence KL lie at most sqrt(KL / 2) apart in total variation, which is
    how much probability lies elsewhere; the root being concave, the mean divergence bounds the mean. Draws with the same
    seed differ more often than that: the same uniform number meets cumulative sums that are shifted everywhere. Hence the
    steps: up to 0.002 nats 3 % lie elsewhere, within twice of what computing in bfloat16 does by itself (0.001 with
    SmolLM2-135M, against float32); up to 0.01, 7 %; at 0.1, 22 %, and seeds or settings of the baseline promise nothing
    any more.

    Which setting answers depends on how the distribution moved. Flatter or sharper on the whole is what another temperature
    does, so another temperature makes up for it. Where the tail has grown, a temperature low enough to shrink it would narrow
    the choice among likely tokens too; top_p cuts it off and leaves those alone.
    """
    kl = evaluation.divergence
    measured = f"mean KL is {kl.mean:.2g} nats, so at most {100 * math.sqrt(kl.mean / 2):.1f} % of probability lies elsewhere"
    if kl.mean < UNMOVED:
        rare = f"; but 1 position in 100 moved by {kl.p99:.2g} nats or more" if kl.p99 >= OUTLIER else ""
        return f"Sampling: nothing to watch; {measured}{rare}."
    if kl.mean < ANOTHER:
        seeds = " The same seeds give other texts." if kl.mean >= MOVED else ""
        return f"Sampling: {measured}.{seeds} {_advice(evaluation)}"
    return (
        f"Sampling: {measured}. It is another model to draw from, and its texts need a look of their own. {_advice(evaluation)}"
    )


def _advice(evaluation: Evaluation) -> str:
    """Names the setting that makes up for the way in which the distribution moved."""
    shift, ours, theirs = evaluation.temperature_shift, evaluation.configuration.tail, evaluation.baseline.tail
    advice = []
    if abs(shift) >= SHIFT:
        shape, change = ("flatter", "lower") if shift > 0 else ("sharper", "raise")
        advice.append(
            f"It is {shape}, as the baseline is at temperature {1 + shift:.2f}: {change} the temperature to "
            f"{1 / (1 + shift):.2f} of what you would set."
        )
    if ours > FATTER * theirs:
        advice.append(
            f"Tokens below {TAIL} each hold {100 * ours:.2f} % of its draws instead of {100 * theirs:.2f} %: "
            f"cut them off with a top-p of {_top_p(ours):g} or less."
        )
    if not advice and evaluation.divergence.mean >= MOVED:
        return "It is neither flatter nor sharper; temperature 0.7 and top-p 0.95, or less, keep to what both think likely."
    return " ".join(advice) or "It is neither flatter nor sharper: temperature and top-p may stay as they are."


def _top_p(tail: float) -> float:
    """The usual 0.95, or less where the tail is longer than what that leaves out."""
    return min(0.95, max(0.5, math.floor(100 * (1 - tail)) / 100))
