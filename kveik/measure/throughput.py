"""Measured tokens per second of a model on this machine: cold prefill, and greedy decode at several batch sizes.

The workload: one cold prompt of 512 tokens; then prompts of 32 tokens with 64 new tokens each, where the decode rate is that of
the 64 tokens after the first. Prefix caching is off. Every figure is the median of `repeats` runs.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from kveik.config import EngineConfig
from kveik.engine.llm import LLM, none_failed
from kveik.errors import DoesNotFit
from kveik.request.request import SamplingParams
from kveik.words import counted

BATCHES = (1, 8, 16, 32)
PREFILL_TOKENS = 512
PROMPT_TOKENS = 32
NEW_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Throughput:
    """Figures of one run; tokens per second unless the name says otherwise."""

    model: str
    dtype: str
    kv_cache_dtype: str
    arithmetic: str
    """How weights are multiplied."""

    ready_seconds: float
    """From the start of the process until the engine could take a request."""

    prefill_512: float
    decode_1: float
    decode_8: float
    decode_16: float
    decode_32: float


def measure(config: EngineConfig, *, repeats: int, report: Callable[[str], None]) -> Throughput:
    """Load the model and run the workload. Raises `DoesNotFit` when the configuration cannot hold it."""
    bench = _bench_config(config)
    llm = LLM(bench, report)
    ready = seconds_since_process_start()
    _check_room(llm)
    prompts = _prompts(llm.loaded.spec.vocab)
    _seconds(llm, [next(prompts)[:PROMPT_TOKENS]], new=4)
    report(f"measuring a prompt of {PREFILL_TOKENS} tokens (--repeats {repeats})")
    figures = {"prefill_512": _prefill(llm, prompts, repeats)}
    for batch in BATCHES:
        report(f"measuring decode at batch {batch} (--repeats {repeats})")
        figures[f"decode_{batch}"] = _decode(llm, prompts, batch, repeats)
    # Not in a `finally`: Ctrl-C may have come in the middle of a step, whose books need not be in order.
    llm.close()
    return Throughput(
        model=config.model.model,
        dtype=llm.loaded.dtype_name,
        kv_cache_dtype=llm.loaded.kv_dtype_name,
        arithmetic=llm.loaded.arithmetic,
        ready_seconds=round(ready, 2),
        **{name: round(value, 1) for name, value in figures.items()},
    )


def _bench_config(config: EngineConfig) -> EngineConfig:
    schedule = replace(
        config.schedule,
        max_num_seqs=max(config.schedule.max_num_seqs, max(BATCHES)),
        prefill_chunk_size=max(config.schedule.prefill_chunk_size, PREFILL_TOKENS),
        max_num_batched_tokens=max(config.schedule.max_num_batched_tokens, PREFILL_TOKENS),
    )
    return replace(config, schedule=schedule, cache=replace(config.cache, enable_prefix_caching=False))


def _check_room(llm: LLM) -> None:
    needed = max(PREFILL_TOKENS + 1, PROMPT_TOKENS + NEW_TOKENS + 1)
    if llm.loaded.max_model_len < needed:
        raise DoesNotFit(
            f"The benchmark needs a context of {counted(needed, 'token')}; this one has "
            f"{llm.loaded.max_model_len} (--max-model-len)."
        )


def _prompts(vocab: int) -> Iterator[list[int]]:
    """Endless distinct prompts of 512 ordinary token ids, the same in every run."""
    number = 0
    while True:
        number += 1
        # A full-period congruence over the vocabulary; its low end, where special tokens lie, is left out.
        yield [1000 + (7919 * (number * PREFILL_TOKENS + index)) % (vocab // 2 - 1000) for index in range(PREFILL_TOKENS)]


def _prefill(llm: LLM, prompts: Iterator[list[int]], repeats: int) -> float:
    return statistics.median(PREFILL_TOKENS / _seconds(llm, [next(prompts)], new=1) for _ in range(repeats))


def _decode(llm: LLM, prompts: Iterator[list[int]], batch: int, repeats: int) -> float:
    def once() -> float:
        first = _seconds(llm, [next(prompts)[:PROMPT_TOKENS] for _ in range(batch)], new=1)
        whole = _seconds(llm, [next(prompts)[:PROMPT_TOKENS] for _ in range(batch)], new=NEW_TOKENS + 1)
        return batch * NEW_TOKENS / (whole - first)

    return statistics.median(once() for _ in range(repeats))


def _seconds(llm: LLM, prompts: list[list[int]], *, new: int) -> float:
    sampling = SamplingParams(max_tokens=new, temperature=0.0, ignore_eos=True)
    start = time.perf_counter()
    none_failed(llm.generate(prompts, sampling))
    return time.perf_counter() - start


def seconds_since_process_start() -> float:
    """Age of this process, seconds, by the kernel's account, so that imports count."""
    ticks_per_second = os.sysconf("SC_CLK_TCK")
    fields = Path("/proc/self/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    uptime = float(Path("/proc/uptime").read_text(encoding="ascii").split()[0])
    return uptime - int(fields[19]) / ticks_per_second
