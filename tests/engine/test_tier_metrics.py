"""What /metrics and the log tell of the tiers: from the first scrape on, whether they are well, and as docs/CACHE.md says."""

from __future__ import annotations

import errno
import itertools
import json
import os
import re
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from pydantic import TypeAdapter

from kveik.engine.cache_stats import CacheStats, cache_stats, reset_cache
from kveik.engine.llm import LLM
from kveik.observe.events import TierState
from kveik.offload.stores.disk import DiskStore
from kveik.offload.stores.disk_files import SlotFiles
from kveik.offload.stores.record import Miss, Refusal
from tests.bad_days.test_troubled import impatient
from tests.bad_days.traffic import GREEDY
from tests.engine.tiered import BLOCKS, carrier, metric, mover, opened
from tests.engine.tiny import save_tiny_llama

PAGE = Path(__file__).parents[2] / "docs" / "CACHE.md"


@pytest.fixture
def llm(tmp_path: Path) -> Iterator[LLM]:
    model = save_tiny_llama(tmp_path / "model")
    cache: dict[str, object] = {"kv_ram_bytes": 1 << 20, "kv_disk": str(tmp_path / "kv"), "kv_disk_bytes": 1 << 26}
    found = opened(str(model), **cache, kv_write_policy="write-through")
    yield found
    found.close()


def samples(llm: LLM) -> dict[str, list[dict[str, str]]]:
    """Name -> labels of each sample."""
    found = defaultdict(list)
    for family in text_string_to_metric_families(llm.loaded.metrics.exposition().decode()):
        for sample in family.samples:
            found[sample.name.removeprefix("kveik:")].append(sample.labels)
    return found


def answer(llm: LLM, *prompts: list[int]) -> None:
    llm.generate([tuple(prompt) for prompt in prompts], GREEDY)
    mover(llm).drain(llm.loaded.engine.clock.now() + 60)
    llm.loaded.engine.attend()


def test_every_reason_is_counted_from_the_first_scrape_on(llm: LLM) -> None:
    found = samples(llm)
    for name, reasons in (("kv_tier_misses_total", Miss), ("kv_tier_drops_total", Refusal)):
        expected = [{"tier": tier, "reason": str(reason)} for tier in ("ram", "disk") for reason in reasons]
        assert found[name] == expected
        assert metric(llm, name, "ram") == metric(llm, name, "disk") == 0


def test_the_pool_is_shown_from_the_first_scrape_on_and_after_a_reset(llm: LLM) -> None:
    assert metric(llm, "kv_cache_blocks", "free") == BLOCKS
    answer(llm, [*range(1, 100)])
    assert metric(llm, "kv_cache_blocks", "cached") > 0
    reset_cache(llm.loaded.engine)
    assert (metric(llm, "kv_cache_blocks", "cached"), metric(llm, "kv_cache_blocks", "free")) == (0, BLOCKS)


def refuse(*_: object) -> None:
    raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))


def test_a_folder_that_cannot_be_written_is_named_in_the_log(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(SlotFiles, "write", refuse)
    answer(llm, [*range(1, 100)])
    told = [one.getMessage() for one in caplog.records if one.getMessage().startswith("tier state: ")]
    assert told
    start = f'tier state: tier=disk place="--kv-disk {tmp_path}/kv" state=degraded reason="'
    assert all(line.startswith(start) and "File too large" in line for line in told)


def test_the_log_calls_a_tier_by_its_place_and_never_by_a_password(tmp_path: Path) -> None:
    model, url = save_tiny_llama(tmp_path / "model"), "redis://someone:hidden@127.0.0.1:1/3?client_name=kveik"
    found = opened(str(model), kv_ram_bytes=1 << 20, kv_remote=url)
    assert mover(found).places == {
        "ram": "--kv-ram-bytes",
        "remote": "--kv-remote redis://127.0.0.1:1/3",
    }
    found.close()
    shared = opened(str(model), num_gpu_blocks_override=None, kv_cache_memory_bytes=1 << 22, hybrid_kv_cache_fraction=0.5)
    assert mover(shared).places == {"ram": "--hybrid-kv-cache-fraction"}
    shared.close()


def state_of(llm: LLM, tier: str) -> str:
    """State of a tier, of which the metrics show exactly one."""
    families = text_string_to_metric_families(llm.loaded.metrics.exposition().decode())
    samples = [one for family in families for one in family.samples if one.name == "kveik:kv_tier_state"]
    found = {one.labels["state"]: one.value for one in samples if one.labels["tier"] == tier}
    assert sorted(found) == sorted(TierState)
    [state] = [name for name, value in found.items() if value]
    return state


def test_a_degraded_store_is_seen_for_as_long_as_it_is_one(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (state_of(llm, "ram"), state_of(llm, "disk")) == ("available", "available")
    monkeypatch.setattr("kveik.offload.stores.disk.PAUSE_SECONDS_MOST", 0.02)
    impatient(llm, "disk")
    disk = carrier(llm).stores[1]
    assert isinstance(disk, DiskStore)
    with monkeypatch.context() as broken:
        broken.setattr(SlotFiles, "write", refuse)
        answer(llm, [*range(1, 100)])
        assert disk.availability.reason == "File too large"
        assert (state_of(llm, "ram"), state_of(llm, "disk")) == ("available", "degraded")
        assert metric(llm, "kv_tier_drops_total", "failed") > 0
    deadline = time.monotonic() + 60
    for start in itertools.cycle(range(1, 100)):
        # Its breaker may have opened as well, and admits a try now and then.
        answer(llm, [*range(start, start + 100)])
        if state_of(llm, "disk") == "available":
            break
        assert time.monotonic() < deadline


def test_seconds_of_reading_and_writing_are_counted_for_each_tier(llm: LLM) -> None:
    start = llm.loaded.engine.clock.now()
    answer(llm, *([number] * 300 for number in range(1, 9)))
    for number in range(1, 9):
        answer(llm, [number] * 300)
    most = llm.loaded.engine.clock.now() - start
    counts = mover(llm).snapshot("disk").counts
    assert metric(llm, "kv_tier_store_seconds_total", "disk") == counts.seconds_storing
    assert 0 < counts.seconds_storing < most
    read = {name: metric(llm, "kv_tier_load_seconds_total", name) for name in ("ram", "disk")}
    assert 0 < sum(read.values()) < 2 * most
    for name in ("ram", "disk"):
        assert read[name] == mover(llm).snapshot(name).counts.seconds_loading


def test_what_the_cache_tells_is_what_its_description_says(llm: LLM) -> None:
    answer(llm, [*range(1, 100)])
    told = cache_stats(llm.loaded.engine)
    assert [tier.name for tier in told.tiers] == ["ram", "disk"]
    assert told.pool[0].cached > 0
    text = json.dumps(asdict(told))
    assert TypeAdapter(CacheStats).validate_json(text, strict=True) == told


def rows(heading: str) -> list[list[str]]:
    """The table of docs/CACHE.md that has this in its first line, cell by cell."""
    table = PAGE.read_text(encoding="utf-8").partition(f"{heading} |\n")[2].partition("\n\n")[0]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table.splitlines()[1:]]


def test_the_page_names_every_metric_of_the_cache_and_no_other(llm: LLM) -> None:
    named = [found for row in rows("| metric | what it says") for found in re.findall(r"`(kv_\w+)(?:\{([\w,]+)\})?`", row[0])]
    exposed = {
        name: sorted(labels[0].keys() - {"tier"}) for name, labels in samples(llm).items() if name.startswith("kv_") and labels
    }
    assert sorted(name for name, _ in named) == sorted(exposed)
    assert {name: sorted(filter(None, labels.split(","))) for name, labels in named} == exposed


@pytest.mark.parametrize(("heading", "reasons"), [("miss", Miss), ("drop", Refusal)])
def test_the_page_names_every_reason_with_what_to_do(heading: str, reasons: type[Miss | Refusal]) -> None:
    table = rows(f"| reason | of a {heading} | what to do")
    named = [name for row in table for name in re.findall(r"`(\w+)`", row[0])]
    assert sorted(named) == sorted(map(str, reasons))
    assert all(len(row) == 3 and all(row) for row in table)
