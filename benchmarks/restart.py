"""Cost of a restart for a long conversation: python -m benchmarks.restart [MODEL] [--write docs]

A conversation of 7,800 tokens is answered, and the engine closed. A new engine on the same folder answers the next turn a
second after its start, then again and again from the disk, and another engine without it. "Plain reading": the same files read
into memory that has been written before, as the pool has, their pages in the cache, in turn with the loads. "The load alone":
until the request is admitted, its blocks being there; behind it the new turn's few tokens are computed. Medians.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.command import parser_of, run
from benchmarks.facts import environment
from benchmarks.pages import publish, table
from kveik.config import CacheConfig, EngineConfig, ModelConfig, ScheduleConfig
from kveik.engine.llm import LLM
from kveik.observe.events import RequestAdmitted
from kveik.request.request import SamplingParams

PAGE = "CACHE.md"
LENGTH, NEW = 7800, 3
ANSWER = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)


@dataclass(frozen=True)
class Turn:
    first: float
    """Seconds to the first token."""

    cached: int
    tokens: tuple[int, ...]


def opened(model: str, folder: Path | None) -> LLM:
    cache = CacheConfig(kv_cache_memory_bytes=1 << 30)
    if folder is not None:
        cache = CacheConfig(kv_cache_memory_bytes=1 << 30, kv_disk=str(folder), kv_disk_bytes=1 << 30)
    return LLM(EngineConfig(model=ModelConfig(model=model), cache=cache, schedule=ScheduleConfig(max_num_seqs=4)))


def asked(llm: LLM, prompt: Sequence[int]) -> Turn:
    began = time.perf_counter()
    llm.submit(prompt, ANSWER)
    first, tokens = 0.0, []
    while llm.loaded.engine.has_work:
        for deltas in llm.step().values():
            tokens += [token for delta in deltas for token in delta.tokens]
        if tokens and not first:
            first = time.perf_counter() - began
    return Turn(first, llm.cached_tokens_last(), tuple(tokens))


def read_seconds(folder: Path, memory: memoryview) -> tuple[float, int]:
    """Of all records' files, and their bytes."""
    size, began = 0, time.perf_counter()
    for file in sorted(folder.rglob("records-*")):
        with file.open("rb", buffering=0) as source:
            while count := source.readinto(memory[size:]):
                size += count
    return time.perf_counter() - began, size


def measure(model: str, rounds: int) -> dict[str, float]:
    chance = random.Random(0)
    prompt = [chance.randrange(1000, 40_000) for _ in range(LENGTH)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        first = opened(model, folder)
        asked(first, prompt[:600])
        fresh = asked(first, prompt)
        first.close()
        turn = [*prompt, *fresh.tokens, *range(11, 11 + NEW)]
        second, memory = opened(model, folder), memoryview(bytearray(b"x" * (1 << 30)))
        waits: list[float] = []
        second.loaded.bus.subscribe(
            lambda event: waits.append(event.queue_seconds) if isinstance(event, RequestAdmitted) else None
        )
        time.sleep(1.0)
        loads, reads, size = [asked(second, turn)], [read_seconds(folder, memory)[0]], 0
        for _ in range(rounds):
            second.loaded.engine.scheduler.kv_cache.reset()
            loads.append(asked(second, turn))
            seconds, size = read_seconds(folder, memory)
            reads.append(seconds)
        second.close()
    plain = opened(model, None)
    asked(plain, prompt[:600])
    computed = asked(plain, turn)
    plain.close()
    assert {load.tokens for load in loads} == {loads[0].tokens}, "loads gave different answers"
    assert min(load.cached for load in loads) > LENGTH - 16, "not all was loaded"
    warm = median(load.first for load in loads[1:])
    return {
        "computed": computed.first,
        "just started": loads[0].first,
        "warm": warm,
        "load": median(waits[1:]),
        "plain reading": median(reads[1:]),
        "bytes": size,
        "tokens": loads[0].cached,
    }


def page_section(model: str, figures: dict[str, float]) -> str:
    computed, warm, reading = figures["computed"], figures["warm"], figures["plain reading"]
    rows = [["next turn", "time to first token", "of computing", "of plain reading"]]
    for name, seconds in (
        ("computed", computed),
        ("a second after the start", figures["just started"]),
        ("from disk", warm),
        ("the load alone", figures["load"]),
    ):
        rows.append([name, f"{seconds * 1e3:,.0f} ms", f"1 / {computed / seconds:.0f}", f"{seconds / reading:.2f} ×"])
    what = f"{model}, {figures['tokens']:,.0f} tokens of a conversation, {figures['bytes'] / 1e6:,.0f} MB on disk"
    return f"{what}, read plainly in {reading * 1e3:,.0f} ms:\n\n{table(rows)}"


def main() -> None:
    parser = parser_of("restart", __doc__)
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    facts, figures = environment(), measure(given.model, given.rounds)
    text = page_section(given.model, figures)
    publish(text, facts, given.write, name="restart", figures={given.model: figures}, page=PAGE)


if __name__ == "__main__":
    run(main)
