"""The front door: exit codes, one message and no traceback, help that loads nothing heavy."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Literal, get_origin

import pytest

from kveik import __version__
from kveik.cli.command import load
from kveik.cli.main import COMMANDS, bound_spinning, run
from kveik.cli.options import every_setting

HEAVY = ("torch", "fastapi", "tokenizers")


def test_no_command_shows_the_help_with_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([]) == 0
    shown = capsys.readouterr().out
    for name in COMMANDS:
        assert f"\n  {name} " in shown


def test_the_version_is_the_package_s(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"kveik {__version__}\n"


def test_a_refusal_is_one_message_on_stderr_and_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["pull", "smollm"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("kveik: There is no model 'smollm'")
    assert "Did you mean smollm2-135m?" in captured.err
    assert "Traceback" not in captured.err


@pytest.mark.parametrize("line", ["brew", "pull --brew", "pull a b", "serve --port", "bench"])
def test_a_line_typed_wrongly_is_code_2_and_says_where_to_look(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(line.split()) == 2
    assert "--help" in capsys.readouterr().err


CHOICES = [name for name, setting in every_setting().items() if get_origin(setting.kind) is Literal]


@pytest.mark.parametrize(
    "line",
    [
        *(f"serve {every_setting()[name].flag} odd" for name in CHOICES),
        *(f"cache replay trace --blocks 3 {flag} odd" for flag in ("--policy", "--policy-below")),
    ],
)
def test_a_choice_that_there_is_not_is_told_in_words_of_the_command_line(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(line.split()) == 2
    told = capsys.readouterr().err
    assert f"kveik: Invalid value for '{line.split()[-2]}': 'odd' is not one of " in told


def test_a_config_file_that_cannot_be_read_is_code_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "--config", str(tmp_path / "none.toml")]) == 1
    assert "cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "module", "summary"), [(name, *entry) for name, entry in COMMANDS.items()], ids=COMMANDS)
def test_every_command_loads_and_its_help_teaches(
    name: str, module: str, summary: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert load(module).help.startswith(summary)
    assert run([name, "--help"]) == 0
    shown = capsys.readouterr().out
    assert f"kveik {name}" in shown.partition("Options:")[0].partition("\n\n")[2], "the help holds an example"


@pytest.mark.parametrize("line", ["--help", "models", "pull --help"])
def test_what_needs_no_model_loads_nothing_heavy(line: str) -> None:
    code = (
        f"import sys; from kveik.cli.main import run; run({line.split()!r}); print([m for m in {HEAVY!r} if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "[]"


def test_an_interrupt_is_code_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(model: str) -> Path:
        raise KeyboardInterrupt

    monkeypatch.setattr("kveik.cli.pull.fetch_model", interrupted)
    assert run(["pull"]) == 130


def test_a_reader_that_goes_away_leaves_no_traceback() -> None:
    command = f"{sys.executable} -c 'from kveik.cli.main import main; main()' models | true"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False, timeout=60)
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("given", "spins"),
    [({}, "5000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "passive"}, None)],
)
def test_waiting_threads_spin_briefly_unless_the_environment_says_otherwise(given: dict[str, str], spins: str | None) -> None:
    bound_spinning(given)
    assert given.get("GOMP_SPINCOUNT") == spins


class InterruptedLLM:
    """Stopped in the middle of a step, which leaves books that do not add up."""

    def __init__(self, *_: object) -> None:
        self.loaded = SimpleNamespace(max_model_len=4096, spec=SimpleNamespace(vocab=50_000))

    def generate(self, *_: object) -> None:
        raise KeyboardInterrupt

    def close(self) -> None:
        raise AssertionError("the books are not in order")


def test_an_interrupted_measurement_is_code_130_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("kveik.cli.bench.with_model", lambda config: config)
    monkeypatch.setattr("kveik.measure.throughput.LLM", InterruptedLLM)
    assert run(["bench", "throughput", "--repeats", "1"]) == 130
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("columns", ["80", "200"])
def test_no_summary_of_a_command_is_cut_off(
    columns: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert run(["--help"]) == 0
    shown = capsys.readouterr().out
    for name, (_, summary) in COMMANDS.items():
        assert re.search(rf"^  {name} +{re.escape(summary)}$", shown, re.MULTILINE), shown
