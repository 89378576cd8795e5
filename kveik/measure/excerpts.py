"""Which parts of a long text are read: windows that a model is scored on, and prompts that it goes on from. Arithmetic only."""

from __future__ import annotations

from collections.abc import Sequence

Tokens = tuple[int, ...]


def windows(text: Sequence[int], total: int, context: int, lead: Tokens = ()) -> list[Tokens]:
    """Disjoint windows of `context` tokens, `total` in all or as many as the text has, spread evenly over it.

    lead: tokens that every window begins with (the model's start token), which come on top of `total` and count for `context`.
    Every token but a window's first is foretold from those before it, so a window has two at least.
    """
    width = context - len(lead)
    total = min(total, len(text))
    count = -(-total // width)
    spare = len(text) - total
    found = []
    for number in range(count):
        first = number * width + spare * number // max(count - 1, 1)
        found.append((*lead, *text[first : first + min(width, total - number * width)]))
    return [window for window in found if len(window) >= 2]


def prompts(text: Sequence[int], count: int, length: int, lead: Tokens = ()) -> list[Tokens]:
    """`count` prompts of `length` tokens, or of what the text has, from beginnings spread evenly over it."""
    length = min(length - len(lead), len(text))
    places = [(len(text) - length) * number // max(count, 1) for number in range(count)]
    return [(*lead, *text[place : place + length]) for place in places]
