"""Which way of multiplying suits a file on this machine: found by trying one of its products both ways."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from kveik.kernels import native
from kveik.kernels.memory import Arena
from kveik.kernels.native_attention import HEAD_DIM_MOST, HEAD_DIM_STEP
from kveik.kernels.native_linear import FORMATS, GROUP, activations_of, multiply
from kveik.model.linear import make_linear
from kveik.model.native_loading import pack_blocks
from kveik.model.weights import ModelFile
from kveik.words import counted

ROWS_FEW, ROWS_MANY = 1, 256
"""A decoding step of one sequence, and a prompt's chunk."""

DECODES_PER_CHUNK = 64
"""How many steps of few rows weigh as much as one of many: an answer beside its prompt."""

REPEATS = 5

MARGIN = 1.5
"""Floats must be so many times as quick: one product shows nothing of what the native step saves around products, and a busy
machine must not decide by chance."""


@dataclass(frozen=True, slots=True)
class Trial:
    """Least seconds of one of the model's products, few rows and many, in both ways."""

    blocks: tuple[float, float]
    floats: tuple[float, float]

    @property
    def blocks_win(self) -> bool:
        return _weighed(self.blocks) < MARGIN * _weighed(self.floats)

    def __str__(self) -> str:
        few, many = (
            f"{1e3 * ours:.2f} ms against {1e3 * theirs:.2f}" for ours, theirs in zip(self.blocks, self.floats, strict=True)
        )
        return f"a product of {ROWS_FEW} row took {few} with floats, of {ROWS_MANY} rows {many}"


def _weighed(seconds: tuple[float, float]) -> float:
    return DECODES_PER_CHUNK * seconds[0] + seconds[1]


def no_kernels_because(file: ModelFile) -> str | None:
    """Why the native kernels cannot run the model, whatever its weights; None where they can."""
    spec = file.spec
    if native.module is None:
        return "the native kernels are not installed"
    odd = [width for width in (spec.hidden, spec.intermediate, spec.heads * spec.head_dim) if width % GROUP]
    if odd:
        return f"the model has products over {counted(odd[0], 'input')}, which is no multiple of {GROUP}"
    if spec.head_dim % HEAD_DIM_STEP:
        return f"the model's heads have {counted(spec.head_dim, 'dimension')}, which is no multiple of {HEAD_DIM_STEP}"
    if spec.head_dim > HEAD_DIM_MOST:
        return f"the model's heads have {counted(spec.head_dim, 'dimension')}; the native kernels take {HEAD_DIM_MOST} at most"
    return None


def no_blocks_because(file: ModelFile) -> str | None:
    """Why the file's own blocks cannot be multiplied; None where they can."""
    raw = file.raw(_product(file))
    if raw is None:
        return "the model is a folder, whose weights are not quantised"
    if raw.kind.name not in FORMATS:
        return f"the weights are of type {raw.kind.name}, which the native kernels do not multiply"
    return no_kernels_because(file)


def tried(file: ModelFile, dtype: torch.dtype) -> Trial:
    """Multiply with the middle layer's gate in both ways. Takes some tenths of a second."""
    outputs, inputs = file.spec.intermediate, file.spec.hidden
    (packed,) = pack_blocks(file, [_product(file)], [outputs], inputs, Arena())
    weight = torch.empty(outputs, inputs, dtype=dtype)
    file.read(_product(file), weight)
    linear = make_linear(weight, None, dtype)

    def blocks(rows: int) -> float:
        x = np.ones((rows, inputs), np.float32)
        out = np.empty((rows, outputs), np.float32)
        activations = activations_of(x, packed)
        return _least(lambda: multiply(packed, activations, out))

    def floats(rows: int) -> float:
        x = torch.ones(rows, inputs, dtype=dtype)
        return _least(lambda: linear(x))

    with torch.inference_mode():
        return Trial((blocks(ROWS_FEW), blocks(ROWS_MANY)), (floats(ROWS_FEW), floats(ROWS_MANY)))


def _product(file: ModelFile) -> str:
    return f"layers.{file.spec.layers // 2}.mlp.gate_proj.weight"


def _least(work: Callable[[], object]) -> float:
    seconds = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return min(seconds)
