"""Download of a model, with its progress on stderr. Imported only where something is fetched: the hub's library is slow."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from kveik.cli.start import interruptible
from kveik.model.catalogue import CATALOGUE, PullProgress, pull
from kveik.model.hub import pull_hub

STAGES = {"waiting": "waiting for another pull", "downloading": "downloading", "joining": "joining and checking"}


def download(name: str) -> Path:
    """The file or folder of a catalogue model or a hub id, once it is here."""
    with interruptible(), PullDisplay(name) as display:
        return pull(CATALOGUE[name], progress=display.show) if name in CATALOGUE else pull_hub(name, progress=display.show)


class PullDisplay:
    """Progress of a pull on stderr: a bar in a terminal, a line for every quarter elsewhere."""

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
