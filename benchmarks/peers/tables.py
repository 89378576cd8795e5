"""The comparison as tables: for a terminal and for a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from benchmarks.pages import short, table
from benchmarks.peers.figures import ASKED, ratio_to_best
from benchmarks.peers.kveik_side import NAME as OURS
from benchmarks.peers.workload import COLUMNS, PREFILL, PREFILL_TOKENS, batch_of


def title(column: str) -> str:
    """A column as tables name it."""
    return f"prefill {PREFILL_TOKENS}" if column == PREFILL else f"batch {batch_of(column)}"


def rate(rounds: Sequence[float]) -> str:
    """Median of the rounds with the lowest and the highest; – for none."""
    if not rounds:
        return "–"
    span = f" ({short(min(rounds))}–{short(max(rounds))})" if len(rounds) > 1 else ""
    return short(median(rounds)) + span


def model_table(model: str, measured: Mapping[str, Any]) -> str:
    """Rows: engines, then our ratio to the best peer of each column, then the ratio asked for."""
    columns = measured["columns"]
    names = [column for column in COLUMNS if column in columns]
    rows = [[model, *map(title, names), "ready after"]]
    for engine, facts in measured["engines"].items():
        ready = facts.get("ready_seconds")
        rates = [rate(columns[column].get(engine, [])) for column in names]
        rows.append([_engine(engine, facts), *rates, "–" if ready is None else f"{ready:.1f} s"])
    rows.append(["**times the best peer**", *(_ratio(columns[column]) for column in names), ""])
    if model in ASKED:
        rows.append(["asked for", *(f"{ASKED[model][column]:g}" for column in names), ""])
    return table(rows)


def _engine(name: str, facts: Mapping[str, Any]) -> str:
    label = f"**{OURS}**" if name == OURS else name
    return f"{label} {facts['version']}; {facts['weights']}"


def _ratio(rates: Mapping[str, Sequence[float]]) -> str:
    ratio = ratio_to_best(rates)
    if ratio is None:
        return "–"
    return f"**{ratio.median:.2f}** ({ratio.low:.2f}–{ratio.high:.2f}) × {ratio.best}"


def missed(model: str, measured: Mapping[str, Any]) -> list[str]:
    """What is below what is asked for, one sentence a column."""
    sentences = []
    for column, asked in ASKED.get(model, {}).items():
        ratio = ratio_to_best(measured["columns"].get(column, {}))
        if ratio is not None and ratio.median < asked:
            sentences.append(f"{model}, {title(column)}: {ratio.median:.2f} of the {asked:g} asked for, against {ratio.best}")
    return sentences
