"""kveik evaluate as one types it: help, figures as a table and as JSON, exit codes, refusals."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file

from kveik.cli.evaluate import EvaluationDisplay
from kveik.cli.main import run
from tests.engine.tiny import save_tiny_llama

QUICK = ("--tokens", "200", "--context", "100", "--prompts", "2", "--kv-cache-memory-bytes", "4MiB", "--dtype", "float32")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_llama(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def blank(model: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model that thinks every token equally likely."""
    folder = save_tiny_llama(tmp_path_factory.mktemp("blank"))
    tensors = load_file(Path(model) / "model.safetensors")
    tensors["lm_head.weight"] = torch.zeros_like(tensors["lm_head.weight"])
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return str(folder)


@pytest.fixture(scope="module")
def rhyme(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("text") / "rhyme.txt"
    path.write_text("It works hot in the wort that the farmer saw, on a ring of straw. " * 9, encoding="utf-8")
    return str(path)


def test_help_names_every_option_and_the_texts(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["evaluate", "--help"]) == 0
    shown = capsys.readouterr().out
    for word in ("--against", "--text", "--tokens", "--context", "--prompts", "--tolerance", "--json", "--kv-cache-dtype"):
        assert word in shown
    assert "english" in shown
    assert "of a GGUF" in shown


def test_a_table_and_two_sentences_on_stdout_and_stages_on_stderr(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["evaluate", model, *QUICK, "--against", "file"]) == 0
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    assert "pydoc_data.topics of Python 3" in lines[0]
    assert "198 tokens foretold, in 2 windows of up to 100" in lines[0]
    for word in ("perplexity", "same likeliest token", "KL divergence", "greedy answers", "cache per token", "entropy"):
        assert sum(word in line for line in lines) >= 1, word
    assert lines[-2].startswith("The two configurations compute the very same numbers")
    assert lines[-1].startswith("Sampling: nothing to watch")
    assert captured.err.splitlines()[:2] == [f"loading {model} ...", "loading the baseline"]
    assert "writing with the configuration" in captured.err


def test_json_is_one_object_with_every_figure(model: str, rhyme: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        run(["evaluate", model, *QUICK, "--json", "--against", "dtype=bfloat16", "--tolerance", "1000", "--text", rhyme]) == 0
    )
    found = json.loads(capsys.readouterr().out)
    assert (found["within_tolerance"], found["decided"]) == (True, True)
    assert found["tolerance_percent"] == 1000
    assert found["baseline"]["settings"] == {"dtype": "bfloat16"}
    assert found["configuration"]["settings"] == {"dtype": "float32"}
    assert found["divergence"]["mean"] > 0
    assert found["loss_percent"] == pytest.approx(
        100 * (found["configuration"]["perplexity"] / found["baseline"]["perplexity"] - 1)
    )
    assert len(found["greedy"]["first_differences"]) == 2


def test_json_has_null_where_a_figure_is_not_finite(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    # One token is foretold, of which no margin can be told.
    run(["evaluate", model, *QUICK, "--tokens", "2", "--prompts", "0", "--against", "dtype=bfloat16", "--json"])
    found = json.loads(capsys.readouterr().out, parse_constant=refuse)
    assert found["margin_percent"] is None
    assert found["decided"] is False


def test_a_loss_beyond_the_tolerance_is_exit_code_1(
    model: str, blank: str, rhyme: str, capsys: pytest.CaptureFixture[str]
) -> None:
    # The tiny model's weights are random and wide: it is surer, and more wrong, than one that knows nothing.
    line = ["evaluate", model, *QUICK, "--prompts", "0", "--text", rhyme]
    assert run([*line, "--against", f"model={blank}"]) == 1
    captured = capsys.readouterr()
    assert "beyond the tolerance of 0.5 %" in captured.out
    assert "another model to draw from" in captured.out
    assert "greedy" not in captured.out
    assert "kveik:" not in captured.err
    assert run(["evaluate", blank, *line[2:], "--against", f"model={model}", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["configuration"]["perplexity"] == pytest.approx(257, rel=1e-4)


def test_a_file_may_be_the_text(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("It works hot. " * 5, encoding="utf-8")
    assert run(["evaluate", model, *QUICK, "--text", str(path), "--against", "file", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["text"], found["tokens"], found["windows"]) == ("notes.txt", 69, 1)
    assert math.isfinite(found["configuration"]["perplexity"])


@pytest.mark.parametrize(
    ("line", "code", "words"),
    [
        (["--tokens", "1"], 2, "--tokens is 1; it must be at least 2"),
        (["--tokens", "many"], 2, "Invalid value for '--tokens'"),
        (["--context", "100000"], 1, "--context is 100000; the model's context holds 4096 tokens"),
        (["--prompts", "-1"], 2, "--prompts is -1"),
        (["--prompts", "1025"], 2, "--prompts is 1025; it must be at most 1024"),
        (["--tolerance", "-1"], 2, "--tolerance is -1.0"),
        (["--against", "int4"], 2, "--against knows no 'int4'"),
        (["--against", "kv-cache-dtype=int3"], 2, "sets kv-cache-dtype to 'int3'"),
        (["--against", "model=nowhere.gguf"], 1, "There is no model 'nowhere.gguf'"),
        (["--text", "nowhere.txt"], 1, "The text nowhere.txt cannot be read"),
    ],
)
def test_what_cannot_be_measured_is_one_message(
    line: list[str], code: int, words: str, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["evaluate", model, *QUICK, *line]) == code
    captured = capsys.readouterr()
    assert words in captured.err
    assert "Traceback" not in captured.err
    assert captured.out == ""


def test_a_terminal_shows_one_bar_with_the_stage_and_the_tokens() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    with EvaluationDisplay(console) as display:
        display.show("loading the baseline", 0, 0)
        display.show("reading with the baseline", 512, 4096)
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert "reading with the baseline" in shown
    assert "512 of 4,096 tokens" in shown


def test_elsewhere_each_stage_is_one_line() -> None:
    console = Console(file=io.StringIO(), width=40)
    with EvaluationDisplay(console) as display:
        for done in range(0, 4096, 512):
            display.show("reading with the baseline", done, 4096)
        display.show("writing with the baseline", 4096, 4096)
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue() == "reading with the baseline\nwriting with the baseline\n"
