"""A model by whatever the user called it: found, or fetched before his eyes."""

from __future__ import annotations

import difflib
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from kveik.cli.interrupts import interruptible
from kveik.config import EngineConfig
from kveik.errors import Unreachable
from kveik.model.catalogue import CATALOGUE, PullProgress, find_model, is_hub_id, pull
from kveik.model.hub import pull_hub

STAGES = {"waiting": "waiting for another pull", "downloading": "downloading", "joining": "joining and checking"}


def fetch_model(name: str) -> Path:
    """The file or folder of a model, fetched with a progress bar on stderr where it is not here yet.

    Raises `Unreachable` where it cannot be had, saying what can.
    """
    found = find_model(name)
    if found is not None:
        return found
    if name not in CATALOGUE and not is_hub_id(name):
        raise Unreachable(_unknown(name))
    with interruptible(), PullDisplay(name) as display:
        return pull(CATALOGUE[name], progress=display.show) if name in CATALOGUE else pull_hub(name, progress=display.show)


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


class PullDisplay:
    """How far a pull is, on stderr: a bar in a terminal, a line for every quarter elsewhere."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._console = Console(stderr=True)
        self._bar = Progress(
            TextColumn("{task.fields[name]}"),
            TextColumn("[dim]{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("", name=name, total=None)
        self._said: tuple[str, int] | None = None

    def __enter__(self) -> PullDisplay:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def show(self, progress: PullProgress) -> None:
        """Take in one report."""
        stage = STAGES[progress.stage]
        if self._console.is_terminal:
            if self._said != (stage, 0):
                # Speed and time left are those of this stage, not of what came before.
                self._bar.reset(self._task, description=stage)
            self._said = (stage, 0)
            self._bar.update(self._task, completed=progress.done, total=progress.total)
            return
        quarter = 4 * progress.done // max(progress.total, 1)
        if self._said != (stage, quarter):
            self._said = (stage, quarter)
            megabytes = f"{progress.done / 1e6:,.0f} of {progress.total / 1e6:,.0f} MB"
            self._console.print(f"{self._name}: {stage}, {megabytes}", highlight=False, soft_wrap=True)
