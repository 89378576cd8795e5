"""Tokens per second of the bare decoder over real paged storage: no scheduler, no sampler but argmax, no text.

    python benchmarks/decoder.py ~/.cache/kveik/models/smollm2-135m/*.gguf [--dtype float32] [--threads 2] [--batches 1 8 16 32]

Columns as in the comparison with other engines: a cold prefill of 512 tokens, then greedy decoding of 64 tokens behind prompts
of 32 at several batch sizes. A figure is the better of `--rounds` rounds.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import torch

from benchmarks.command import run
from kveik.cache.layout import blocks_for
from kveik.kernels.attention import AttentionBatch
from kveik.model.decoder import Decoder, load_decoder
from kveik.model.step_batch import StepBatch
from kveik.model.weights import open_model

PROMPT, NEW = 32, 64


class World:
    """Sequences of equal length over storage of their own, their blocks scattered as they are after some hours of service."""

    def __init__(self, decoder: Decoder, rows: int, length: int, block_size: int) -> None:
        self.decoder, self.rows, self.block_size = decoder, rows, block_size
        width = blocks_for(length, block_size)
        order = np.random.default_rng(0).permutation(rows * width).astype(np.int32)
        self.table = torch.from_numpy(order.reshape(rows, width))
        self.storage = [
            torch.zeros(rows * width, len(group.layers), 2, group.kv_heads, block_size, group.head_dim, dtype=decoder.dtype)
            for group in decoder.spec.groups
        ]

    def step(self, tokens: torch.Tensor, start: int) -> torch.Tensor:
        """Compute tokens [rows, count] at positions from `start`; the next token of each row, [rows]."""
        rows, count = tokens.shape
        positions = torch.arange(start, start + count).repeat(rows)
        blocks = self.table[:, torch.arange(start, start + count) // self.block_size].reshape(-1).long()
        batches = tuple(
            AttentionBatch(
                tables=self.table,
                slot_mapping=blocks * self.block_size + positions % self.block_size,
                query_start_loc=torch.arange(0, rows * count + 1, count, dtype=torch.int32),
                seq_lens=torch.full((rows,), start + count, dtype=torch.int32),
                decodes=rows if count == 1 else 0,
                block_size=self.block_size,
                window=group.window,
            )
            for group in self.decoder.spec.groups
        )
        wanted = torch.arange(count - 1, rows * count, count)
        hidden = self.decoder.forward(StepBatch(tokens.reshape(-1), positions, batches, wanted), self.storage)
        return self.decoder.logits(hidden).argmax(-1)


def prefill_rate(decoder: Decoder, tokens: int, block_size: int) -> float:
    world = World(decoder, 1, tokens, block_size)
    prompt = torch.randint(0, decoder.spec.vocab, (1, tokens))
    started = time.perf_counter()
    world.step(prompt, 0)
    return tokens / (time.perf_counter() - started)


def decode_rate(decoder: Decoder, rows: int, block_size: int) -> float:
    world = World(decoder, rows, PROMPT + NEW, block_size)
    tokens = world.step(torch.randint(0, decoder.spec.vocab, (rows, PROMPT)), 0)
    started = time.perf_counter()
    for position in range(PROMPT, PROMPT + NEW):
        tokens = world.step(tokens[:, None], position)
    return rows * NEW / (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 8, 16, 32])
    parser.add_argument("--prefill", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=2)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    torch.manual_seed(0)
    started = time.perf_counter()
    decoder = load_decoder(open_model(given.model), getattr(torch, given.dtype))
    print(f"loaded in {time.perf_counter() - started:.1f} s, weights {decoder.weight_bytes / 1e6:.0f} MB, {given.dtype}")
    prefill_rate(decoder, given.prefill, given.block_size)
    rates = [max(prefill_rate(decoder, given.prefill, given.block_size) for _ in range(given.rounds))]
    rates += [max(decode_rate(decoder, rows, given.block_size) for _ in range(given.rounds)) for rows in given.batches]
    names = [f"prefill {given.prefill}", *(f"batch {rows}" for rows in given.batches)]
    print("  ".join(f"{name:>12}" for name in names))
    print("  ".join(f"{rate:12.1f}" for rate in rates))


if __name__ == "__main__":
    run(main)
