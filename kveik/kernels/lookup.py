"""Records of the storage that a row reads, as index arrays: derived once per step, used by every layer of the group.

The storage of a group, [block, layer, key|value, kv head, ...], is one array of *records*: a record is what one kv head keeps
in one block, [block_size, head_dim] or, quantised, the bytes of `kv_types`. One layer's view starts at its first record and
repeats every `block_records` records:

    record = block * block_records + (0 for keys, kv_heads for values) + kv head
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kveik.kernels.kv_types import SCALE_BYTES, KvType

Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Records:
    """How one layer's view of a group's storage lies in memory."""

    kv_heads: int
    head_dim: int
    block_size: int
    block_records: int
    """Records from one block of this layer to the next."""

    kv_type: KvType | None = None
    """None: plain values of the storage's own type."""

    @property
    def width(self) -> int:
        """Elements of the storage that a record takes: its values, or where they are quantised its bytes."""
        if self.kv_type is None:
            return self.block_size * self.head_dim
        return self.kv_type.record_bytes(self.block_size, self.head_dim)


def records_of(cache: Tensor, block_size: int, kv_type: KvType | None = None) -> Records:
    """The records of one layer's view, whose blocks must each be contiguous.

    cache: [blocks, 2, kv_heads, block_size, head_dim], or quantised, uint8 [blocks, 2, kv_heads, record bytes]
    """
    kv_heads, width = cache.shape[2], cache.shape[3:].numel()
    head_dim = cache.shape[4] if kv_type is None else width // block_size - SCALE_BYTES
    inner = (head_dim, 1) if kv_type is None else (1,)
    assert cache.stride()[1:] == (kv_heads * width, width, *inner), "a layer's block is not contiguous"
    # The stride of a dimension of size 1 means nothing; with one block there is no next one.
    block_records = cache.stride(0) // width if cache.shape[0] > 1 else 2 * kv_heads
    records = Records(kv_heads, head_dim, block_size, block_records, kv_type)
    assert records.width == width, "the storage was made for another block size"
    return records


def flat(cache: Tensor, records: Records, width: int) -> Tensor:
    """The layer's memory as rows of `width` elements, from its first record to its last, without a copy."""
    count = (cache.shape[0] - 1) * records.block_records + 2 * records.kv_heads
    return cache.as_strided((count * records.width // width, width), (width, 1), cache.storage_offset())


def write_rows(slots: Tensor, records: Records) -> Tensor:
    """Where each token's key is written: int64 [tokens, kv_heads], rows of `flat(cache, records, head_dim)`.

    Its value goes kv_heads * block_size rows further.
    """
    block_size = records.block_size
    block, within = slots // block_size, slots % block_size
    heads = torch.arange(records.kv_heads)
    return (block * records.block_records)[:, None] * block_size + heads * block_size + within[:, None]


@dataclass(frozen=True, slots=True)
class Gather:
    """Keys and values of some rows, brought together as [2, rows, kv_heads, length, head_dim].

    Rows shorter than `length` are filled up with slots of their own last block; what lies outside a row's range is set to
    zero after the copy, because it may hold anything: 0 * NaN would be NaN.
    """

    records: Tensor
    """int64 [2 * rows * kv_heads * blocks]: rows of `flat(cache, records, records.width)`."""

    rows: int
    length: int
    """Slots per row: whole blocks."""

    outside: Tensor | None
    """int64: slots of the gathered array, [2 * rows * kv_heads * length], that are outside their row's range."""

    mask: NDArray[np.bool_] | None
    """[rows, length]: True outside the row's range; None where no slot is."""


def gather_of(tables: Integers, firsts: Integers, stops: Integers, records: Records) -> Gather:
    """How to bring together positions [firsts[i], stops[i]) of each row.

    tables: [rows, blocks]; slot 0 of the gathered row is the first slot of the block that holds position firsts[i].
    """
    size, heads = records.block_size, np.arange(records.kv_heads)
    first_blocks, last_blocks = firsts // size, (stops - 1) // size
    blocks = int((last_blocks - first_blocks).max()) + 1
    entries = np.minimum(first_blocks[:, None] + np.arange(blocks), last_blocks[:, None])
    keys = (np.take_along_axis(tables, entries, 1) * records.block_records)[:, None, :] + heads[None, :, None]
    positions = first_blocks[:, None] * size + np.arange(blocks * size)
    mask = (positions < firsts[:, None]) | (positions >= stops[:, None])
    return Gather(
        records=torch.from_numpy(np.stack((keys, keys + records.kv_heads)).reshape(-1)),
        rows=len(tables),
        length=blocks * size,
        outside=slots_outside(mask, records.kv_heads) if mask.any() else None,
        mask=mask if mask.any() else None,
    )


def slots_outside(mask: NDArray[np.bool_], kv_heads: int) -> Tensor:
    """The masked slots of [rows, length] as slots of [2, rows, kv_heads, length], flat."""
    rows, length = mask.shape
    row, slot = np.nonzero(mask)
    base = row * (kv_heads * length) + slot
    heads = np.arange(kv_heads) * length
    halves = np.arange(2) * (rows * kv_heads * length)
    return torch.from_numpy((halves[:, None, None] + heads[:, None] + base).reshape(-1))


def group_by_length(lengths: list[int], slack: float, free: int) -> list[list[int]]:
    """Rows whose lengths (in blocks) are near enough to be read as if they were equally long, longest first.

    A row joins the group before it while the group's filling stays within `slack` of what it really reads, or within `free`
    blocks, which cost less than another round of calls.
    """
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    groups: list[list[int]] = []
    longest = real = filling = 0
    for row in order:
        more = longest - lengths[row]
        if groups and filling + more <= max(free, slack * (real + lengths[row])):
            groups[-1].append(row)
            real, filling = real + lengths[row], filling + more
        else:
            groups.append([row])
            longest, real, filling = lengths[row], lengths[row], 0
    return [sorted(group) for group in groups]
