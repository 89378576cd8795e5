"""Sequences and logits for the tests of the sampler."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from kveik.request.request import Request, SamplingParams
from kveik.request.sequence import Sequence


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


def logits(rows: ArrayLike, copies: int = 1) -> torch.Tensor:
    """float32 [rows * copies, vocab], memory of its own."""
    return torch.from_numpy(np.repeat(np.atleast_2d(np.asarray(rows, dtype=np.float32)), copies, axis=0))


def logs(probabilities: ArrayLike) -> NDArray[np.float32]:
    return np.log(np.asarray(probabilities)).astype(np.float32)
