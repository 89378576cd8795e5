"""`kveik serve` as a process of its own, which can be killed, and callers that know what it must answer."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.bad_days.traffic import ANSWER, SOURCES, Asked
from tests.offload.stores.redis_server import free_port

ROOT = Path(__file__).parents[2]
KVEIK = [sys.executable, "-c", "from kveik.cli.main import main; main()"]


class Server:
    """One process; it serves when the constructor returns."""

    def __init__(self, model: str, home: Path, *options: str) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = home / "log"
        settings = ["--port", str(self.port), "--dtype", "float32", "--max-model-len", "512", *options]
        home.mkdir(exist_ok=True)
        # Nothing is learnt from, or left in, the user's own folder.
        env = os.environ | {"KVEIK_HOME": str(home)}
        with self.log.open("a") as log:
            self.process = subprocess.Popen([*KVEIK, "serve", model, *settings], cwd=ROOT, stdout=log, stderr=log, env=env)
        self._wait()

    def _wait(self) -> None:
        while self.process.poll() is None:
            try:
                httpx.get(f"{self.url}/health")
            except httpx.TransportError:
                time.sleep(0.02)
            else:
                return
        raise AssertionError(f"the server did not start: {self.log.read_text()}")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def ask(self, one: Asked) -> int:
        """Judge the answer to one turn; its cached tokens."""
        body = {"prompt": list(one.prompt), "max_tokens": ANSWER, "temperature": 0, "ignore_eos": True}
        answer = httpx.post(f"{self.url}/v1/completions", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        told = answer.json()
        assert told["choices"][0]["text"] == one.text
        return int(told["usage"]["prompt_tokens_details"]["cached_tokens"])

    def ask_all(self, asked: Sequence[Asked]) -> int:
        """Four callers side by side; cached tokens of all."""
        with ThreadPoolExecutor(4) as pool:
            return sum(pool.map(self.ask, asked))

    def prompt_tokens(self) -> dict[str, float]:
        """By where they came from."""
        families = text_string_to_metric_families(httpx.get(f"{self.url}/metrics").text)
        samples = [sample for family in families for sample in family.samples]
        told = {one.labels["source"]: one.value for one in samples if one.name == "kveik:prompt_tokens_by_source_total"}
        return {source: told.get(source, 0.0) for source in SOURCES}

    def killed_under_load(self, known: Sequence[Asked], chance: random.Random) -> None:
        """Four callers ask for ever, until somewhere in the middle."""
        ended = threading.Event()

        def call(seed: int) -> None:
            draws = random.Random(seed)
            while not ended.is_set():
                try:
                    self.ask(draws.choice(known))
                except httpx.TransportError:
                    # It is gone, and that is the caller's only way to be told.
                    assert ended.wait(60)

        with ThreadPoolExecutor(4) as pool:
            callers = [pool.submit(call, chance.randrange(1 << 30)) for _ in range(4)]
            time.sleep(0.5 + chance.random())
            self.kill()
            ended.set()
        for caller in callers:
            caller.result()
