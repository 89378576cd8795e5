"""What a step costs without a model: `plan` and `settle` with N running decodes, prompts of 512 tokens, block size 16.

python benchmarks/scheduler.py [N …]          default: 256 1024
"""

from __future__ import annotations

import gc
import random
import statistics
import sys
import time

from kveik.cache.layout import LayerGroup
from kveik.cache.ledger import CacheLedger
from kveik.config import ScheduleConfig
from kveik.request.request import Request, SamplingParams
from kveik.request.sequence import Sequence
from kveik.schedule.plan import Sampled, StepOutcome
from kveik.schedule.scheduler import Scheduler

PROMPT = 512
NEW = 300
BLOCK = 16


def build(count: int) -> Scheduler:
    length = PROMPT + NEW
    group = LayerGroup(tuple(range(30)), 3, 64, None)
    ledger = CacheLedger(
        [group], [count * (length // BLOCK + 2) + 1000], block_size=BLOCK, rows=count, max_model_len=8192 // 4, max_chunk=8192
    )
    limits = ScheduleConfig(max_num_seqs=count, max_num_batched_tokens=8192, prefill_chunk_size=8192, max_waiting=count)
    scheduler = Scheduler(ledger, limits, 8192 // 4)
    chance = random.Random(0)
    for number in range(count):
        prompt = tuple(chance.randrange(49_000) for _ in range(PROMPT))
        request = Request(id=str(number), prompt=prompt, sampling=SamplingParams(max_tokens=NEW, ignore_eos=True))
        scheduler.add(Sequence.start(id=number, request=request, choice=0, seed=0, arrived=0.0))
    return scheduler


def measure(count: int, *, collector: bool) -> None:
    scheduler = build(count)
    plans: list[float] = []
    settles: list[float] = []
    gc.collect()
    (gc.enable if collector else gc.disable)()
    while scheduler.has_work:
        start = time.thread_time()
        plan = scheduler.plan(start)
        planned = time.thread_time()
        outcome = StepOutcome(tuple(Sampled(chunk.sequence_id, 7) for chunk in plan.chunks if chunk.samples))
        ran = time.thread_time()
        settled = scheduler.settle(plan, outcome, ran)
        end = time.thread_time()
        if plan.decodes == count == len(plan.chunks) and not settled.finished:
            plans.append((planned - start) * 1e6)
            settles.append((end - ran) * 1e6)
    both = [a + b for a, b in zip(plans, settles, strict=True)]
    gc.enable()
    print(
        f"{count} decodes, collector {'on' if collector else 'off'}, {len(both)} steps: "
        f"plan {statistics.median(plans):.0f} µs, "
        f"settle {statistics.median(settles):.0f} µs, "
        f"together {statistics.median(both):.0f} µs median, {statistics.quantiles(both, n=100)[98]:.0f} µs p99"
    )


if __name__ == "__main__":
    for size in [int(word) for word in sys.argv[1:]] or [256, 1024]:
        measure(size, collector=True)
        measure(size, collector=False)
