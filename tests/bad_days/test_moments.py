"""Tiers that answer at the moments that suit nobody."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

import pytest

from kveik.offload.stores.record import RecordKey
from tests.bad_days.traffic import Asked, Traffic, conversations
from tests.engine.tiered import mover, opened
from tests.engine.tiny import save_tiny_llama

Known = tuple[str, list[Asked]]


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Known:
    model = str(save_tiny_llama(tmp_path_factory.mktemp("tiny")))
    return model, conversations(model)


def test_a_load_that_is_there_at_once_does_not_overwrite_what_the_same_plan_copies(known: Known) -> None:
    llm = opened(known[0], kv_ram_bytes=1 << 20, kv_ram_encoding="raw")
    moving = mover(llm)
    load = moving.load

    def load_at_once(tier: str, records: Sequence[tuple[RecordKey, memoryview]], job: int, deadline: float) -> None:
        load(tier, records, job, deadline)
        while moving.snapshot(tier).loads_waiting:
            time.sleep(1e-4)

    moving.load = load_at_once  # type: ignore[method-assign]  # quicker than any thread would be
    # With this seed a plan does both in the pool's last blocks.
    traffic = Traffic(llm, known[1], random.Random(1))
    traffic.go(100)
    traffic.check()
    assert moving.snapshot("ram").counts.records_loaded > 0
    llm.close()
