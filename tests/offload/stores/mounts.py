"""File systems of a test's own, where the machine lets us mount."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


def mounted(folder: Path, *options: str) -> bool:
    """Whether this machine lets us mount."""
    folder.mkdir(exist_ok=True)
    if os.geteuid() or not shutil.which("mount"):
        return False
    return subprocess.run(["mount", *options, str(folder)], capture_output=True, check=False).returncode == 0


@contextmanager
def small_disk_at(folder: Path, size: str = "1m") -> Iterator[Path]:
    """A real file system of so many bytes; the test is skipped where there can be none."""
    if not mounted(folder, "-t", "tmpfs", "-o", f"size={size}", "tmpfs"):
        pytest.skip("nothing can be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def remount(folder: Path, how: str) -> None:
    """`ro` or `rw`."""
    subprocess.run(["mount", "-o", f"remount,{how}", str(folder)], check=True)
