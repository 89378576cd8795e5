"""kveik's own side of the comparison."""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.peers.side import Resident, Side
from kveik.cli.main import bound_spinning

NAME = "kveik"


def kveik_side(home: Path, model: Path, threads: int, settings: Path | None) -> Side:
    """settings: a file as `--config` takes it, for what is not to have its default."""
    more = [str(settings.resolve())] if settings else []
    command = [sys.executable, "-m", "benchmarks.peers.inside.kveik_engine", str(model), str(threads), *more]
    # As the command line does it for itself before torch is loaded.
    environment: dict[str, str] = {}
    bound_spinning(environment)
    return Resident(NAME, command, environment, home / "kveik.log")
