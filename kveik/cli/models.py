"""kveik models and kveik pull: models that can be had by name."""

from __future__ import annotations

from rich.console import Console, JustifyMethod
from rich.table import Table

from kveik.cli.fetch import fetch_model
from kveik.cli.start import show
from kveik.model.catalogue import CATALOGUE, DEFAULT_MODEL, fetched_file, models_folder

COLUMNS: tuple[tuple[str, JustifyMethod], ...] = (
    *(("name", "left"), ("architecture", "left"), ("parameters", "right"), ("file", "right")),
    *(("licence", "left"), ("fetched", "left")),
)
WIDE = 110


def models() -> None:
    """Prints the catalogue as a table."""
    console = Console()
    console.print(_table(wide=console.width >= WIDE))
    console.print(f"Fetched models lie in {models_folder()}.", highlight=False, soft_wrap=True)


def pull(model: str) -> None:
    """Fetches a model and prints where it is."""
    show(str(fetch_model(model)))


def _table(*, wide: bool) -> Table:
    """One row per model. A narrow terminal shows all but what a model is good for."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading, justify in COLUMNS:
        table.add_column(heading, justify=justify, no_wrap=True)
    if wide:
        table.add_column("good for")
    for entry in CATALOGUE.values():
        row = [
            *(entry.name, entry.architecture, f"{entry.parameters / 1e6:,.0f} M", f"{entry.file_bytes / 1e6:,.0f} MB"),
            *(entry.licence, "yes" if fetched_file(entry) else "no"),
        ]
        default = "the default; " if entry.name == DEFAULT_MODEL else ""
        table.add_row(*row, *([default + entry.note] if wide else []))
    return table
