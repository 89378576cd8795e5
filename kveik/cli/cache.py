"""kveik cache: what the cache does, would do, and keeps on a disk."""

from __future__ import annotations

import contextlib
import json
import statistics
from collections.abc import Iterator
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from kveik.cli.command import WIDTH, Command
from kveik.cli.say import say
from kveik.clock import SystemClock
from kveik.measure.trace_replay import ReplayFigures, ReplaySetting, read_trace
from kveik.measure.trace_replay import replay as replay_once
from kveik.offload.stores.disk import DiskStore
from kveik.offload.stores.disk_folder import KV_FOLDER
from kveik.offload.stores.disk_offline import clear_folder, is_empty, store_at
from kveik.offload.stores.store import verify as verify_store
from kveik.words import counted

app = typer.Typer(rich_markup_mode=None, add_completion=False, context_settings=WIDTH)


class PolicyName(StrEnum):
    """Eviction policies that a replay knows."""

    hazard = "hazard"
    lru = "lru"
    lru_plain = "lru-plain"


class BelowName(StrEnum):
    """Those of a store below."""

    hazard = "hazard"
    lru = "lru"


@app.callback()
def cache() -> None:
    """Replay a trace of requests, or look at what a disk keeps.

    \b
    kveik cache replay conversation.jsonl --blocks 10000
    kveik cache verify ~/kv
    """


BlocksCached = Annotated[
    int, typer.Option(min=1, help="Blocks of the trace, 512 tokens each, that stay cached between requests.")
]
BlocksBelow = Annotated[int, typer.Option(min=0, help="Blocks of a store below the pool, of 512 tokens, too; 0: none.")]


@app.command(cls=Command, context_settings=WIDTH)
def replay(
    trace: Annotated[Path, typer.Argument(help="JSON lines: timestamp, input_length, output_length, hash_ids; also .gz.")],
    blocks: BlocksCached,
    policy: Annotated[PolicyName, typer.Option(help="Which cached block goes first.")] = PolicyName.hazard,
    seeds: Annotated[int, typer.Option(min=1, help="Runs with different seeds; the mean counts.")] = 3,
    inside: Annotated[bool, typer.Option("--inside", help="The running request's blocks count among them.")] = False,
    below: BlocksBelow = 0,
    policy_below: Annotated[BelowName, typer.Option(help="Which of its blocks goes first.")] = BelowName.hazard,
    write_factor: Annotated[
        float,
        typer.Option(min=0.0, help="Worth, against the store's recent victims, that a block needs to be written; 0: any."),
    ] = 1.5,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per seed instead of a table.")] = False,
) -> None:
    """Replay a trace through the pool and index that serve, and tell how much of its prompts would have been found.

    \b
    kveik cache replay conversation.jsonl --blocks 10000
    kveik cache replay conversation.jsonl --blocks 1000 --below 10000 --policy lru

    A block is found where it and all before it are cached. hazard: what is least likely to be used soon goes first, as learnt
    while serving. lru: what was not used for longest, a prompt's end before its beginning, full blocks only. lru-plain: as
    simulations have it that know of blocks only, a prompt's beginning before its end.

    A block is one of the trace, 512 tokens, whatever --block-size is: a pool of N tokens (see `kveik plan`) is N / 512 blocks.
    docs/CACHE.md says how a trace is made of logged prompts. Rates are of CPU time; ten thousand requests take a second or two.
    """
    setting = ReplaySetting(
        blocks=blocks,
        policy=policy.value,
        inside=inside,
        below=below,
        policy_below=policy_below.value,
        write_factor=write_factor or None,
    )
    requests = read_trace(trace)
    say(
        f"replaying {counted(len(requests), 'request', ',')} with "
        f"{counted(sum(len(one.keys) for one in requests), 'block', ',')}"
    )
    # Only samples are drawn, and recency draws none.
    draws = "hazard" in (policy.value, policy_below.value if below else "")
    figures = [replay_once(requests, setting, seed) for seed in range(seeds if draws else 1)]
    if as_json:
        for one in figures:
            typer.echo(json.dumps(asdict(one)))
    else:
        Console().print(_table(figures, setting))


def _folder(text: str) -> Path:
    # A Path cannot tell: of nothing it makes the folder that somebody is in.
    if not text:
        raise typer.BadParameter("it is empty; it must be a folder.")
    try:
        return Path(text).expanduser() / KV_FOLDER
    except RuntimeError as error:
        raise typer.BadParameter(f"{text}: there is no such user.") from error


PathOfStore = Annotated[Path, typer.Argument(parser=_folder, metavar="PATH", help="The --kv-disk of a stopped server.")]


@app.command(name="ls", cls=Command, context_settings=WIDTH)
def list_(path: PathOfStore) -> None:
    """Tell what a --kv-disk folder holds, by layer group. Its server must be stopped."""
    if is_empty(path):
        typer.echo("0 records")
        return
    with _store(path, read_only=True) as store:
        groups: dict[int, list[int]] = {}
        for key, size in store.contents():
            groups.setdefault(key.group, []).append(size)
        for group, sizes in sorted(groups.items()):
            typer.echo(f"layer group {group}: {counted(len(sizes), 'record', ',')}, {counted(sum(sizes), 'byte', ',')}")
        typer.echo(f"{counted(store.records, 'record', ',')}, {counted(store.bytes_used, 'byte', ',')} on the disk")


@app.command(cls=Command, context_settings=WIDTH)
def verify(
    path: PathOfStore,
    forget: Annotated[bool, typer.Option("--forget", help="Remove records that would not be used.")] = False,
) -> None:
    """Read and check every record of a --kv-disk folder; ends with code 1 where one would not be used."""
    if is_empty(path):
        typer.echo("0 records")
        return
    with _store(path, read_only=not forget) as store:
        report = verify_store(store, forget=forget)
    reasons = "".join(f", {count:,} {reason}" for reason, count in sorted(report.misses.items()))
    removed = f"; {report.removed:,} removed" if forget else ""
    verb = "is" if report.records == 1 else "are"
    typer.echo(
        f"{report.sound:,} of {counted(report.records, 'record', ',')} {verb} sound{reasons}; "
        f"{counted(report.bytes, 'byte', ',')} read{removed}"
    )
    if report.misses:
        raise typer.Exit(1)


@app.command(cls=Command, context_settings=WIDTH)
def clear(path: PathOfStore) -> None:
    """Remove everything from the folder kveik-kv in a --kv-disk folder, damaged or not.

    Its server must be stopped; a running one has POST /cache/reset.
    """
    cleared = clear_folder(path, SystemClock())
    if cleared.records is None:
        typer.echo(f"{counted(cleared.bytes, 'byte', ',')} freed; the records in them could not be counted")
    else:
        typer.echo(f"{counted(cleared.records, 'record', ',')} removed, {counted(cleared.bytes, 'byte', ',')} freed")


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
