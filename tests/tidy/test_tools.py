"""Style, types and the stairs, by the tools that know them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.tidy.sources import ROOT


def complaints_of(*command: str) -> str:
    """What a tool of this environment has to say; empty when it is content."""
    # Beside the interpreter that runs the tests, so that the environment need not be activated.
    tool = Path(sys.executable).parent / command[0]
    done = subprocess.run([tool, *command[1:]], cwd=ROOT, capture_output=True, text=True, check=False, timeout=240)
    return "" if done.returncode == 0 else done.stdout + done.stderr


def test_ruff_is_content() -> None:
    assert complaints_of("ruff", "check", ".") == ""


def test_ruff_would_format_nothing() -> None:
    assert complaints_of("ruff", "format", "--check", ".") == ""


def test_mypy_is_content() -> None:
    assert complaints_of("mypy") == ""


def test_the_import_contracts_are_kept() -> None:
    assert complaints_of("lint-imports") == ""
