"""llama.cpp, built from the sources inside the llama-cpp-python package (about 6 minutes on 2 cores), by its own benchmarks.

`llama-bench` gives the prefill, `llama-batched-bench` the decode columns; both load the file in 1 or 2 seconds, so they
are started anew for every figure.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

from benchmarks.peers.install import call, installed, stamp
from benchmarks.peers.side import TURN_SECONDS_MAX, Side, SideFailed, clean_environment
from benchmarks.peers.workload import NEW_TOKENS, PREFILL, PREFILL_TOKENS, PROMPT_TOKENS, batch_of

PACKAGE = "llama-cpp-python"
VERSION = "0.3.36"
PROGRAMS = ("llama-bench", "llama-batched-bench")
OPTIONS = (
    *("-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", "-DLLAMA_CURL=OFF", "-DLLAMA_OPENSSL=OFF"),
    *("-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF"),
)


class LlamaCpp:
    """llama.cpp as it is had."""

    name = "llama.cpp"

    def install(self, home: Path) -> None:
        """Fetch the sources and compile the two programs."""
        folder = home / self.name
        wanted = f"{PACKAGE}=={VERSION} {' '.join(OPTIONS)}\n"
        if installed(folder, wanted):
            return
        sources, log = folder / "src", folder / "install.log"
        sources.mkdir(parents=True, exist_ok=True)
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", PACKAGE, "-d", str(sources)]
        call([*pip, f"{PACKAGE}=={VERSION}"], log)
        (archive,) = sources.glob(f"llama_cpp_python-{VERSION}*.tar.gz")
        with tarfile.open(archive) as packed:
            packed.extractall(sources, filter="data")
        source = archive.with_name(archive.name.removesuffix(".tar.gz")) / "vendor" / "llama.cpp"
        call([tool("cmake"), "-S", str(source), "-B", str(folder / "build"), *OPTIONS], log)
        cores = str(os.cpu_count() or 1)
        call([tool("cmake"), "--build", str(folder / "build"), "-j", cores, "--target", *PROGRAMS], log)
        stamp(folder, wanted)

    def side(self, home: Path, model: Path, threads: int) -> Side:
        return LlamaCppSide(home / self.name / "build" / "bin", model, threads)


def tool(name: str) -> str:
    """A program of this Python's environment, else of the machine."""
    return shutil.which(name, path=str(Path(sys.executable).parent)) or name


class LlamaCppSide:
    """Its two benchmarks with a model."""

    name = LlamaCpp.name

    def __init__(self, programs: Path, model: Path, threads: int) -> None:
        self._programs = programs
        self._common = ["-m", str(model), "-t", str(threads)]

    def start(self) -> dict[str, object]:
        build = self._run("llama-bench", "-p", "1", "-n", "0", "-r", "1", "-o", "json")
        commit = json.loads(build)[0]["build_commit"]
        return {"version": f"{commit} of {PACKAGE} {VERSION}", "weights": "weights as in the file"}

    def measure(self, column: str) -> float:
        if column == PREFILL:
            said = self._run("llama-bench", "-p", str(PREFILL_TOKENS), "-n", "0", "-r", "1", "-o", "json")
            return prefill_rate(said)
        shape = ["-c", "8192", "-npp", str(PROMPT_TOKENS), "-ntg", str(NEW_TOKENS), "-npl", str(batch_of(column))]
        return decode_rate(self._run("llama-batched-bench", *shape, "--output-format", "jsonl"))

    def stop(self) -> None:
        """Nothing runs between two figures."""

    def _run(self, program: str, *arguments: str) -> str:
        command = [str(self._programs / program), *self._common, *arguments]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, check=True, timeout=TURN_SECONDS_MAX, env=clean_environment({})
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise SideFailed(f"{program}: {error}") from error
        return done.stdout


def prefill_rate(said: str) -> float:
    """Tokens per second in the JSON of llama-bench."""
    return float(json.loads(said)[0]["avg_ts"])


def decode_rate(said: str) -> float:
    """Decoded tokens per second, all sequences together, in the JSON lines of llama-batched-bench."""
    lines = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    if len(lines) != 1:
        raise SideFailed(f"llama-batched-bench gave {len(lines)} lines of figures in place of 1")
    return float(lines[0]["speed_tg"])
