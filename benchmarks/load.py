"""Start of `kveik serve`: seconds until it is ready, and memory of loading: python -m benchmarks.load [MODEL …] [--write docs]

Every start is a process of its own, timed until /health answers 200. Before the first start of a model its file is dropped from
the page cache where the kernel allows it (posix_fadvise), and so are packed weights that lie beside it; the second start finds
what the first one left. Memory is the whole process's, in its parts: anonymous pages are its own, file pages are the page
cache's and can be had back. Peak: the highest sum that was sampled, and the kernel's own high-water mark (VmHWM) beside it.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.command import parser_of, run
from benchmarks.facts import environment, sentence
from benchmarks.pages import PAGE, keep, table, write_section
from benchmarks.peers.side import ROOT, clean_environment, end_with_parent
from kveik.cli.fetch import fetch_model

SAMPLE_SECONDS = 0.02
READY_SECONDS_MAX = 300
SETTLED_SECONDS = 2.0
ASKED: dict[str, tuple[float, float]] = {"smollm2-135m": (3.0, 3.0), "qwen2.5-coder-1.5b": (10.0, 4.0)}
"""Seconds until ready that are asked for: the first time, the second time."""

PEAK_ASKED = 1.3
"""Peak over the steady state."""


def free_port() -> int:
    with socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        return int(door.getsockname()[1])


def memory_of(process: int) -> dict[str, int]:
    """Bytes of the kernel's account of a process: VmHWM, VmRSS, RssAnon, RssFile, RssShmem."""
    return read_status(Path(f"/proc/{process}/status").read_text(encoding="ascii"))


def read_status(status: str) -> dict[str, int]:
    """The sizes among the lines of /proc/PID/status, in bytes."""
    pairs = (line.split() for line in status.splitlines() if line.startswith(("VmHWM", "VmRSS", "Rss")))
    return {name.rstrip(":"): int(size) * 1024 for name, size, _ in pairs}


def peak_of(samples: Sequence[dict[str, int]]) -> dict[str, int]:
    """The highest of every figure, each for itself."""
    return {name: max(sample[name] for sample in samples) for name in samples[0]}


def healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=1) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def drop_from_page_cache(path: Path) -> None:
    """Ask the kernel to forget a file's pages; it keeps mapped ones."""
    with path.open("rb") as file, suppress(OSError):
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def start(model: str, options: Sequence[str]) -> dict[str, Any]:
    """One start of the server: seconds until it is ready, memory on the way and a while after. Raises RuntimeError."""
    port = free_port()
    kveik = str(Path(sys.executable).with_name("kveik"))
    started = time.perf_counter()
    server = subprocess.Popen(
        [kveik, "serve", model, "--port", str(port), *options],
        cwd=ROOT,
        env=clean_environment({}),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=end_with_parent,
    )
    samples: list[dict[str, int]] = []
    try:
        while not healthy(f"http://127.0.0.1:{port}/health"):
            if server.poll() is not None or time.perf_counter() - started > READY_SECONDS_MAX:
                raise RuntimeError(f"kveik serve {model} ended, or was not ready within {READY_SECONDS_MAX} s")
            with suppress(OSError, ValueError):
                samples.append(memory_of(server.pid))
            time.sleep(SAMPLE_SECONDS)
        ready = time.perf_counter() - started
        time.sleep(SETTLED_SECONDS)
        steady = memory_of(server.pid)
    finally:
        server.terminate()
        server.wait()
    return {"ready_seconds": ready, "peak": peak_of([*(one for one in samples if one), steady]), "steady": steady}


def measure(model: str, options: Sequence[str]) -> dict[str, Any]:
    """A first and a second start."""
    file = fetch_model(model)
    if file.is_file():
        for beside in file.parent.iterdir():
            drop_from_page_cache(beside)
    return {"first": start(model, options), "second": start(model, options)}


def load_table(models: dict[str, dict[str, Any]]) -> str:
    rows = [["", "", "ready after", "asked for", "own memory, peak", "steady", "ratio", "all memory, peak", "steady", "ratio"]]
    for model, starts in models.items():
        for number, which in enumerate(("first", "second")):
            asked = f"{ASKED[model][number]:g} s" if model in ASKED else "–"
            found = starts[which]
            rows.append([model, f"{which} start", f"{found['ready_seconds']:.1f} s", asked, *memory_cells(found)])
    return table(rows, words=2)


def memory_cells(found: dict[str, Any]) -> list[str]:
    """Peak, steady state and their ratio: of anonymous pages, then of all that is resident."""
    cells = []
    for peak, steady in (("RssAnon", "RssAnon"), ("VmHWM", "VmRSS")):
        high, settled = found["peak"][peak], found["steady"][steady]
        cells += [f"{high / 2**20:,.0f} MiB", f"{settled / 2**20:,.0f} MiB", f"{high / settled:.2f}"]
    return cells


def main() -> None:
    parser = parser_of("load", __doc__)
    parser.add_argument("models", nargs="*", metavar="MODEL", default=list(ASKED))
    parser.add_argument("--config", help="file of settings, handed on to kveik serve")
    given = parser.parse_args()
    facts = environment()
    options = ["--config", given.config] if given.config else []
    models = {}
    for model in given.models:
        try:
            models[model] = measure(model, options)
        except RuntimeError as error:
            print(error, file=sys.stderr)
    asked = f"Asked for: peak at most {PEAK_ASKED:g} × the steady state."
    print(f"{load_table(models)}\n\n{asked}\n\n{sentence(facts)}")
    if given.write:
        models = keep(given.write, "load", models)["load"]
        write_section(given.write / PAGE, "load", f"{load_table(models)}\n\n<sub>{asked} {sentence(facts)}</sub>")


if __name__ == "__main__":
    run(main)
