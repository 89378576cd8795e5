"""The native kernels: whether they are there, and which instruction set they use. Everything native is reached through here."""

from __future__ import annotations

import importlib
import os
from types import ModuleType

import torch

from kveik.errors import BadValue

ENVIRONMENT = "KVEIK_ISA"
"""Forces an instruction set: for tests, and to find a fault."""


def _load() -> tuple[ModuleType | None, str]:
    """The module, or None and why it is missing."""
    # torch comes first: its copy of libgomp then serves both, and the process has one pool of threads.
    assert torch.__version__
    try:
        return importlib.import_module("kveik.kernels._native"), ""
    except ImportError as error:
        return None, str(error)


module, missing_because = _load()
"""The compiled module, None where the package was installed without a compiler."""


def isas() -> tuple[str, ...]:
    """Instruction sets that this processor can run, from the slowest to the fastest; empty without the module."""
    return () if module is None else tuple(module.isas_available())


def isa() -> str | None:
    """The instruction set in use; None without the module."""
    return None if module is None else str(module.isa_in_use())


def use(name: str) -> None:
    """Compute with another instruction set from now on. Raises BadValue where this processor lacks it."""
    if module is None:
        raise BadValue(f"{ENVIRONMENT} is '{name[:40]}', but the native kernels are not installed: {missing_because}.")
    if not module.use_isa(name):
        raise BadValue(f"{ENVIRONMENT} is '{name[:40]}'; this processor can run {', '.join(isas())}.")


def use_environment() -> None:
    """Obey KVEIK_ISA where it is set. Raises BadValue where this processor lacks it."""
    if name := os.environ.get(ENVIRONMENT):
        use(name)


def described() -> str:
    """One line for the log."""
    if module is None:
        return f"no native kernels ({missing_because}): computing with torch, which is slower"
    return f"native kernels for {isa()}, of {', '.join(isas())}"
