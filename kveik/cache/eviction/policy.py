"""Eviction policy: the protocol, and the values it is told. Knows keys and times; no memory, holders, tensors or tokens.

A *store* (the pool, or a tier below it) has one policy object. It tells the policy what happens to its records, and asks which
one to give up. Keys come in chains: a request's blocks from the first on, each key standing for everything before it too
(`keys.py`). So the key at place i is of use only to those who also find the keys before it, and a chain's end goes before its
beginning: leaves before parents.

Many blocks go at once, because a request needs many; so what is asked for each of them is asked for all of them together.

    used        a request is done with a chain: what it was like is noted, and its records may go from now on
    returned    records that were set aside may go again, and nothing is noted of it
    stored      more records are in this store (a tier: written when the store above gave them up)
    discarded   a record is gone without having been asked for: it was found damaged, or everything was forgotten
    victims     the records to give up next; they are gone from then on
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

Key = bytes
MayGo = Callable[[Key], bool]
Owner = bytes | None
"""Whose a record is: a tenant's; b"": nobody's in particular; None: everybody's, because it is public."""

Rank = tuple[int, float]
"""How little a record is worth, to compare stores' next victims: its level (`USUAL` without hints), then a policy's measure."""

Learnt = Mapping[str, NDArray[np.float64]]
"""What a policy has learnt, as arrays by name: saved by whoever has files, and given back after a restart."""


USUAL = 35
"""Level of records that nobody hints about, on a scale from 0 to 100; as in TensorRT-LLM."""


@dataclass(frozen=True, slots=True)
class Retention:
    """A request's hint about the blocks of its prompt and answer."""

    priority: int
    """0 to 100. Above usual: they stay while others can go. Below: they go first, whenever that is."""

    seconds: float
    """For how long it holds, from the end of the request, where it is above usual."""


class Visit(NamedTuple):
    """One request, when it is done."""

    keys: Sequence[Key]
    """Of its full blocks, prompt and answer."""

    stored: int
    """How many of them, from the first on, are surely in this store now. The pool knows; a tier says 0 and uses `stored`."""

    tokens_out: int
    """Length of the answer."""

    came: float
    """When it began, in seconds on any clock."""

    went: float
    """When it was done, on the same clock: from here on the age of its records counts."""

    retention: Retention | None = None
    """What the request asked for; only `priority` heeds it."""

    tenant: bytes = b""
    """Who asked; only `tenants` heeds it."""

    public: int = 0
    """How many leading keys are everybody's."""


class Chance(Protocol):
    """A seeded generator, such as `random.Random(seed)`."""

    def random(self) -> float:
        """The next number in [0, 1)."""
        ...


class Learner(Protocol):
    """Learns from what happens in a store: a policy, or the policies in it."""

    @property
    def wants_lesson(self) -> bool:
        """Enough has happened since it last learnt."""
        ...

    def learn(self, now: float) -> None:
        """Draw conclusions from what was noted. Takes milliseconds, so the caller chooses when."""
        ...

    def learnt(self) -> Learnt:
        """What it has learnt."""
        ...

    def restore(self, learnt: Learnt) -> None:
        """Take over what an earlier one has learnt. Raises ValueError, and changes nothing, where it has another shape."""
        ...


class EvictionPolicy(Protocol):
    """Which record goes first. One object per store; time and chance are given to it."""

    @property
    def learner(self) -> Learner | None:
        """The part that learns; None where nothing does."""
        ...

    @property
    def stored_count(self) -> int:
        """Records that it knows to be in the store."""
        ...

    def holds(self, key: Key) -> bool:
        """Whether it knows the record to be in the store."""
        ...

    def used(self, visit: Visit) -> None: ...

    def returned(self, keys: Sequence[Key]) -> None:
        """`keys`: any that it knows or not, of a chain the beginning first."""
        ...

    def stored(self, keys: Sequence[Key], now: float) -> None: ...

    def discarded(self, key: Key) -> None: ...

    def victims(self, count: int, may_go: MayGo, now: float) -> list[Key]:
        """The records that the store gives up, in this order; fewer than `count` where no more may go.

        One that may not go is set aside, and not asked about again before a chain with it is `used` or `returned`.
        """
        ...

    def least(self, may_go: MayGo, now: float) -> Rank | None:
        """What the next victim is worth, which stays in the store; None where none may go. Sets aside as `victims` does."""
        ...

    def worths(self, keys: Sequence[Key], now: float) -> list[float]:
        """How much it is worth to keep each, by the policy's own measure; minus infinity where it knows nothing of one."""
        ...

    def check(self, keys: Iterable[Key]) -> None:
        """Its laws, given every record in the store that it was told of: O(records). Raises AssertionError."""
        ...
