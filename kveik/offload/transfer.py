"""What the directory wants done, as frozen values: printed, simulated and tested without a single byte being moved.

Orders are carried out in the order in which they are given, as far as a tier's own order goes; what became of a spill or a load
is told to the directory later.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from kveik.cache.eviction.policy import Key


class Spill(NamedTuple):
    """Copy a record. The source has it until a later order, or the pool's next write into the block."""

    key: Key
    group: int
    source: int | None
    """Number of the tier; None: the pool."""

    target: int
    block: int | None = None
    """Of the pool, where the pool is the source."""


class Delete(NamedTuple):
    """Remove a record from a tier; it is not looked for any more."""

    key: Key
    group: int
    tier: int


@dataclass(frozen=True, slots=True)
class Clear:
    """Remove all records from a tier."""

    tier: int


Order = Spill | Delete | Clear


@dataclass(frozen=True, slots=True)
class Fetch:
    """Load a record into the pool."""

    key: Key
    group: int
    place: int
    """Of its block in the sequence."""

    tier: int


@dataclass(frozen=True, slots=True)
class Load:
    """Copy records into blocks of the pool, which nobody else reads or writes before each has ended."""

    job: int
    """Never used twice."""

    fetches: tuple[Fetch, ...]
    blocks: tuple[int, ...]
    """Per fetch, of its group."""

    deadline: float
    """Seconds on the engine's clock, after which nobody wants them any more."""


@dataclass(frozen=True, slots=True)
class Cancel:
    """Write nothing more for a job. Its blocks may belong to somebody else from the next write on."""

    job: int


@dataclass(frozen=True, slots=True)
class Probe:
    """Ask a tier in which others write too what it has of these, of all groups."""

    job: int
    tier: int
    keys: tuple[Key, ...]
    deadline: float


Transfer = Order | Load | Cancel | Probe
"""All that is done below the pool, in order: a load may write into a block that a spill before it has read."""


def around_copies(transfers: Iterable[Transfer]) -> tuple[list[Transfer], list[Load]]:
    """What of one plan is to be done before its copies of blocks, and the loads that begin after them.

    A copy overwrites what a spill reads. A load overwrites what a copy reads: nobody holds the block that a partial hit is
    copied from, so a load of the same plan may take it, and it writes as soon as it has begun.
    """
    before: list[Transfer] = []
    loads: dict[int, Load] = {}
    for one in transfers:
        if isinstance(one, Load):
            loads[one.job] = one
        elif not isinstance(one, Cancel) or loads.pop(one.job, None) is None:
            before.append(one)
    return before, list(loads.values())
