"""Products with quantised weights, alone: python -m benchmarks.kernel_linear [--formats Q4_K …] [--rows 1 8 …] [--shapes …]

Copies of a weight that fill 256 MiB are multiplied in turn, so that none is in a cache from last time. Their bytes per second
are shown against plain reading in the same run, operations per second against bfloat16 through oneDNN, with copies as well.
The best of several tries: neither side should pay for what else the machine does.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from benchmarks.bandwidth import best_seconds, buffer, read_rate
from benchmarks.command import run
from kveik.kernels import native

BYTES = 256 << 20
TRIES = 7
OPERATIONS = 40e9
"""In one try at least, unless all copies are used up before."""

SHAPES = ("1536x1536", "8960x1536", "1536x8960")
"""Outputs and inputs: those of a model of 1.5 billion weights."""

FORMATS = ("Q4_0", "Q4_1", "Q5_0", "Q8_0", "Q4_K", "Q5_K", "Q6_K")


@dataclass(frozen=True, slots=True)
class Measured:
    bytes_per_second: float
    operations_per_second: float


def measure(kind: str, outputs: int, inputs: int, rows: int, memory: np.ndarray, threads: int) -> Measured:
    m: Any = native.module
    which = getattr(m.WeightFormat, kind)
    size, span = m.packed_bytes(which, outputs, inputs), m.span_of(which)
    copies = _copies(size, outputs, inputs, rows)
    weights = [memory[i * size : (i + 1) * size] for i in range(copies)]
    _fill(weights)
    x = np.random.default_rng(0).standard_normal((rows, inputs), dtype=np.float32)
    activations, out = np.zeros(m.activation_bytes(rows, inputs, span), np.uint8), np.zeros((rows, outputs), np.float32)
    m.quantise(x, activations, threads, span)

    def work() -> None:
        for weight in weights:
            m.linear(which, outputs, inputs, weight, activations, None, out, False, threads, span)

    seconds = best_seconds(work, TRIES)
    return Measured(size * copies / seconds, 2 * outputs * inputs * rows * copies / seconds)


def measure_bf16(outputs: int, inputs: int, rows: int) -> Measured:
    size = outputs * inputs * 2
    copies = _copies(size, outputs, inputs, rows)
    weight = torch.zeros(outputs, inputs, dtype=torch.bfloat16)
    packed = [torch.ops.mkldnn._reorder_linear_weight(weight.clone(), rows) for _ in range(copies)]
    x = torch.randn(rows, inputs).bfloat16()

    def work() -> None:
        for one in packed:
            torch.ops.mkldnn._linear_pointwise(x, one, None, "none", [], "")

    seconds = best_seconds(work, TRIES)
    return Measured(size * copies / seconds, 2 * outputs * inputs * rows * copies / seconds)


def _copies(size: int, outputs: int, inputs: int, rows: int) -> int:
    """All that fit, but no more than make a try long enough."""
    enough = int(OPERATIONS / (2 * outputs * inputs * rows)) + 2
    return max(1, min(BYTES // size, enough) if rows > 1 else BYTES // size)


def _fill(weights: list[np.ndarray]) -> None:
    """Numbers that are neither denormal nor infinite: what is computed does not change how long it takes, but those would."""
    for weight in weights:
        # Every half of it a float16 of about 0.004, whatever else it is.
        weight.view(np.uint16)[:] = 0x1C1C


def memory_for_weights() -> np.ndarray:
    return buffer(0x1C1C1C1C).numpy().view(np.uint8)


def report(kinds: Sequence[str], shapes: Sequence[str], rows: Sequence[int], threads: int) -> None:
    print(f"{native.described()}; {threads} threads; plain reading {read_rate() / 1e9:.1f} GB/s")
    memory = memory_for_weights()
    for shape in shapes:
        outputs, inputs = (int(side) for side in shape.split("x"))
        for count in rows:
            peer = measure_bf16(outputs, inputs, count).operations_per_second
            for kind in kinds:
                if kind.endswith("_K") and inputs % 256:
                    continue
                found = measure(kind, outputs, inputs, count, memory, threads)
                share = found.bytes_per_second / read_rate(5)
                print(
                    f"{shape:>12} {count:4} rows {kind:5} {found.bytes_per_second / 1e9:5.1f} GB/s ({share:4.0%} of reading) "
                    f"{found.operations_per_second / 1e9:5.0f} GOP/s ({found.operations_per_second / peer:5.2f} x bfloat16)",
                    flush=True,
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=("Q4_K", "Q6_K"))
    parser.add_argument("--shapes", nargs="+", default=SHAPES, help="outputs x inputs")
    parser.add_argument("--rows", nargs="+", type=int, default=(1, 8, 32, 128, 512))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    given = parser.parse_args()
    if native.module is None:
        raise SystemExit(native.described())
    torch.set_num_threads(given.threads)
    report(given.formats, given.shapes, given.rows, given.threads)


if __name__ == "__main__":
    run(main)
