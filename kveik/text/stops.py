"""Search for stop strings in text that comes in pieces. Independent of tokens.

Aho and Corasick's automaton (Efficient string matching, CACM 18(6), 1975): its state after each character is the longest end of
the text that begins some stop string, which is at once the match test and exactly what must be held back. Cost: one step per
character of text, however many stop strings there are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

_ROOT = 0


@dataclass(frozen=True, slots=True)
class Match:
    """A stop string, complete in the text."""

    stop: str
    end: int
    """Characters of the fed piece up to and including the last one of the stop string."""


class StopFinder:
    """Reads text piece by piece; the same matches whatever the pieces.

    The stop string that is complete first wins; of several that end together, the longest.

        state     0 ── D ──> 1 ── E ──> 2 ── F ──> 3      stops "DEF", "EX"
                  └─── E ──> 4 ── X ──> 5                 state 2 falls back to 4 when no F comes: the E may begin "EX"
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._stop: list[str | None] = [None]
        for stop in stops:
            self._insert(stop)
        self._fallback = [_ROOT] * len(self._next)
        self._link()
        self._state = _ROOT

    @property
    def pending(self) -> int:
        """Characters at the end of the text so far that may still become a stop string."""
        return self._depth[self._state]

    def feed(self, text: str, *, counts: bool = True) -> Match | None:
        """Read on, up to the first match. Without `counts`, complete stop strings are passed over."""
        following, fallback, state = self._next, self._fallback, self._state
        for index, character in enumerate(text):
            while (step := following[state].get(character)) is None and state != _ROOT:
                state = fallback[state]
            state = _ROOT if step is None else step
            if (stop := self._stop[state]) is None:
                continue
            if counts:
                self._state = state
                return Match(stop, index + 1)
            # Passed over and nothing longer possible: only what may begin another stop string is still pending.
            while state != _ROOT and not following[state]:
                state = fallback[state]
        self._state = state
        return None

    def _insert(self, stop: str) -> None:
        state = _ROOT
        for character in stop:
            if character not in self._next[state]:
                self._next[state][character] = len(self._next)
                self._next.append({})
                self._depth.append(self._depth[state] + 1)
                self._stop.append(None)
            state = self._next[state][character]
        if stop:
            self._stop[state] = stop

    def _link(self) -> None:
        """Breadth first: a state falls back to the longest proper end of its text that is itself a beginning."""
        waiting = deque(self._next[_ROOT].values())
        while waiting:
            state = waiting.popleft()
            for character, child in self._next[state].items():
                target = self._fallback[state]
                while target != _ROOT and character not in self._next[target]:
                    target = self._fallback[target]
                self._fallback[child] = self._next[target].get(character, _ROOT)
                # The longest stop string that ends here is this state's own, else the one it falls back to.
                if self._stop[child] is None:
                    self._stop[child] = self._stop[self._fallback[child]]
                waiting.append(child)
