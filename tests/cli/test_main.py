"""The front door: exit codes, one message and no traceback, help that loads nothing heavy."""

from __future__ import annotations

import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Literal, get_origin

import pytest

from kveik import __version__
from kveik.cli.commands import COMMANDS, GROUPS
from kveik.cli.main import bound_spinning, run
from kveik.cli.options import every_setting

HEAVY = ("torch", "fastapi", "tokenizers", "huggingface_hub")


def test_no_command_shows_the_help_with_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([]) == 0
    shown = capsys.readouterr().out
    for name in COMMANDS:
        assert f"\n  {name.partition(' ')[0]} " in shown


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
    assert "'kveik " in told


def test_a_config_file_that_cannot_be_read_is_code_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "--config", str(tmp_path / "none.toml")]) == 1
    assert "cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_loads_and_its_help_teaches(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = COMMANDS[name]
    module, _, function = command.runs.partition(":")
    taken = inspect.signature(getattr(importlib.import_module(module), function)).parameters
    own = {setting.name for setting in command.own}
    # Without a step that prepares them, a command's own options are exactly what its function takes.
    if command.prepare is None:
        assert taken.keys() - {"_", "settings", "config"} == own
    assert run([*name.split(), "--help"]) == 0
    shown = capsys.readouterr().out
    assert f"kveik {name}" in shown.partition("Options:")[0].partition("\n\n")[2], "the help holds an example"


@pytest.mark.parametrize("group", GROUPS)
def test_the_help_of_a_group_names_its_commands(group: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([group, "--help"]) == 0
    shown = capsys.readouterr().out
    inside = [name.partition(" ")[2] for name in COMMANDS if name.startswith(f"{group} ")]
    assert inside
    assert all(f"\n  {name} " in shown for name in inside)


@pytest.mark.parametrize(
    ("line", "code", "told"),
    [
        *((line, 0, "") for line in ("--help", "models", "serve --help", "evaluate --help", "cache replay --help")),
        ("serve --port 99999", 2, "--port is 99999; it must be between 0 and 65535."),
        ("serve --block-size 7", 2, "--block-size is 7; it must be one of 8, 16, 32, 64."),
        ("chat --temperature -1", 2, "temperature is -1.0"),
        ("evaluate --against fp8", 2, "--against knows no 'fp8'"),
        ("plan --config none.toml", 1, "none.toml cannot be read"),
        ("serve --host no.such.host.invalid", 1, "cannot be resolved. Give an address of this machine with --host."),
        ("serve no-such-model --port 0", 1, "There is no model 'no-such-model'"),
        ("plan no-such-model", 1, "There is no model 'no-such-model'"),
        ("generate -p x ./no-such-model.gguf", 1, "There is no model './no-such-model.gguf'"),
        ("generate", 1, "There is no prompt."),
        ("generate --prompts-file none.txt", 1, "The prompts cannot be read from none.txt"),
    ],
)
def test_what_the_line_alone_tells_is_told_before_anything_slow_is_loaded(line: str, code: int, told: str) -> None:
    program = (
        f"import sys; from kveik.cli.main import run; code = run({line.split()!r}); import resource; "
        f"print(code, [m for m in {HEAVY!r} if m in sys.modules], sum(resource.getrusage(resource.RUSAGE_SELF)[:2]))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    last = done.stdout.splitlines()[-1]
    assert last.startswith(f"{code} [] "), last
    assert told in done.stderr
    # Of processor time, which other work on the machine does not change much.
    assert float(last.split()[-1]) < 0.5


@pytest.mark.parametrize("command", ["serve", "plan", "generate -p x", "chat", "bench throughput", "evaluate"])
def test_the_first_line_says_that_the_model_is_loading_before_it_is(command: str, tmp_path: Path) -> None:
    model = tmp_path / "broken.gguf"
    model.write_bytes(b"GGUF")
    words = [*command.split(), str(model), *(["--port", "0"] if command == "serve" else [])]
    program = (
        "import importlib, sys; import kveik.cli.main as m; "
        f"m.importlib = type('', (), dict(import_module=lambda name: sys.exit(str({HEAVY!r}[0] in sys.modules)))); "
        f"m.run({words!r})"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
    assert done.stderr.splitlines() == [f"loading {model} ...", "False"]


def test_an_interrupt_is_code_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(model: str) -> Path:
        raise KeyboardInterrupt

    monkeypatch.setattr("kveik.cli.models.fetch_model", interrupted)
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
    monkeypatch.setattr("kveik.cli.main.with_model", lambda config: config)
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
    summaries = {name: command.summary for name, command in COMMANDS.items() if " " not in name} | GROUPS
    for name, summary in summaries.items():
        assert re.search(rf"^  {name} +{re.escape(summary)}$", shown, re.MULTILINE), shown
