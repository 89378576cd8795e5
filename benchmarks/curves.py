"""Curves over a logarithmic axis as SVG, drawn without a library: panels side by side, each curve named at its end."""

from __future__ import annotations

import math
from dataclasses import dataclass
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 440, 320
LEFT, RIGHT, TOP, BOTTOM = 58, 84, 34, 48


@dataclass(frozen=True, slots=True)
class Curve:
    """Points (x, y), ascending in x."""

    name: str
    colour: str
    points: list[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Panel:
    """Curves over one pair of axes."""

    title: str
    curves: list[Curve]


class Axes:
    """From numbers to places in a panel whose left edge is at `offset`."""

    def __init__(self, panel: Panel, offset: float) -> None:
        xs = [x for curve in panel.curves for x, _ in curve.points]
        self.low, self.high = math.log10(min(xs)), math.log10(max(xs))
        # The axis ends with the tenth above the highest point.
        self.top = math.ceil(10 * max(y for curve in panel.curves for _, y in curve.points)) / 10
        self.offset = offset

    def x(self, value: float) -> float:
        share = (math.log10(value) - self.low) / (self.high - self.low)
        return self.offset + LEFT + share * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - value / self.top * (HEIGHT - TOP - BOTTOM)


def text(x: float, y: float, words: str, *, anchor: str = "middle", colour: str = "#666666", turned: bool = False) -> str:
    turn = f' transform="rotate(-90 {x:.1f} {y:.1f})"' if turned else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}"{turn}>{escape(words)}</text>'


def line(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="#8888884d"/>'


def grid(axes: Axes, panel: Panel, x: str, y: str) -> list[str]:
    """Rules, their numbers, and what is on the axes."""
    left, right, floor = axes.offset + LEFT, axes.offset + WIDTH - RIGHT, HEIGHT - BOTTOM
    parts = [text((left + right) / 2, 20, panel.title, colour="#444444")]
    for tenth in range(round(axes.top * 10) + 1):
        level = axes.y(tenth / 10)
        parts += [line(left, level, right, level), text(left - 6, level + 4, f"{tenth / 10:.1f}", anchor="end")]
    for value in sorted({point for curve in panel.curves for point, _ in curve.points}):
        place = axes.x(value)
        # Five digits side by side would run into each other.
        number = f"{value:,.0f}" if value < 10_000 else f"{value / 1000:g}k"
        parts += [line(place, TOP, place, floor), text(place, floor + 16, number)]
    middle = (TOP + floor) / 2
    return [*parts, text((left + right) / 2, floor + 36, x), text(axes.offset + 16, middle, y, turned=True)]


def names(axes: Axes, curves: list[Curve]) -> list[str]:
    """Each curve's name beside its end, moved down where two would meet."""
    parts, free = [], 0.0
    for curve in sorted(curves, key=lambda one: -one.points[-1][1]):
        x, y = curve.points[-1]
        free = max(axes.y(y) + 4, free)
        parts.append(text(axes.x(x) + 8, free, curve.name, anchor="start", colour=curve.colour))
        free += 14
    return parts


def drawing(panels: list[Panel], *, x: str, y: str) -> str:
    """An SVG document; readable on a light and on a dark page."""
    parts = []
    for number, panel in enumerate(panels):
        axes = Axes(panel, number * WIDTH)
        parts += grid(axes, panel, x, y)
        for curve in panel.curves:
            points = " ".join(f"{axes.x(a):.1f},{axes.y(b):.1f}" for a, b in curve.points)
            parts.append(f'<polyline points="{points}" fill="none" stroke="{curve.colour}" stroke-width="2"/>')
            parts += [
                f'<circle cx="{axes.x(a):.1f}" cy="{axes.y(b):.1f}" r="3" fill="{curve.colour}"/>' for a, b in curve.points
            ]
        parts += names(axes, panel.curves)
    box = f'viewBox="0 0 {WIDTH * len(panels)} {HEIGHT}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {box} font-family="sans-serif" font-size="12">'
    return "\n".join([head, *parts, "</svg>\n"])
