"""One engine in the comparison: a process of its own, asked for one column at a time, asleep while others are measured."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from benchmarks.peers.workload import heard

ROOT = Path(__file__).parents[2]
READY_SECONDS_MAX = 600
TURN_SECONDS_MAX = 180
PR_SET_PDEATHSIG = 1


class SideFailed(Exception):
    """An engine did not start, did not answer, or does not take the model."""


class Side(Protocol):
    """An engine with a model."""

    name: str

    def start(self) -> dict[str, object]:
        """Load the model; facts of the engine. Raises SideFailed."""
        ...

    def measure(self, column: str) -> float:
        """Tokens per second of a column, measured once. Raises SideFailed."""
        ...

    def stop(self) -> None: ...


class Peer(Protocol):
    """An engine that can be had."""

    name: str

    def install(self, home: Path) -> None:
        """Put it into a folder, where it is not there yet. Raises SideFailed."""
        ...

    def side(self, home: Path, model: Path, threads: int) -> Side: ...


class Resident:
    """An engine that stays loaded between its turns. Its processes are stopped meanwhile: they take no time of others."""

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self.name = name
        self._command = command
        self._environment = environment
        self._log = log
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> dict[str, object]:
        started = time.perf_counter()
        with self._log.open("w", encoding="utf-8") as log:
            self._process = subprocess.Popen(
                self._command,
                env=clean_environment(self._environment),
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                errors="replace",
                start_new_session=True,
                preexec_fn=end_with_parent,
            )
        facts = self._hear(READY_SECONDS_MAX)
        ready = time.perf_counter() - started
        self._hear(TURN_SECONDS_MAX)
        self._signal(signal.SIGSTOP)
        return {**facts, "ready_seconds": round(ready, 1)}

    def measure(self, column: str) -> float:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        self._signal(signal.SIGCONT)
        try:
            process.stdin.write(column + "\n")
            process.stdin.flush()
        except BrokenPipeError as error:
            raise SideFailed(f"{self.name} has ended; see {self._log}") from error
        rate = self._hear(TURN_SECONDS_MAX)["rate"]
        assert isinstance(rate, float)
        self._signal(signal.SIGSTOP)
        return rate

    def stop(self) -> None:
        if self._process is None:
            return
        # The group, for engines start processes of their own. A stopped one sees no other signal than this.
        self._signal(signal.SIGKILL)
        self._process.communicate()

    def _signal(self, number: int) -> None:
        assert self._process is not None
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            return

    def _hear(self, seconds: float) -> dict[str, object]:
        """The next line that is meant for us. Ends the engine, and raises SideFailed, when it takes too long."""
        assert self._process is not None
        assert self._process.stdout is not None
        timer = threading.Timer(seconds, self._signal, [signal.SIGKILL])
        timer.start()
        try:
            for line in self._process.stdout:
                said = heard(line)
                if said is not None:
                    return said
        finally:
            timer.cancel()
        raise SideFailed(f"{self.name} ended, or gave no answer within {seconds:.0f} s; see {self._log}")


def end_with_parent() -> None:
    """Have the kernel end this process when the one that started it ends, however: a stopped one would stay for ever."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def clean_environment(more: Mapping[str, str]) -> dict[str, str]:
    """This process's environment without what it says of threads, and with the project importable."""
    foreign = ("OMP_", "GOMP_", "KMP_", "MKL_", "VLLM_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    return {**kept, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", **more}
