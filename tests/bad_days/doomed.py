"""An engine in a process that will be killed. Before it serves, it judges what the killed one before it has left."""

from __future__ import annotations

import contextlib
import multiprocessing
import random
import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from multiprocessing.synchronize import Event
from pathlib import Path

from tests.bad_days.traffic import Asked, Traffic
from tests.engine.tiered import opened, read

JUDGED = 12
"""Requests by which an engine judges."""


@dataclass(frozen=True)
class Life:
    """How one engine is set up."""

    model: str
    folder: Path
    capacity_bytes: int
    policy: str
    known: list[Asked]
    seed: int


@dataclass(frozen=True)
class Verdict:
    """What came of judging."""

    cached_tokens: int
    records_loaded: int
    failure: str | None = None


def forking() -> ForkServerContext:
    """Processes that have imported everything already, and in which no arithmetic has run yet."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


def live(life: Life, parent: Connection, stop: Event) -> None:
    """Open, judge, serve; end well if the parent says so."""
    parent.send("begun")
    try:
        _live(life, parent, stop)
    except BaseException:
        parent.send(Verdict(0, 0, traceback.format_exc()))


def _live(life: Life, parent: Connection, stop: Event) -> None:
    llm = opened(
        life.model,
        kv_ram_bytes=1 << 18,
        kv_ram_encoding="raw",
        kv_disk=str(life.folder),
        kv_disk_bytes=life.capacity_bytes,
        kv_write_policy=life.policy,
    )
    traffic = Traffic(llm, life.known, random.Random(life.seed))
    traffic.go(JUDGED)
    traffic.check()
    parent.send(Verdict(traffic.cached_tokens, read(llm, "disk")))
    for _ in traffic.steps(1 << 30):
        if stop.is_set():
            break
    llm.close()
    parent.send("closed")


def kill(life: Life, chance: random.Random) -> Verdict | None:
    """One life and its end: while it opens or judges, serves, or writes what is worth keeping. None: it had not judged yet."""
    context = forking()
    mine, its = context.Pipe(duplex=False)
    stop = context.Event()
    process = context.Process(target=live, args=(life, its, stop), daemon=True)
    process.start()
    its.close()
    try:
        assert mine.recv() == "begun"
        if chance.random() < 0.25:
            mine.poll(chance.random() * 0.5)
        else:
            mine.poll(60)
            time.sleep(chance.random() * 0.2)
        if chance.random() < 0.3:
            stop.set()
            time.sleep(chance.random() * 0.1)
    finally:
        process.kill()
        process.join()
    return _last_verdict(mine)


def _last_verdict(mine: Connection) -> Verdict | None:
    """All that it said: a failure comes last."""
    verdict = None
    with contextlib.closing(mine), contextlib.suppress(EOFError):
        while mine.poll():
            told = mine.recv()
            verdict = told if isinstance(told, Verdict) else verdict
    return verdict
