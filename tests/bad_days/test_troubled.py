"""Whole engines whose tiers are damaged, cut short, full, slow, read-only or gone while requests come.

Every answer is right, none fails, bounds are kept, every token is counted, and when the trouble is over the tier serves again.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kveik.engine.llm import LLM
from kveik.offload.availability import BreakerLimits
from kveik.offload.stores import disk as disk_store
from kveik.offload.stores.disk_files import SlotFiles
from kveik.offload.stores.record import Miss
from tests.bad_days.traffic import Asked, Traffic, conversations
from tests.engine.tiered import believe, carrier, mover, opened, read
from tests.engine.tiny import save_tiny_gemma, save_tiny_llama
from tests.offload.stores.mounts import remount, small_disk_at
from tests.offload.stores.redis_server import running

CAPACITY = 4 << 20
Known = tuple[str, list[Asked]]


@pytest.fixture(
    scope="module", params=[save_tiny_gemma, pytest.param(save_tiny_llama, marks=pytest.mark.slow)], ids=["gemma", "llama"]
)
def known(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Known:
    save: Callable[[Path], Path] = request.param
    model = str(save(tmp_path_factory.mktemp("tiny")))
    return model, conversations(model)


def traffic_on(known: Known, folder: Path, *, seconds: float = 1.0, bytes_most: int = CAPACITY) -> tuple[LLM, Traffic]:
    """An engine over a disk, warm: all that was asked has been written through."""
    llm = opened(known[0], seconds=seconds, kv_disk=str(folder), kv_disk_bytes=bytes_most, kv_write_policy="write-through")
    return llm, warm(llm, known)


def warm(llm: LLM, known: Known) -> Traffic:
    traffic = Traffic(llm, known[1], random.Random(3))
    traffic.go(40)
    traffic.check()
    return traffic


def serves_again(llm: LLM, traffic: Traffic, tier: str, seconds: float = 20.0) -> None:
    """Breakers and pauses end, and what is asked comes from below once more."""
    before, deadline = read(llm, tier), time.monotonic() + seconds
    while read(llm, tier) == before:
        assert time.monotonic() < deadline, "the tier does not come back"
        traffic.go(8)
    traffic.check()


def impatient(llm: LLM, tier: str) -> None:
    """Breakers that try again soon, so that a test need not wait for a minute."""
    mover(llm).limit(tier, BreakerLimits(timeout=0.3, pause=0.02, pause_max=0.1))


def record_files(folder: Path) -> list[Path]:
    return sorted((folder / "kveik-kv").glob("records-*"))


def flip_a_bit(file: Path, chance: random.Random) -> None:
    fd = os.open(file, os.O_RDWR)
    at = chance.randrange(max(os.fstat(fd).st_size, 1))
    old = os.pread(fd, 1, at)
    if old:
        os.pwrite(fd, bytes([old[0] ^ 1 << chance.randrange(8)]), at)
    os.close(fd)


def test_a_thousand_bits_flipped_while_it_serves_are_misses_and_no_more(known: Known, tmp_path: Path) -> None:
    llm, traffic = traffic_on(known, tmp_path)
    chance, flipped = random.Random(5), 0

    def flip() -> None:
        nonlocal flipped
        for file in record_files(tmp_path):
            flip_a_bit(file, chance)
            flipped += 1

    while flipped < 1000:
        traffic.go(20, flip)
    traffic.check()
    misses = mover(llm).snapshot("disk").counts.misses
    assert misses[Miss.DAMAGED] + misses[Miss.TORN] + misses[Miss.FOREIGN] > 10
    serves_again(llm, traffic, "disk")
    llm.close()


def test_record_files_cut_short_again_and_again_while_it_serves_are_misses(known: Known, tmp_path: Path) -> None:
    llm, traffic = traffic_on(known, tmp_path)
    chance = random.Random(6)

    def cut() -> None:
        if chance.random() < 0.1:
            for file in record_files(tmp_path):
                os.truncate(file, chance.randrange(file.stat().st_size + 1))

    traffic.go(80, cut)
    traffic.check()
    assert mover(llm).snapshot("disk").counts.misses[Miss.TORN] > 0
    serves_again(llm, traffic, "disk")
    llm.close()


def test_a_disk_that_becomes_full_is_served_from_and_written_again_when_there_is_room(
    known: Known, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_store, "PAUSE_SECONDS", 0.02)
    monkeypatch.setattr(disk_store, "PAUSE_SECONDS_MOST", 0.1)
    with small_disk_at(tmp_path / "small") as disk:
        (disk / "other").write_bytes(bytes(600_000))
        llm, traffic = traffic_on(known, disk / "kv", bytes_most=64 << 20)
        impatient(llm, "disk")
        state = mover(llm).snapshot
        assert sum(state("disk").counts.refusals.values()) > 0
        traffic.go(40)
        traffic.check()
        assert read(llm, "disk") > 0
        (disk / "other").unlink()
        written, deadline = state("disk").counts.records_stored, time.monotonic() + 20
        while state("disk").counts.records_stored == written:
            assert time.monotonic() < deadline, "nothing is written although there is room"
            traffic.go(8)
        serves_again(llm, traffic, "disk")
        llm.close()


def test_a_folder_that_can_only_be_read_serves_what_it_has(known: Known, tmp_path: Path) -> None:
    with small_disk_at(tmp_path / "small", "8m") as disk:
        traffic_on(known, disk)[0].close()
        remount(disk, "ro")
        llm, traffic = traffic_on(known, disk)
        assert read(llm, "disk") > 0
        assert carrier(llm).stores[0].availability.reason == "the folder can only be read"
        traffic.go(40)
        traffic.check()
        llm.close()


def test_a_disk_that_takes_five_seconds_a_read_delays_nobody_by_as_much(
    known: Known, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, traffic = traffic_on(known, tmp_path, seconds=1e-4)
    sound, asked, released = SlotFiles.read, threading.Event(), threading.Event()

    def slow(files: SlotFiles, group: int, slot: int, into: memoryview) -> int:
        asked.set()
        released.wait(5.0)
        return sound(files, group, slot, into)

    monkeypatch.setattr(SlotFiles, "read_now", lambda *_: False)
    monkeypatch.setattr(SlotFiles, "read", slow)
    before, began = read(llm, "disk"), time.monotonic()
    traffic.go(60)
    assert time.monotonic() - began < 5.0
    assert asked.is_set()
    assert read(llm, "disk") == before
    released.set()
    impatient(llm, "disk")
    traffic.check()
    believe(llm, 1.0)
    serves_again(llm, traffic, "disk")
    llm.close()


def test_a_server_that_is_frozen_killed_and_restarted_in_the_middle_of_requests_fails_nobody(known: Known) -> None:
    with running() as server:
        llm = opened(known[0], seconds=1e-3, kv_remote=server.url, kv_write_policy="write-through")
        impatient(llm, "remote")
        traffic = warm(llm, known)
        serves_again(llm, traffic, "remote")
        in_the_middle = traffic.steps(60)
        for _ in range(10):
            next(in_the_middle)
        with server.frozen():
            for _ in range(60):
                next(in_the_middle)
        server.kill()
        for _ in in_the_middle:
            pass
        traffic.go(20)
        server.start()
        serves_again(llm, traffic, "remote")
        llm.close()
