"""Models by hub id. The hub here is a small HTTP server; the library that talks to it is the real one, in a process of its own,
because it reads its settings when it is imported."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

REVISION = "a" * 40
FILES = {
    "config.json": b'{"architectures": ["LlamaForCausalLM"]}',
    "tokenizer.json": b"{}",
    "model-00001-of-00002.safetensors": b"weights" * 40_000,
    "model-00002-of-00002.safetensors": b"more" * 10_000,
    "model.safetensors.index.json": b'{"weight_map": {}}',
    "pytorch_model.bin": b"never fetched",
    "README.md": b"never fetched",
}
PULL = """
import json, sys
from kveik.errors import KveikError
from kveik.model.hub import pull_hub
seen = []
try:
    folder = pull_hub(sys.argv[1], progress=seen.append)
    print(json.dumps({"folder": str(folder), "done": [p.done for p in seen], "total": seen[-1].total if seen else None}))
except KveikError as error:
    print(json.dumps({"error": type(error).__name__, "message": error.message}))
"""


@dataclass
class Hub:
    """What the hub has, and what it was asked for."""

    files: dict[str, bytes] = field(default_factory=lambda: dict(FILES))
    status: int = 200
    code: str = ""
    asked: list[str] = field(default_factory=list)


def handler_of(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            """Silence."""

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            name = self.path.partition(f"/org/name/resolve/{REVISION}/")[2]
            if self.path.startswith("/api/models/org/name/tree/"):
                entries = [{"type": "file", "path": name, "size": len(c), "oid": "0" * 40} for name, c in hub.files.items()]
                self.answer(hub.status, json.dumps(entries).encode())
            elif self.path.startswith("/api/models/org/name"):
                siblings = [{"rfilename": name, "size": len(content)} for name, content in hub.files.items()]
                self.answer(hub.status, json.dumps({"id": "org/name", "sha": REVISION, "siblings": siblings}).encode())
            elif name in hub.files:
                if self.command == "GET":
                    hub.asked.append(name)
                self.answer(hub.status, hub.files[name])
            else:
                # The library asks for more than models, such as what it may say about the tool that runs it.
                self.answer(404, b"")

        def answer(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("ETag", f'"{hashlib.sha256(body).hexdigest()}"')
            self.send_header("X-Repo-Commit", REVISION)
            if hub.code:
                self.send_header("X-Error-Code", hub.code)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

    return Handler


@pytest.fixture
def hub() -> Iterator[tuple[Hub, str]]:
    made = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler_of(made))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield made, f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join()


def pulled(endpoint: str, home: Path, name: str = "org/name") -> dict[str, object]:
    environment = {
        **os.environ,
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "NO_PROXY": "*",
    }
    command = [sys.executable, "-c", PULL, name]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60)
    assert done.stderr == "", "the model folder of kveik prints nothing"
    return json.loads(done.stdout)


def test_a_hub_model_is_fetched_with_what_we_read_and_nothing_else(hub: tuple[Hub, str], tmp_path: Path) -> None:
    made, endpoint = hub
    answer = pulled(endpoint, tmp_path)
    names = {path.name: path.read_bytes() for path in Path(str(answer["folder"])).iterdir()}
    assert names == {name: content for name, content in FILES.items() if "never" not in content.decode()}
    assert sorted(made.asked) == sorted(names)


def test_progress_of_a_hub_model_ends_at_all_bytes(hub: tuple[Hub, str], tmp_path: Path) -> None:
    answer = pulled(hub[1], tmp_path)
    done = answer["done"]
    assert isinstance(done, list)
    assert done == sorted(done)
    assert done[-1] == answer["total"] == sum(len(content) for content in FILES.values() if b"never" not in content)


def test_a_hub_model_that_is_here_is_used_when_the_hub_cannot_be_reached(hub: tuple[Hub, str], tmp_path: Path) -> None:
    first = pulled(hub[1], tmp_path)
    assert pulled("http://127.0.0.1:9", tmp_path)["folder"] == first["folder"]


def test_an_unreachable_hub_is_told_with_what_would_work(tmp_path: Path) -> None:
    answer = pulled("http://127.0.0.1:9", tmp_path)
    assert answer["error"] == "Unreachable"
    assert "org/name" in str(answer["message"])
    assert "smollm2-135m" in str(answer["message"])


@pytest.mark.parametrize("name", ["../nosuch", "./a.gguf", "a--b/c", "org/name/more"])
def test_a_name_that_the_hub_cannot_have_is_told(name: str, tmp_path: Path) -> None:
    answer = pulled("http://127.0.0.1:9", tmp_path, name)
    assert answer["error"] == "Unreachable"
    assert str(answer["message"]).startswith(f"'{name}' is not a name that the hub can have")


def test_a_hub_model_without_safetensors_is_unsupported(hub: tuple[Hub, str], tmp_path: Path) -> None:
    made, endpoint = hub
    made.files = {"config.json": b"{}", "pytorch_model.bin": b"pickle"}
    answer = pulled(endpoint, tmp_path)
    assert answer["error"] == "Unsupported"
    assert str(answer["message"]).startswith("org/name has no *.safetensors weights")
    assert made.asked == []


@pytest.mark.parametrize(
    ("status", "code", "words"),
    [(404, "RepoNotFound", "The hub has no model 'org/name'"), (403, "GatedRepo", "org/name is gated")],
)
def test_a_hub_model_that_one_may_not_have_is_told_so(
    hub: tuple[Hub, str], tmp_path: Path, status: int, code: str, words: str
) -> None:
    made, endpoint = hub
    made.status, made.code = status, code
    answer = pulled(endpoint, tmp_path)
    assert answer["error"] == "Unreachable"
    assert str(answer["message"]).startswith(words)
