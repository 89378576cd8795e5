"""Attention over cache blocks in plain torch, fast: rows of similar length are gathered and multiplied together.

Decode rows: one query each; all rows of a group of similar lengths become two batched products over [rows * kv_heads].
Prefill rows: one row at a time, in tiles of queries, so that a tile multiplies only the keys that its last query may see
(the idea of FlashAttention, Dao et al. 2022, arXiv:2205.14135, cut only along the queries).
The heads that share a kv head are stacked as rows of one product, so that keys and values are never repeated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kveik.kernels.batch import AttentionBatch
from kveik.kernels.kv_types import KvType, parts, plain, quantise
from kveik.kernels.lookup import Gather, Records, flat, gather_of, group_by_length, records_of, write_rows

TILE_QUERIES = 128
"""Queries of a prefill tile: fewer waste product size, more compute scores that the causal mask throws away."""

TILE_SCORES = 4_000_000
"""Scores of a tile at most, all heads together, so that a long context does not need unbounded workspace (8 MB in bf16)."""

DEQUANTISED_VALUES = 1 << 19
"""Quantised values read at once: what each step of the conversion leaves stays in the processor's cache (2 MB in float32)."""

FUSED_KEYS = 2000
"""Up to so many keys, all rows and kv heads together, the fused kernel's lower start-up cost beats two batched products."""


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Decode rows of similar length."""

    rows: Tensor | None
    """int64 rows of the step; None: all its decode rows, in order."""

    gather: Gather
    bias: Tensor | None
    """[rows, 1, 1, length]: 0 inside the row's range, -inf outside; None where nothing is outside."""


@dataclass(frozen=True, slots=True)
class Tile:
    """Queries [first, stop) of the step over keys [low, high) of their gathered row."""

    first: int
    stop: int
    low: int
    high: int
    bias: Tensor
    """[queries, columns]: added to the last `columns` scores of each query; -inf where it may not look."""


@dataclass(frozen=True, slots=True)
class PrefillRow:
    gather: Gather
    tiles: tuple[Tile, ...]


@dataclass(frozen=True, slots=True)
class StepReads:
    """Everything that `attend` needs to know about a step in one group; the same in all the group's layers."""

    records: Records
    decodes: tuple[DecodeGroup, ...]
    prefills: tuple[PrefillRow, ...]


def write(cache: Tensor, keys: Tensor, values: Tensor, batch: AttentionBatch) -> None:
    """Put the step's new keys and values into their slots. Shapes as in `kernels.attention.write`."""
    if batch.kv_type is not None:
        _write_quantised(cache, keys, values, batch, batch.kv_type)
        return
    memo_key = ("write", cache.stride(), cache.shape)
    memo = batch.memo.get(memo_key)
    if memo is None:
        records = records_of(cache, batch.block_size)
        key_rows = write_rows(batch.slot_mapping, records)
        memo = (records, key_rows, key_rows + records.kv_heads * records.block_size)
        batch.memo[memo_key] = memo
    records, key_rows, value_rows = cast(tuple[Records, Tensor, Tensor], memo)
    rows = flat(cache, records, records.head_dim)
    rows.index_put_((key_rows,), keys.to(cache.dtype))
    rows.index_put_((value_rows,), values.to(cache.dtype))


def _write_quantised(cache: Tensor, keys: Tensor, values: Tensor, batch: AttentionBatch, kv_type: KvType) -> None:
    """The same into records of bytes, cache [blocks, 2, kv_heads, record bytes]."""
    memo = batch.memo.get("slots")
    if memo is None:
        memo = batch.memo["slots"] = (batch.slot_mapping // batch.block_size, batch.slot_mapping % batch.block_size)
    blocks, within = cast(tuple[Tensor, Tensor], memo)
    stored, scales = parts(cache, batch.block_size)
    # [tokens, 2, kv_heads, head_dim], as indices with slices between them bring the tokens to the front.
    stored[blocks, :, :, within], scales[blocks, :, :, within] = quantise(torch.stack((keys, values), dim=1), kv_type)


def attend(queries: Tensor, cache: Tensor, batch: AttentionBatch, *, scale: float, soft_cap: float | None) -> Tensor:
    """Every query over the keys it may see. Shapes as in `kernels.attention.attend`."""
    reads = _reads(batch, cache, queries)
    records = reads.records
    if len(reads.decodes) == 1 and not reads.prefills:
        return _attend_decodes(queries, reads.decodes[0], cache, records, scale, soft_cap)
    attended = torch.empty_like(queries)
    for group in reads.decodes:
        rows = slice(0, batch.decodes) if group.rows is None else group.rows
        attended[rows] = _attend_decodes(queries[rows], group, cache, records, scale, soft_cap)
    for row in reads.prefills:
        _attend_prefill(queries, attended, row, cache, records, scale, soft_cap)
    return attended


def _attend_decodes(
    queries: Tensor, group: DecodeGroup, cache: Tensor, records: Records, scale: float, soft_cap: float | None
) -> Tensor:
    """One query per row, [rows, heads, head_dim] -> the same."""
    rows, heads, head_dim = queries.shape
    kv_heads = records.kv_heads
    keys, values = _read(cache, records, group.gather, queries.dtype)
    if soft_cap is None and rows * kv_heads * group.gather.length <= FUSED_KEYS:
        stacked = queries.reshape(rows, kv_heads, heads // kv_heads, head_dim)
        return scaled_dot_product_attention(stacked, keys, values, attn_mask=group.bias, scale=scale).reshape(queries.shape)
    stacked = (queries * scale).reshape(rows * kv_heads, heads // kv_heads, head_dim)
    scores = torch.bmm(stacked, keys.flatten(0, 1).transpose(1, 2))
    if soft_cap is not None:
        scores = _cap(scores, soft_cap)
    if group.bias is not None:
        scores.view(rows, kv_heads, heads // kv_heads, -1).add_(group.bias)
    return torch.bmm(torch.softmax(scores, dim=-1), values.flatten(0, 1)).view(queries.shape)


def _attend_prefill(
    queries: Tensor, attended: Tensor, row: PrefillRow, cache: Tensor, records: Records, scale: float, soft_cap: float | None
) -> None:
    """The queries of one row, tile by tile, into their place in `attended`."""
    kv_heads, head_dim = records.kv_heads, records.head_dim
    heads_per_key = queries.shape[1] // kv_heads
    keys, values = (half[0] for half in _read(cache, records, row.gather, queries.dtype))
    for tile in row.tiles:
        count = tile.stop - tile.first
        stacked = (queries[tile.first : tile.stop] * scale).view(count, kv_heads, heads_per_key, head_dim).permute(1, 2, 0, 3)
        scores = torch.bmm(
            stacked.reshape(kv_heads, heads_per_key * count, head_dim), keys[:, tile.low : tile.high].transpose(1, 2)
        )
        if soft_cap is not None:
            scores = _cap(scores, soft_cap)
        by_query = scores.view(kv_heads, heads_per_key, count, -1)
        by_query[..., -tile.bias.shape[1] :].add_(tile.bias)
        read = torch.bmm(torch.softmax(scores, dim=-1), values[:, tile.low : tile.high])
        target = attended[tile.first : tile.stop].view(count, kv_heads, heads_per_key, head_dim)
        target.copy_(read.view(kv_heads, heads_per_key, count, head_dim).permute(2, 0, 1, 3))


def _cap(scores: Tensor, soft_cap: float) -> Tensor:
    return scores.div_(soft_cap).tanh_().mul_(soft_cap)


def _read(cache: Tensor, records: Records, gather: Gather, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Gathered keys and values, each [rows, kv_heads, length, head_dim], zero outside each row's range."""
    if records.kv_type is None:
        both = flat(cache, records, records.width).index_select(0, gather.records)
    else:
        both = _read_quantised(cache, records, gather.records, records.kv_type, dtype)
    if gather.outside is not None:
        both.view(-1, records.head_dim).index_fill_(0, gather.outside, 0.0)
    both = both.to(dtype).view(2, gather.rows, records.kv_heads, gather.length, records.head_dim)
    return both[0], both[1]


def _read_quantised(cache: Tensor, records: Records, numbers: Tensor, kv_type: KvType, dtype: torch.dtype) -> Tensor:
    """Records brought together, as the values they mean: int64 [numbers] -> [numbers, block_size, head_dim]"""
    source = flat(cache, records, records.width)
    whole = torch.empty(len(numbers), records.block_size, records.head_dim, dtype=dtype)
    step = max(1, DEQUANTISED_VALUES // (records.block_size * records.head_dim))
    for first in range(0, len(numbers), step):
        part = source.index_select(0, numbers[first : first + step])
        whole[first : first + step] = plain(part, records.block_size, kv_type, dtype)
    return whole


def _reads(batch: AttentionBatch, cache: Tensor, queries: Tensor) -> StepReads:
    """The step's index arrays, derived at its first layer and kept in the batch's memo."""
    memo_key = ("read", cache.stride(), cache.shape, queries.dtype, queries.shape[1])
    memo = batch.memo.get(memo_key)
    if memo is None:
        memo = batch.memo[memo_key] = _derive(batch, records_of(cache, batch.block_size, batch.kv_type), queries)
    return cast(StepReads, memo)


def _derive(batch: AttentionBatch, records: Records, queries: Tensor) -> StepReads:
    seq_lens = batch.seq_lens.numpy().astype(np.int64)
    # The tables are as wide as the longest context could ever be.
    tables = batch.tables.numpy()[:, : -(-int(seq_lens.max()) // batch.block_size)].astype(np.int64)
    starts = batch.query_start_loc.numpy().astype(np.int64)
    # The first query of a row sees the furthest back.
    first_queries = seq_lens - np.diff(starts)
    firsts = np.zeros_like(seq_lens) if batch.window is None else np.maximum(first_queries - batch.window + 1, 0)
    decodes = batch.decodes
    prefills = []
    for row in range(decodes, len(seq_lens)):
        gather = gather_of(tables[row : row + 1], firsts[row : row + 1], seq_lens[row : row + 1], records)
        base = int(firsts[row]) // records.block_size * records.block_size
        place = (int(starts[row]), int(starts[row + 1]), int(first_queries[row]) - base)
        prefills.append(PrefillRow(gather, _tiles(*place, batch.window, queries)))
    groups = _decode_groups(tables[:decodes], firsts[:decodes], seq_lens[:decodes], records, queries.dtype)
    return StepReads(records, groups, tuple(prefills))


def _decode_groups(
    tables: np.ndarray, firsts: np.ndarray, stops: np.ndarray, records: Records, dtype: torch.dtype
) -> tuple[DecodeGroup, ...]:
    lengths = ((stops - 1) // records.block_size - firsts // records.block_size + 1).tolist()
    groups = []
    for rows in group_by_length(lengths, slack=0.25, free=64):
        gather = gather_of(tables[rows], firsts[rows], stops[rows], records)
        everyone = len(rows) == len(lengths)
        groups.append(DecodeGroup(None if everyone else torch.tensor(rows), gather, _bias(gather, dtype)))
    return tuple(groups)


def _bias(gather: Gather, dtype: torch.dtype) -> Tensor | None:
    """[rows, 1, 1, length]"""
    if gather.mask is None:
        return None
    mask = torch.from_numpy(gather.mask)
    return torch.zeros(mask.shape, dtype=dtype).masked_fill_(mask, float("-inf"))[:, None, None]


def _tiles(first: int, stop: int, column: int, window: int | None, queries: Tensor) -> tuple[Tile, ...]:
    """Cut queries [first, stop) of the step, whose first key is `column` of the gathered row, into tiles."""
    heads = queries.shape[1]
    longest = column + stop - first
    step = max(1, min(TILE_QUERIES, TILE_SCORES // (heads * longest)))
    tiles = []
    for start in range(first, stop, step):
        count = min(step, stop - start)
        own = column + start - first
        low = 0 if window is None else max(0, own - window + 1)
        bias = _band(count, own - low, window, queries.dtype)
        tiles.append(Tile(start, start + count, low, own + count, bias))
    return tuple(tiles)


def _band(count: int, before: int, window: int | None, dtype: torch.dtype) -> Tensor:
    """What `count` consecutive queries may not see of the `before` keys ahead of the first one's own, and of their own.

    Without a window the keys ahead are open to all, and the bias covers only the queries' own: [count, count].
    """
    ahead = 0 if window is None else before
    query, key = torch.arange(count)[:, None], torch.arange(-ahead, count)[None]
    hidden = key > query
    if window is not None:
        hidden |= key <= query - window
    return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))
