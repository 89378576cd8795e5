"""Weights in the native kernels' own layout: packed from a file's blocks or from floats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kveik.kernels import native
from kveik.kernels.memory import ALIGNMENT, Arena

FORMATS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
"""GGML's quantised types that the kernels read."""

Q8_0 = "Q8_0"
"""int8 with one scale per group: what weights become that are quantised here."""

GROUP = 32
"""A product's inputs must be a multiple of this: groups of weights share a scale."""

PANEL = 16
"""Outputs that are packed side by side."""

Part = tuple[object, int, int, NDArray[np.uint8]]
"""Format, outputs, inputs, packed bytes: as native/bindings/forward.cpp takes it."""


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """[outputs, inputs] in one of the formats."""

    format: str
    outputs: int
    inputs: int
    bytes: NDArray[np.uint8]

    def as_part(self) -> Part:
        assert native.module is not None
        return (native.module.WeightFormat[self.format], self.outputs, self.inputs, self.bytes)


def pack(format: str, blocks: NDArray[np.uint8], inputs: int, arena: Arena | None = None) -> PackedWeight:
    """blocks: [outputs, bytes per row], as the file has them."""
    return pack_together(format, [blocks], inputs, arena)


def pack_together(format: str, parts: Sequence[NDArray[np.uint8]], inputs: int, arena: Arena | None = None) -> PackedWeight:
    """parts: blocks of several weights with the same inputs, [outputs, bytes per row] each, which become one.

    arena: where it is to lie.
    """
    if any(len(part) % PANEL for part in parts[:-1]):
        parts = [np.concatenate(parts)]
    assert native.module is not None
    kind, outputs = native.module.WeightFormat[format], sum(map(len, parts))
    packed = (aligned if arena is None else arena.take)(native.module.packed_bytes(kind, outputs, inputs))
    first = 0
    for part in parts:
        # Whole panels lie one after another, so a part of them can be packed straight to its place.
        size = native.module.packed_bytes(kind, len(part), inputs)
        place = packed[first : first + size]
        native.module.pack(kind, len(part), inputs, part.reshape(-1), place, torch.get_num_threads())
        first += size
    return PackedWeight(format, outputs, inputs, packed)


def pack_float(weight: Tensor, arena: Arena | None = None) -> PackedWeight:
    """weight: float32 [outputs, inputs] -> int8 with one scale per group of inputs: Q8_0."""
    return pack(Q8_0, q8_0_blocks(weight), weight.shape[1], arena)


def q8_0_blocks(weight: Tensor) -> NDArray[np.uint8]:
    """float32 [outputs, inputs] -> blocks as GGML's Q8_0 has them, [outputs, bytes per row]: a float16 scale, 32 int8.

    Rounded with the scale as it is stored. A group with a NaN or an infinity gets a scale that is none, and reads so.
    """
    groups = weight.view(len(weight), -1, GROUP)
    scales = (groups.abs().amax(-1, keepdim=True) / 127.0).half()
    inverse = torch.where(scales == 0, 0.0, scales.float().reciprocal())
    values = (groups * inverse).round_().clamp_(-127, 127).nan_to_num_(0.0).to(torch.int8)
    blocks = torch.cat((scales.view(torch.int8), values), dim=-1)
    return blocks.flatten(1).view(torch.uint8).numpy()


def aligned(size: int) -> NDArray[np.uint8]:
    """uint8 [size], its first byte at the beginning of a cache line."""
    memory = np.empty(size + ALIGNMENT, np.uint8)
    first = -memory.ctypes.data % ALIGNMENT
    return memory[first : first + size]


def activations_of(x: NDArray[np.float32], weight: PackedWeight) -> NDArray[np.uint8]:
    """x: [rows, inputs] -> the same as int8 rows, in the kernels' own layout, as finely as the weight wants it."""
    assert native.module is not None
    span = native.module.span_of(native.module.WeightFormat[weight.format])
    activations = aligned(native.module.activation_bytes(*x.shape, span))
    native.module.quantise(x, activations, torch.get_num_threads(), span)
    return activations


def multiply(weight: PackedWeight, activations: NDArray[np.uint8], out: NDArray[np.float32]) -> None:
    """out [rows, outputs] = x Wᵀ; activations: what `activations_of` made of x."""
    assert native.module is not None
    kind = native.module.WeightFormat[weight.format]
    threads, span = torch.get_num_threads(), native.module.span_of(kind)
    native.module.linear(kind, weight.outputs, weight.inputs, weight.bytes, activations, None, out, False, threads, span)
