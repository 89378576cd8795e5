"""Figures that are kept: one JSON file, and sections of a page that are made from it.

<!-- figures: NAME -->
… written by the scripts …
<!-- end of figures: NAME -->
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.facts import sentence

FIGURES = "performance.json"
PAGE = "PERFORMANCE.md"


def read(folder: Path) -> dict[str, Any]:
    """All figures that a folder has; empty where it has none."""
    file = folder / FIGURES
    return dict(json.loads(file.read_text(encoding="utf-8"))) if file.exists() else {}


def keep(folder: Path, topic: str, figures: dict[str, Any]) -> dict[str, Any]:
    """Put figures under a topic, each in place of the one of the same name; all of the folder's figures."""
    everything = read(folder)
    everything.setdefault(topic, {}).update(figures)
    text = json.dumps(everything, indent=1, ensure_ascii=False, sort_keys=True)
    (folder / FIGURES).write_text(text + "\n", encoding="utf-8")
    return everything


def write_section(page: Path, name: str, text: str) -> None:
    """Replace what stands between a section's marks. Raises ValueError where the page does not have both."""
    start, end = f"<!-- figures: {name} -->\n", f"<!-- end of figures: {name} -->\n"
    before, found, rest = page.read_text(encoding="utf-8").partition(start)
    _, found_end, after = rest.partition(end)
    if not found or not found_end:
        raise ValueError(f"{page} has no section for the figures '{name}': the lines {start!r} and {end!r}.")
    page.write_text(f"{before}{start}{text.strip()}\n{end}{after}", encoding="utf-8")


def publish(
    text: str, facts: dict[str, object], folder: Path | None, *, name: str, figures: dict[str, Any], page: str = PAGE
) -> None:
    """How a measurement ends: what was found, and on what machine, is printed.

    With a folder, the figures are kept there under this name, and the page's section of this name says the same.
    """
    # Kept first: the reader of the output may have gone.
    if folder is not None:
        keep(folder, name, figures | {"environment": facts})
        write_section(folder / page, name, f"{text}\n\n{footnote(facts)}")
    print(f"{text}\n\n{sentence(facts)}")


def footnote(facts: dict[str, object]) -> str:
    """What was measured on, as it stands under figures."""
    return f"<sub>{sentence(facts)}</sub>"


def table(rows: list[list[str]], *, words: int = 1) -> str:
    """A Markdown table; the first row is its head, the first `words` columns are set to the left, the others to the right."""
    rule = ["---" if column < words else "---:" for column in range(len(rows[0]))]
    return "\n".join(f"| {' | '.join(row)} |" for row in [rows[0], rule, *rows[1:]])


def short(value: float) -> str:
    """A rate in as many digits as a noisy measurement deserves."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"
