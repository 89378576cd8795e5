"""Facts about the pool that a lower store may use: evicted, inserted, used and invalidated contents, as frozen values."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

from kveik.cache.eviction.policy import Key, Owner, Visit


class Gone(NamedTuple):
    """A run of keys that a store has evicted together, the first to go first."""

    keys: Sequence[Key]
    groups: int
    """Layer groups that had them, as bits."""

    owner: Owner
    wanted: bool = False
    """Certain to be asked for again soon, so that a filter need not guess."""

    def split(self, count: int) -> tuple[Gone | None, Gone | None]:
        """The first so many keys, and the rest; None where there is none."""
        if count >= len(self.keys):
            return self, None
        rest = self._replace(keys=self.keys[count:])
        return self._replace(keys=self.keys[:count]) if count else None, rest


class Evicted(NamedTuple):
    """The pool has evicted these. Their blocks are not written before the next step."""

    runs: Sequence[Gone]
    keys: Sequence[Key]
    """The keys of all runs, and perhaps some that no run has."""

    blocks: Sequence[Sequence[int]]
    """Per group, the block of each key; -1 where the group had none."""


class Inserted(NamedTuple):
    """The pool has a new content, with all slots of its blocks written."""

    key: Key
    groups: int
    """Groups in which it is new, as bits."""

    owner: Owner
    blocks: tuple[int, ...]
    """Per group, its block; -1 where the group has none."""


class Used(NamedTuple):
    """A request has ended."""

    visit: Visit


class Invalidated(NamedTuple):
    """These contents are wrong, wherever they are stored."""

    keys: Sequence[Key]


Fact = Evicted | Inserted | Used | Invalidated


def in_runs(keys: Sequence[Key], kinds: Sequence[tuple[int, Owner]], *, wanted: bool = False) -> list[Gone]:
    """Joins neighbours of one kind (groups and owner) into runs; leaves out keys that no group has."""
    if keys and kinds.count(kinds[0]) == len(kinds):
        return [Gone(keys, *kinds[0], wanted)] if kinds[0][0] else []
    gone, place = list[Gone](), 0
    for (groups, owner), run in groupby(kinds):
        count = len(list(run))
        if groups:
            gone.append(Gone(keys[place : place + count], groups, owner, wanted))
        place += count
    return gone
