"""Attention over cache blocks, slow and obvious: one row at a time, in float64, with the error that rounding allows."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kveik.kernels.batch import AttentionBatch
from tests.bounds import BFLOAT16, CONFIDENCE, FLOAT32, LIBRARY, assert_within, sum_square

TILE = 128
"""Positions, the fewest after which any implementation folds one softmax into another."""


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """The roundings of an implementation; all sums are in float32."""

    number_roundings: int = 0
    """To bfloat16, of the queries' and keys' numbers that meet in a score."""

    score_roundings: int = 0
    """To bfloat16, of a score."""

    weight_roundings: int = 0
    """To bfloat16, of the weights and values that are multiplied."""

    query_step: float = 0.0
    """Of a query's integers, relative to its largest number; 0 where it is multiplied as it is."""

    weight_step: float = 0.0
    """Of the weights' integers, relative to the largest."""

    output_unit: float = FLOAT32


IN_FLOAT32 = Arithmetic()
IN_BFLOAT16 = Arithmetic(number_roundings=1, weight_roundings=1)
IN_BYTES = Arithmetic(number_roundings=1, weight_roundings=1, query_step=1 / (127 * 128), weight_step=1 / 65535)
"""Of native/kernels/attention_span_int8.cpp."""

TORCH_BFLOAT16 = Arithmetic(number_roundings=2, score_roundings=4, weight_roundings=2, output_unit=BFLOAT16)
"""Scaled queries and keys; scores and three steps of a soft cap; weights and values."""


@dataclass(frozen=True, slots=True)
class Right:
    """Answers and bounds, float64 [tokens, heads, head_dim]."""

    answer: Tensor
    allowed: Tensor

    def of(self, tokens: slice) -> Right:
        return Right(self.answer[tokens], self.allowed[tokens])

    def assert_near(self, found: Tensor) -> None:
        assert_within(found, self.answer, self.allowed)

    def assert_alike(self, found: Tensor, other: Tensor) -> None:
        """Both computed, in different orders: their errors are independent, and the squares of two bounds add up."""
        assert_within(found, other, math.sqrt(2) * self.allowed)


def write(cache: Tensor, keys: Tensor, values: Tensor, batch: AttentionBatch) -> None:
    """Put each token's key and value into its slot. Shapes as in `kernels.attention.write`."""
    for token, slot in enumerate(batch.slot_mapping.tolist()):
        block, within = divmod(slot, batch.block_size)
        cache[block, 0, :, within] = keys[token].to(cache.dtype)
        cache[block, 1, :, within] = values[token].to(cache.dtype)


def attend(
    queries: Tensor,
    cache: Tensor,
    batch: AttentionBatch,
    *,
    scale: float,
    soft_cap: float | None,
    arithmetic: Arithmetic = IN_FLOAT32,
) -> Right:
    """Every query over the keys it may see. Shapes as in `kernels.attention.attend`."""
    answer, allowed = (torch.empty(queries.shape, dtype=torch.float64) for _ in range(2))
    starts = batch.query_start_loc.tolist()
    for row, context in enumerate(batch.seq_lens.tolist()):
        tokens = slice(starts[row], starts[row + 1])
        at = torch.arange(context - (tokens.stop - tokens.start), context)[:, None]
        first = 0 if batch.window is None else max(0, int(at[0]) - batch.window + 1)
        keys, values = read(cache, batch.tables[row], first, context, batch.block_size)
        positions = torch.arange(first, context)
        seen = positions <= at
        if batch.window is not None:
            seen &= positions > at - batch.window
        one = Row.of(queries[tokens], keys, values, seen, scale, soft_cap)
        answer[tokens] = one.answer.transpose(0, 1)
        allowed[tokens] = one.bound(arithmetic).transpose(0, 1)
    return Right(answer, allowed)


def read(cache: Tensor, table: Tensor, first: int, stop: int, block_size: int) -> tuple[Tensor, Tensor]:
    """The keys and values at positions [first, stop) of one row, each float64 [positions, kv_heads, head_dim]."""
    positions = torch.arange(first, stop)
    blocks, within = table[positions // block_size].long(), positions % block_size
    return cache[blocks, 0, :, within].double(), cache[blocks, 1, :, within].double()


@dataclass(frozen=True, slots=True)
class Row:
    """One row's attention in float64: numbers [heads, queries or positions, head_dim], scores [heads, queries, positions]."""

    queries: Tensor
    keys: Tensor
    values: Tensor
    seen: Tensor
    """[queries, positions]"""

    scale: float
    soft_cap: float | None
    products: Tensor
    """Scores before the soft cap."""

    scores: Tensor
    weights: Tensor
    answer: Tensor

    @classmethod
    def of(cls, queries: Tensor, keys: Tensor, values: Tensor, seen: Tensor, scale: float, soft_cap: float | None) -> Row:
        shared = queries.shape[1] // keys.shape[1]
        queries = queries.double().transpose(0, 1)
        keys, values = (part.transpose(0, 1).repeat_interleave(shared, dim=0) for part in (keys, values))
        products = queries @ keys.mT * scale
        scores = products if soft_cap is None else soft_cap * torch.tanh(products / soft_cap)
        weights = scores.masked_fill(~seen, -math.inf).softmax(-1)
        return cls(queries, keys, values, seen, scale, soft_cap, products, scores, weights, weights @ values)

    def bound(self, by: Arithmetic) -> Tensor:
        """[heads, queries, head_dim]: the errors of scores and their exponentials, of the two sums and of the quotient."""
        positions, folds = int(self.seen.sum(-1).max()), self._folds()
        additions = positions + 2 * folds
        # An exponential passes its argument's error on, the larger part of it too.
        off = torch.expm1(CONFIDENCE * self._exponent_square(by).sqrt()) / CONFIDENCE
        squares = (self.weights * off).square()
        # A weight's error moves the sum towards its value, and away from it by the sum of weights: times (value - answer).
        square = squares @ self.values.square() - 2 * self.answer * (squares @ self.values)
        square = (square + self.answer.square() * squares.sum(-1, keepdim=True)).clamp_min(0)
        terms = self.weights.square() @ self.values.square()
        square += sum_square(additions, self.answer, terms) + by.weight_roundings * BFLOAT16**2 * terms
        # Of the sum of weights, whose partial sums are at most 1, and of its inverse and the last product.
        square += (additions + 2) * FLOAT32**2 * self.answer.square()
        largest = (self.weights * self.values.abs().amax(-1)[:, None]).amax(-1, keepdim=True)
        square += positions * (by.weight_step / 2 * largest).square()
        below = CONFIDENCE * (squares.sum(-1, keepdim=True) + additions * FLOAT32**2).sqrt()
        assert (below < 0.5).all(), "errors of weights are too large for a bound"
        error = CONFIDENCE * square.sqrt() / (1 - below)
        return error + by.output_unit * (self.answer.abs() + error)

    def _folds(self) -> int:
        return self.seen.shape[1] // TILE + 2

    def _exponent_square(self, by: Arithmetic) -> Tensor:
        """[heads, queries, positions]: the square of the error of a score's distance from the largest, before CONFIDENCE."""
        terms = self.scale**2 * (self.queries.square() @ self.keys.square().mT)
        square = sum_square(self.queries.shape[-1], self.products, terms) + by.number_roundings * BFLOAT16**2 * terms
        most = self.queries.abs().amax(-1, keepdim=True) * self.scale
        square += (by.query_step / 2 * most).square() * self.keys.square().sum(-1)[:, None]
        if self.soft_cap is not None:
            square *= (1 - (self.scores / self.soft_cap).square()).square()
            # cap (1 - 2 / (exp(2s / cap) + 1)) or a library's tanh: half of an exponential's error, and three roundings.
            square += (LIBRARY * FLOAT32 * self.soft_cap) ** 2
        # Four roundings of a score: its scales and the logarithm's base; three of its distance from the largest, which is up
        # to 1 higher; the exponentials of it and of each fold, whose exponents add up to a row's range.
        apart = self.scores.masked_fill(~self.seen, -math.inf).amax(-1, keepdim=True) - self.scores
        distance = 3 * (apart + 1).square() + 2 * (apart * self.seen).amax(-1, keepdim=True).square()
        exponentials = (self._folds() + 1) * LIBRARY**2
        square += FLOAT32**2 * (4 * self.scores.square() + distance + exponentials)
        return square + by.score_roundings * BFLOAT16**2 * self.scores.square()
