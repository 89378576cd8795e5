"""What a store gives up, and what the next one says to it: runs of keys of which the same is true."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

from kveik.cache.eviction.policy import Key, Owner


class Gone(NamedTuple):
    """Keys that a store has given up, the first to go first."""

    keys: Sequence[Key]
    groups: int
    """Those that had them, as bits."""

    owner: Owner
    wanted: bool = False
    """Whether they are certain to be asked for again soon, so that no filter need guess."""

    def split(self, count: int) -> tuple[Gone | None, Gone | None]:
        """The first so many keys, and the rest; None where there is none."""
        if count >= len(self.keys):
            return self, None
        rest = self._replace(keys=self.keys[count:])
        return self._replace(keys=self.keys[:count]) if count else None, rest


class Answer(NamedTuple):
    """What a tier says to offers."""

    writes: list[Gone]
    """What it takes, and of which groups the records."""

    refused: list[Gone]
    """What is not there afterwards, so that somebody else may take it."""

    victims: list[Gone]
    """What goes for it, and has gone from here already, also where there is no room after all."""


def in_runs(keys: Sequence[Key], kinds: Sequence[tuple[int, Owner]], *, wanted: bool = False) -> list[Gone]:
    """Neighbours of one kind (groups and owner) together; none of those that no group has."""
    if keys and kinds.count(kinds[0]) == len(kinds):
        return [Gone(keys, *kinds[0], wanted)] if kinds[0][0] else []
    gone, place = list[Gone](), 0
    for (groups, owner), run in groupby(kinds):
        count = len(list(run))
        if groups:
            gone.append(Gone(keys[place : place + count], groups, owner, wanted))
        place += count
    return gone
