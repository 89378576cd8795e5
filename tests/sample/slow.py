"""The sampler as one would explain it: a row at a time, float64, a full sort, no state.

The quick one must give the same answers.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kveik.request.sequence import Sequence
from tests.sample.making import uniforms_of

Doubles = NDArray[np.float64]


def edited(row: NDArray[np.float32], sequence: Sequence, real: int, eos_ids: frozenset[int]) -> Doubles:
    """Logits after bias, penalties and impossible tokens; ids from `real` on are gone."""
    params = sequence.sampling
    values = row[:real].astype(np.float64)
    for token, bias in params.logit_bias:
        if token < real:
            values[token] += -np.inf if bias == -100 else bias
    for token in set(sequence.tokens):
        if token < real:
            penalty = params.repetition_penalty
            values[token] = values[token] / penalty if values[token] > 0 else values[token] * penalty
    for token in sequence.output:
        if token < real:
            values[token] -= params.frequency_penalty
    for token in set(sequence.output):
        if token < real:
            values[token] -= params.presence_penalty
    if sequence.output_count < params.min_tokens:
        for token in eos_ids | set(params.stop_token_ids):
            if token < real:
                values[token] = -np.inf
    return values


def filtered(values: Doubles, sequence: Sequence) -> tuple[list[int], Doubles]:
    """The tokens that are left and their probabilities: in rank order where a filter is set, else by id."""
    params = sequence.sampling
    weights = np.exp((values - values.max()) / params.temperature)
    order = sorted(range(len(values)), key=lambda token: (-values[token], token))
    if params.top_k:
        order = order[: params.top_k]
    order = [token for token in order if weights[token] >= params.min_p * weights[order[0]]]
    if params.top_p < 1:
        total, reached, kept = sum(weights[order]), 0.0, []
        for token in order:
            if reached >= params.top_p * total:
                break
            kept.append(token)
            reached += weights[token]
        order = kept
    if not 0 < params.top_k < len(values) and params.min_p == 0 and params.top_p == 1:
        order = list(range(len(values)))
    left = weights[order]
    return order, left / left.sum()


def choose(row: NDArray[np.float32], sequence: Sequence, real: int, eos_ids: frozenset[int]) -> set[int]:
    """The right token; with its neighbour where the number falls within rounding of the border between them."""
    values = edited(row, sequence, real, eos_ids)
    if sequence.sampling.greedy:
        return {int(values.argmax())}
    tokens, shares = filtered(values, sequence)
    [chance] = uniforms_of([(sequence.seed, sequence.choice, sequence.output_count)])
    sums = np.cumsum(shares)
    return {tokens[min(int(np.searchsorted(sums, chance + slip, side="right")), len(tokens) - 1)] for slip in (-2e-5, 0, 2e-5)}
