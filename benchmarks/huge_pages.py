"""Milliseconds per decode step before and after the process moves onto huge pages.

python benchmarks/huge_pages.py ~/.cache/kveik/models/smollm2-135m/*.gguf
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

import torch
from decoder import World

from kveik.engine.huge_pages import collapse_onto_huge_pages
from kveik.model.decoder import Decoder, load_decoder
from kveik.model.weights import open_model

BATCHES = (1, 8, 32)
STEPS, ROUNDS = 10, 7


def milliseconds(decoder: Decoder, rows: int) -> float:
    """Of one step of `rows` sequences behind 64 tokens each; the median of the rounds."""
    world, tokens = World(decoder, rows, 128, 16), torch.randint(1000, 20000, (rows, 64))
    world.step(tokens, 0)
    rounds = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for step in range(STEPS):
            world.step(tokens[:, :1], 64 + step)
        rounds.append((time.perf_counter() - start) / STEPS * 1000)
    return statistics.median(rounds)


def main() -> None:
    torch.set_num_threads(2)
    torch.manual_seed(0)
    decoder = load_decoder(open_model(Path(sys.argv[1])), torch.bfloat16)
    for moment in ("small pages", "huge pages"):
        if moment == "huge pages":
            print(f"{collapse_onto_huge_pages() >> 20} MiB moved")
        print(moment, *(f"batch {rows}: {milliseconds(decoder, rows):.1f} ms" for rows in BATCHES), sep="  ")


if __name__ == "__main__":
    main()
