"""Memory bandwidth of this machine, and the share that batch 1 reaches: python -m benchmarks.bandwidth [MODEL …] [--write docs]

Plain reads and copies of 256 MiB on huge pages, eight times the largest cache of this kind of machine; products through
oneDNN: bfloat16, and int8 as u8 activations times s8 weights. The best of many short tries, for this is a bound.

Share of a model at batch 1: tokens per second × bytes of weights that a step reads / plain reading with all threads, the two
measured in turn.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.command import parser_of, run
from benchmarks.facts import environment, sentence, threads_by_default
from benchmarks.pages import PAGE, footnote, keep, table, write_section
from benchmarks.peers.kveik_side import kveik_side
from benchmarks.peers.side import ROOT, SideFailed, clean_environment
from kveik.cli.fetch import fetch_model

BUFFER_BYTES = 256 << 20
HUGE_PAGE = 2 << 20
MADV_HUGEPAGE, MADV_COLLAPSE = 14, 25
TRIES = 60
SIDE = 2048
"""Rows, columns and depth of the products."""

ROUNDS = 5


def best_seconds(work: Callable[[], object], tries: int = TRIES) -> float:
    seconds = []
    for _ in range(tries):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def buffer(number: int) -> torch.Tensor:
    """int32 on huge pages where the kernel gives them, filled, so that every page is there."""
    raw = torch.full(((BUFFER_BYTES + HUGE_PAGE) // 4,), number, dtype=torch.int32)
    start = -raw.data_ptr() % HUGE_PAGE // 4
    view = raw[start : start + BUFFER_BYTES // 4]
    for advice in (MADV_HUGEPAGE, MADV_COLLAPSE):
        ctypes.CDLL(None).madvise(ctypes.c_void_p(view.data_ptr()), ctypes.c_size_t(BUFFER_BYTES), advice)
    return view


def read_rate(tries: int = TRIES) -> float:
    """Bytes per second of plain reading: the largest of 64 Mi numbers."""
    source = buffer(1)
    return BUFFER_BYTES / best_seconds(source.max, tries)


def copy_rate() -> float:
    """Bytes copied per second; memory moves twice as many, and what is written may be read first."""
    source, target = buffer(1), buffer(2)
    return BUFFER_BYTES / best_seconds(lambda: target.copy_(source))


def bf16_rate() -> float:
    """Operations per second, two for a multiplication and an addition."""
    a = torch.randn(SIDE, SIDE).bfloat16()
    packed = torch.ops.mkldnn._reorder_linear_weight(torch.randn(SIDE, SIDE).bfloat16(), SIDE)
    return 2 * SIDE**3 / best_seconds(lambda: torch.ops.mkldnn._linear_pointwise(a, packed, None, "none", [], ""), 20)


def int8_rate() -> float:
    """Operations per second of u8 activations times s8 weights, giving float32."""
    a = torch.randint(0, 255, (SIDE, SIDE), dtype=torch.uint8)
    weight = torch.randint(-127, 127, (SIDE, SIDE), dtype=torch.int8)
    packed = torch.ops.onednn.qlinear_prepack(weight.t(), [SIDE, SIDE])
    scales, zeros = torch.full((SIDE,), 0.01), torch.zeros(SIDE, dtype=torch.int32)

    def product() -> torch.Tensor:
        result: torch.Tensor = torch.ops.onednn.qlinear_pointwise(
            a, 0.01, 128, packed, scales, zeros, None, 1.0, 0, torch.float32, "none", [], ""
        )
        return result

    return 2 * SIDE**3 / best_seconds(product, 20)


def machine(threads: Sequence[int]) -> dict[str, dict[str, float]]:
    """Every bound, by number of threads."""
    found = {}
    for count in threads:
        torch.set_num_threads(count)
        found[str(count)] = {
            "read GB/s": read_rate() / 1e9,
            "copy GB/s": copy_rate() / 1e9,
            "bf16 GFLOP/s": bf16_rate() / 1e9,
            "int8 GOP/s": int8_rate() / 1e9,
        }
    return found


def read_rate_now(threads: int) -> float:
    """`read_rate` in a process of its own, so that no pool of threads of ours waits beside the engine."""
    code = f"import torch; torch.set_num_threads({threads}); from benchmarks.bandwidth import read_rate; print(read_rate(20))"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, env=clean_environment({}))
    return float(done.stdout)


def share(model: str, threads: int, settings: Path | None, home: Path) -> dict[str, Any]:
    """Batch 1 of a model against plain reading, round after round."""
    home.mkdir(parents=True, exist_ok=True)
    side = kveik_side(home, fetch_model(model), threads, settings)
    rates, reads = [], []
    try:
        facts = side.start()
        for _ in range(ROUNDS):
            rates.append(side.measure("decode_1"))
            reads.append(read_rate_now(threads))
    finally:
        side.stop()
    return {**of_the_bound(int(str(facts["step_bytes"])), rates, reads), "file_bytes": facts["file_bytes"]}


def of_the_bound(step_bytes: int, rates: Sequence[float], reads: Sequence[float]) -> dict[str, float]:
    """rates: tokens per second; reads: bytes per second of plain reading, each taken right after its rate."""
    used = [rate * step_bytes for rate in rates]
    return {
        "step_bytes": step_bytes,
        "tokens_per_second": median(rates),
        "read_bytes_per_second": median(reads),
        "share": median(mine / bound for mine, bound in zip(used, reads, strict=True)),
    }


def machine_table(found: dict[str, dict[str, float]]) -> str:
    names = list(next(iter(found.values())))
    return table([["threads", *names], *([count, *(f"{rates[name]:.0f}" for name in names)] for count, rates in found.items())])


def share_table(models: dict[str, dict[str, float]]) -> str:
    rows = [["batch 1", "weights read per token", "in the file", "tokens/s", "weights read per second", "of plain reading"]]
    for model, found in models.items():
        used = found["tokens_per_second"] * found["step_bytes"] / 1e9
        file = f"{found['file_bytes'] / 1e6:,.0f} MB" if found["file_bytes"] else "–"
        row = [f"{found['step_bytes'] / 1e6:,.0f} MB", file, f"{found['tokens_per_second']:.1f}", f"{used:.1f} GB"]
        rows.append([model, *row, f"{found['share']:.0%}"])
    return table(rows)


def main() -> None:
    parser = parser_of("bandwidth", __doc__)
    parser.add_argument("models", nargs="*", metavar="MODEL", default=["smollm2-135m", "qwen2.5-coder-1.5b"])
    parser.add_argument("--threads", type=int, default=threads_by_default())
    parser.add_argument("--settings", type=Path, help="TOML file of settings for kveik, as its --config takes it")
    parser.add_argument("--home", type=Path, default=ROOT / "build" / "peers", help="where logs go")
    given = parser.parse_args()
    facts = environment()
    bounds = machine(sorted({1, given.threads}))
    print(machine_table(bounds), flush=True)
    models = {}
    for model in given.models:
        try:
            models[model] = share(model, given.threads, given.settings, given.home.resolve())
        except SideFailed as error:
            print(f"{model}: {error}", file=sys.stderr)
    print(f"\n{share_table(models)}\n\n{sentence(facts)}")
    if given.write:
        keep(given.write, "machine", {"bounds": bounds, "environment": facts})
        models = keep(given.write, "batch 1", models)["batch 1"]
        text = f"{machine_table(bounds)}\n\n{share_table(models)}\n\n{footnote(facts)}"
        write_section(given.write / PAGE, "bandwidth", text)


if __name__ == "__main__":
    run(main)
