"""Attention over cache blocks, slow and obvious: one token at a time, in float64, with the error that rounding allows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kveik.kernels.batch import AttentionBatch
from tests.bounds import BFLOAT16, FLOAT32, LIBRARY, assert_within, gamma

TILE = 128
"""Positions, the fewest after which any implementation folds one softmax into another."""


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """The roundings of an implementation; all sums are in float32."""

    score_roundings: int = 0
    """To bfloat16, of a query's numbers or of its scores, one after the other."""

    weight_roundings: int = 0
    """To bfloat16, of the weights that multiply values."""

    query_step: float = 0.0
    """Of a query's integers, relative to its largest number; 0 where it is multiplied as it is."""

    weight_step: float = 0.0
    """Of the weights' integers, relative to the largest."""

    output_unit: float = FLOAT32


IN_FLOAT32 = Arithmetic()
IN_BFLOAT16 = Arithmetic(score_roundings=1, weight_roundings=1)
IN_BYTES = Arithmetic(score_roundings=1, weight_roundings=1, query_step=1 / (127 * 128), weight_step=1 / 65535)
"""Of native/kernels/attention_span_int8.cpp."""

TORCH_BFLOAT16 = Arithmetic(score_roundings=6, weight_roundings=2, output_unit=BFLOAT16)
"""Keys, scaled queries, scores and three steps of a soft cap; values and weights."""


@dataclass(frozen=True, slots=True)
class Right:
    """Answers and bounds, float64 [tokens, heads, head_dim]."""

    answer: Tensor
    worst: Tensor
    """No element is further off."""

    typical: Tensor
    """The error's length over all elements is below this one's: independent roundings grow with the root of their number."""

    def of(self, tokens: slice) -> Right:
        return Right(self.answer[tokens], self.worst[tokens], self.typical[tokens])

    def assert_near(self, found: Tensor) -> None:
        assert_within(found, self.answer, self.worst)
        assert (found.double() - self.answer).norm() <= self.typical.norm()


def write(cache: Tensor, keys: Tensor, values: Tensor, batch: AttentionBatch) -> None:
    """Put each token's key and value into its slot. Shapes as in `kernels.attention.write`."""
    for token, slot in enumerate(batch.slots.tolist()):
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
    answer, worst, typical = (torch.empty(queries.shape, dtype=torch.float64) for _ in range(3))
    starts, contexts = batch.query_starts.tolist(), batch.contexts.tolist()
    for row, context in enumerate(contexts):
        count = starts[row + 1] - starts[row]
        for query in range(count):
            position = context - count + query
            first = 0 if batch.window is None else max(0, position - batch.window + 1)
            keys, values = read(cache, batch.tables[row], first, position + 1, batch.block_size)
            token = starts[row] + query
            one = One.of(queries[token], keys, values, scale, soft_cap)
            answer[token] = one.answer
            worst[token] = one.bound(arithmetic, typical=False)
            typical[token] = one.bound(arithmetic, typical=True)
    return Right(answer, worst, typical)


def read(cache: Tensor, table: Tensor, first: int, stop: int, block_size: int) -> tuple[Tensor, Tensor]:
    """The keys and values at positions [first, stop) of one row, each float64 [positions, kv_heads, head_dim]."""
    positions = torch.arange(first, stop)
    blocks, within = table[positions // block_size].long(), positions % block_size
    return cache[blocks, 0, :, within].double(), cache[blocks, 1, :, within].double()


@dataclass(frozen=True, slots=True)
class One:
    """One token's attention, in float64."""

    query: Tensor
    """[heads, head_dim]"""

    keys: Tensor
    """[positions, heads, head_dim], as `values`"""

    values: Tensor
    scale: float
    soft_cap: float | None
    scores: Tensor
    """[heads, positions], as `weights`"""

    weights: Tensor
    answer: Tensor

    @classmethod
    def of(cls, query: Tensor, keys: Tensor, values: Tensor, scale: float, soft_cap: float | None) -> One:
        heads_per_key = query.shape[0] // keys.shape[1]
        query = query.double()
        keys, values = (part.repeat_interleave(heads_per_key, dim=1) for part in (keys, values))
        scores = torch.einsum("hd,phd->hp", query, keys) * scale
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        weights = torch.softmax(scores, dim=-1)
        answer = torch.einsum("hp,phd->hd", weights, values)
        return cls(query, keys, values, scale, soft_cap, scores, weights, answer)

    def bound(self, by: Arithmetic, *, typical: bool) -> Tensor:
        """[heads, head_dim]: the errors of scores, of their exponentials, of the two sums and of the quotient, one by one."""
        positions, folds = self.scores.shape[1], self.scores.shape[1] / TILE + 2
        # A fold multiplies by an exponential, and the exponents of all folds sum up to a row's range of scores.
        off = torch.expm1(self._exponent_errors(by, typical=typical) + LIBRARY * folds * FLOAT32)
        sums = gamma(positions + folds + 4, typical=typical)
        narrow = gamma(by.weight_roundings, BFLOAT16, typical=typical)
        sizes = self.values.abs()
        above = torch.einsum("hp,phd->hd", self.weights * ((1 + off) * (1 + sums) * (1 + narrow) - 1), sizes)
        if by.weight_step:
            above += by.weight_step / 2 * positions * (self.weights * sizes.amax(-1).T).amax(-1, keepdim=True)
        below = (self.weights * off).sum(-1, keepdim=True) + sums
        error = (above + below * self.answer.abs()) / (1 - below).clamp_min(1e-3)
        return error + by.output_unit * (self.answer.abs() + error)

    def _exponent_errors(self, by: Arithmetic, *, typical: bool) -> Tensor:
        """[heads, positions]: how far a score, less the largest, may be off when its exponential is taken."""
        terms = self.query.abs()[None] * self.keys.abs() * self.scale
        sizes = terms.sum(-1).T
        # Of a key: its scale's product; of the sum: two scales and the sum itself.
        off = gamma(self.query.shape[-1] + 4, typical=typical) * sizes
        # Roundings of a query's own numbers are as independent as those numbers are.
        off += gamma(by.score_roundings, BFLOAT16) * (terms.square().sum(-1).sqrt().T if typical else sizes)
        off += by.query_step / 2 * self.query.abs().amax(-1)[:, None] * self.keys.abs().sum(-1).T * self.scale
        if self.soft_cap is not None:
            # Its slope is at most 1. cap (1 - 2 / (exp(2s / cap) + 1)), or a library's tanh.
            off += 3 * LIBRARY * FLOAT32 * self.soft_cap
        largest = self.scores.amax(-1, keepdim=True)
        # A score and its distance from the largest, each in units of log 2, and the exponential of it.
        return off + FLOAT32 * (4 * self.scores.abs() + 4 * (largest - self.scores + 1) + LIBRARY)
