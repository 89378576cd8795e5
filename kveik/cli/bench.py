"""kveik bench: measured figures of a model on this machine."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from kveik.cli.command import WIDTH, Command
from kveik.cli.fetch import with_model
from kveik.cli.options import ENGINE, Settings, takes
from kveik.cli.say import say
from kveik.measure.throughput import Throughput, measure

app = typer.Typer(rich_markup_mode=None, add_completion=False, context_settings=WIDTH)


@app.callback()
def bench() -> None:
    """Measure this machine with a model.

    \b
    kveik bench throughput smollm2-135m
    kveik bench throughput smollm2-135m --json > figures.json
    """


@app.command(cls=Command, context_settings=WIDTH)
@takes(*ENGINE)
def throughput(
    settings: Settings,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each measurement; the median counts.")] = 3,
) -> None:
    """Measure tokens per second: a cold prompt of 512 tokens, and decoding at batch 1, 8, 16 and 32.

    \b
    kveik bench throughput smollm2-135m --threads 2
    kveik bench throughput qwen2.5-coder-0.5b --json --repeats 5

    Prompts of the decode runs have 32 tokens and get 64 new ones, greedily; prefix caching is off. What is being measured is
    told on stderr, the figures come on stdout. With smollm2-135m on 2 cores it takes less than a minute, with larger models
    longer in proportion; --repeats 1 takes a third of that.
    """
    figures = measure(with_model(settings.engine), repeats=repeats, report=say)
    if as_json:
        typer.echo(json.dumps(asdict(figures)))
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
