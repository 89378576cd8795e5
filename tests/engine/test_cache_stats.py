"""What people see of the tiers at a glance is what they hold, and what is wrong with them."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from kveik.engine.cache_stats import tier_snapshots
from kveik.observe.events import TierState
from kveik.offload.stores.disk_files import SlotFiles
from tests.engine.test_below import answers, prompts
from tests.engine.tiered import carrier, metric, opened
from tests.engine.tiny import save_tiny_llama


def test_the_status_of_tiers_is_what_they_hold_and_what_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "disk"
    ram: dict[str, object] = {"kv_ram_bytes": 1 << 20, "kv_ram_encoding": "raw"}
    llm = opened(
        str(save_tiny_llama(tmp_path)), kv_disk=str(folder), kv_disk_bytes=1 << 26, kv_write_policy="write-through", **ram
    )
    engine, tokens = llm.loaded.engine, 0
    for _ in range(2):
        tokens += sum(map(len, prompts()))
        answers(llm, prompts())
    in_ram, on_disk = tier_snapshots(engine)
    stores = carrier(llm).stores
    assert (in_ram.name, in_ram.state, in_ram.reason) == ("ram", TierState.AVAILABLE, "")
    assert (in_ram.capacity_bytes, in_ram.bytes_used, in_ram.records) == (1 << 20, stores[0].bytes_used, stores[0].records)
    assert (on_disk.capacity_bytes, on_disk.state) == (1 << 26, TierState.AVAILABLE)
    assert on_disk.bytes_used == sum(file.stat().st_blocks * 512 for file in (folder / "kveik-kv").iterdir())
    assert on_disk.records == stores[1].records > 0
    sources = llm.loaded.metrics.prompt_tokens
    assert list(sources) == ["computed", "cached", "ram", "disk"]
    assert sum(sources.values()) == tokens
    assert sources["ram"] + sources["disk"] > 0
    assert sources == {name: metric(llm, "prompt_tokens_by_source_total", name) for name in sources}

    def failing(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(SlotFiles, "write", failing)
    answers(llm, [[9, *prompt] for prompt in prompts()])
    in_ram, on_disk = tier_snapshots(engine)
    assert in_ram.state is TierState.AVAILABLE
    assert on_disk.state is TierState.DEGRADED
    assert on_disk.reason == "writes stopped: 3 failures in a row; Input/output error"
    llm.close()


def test_without_tiers_there_is_nothing_to_see(tmp_path: Path) -> None:
    llm = opened(str(save_tiny_llama(tmp_path)))
    assert tier_snapshots(llm.loaded.engine) == []
    assert list(llm.loaded.metrics.prompt_tokens) == ["computed", "cached"]
    llm.close()
