"""One test case that goes through many seeds, and names the one that failed."""

from __future__ import annotations

import functools
import inspect
import os
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

VARIABLE = "KVEIK_SEED"
"""Set it to run one seed alone."""


def over_seeds(count: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Calls the test with each `seed` below the count; to pytest it is one test without that argument.

    Each seed has its own folder under `tmp_path`, and what it patches with `monkeypatch` is undone after it. Other fixtures are
    shared by all seeds: make in the test whatever one seed must not see of another.
    """

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def every_seed(**arguments: Any) -> None:
            alone = os.environ.get(VARIABLE)
            for seed in range(count) if alone is None else [int(alone)]:
                try:
                    run_seed(test, seed, arguments)
                except (Exception, pytest.fail.Exception) as error:
                    raise AssertionError(f"seed {seed} of {count} fails; it alone: {command_for(seed)}") from error

        signature = inspect.signature(test)
        others = [parameter for name, parameter in signature.parameters.items() if name != "seed"]
        assert len(others) == len(signature.parameters) - 1, f"{test.__name__} takes no seed"
        every_seed.__signature__ = signature.replace(parameters=others)  # type: ignore[attr-defined]  # functions have it
        return every_seed

    return decorate


def run_seed(test: Callable[..., None], seed: int, arguments: dict[str, Any]) -> None:
    own = dict(arguments)
    folder = arguments.get("tmp_path")
    if isinstance(folder, Path):
        own["tmp_path"] = folder / f"seed-{seed}"
        own["tmp_path"].mkdir()
    patch = arguments.get("monkeypatch")
    if not isinstance(patch, pytest.MonkeyPatch):
        test(seed=seed, **own)
        return
    with patch.context() as own["monkeypatch"]:
        test(seed=seed, **own)


def command_for(seed: int) -> str:
    """Replays one seed of the test that runs now."""
    test = os.environ["PYTEST_CURRENT_TEST"].rpartition(" ")[0]
    return f"{VARIABLE}={seed} .venv/bin/pytest -m '' {shlex.quote(test)}"
