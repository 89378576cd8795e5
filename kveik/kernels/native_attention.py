"""Attention over cache blocks by the native kernels: they read keys and values where they lie, whatever their type.

Queries are computed with in float32 where keys and values are stored so; otherwise keys, values, queries and weights meet in
bfloat16 or int8, and are summed up in float32.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kveik.kernels import native
from kveik.kernels.batch import AttentionBatch
from kveik.kernels.kv_types import BFLOAT16, FLOAT32, SCALE_BYTES, KvType

HEAD_DIM_STEP, HEAD_DIM_MOST = 16, 1024
"""A head is read in vectors of so many numbers, and what one needs lies on the stack."""

BLOCK_SIZE_LEAST = 8

_PLAIN = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16}


def supports(cache: Tensor, batch: AttentionBatch) -> bool:
    """Whether the native kernels are there, and take this storage: `cache` as in `kernels.attention.write`."""
    if native.module is None or cache.device.type != "cpu":
        return False
    kv_type, size = _type(cache, batch), batch.block_size
    if kv_type is None or size < BLOCK_SIZE_LEAST or size & (size - 1):
        return False
    head_dim = _head_dim(cache, batch)
    return head_dim % HEAD_DIM_STEP == 0 and head_dim <= HEAD_DIM_MOST


def write(cache: Tensor, keys: Tensor, values: Tensor, batch: AttentionBatch) -> None:
    """Put the step's new keys and values into their slots. Shapes as in `kernels.attention.write`."""
    assert native.module is not None
    number, rows = _number(cache, batch), _rows(batch)
    native.module.attention_write(
        _numbers(keys), _numbers(values), _layer(cache), number, batch.block_size, rows, torch.get_num_threads()
    )


def attend(queries: Tensor, cache: Tensor, batch: AttentionBatch, *, scale: float, soft_cap: float | None) -> Tensor:
    """Every query over the keys it may see. Shapes as in `kernels.attention.attend`.

    A row's result is the same, to the bit, alone and among others, and with any number of threads.
    """
    assert native.module is not None
    wide = queries.float()
    if wide.stride()[1:] != (wide.shape[2], 1):
        wide = wide.contiguous()
    attended = torch.empty(wide.shape)
    native.module.attention_attend(
        wide.numpy(),
        scale,
        soft_cap or 0.0,
        _layer(cache),
        _number(cache, batch),
        cache.shape[2],
        batch.block_size,
        _rows(batch),
        attended.numpy(),
        torch.get_num_threads(),
    )
    return attended.to(queries.dtype)


def _type(cache: Tensor, batch: AttentionBatch) -> KvType | None:
    return batch.kv_type or _PLAIN.get(cache.dtype)


def _number(cache: Tensor, batch: AttentionBatch) -> int:
    kv_type = _type(cache, batch)
    assert kv_type is not None, "the storage has a type that native kernels do not read"
    return kv_type.number


def _head_dim(cache: Tensor, batch: AttentionBatch) -> int:
    return cache.shape[3] // batch.block_size - SCALE_BYTES if batch.kv_type is not None else cache.shape[4]


def _layer(cache: Tensor) -> NDArray[np.uint8]:
    """One layer's view of a group's storage as bytes, [blocks, bytes of a block's records], without a copy."""
    layer = cache.view(torch.uint8).numpy()
    return layer.reshape(len(layer), -1)


def _numbers(heads: Tensor) -> NDArray[Any]:
    """[tokens, heads, head_dim] as an array: bfloat16 as the uint16 of its bits, every other type as float32."""
    if heads.stride()[1:] != (heads.shape[2], 1):
        heads = heads.contiguous()
    return heads.view(torch.uint16).numpy() if heads.dtype == torch.bfloat16 else heads.float().numpy()


def _rows(batch: AttentionBatch) -> object:
    """The step as the kernels take it, made at its first layer."""
    rows = batch.memo.get("native rows")
    if rows is None:
        assert native.module is not None
        rows = batch.memo["native rows"] = native.module.AttentionRows.of(
            batch.tables.numpy(),
            batch.slot_mapping.numpy(),
            batch.query_start_loc.numpy(),
            batch.seq_lens.numpy(),
            batch.decodes,
            batch.window or 0,
        )
    return rows
