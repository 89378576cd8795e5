"""kveik cache: replays of traces, and the content of a disk tier."""

from __future__ import annotations

import contextlib
import json
import statistics
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.table import Table

from kveik.cli.start import say, show
from kveik.clock import SystemClock
from kveik.measure.replay import ReplayFigures, ReplaySetting, read_trace
from kveik.measure.replay import replay as replay_once
from kveik.offload.stores.disk import DiskStore
from kveik.offload.stores.disk_folder import KV_FOLDER
from kveik.offload.stores.disk_offline import clear_folder, is_empty, store_at
from kveik.offload.stores.store import verify as verify_store
from kveik.words import counted


def replay(
    trace: Path,
    blocks: int,
    policy: Literal["hazard", "lru", "lru-plain"],
    seeds: int,
    inside: bool,
    below: int,
    policy_below: Literal["hazard", "lru"],
    write_factor: float,
    as_json: bool,
) -> None:
    """Prints the hits of a trace."""
    setting = ReplaySetting(
        blocks=blocks,
        policy=policy,
        inside=inside,
        below=below,
        policy_below=policy_below,
        write_factor=write_factor or None,
    )
    requests = read_trace(trace)
    say(
        f"replaying {counted(len(requests), 'request', ',')} with "
        f"{counted(sum(len(one.keys) for one in requests), 'block', ',')}"
    )
    # Only samples are drawn, and recency draws none.
    draws = "hazard" in (policy, policy_below if below else "")
    figures = [replay_once(requests, setting, seed) for seed in range(seeds if draws else 1)]
    if as_json:
        for one in figures:
            show(json.dumps(asdict(one)))
    else:
        Console().print(_table(figures, setting))


def ls(path: Path) -> None:
    """Prints the records of a folder by layer group."""
    if is_empty(path / KV_FOLDER):
        show("0 records")
        return
    with _store(path / KV_FOLDER, read_only=True) as store:
        groups: dict[int, list[int]] = {}
        for key, size in store.contents():
            groups.setdefault(key.group, []).append(size)
        for group, sizes in sorted(groups.items()):
            show(f"layer group {group}: {counted(len(sizes), 'record', ',')}, {counted(sum(sizes), 'byte', ',')}")
        show(f"{counted(store.records, 'record', ',')}, {counted(store.bytes_used, 'byte', ',')} on the disk")


def verify(path: Path, forget: bool) -> int:
    """Reads and checks every record. Returns 1 where one would not be used."""
    if is_empty(path / KV_FOLDER):
        show("0 records")
        return 0
    with _store(path / KV_FOLDER, read_only=not forget) as store:
        report = verify_store(store, remove=forget)
    reasons = "".join(f", {count:,} {reason}" for reason, count in sorted(report.misses.items()))
    removed = f"; {report.removed:,} removed" if forget else ""
    verb = "is" if report.records == 1 else "are"
    show(
        f"{report.sound:,} of {counted(report.records, 'record', ',')} {verb} sound{reasons}; "
        f"{counted(report.bytes, 'byte', ',')} read{removed}"
    )
    return 1 if report.misses else 0


def clear(path: Path) -> None:
    """Removes everything from a store's folder."""
    cleared = clear_folder(path / KV_FOLDER, SystemClock())
    if cleared.records is None:
        show(f"{counted(cleared.bytes, 'byte', ',')} freed; the records in them could not be counted")
    else:
        show(f"{counted(cleared.records, 'record', ',')} removed, {counted(cleared.bytes, 'byte', ',')} freed")


@contextlib.contextmanager
def _store(path: Path, *, read_only: bool = False) -> Iterator[DiskStore]:
    store = store_at(path, SystemClock(), read_only=read_only)
    try:
        yield store
    finally:
        store.close()


def _table(figures: list[ReplayFigures], setting: ReplaySetting) -> Table:
    def mean(name: str) -> float:
        return statistics.fmean(getattr(one, name) for one in figures)

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(f"{setting.policy}, {counted(setting.blocks, 'block', ',')}")
    table.add_column(f"mean of {len(figures)}" if len(figures) > 1 else "", justify="right")
    table.add_row("hit ratio", f"{mean('hit_ratio'):.4f}")
    if len(figures) > 1:
        table.add_row("hit ratio, each", " ".join(f"{one.hit_ratio:.4f}" for one in figures))
    if setting.below:
        table.add_row(f"of it in the pool (the rest in {setting.below:,} below)", f"{mean('hit_ratio_pool'):.4f}")
        table.add_row("blocks written below", f"{mean('writes'):,.0f}")
    table.add_row("block touches per second", f"{mean('touches_per_second'):,.0f}")
    table.add_row("µs per request", f"{mean('microseconds_per_request'):,.1f}")
    if mean("lessons"):
        table.add_row("lessons, ms each", f"{mean('lessons'):,.0f} × {mean('lesson_milliseconds'):.1f}")
    return table
