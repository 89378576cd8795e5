"""Milliseconds per decode step before and after the process moves onto huge pages.

python -m benchmarks.huge_pages ~/.cache/kveik/models/smollm2-135m/*.gguf
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import torch

from benchmarks.command import run
from benchmarks.decoder import World
from kveik.machine.huge_pages import collapse_onto_huge_pages
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
    parser = argparse.ArgumentParser(prog="python -m benchmarks.huge_pages", description=__doc__.partition("\n")[0])
    parser.add_argument("model", type=Path, help="a file or folder")
    model = parser.parse_args().model
    torch.set_num_threads(2)
    torch.manual_seed(0)
    decoder = load_decoder(open_model(model), torch.bfloat16)
    for moment in ("small pages", "huge pages"):
        if moment == "huge pages":
            print(f"{collapse_onto_huge_pages() >> 20} MiB moved")
        print(moment, *(f"batch {rows}: {milliseconds(decoder, rows):.1f} ms" for rows in BATCHES), sep="  ")


if __name__ == "__main__":
    run(main)
