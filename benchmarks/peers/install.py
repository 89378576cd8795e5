"""Getting the peers: each into a folder of its own, in exactly the version that is compared."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.peers.side import SideFailed

STAMP = ".installed"


def installed(folder: Path, wanted: str) -> bool:
    """Whether a folder holds exactly what is wanted, all of it."""
    stamp = folder / STAMP
    return stamp.exists() and stamp.read_text(encoding="utf-8") == wanted


def stamp(folder: Path, wanted: str) -> None:
    """Say that a folder holds what is wanted."""
    (folder / STAMP).write_text(wanted, encoding="utf-8")


def environment(folder: Path, lots: Sequence[Iterable[str]]) -> Path:
    """A virtual environment with packages, lot after lot of pip's arguments; its interpreter. Raises SideFailed."""
    python = folder / "venv" / "bin" / "python"
    wanted = "\n".join(" ".join(lot) for lot in lots) + "\n"
    if not installed(folder, wanted):
        folder.mkdir(parents=True, exist_ok=True)
        call([sys.executable, "-m", "venv", "--clear", str(folder / "venv")], folder / "install.log")
        for lot in lots:
            call([str(python), "-m", "pip", "install", "--disable-pip-version-check", *lot], folder / "install.log")
        stamp(folder, wanted)
    return python


def call(command: Sequence[str], log: Path, *, cwd: Path | None = None) -> None:
    """Run a step of an installation, its output appended to a log. Raises SideFailed."""
    with log.open("a", encoding="utf-8") as output:
        try:
            done = subprocess.run(command, cwd=cwd, stdout=output, stderr=subprocess.STDOUT, check=False)
        except OSError as error:
            raise SideFailed(f"{command[0]} cannot be run: {error}") from error
    if done.returncode != 0:
        raise SideFailed(f"{' '.join(command[:4])} … ended with {done.returncode}; see {log}")
