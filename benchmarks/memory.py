"""Resident memory of `kveik serve` under mixed load, against its plan: python -m benchmarks.memory [--write docs]

The server has a pool of 120 MB, a tier in RAM of 60 MB and one on disk, and is loaded once per way of multiplying: the file's
own blocks (auto) and floats (bf16). 24 clients send prompts of 5 to 2,000 tokens, half of which share a prefix, at temperatures
0 and 1, and cut every third answer off. Resident memory is the kernel's account (VmRSS), read every few seconds.
"""

from __future__ import annotations

import http.client
import json
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.command import parser_of, run
from benchmarks.curves import Curve, Panel, drawing
from benchmarks.facts import environment, sentence
from benchmarks.load import READY_SECONDS_MAX, free_port, healthy, memory_of
from benchmarks.pages import PAGE, keep, table, write_section
from benchmarks.peers.side import ROOT, clean_environment, end_with_parent

SERVER = (
    "--kv-cache-memory-bytes",
    "120MB",
    "--kv-cache-dtype",
    "bfloat16",
    "--max-model-len",
    "4096",
    "--kv-ram-bytes",
    "60MB",
)
WAYS = ("auto", "bf16")
"""Values of --quantization: the file's own blocks, and floats."""

SHARED_TOKENS = 600
PROMPT_TOKENS = (5, 2000)
NEW_TOKENS_MOST = 64
SETTLED_SECONDS = 600
"""From here on resident memory should not grow."""

GROWTH_ASKED = 0.02
MINUTES = (0.2, 0.5, 1, 2, 5, 10, 20)
"""Points of the picture before the last."""

COLOURS = ("#2a78d6", "#eb6834")
PICTURE = "memory.svg"
PLANNED = re.compile(r"^kveik:planned_memory_bytes (\S+)", re.MULTILINE)


class Client(threading.Thread):
    """Sends one request after another until it is told to stop."""

    def __init__(self, port: int, seed: int, stop: threading.Event) -> None:
        super().__init__(daemon=True)
        self._port, self._stopped, self._chance = port, stop, random.Random(seed)
        self.answers = self.failures = 0

    def run(self) -> None:
        while not self._stopped.is_set():
            try:
                self._request()
                self.answers += 1
            except (OSError, http.client.HTTPException):
                self.failures += 1
                self._stopped.wait(0.5)

    def _request(self) -> None:
        chance = self._chance
        body = {
            "prompt": prompt(chance),
            "max_tokens": chance.randint(1, NEW_TOKENS_MOST),
            "temperature": chance.choice((0, 1)),
            "stream": True,
        }
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=300)
        try:
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            if answer.status != 200:
                raise http.client.HTTPException(f"status {answer.status}: {answer.read(200)!r}")
            # Every third answer is cut off after a few chunks.
            left = chance.randint(1, 8) if chance.random() < 1 / 3 else None
            while answer.readline() and left != 0 and not self._stopped.is_set():
                left = None if left is None else left - 1
        finally:
            connection.close()


def prompt(chance: random.Random) -> list[int]:
    """Token ids; half of the prompts begin with the same ones."""
    length = chance.randint(*PROMPT_TOKENS)
    shared = [1000 + token for token in range(SHARED_TOKENS)] if chance.random() < 0.5 else []
    return (shared + [chance.randint(1000, 20000) for _ in range(length)])[:length]


def planned_bytes(port: int) -> int:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        found = PLANNED.search(answer.read().decode())
    if found is None:
        raise RuntimeError("the server's metrics have no kveik:planned_memory_bytes")
    return int(float(found[1]))


def measure(model: str, way: str, *, minutes: float, clients: int, every: float, launch: list[str]) -> dict[str, Any]:
    """One server under load; seconds and resident bytes, side by side. Raises RuntimeError where it does not start or ends."""
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        command = [*launch, "serve", model, "--port", str(port), "--quantization", way, *SERVER]
        server = subprocess.Popen(
            [*command, "--kv-disk", folder, "--kv-disk-bytes", "300MB"],
            cwd=ROOT,
            env=clean_environment({}),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=end_with_parent,
        )
        try:
            _wait(server, f"http://127.0.0.1:{port}/health")
            return _loaded(server, port, minutes=minutes, clients=clients, every=every)
        finally:
            server.terminate()
            server.wait()


def _wait(server: subprocess.Popen[bytes], url: str) -> None:
    deadline = time.monotonic() + READY_SECONDS_MAX
    while not healthy(url):
        if server.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"kveik serve ended, or was not ready within {READY_SECONDS_MAX} s")
        time.sleep(0.1)


def _loaded(server: subprocess.Popen[bytes], port: int, *, minutes: float, clients: int, every: float) -> dict[str, Any]:
    planned, stop = planned_bytes(port), threading.Event()
    crowd = [Client(port, seed, stop) for seed in range(clients)]
    started = time.monotonic()
    samples = [(0.0, memory_of(server.pid)["VmRSS"])]
    for client in crowd:
        client.start()
    try:
        while (now := time.monotonic() - started) < 60 * minutes:
            if server.poll() is not None:
                raise RuntimeError(f"kveik serve ended after {now:.0f} s of load")
            time.sleep(every)
            with suppress(OSError, ValueError, KeyError):
                samples.append((round(time.monotonic() - started, 1), memory_of(server.pid)["VmRSS"]))
    finally:
        # Clients that still wait for an answer end with the server.
        stop.set()
    return {
        "planned": planned,
        "samples": samples,
        "answers": sum(client.answers for client in crowd),
        "failures": sum(client.failures for client in crowd),
    }


def growth(samples: list[tuple[float, int]]) -> float | None:
    """Most resident after the first ten minutes, over the most at their end; None where it was not measured as long."""
    before = [size for second, size in samples if SETTLED_SECONDS - 60 <= second <= SETTLED_SECONDS]
    after = [size for second, size in samples if second > SETTLED_SECONDS]
    return max(after) / max(before) - 1 if before and after else None


def memory_table(found: dict[str, dict[str, Any]]) -> str:
    rows = [
        ["--quantization", "planned", "after start", "most", "last", "most, of the plan", "growth after 10 minutes", "answers"]
    ]
    for way, one in found.items():
        sizes = [size for _, size in one["samples"]]
        grown = growth(one["samples"])
        mebibytes = [f"{size / 2**20:,.0f} MiB" for size in (one["planned"], sizes[0], max(sizes), sizes[-1])]
        growth_cell = "–" if grown is None else f"{grown:+.1%}"
        rows.append([way, *mebibytes, f"{max(sizes) / one['planned']:.0%}", growth_cell, f"{one['answers']:,}"])
    return table(rows)


def picture(found: dict[str, dict[str, Any]]) -> str:
    """Resident memory as a share of the plan over minutes, one curve per way, as SVG."""
    curves = []
    for (way, one), colour in zip(found.items(), COLOURS, strict=False):
        last = one["samples"][-1][0] / 60
        minutes = [*(minute for minute in MINUTES if minute < last), round(last, 1)]
        # Between two minutes of the axis the most counts.
        spans = zip([0.0, *minutes], minutes, strict=False)
        most = [max((size for at, size in one["samples"] if low <= at / 60 <= high), default=0) for low, high in spans]
        curves.append(Curve(way, colour, [(x, y / one["planned"]) for x, y in zip(minutes, most, strict=True) if y]))
    return drawing([Panel("resident memory over planned", curves)], x="minutes under load", y="share")


def main() -> None:
    parser = parser_of("memory", __doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--ways", nargs="*", choices=WAYS, default=WAYS, help="of multiplying, one server each")
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--every", type=float, default=5, help="seconds between two samples")
    given = parser.parse_args()
    facts = environment()
    launch = [str(Path(sys.executable).with_name("kveik"))]
    found = {
        way: measure(given.model, way, minutes=given.minutes, clients=given.clients, every=given.every, launch=launch)
        for way in given.ways
    }
    asked = f"Asked for: never more than planned, and at most {GROWTH_ASKED:.0%} more after the first ten minutes."
    print(f"{memory_table(found)}\n\n{asked}\n\n{sentence(facts)}")
    if given.write:
        found = keep(given.write, "memory", found)["memory"]
        (given.write / PICTURE).write_text(picture(found), encoding="utf-8")
        shown = f"{memory_table(found)}\n\n![Resident memory over planned, by minutes]({PICTURE})"
        write_section(given.write / PAGE, "memory", f"{shown}\n\n<sub>{asked} {sentence(facts)}</sub>")


if __name__ == "__main__":
    run(main)
