"""Distances between two models' distributions over the next token, token by token and over a text. Arithmetic on logits only.

For a position with the baseline's distribution p, the configuration's q and the true next token t, in nats:

    loss          -log p(t) and -log q(t); perplexity is the exponential of their mean
    divergence    KL(p || q) = sum p log(p/q), over the whole vocabulary
    entropy       -sum p log p: how flat a distribution is
    spread        sum p (log p + entropy)^2 = dH/dT at temperature 1, so that (H(q) - H(p)) / spread is, to first order, the
                  change of temperature that would make p as flat as q
    tail          sum of the p that are below TAIL: what draws seldom hit, and top_p cuts off first

Tails are each distribution's own. Summing q over what p calls unlikely would call any noise a fatter tail, because where p is
small q can mostly be larger.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kveik.errors import Broken

TAIL = 1e-4
"""Probability below which a token belongs to the tail."""

MARGIN_ERRORS = 2.0
"""Standard errors on either side of a loss: about 95 times in 100 the true one lies between."""

NOT_FINITE = "The model's values are not finite on this text, so that nothing can be compared."

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Distances:
    """One value per position, in the order of the text: float64 [positions] each."""

    loss_baseline: Floats
    loss: Floats
    divergence: Floats
    entropy_baseline: Floats
    entropy: Floats
    spread_baseline: Floats
    tail_baseline: Floats
    tail: Floats
    same_top: Floats
    """1 where both think the same token the likeliest (of several, the lowest id), else 0."""

    @classmethod
    def joined(cls, parts: Sequence[Distances]) -> Distances:
        """One after the other."""
        return cls(*(np.concatenate([getattr(part, field.name) for part in parts]) for field in fields(cls)))

    def __len__(self) -> int:
        return len(self.loss)


@dataclass(frozen=True, slots=True)
class Divergence:
    """KL(baseline || configuration) over the whole vocabulary, in nats, over the text's positions."""

    mean: float
    median: float
    p90: float
    p99: float
    max: float


@torch.inference_mode()
def distances(baseline: Tensor, logits: Tensor, targets: Tensor) -> Distances:
    """baseline, logits: float32 [rows, vocab], neither of them changed; targets: int64 [rows], the tokens that came next.

    Raises Broken where a row has a value that is not finite: no figure would mean anything.
    """
    logs_baseline, logs = torch.log_softmax(baseline, -1), torch.log_softmax(logits, -1)
    chances, own = logs_baseline.exp(), logs.exp()
    entropy_baseline = -_dot(chances, logs_baseline)
    columns = {
        "loss_baseline": -logs_baseline.gather(1, targets[:, None])[:, 0],
        "loss": -logs.gather(1, targets[:, None])[:, 0],
        # Never below 0 but for rounding.
        "divergence": _dot(chances, logs_baseline - logs).clamp_(min=0),
        "entropy_baseline": entropy_baseline,
        "entropy": -_dot(own, logs),
        "tail_baseline": _tail(chances),
        "tail": _tail(own),
        "same_top": baseline.argmax(-1) == logits.argmax(-1),
        # Last, because it squares in place.
        "spread_baseline": _dot(chances, logs_baseline.add_(entropy_baseline[:, None]).square_()),
    }
    found = {name: column.double().numpy() for name, column in columns.items()}
    if not all(np.isfinite(column).all() for column in found.values()):
        raise Broken(NOT_FINITE)
    return Distances(**found)


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """Row by row, [rows, vocab] each -> [rows]."""
    # Not a batched product: torch's sum adds up in cascades, whose error hardly grows with the vocabulary.
    return (a * b).sum(-1)


def _tail(chances: Tensor) -> Tensor:
    return chances.masked_fill(chances >= TAIL, 0.0).sum(-1)


def divergence_of(found: Distances) -> Divergence:
    """Summarizes all positions."""
    median, p90, p99 = np.quantile(found.divergence, (0.5, 0.9, 0.99)).tolist()
    return Divergence(float(found.divergence.mean()), median, p90, p99, float(found.divergence.max()))


def loss_of(found: Distances) -> tuple[float, float]:
    """Returns the rise of perplexity and its margin, in percent.

    Both models read the same tokens, so the difference is known far better than either perplexity: the difficulty of the text
    cancels out. Positions are taken as independent, which neighbours are not quite.
    """
    difference = found.loss - found.loss_baseline
    mean = float(difference.mean())
    error = float(difference.std(ddof=1)) / math.sqrt(len(difference)) if len(difference) > 1 else math.inf
    return 100 * math.expm1(mean), 100 * math.exp(mean) * MARGIN_ERRORS * error


def shift_of(found: Distances) -> float:
    """See `Evaluation.temperature_shift`; 0 where the baseline is certain everywhere."""
    spread = float(found.spread_baseline.mean())
    return float((found.entropy - found.entropy_baseline).mean()) / spread if spread > 0 else 0.0
