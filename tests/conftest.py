"""What every test may ask for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

from kveik.kernels import native
from kveik.model.catalogue import CATALOGUE, fetched_file, pull

# How long an example takes says more about the machine's other work than about the code.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

# KVEIK_ISA=avx2 pytest ... computes everything with that instruction set.
native.use_environment()


@pytest.fixture(scope="session")
def catalogue_file() -> Callable[[str], Path]:
    """Gives a catalogue model's file by name, fetching it where it is not there yet: `catalogue_file("smollm2-135m")`.

    Mark such tests `model`. `make test` has fetched the models already, so that no test spends its time on the network.
    """

    def file_of(name: str) -> Path:
        entry = CATALOGUE[name]
        return fetched_file(entry) or pull(entry, progress=lambda _: None)

    return file_of
