"""What the commands tell a person besides their result: on stderr, so that the result can be piped."""

from __future__ import annotations

from rich.console import Console


def say(line: str) -> None:
    """One line for the person at the terminal."""
    Console(stderr=True).print(line, style="dim", highlight=False, markup=False, soft_wrap=True)
