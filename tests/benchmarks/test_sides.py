"""Engines in processes of their own: what they say, how they sleep, how they end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.peers import side as sides
from benchmarks.peers.install import installed, stamp
from benchmarks.peers.llama_cpp import decode_rate, prefill_rate
from benchmarks.peers.side import Resident, SideFailed, clean_environment

SPEAKING = """
import os, sys, time
from benchmarks.peers.workload import tell
print("noise", end="")
time.sleep(0.1)  # Readiness is told in tenths of a second.
tell({"version": os.environ.get("OMP_NUM_THREADS", "free"), "process": os.getpid()})
tell({"warm": True})
for line in sys.stdin:
    print("more noise")
    tell({"rate": len(line.strip()) / 2})
"""


def resident(tmp_path: Path, code: str) -> Resident:
    return Resident("fake", [sys.executable, "-c", code], {}, tmp_path / "log")


def state_of(process: object) -> str:
    """The kernel's letter: T is stopped, S sleeps."""
    return Path(f"/proc/{process}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0]


def stopped_within(process: object, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if state_of(process) == "T":
            return True
        time.sleep(0.01)
    return False


def test_an_engine_answers_column_after_column_and_is_stopped_between(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    side = resident(tmp_path, SPEAKING)
    try:
        facts = side.start()
        assert facts["version"] == "free"
        assert facts["ready_seconds"]
        assert [side.measure(column) for column in ("decode_8", "prefill_512")] == [4.0, 5.5]
        assert stopped_within(facts["process"], 5)
    finally:
        side.stop()
    with pytest.raises(ProcessLookupError):
        os.kill(int(str(facts["process"])), 0)


def test_an_engine_that_is_ready_sleeps_until_its_turn(tmp_path: Path) -> None:
    side = resident(tmp_path, SPEAKING)
    try:
        facts = side.start()
        assert stopped_within(facts["process"], 5)
    finally:
        side.stop()


def test_an_engine_that_ends_is_named_with_its_log(tmp_path: Path) -> None:
    side = resident(tmp_path, "import sys; sys.exit('no such model')")
    with pytest.raises(SideFailed, match=r"fake ended.*log"):
        side.start()
    side.stop()
    assert "no such model" in (tmp_path / "log").read_text(encoding="utf-8")


def test_an_engine_that_never_answers_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sides, "READY_SECONDS_MAX", 0.2)
    side = resident(tmp_path, "import time; time.sleep(60)")
    with pytest.raises(SideFailed, match="no answer"):
        side.start()
    side.stop()


def test_engines_do_not_inherit_what_is_said_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    monkeypatch.setenv("KMP_BLOCKTIME", "7")
    cleaned = clean_environment({"OMP_NUM_THREADS": "2"})
    assert "GOMP_SPINCOUNT" not in cleaned
    assert "KMP_BLOCKTIME" not in cleaned
    assert cleaned["OMP_NUM_THREADS"] == "2"
    assert cleaned["PATH"] == os.environ["PATH"]


def test_an_installation_counts_only_whole_and_in_the_wanted_version(tmp_path: Path) -> None:
    assert not installed(tmp_path, "a==1")
    stamp(tmp_path, "a==1")
    assert installed(tmp_path, "a==1")
    assert not installed(tmp_path, "a==2")


def test_figures_of_llama_cpp_are_read_from_its_own_output() -> None:
    assert prefill_rate(json.dumps([{"n_prompt": 512, "avg_ts": 310.5}])) == 310.5
    assert decode_rate('\nllama: warm\n{"pl": 8, "speed_pp": 322.4, "speed_tg": 214.7, "speed": 241.6}\n') == 214.7
    with pytest.raises(SideFailed, match="0 lines"):
        decode_rate("killed")


RUNNER = """
import sys
from pathlib import Path
from benchmarks.peers.side import Resident
side = Resident("fake", [sys.executable, "-c", sys.argv[1]], {}, Path(sys.argv[2]))
print(side.start()["process"], flush=True)
input()
"""


def test_a_sleeping_engine_does_not_outlive_a_runner_that_was_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", RUNNER, SPEAKING, str(tmp_path / "log")]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=clean_environment({})
    ) as runner:
        assert runner.stdout is not None
        process = int(runner.stdout.readline())
        assert stopped_within(process, 5)
        runner.kill()
    end = time.monotonic() + 10
    while Path(f"/proc/{process}").exists() and state_of(process) != "Z" and time.monotonic() < end:
        time.sleep(0.01)
    assert not Path(f"/proc/{process}").exists() or state_of(process) == "Z"
