"""Sequences and logits for the tests of the sampler."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Sequences
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from benchmarks.sampler import rows_of
from kveik.request.request import Request, SamplingParams, TokenLogprob
from kveik.request.sampling_rows import seed_words
from kveik.request.sequence import Sequence
from kveik.sample.chance import uniforms
from kveik.sample.sampler import Sampler


def sequence(
    number: int = 0,
    *,
    prompt: tuple[int, ...] = (0,),
    output: tuple[int, ...] = (),
    seed: int = 0,
    choice: int = 0,
    **sampling: object,
) -> Sequence:
    params = SamplingParams(**{"max_tokens": 1 << 20} | sampling)
    request = Request(id=f"request-{number}", prompt=prompt, sampling=params)
    made = Sequence.start(id=number, request=request, choice=choice, seed=seed, arrived=0.0)
    made.tokens.extend(output)
    return made


class Choice(NamedTuple):
    """The token chosen for one row."""

    token: int
    logprob: TokenLogprob | None
    failed: bool


def choose(sampler: Sampler, values: torch.Tensor, sequences: Sequences[Sequence]) -> list[Choice]:
    """What the sampler chooses, one value per sequence."""
    choices = sampler.choose(values, rows_of(sequences))
    return [Choice(int(token), choices.logprobs.get(row), row in choices.failed) for row, token in enumerate(choices.tokens)]


def uniforms_of(places: Iterable[tuple[int, int, int]]) -> NDArray[np.float64]:
    """One number for each (seed, choice, position)."""
    listed = list(places)
    seeds = np.array([seed_words(seed) for seed, _, _ in listed], dtype=np.uint64).reshape(-1, 3)
    choices, positions = (np.array([place[at] for place in listed], dtype=np.int64) for at in (1, 2))
    return uniforms(seeds, choices, positions)


def logits(rows: ArrayLike, copies: int = 1) -> torch.Tensor:
    """float32 [rows * copies, vocab], memory of its own."""
    return torch.from_numpy(np.repeat(np.atleast_2d(np.asarray(rows, dtype=np.float32)), copies, axis=0))


def logs(probabilities: ArrayLike) -> NDArray[np.float32]:
    return np.log(np.asarray(probabilities)).astype(np.float32)
