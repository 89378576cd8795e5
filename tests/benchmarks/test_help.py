"""Whoever asks a measurement what it takes is told, at once; and whoever has read enough ends it."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks.command import run

FOLDER = Path(__file__).parents[2] / "benchmarks"
# Those in benchmarks/peers/inside are programs for other environments, which benchmarks.peers starts.
MEASUREMENTS = [
    *sorted(f"benchmarks.{path.stem}" for path in FOLDER.glob("*.py") if "__main__" in path.read_text(encoding="utf-8")),
    *sorted(f"benchmarks.{path.parent.name}" for path in FOLDER.glob("*/__main__.py")),
]


# runpy says so where another test has imported the module.
pytestmark = pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")


@pytest.mark.parametrize("module", MEASUREMENTS)
def test_every_measurement_answers_help(
    module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [module, "--help"])
    with pytest.raises(SystemExit) as end:
        runpy.run_module(module, run_name="__main__")
    assert end.value.code == 0
    assert "usage:" in capsys.readouterr().out


@contextmanager
def nobody_reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Output goes into a pipe whose other end is closed."""
    read, write = os.pipe()
    os.close(read)
    # It raises when it is closed, unless somebody has seen to what it could not get rid of.
    with os.fdopen(write, "w", encoding="utf-8") as gone, monkeypatch.context() as here:
        here.setattr(sys, "stdout", gone)
        yield


@pytest.mark.parametrize("module", MEASUREMENTS)
def test_every_measurement_ends_without_a_word_where_nobody_reads_any_more(
    module: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [module, "--help"])
    with nobody_reads(monkeypatch), pytest.raises(SystemExit) as end:
        runpy.run_module(module, run_name="__main__")
    assert end.value.code == 1
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("buffered", [True, False])
def test_a_measurement_that_prints_more_than_is_read_ends_where_it_is(buffered: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    told = []

    def lines() -> None:
        for number in range(10_000):
            print("a line of a table that nobody reads", number, flush=not buffered)
            told.append(number)

    with nobody_reads(monkeypatch), pytest.raises(SystemExit) as end:
        run(lines)
    assert end.value.code == 1
    assert len(told) < 1000


def test_a_pipe_that_breaks_elsewhere_is_an_error_as_any_other() -> None:
    def breaks() -> None:
        raise BrokenPipeError("somebody else's")

    with pytest.raises(BrokenPipeError, match="somebody else's"):
        run(breaks)
