"""Command `kveik evaluate`: the quality of a configuration against a baseline."""

from __future__ import annotations

import json
import math
from dataclasses import asdict

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from kveik.cli.command import WrongLine
from kveik.cli.options import Settings
from kveik.cli.start import interruptible, show
from kveik.config import EngineConfig
from kveik.errors import BadValue
from kveik.measure.quality import Task
from kveik.measure.quality import evaluate as measure
from kveik.measure.verdict import Evaluation, quality_sentence, sampling_sentence
from kveik.text.heldout import heldout_text
from kveik.words import counted


def evaluate(
    _: Settings,
    config: EngineConfig,
    baseline: EngineConfig,
    text: str,
    tokens: int,
    context: int | None,
    prompts: int,
    tolerance: float,
    as_json: bool,
) -> int:
    """Prints the distance of the configuration from the baseline. Returns 1 if perplexity rises by more than `tolerance`."""
    read = heldout_text(text)
    try:
        task = Task(text=read, tokens=tokens, context=context, prompts=prompts, tolerance_percent=tolerance)
    except BadValue as error:
        raise WrongLine(error.message) from error
    with interruptible(), EvaluationDisplay() as display:
        found = measure(config, baseline, task, display.show)
    show = _print_json if as_json else _print
    show(found)
    return 0 if found.within_tolerance else 1


class EvaluationDisplay:
    """Progress of a measurement on stderr: a bar in a terminal, a line for every stage elsewhere."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[count]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
            transient=True,
        )
        self._row = self._bar.add_task("", total=None, count="")
        self._said = ""

    def __enter__(self) -> EvaluationDisplay:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def show(self, stage: str, done: int, total: int) -> None:
        """Shows one report; `total` is 0 until the text has been cut into tokens."""
        if self._console.is_terminal:
            count = f"{done:,} of {counted(total, 'token', ',')}" if total else ""
            self._bar.update(self._row, description=stage, completed=done, total=total or None, count=count)
        elif stage != self._said:
            self._said = stage
            self._console.print(stage, style="dim", highlight=False, soft_wrap=True)


def _print_json(found: Evaluation) -> None:
    verdict = {"within_tolerance": found.within_tolerance, "decided": found.decided}
    show(json.dumps(_strict({**asdict(found), **verdict}), allow_nan=False))


def _strict(value: object) -> object:
    """Returns the value with null in place of an infinity or NaN, which JSON cannot write."""
    match value:
        case float() if not math.isfinite(value):
            return None
        case dict():
            return {key: _strict(part) for key, part in value.items()}
        case list() | tuple():
            return [_strict(part) for part in value]
    return value


def _print(found: Evaluation) -> None:
    console = Console()
    console.print(
        f"{found.model} on {found.origin}: {counted(found.tokens, 'token', ',')} foretold, in "
        f"{counted(found.windows, 'window')} of up to {found.context:,}, computed {found.chunk} at a time",
        highlight=False,
        soft_wrap=True,
    )
    console.print(_sides(found))
    console.print(_distances(found))
    for sentence in (quality_sentence(found), sampling_sentence(found)):
        console.print(sentence, highlight=False, markup=False, soft_wrap=True)


def _sides(found: Evaluation) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("", "baseline", "configuration"):
        table.add_column(heading, justify="right" if heading else "left", overflow="fold")
    sides = (found.baseline, found.configuration)
    for name in found.configuration.settings:
        table.add_row(name, *(side.settings[name] for side in sides))
    table.add_row("computed in, cache in", *(f"{side.dtype}, {side.kv_cache_dtype}" for side in sides))
    table.add_row("weights", *(f"{side.weight_bytes / 1e6:,.0f} MB" for side in sides))
    table.add_row("cache per token", *(f"{side.cache_bytes_per_token / 1e3:,.1f} kB" for side in sides))
    table.add_row("perplexity", *(f"{side.perplexity:,.4f}" for side in sides))
    table.add_row("entropy", *(f"{side.entropy:.4f} nats" for side in sides))
    return table


def _distances(found: Evaluation) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    kl, greedy = found.divergence, found.greedy
    table.add_row("perplexity", f"{found.loss_percent:+.2f} % ± {found.margin_percent:.2f}")
    table.add_row("same likeliest token", f"{100 * found.top1_agreement:.2f} % of positions")
    table.add_row("KL divergence, nats", f"mean {kl.mean:.2g}, median {kl.median:.2g}, p99 {kl.p99:.2g}, max {kl.max:.2g}")
    if greedy is not None:
        firsts = ", ".join("–" if first is None else str(first) for first in greedy.first_differences)
        table.add_row("greedy answers", f"{greedy.identical} of {greedy.prompts} identical")
        table.add_row("  equal at first", f"{100 * greedy.equal_share:.0f} % of their tokens")
        table.add_row("  first differences", f"{firsts}; of {counted(greedy.new_tokens, 'token')}")
    return table
