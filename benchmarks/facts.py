"""Conditions of a measurement: processor, threads, versions, and load of the machine."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

from kveik.machine.limits import cpu_threads, memory_available

ROOT = Path(__file__).parents[1]
FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8")


def environment() -> dict[str, object]:
    """Facts of this machine and of what is installed, as they go into every file of figures."""
    cpu = processor()
    return {
        "when": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "cpu": cpu.get("model name", platform.processor()),
        "flags": [flag for flag in FLAGS if flag in cpu.get("flags", "").split()],
        "cpus_allowed": len(os.sched_getaffinity(0)),
        "threads": threads_by_default(),
        "memory_available_gib": round(memory_available(Path("/")).bytes / 2**30, 1),
        "load_average": round(os.getloadavg()[0], 2),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": metadata.version("torch"),
        "kveik": f"{metadata.version('kveik')} {revision()}".strip(),
    }


def processor() -> dict[str, str]:
    """What /proc/cpuinfo says of the first processor."""
    first = Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("\n\n")[0]
    pairs = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def threads_by_default() -> int:
    """As many as kveik itself would take."""
    return cpu_threads(Path("/"), os.sched_getaffinity(0)).threads


def revision() -> str:
    """The commit, with a + where files differ from it; empty outside a repository."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty=+", "--exclude=*"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def sentence(facts: dict[str, object]) -> str:
    """The facts in a line, for pages and terminals."""
    flags = facts["flags"]
    assert isinstance(flags, list)
    return (
        f"{facts['when']}; {facts['cpu']} ({', '.join(flags)}), {facts['cpus_allowed']} CPUs, {facts['threads']} threads, "
        f"{facts['memory_available_gib']} GiB free, load average {facts['load_average']}; Linux {facts['kernel']}, "
        f"Python {facts['python']}, torch {facts['torch']}, kveik {facts['kveik']}"
    )
