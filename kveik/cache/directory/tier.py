"""Which records one tier holds, within a bound in bytes, and what goes for what. Knows no other tier.

A record is (key, group); the records of one key, of all layer groups, come and go together as far as the groups have them, and
are written as a set of bits: bit g for group g. What is known of a key's records:

             offer, taken            stored
    absent ───────────────> storing ─────────> stored ──> absent     as a victim, or gone, or lost with the tier
              failed: back to absent               not a victim while it is pinned: somebody is loading it
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from kveik.cache.directory.write_filter import FACTOR, WriteFilter
from kveik.cache.eviction.policy import EvictionPolicy, Key, Owner, Visit
from kveik.cache.eviction.tenants import TenantPolicy

Writes = Literal["filtered", "write-through", "second-touch"]
"""When a record is written: when the tier above gives it up and it is worth it; as soon as it is there at all; when the tier
above gives it up and it was used twice."""

TOUCHES_KNOWN = 1 << 17
"""Keys of which it is known whether they were used once or more often, where that matters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierSpec:
    """One tier, in numbers."""

    name: str
    capacity_bytes: int
    record_bytes: tuple[int, ...]
    """Per layer group, what one record takes there."""

    writes: Writes = "filtered"
    factor: float | None = FACTOR
    """Of the filter; None: everything that is offered is written. For policies that measure worth."""

    lasts: bool = False
    """Whether it outlives the process."""

    ours: bool = True
    """Whether we alone write and delete there; otherwise it has a bound of its own, and ours is on what we know of it."""

    def bytes_of(self, groups: int) -> int:
        total = 0
        for size in self.record_bytes:
            if groups & 1:
                total += size
            groups >>= 1
        return total


@dataclass(slots=True, eq=False)
class Held:
    """What is known of one key's records."""

    owner: Owner = b""
    stored: int = 0
    storing: int = 0
    pins: int = 0
    refused: bool = False
    """The policy named it while it could not go, and has set it aside."""

    doomed: bool = False
    """It is being stored, and will be removed as soon as it is."""


class Gone(NamedTuple):
    """A key that a tier has given up."""

    key: Key
    groups: int
    """Those that had it."""

    owner: Owner
    wanted: bool = False
    """Whether it is certain to be asked for again soon, so that no filter need guess."""


class Answer(NamedTuple):
    """What a tier says to an offer."""

    write: int
    """Groups whose records it takes; 0: none."""

    settled: bool
    """Whether the key is there afterwards, so that nobody else need take it."""

    victims: tuple[Gone, ...] = ()
    """What goes for it."""


_REFUSED, _THERE = Answer(0, settled=False), Answer(0, settled=True)


class TierRecords:
    """The records of one tier. Every question and move is O(1), but for what the policy takes to name a victim."""

    def __init__(self, spec: TierSpec, policy: EvictionPolicy) -> None:
        self.spec = spec
        self.policy = policy
        self._tenants = policy if isinstance(policy, TenantPolicy) else None
        self.bytes_used = 0
        self._held: dict[Key, Held] = {}
        self._filter = None if spec.factor is None or spec.writes == "second-touch" else WriteFilter(spec.factor)
        self._touched: OrderedDict[Key, bool] = OrderedDict()
        """Key -> whether it was used more than once; kept for `second-touch` alone."""

    # Questions.

    def __len__(self) -> int:
        return len(self._held)

    def stored(self, key: Key) -> int:
        """Groups whose records of this key can be loaded."""
        held = self._held.get(key)
        return 0 if held is None or held.doomed else held.stored

    def records(self) -> Iterator[Gone]:
        """Every key of which something can be loaded, as it would go."""
        return (Gone(key, held.stored, held.owner) for key, held in self._held.items() if held.stored and not held.doomed)

    # What happens above.

    def used(self, visit: Visit) -> None:
        """A request is done with a chain, wherever its blocks are."""
        if self._tenants is not None:
            for place, key in enumerate(visit.keys):
                # What was found at the start belongs to whoever uses it.
                if (held := self._held.get(key)) is not None and held.owner == b"":
                    held.owner = None if place < visit.public else visit.tenant
        stored = 0
        if visit.retention is not None:
            # Only who hints needs to know what of the chain is here.
            stored = next((place for place, key in enumerate(visit.keys) if not self.holds(key)), len(visit.keys))
        self.policy.used(replace(visit, stored=stored))
        if self.spec.writes == "second-touch":
            self._touch(visit.keys)

    def holds(self, key: Key) -> bool:
        """Whether the policy has been told of it."""
        held = self._held.get(key)
        return held is not None and not held.doomed

    def _touch(self, keys: Sequence[Key]) -> None:
        touched = self._touched
        for key in keys:
            touched[key] = key in touched
            touched.move_to_end(key)
        while len(touched) > TOUCHES_KNOWN:
            touched.popitem(last=False)

    def offer(self, offered: Gone, now: float) -> Answer:
        """What was given up above could be written here: whether it is, and what goes for it.

        The victims have gone from here already, also where there is no room after all.
        """
        key, missing, owner = offered.key, offered.groups, offered.owner
        held = self._held.get(key)
        if held is not None:
            missing &= ~(held.stored | held.storing)
            if held.doomed or not missing:
                return _REFUSED if held.doomed else _THERE
        size = self.spec.bytes_of(missing)
        if not missing or size > self.spec.capacity_bytes or not (offered.wanted or self._is_worth_it(key, size, now)):
            return _REFUSED
        victims: list[Gone] = []
        while not (room := self._has_room(size, owner)) and (victim := self._in_the_way(key, size, owner, now)) is not None:
            victims.append(self._give_up(victim, now))
        if room:
            self._add(key, owner, now).storing |= missing
            self._weigh(key, size)
        return Answer(missing if room else 0, settled=room, victims=tuple(victims))

    def surplus(self, owner: Owner, now: float) -> tuple[Gone, ...]:
        """What an owner has beyond its maximum and gives up: it turned out to be its own."""
        gone = []
        tenants = self._tenants
        while tenants is not None and tenants.beyond(owner):
            key = tenants.victim_of(owner, self._may_go, now)
            if key is None:
                break
            gone.append(self._give_up(key, now))
        return tuple(gone)

    def _is_worth_it(self, key: Key, size: int, now: float) -> bool:
        """Whether it may be written: always where there is room, unless only what was used twice is."""
        if self.spec.writes == "second-touch":
            return self._touched.get(key, False)
        if self._filter is None or self.bytes_used + size <= self.spec.capacity_bytes:
            return True
        return self._filter.passes(self.policy.worth(key, now))

    def _has_room(self, size: int, owner: Owner) -> bool:
        if self.bytes_used + size > self.spec.capacity_bytes:
            return False
        return self._tenants is None or not self._tenants.beyond(owner, size)

    def _in_the_way(self, key: Key, size: int, owner: Owner, now: float) -> Key | None:
        """There is no room for so much more of this owner: what has to go next; None where nothing may."""
        tenants = self._tenants
        if (held := self._held.get(key)) is not None:
            held.pins += 1
        if tenants is None:
            victim = self.policy.victim(self._may_go, now)
        elif tenants.beyond(owner, size):
            victim = tenants.victim_of(owner, self._may_go, now)
        else:
            tenants.asking = owner
            victim = self.policy.victim(self._may_go, now)
        if held is not None:
            self.unpin(key)
        return victim

    def _may_go(self, key: Key) -> bool:
        held = self._held[key]
        if held.pins or held.storing:
            held.refused = True
            return False
        return True

    def _give_up(self, key: Key, now: float) -> Gone:
        """The policy has chosen it."""
        if self._filter is not None:
            self._filter.gave_up(self.policy.worth(key, now))
        held = self._held.pop(key)
        self.bytes_used -= self.spec.bytes_of(held.stored)
        return Gone(key, held.stored, held.owner)

    def _add(self, key: Key, owner: Owner, now: float) -> Held:
        held = self._held.get(key)
        if held is None:
            held = self._held[key] = Held(owner)
            if self._tenants is not None:
                self._tenants.put(key, owner, now)
            else:
                self.policy.stored(key, now)
        return held

    def _weigh(self, key: Key, change: int) -> None:
        """A key that the policy knows takes so many bytes more."""
        self.bytes_used += change
        if self._tenants is not None:
            self._tenants.weigh(key, change)

    # What became of it.

    def settle(self, key: Key, group: int, *, stored: bool) -> None:
        """A write has ended."""
        held, bit = self._held.get(key), 1 << group
        if held is None or not held.storing & bit:
            return
        held.storing &= ~bit
        if stored and not held.doomed:
            held.stored |= bit
        elif held.doomed:
            self.bytes_used -= self.spec.record_bytes[group]
        else:
            self._weigh(key, -self.spec.record_bytes[group])
        self._tidy(key, held)

    def gone(self, key: Key, group: int) -> None:
        """A record was not there, or not what it should be."""
        held, bit = self._held.get(key), 1 << group
        if held is not None and held.stored & bit:
            held.stored &= ~bit
            self._weigh(key, -self.spec.record_bytes[group])
            self._tidy(key, held)

    def found(self, key: Key, group: int, now: float) -> bool:
        """A record is there: it was so at the start, or somebody else wrote it. False: there is no room to know of it."""
        bit, size = 1 << group, self.spec.record_bytes[group]
        held = self._held.get(key)
        if held is not None and (held.doomed or (held.stored | held.storing) & bit):
            return not held.doomed
        if self.bytes_used + size > self.spec.capacity_bytes:
            return False
        if held is None:
            held = self._held[key] = Held()
            self.policy.stored(key, now)
        held.stored |= bit
        self._weigh(key, size)
        return True

    def pin(self, key: Key) -> None:
        """Somebody loads its records: they do not go meanwhile."""
        self._held[key].pins += 1

    def unpin(self, key: Key) -> None:
        held = self._held.get(key)
        if held is not None and held.pins:
            held.pins -= 1
            self._tidy(key, held)

    def _tidy(self, key: Key, held: Held) -> None:
        """It may go now, or has nothing left that could."""
        if held.pins or held.storing:
            return
        if held.stored and not held.doomed:
            if held.refused:
                held.refused = False
                self.policy.returned([key])
            return
        del self._held[key]
        if not held.doomed:
            self.policy.discarded(key)

    def clear(self) -> None:
        """Everything is removed; what is being stored, as soon as it is."""
        for key in list(self._held):
            self.forget(key)

    def forget(self, key: Key) -> int:
        """It is not found any more; groups whose records are there to be removed."""
        held = self._held.get(key)
        if held is None or held.doomed:
            return 0
        groups = held.stored
        self.policy.discarded(key)
        self.bytes_used -= self.spec.bytes_of(groups)
        held.stored, held.doomed = 0, True
        self._tidy(key, held)
        return groups

    def check(self) -> None:
        """Its bound, its sums, and that its policy knows what it holds: O(keys). Raises AssertionError."""
        sizes = [self.spec.bytes_of(held.stored | held.storing) for held in self._held.values()]
        assert sum(sizes) == self.bytes_used, "bytes are miscounted"
        assert self.bytes_used <= self.spec.capacity_bytes, "a tier holds more than it may"
        for held in self._held.values():
            assert held.pins or held.stored or held.storing, "a key is kept of which there is nothing"
            assert not held.stored & held.storing, "a record is stored twice"
            assert not (held.doomed and held.stored), "a record that was removed is still there"
        self.policy.check(key for key, held in self._held.items() if not held.doomed)
        assert len(self._touched) <= TOUCHES_KNOWN
