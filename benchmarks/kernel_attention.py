"""Attention over paged keys and values, alone: python -m benchmarks.kernel_attention [--write docs]

Decoding: one sequence of 32,768 tokens, and 32 of 1,024, in the shape of a model of eight billion weights (32 heads over 8, of
128 numbers each), layer after layer, each with keys and values of its own, so that none is in a cache from last time. Bytes of
them read per second, against plain copying (bytes copied) and plain reading in the same run, measured in turn.

Prefill: 16,384 tokens in chunks of 512 behind what came before, for one layer; operations per second over what a causal query
sees (4 * head_dim for each pair of query and key), against products through oneDNN in bfloat16.
"""

from __future__ import annotations

import argparse
import math
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.bandwidth import bf16_rate, buffer
from benchmarks.command import run
from benchmarks.curves import Curve, Panel, drawing
from benchmarks.facts import environment
from benchmarks.pages import publish, table
from kveik.kernels import native
from kveik.kernels.attention import attend
from kveik.kernels.batch import AttentionBatch
from kveik.kernels.kv_types import BFLOAT16, FP8_E4M3, INT8, KvType
from kveik.machine.huge_pages import collapse_onto_huge_pages

HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 32, 8, 128, 16
DECODES = ((1, 32_768), (32, 1024))
"""Sequences, and tokens of each."""

LAYERS = 4
"""Of 128 MiB each in bfloat16: by the time one comes again, no cache remembers it."""

TYPES = (BFLOAT16, INT8, FP8_E4M3)
ROUNDS = 9
PREFILL, CHUNK = 16_384, 512


def storage(kv_type: KvType, blocks: int) -> Tensor:
    """One layer's view of a pool, filled: [blocks, 2, kv heads, slots, dims], or records as bytes."""
    if not kv_type.quantised:
        return torch.randn(blocks, 2, KV_HEADS, BLOCK_SIZE, HEAD_DIM).to(kv_type.values)
    record = kv_type.record_bytes(BLOCK_SIZE, HEAD_DIM)
    cache = torch.randint(0, 120, (blocks, 2, KV_HEADS, record), dtype=torch.uint8)
    scales = cache[..., BLOCK_SIZE * HEAD_DIM :].view(torch.bfloat16)
    scales.fill_(0.01)
    return cache


def batch_of(tables: Tensor, seq_lens: Tensor, queries: int, kv_type: KvType) -> AttentionBatch:
    """A step of rows with as many queries each; nothing is written."""
    rows = len(seq_lens)
    return AttentionBatch(
        tables=tables,
        slot_mapping=torch.zeros(rows * queries, dtype=torch.int64),
        query_start_loc=torch.arange(0, rows * queries + 1, queries, dtype=torch.int32),
        seq_lens=seq_lens,
        decodes=rows if queries == 1 else 0,
        block_size=BLOCK_SIZE,
        window=None,
        kv_type=kv_type.of_bytes,
    )


def scattered(rows: int, tokens: int) -> Tensor:
    """Block tables [rows, blocks] as they are after hours of service."""
    count = rows * tokens // BLOCK_SIZE
    return torch.randperm(count, generator=torch.Generator().manual_seed(0)).int().reshape(rows, -1)


def seconds_of(work: Any) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


class Decoding:
    """Steps of one layer each over the same rows."""

    def __init__(self, rows: int, tokens: int, kv_type: KvType) -> None:
        self.layers = [storage(kv_type, rows * tokens // BLOCK_SIZE) for _ in range(LAYERS)]
        self.bytes = sum(layer.numel() * layer.element_size() for layer in self.layers)
        self.queries = torch.randn(rows, HEADS, HEAD_DIM)
        self.batch = batch_of(scattered(rows, tokens), torch.full((rows,), tokens, dtype=torch.int32), 1, kv_type)

    def step(self) -> None:
        for layer in self.layers:
            attend(self.queries, layer, self.batch, scale=HEAD_DIM**-0.5, soft_cap=None)


def decode_rates(rows: int, tokens: int) -> dict[str, dict[str, float]]:
    """Per type of keys and values: bytes per second, shares of plain copying and reading, times as quick as bfloat16."""
    types = {kv_type.name: Decoding(rows, tokens, kv_type) for kv_type in TYPES}
    # As the server's own pool is.
    collapse_onto_huge_pages()
    source, target = buffer(1), buffer(2)
    size = source.numel() * source.element_size()
    found: dict[str, list[dict[str, float]]] = {name: [] for name in types}
    for _ in range(ROUNDS):
        copy, read = size / seconds_of(lambda: target.copy_(source)), size / seconds_of(source.max)
        first = 0.0
        for name, decoding in types.items():
            seconds = seconds_of(decoding.step)
            first = first or seconds
            rate = decoding.bytes / seconds
            found[name].append({"rate": rate, "of copy": rate / copy, "of read": rate / read, "speed": first / seconds})
    return {name: {key: median(one[key] for one in tries) for key in tries[0]} for name, tries in found.items()}


def prefill_rates(kv_type: KvType) -> list[dict[str, float]]:
    """Chunk after chunk: tokens before its end, seconds and operations per second; medians over rounds."""
    cache, tables = storage(kv_type, PREFILL // BLOCK_SIZE), scattered(1, PREFILL)
    queries = torch.randn(CHUNK, HEADS, HEAD_DIM)
    found = []
    for end in range(CHUNK, PREFILL + 1, CHUNK):
        batch = batch_of(tables, torch.tensor([end], dtype=torch.int32), CHUNK, kv_type)
        pairs = CHUNK * (end - CHUNK) + CHUNK * (CHUNK + 1) / 2
        tries = [seconds_of(partial(attend, queries, cache, batch, scale=HEAD_DIM**-0.5, soft_cap=None)) for _ in range(3)]
        seconds = median(tries)
        found.append({"tokens": float(end), "seconds": seconds, "rate": 4 * HEAD_DIM * HEADS * pairs / seconds})
    return found


def prefill() -> dict[str, Any]:
    """The whole prompt between two measurements of what products reach."""
    before = bf16_rate()
    chunks = prefill_rates(BFLOAT16)
    bound = max(before, bf16_rate())
    operations, seconds = sum(one["rate"] * one["seconds"] for one in chunks), sum(one["seconds"] for one in chunks)
    return {"chunks": chunks, "bound": bound, "rate": operations / seconds, "seconds": seconds}


def decode_table(found: dict[str, dict[str, dict[str, float]]]) -> str:
    rows = [["decoding", "keys and values", "GB/s", "of plain copying", "of plain reading", "times as quick as bfloat16"]]
    for shape, types in found.items():
        for name, one in types.items():
            cells = [f"{one['rate'] / 1e9:.1f}", f"{one['of copy']:.0%}", f"{one['of read']:.0%}", f"{one['speed']:.2f}"]
            rows.append([shape, name, *cells])
    return table(rows, words=2)


def prefill_text(found: dict[str, Any]) -> str:
    rate, bound = found["rate"] / 1e9, found["bound"] / 1e9
    return (
        f"{PREFILL:,} tokens in chunks of {CHUNK}, bfloat16: {rate:.0f} GFLOP/s over all chunks, {rate / bound:.0%} of the "
        f"{bound:.0f} that products of matrices reach through oneDNN in the same run.\n\n"
        "![Seconds and rate of each chunk](attention.svg)"
    )


def picture(found: dict[str, Any]) -> str:
    """Time per chunk grows with what is before it, and the rate stays."""
    # Those whose ends are powers of two: the axis is logarithmic.
    chunks, bound = [one for one in found["chunks"] if math.log2(one["tokens"]).is_integer()], found["bound"]
    times = Curve("time", "#c0392b", [(one["tokens"], one["seconds"]) for one in chunks])
    rates = Curve("attention", "#2471a3", [(one["tokens"], one["rate"] / bound) for one in chunks])
    panels = [Panel("seconds per chunk of 512, one layer", [times]), Panel("share of bfloat16 products", [rates])]
    return drawing(panels, x="tokens, this chunk included", y="")


def main() -> None:
    """Measure, print, and write where that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--write", type=Path, metavar="FOLDER", help="keep the figures in this folder of pages")
    given = parser.parse_args()
    if native.module is None:
        raise SystemExit(native.described())
    torch.set_num_threads(given.threads)
    torch.manual_seed(0)
    facts = environment()
    decodes = {
        f"{rows} sequence{'s' * (rows > 1)} of {tokens:,} tokens": decode_rates(rows, tokens) for rows, tokens in DECODES
    }
    long = prefill()
    for one in long["chunks"]:
        print(f"  {one['tokens']:7,.0f} {one['seconds'] * 1e3:8.1f} ms {one['rate'] / 1e9:6.0f} GFLOP/s")
    text = f"{decode_table(decodes)}\n\n{prefill_text(long)}"
    publish(text, facts, given.write, name="attention", figures={"decode": decodes, "prefill": long})
    if given.write:
        (given.write / "attention.svg").write_text(picture(long), encoding="utf-8")


if __name__ == "__main__":
    run(main)
