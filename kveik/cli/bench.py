"""kveik bench: measured figures of a model on this machine."""

from __future__ import annotations

import json
from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from kveik.cli.options import Settings
from kveik.cli.start import say, show
from kveik.config import EngineConfig
from kveik.measure.throughput import Throughput, measure


def throughput(_: Settings, config: EngineConfig, as_json: bool, repeats: int) -> None:
    """Prints tokens per second."""
    figures = measure(config, repeats=repeats, report=say)
    if as_json:
        show(json.dumps(asdict(figures)))
    else:
        console = Console()
        console.print(_table(figures))
        # No caption of the table, which would be wrapped at the table's width.
        console.print(_conditions(figures), highlight=False, soft_wrap=True)


def _table(figures: Throughput) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(figures.model)
    table.add_column("tokens/s", justify="right")
    table.add_row("prefill, 512 tokens", f"{figures.prefill_512:,.1f}")
    for batch in (1, 8, 16, 32):
        table.add_row(f"decode, batch {batch}", f"{getattr(figures, f'decode_{batch}'):,.1f}")
    return table


def _conditions(figures: Throughput) -> str:
    return f"{figures.arithmetic}, cache in {figures.kv_cache_dtype}; ready after {figures.ready_seconds:.1f} s"
