"""Two OpenMP runtimes in one process mean two thread pools that fight for the same cores."""

from __future__ import annotations

import subprocess
import sys

CODE = r"""
import importlib, pkgutil, re, sys
# gguf imports sentencepiece where it is installed, and that brings a libgomp of its own, for training. Here it is a tool of the
# tests; whoever installs kveik alone does not have it.
sys.modules["sentencepiece"] = None
import kveik, torch
for module in pkgutil.walk_packages(kveik.__path__, "kveik."):
    importlib.import_module(module.name)
torch.ones(64, 64) @ torch.ones(64, 64)
with open("/proc/self/maps") as maps:
    files = {line.split()[-1] for line in maps if re.search(r"/lib(g|i|)omp[0-9]*(-[0-9a-f]+)?\.so", line)}
print(*sorted(files), sep="\n")
"""


def test_only_one_openmp_runtime_is_loaded() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True, timeout=120)
    assert len(done.stdout.split()) == 1, done.stdout
