"""What an engine leaves below for the next one is told at its end, and is what the next one finds."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kveik.engine.cache_stats import reset_cache
from kveik.engine.llm import LLM
from kveik.machine.address_space import amount
from kveik.observe.events import Event, TierKept
from kveik.observe.tiers import log_tiers
from kveik.offload.availability import AVAILABLE
from kveik.offload.stores.disk_files import SlotFiles
from tests.engine.test_below import answers, prompts
from tests.engine.tiered import carrier, offload, opened
from tests.engine.tiny import save_tiny_gemma
from tests.offload.stores.mounts import small_disk_at


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_gemma(tmp_path_factory.mktemp("tiny")))


def with_disk(model: str, folder: Path, report: Callable[[str], None] = lambda _: None) -> LLM:
    ram: dict[str, object] = {"kv_ram_bytes": 1 << 20, "kv_ram_encoding": "raw"}
    return opened(model, report=report, kv_disk=str(folder), kv_disk_bytes=1 << 26, **ram)


def closed(llm: LLM, seconds: float) -> TierKept:
    """What it tells at its end; RAM does not outlive it."""
    told: list[Event] = []
    llm.loaded.bus.subscribe(told.append)
    llm.loaded.close(seconds)
    [kept] = [one for one in told if isinstance(one, TierKept)]
    return kept


def found(model: str, folder: Path) -> tuple[int, str]:
    """Records that the next engine finds, and its last line at start."""
    lines: list[str] = []
    llm = with_disk(model, folder, lines.append)
    records = carrier(llm).stores[1].records
    llm.close()
    return records, lines[-1]


def test_what_is_told_at_the_end_is_what_the_next_start_finds_and_says(model: str, tmp_path: Path) -> None:
    llm = with_disk(model, tmp_path)
    answers(llm, prompts()[:3])
    before = carrier(llm).stores[1].records
    kept = closed(llm, 30.0)
    assert kept.written == kept.records - before > 0
    assert (kept.tier, kept.missing, kept.late_seconds) == ("disk", 0, None)
    assert kept.bytes == sum(file.stat().st_blocks * 512 for file in (tmp_path / "kveik-kv").iterdir())
    records, line = found(model, tmp_path)
    assert records == kept.records
    assert line.endswith(f"; {records:,} records ({amount(kept.bytes)}) found there")


def test_what_the_time_did_not_suffice_for_is_counted(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = SlotFiles.write

    def slow(files: SlotFiles, group: int, slot: int, record: memoryview) -> None:
        time.sleep(0.02)
        write(files, group, slot, record)

    llm = with_disk(model, tmp_path / "whole")
    answers(llm, prompts()[:2])
    whole = closed(llm, 30.0)
    llm = with_disk(model, tmp_path / "cut")
    answers(llm, prompts()[:2])
    with monkeypatch.context() as patched:
        patched.setattr(SlotFiles, "write", slow)
        kept = closed(llm, 0.4)
    assert kept.late_seconds == 0.4
    assert 0 < kept.written < whole.written
    assert kept.written + kept.missing == whole.written
    assert found(model, tmp_path / "cut")[0] == kept.records


def test_what_the_disk_did_not_take_is_counted_though_there_was_time(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    llm = with_disk(model, tmp_path)
    answers(llm, prompts()[:1])
    monkeypatch.setattr(SlotFiles, "write", full)
    kept = closed(llm, 30.0)
    assert (kept.records, kept.written, kept.late_seconds) == (0, 0, None)
    assert kept.missing > 0


@pytest.mark.parametrize(
    ("event", "level", "line"),
    [
        (
            TierKept("disk", 1391, 1 << 27, 1200, 0, None),
            "INFO",
            "tier kept: tier=disk records=1391 bytes=134217728 written=1200 missing=0",
        ),
        (
            TierKept("remote", 9, 2048, 4, 30, 2.5),
            "WARNING",
            "tier kept: tier=remote records=9 bytes=2048 written=4 missing=30 drain_seconds=2.5",
        ),
        (
            TierKept("disk", 0, 8192, 0, 2, None),
            "WARNING",
            "tier kept: tier=disk records=0 bytes=8192 written=0 missing=2",
        ),
    ],
)
def test_the_log_says_it_in_one_line(event: TierKept, level: str, line: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    log_tiers(event)
    assert [(one.levelname, one.getMessage()) for one in caplog.records] == [(level, line)]


@pytest.mark.parametrize("asked_after", [False, True])
def test_what_was_reset_while_the_folder_could_not_be_written_is_not_found_after_a_restart(
    tmp_path: Path, model: str, asked_after: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Longer than a slow machine takes between the failure and the look at it.
    monkeypatch.setattr("kveik.offload.stores.disk.PAUSE_SECONDS", 8.0)

    def with_disk_alone() -> LLM:
        return opened(model, kv_disk=str(tmp_path / "disk"), kv_disk_bytes=1 << 26, kv_write_policy="write-through")

    llm = with_disk_alone()
    engine, (disk,) = llm.loaded.engine, carrier(llm).stores
    answers(llm, prompts()[:3])
    index = tmp_path / "disk" / "kveik-kv" / "index"
    index.rename(tmp_path / "away")
    answers(llm, prompts()[3:4])
    (tmp_path / "away").rename(index)
    assert disk.availability.reason == "the index was removed"
    reset_cache(engine)
    if asked_after:
        deadline = time.monotonic() + 60.0
        while disk.availability.reason and time.monotonic() < deadline:
            time.sleep(0.2)
            answers(llm, [[*prompts()[4][:200], int(time.monotonic() * 10) % 256]])
        assert disk.availability == AVAILABLE
        assert disk.records > 0
    llm.close()
    llm = with_disk_alone()
    assert [cached for _, cached in answers(llm, prompts()[:3])] == [0, 0, 0]
    llm.close()


def test_a_disk_that_is_smaller_than_its_bound_goes_on_taking_what_is_new(model: str, tmp_path: Path) -> None:
    chance = random.Random(1)
    asked = [[number, *(chance.randrange(256) for _ in range(329))] for number in range(30)]
    with small_disk_at(tmp_path / "small", "2m") as folder:
        cache: dict[str, object] = {"kv_disk": str(folder / "kv"), "kv_disk_bytes": 1 << 28, "kv_write_policy": "write-through"}
        llm = opened(model, **cache, eviction_policy="lru")
        (disk,), [tier] = carrier(llm).stores, offload(llm).chain.tiers
        answers(llm, asked[:20])
        assert disk.usable_bytes < 2 << 20 < tier.spec.capacity_bytes
        assert disk.availability.reason == "the disk is full"
        before = set(disk.contents())
        answers(llm, asked[20:])
        after = set(disk.contents())
        assert len(after - before) > len(after) / 3
        assert tier.bytes_used <= disk.usable_bytes
        llm.close()
        llm = opened(model, **cache, eviction_policy="lru")
        assert sum(cached for _, cached in answers(llm, asked[-1:])) > 0
        llm.close()
