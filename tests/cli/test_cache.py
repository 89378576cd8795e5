"""The replay as a user runs it: a table, or one object per seed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kveik.cli.main import run

TRACE = str(Path(__file__).parents[1] / "traces" / "synthetic_700.jsonl.gz")


def test_a_replay_prints_hits_and_speed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["cache", "replay", TRACE, "--blocks", "1000", "--policy", "lru"]) == 0
    shown = capsys.readouterr()
    assert "700 requests" in shown.err
    assert "hit ratio" in shown.out
    assert "0.0106" in shown.out
    assert "block touches per second" in shown.out


def test_hazard_is_run_with_several_seeds(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["cache", "replay", TRACE, "--blocks", "1000", "--seeds", "2", "--below", "2000", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(rows) == 2
    assert all(row["hit_ratio"] > row["hit_ratio_pool"] > 0 for row in rows)
    assert all(row["writes"] > 0 and row["lessons"] > 0 for row in rows)


@pytest.mark.parametrize(
    ("arguments", "message"), [([TRACE], "--blocks"), (["nowhere.jsonl", "--blocks", "3"], "cannot be read")]
)
def test_what_cannot_be_replayed_is_told(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert run(["cache", "replay", *arguments]) in (1, 2)
    assert message in capsys.readouterr().err
