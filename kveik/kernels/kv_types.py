"""Storage of keys and values: as they are, or as bytes with a scale per token and head. Defines every byte, in torch.

Slow and obvious: what any other kernel writes and reads must be the same.

    storage of a group, plain:      [block, layer, key|value, kv head, slot, head dim]      bfloat16 or float32
    storage of a group, quantised:  [block, layer, key|value, kv head, record byte]         uint8

    record = stored values, [slot][dim], 1 byte each  ++  scales, [slot], bfloat16          value = scale * stored

A row is what one kv head keeps of one token: head_dim numbers x. Its scale and bytes, all arithmetic in float32:

    scale  = bfloat16, rounded up, of max(max|x| / largest, 2^-126); 1 where all x are 0; NaN where an x is NaN or infinite
    stored = x * (1 / scale), rounded to the nearest, ties to even; 0 where the scale is NaN

The scale is rounded up before it is used, so that no stored value exceeds `largest`, and is never subnormal, so that its
inverse is finite. A row with a NaN or an infinity reads as NaN throughout: what has gone wrong stays visible.
Scales are per token and head rather than per block: a slot's bytes then depend on its token alone, and are the same whether its
block was filled in one step or in many, alone or in a batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

SCALE_BYTES = 2
"""A scale is a bfloat16."""

HEAD_DIM_MULTIPLE = 8
"""Quantised heads have a multiple of so many values, so that every row begins on a whole word."""

LEAST_SCALE = 2.0**-126
"""The smallest normal number of float32 and bfloat16."""


@dataclass(frozen=True, slots=True)
class KvType:
    """A type of stored keys and values."""

    name: str
    """As the settings spell it."""

    number: int
    """The native kernels' name for it."""

    values: torch.dtype
    """Of one stored value."""

    largest: float | None
    """What a row's largest value is scaled to; None where values are stored as they are, without scales."""

    @property
    def quantised(self) -> bool:
        return self.largest is not None

    @property
    def storage(self) -> torch.dtype:
        """Of the storage's tensor."""
        return torch.uint8 if self.quantised else self.values

    @property
    def scale_bytes(self) -> int:
        """Bytes per token and head beside its values."""
        return SCALE_BYTES if self.quantised else 0

    @property
    def of_bytes(self) -> KvType | None:
        """Itself where the storage's tensor does not tell the type: what `AttentionBatch.kv_type` is."""
        return self if self.quantised else None

    @property
    def described(self) -> str:
        """For the log and `kveik plan`."""
        return f"{self.name}, 1 byte each and a scale per token and head" if self.quantised else self.name

    def record_bytes(self, block_size: int, head_dim: int) -> int:
        """Bytes that one kv head's keys (or values) of one block take."""
        return block_size * (head_dim * self.values.itemsize + self.scale_bytes)


FLOAT32 = KvType("float32", 0, torch.float32, None)
BFLOAT16 = KvType("bfloat16", 1, torch.bfloat16, None)
INT8 = KvType("int8", 2, torch.int8, 127.0)
FP8_E4M3 = KvType("fp8_e4m3", 3, torch.float8_e4m3fn, 448.0)
FP8_E5M2 = KvType("fp8_e5m2", 4, torch.float8_e5m2, 57344.0)

KV_TYPES = {one.name: one for one in (FLOAT32, BFLOAT16, INT8, FP8_E4M3, FP8_E5M2)}


def parts(records: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """The two parts of quantised records, as views that may be written through.

    records: uint8 [..., record bytes] -> stored uint8 [..., block_size, head_dim], scales bfloat16 [..., block_size]
    """
    width = records.shape[-1]
    head_dim = width // block_size - SCALE_BYTES
    assert width == block_size * (head_dim + SCALE_BYTES), "the records were made for another block size"
    values = block_size * head_dim
    stored = records[..., :values].view(*records.shape[:-1], block_size, head_dim)
    return stored, records[..., values:].view(torch.bfloat16)


def quantise(x: Tensor, kv_type: KvType) -> tuple[Tensor, Tensor]:
    """Rows of any floating type [..., head_dim] -> stored uint8 [..., head_dim], scales bfloat16 [...]."""
    assert kv_type.largest is not None, "a plain type has no scales"
    x = x.float()
    scales = _scales(x.abs().amax(-1), kv_type.largest)
    # A row whose scale is NaN becomes NaN throughout, and then 0.
    scaled = (x * scales.float().reciprocal()[..., None]).nan_to_num_(0.0)
    if kv_type.values is torch.int8:
        scaled.round_()
    return scaled.to(kv_type.values).view(torch.uint8), scales


def _scales(maxima: Tensor, largest: float) -> Tensor:
    """Largest magnitudes of rows, float32 [...] -> bfloat16 [...]"""
    finite = torch.isfinite(maxima)
    ratio = (torch.where(finite, maxima, 0.0) / largest).clamp_(min=LEAST_SCALE)
    # A bfloat16 is the upper half of a float32: a carry out of the lower half rounds positive numbers up.
    raised = ((ratio.view(torch.int32) + 0xFFFF) >> 16).to(torch.int16).view(torch.bfloat16)
    raised = torch.where(maxima == 0, 1.0, raised)
    return torch.where(finite, raised, torch.nan)


def dequantise(stored: Tensor, scales: Tensor, kv_type: KvType, dtype: torch.dtype) -> Tensor:
    """scale * stored, rounded once to `dtype` (float32 or bfloat16).

    stored: uint8 [..., head_dim], with any strides but 1 along the last dimension; scales: bfloat16 [...] -> [..., head_dim]
    """
    factors = scales.float()[..., None]
    if kv_type.values is torch.int8:
        return stored.view(torch.int8).float().mul_(factors).to(dtype)
    bits = stored.view(torch.int8).to(torch.int16)
    if kv_type.values is torch.float8_e5m2:
        # e5m2 is the upper half of a float16.
        return bits.bitwise_left_shift_(8).view(torch.float16).float().mul_(factors).to(dtype)
    # e4m3's exponent and fraction, moved into those of a float16, mean 2^-8 of it, subnormal numbers too. The sign, which
    # widening has repeated, stays in bit 15 alone. Ten times as fast as torch's own conversion. NaN's code is never stored.
    halves = bits.bitwise_left_shift_(7).bitwise_and_(0xBFFF - 0x10000).view(torch.float16)
    return halves.float().mul_(factors * 256.0).to(dtype)


def plain(records: Tensor, block_size: int, kv_type: KvType, dtype: torch.dtype = torch.float32) -> Tensor:
    """Whole records as the values they mean: uint8 [..., record bytes] -> [..., block_size, head_dim].

    What a kernel computes over quantised storage, it must compute over this, up to rounding.
    """
    return dequantise(*parts(records, block_size), kv_type, dtype)
