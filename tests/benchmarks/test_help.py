"""Whoever asks a measurement what it takes is told, at once."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
# Those in benchmarks/peers/inside are programs for other environments, which benchmarks.peers starts.
MEASUREMENTS = [
    *sorted(f"benchmarks.{path.stem}" for path in FOLDER.glob("*.py") if "__main__" in path.read_text(encoding="utf-8")),
    *sorted(f"benchmarks.{path.parent.name}" for path in FOLDER.glob("*/__main__.py")),
]


@pytest.mark.parametrize("module", MEASUREMENTS)
# runpy says so where another test has imported the module.
@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
def test_every_measurement_answers_help(
    module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [module, "--help"])
    with pytest.raises(SystemExit) as end:
        runpy.run_module(module, run_name="__main__")
    assert end.value.code == 0
    assert "usage:" in capsys.readouterr().out
