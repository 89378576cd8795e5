"""Attention over cache blocks, slow and obvious: one token, one row at a time, in float32. It defines the right answer."""

from __future__ import annotations

import torch
from torch import Tensor

from kveik.kernels.batch import AttentionBatch


def write(cache: Tensor, keys: Tensor, values: Tensor, batch: AttentionBatch) -> None:
    """Put each token's key and value into its slot. Shapes as in `kernels.attention.write`."""
    for token, slot in enumerate(batch.slots.tolist()):
        block, within = divmod(slot, batch.block_size)
        cache[block, 0, :, within] = keys[token].to(cache.dtype)
        cache[block, 1, :, within] = values[token].to(cache.dtype)


def attend(queries: Tensor, cache: Tensor, batch: AttentionBatch, *, scale: float, soft_cap: float | None) -> Tensor:
    """Every query over the keys it may see. Shapes as in `kernels.attention.attend`."""
    attended = torch.empty_like(queries)
    starts, contexts = batch.query_starts.tolist(), batch.contexts.tolist()
    for row, context in enumerate(contexts):
        count = starts[row + 1] - starts[row]
        for query in range(count):
            position = context - count + query
            first = 0 if batch.window is None else max(0, position - batch.window + 1)
            keys, values = read(cache, batch.tables[row], first, position + 1, batch.block_size)
            token = starts[row] + query
            attended[token] = attend_one(queries[token], keys, values, scale, soft_cap).to(queries.dtype)
    return attended


def read(cache: Tensor, table: Tensor, first: int, stop: int, block_size: int) -> tuple[Tensor, Tensor]:
    """The keys and values at positions [first, stop) of one row, each float32 [positions, kv_heads, head_dim]."""
    slots = [(int(table[position // block_size]), position % block_size) for position in range(first, stop)]
    keys = torch.stack([cache[block, 0, :, within] for block, within in slots])
    values = torch.stack([cache[block, 1, :, within] for block, within in slots])
    return keys.float(), values.float()


def attend_one(query: Tensor, keys: Tensor, values: Tensor, scale: float, soft_cap: float | None) -> Tensor:
    """One token's query [heads, head_dim] over keys and values [positions, kv_heads, head_dim] -> float32 [heads, head_dim]."""
    heads_per_key = query.shape[0] // keys.shape[1]
    keys = keys.repeat_interleave(heads_per_key, dim=1)
    values = values.repeat_interleave(heads_per_key, dim=1)
    scores = torch.einsum("hd,phd->hp", query.float(), keys) * scale
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    return torch.einsum("hp,phd->hd", torch.softmax(scores, dim=-1), values)
