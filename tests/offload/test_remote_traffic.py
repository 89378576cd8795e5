"""A server that is killed, frozen and started again while blocks go to it and come from it: misses, and nothing else."""

from __future__ import annotations

import random
import threading
from collections import Counter

import pytest

from kveik.clock import SystemClock
from kveik.offload.availability import BreakerLimits
from kveik.offload.counts import RecordsLoaded, RecordStored
from kveik.offload.mover import MovedTier, Mover
from kveik.offload.stores.record import Miss, Refusal
from kveik.offload.stores.remote import RemoteLimits, RemoteStore
from tests.offload.stores.records import key_of
from tests.offload.stores.redis_server import Server, running
from tests.offload.test_mover import BLOCK, CODECS, FORMATS, block_of


class Traffic:
    """Stores and loads of twenty blocks through a mover with threads, judged to the byte."""

    def __init__(self, server: Server, timeout: float) -> None:
        self.clock = SystemClock()
        self.woken = threading.Event()
        store = RemoteStore(server.url, FORMATS, RemoteLimits(timeout_seconds=timeout), self.clock)
        limits = BreakerLimits(failures=2, timeout=1e9, pause=0.02, pause_max=0.04)
        self.mover = Mover([MovedTier(store=store, codecs=CODECS, limits=limits)], self.clock, self.woken.set)
        self.mover.start()
        self.asked = 0
        self.told = Counter[Miss | Refusal | str]()
        self.blocks: dict[int, tuple[int, bytearray]] = {}

    def go(self, chance: random.Random, operations: int) -> None:
        """So many operations, one after the other's answer."""
        for _ in range(operations):
            self.asked += 1
            number = chance.randrange(20)
            if chance.random() < 0.5:
                refusal = self.mover.store("remote", key_of(number), block_of(number))
                if refusal is not None:
                    self.told[refusal] += 1
                    continue
            else:
                self.blocks[self.asked] = (number, bytearray(BLOCK))
                records = [(key_of(number), memoryview(self.blocks[self.asked][1]))]
                self.mover.load("remote", records, self.asked, float("inf"))
            self.settle()

    def settle(self) -> None:
        """Wait for the answer, and judge it."""
        while not (found := self.mover.completions()):
            self.woken.wait(1.0)
            self.woken.clear()
        for one in found:
            if isinstance(one, RecordStored):
                self.told[one.refusal or "stored"] += 1
            elif isinstance(one, RecordsLoaded):
                [miss], (number, block) = one.misses, self.blocks.pop(one.load_id)
                assert block == (block_of(number) if miss is None else bytes(BLOCK))
                self.told[miss or "loaded"] += 1

    def until_it_serves(self, chance: random.Random) -> None:
        """Breakers close when they have probed again."""
        before = dict(self.told)
        served = False
        while not served:
            self.go(chance, 5)
            stopped = "stopped" in self.mover.snapshot("remote").reason
            served = not stopped and all(self.told[what] > before.get(what, 0) for what in ("loaded", "stored"))


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_server_that_comes_and_goes_in_the_middle_of_traffic(seed: int) -> None:
    chance = random.Random(seed)
    with running() as server:
        traffic = Traffic(server, timeout=0.5)
        traffic.until_it_serves(chance)
        with server.frozen():
            traffic.go(chance, 30)
        assert traffic.told[Miss.FAILED] + traffic.told[Refusal.FAILED] > 0
        assert traffic.told[Miss.REFUSED] + traffic.told[Refusal.REFUSED] > 0
        traffic.until_it_serves(chance)
        for _ in range(2):
            server.kill()
            traffic.go(chance, 30)
            server.start()
            traffic.until_it_serves(chance)
        assert traffic.told.total() == traffic.asked
        counts = traffic.mover.snapshot("remote").counts
        assert counts.errors == 0
        assert counts.records_loaded == traffic.told["loaded"]
        assert counts.records_stored == traffic.told["stored"]
        traffic.mover.close(60)
        assert traffic.mover.snapshot("remote").stores_waiting_bytes == 0
