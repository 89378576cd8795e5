"""The commands with the small model, as a user would run them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from kveik.cli.main import run
from kveik.cli.prepare import unshared
from kveik.cli.serve import own_name
from kveik.config import CacheConfig, ServerConfig

SMALL = ("smollm2-135m", "--max-model-len", "512", "--kv-cache-memory-bytes", "60000000")
KVEIK = (sys.executable, "-c", "from kveik.cli.main import main; main()")

pytestmark = pytest.mark.model


@pytest.fixture(autouse=True)
def small_model(catalogue_file: Callable[[str], Path]) -> Path:
    """The small model is there before any of these tests runs."""
    return catalogue_file("smollm2-135m")


def answers(capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_generate_answers_every_prompt_in_order_and_counts_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    line = ["-p", "The capital of France is", "-p", "One, two, three,", "--temperature", "0", "--max-tokens", "4"]
    assert run(["generate", *SMALL, *line]) == 0
    first, second = answers(capsys)
    assert "Paris" in str(first["text"])
    assert " four" in str(second["text"])
    assert (first["prompt"], second["prompt"]) == (0, 1)
    assert first["completion_tokens"] == second["completion_tokens"] == 4
    assert first["finish_reason"] == "length"


def test_generate_reads_prompts_from_a_file_and_writes_answers_to_one(tmp_path: Path) -> None:
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    prompts.write_text('"Hello"\n{"prompt": "Bye"}\n')
    assert run(["generate", *SMALL, "--prompts-file", str(prompts), "--output", str(output), "--max-tokens", "2"]) == 0
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert [line["prompt"] for line in lines] == [0, 1]


def test_generate_asks_through_the_chat_template(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", *SMALL, "--chat", "-p", "Hello", "--temperature", "0", "--max-tokens", "3"]) == 0
    (answer,) = answers(capsys)
    # The template puts a system message and the turn's marks around the one word.
    assert int(str(answer["prompt_tokens"])) > 10


def test_a_common_beginning_is_computed_once(capsys: pytest.CaptureFixture[str]) -> None:
    common = "In the far north, farmers keep their yeast on a ring of straw and pitch it again and again, for it works hot. "
    assert run(["generate", *SMALL, "-p", common + "It", "-p", common + "They", "--max-tokens", "1"]) == 0
    first, second = answers(capsys)
    assert first["cached_tokens"] == 0
    assert int(str(second["cached_tokens"])) >= int(str(second["prompt_tokens"])) - 2


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ([], "There is no prompt. Give one with -p TEXT"),
        (["--prompts-file", "none.txt"], "The prompts cannot be read from none.txt"),
        (["-p", "word " * 600], "This model's maximum context length is 512 tokens"),
    ],
    ids=["no prompt", "no file", "too long"],
)
def test_generate_refuses_what_it_cannot_do(line: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", *SMALL, *line]) == 1
    captured = capsys.readouterr()
    assert words in captured.err
    assert captured.out == ""


@pytest.mark.parametrize("line", ["{", '{"text": "a"}', "7"])
def test_a_prompt_line_that_is_no_prompt_is_numbered(line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(f'"fine"\n{line}\n')
    assert run(["generate", *SMALL, "--prompts-file", str(prompts)]) == 1
    assert "Prompt 2 of the file" in capsys.readouterr().err


def test_chat_over_a_pipe_answers_on_stdout_and_tells_what_was_cached() -> None:
    command = [*KVEIK, "chat", *SMALL, "--temperature", "0", "--max-tokens", "12"]
    done = subprocess.run(command, input="Say hello.\nAgain.\n", capture_output=True, text=True, check=True, timeout=120)
    assert len(done.stdout.splitlines()) >= 2
    first, second = [line for line in done.stderr.splitlines() if line.startswith("[")]
    assert "; 0 of " in first
    assert "; 0 of " not in second


def test_plan_prints_the_arithmetic_and_loads_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", *SMALL]) == 0
    shown = capsys.readouterr().out
    assert "60000000" in shown or "57.2 MiB" in shown
    assert "sequences of 512 tokens" in shown


def test_plan_says_what_would_work_when_the_context_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "smollm2-135m", "--kv-cache-memory-bytes", "1000000"]) == 1
    error = capsys.readouterr().err
    for knob in ("--max-model-len", "--kv-cache-memory-bytes"):
        assert knob in error


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.parametrize("tiers", [[], ["--kv-ram-bytes", "40MB"]], ids=["pool", "ram"])
def test_serve_answers_and_ends_with_code_0_and_few_words_on_ctrl_c(tiers: list[str]) -> None:
    port = free_port()
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        [*KVEIK, "serve", *SMALL, "--port", str(port), "--drain-seconds", "2", *tiers],
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    try:
        assert process.stderr is not None
        said = []
        for line in process.stderr:
            said.append(line)
            if "is served at" in line:
                break
        assert f"smollm2-135m is served at http://127.0.0.1:{port} " in said[-1], said
        body = json.dumps({"model": "smollm2-135m", "prompt": "The capital of France is", "max_tokens": 3, "temperature": 0})
        url = f"http://127.0.0.1:{port}/v1/completions"
        request = urllib.request.Request(url, body.encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as response:
            assert "Paris" in json.load(response)["choices"][0]["text"]
        process.send_signal(signal.SIGINT)
        last = process.communicate(timeout=30)[1].splitlines()
        assert process.returncode == 0
        # What the native module says of objects that outlive it would be long.
        assert all(" INFO " in line for line in last), last
    finally:
        process.kill()
        process.communicate()


def test_of_two_starts_at_once_on_one_port_one_learns_of_it_before_it_loads_anything() -> None:
    command = [*KVEIK, "serve", *SMALL, "--port", str(free_port())]
    both = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    try:
        done = []
        while not done:
            done = [one for one in both if one.poll() is not None]
            time.sleep(0.02)
        (refused,) = done
        (serving,) = (one for one in both if one is not refused)
        assert refused.stderr is not None
        assert refused.returncode == 1
        said = refused.stderr.read()
        assert "Choose another with --port" in said
        assert "loading" not in said
    finally:
        for one in both:
            one.send_signal(signal.SIGTERM)
            one.communicate(timeout=30)
    assert serving.returncode in (0, -signal.SIGTERM)


def test_a_port_in_use_is_told_before_the_model_is_loaded(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kveik.cli.serve.open_engine", lambda *_: pytest.fail("the model was loaded"))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert run(["serve", *SMALL, "--port", str(taken.getsockname()[1])]) == 1
    assert "Choose another with --port" in capsys.readouterr().err


def test_a_secret_that_cannot_be_had_is_told_with_its_path_before_the_model_is_loaded(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("kveik.cli.main.with_model", lambda *_: pytest.fail("the model was fetched"))
    monkeypatch.chdir(tmp_path)
    Path("short").write_text("short")
    for path, why in (
        ("short", "has 5 bytes. Give one of at least 16"),
        ("short/secret", "cannot be read or created: "),
    ):
        assert run(["serve", *SMALL, "--api-key", "k", "--tenant-secret-file", path]) == 1
        assert f"The tenant secret {path} (--tenant-secret-file) {why}" in capsys.readouterr().err


def test_tenants_of_a_remote_tier_with_a_secret_made_here_are_told_that_it_shares_with_nobody_elsewhere(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("KVEIK_HOME", str(tmp_path))
    keys, remote = ServerConfig(api_key=("a", "b")), CacheConfig(kv_remote="redis://host:6379/0")
    note = unshared(keys, remote)
    assert note is not None
    assert f"{tmp_path}/tenant-secret" in note
    assert "--tenant-secret-file" in note
    assert unshared(replace(keys, tenant_secret_file="shared"), remote) is None
    assert unshared(ServerConfig(), remote) is None
    assert unshared(keys, CacheConfig(kv_disk="kv")) is None


def test_the_note_on_tenants_is_told_at_start_as_a_note(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Enough(Exception):
        pass

    def enough(*_: object) -> None:
        raise Enough

    monkeypatch.setenv("KVEIK_HOME", str(tmp_path))
    monkeypatch.setattr("kveik.cli.main.with_model", enough)
    caplog.set_level("INFO")
    for more, told in (([], 1), (["--tenant-secret-file", str(tmp_path / "tenant-secret")], 0)):
        caplog.clear()
        with pytest.raises(Enough):
            run(["serve", *SMALL, "--port", "0", "--api-key", "k", "--kv-remote", "redis://127.0.0.1:1/0", *more])
        assert [one.levelname for one in caplog.records if "same secret" in one.getMessage()] == ["INFO"] * told


def test_a_model_is_served_under_its_own_name(tmp_path: Path) -> None:
    assert own_name("smollm2-135m") == "smollm2-135m"
    assert own_name("org/name") == "org/name"
    assert own_name(str(tmp_path / "folder" / "my.model.gguf")) == "my.model"
    assert own_name(str(tmp_path / "my-folder") + "/") == "my-folder"


@pytest.mark.slow
def test_bench_throughput_prints_one_json_object(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "throughput", "smollm2-135m", "--json", "--repeats", "1"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["model"] == "smollm2-135m"
    assert figures["decode_8"] > figures["decode_1"] > 0
