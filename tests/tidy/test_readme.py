"""Every command and every snippet of README.md, run as a reader would, with the small model and a free port."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kveik.model.catalogue import CATALOGUE, DEFAULT_MODEL
from tests.tidy.sources import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", README, re.DOTALL)
MODELS = re.compile("|".join(re.escape(name) for name in sorted(CATALOGUE, key=len, reverse=True)))
ENVIRONMENT = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", "OPENAI_API_KEY": "none"}
READY_SECONDS = 120
KINDS = (
    ("make ", "make"),
    ("curl ", "curl"),
    ("kveik serve", "serve"),
    ("kveik bench", "bench"),
    ("kveik cache", "cache"),
)

pytestmark = pytest.mark.model


def commands() -> list[str]:
    """`$ command` lines of sessions, with their continuation lines, and all lines of plain lists of commands."""
    sessions = "".join(text for kind, text in BLOCKS if kind == "console")
    lists = "".join(text for kind, text in BLOCKS if kind == "sh")
    typed = [command.replace("\\\n", "") for command in re.findall(r"^\$ ((?:.*\\\n)*.*)$", sessions, re.MULTILINE)]
    listed = [re.sub(r"\s+# .*$", "", line) for line in lists.splitlines() if line.strip()]
    return list(dict.fromkeys([*typed, *listed]))


def kind_of(command: str) -> str:
    for word, kind in KINDS:
        if command.startswith(word):
            return kind
    assert re.match(r"(kveik|printf .*\| *kveik|source \.venv)\b", command), f"no test knows how to run: {command}"
    return "kveik" if "kveik" in command else "source"


def of_kind(*kinds: str) -> list[str]:
    return [command for command in commands() if kind_of(command) in kinds]


def small(command: str) -> str:
    """The same with the small model, so that no test fetches a gigabyte."""
    return MODELS.sub(DEFAULT_MODEL, command)


def run(command: str, folder: Path) -> str:
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=ENVIRONMENT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def serving(command: str, folder: Path) -> Iterator[str]:
    """The address of a server that the command starts, on a free port; it must end well on Ctrl-C."""
    port = free_port()
    line = f"exec {re.sub(r' --port [0-9]+', '', command)} --port {port}"
    process = subprocess.Popen(
        ["bash", "-c", line], cwd=folder, env=ENVIRONMENT, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    watchdog = threading.Timer(READY_SECONDS, process.kill)
    watchdog.start()
    try:
        assert process.stderr is not None
        said = []
        for line in process.stderr:
            said.append(line)
            if "is served at" in line:
                break
        assert said, command
        assert "is served at" in said[-1], "".join(said)
        # Those who ask it may take longer than it took to start.
        watchdog.cancel()
        yield f"http://127.0.0.1:{port}"
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    finally:
        watchdog.cancel()
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def address(catalogue_file: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server as `make serve` starts it."""
    catalogue_file(DEFAULT_MODEL)
    with serving(f"kveik serve {DEFAULT_MODEL}", tmp_path_factory.mktemp("serve")) as url:
        yield url


@pytest.fixture(scope="module")
def kept(catalogue_file: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the README's server with a disk has been asked something, and has stopped."""
    catalogue_file(DEFAULT_MODEL)
    (command,) = (command for command in of_kind("serve") if "--kv-disk " in command)
    folder = tmp_path_factory.mktemp("kept")
    body = json.dumps({"prompt": "In the far north " * 20, "max_tokens": 1}).encode()
    with serving(command, folder) as url:
        ask = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(ask, timeout=60) as answer:
            assert answer.status == 200
    return folder


def test_the_readme_shows_a_session_a_snippet_and_a_list() -> None:
    assert of_kind("curl")
    assert of_kind("kveik")
    assert any(kind == "python" for kind, _ in BLOCKS)


@pytest.mark.parametrize("command", of_kind("make"))
def test_make_knows_what_the_readme_makes(command: str) -> None:
    # Made for real by whoever runs these tests; here it is only asked what it would do.
    assert run(command.replace("make ", "make --dry-run ", 1), ROOT)


@pytest.mark.parametrize("command", of_kind("curl"))
def test_the_server_answers_what_the_readme_asks(command: str, address: str, tmp_path: Path) -> None:
    answer = run(command.replace("http://localhost:8000", address).replace("curl ", "curl --fail-with-body ", 1), tmp_path)
    assert answer
    assert '"error"' not in answer


@pytest.mark.parametrize("code", [text for kind, text in BLOCKS if kind == "python"])
def test_the_python_of_the_readme_runs(code: str, address: str, tmp_path: Path) -> None:
    script = tmp_path / "snippet.py"
    script.write_text(code.replace("http://localhost:8000", address), encoding="utf-8")
    assert run(f"{sys.executable} {script}", tmp_path).strip()


@pytest.mark.parametrize("command", of_kind("kveik", "source"))
def test_the_commands_of_the_readme_run(command: str, catalogue_file: Callable[[str], Path], tmp_path: Path) -> None:
    catalogue_file(DEFAULT_MODEL)
    run(small(command), ROOT if kind_of(command) == "source" else tmp_path)


@pytest.mark.parametrize("command", of_kind("serve"))
def test_the_servers_of_the_readme_start(command: str, catalogue_file: Callable[[str], Path], tmp_path: Path) -> None:
    catalogue_file(DEFAULT_MODEL)
    (toml,) = (text for kind, text in BLOCKS if kind == "toml")
    (tmp_path / "kveik.toml").write_text(toml, encoding="utf-8")
    with serving(small(command), tmp_path) as url:
        assert url


@pytest.mark.parametrize("command", of_kind("cache"))
def test_a_stopped_server_has_left_what_the_readme_looks_at(command: str, kept: Path) -> None:
    # 80 tokens and more: at least five blocks of 16.
    (records,) = re.findall(r"^(\d+)(?: records,| of \d+ records are sound;)", run(command, kept), re.MULTILINE)
    assert int(records) >= 5


@pytest.mark.slow
@pytest.mark.parametrize("command", of_kind("bench"))
def test_the_measurements_of_the_readme_run(command: str, catalogue_file: Callable[[str], Path], tmp_path: Path) -> None:
    catalogue_file(DEFAULT_MODEL)
    assert run(f"{small(command)} --repeats 1", tmp_path)
