"""Share of real prompts that each eviction policy finds in the cache: tables and a drawing for docs/CACHE.md.

    python -m benchmarks.eviction conversation_trace.jsonl synthetic_trace.jsonl [--write docs] [--seeds 3]

The traces are those published with Mooncake (FAST'25): https://github.com/kvcache-ai/Mooncake, in FAST25-release/traces. The
whole takes five minutes of one CPU. Hits are shares of all prompt blocks of 512 tokens; hazard's are means over the seeds.
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
import statistics
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.command import run
from benchmarks.curves import Curve, Panel, drawing
from benchmarks.pages import table, write_section
from benchmarks.traces import agents, cycle
from kveik.cache.eviction import reuse
from kveik.cache.eviction.hazard import HazardPolicy
from kveik.measure.replay import BLOCK_TOKENS, Policy, Replay, ReplayFigures, ReplaySetting, TraceRequest, read_trace, replay

SIZES = (300, 1000, 3000, 10_000, 30_000, 50_000)
TWO = (1000, 10_000)
"""Blocks of a pool and of the store below it."""

NEVER = 1 << 60


def clairvoyant(requests: Sequence[TraceRequest], blocks: int) -> float:
    """Share of prompt blocks found by a policy that knows the future: the block used again latest goes first (Belady 1966).

    Whoever uses a block uses all before it, so these are never used again later; what is kept is closed under prefixes.
    """
    following: dict[bytes, int] = {}
    nexts: list[list[int]] = []
    for number in range(len(requests) - 1, -1, -1):
        keys = requests[number].keys[: requests[number].full]
        nexts.append([following.get(key, NEVER) for key in keys])
        following.update(dict.fromkeys(keys, number))
    cached: dict[bytes, int] = {}
    queue: list[tuple[int, bytes]] = []
    found = 0
    for request, uses in zip(requests, reversed(nexts), strict=True):
        keys = request.keys[: request.full]
        found += next((place for place, key in enumerate(keys) if key not in cached), len(keys))
        for key, use in zip(keys, uses, strict=True):
            if use == NEVER:
                cached.pop(key, None)
            else:
                cached[key] = use
                heapq.heappush(queue, (-use, key))
        while len(cached) > blocks:
            use, key = heapq.heappop(queue)
            # An entry of the queue whose block has been used since stands for nothing.
            if cached.get(key) == -use:
                del cached[key]
    return found / sum(len(one.keys) for one in requests)


def runs(requests: Sequence[TraceRequest], setting: ReplaySetting, seeds: int) -> list[ReplayFigures]:
    """One replay per seed; one only where nothing is drawn."""
    drawn = setting.policy == "hazard" or (setting.below > 0 and setting.policy_below == "hazard")
    return [replay(requests, setting, seed) for seed in range(seeds if drawn else 1)]


def hit_ratio(figures: Sequence[ReplayFigures]) -> float:
    return statistics.fmean(one.hit_ratio for one in figures)


def measure_trace(path: Path, seeds: int) -> dict[str, dict[str, float]]:
    """Policy -> size -> hit ratio; and what the middle size cost."""
    requests = read_trace(path)
    found: dict[str, dict[str, float]] = {"clairvoyant": {str(size): clairvoyant(requests, size) for size in SIZES}}
    policies: tuple[Policy, ...] = ("lru-plain", "lru", "hazard")
    for policy in policies:
        for size in SIZES:
            figures = runs(requests, ReplaySetting(blocks=size, policy=policy), seeds)
            found.setdefault(policy, {})[str(size)] = hit_ratio(figures)
            cost = found.setdefault(f"{policy}, cost", {})
            cost[f"{size}, touches/s"] = statistics.fmean(one.touches_per_second for one in figures)
            cost[f"{size}, µs"] = statistics.fmean(one.microseconds_per_request for one in figures)
            cost[f"{size}, ms per lesson"] = statistics.fmean(one.lesson_milliseconds for one in figures)
            print(f"{path.name} {policy} {size}: {found[policy][str(size)]:.4f}", flush=True)
    everything = len({key for request in requests for key in request.keys})
    unbounded = {"lru-plain": hit_ratio(runs(requests, ReplaySetting(blocks=everything, policy="lru-plain"), 1))}
    inside = {str(size): hit_ratio(runs(requests, ReplaySetting(blocks=size, inside=True), seeds)) for size in (1000, 3000)}
    return {
        **found,
        "without a bound": unbounded,
        "hazard, inside": inside,
        **two_stores(requests, seeds),
        **reuse_rates(requests),
    }


def two_stores(requests: Sequence[TraceRequest], seeds: int) -> dict[str, dict[str, float]]:
    """Pool and store below, by policies and write filter: hits, those in the pool, blocks written."""
    found = {}
    for upper, lower, factor in (
        ("lru", "lru", None),
        ("lru", "hazard", None),
        *(("hazard",) * 2 + (f,) for f in (None, 1.5, 2.0)),
    ):
        setting = ReplaySetting(blocks=TWO[0], policy=upper, below=TWO[1], policy_below=lower, write_factor=factor)
        figures = runs(requests, setting, seeds)
        found[f"{upper} over {lower}, {factor or 'all'}"] = {
            "hits": hit_ratio(figures),
            "in the pool": statistics.fmean(one.hit_ratio_pool for one in figures),
            "writes": statistics.fmean(one.writes for one in figures),
            "µs": statistics.fmean(one.microseconds_per_request for one in figures),
        }
    return found


def reuse_rates(requests: Sequence[TraceRequest]) -> dict[str, dict[str, float]]:
    """What hazard has learnt of sessions at the end of a trace: uses per 1,000 seconds, weighed as it does, by age and turn."""
    policy = HazardPolicy(BLOCK_TOKENS, random.Random(0))
    world = Replay(TWO[1], policy, beside=max(len(request.keys) for request in requests))
    for request in requests:
        world.serve(request)
        world.learn()
    used, seconds = (table[: reuse.SESSIONS] for table in policy.spells(requests[-1].came))
    by_turn = [table.reshape(reuse.TURNS, -1).sum(axis=1) for table in (used, seconds)]
    ages = [(1 << place) // 2 for place in range(2, 13)]
    by_age = 1000 * used.sum(axis=0) / np.maximum(seconds.sum(axis=0), 1.0)
    return {
        "uses per 1,000 s from age": {str(age): float(by_age[reuse.bucket(age)]) for age in ages},
        "uses per 1,000 s at turn": dict(zip(("0", "1", "2–3", "4+"), (1000 * by_turn[0] / by_turn[1]).tolist(), strict=True)),
    }


def measure_generated(seeds: int) -> dict[str, dict[str, float]]:
    """Loops in which recency is at its worst, and at its best."""
    worlds = {"loop of 5,000": (list(cycle(5000, rounds=40)), (3000,))}
    worlds |= {f"{count} agents": (list(agents(random.Random(1), 4000, count)), (300, 1000, 3000)) for count in (8, 24, 80)}
    return {
        f"{name}, {size:,} blocks": {
            policy: hit_ratio(runs(requests, ReplaySetting(blocks=size, policy=policy), seeds)) for policy in ("lru", "hazard")
        }
        for name, (requests, sizes) in worlds.items()
        for size in sizes
    }


COLOURS = {"clairvoyant": "#999999", "hazard": "#c0392b", "lru": "#2471a3", "lru-plain": "#7fb3d5"}


def picture(figures: dict[str, dict[str, dict[str, float]]]) -> str:
    """Both traces side by side."""
    panels = []
    for name in ("conversation", "synthetic"):
        curves = [
            Curve(policy, colour, [(float(size), value) for size, value in figures[name][policy].items()])
            for policy, colour in COLOURS.items()
        ]
        panels.append(Panel(f"{name} trace", curves))
    return drawing(panels, x="blocks of 512 tokens in the cache", y="share of prompt blocks found")


def two_stores_table(figures: dict[str, dict[str, dict[str, float]]]) -> str:
    head = ["pool of 1,000 over a store of 10,000: policies, write filter"]
    for name in ("conversation", "synthetic"):
        head += [f"{name}: hits", "in the pool", "written", "µs per request"]
    rows = [head]
    for key in (key for key in figures["conversation"] if " over " in key):
        cells = []
        for name in ("conversation", "synthetic"):
            one = figures[name][key]
            cells += [f"{one['hits']:.3f}", f"{one['in the pool']:.3f}", f"{one['writes']:,.0f}", f"{one['µs']:.0f}"]
        rows.append([key, *cells])
    return table(rows)


def section(figures: dict[str, dict[str, dict[str, float]]]) -> str:
    """The tables of the page."""
    parts = ["![Share of prompt blocks found, by policy and size](eviction.svg)"]
    for name in ("conversation", "synthetic"):
        rows = [[f"{name} trace", *(f"{size:,}" for size in SIZES)]]
        rows += [[policy, *(f"{value:.4f}" for value in figures[name][policy].values())] for policy in reversed(COLOURS)]
        parts.append(table(rows))
    unbounded = " and ".join(f"{figures[name]['without a bound']['lru-plain']:.4f}" for name in ("conversation", "synthetic"))
    inside = "; ".join(
        f"in the {name} trace " + " and ".join(f"{value:.4f}" for value in figures[name]["hazard, inside"].values())
        for name in ("conversation", "synthetic")
    )
    parts.append(
        f"Without a bound lru-plain finds {unbounded}. Where the running request's blocks are among the 1,000 or 3,000, hazard "
        f"finds {inside}."
    )
    parts.append(two_stores_table(figures))
    rows = [["generated", "lru", "hazard"]]
    rows += [[name, *(f"{value:.4f}" for value in one.values())] for name, one in figures["generated"].items()]
    parts.append(table(rows))
    rows = [
        ["cost per request at 10,000 blocks", "µs, lru", "µs, hazard", "touches/s, lru", "touches/s, hazard", "ms per lesson"]
    ]
    for name in ("conversation", "synthetic"):
        lru, hazard = figures[name]["lru, cost"], figures[name]["hazard, cost"]
        cells = [f"{one['10000, µs']:.0f}" for one in (lru, hazard)] + [
            f"{one['10000, touches/s']:,.0f}" for one in (lru, hazard)
        ]
        rows.append([f"{name} trace", *cells, f"{hazard['10000, ms per lesson']:.1f}"])
    parts.append(table(rows))
    parts.append(rates_table(figures))
    return "\n\n".join(parts)


def rates_table(figures: dict[str, dict[str, dict[str, float]]]) -> str:
    by_age, by_turn = "uses per 1,000 s from age", "uses per 1,000 s at turn"
    one = figures["conversation"]
    rows = [["sessions: uses per 1,000 s", *(f"{age} s" for age in one[by_age]), *(f"turn {turn}" for turn in one[by_turn])]]
    for name in ("conversation", "synthetic"):
        values = [*figures[name][by_age].values(), *figures[name][by_turn].values()]
        rows.append([f"{name} trace", *(f"{value:.2f}" for value in values)])
    return table(rows)


def main() -> None:
    """Measure, print, and write where that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("conversation", type=Path)
    parser.add_argument("synthetic", type=Path)
    parser.add_argument("--write", type=Path, metavar="FOLDER", help="where CACHE.md, eviction.json and eviction.svg are")
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    figures = {
        "conversation": measure_trace(options.conversation, options.seeds),
        "synthetic": measure_trace(options.synthetic, options.seeds),
        "generated": measure_generated(options.seeds),
    }
    print(section(figures))
    if options.write is not None:
        (options.write / "eviction.json").write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
        (options.write / "eviction.svg").write_text(picture(figures), encoding="utf-8")
        write_section(options.write / "CACHE.md", "eviction", section(figures))


if __name__ == "__main__":
    run(main)
