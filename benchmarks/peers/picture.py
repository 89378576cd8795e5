"""The comparison as a picture, SVG written by hand: a bar for how many times the best peer of a column we reach.

One panel a model, one bar a column, a thin line from the lowest round to the highest, a line at 1 (the best peer) and a short
one at what is asked for. Colours follow the reader's light or dark page.
"""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from benchmarks.peers.figures import ASKED, Ratio, ratio_to_best
from benchmarks.peers.tables import title
from benchmarks.peers.workload import COLUMNS

WIDTH, LEFT, RIGHT = 800, 140, 130
BAR, GAP, HEAD, FOOT = 16, 6, 34, 44
STYLE = """
text { font: 12px system-ui, sans-serif; fill: #1f2328 }
.model { font-weight: 600; font-size: 13px } .faint { fill: #59636e }
.right { text-anchor: end } .middle { text-anchor: middle }
.won { fill: #2f7d4f } .lost { fill: #b3541e } .span { stroke: #1f2328; stroke-width: 1.5; opacity: .6 }
.grid { stroke: #d1d9e0 } .peer { stroke: #1f2328; stroke-width: 1.5 } .asked { stroke: #1f2328; stroke-width: 2.5 }
@media (prefers-color-scheme: dark) {
  text { fill: #f0f6fc } .faint { fill: #9198a1 } .grid { stroke: #3d444d } .span, .peer, .asked { stroke: #f0f6fc }
  .won { fill: #4aa872 } .lost { fill: #d97742 }
}
"""


def picture(models: Mapping[str, Mapping[str, Any]]) -> str:
    """models: as `model_table` takes them, in the order of the panels."""
    ratios = {model: ratios_of(measured) for model, measured in models.items()}
    asked = [value for model in models for value in ASKED.get(model, {}).values()]
    top = max([1.0, *asked, *(ratio.high for rows in ratios.values() for ratio in rows.values())])
    scale = (WIDTH - LEFT - RIGHT) / top
    parts, y = [], 10
    for model, rows in ratios.items():
        parts.append(panel(model, rows, y, scale))
        y += HEAD + len(rows) * (BAR + GAP) + 12
    height = y + FOOT
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" role="img">\n'
        f"<title>Tokens per second of kveik, in multiples of the best peer</title>\n<style>{STYLE}</style>\n"
        f"{grid(y, scale, top)}\n{''.join(parts)}{legend(y + 34)}</svg>\n"
    )


def ratios_of(measured: Mapping[str, Any]) -> dict[str, Ratio]:
    """Column -> our ratio to its best peer, in the order of the table."""
    found = {column: ratio_to_best(measured["columns"].get(column, {})) for column in COLUMNS}
    return {column: ratio for column, ratio in found.items() if ratio is not None}


def panel(model: str, rows: Mapping[str, Ratio], y: int, scale: float) -> str:
    """One model's bars; y: of its upper edge."""
    lines = [f'<text class="model" x="10" y="{y + 20}">{escape(model)}</text>\n']
    for index, (column, ratio) in enumerate(rows.items()):
        lines.append(bar(model, column, ratio, y + HEAD + index * (BAR + GAP), scale))
    return "".join(lines)


def bar(model: str, column: str, ratio: Ratio, y: int, scale: float) -> str:
    """One column: its name, bar, span of rounds, mark of what is asked for, and the figure in words."""
    asked = ASKED.get(model, {}).get(column, 1.0)
    kind = "won" if ratio.median >= asked else "lost"
    low, end, high, mark = (LEFT + value * scale for value in (ratio.low, ratio.median, ratio.high, asked))
    middle = y + BAR / 2
    return (
        f'<text class="right" x="{LEFT - 8}" y="{y + 12}">{title(column)}</text>'
        f'<rect class="{kind}" x="{LEFT}" y="{y}" width="{end - LEFT:.1f}" height="{BAR}"/>'
        f'<line class="span" x1="{low:.1f}" x2="{high:.1f}" y1="{middle}" y2="{middle}"/>'
        f'<line class="asked" x1="{mark:.1f}" x2="{mark:.1f}" y1="{y - 2}" y2="{y + BAR + 2}"/>'
        f'<text x="{max(high, end, mark) + 6:.1f}" y="{y + 12}">{ratio.median:.2f} '
        f'<tspan class="faint">× {escape(ratio.best)}</tspan></text>\n'
    )


def grid(bottom: int, scale: float, top: float) -> str:
    """A line for every half, and a strong one at 1, where the best peer is."""
    lines = []
    for half in range(int(top * 2) + 1):
        x = LEFT + half / 2 * scale
        kind = "peer" if half == 2 else "grid"
        lines.append(f'<line class="{kind}" x1="{x:.1f}" x2="{x:.1f}" y1="30" y2="{bottom}"/>')
        lines.append(f'<text class="faint middle" x="{x:.1f}" y="{bottom + 14}">{half / 2:g}</text>')
    return "".join(lines)


def legend(y: int) -> str:
    return (
        f'<text class="faint" x="10" y="{y}">times the best peer of the column (line at 1); thick marks: asked for; '
        "thin lines: lowest to highest round</text>\n"
    )
