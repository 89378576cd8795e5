"""A tier's bad day is in the log: once when it begins, once when it is over, and never a flood."""

from __future__ import annotations

import asyncio
import logging
import random
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kveik.config import StreamConfig
from kveik.engine.loop import EngineLoop
from kveik.observe.events import TierState
from kveik.offload import open_tiers as below
from kveik.offload.availability import AVAILABLE
from kveik.offload.stores.disk_files import SlotFiles
from kveik.offload.stores.record import Miss
from kveik.request.request import Request
from tests.bad_days.test_troubled import impatient, record_files
from tests.bad_days.traffic import GREEDY, drawn
from tests.engine.tiered import carrier, mover, opened
from tests.engine.tiny import save_tiny_llama
from tests.offload.stores.redis_server import running
from tests.worlds import lifetime
from tests.worlds.lifetime import Lifetime


def lines(caplog: pytest.LogCaptureFixture, tier: str) -> list[tuple[str, str]]:
    said = [(one.levelname, one.getMessage()) for one in caplog.records]
    return [(level, line) for level, line in said if line.startswith("tier ") and f" tier={tier} " in line]


def test_a_server_that_stops_and_starts_again_is_told_once_each(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    chance = random.Random(1)
    with running() as server:
        llm = opened(str(save_tiny_llama(tmp_path)), kv_remote=server.url, kv_write_policy="write-through")
        impatient(llm, "remote")
        loop = EngineLoop(llm.loaded.engine, llm.loaded.tokenizer, StreamConfig(), max_waiting=8)
        loop.start()

        async def ask() -> None:
            stream = loop.submit(Request(id="r", prompt=tuple(drawn(chance, 40)), sampling=GREEDY))
            async for _ in stream.deltas():
                pass

        def until(reached: Callable[[], bool], between: Callable[[], object]) -> None:
            deadline = time.monotonic() + 60
            while not reached():
                assert time.monotonic() < deadline, lines(caplog, "remote")
                between()

        def said(words: str) -> bool:
            return any(words in line for _, line in lines(caplog, "remote"))

        asyncio.run(ask())
        assert lines(caplog, "remote") == []
        server.kill()
        until(lambda: said("does not answer ("), lambda: asyncio.run(ask()))
        for _ in range(20):
            asyncio.run(ask())
        told = lines(caplog, "remote")
        # Writes fail first, then reads.
        assert 1 <= len(told) <= 2
        assert {level for level, _ in told} == {"WARNING"}
        assert told[-1][1].startswith(f'tier state: tier=remote place="--kv-remote {server.url}" state=')
        assert "does not answer (" in told[-1][1]
        server.start()
        until(lambda: mover(llm).snapshot("remote").state is TierState.AVAILABLE, lambda: asyncio.run(ask()))
        # It is told although nobody asks any more.
        until(lambda: said("state=available"), lambda: time.sleep(0.05))
        assert [level for level, _ in lines(caplog, "remote")[len(told) :]].count("WARNING") == 0
        assert lines(caplog, "remote")[-1] == ("INFO", lines(caplog, "remote")[-1][1])
        loop.stop()
        llm.close()


def test_a_server_that_is_not_there_at_the_start_is_told_and_that_it_has_come_without_a_request(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with running() as server:
        server.kill()
        address = server.url.replace("://", "://:s3cret@")
        llm = opened(str(save_tiny_llama(tmp_path)), kv_remote=address)
        loop = EngineLoop(llm.loaded.engine, llm.loaded.tokenizer, StreamConfig(), max_waiting=8)
        loop.start()

        deadline = time.monotonic() + 60

        def told(count: int) -> list[tuple[str, str]]:
            while len(found := lines(caplog, "remote")) < count:
                assert time.monotonic() < deadline, found
                time.sleep(0.05)
            return found

        start = f'tier state: tier=remote place="--kv-remote {server.url}" state='
        level, line = told(1)[0]
        # Whether reads or writes are checked first is the threads' affair.
        states = [f'{start}{state} reason="does not answer (Connection refused)"' for state in ("degraded", "unavailable")]
        assert level == "WARNING"
        assert line.partition(" seconds=")[0] in states
        assert carrier(llm).stores[0].availability.reason
        server.options = ("--requirepass", "s3cret")
        server.start()
        while not told(1)[-1][1].startswith(f"{start}available seconds="):
            assert time.monotonic() < deadline, told(1)
            time.sleep(0.05)
        assert carrier(llm).stores[0].availability == AVAILABLE
        loop.stop()
        llm.close()


@pytest.fixture
def life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Lifetime:
    """An engine in virtual time, with a real disk that is written to soon."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(below, "STAGING_BYTES", 1 << 18)
    # So little that most of what is asked for again lies on the disk only.
    monkeypatch.setattr(lifetime, "RAM_BYTES", 32 << 10)
    found = Lifetime(tmp_path / "kv", (None,), writes="write-through")
    found.live(120, 120.0)
    return found


def damage(file: Path) -> None:
    """A bit of every page."""
    with file.open("r+b") as pages:
        for at in range(500, file.stat().st_size, 4096):
            pages.seek(at)
            byte = pages.read(1)
            pages.seek(at)
            pages.write(bytes([byte[0] ^ 1]))


def test_damaged_records_on_a_disk_are_told_once_a_minute_and_all_of_them(
    life: Lifetime, caplog: pytest.LogCaptureFixture
) -> None:
    assert lines(caplog, "disk") == []
    began = life.clock.now()
    for _ in range(60):
        for file in record_files(life.folder):
            damage(file)
        life.live(24, 20.0)
    minutes = (life.clock.now() - began) / 60
    told = lines(caplog, "disk")
    assert {level for level, _ in told} == {"WARNING"}
    assert 2 <= len(told) <= minutes + 1
    while not life.engine.unsettled:
        for file in record_files(life.folder):
            damage(file)
        life.live(24, 20.0)
    life.engine.attend()
    life.engine.offload.retire(life.clock.now(), 0.0)
    misses = life.carrier.mover.snapshot("disk").counts.misses
    damaged = misses[Miss.DAMAGED] + misses[Miss.TORN] + misses[Miss.FOREIGN]
    numbers = [re.search(r"^tier records damaged: tier=disk records=(\d+)$", line) for _, line in lines(caplog, "disk")]
    assert sum(int(number[1]) for number in numbers if number) == damaged > 0


def test_a_disk_that_cannot_be_written_for_ten_minutes_is_told_once_and_once_that_it_can(
    life: Lifetime, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(SlotFiles, "write", full)
        life.live(600, 600.0)
    told = lines(caplog, "disk")
    assert 1 <= len(told) <= 2
    assert {level for level, _ in told} == {"WARNING"}
    life.live(600, 600.0)
    assert [level for level, _ in lines(caplog, "disk")[len(told) :]].count("WARNING") == 0
    assert lines(caplog, "disk")[-1][0] == "INFO"
    assert "state=available" in lines(caplog, "disk")[-1][1]
