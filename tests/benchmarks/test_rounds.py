"""The order of the comparison: who is measured when, who is left out, what is kept."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks.pages import read
from benchmarks.peers.__main__ import FIELD, PEERS, parse, play, start, write
from benchmarks.peers.figures import ASKED
from benchmarks.peers.side import ROOT, SideFailed


class FakeSide:
    """An engine of a known speed; it fails at its n-th figure, or at its start."""

    def __init__(self, name: str, rate: float, diary: list[str], *, fails_at: int | None = None) -> None:
        self.name, self.rate, self.diary, self.fails_at = name, rate, diary, fails_at
        self.figures = 0
        self.stopped = False

    def start(self) -> dict[str, object]:
        if self.fails_at == 0:
            raise SideFailed(f"{self.name} does not read this file")
        return {"version": "1", "weights": "w"}

    def measure(self, column: str) -> float:
        self.figures += 1
        if self.figures == self.fails_at:
            raise SideFailed(f"{self.name} has ended")
        self.diary.append(f"{self.name} {column}")
        return self.rate

    def stop(self) -> None:
        self.stopped = True


def test_engines_take_turns_column_after_column() -> None:
    diary: list[str] = []
    columns: dict[str, dict[str, list[float]]] = {"prefill_512": {}, "decode_1": {}}
    sides: list[Any] = [FakeSide("kveik", 10, diary), FakeSide("a", 8, diary), FakeSide("slow", 5, diary)]
    for _ in range(2):
        play(sides, columns)
    turn = ["kveik prefill_512", "a prefill_512", "slow prefill_512", "kveik decode_1", "a decode_1", "slow decode_1"]
    # The slow one cannot become the best and has one round.
    assert diary == [*turn, *(entry for entry in turn if "slow" not in entry)]
    assert columns["decode_1"] == {"kveik": [10, 10], "a": [8, 8], "slow": [5]}


def test_a_peer_that_fails_is_left_out_and_the_others_go_on() -> None:
    diary: list[str] = []
    columns: dict[str, dict[str, list[float]]] = {"prefill_512": {}, "decode_1": {}}
    weak, never = FakeSide("weak", 9, diary, fails_at=2), FakeSide("never", 9, diary, fails_at=0)
    sides: list[Any] = [FakeSide("kveik", 10, diary), weak, never]
    engines: dict[str, dict[str, object]] = {}
    start(sides, engines)
    assert list(engines) == ["kveik", "weak"]
    play(sides, columns)
    assert weak.stopped
    assert never.stopped
    assert columns == {"prefill_512": {"kveik": [10], "weak": [9]}, "decode_1": {"kveik": [10]}}


def test_without_kveik_there_is_nothing_to_compare() -> None:
    broken = FakeSide("kveik", 10, [], fails_at=0)
    with pytest.raises(SideFailed, match="does not read"):
        start([broken], {})
    assert broken.stopped


def test_every_model_with_ratios_asked_for_has_peers_that_can_be_had() -> None:
    assert set(FIELD) == set(ASKED)
    assert {name for names in FIELD.values() for name in names} <= set(PEERS)
    assert parse([]).models == list(FIELD)


def test_what_is_written_is_figures_page_and_picture(tmp_path: Path) -> None:
    shutil.copy(ROOT / "docs" / "PERFORMANCE.md", tmp_path)
    facts = {"when": "now", "cpu": "c", "flags": [], "cpus_allowed": 2, "threads": 2, "memory_available_gib": 1.0}
    facts |= {"load_average": 0.1, "kernel": "k", "python": "3", "torch": "2", "kveik": "0"}
    rates = {"kveik": [30.0] * 3, "OpenVINO": [10.0] * 3}
    result = {
        "engines": {name: {"version": "1", "weights": "w"} for name in rates},
        "columns": {"prefill_512": rates},
        "environment": facts,
    }
    write(tmp_path, {"smollm2-135m": result})
    write(tmp_path, {"qwen2.5-coder-1.5b": result})
    page = (tmp_path / "PERFORMANCE.md").read_text(encoding="utf-8")
    assert page.count("**3.00** (3.00–3.00) × OpenVINO") == 2
    assert "(performance.svg)" in page
    assert set(read(tmp_path)["peers"]) == {"smollm2-135m", "qwen2.5-coder-1.5b"}
    drawn = ElementTree.parse(tmp_path / "performance.svg").getroot()
    assert len(drawn.findall("{http://www.w3.org/2000/svg}rect")) == 2
