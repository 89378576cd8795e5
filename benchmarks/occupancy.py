"""Share of the slots in held blocks that hold a token, on the lengths of a production chat trace, by block size.

    python -m benchmarks.occupancy [TRACE.csv]          default: the excerpt in tests/traces

200 requests arrive at once and go through the real scheduler and KV cache manager, 64 at a time, with distinct prompts, so that
nothing is shared and every slot counted is one sequence's own. Live slots are counted after every step, and
averaged over all steps.
"""

from __future__ import annotations

import argparse
import csv
import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.command import run
from kveik.cache.kv_cache_manager import KVCacheManager
from kveik.cache.layout import LayerGroup
from kveik.config import BLOCK_SIZES, ScheduleConfig
from kveik.request.request import Request, SamplingParams
from kveik.request.sequence import Sequence
from kveik.schedule.plan import StepOutcome
from kveik.schedule.scheduler import Scheduler

TRACE = Path(__file__).parent.parent / "tests" / "traces" / "azure_conv_200.csv"
REQUESTS = 200
CONTEXT = 8192
"""--max-model-len: holds every request of the excerpt."""

POOL_TOKENS = 65536


@dataclass(frozen=True, slots=True)
class Occupancy:
    """Averages over the steps of one run."""

    block_size: int
    live: float
    """Share of the slots in held blocks that hold a computed token."""

    reserved: float
    """The same share, if every running request had a whole context reserved."""

    running: float
    """Sequences running at once."""

    steps: int
    preemptions: int


def lengths(trace: Path) -> list[tuple[int, int]]:
    """(prompt tokens, new tokens) of the first requests."""
    with trace.open() as file:
        rows = list(csv.DictReader(file))[:REQUESTS]
    return [(int(row["ContextTokens"]), int(row["GeneratedTokens"])) for row in rows]


def measure(block_size: int, requests: list[tuple[int, int]]) -> Occupancy:
    """One run of all requests."""
    scheduler = _scheduler(block_size)
    for sequence in _sequences(requests):
        scheduler.add(sequence)
    live, held, context, running, preemptions, steps = 0, 0, 0, 0, 0, 0
    while scheduler.has_work:
        plan = scheduler.plan(float(steps))
        offsets = np.concatenate(([0], np.cumsum(plan.logits)))
        scheduler.settle(plan, StepOutcome(np.ones(offsets[-1], dtype=np.int64), offsets), float(steps))
        live += sum(one.computed for one in scheduler.running_sequences())
        held += scheduler.kv_cache.usage[0].held * block_size
        context += scheduler.running * CONTEXT
        running += scheduler.running
        preemptions += len(plan.preempted)
        steps += 1
    return Occupancy(block_size, live / held, live / context, running / steps, steps, preemptions)


def _scheduler(block_size: int) -> Scheduler:
    limits = ScheduleConfig(max_waiting=REQUESTS)
    kv_cache = KVCacheManager(
        [LayerGroup((0,), 1, 1, None)],
        [POOL_TOKENS // block_size],
        block_size=block_size,
        rows=limits.max_num_seqs,
        max_model_len=CONTEXT,
        max_chunk=limits.prefill_chunk_size,
    )
    return Scheduler(kv_cache, limits, CONTEXT)


def _sequences(requests: list[tuple[int, int]]) -> list[Sequence]:
    chance = random.Random(0)
    sequences = []
    for number, (prompt, new) in enumerate(requests):
        tokens = tuple(chance.randrange(1 << 30) for _ in range(prompt))
        request = Request(id=str(number), prompt=tokens, sampling=SamplingParams(max_tokens=max(1, new)))
        sequences.append(Sequence.start(id=number, request=request, choice=0, seed=0, arrived=0.0))
    return sequences


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.occupancy", description=__doc__.partition("\n")[0])
    parser.add_argument("trace", nargs="?", type=Path, default=TRACE, help="lengths of prompts and answers, as CSV")
    wanted = lengths(parser.parse_args().trace)
    print("| block size | live slots in held blocks | if every request reserved its context | running | preemptions |")
    print("|---:|---:|---:|---:|---:|")
    for size in BLOCK_SIZES:
        found = measure(size, wanted)
        print(f"| {size} | {found.live:.1%} | {found.reserved:.1%} | {found.running:.1f} | {found.preemptions} |")


if __name__ == "__main__":
    run(main)
