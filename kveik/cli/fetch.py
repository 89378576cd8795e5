"""Models by name or path: found, or fetched."""

from __future__ import annotations

import difflib
import importlib
from dataclasses import replace
from pathlib import Path

from kveik.config import EngineConfig
from kveik.errors import Unreachable
from kveik.model.catalogue import CATALOGUE, find_model, is_hub_id


def fetch_model(name: str) -> Path:
    """The file or folder of a model, fetched with a progress bar on stderr where it is not here yet.

    Raises `Unreachable` where it cannot be had, saying what can.
    """
    found = find_model(name)
    if found is not None:
        return found
    if name not in CATALOGUE and not is_hub_id(name):
        raise Unreachable(_unknown(name))
    # Late because it takes a third of a second, which a name that is here or unknown should not cost.
    path: Path = importlib.import_module("kveik.cli.download").download(name)
    return path


def with_model(config: EngineConfig) -> EngineConfig:
    """The same configuration once its model is here: fetched where it was not, a hub id replaced by the folder it lies in."""
    path = fetch_model(config.model.model)
    if config.model.model in CATALOGUE:
        return config
    return replace(config, model=replace(config.model, model=str(path)))


def _unknown(name: str) -> str:
    near = difflib.get_close_matches(name, CATALOGUE, n=1)
    hint = f" Did you mean {near[0]}?" if near else ""
    return (
        f"There is no model '{name[:100]}': no file or folder of that name is here, and the catalogue has "
        f"{', '.join(CATALOGUE)} (kveik models).{hint}"
    )
