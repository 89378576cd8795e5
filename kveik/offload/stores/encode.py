"""Blocks to payloads and back: byte for byte, or as int8 with a scale per token and head.

    block, as the pool has it:  [layer, key|value, kv head, slot, head dim]     bfloat16 or float32 (or any bytes)
    int8 payload:               [row, head dim] int8  ++  [row] bfloat16 scales     row = (layer, key|value, kv head, slot)

The arithmetic is that of `kernels/kv_types.py`, to the bit: a scale is max|x| / 127 of its row, rounded up to bfloat16 and
never subnormal; a row of zeros has scale 1; a row with a NaN or an infinity has scale NaN and reads as NaN throughout.

Work is cut into pieces that torch does without threads: a tier's worker must not wake a team of threads beside the step's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from kveik.offload.stores.record import Encoding

_PIECE = 1 << 15
"""torch adds and multiplies fewer values than this on the calling thread alone."""

_PIECE_OF_FUNCTIONS = 1 << 11
"""The same bound for functions such as the reciprocal."""

_ROUNDING = 1.5 * 2.0**23
"""A float32 this large has no fraction."""

_LARGEST = 127.0
_LEAST_SCALE = 2.0**-126
_SCALE_BYTES = 2


class Codec(Protocol):
    """One way to write a group's blocks as payloads."""

    @property
    def encoding(self) -> Encoding: ...

    @property
    def block_bytes(self) -> int: ...

    @property
    def payload_bytes(self) -> int: ...

    def encode(self, block: memoryview, payload: memoryview) -> None:
        """Write the payload of a block. Both have the sizes above."""
        ...

    def decode(self, payload: memoryview, block: memoryview) -> None:
        """Write the block that a payload stands for."""
        ...


class Raw:
    """Blocks as they are. Right for pools that are quantised already, and where nothing may be lost."""

    encoding = Encoding.RAW

    def __init__(self, block_bytes: int) -> None:
        self.block_bytes = self.payload_bytes = block_bytes

    def encode(self, block: memoryview, payload: memoryview) -> None:
        copy(block, payload)

    def decode(self, payload: memoryview, block: memoryview) -> None:
        copy(payload, block)


@dataclass(frozen=True)
class Int8Rows:
    """Rows of int8, then their scales: nearly half of bfloat16, nearly a quarter of float32."""

    rows: int
    """Layers in the group, times two, times kv heads, times slots."""

    head_dim: int
    dtype: torch.dtype
    """Type of the pool: bfloat16 or float32."""

    encoding = Encoding.INT8

    def __post_init__(self) -> None:
        assert self.dtype in (torch.bfloat16, torch.float32), "pools of other types are quantised already"
        assert self.head_dim < _PIECE

    @property
    def block_bytes(self) -> int:
        return self.rows * self.head_dim * self.dtype.itemsize

    @property
    def payload_bytes(self) -> int:
        return self.rows * (self.head_dim + _SCALE_BYTES)

    def encode(self, block: memoryview, payload: memoryview) -> None:
        """Write the payload of a block: one pass for the rows' maxima, one for the values."""
        x = _bytes(block).view(self.dtype).view(self.rows, self.head_dim)
        stored, scales = self._parts(payload)
        bits, sizes = (torch.int16, 0x7FFF) if self.dtype is torch.bfloat16 else (torch.int32, 0x7FFFFFFF)
        maxima, inverse = torch.empty(self.rows, dtype=bits), torch.empty(self.rows)
        # The bits of magnitudes are in order as integers are, and a NaN's are beyond an infinity's.
        for piece in _pieces(self.rows, self.head_dim):
            torch.amax(x[piece].view(bits) & sizes, -1, out=maxima[piece])
        for piece in _pieces(self.rows, _PIECE // _PIECE_OF_FUNCTIONS):
            scales[piece] = _scales(maxima[piece].view(self.dtype).float())
            inverse[piece] = scales[piece].float().reciprocal_()
        broken = bool(inverse.sum().isnan())
        for piece in _pieces(self.rows, self.head_dim):
            values = x[piece] * inverse[piece, None]
            if broken:
                values.nan_to_num_(0.0)
            # Rounds to the nearest, ties to even, as round() does; its lowest byte is then the int8.
            stored[piece] = values.add_(_ROUNDING).view(torch.int32)

    def decode(self, payload: memoryview, block: memoryview) -> None:
        """Write scale * stored, rounded once to the pool's type."""
        x = _bytes(block).view(self.dtype).view(self.rows, self.head_dim)
        stored, scales = self._parts(payload)
        for piece in _pieces(self.rows, self.head_dim):
            # An int8 is exact in bfloat16, so the product is rounded once there too.
            torch.mul(stored[piece], scales[piece, None].to(self.dtype), out=x[piece])

    def _parts(self, payload: memoryview) -> tuple[Tensor, Tensor]:
        """Stored int8 [rows, head_dim] and scales bfloat16 [rows], as views of the payload."""
        numbers, values = _bytes(payload), self.rows * self.head_dim
        return numbers[:values].view(torch.int8).view(self.rows, self.head_dim), numbers[values:].view(torch.bfloat16)


def _pieces(rows: int, width: int) -> Iterator[slice]:
    """Slices of rows with so many values each."""
    step = max((_PIECE - 1) // width, 1)
    return (slice(start, start + step) for start in range(0, rows, step))


def _scales(maxima: Tensor) -> Tensor:
    """Largest magnitudes of rows, float32 -> bfloat16 scales."""
    ratio = (maxima / _LARGEST).clamp_(min=_LEAST_SCALE)
    # A bfloat16 is the upper half of a float32: a carry out of the lower half rounds positive numbers up.
    raised = ((ratio.view(torch.int32) + 0xFFFF) >> 16).to(torch.int16).view(torch.bfloat16)
    raised.masked_fill_(maxima == 0, 1.0)
    return raised.masked_fill_(~torch.isfinite(maxima), torch.nan)


def _bytes(view: memoryview) -> Tensor:
    """uint8, on the same memory where it may be written; torch takes no other."""
    return torch.frombuffer(bytearray(view) if view.readonly else view, dtype=torch.uint8)


def copy(source: memoryview, target: memoryview) -> None:
    """All bytes of one into the other, without holding the interpreter's lock."""
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))
