"""Attention over cache blocks: chooses the implementation, native or torch."""

from __future__ import annotations

from torch import Tensor

from kveik.kernels import native_attention, torch_attention
from kveik.kernels.batch import AttentionBatch

__all__ = ["AttentionBatch", "attend", "write"]


def write(cache: Tensor, keys: Tensor, values: Tensor, batch: AttentionBatch) -> None:
    """Puts the step's new keys and values into their slots.

    cache: one layer's view of a group's storage, [blocks, key|value, kv_heads, block_size, head_dim]; quantised, uint8
    [blocks, key|value, kv_heads, record bytes]
    keys, values: [tokens, kv_heads, head_dim]; cast to the cache's type
    """
    if native_attention.supports(cache, batch):
        native_attention.write(cache, keys, values, batch)
    else:
        torch_attention.write(cache, keys, values, batch)


def attend(queries: Tensor, cache: Tensor, batch: AttentionBatch, *, scale: float, soft_cap: float | None) -> Tensor:
    """Computes softmax(cap(scale * Q Kᵀ)) V for every row over its own context, after `write` of the same step.

    A query at position i reads the keys at max(0, i - window + 1) … i; cap(s) = soft_cap * tanh(s / soft_cap).
    queries: [tokens, heads, head_dim], heads a multiple of kv_heads -> the same shape and type
    """
    if native_attention.supports(cache, batch):
        return native_attention.attend(queries, cache, batch, scale=scale, soft_cap=soft_cap)
    return torch_attention.attend(queries, cache, batch, scale=scale, soft_cap=soft_cap)
