"""Isolation of tenants: time to first token of what another tenant has asked: python -m benchmarks.isolation [MODEL]

Two tenants, one engine, one request at a time. One asks prompts of 400 tokens; then the other asks prompts of the same length,
in an order drawn by chance: some that the first one's blocks are there for (in the pool, in RAM, on disk), and as many that
nobody has asked. Beside them stands the same question about prompts of its own, to show what the clock can see.
"""

from __future__ import annotations

import itertools
import math
import random
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.command import parser_of, run
from benchmarks.facts import environment
from benchmarks.pages import publish, table
from kveik.config import CacheConfig, EngineConfig, ModelConfig
from kveik.engine.llm import LLM
from kveik.offload.carrier import TierCarrier
from kveik.offload.manager import OffloadManager
from kveik.request.request import Request, SamplingParams

PAGE = "CACHE.md"
PROMPT, BLOCKS = 400, 112
"""Tokens; blocks of a pool that is small. Four prompts fill it."""

PLACES = ("pool", "ram", "disk")
Times = NDArray[np.float64]


class Engine:
    """Who asks, and how long it takes."""

    def __init__(self, model: str, place: str, folder: Path, prompts: int) -> None:
        below = {
            "pool": {"num_gpu_blocks_override": prompts * (PROMPT // 16 + 1) + BLOCKS},
            "ram": {"num_gpu_blocks_override": BLOCKS, "kv_ram_bytes": 2 << 30},
            "disk": {"num_gpu_blocks_override": BLOCKS, "kv_disk": str(folder / "kv"), "kv_disk_bytes": 4 << 30},
        }
        cache = CacheConfig(**below[place])  # type: ignore[arg-type]  # one of three
        self.llm = LLM(EngineConfig(model=ModelConfig(model=model, max_model_len=512, threads=1), cache=cache))
        self._ids = itertools.count()

    def seconds(self, tenant: bytes, prompt: list[int]) -> tuple[float, int]:
        """To the first token; and prompt tokens that were found."""
        engine, sampling = self.llm.loaded.engine, SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        start, cached = time.perf_counter(), 0
        engine.add(Request(id=f"r{next(self._ids)}", prompt=tuple(prompt), sampling=sampling, tenant=tenant))
        while engine.has_work:
            report = engine.step()
            cached = report.admitted[0][1] if report.admitted else cached
            if engine.pause:
                engine.offload.mailbox.wait(engine.pause)
        took = time.perf_counter() - start
        if isinstance(engine.offload, OffloadManager) and isinstance(engine.offload.carrier, TierCarrier):
            # What one request leaves to be written is not the next one's time.
            engine.offload.carrier.mover.drain(engine.clock.now() + 60)
            engine.attend()
        return took, cached


@dataclass(frozen=True)
class Probe:
    """Seconds to the first token."""

    known: Times
    """Of prompts that the other tenant has asked."""

    unknown: Times
    own: Times
    """Of prompts that the same tenant has asked."""


def probe(model: str, place: str, count: int) -> Probe:
    chance = random.Random(place)
    with tempfile.TemporaryDirectory() as folder:
        engine = Engine(model, place, Path(folder), 4 * count + 8)
        draw = lambda: [chance.randrange(1000, 30_000) for _ in range(PROMPT)]  # noqa: E731  # one line, used thrice
        others, nobodys, own = ([draw() for _ in range(count)] for _ in range(3))
        for victim, mine in zip(others, own, strict=True):
            engine.seconds(b"victim", victim)
            engine.seconds(b"prober", mine)
        # Once more the last ones, so that in a small pool none of what is asked is left.
        for _ in range(8):
            engine.seconds(b"victim", draw())
        asked = [(kind, one) for kind, ones in (("known", others), ("unknown", nobodys), ("own", own)) for one in ones]
        chance.shuffle(asked)
        took: dict[str, list[float]] = {"known": [], "unknown": [], "own": []}
        for kind, prompt in asked:
            seconds, cached = engine.seconds(b"prober", prompt)
            # Two of a tenant's own prompts may begin with the same token by chance.
            assert (cached > PROMPT // 2) == (kind == "own"), f"{cached} tokens of a prompt that is {kind} were found"
            took[kind].append(seconds)
        engine.llm.close()
    return Probe(**{kind: np.array(seconds) for kind, seconds in took.items()})


def difference(one: Times, other: Times, seed: int = 0) -> tuple[float, float, float]:
    """Of the medians, in milliseconds, with the interval that holds 95% of the differences of resampled ones."""
    chance = np.random.default_rng(seed)
    draws = [np.median(chance.choice(one, len(one))) - np.median(chance.choice(other, len(other))) for _ in range(4000)]
    low, high = np.percentile(draws, (2.5, 97.5))
    return 1e3 * float(np.median(one) - np.median(other)), 1e3 * float(low), 1e3 * float(high)


def mann_whitney(one: Times, other: Times) -> tuple[float, float]:
    """How often one of the first is slower than one of the second; and the chance of being so far from a half if there is no
    difference, by the normal approximation (times have no ties).
    """
    share = float((one[:, None] > other[None, :]).mean())
    spread = math.sqrt((len(one) + len(other) + 1) / (12 * len(one) * len(other)))
    return share, math.erfc(abs(share - 0.5) / spread / math.sqrt(2))


def page_section(model: str, count: int, probes: dict[str, Probe]) -> str:
    rows = [["the other's blocks are", "nobody has asked", "another has", "difference, 95%", "slower", "p", "asked oneself"]]
    for place, one in probes.items():
        gap, low, high = difference(one.known, one.unknown)
        share, chance = mann_whitney(one.known, one.unknown)
        medians = [f"{1e3 * np.median(times):.1f} ms" for times in (one.unknown, one.known, one.own)]
        where = {"pool": "in the pool", "ram": "in RAM", "disk": "on disk"}[place]
        rows.append(
            [where, *medians[:2], f"{gap:+.2f} ms ({low:+.2f} … {high:+.2f})", f"{share:.0%}", f"{chance:.2f}", medians[2]]
        )
    return (
        f"Medians of the time to the first token, {model}, prompts of {PROMPT} tokens, {count} of each kind:\n\n{table(rows)}"
    )


def main() -> None:
    parser = parser_of("isolation", __doc__)
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--count", type=int, default=60, help="prompts of each kind")
    given = parser.parse_args()
    facts = environment()
    probes = {place: probe(given.model, place, given.count) for place in PLACES}
    text = page_section(given.model, given.count, probes)
    figures = {
        place: dict(zip(("milliseconds", "low", "high"), difference(one.known, one.unknown), strict=True))
        for place, one in probes.items()
    }
    publish(text, facts, given.write, name="isolation", figures={given.model: figures}, page=PAGE)


if __name__ == "__main__":
    run(main)
