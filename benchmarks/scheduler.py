"""Cost of a step outside the model: N running decodes through the real engine, whose decoder and sampler do nothing.

    plan      the scheduler decides, and takes blocks where they are needed
    assemble  the executor lays out the batch, and puts the sampler's choices into an outcome
    settle    tokens are appended, whole blocks registered, finished sequences released
    record    the rest: events to the metrics, and every token into its reader's stream

python -m benchmarks.scheduler [--decodes 32 256 1024] [--contexts 100 30000] [--own] [--write docs]

CPU time of one thread, in milliseconds. Lengths are spread over a block, so that every step has as many blocks to take and to
register. Contexts beyond 4,000 tokens share all but their last 64 tokens, which makes them quick to build; not so with --own.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.command import run
from benchmarks.facts import environment
from benchmarks.pages import publish, table
from kveik.cache.kv_cache_manager import KVCacheManager
from kveik.cache.layout import LayerGroup, blocks_for
from kveik.clock import SystemClock
from kveik.config import ScheduleConfig, StreamConfig
from kveik.engine.engine import Engine
from kveik.engine.executor import ModelExecutor
from kveik.engine.loop import EngineLoop
from kveik.engine.recorder import Recorder
from kveik.engine.stream import RequestStream
from kveik.observe.bus import EventBus
from kveik.observe.metrics import EngineFacts, Metrics
from kveik.request.request import Request, SamplingParams
from kveik.request.sampling_rows import SamplingRows
from kveik.sample.sampler import Choices
from kveik.schedule.scheduler import Scheduler
from kveik.text.token_bytes import spelling_of_decoder

BLOCK = 16
VOCABULARY = 49_000
TOKEN = 7
SHARED_FROM = 4_000
PARTS = ("plan", "assemble", "settle", "record")


class NoModel:
    """Decoder, sampler and storage in one: gives what the executor needs to go on."""

    tensors: tuple[torch.Tensor, ...] = ()
    tokens_real = VOCABULARY

    def __init__(self, rows: int) -> None:
        self._hidden = torch.zeros(rows, 1)
        self._tokens = np.full(rows, TOKEN)

    def copy_blocks(self, copies: object) -> None: ...

    def forget(self, sequence_id: int) -> None: ...

    def forward(self, batch: Any, storage: object) -> torch.Tensor:
        return self._hidden[: len(batch.logits_indices)]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden

    def choose(self, logits: torch.Tensor, rows: SamplingRows) -> Choices:
        return Choices(self._tokens[: len(rows)], frozenset(), {})


class NoTokenizer:
    """What a stream asks of one before it has text to make."""

    bytes = (b"x",) * VOCABULARY
    special_ids: frozenset[int] = frozenset()
    spelling = spelling_of_decoder({"type": "ByteLevel"})


class Reader:
    """An event loop that only takes notice."""

    def call_soon_threadsafe(self, *call: object) -> None: ...


def facts_without_model(dtype: str, block_size: int, tiers: tuple[str, ...] = ()) -> EngineFacts:
    """For the metrics of an engine that computes nothing."""
    return EngineFacts(
        threads=1,
        dtype=dtype,
        arithmetic="none",
        isa="none",
        kv_cache_dtype=dtype,
        block_size=block_size,
        pool_bytes=0,
        planned_bytes=0,
        tiers=tiers,
    )


class Watch:
    """CPU time spent in wrapped calls since the last `take`, by part."""

    def __init__(self) -> None:
        self._spent: dict[str, float] = {}

    def wrap(self, owner: Any, name: str, part: str) -> None:
        inner: Callable[..., Any] = getattr(owner, name)

        def timed(*arguments: Any, **named: Any) -> Any:
            start = time.thread_time()
            result = inner(*arguments, **named)
            self._spent[part] = self._spent.get(part, 0.0) + time.thread_time() - start
            return result

        setattr(owner, name, timed)

    def take(self) -> dict[str, float]:
        spent, self._spent = self._spent, {}
        return spent


class Bench:
    """N sequences of one length in a real engine and loop; nothing is computed."""

    def __init__(self, count: int, context: int, steps: int, *, own: bool) -> None:
        self.count, self.steps = count, steps
        limit = context + steps + 64
        shared = 0 if own or context < SHARED_FROM else context - 64
        blocks = count * (blocks_for(limit - shared, BLOCK) + 2) + blocks_for(shared, BLOCK) + 1000
        groups = [LayerGroup(tuple(range(30)), 3, 64, None)]
        limits = ScheduleConfig(
            max_num_seqs=count, max_num_batched_tokens=65_536, prefill_chunk_size=65_536, max_waiting=count + 1
        )
        self.kv_cache = KVCacheManager(groups, [blocks], block_size=BLOCK, rows=count, max_model_len=limit, max_chunk=65_536)
        self.scheduler = Scheduler(self.kv_cache, limits, limit, frozenset({0}))
        model: Any = NoModel(count)
        tokenizer: Any = NoTokenizer()
        executor = ModelExecutor(model, model, model, groups, BLOCK)
        bus = EventBus()
        bus.subscribe(Metrics(facts_without_model("bfloat16", BLOCK)).listen)
        self.engine = Engine(self.scheduler, executor, SystemClock(), Recorder(bus, self.scheduler), seed=0)
        self.loop = EngineLoop(self.engine, tokenizer, StreamConfig(), max_waiting=count)
        self.reader: Any = Reader()
        self.streams: list[RequestStream] = []
        self.watch = Watch()
        self._submit_all(context, shared)
        for owner, name, part in (
            (self.scheduler, "plan", "plan"),
            (self.scheduler, "settle", "settle"),
            (executor, "launch", "run"),
            (executor, "collect", "run"),
        ):
            self.watch.wrap(owner, name, part)

    def _submit_all(self, context: int, shared: int) -> None:
        chance = random.Random(0)
        words = list(range(VOCABULARY))
        common = tuple(chance.choices(words, k=shared))
        for number in range(self.count):
            prompt = common + tuple(chance.choices(words, k=context - shared - number % BLOCK))
            self.submit(number, prompt, self.steps + 8)
            if number == 0 and shared:
                self.step()

    def submit(self, number: int, prompt: tuple[int, ...], new: int) -> None:
        request = Request(id=str(number), prompt=prompt, sampling=SamplingParams(max_tokens=new, temperature=0.0))
        tokenizer: Any = NoTokenizer()
        stream = RequestStream(
            request,
            tokenizer,
            buffer_tokens=1024,
            abort=lambda *_: None,
            reader=self.reader,
        )
        self.streams.append(stream)
        self.loop._unplaced += 1
        self.loop._place(stream)

    def step(self) -> dict[str, float]:
        """One step as the loop makes it; the time of its parts in seconds."""
        start = time.thread_time()
        report = self.engine.step()
        self.loop._deliver(report)
        self.loop._wake_readers()
        whole = time.thread_time() - start
        spent = self.watch.take()
        plan, run, settle = (spent.get(part, 0.0) for part in ("plan", "run", "settle"))
        return dict(zip(PARTS, (plan, run, settle, whole - plan - run - settle), strict=True))

    def behind(self) -> bool:
        """Whether a prompt is not computed yet."""
        return any(one.pending > 1 for one in self.scheduler.running_sequences())

    def drain(self) -> None:
        """The readers' part, which is not the step's: they take what has come."""
        for stream in self.streams:
            stream._drain()


def measure(count: int, context: int, steps: int, *, own: bool) -> dict[str, list[float]]:
    """Milliseconds of every part in every step."""
    bench = Bench(count, context, steps, own=own)
    while bench.scheduler.running < count or bench.scheduler.waiting or bench.behind():
        bench.step()
        bench.drain()
    gc.collect()
    gc.freeze()
    parts: dict[str, list[float]] = {part: [] for part in (*PARTS, "all")}
    for _ in range(steps):
        spent = bench.step()
        bench.drain()
        for part in PARTS:
            parts[part].append(spent[part] * 1e3)
        parts["all"].append(sum(spent.values()) * 1e3)
    gc.unfreeze()
    assert bench.scheduler.running == count
    return parts


def row(count: int, context: int, parts: dict[str, list[float]]) -> list[str]:
    """The cells of one line: medians, and the 99th percentile of the whole."""
    medians = [f"{statistics.median(times):.3f}" for times in parts.values()]
    return [f"{count:,}", f"{context:,}", *medians, f"{statistics.quantiles(parts['all'], n=100)[98]:.2f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--decodes", type=int, nargs="+", default=[32, 256, 1024])
    parser.add_argument("--contexts", type=int, nargs="+", default=[100, 30_000])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--own", action="store_true", help="no context shares anything with another")
    parser.add_argument("--write", type=Path, metavar="FOLDER", help="put the figures into this folder and its page")
    options = parser.parse_args()
    torch.set_num_threads(1)
    facts = environment()
    rows = [["decodes", "context", *PARTS, "all", "all, p99"]]
    for context in options.contexts:
        for count in options.decodes:
            rows.append(row(count, context, measure(count, context, options.steps, own=options.own)))
            print("  ".join(cell.rjust(8) for cell in rows[-1]), flush=True)
    print()
    publish(table(rows, words=0), facts, options.write, name="step", figures={"rows": rows})


if __name__ == "__main__":
    run(main)
