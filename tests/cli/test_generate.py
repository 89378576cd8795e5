"""What `kveik generate` makes of prompts that fail, and how a long one tells that it is alive."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path

import pytest
import tokenizers
from safetensors.torch import load_file, save_file

from kveik.cli.generate import Pace, json_line
from kveik.cli.main import run
from kveik.cli.prepare import prompts_of
from tests.engine.tiny import save_tiny_llama

GREEDY = ("--temperature", "0", "--max-tokens", "6", "--ignore-eos", "--dtype", "float32", "--max-model-len", "64")


def said_after(seconds: float, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """What is said when a step ends every tenth of a second and 1,000 prompts are never all answered."""
    now = 100.0
    pace = Pace(1000, lambda: now)
    for step in range(int(seconds * 10)):
        now = 100.0 + step / 10
        pace.show(min(step, 999))
    return capsys.readouterr().err.splitlines()


def test_a_short_generate_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert said_after(2.0, capsys) == []


def test_a_long_generate_says_how_far_it_is_and_seldom(capsys: pytest.CaptureFixture[str]) -> None:
    lines = said_after(600.0, capsys)
    assert lines[:2] == ["20 of 1000 prompts answered after 2 s", "60 of 1000 prompts answered after 6 s"]
    # 2, 4, 8, 16, 32 seconds, then one a minute.
    assert len(lines) == 5 + (600 - 62) // 60


def test_the_last_answer_is_told_by_the_summary_alone(capsys: pytest.CaptureFixture[str]) -> None:
    now = 0.0
    pace = Pace(3, lambda: now)
    now = 50.0
    pace.show(3)
    assert capsys.readouterr().err == ""


@pytest.fixture(scope="module")
def allergic(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model that computes NaN wherever the letter z was read."""
    folder = save_tiny_llama(tmp_path_factory.mktemp("allergic"))
    (letter,) = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).encode("z").ids
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][letter] = math.nan
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return str(folder)


def test_a_prompt_that_fails_is_told_and_the_others_are_answered(allergic: str, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = ("warm wort is good for yeast", "warm wort is good for ziest", "straw")
    code = run(["generate", allergic, *GREEDY, *(word for text in prompts for word in ("-p", text))])
    captured = capsys.readouterr()
    first, failed, last = (json.loads(line) for line in captured.out.splitlines())
    assert code == 1
    assert failed["finish_reason"] == "error"
    assert failed["error"]["code"] == "non_finite_logits"
    assert (failed["prompt"], failed["text"], failed["completion_tokens"]) == (1, "", 0)
    for answer in (first, last):
        assert (answer["finish_reason"], answer["completion_tokens"]) == ("length", 6)
        assert "error" not in answer
    assert "prompt 1, choice 0: The model's logits for this request are not finite" in captured.err
    assert "1 of 3 answers failed" in captured.err


def test_many_failures_are_told_as_a_number(allergic: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("".join(f"z{number}\n" for number in range(30)), encoding="utf-8")
    assert run(["generate", allergic, *GREEDY, "--prompts-file", str(path)]) == 1
    captured = capsys.readouterr()
    assert len(captured.out.splitlines()) == 30
    assert captured.err.count("are not finite") == 10
    assert "30 of 30 answers failed" in captured.err


def test_a_prompt_that_is_too_long_is_named(allergic: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", allergic, *GREEDY, "-p", "short", "-p", "x" * 65]) == 1
    captured = capsys.readouterr()
    assert "Prompt 1 is too long." in captured.err
    assert "65 tokens" in captured.err
    assert captured.out == ""


SEPARATORS = "\u2028\u2029\x85\x0b\x0c\x1c\x1d\x1e"


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_prompts_are_cut_at_line_ends_alone(ending: str, tmp_path: Path) -> None:
    texts = [f"Say {mark} this" for mark in SEPARATORS] + ["a lone \r stays", "last"]
    for name, lines in (("p.txt", texts), ("p.jsonl", [json.dumps(text, ensure_ascii=False) for text in texts])):
        path = tmp_path / name
        path.write_bytes(ending.join([*lines, ""]).encode())
        assert prompts_of((), path) == texts


def test_prompts_from_stdin_are_cut_as_those_of_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    given = io.TextIOWrapper(io.BytesIO(b"Say \xe2\x80\xa8 this\r\nsecond\n"), encoding="ascii")
    monkeypatch.setattr("sys.stdin", given)
    assert prompts_of(("first",), Path("-")) == ["first", "Say \u2028 this", "second"]


def test_an_answer_is_one_line_for_every_reader_and_the_same_value() -> None:
    value = {"text": f"a{SEPARATORS}é\n"}
    line = json_line(value)
    assert len(line.splitlines()) == 1
    assert "é" in line
    assert json.loads(line) == value
