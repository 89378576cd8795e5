"""Cost of int8 records: python -m benchmarks.records [MODEL] [--write docs]

Conversations, cut from a text, whose first 384 tokens are loaded from the tier in RAM; the next 64 are computed behind them,
and their distributions over the next token are compared with those of an engine without a cache. The arithmetic is the same, so
raw records must give the very same logits. Chunks have 64 tokens for that: over formats with a scale per 32 weights (all of
SmolLM2) every number of rows is multiplied in one way, but over K-quants prompts of 72 rows or more go another, and an engine
without a cache would read the 64 tokens together with those before them (docs/DECISIONS.md).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.command import parser_of, run
from benchmarks.facts import environment
from benchmarks.pages import publish, table
from kveik.config import CacheConfig, EngineConfig, ModelConfig, ScheduleConfig
from kveik.engine.llm import LLM
from kveik.measure.distance import distances
from kveik.measure.hidden_states import executor_of, read_text
from kveik.offload.carrier import TierCarrier
from kveik.offload.manager import OffloadManager
from kveik.request.request import SamplingParams
from kveik.text.heldout import heldout_text

PAGE = "CACHE.md"
LOADED, COMPUTED = 384, 64
"""Tokens of a conversation: whole blocks, and one chunk, which goes the way for few rows with any weights."""

ONE = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)


@dataclass(frozen=True)
class Cost:
    """Per position, of all conversations."""

    divergence: NDArray[np.float64]
    """KL, in nats, from the distribution without a cache."""

    same_top: NDArray[np.float64]


def opened(model: str, blocks: int, encoding: Literal["int8", "raw"] | None) -> LLM:
    cache = CacheConfig(num_gpu_blocks_override=blocks, enable_prefix_caching=False)
    if encoding is not None:
        cache = CacheConfig(num_gpu_blocks_override=blocks, kv_ram_bytes=4 << 30, kv_ram_encoding=encoding)
    schedule = ScheduleConfig(max_num_seqs=4, max_num_batched_tokens=COMPUTED + 4, prefill_chunk_size=COMPUTED)
    return LLM(EngineConfig(model=ModelConfig(model=model, max_model_len=512, threads=1), cache=cache, schedule=schedule))


def conversations(llm: LLM, count: int) -> list[list[int]]:
    """From all over an English text."""
    tokens = llm.loaded.tokenizer.encode(heldout_text("english").text)
    chance, length = random.Random(0), LOADED + COMPUTED
    starts = [chance.randrange(len(tokens) - length) for _ in range(count)]
    return [tokens[start : start + length] for start in starts]


def logits_of(llm: LLM, text: Sequence[int], found: int) -> Tensor:
    """Of the last tokens."""
    hidden = read_text(llm, text, lambda count: None, found=found)
    return executor_of(llm).decoder.logits(hidden[-COMPUTED:]).float().clone()


def loaded_logits(model: str, encoding: Literal["int8", "raw"], texts: Sequence[Sequence[int]]) -> list[Tensor]:
    """Behind what was computed before, given up by a pool that is too small, and loaded again."""
    llm = opened(model, 48, encoding)
    offload = llm.loaded.engine.offload
    assert isinstance(offload, OffloadManager)
    assert isinstance(offload.carrier, TierCarrier)
    mover = offload.carrier.mover
    # The last ones stay in the pool, and belong to no sequence.
    for text in [*texts, *(list(reversed(text)) for text in texts[:3])]:
        llm.generate([text[:LOADED]], ONE)
        mover.drain(llm.loaded.engine.clock.now() + 60)
    found = []
    for text in texts:
        before = mover.snapshot("ram").counts.records_loaded
        found.append(logits_of(llm, text, LOADED))
        assert llm.cached_tokens_last() == LOADED
        assert mover.snapshot("ram").counts.records_loaded - before >= LOADED // 16, "a record was not loaded"
    llm.close()
    return found


def measure(model: str, count: int) -> dict[str, Cost]:
    """By how records are encoded."""
    plain = opened(model, 64, None)
    texts = conversations(plain, count)
    baseline = [logits_of(plain, text, 0) for text in texts]
    plain.close()
    costs = {}
    encodings: tuple[Literal["int8", "raw"], ...] = ("raw", "int8")
    for encoding in encodings:
        parts = []
        for exact, other, text in zip(baseline, loaded_logits(model, encoding, texts), texts, strict=True):
            targets = torch.tensor([*text[LOADED + 1 :], text[0]])
            parts.append(distances(exact, other, targets))
        costs[encoding] = Cost(
            *(np.concatenate([getattr(part, name) for part in parts]) for name in ("divergence", "same_top"))
        )
    return costs


def page_section(model: str, count: int, costs: dict[str, Cost]) -> str:
    rows = [["records", "mean", "median", "p99", "most", "same likeliest token"]]
    for name, cost in costs.items():
        kl = cost.divergence
        figures = [f"{value:.2g}" for value in (kl.mean(), np.median(kl), np.percentile(kl, 99), kl.max())]
        rows.append([name, *figures, f"{cost.same_top.mean():.2%}"])
    positions = count * COMPUTED
    return f"KL divergence per position in nats, {model}, {count} conversations, {positions:,} positions:\n\n{table(rows)}"


def main() -> None:
    parser = parser_of("records", __doc__)
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--conversations", type=int, default=40)
    given = parser.parse_args()
    facts, costs = environment(), measure(given.model, given.conversations)
    text = page_section(given.model, given.conversations, costs)
    figures = {
        name: {"mean": float(cost.divergence.mean()), "most": float(cost.divergence.max())} for name, cost in costs.items()
    }
    publish(text, facts, given.write, name="records", figures={given.model: figures}, page=PAGE)


if __name__ == "__main__":
    run(main)
