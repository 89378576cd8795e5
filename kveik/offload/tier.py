"""Records of one tier, within a bound in bytes, and its victims. Knows no other tier.

A record is (key, group); the records of one key, of all layer groups, come and go together as far as the groups have them, and
are written as a set of bits: bit g for group g. What is known of a key's records:

             offer, taken            stored
    absent ───────────────> storing ─────────> stored ──> absent     as a victim, or gone, or lost with the tier
              failed: back to absent               not a victim while it is pinned by a load
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from math import isfinite
from typing import Literal, NamedTuple

from kveik.cache.eviction.policy import EvictionPolicy, Key, Owner, Visit
from kveik.cache.eviction.tenants import TenantPolicy
from kveik.cache.facts import Gone, in_runs

TOUCHES_KNOWN = 1 << 17
"""Keys known to be used once or more often, where that matters. Their dictionary takes up to 18.9 MB."""


Writes = Literal["filtered", "write-through", "second-touch"]
"""When a record is written: when the tier above evicts it and it is worth it; as soon as it is there at all; when the tier
above evicts it and it was used twice."""

FACTOR = 1.5
"""How much more than the mean of recent victims an offered record must be worth. 1: at least as much; 2: for worn drives."""

REMEMBERED = 256  # victims over which that mean runs


@dataclass(frozen=True, slots=True, kw_only=True)
class TierSpec:
    """One tier, in numbers."""

    name: str
    capacity_bytes: int
    record_bytes: tuple[int, ...]  # per layer group
    writes: Writes = "filtered"
    factor: float | None = FACTOR
    """Of the write filter; None: everything that is offered is written. For policies that measure worth."""

    lasts: bool = False  # outlives the process
    ours: bool = True
    """True where no other engine writes there. A shared store has a bound of its own; ours limits the index of it."""

    def bytes_of(self, groups: int) -> int:
        """Bytes of one key's records in these groups (bits)."""
        return sum(size for number, size in enumerate(self.record_bytes) if groups >> number & 1)


class Answer(NamedTuple):
    """A tier's answer to offers: records to write, those not there afterwards, and those evicted for them, gone already."""

    writes: list[Gone]
    refused: list[Gone]
    victims: list[Gone]


@dataclass(slots=True, eq=False)
class Held:
    """State of one key's records."""

    owner: Owner = b""
    stored: int = 0
    storing: int = 0
    pins: int = 0
    refused: bool = False  # the policy named it while it could not go, and has set it aside
    doomed: bool = False  # it is being stored, and will be removed as soon as it is


class Tier:
    """The records of one tier. Every question and move is O(1), but for what the policy takes to name a victim."""

    def __init__(self, spec: TierSpec, policy: EvictionPolicy) -> None:
        self.spec = spec
        self.policy = policy
        self._tenants = policy if isinstance(policy, TenantPolicy) else None
        self.bytes_used = 0
        self.usable_bytes = spec.capacity_bytes
        """Less than the capacity while the store has less; what is beyond goes when something is offered."""
        self._sizes = [spec.bytes_of(groups) for groups in range(1 << len(spec.record_bytes))]  # by bits of groups
        self._held: dict[Key, Held] = {}
        self._mean_worth, self._worths_seen = 0.0, 0
        """Of recent victims: a full tier writes only what is worth clearly more, since most records are used once."""

        self._touched: OrderedDict[Key, bool] = OrderedDict()
        """Key -> whether it was used more than once; kept for `second-touch` alone."""

    # Questions.

    def __len__(self) -> int:
        return len(self._held)

    def stored(self, key: Key) -> int:
        """Groups whose records of this key can be loaded."""
        held = self._held.get(key)
        return 0 if held is None else held.stored

    def records(self) -> Iterator[Gone]:
        """Every key of which something can be loaded, as it would go."""
        return (Gone((key,), held.stored, held.owner) for key, held in self._held.items() if held.stored)

    # What happens above.

    def resize(self, usable_bytes: int) -> None:
        """Set the bytes that the store can use now; tenants' shares follow."""
        self.usable_bytes = usable_bytes
        if self._tenants is not None:
            self._tenants.share = usable_bytes / max(self.spec.capacity_bytes, 1)

    def used(self, visit: Visit) -> None:
        """A request is done with a chain, wherever its blocks are."""
        if self._tenants is not None:
            for place, key in enumerate(visit.keys):
                # Records found at the start belong to the first tenant that uses them.
                if (held := self._held.get(key)) is not None and held.owner == b"":
                    held.owner = None if place < visit.public else visit.tenant
        # Only hints need to know what of the chain is here.
        here = takewhile(self.holds, visit.keys if visit.retention is not None else ())
        self.policy.used(visit._replace(stored=sum(1 for _ in here)))
        if self.spec.writes == "second-touch":
            for key in visit.keys:
                self._touched[key] = key in self._touched
                self._touched.move_to_end(key)
            while len(self._touched) > TOUCHES_KNOWN:
                self._touched.popitem(last=False)

    def holds(self, key: Key) -> bool:
        """True where the policy knows the key."""
        held = self._held.get(key)
        return held is not None and not held.doomed

    def offer(self, offered: Sequence[Gone], now: float) -> Answer:
        """What was given up above could be written here, the first before the last: whether it is, and what goes for it.

        No key is offered twice. Who passes the filter is decided before anything goes.
        """
        wanted, refused = self._worth_writing(offered, now)
        # What is here already of theirs, of other groups, stays.
        there = [key for one in wanted for key in self._known(one.keys)]
        for key in there:
            self.pin(key)
        tenants, writes, victims = self._tenants, list[Gone](), list[Gone]()
        if tenants is None:
            victims = self._evict_for(wanted, now)
        else:
            wanted = [one._replace(keys=(key,)) for one in wanted for key in one.keys]
        for one in wanted:
            if tenants is not None:
                victims += self._evict_for_owner(tenants, one, now)
            taken, left = one.split(self._fitting(one))
            if taken is not None:
                self._add(taken, now)
                writes.append(taken)
            if left is not None:
                refused.append(left)
        for key in there:
            self.unpin(key)
        return Answer(writes, refused, victims)

    def surplus(self, owner: Owner, now: float) -> list[Gone]:
        """What an owner has beyond its maximum and gives up: it turned out to be its own."""
        gone, tenants = list[Gone](), self._tenants
        while tenants is not None and tenants.beyond(owner) and (key := tenants.victim_of(owner, self._may_go, now)):
            gone += self._give_up([key], now)
        return gone

    def _known(self, keys: Sequence[Key]) -> list[Key]:
        """Those of which there is something here."""
        return [] if self._held.keys().isdisjoint(keys) else [key for key in keys if key in self._held]

    def _worth_writing(self, offered: Sequence[Gone], now: float) -> tuple[list[Gone], list[Gone]]:
        """What of it should be written, as far as it is missing; and what not. What is there already is neither."""
        wanted, refused, capacity = list[Gone](), list[Gone](), self.usable_bytes
        # Where there is space everything is written, unless only what was used twice is.
        left_bytes = 0 if self.spec.writes == "second-touch" else capacity - self.bytes_used
        for one in [missing for gone in offered for missing in self._missing(gone, refused)]:
            size = self._sizes[one.groups]
            if size > capacity:
                refused.append(one)
                continue
            passing = self._passing(one, left_bytes, now)
            if passing is None or all(passing):
                wanted.append(one)
                left_bytes -= size * len(one.keys)
                continue
            yes, no = list[Key](), list[Key]()
            for key, passes in zip(one.keys, passing, strict=True):
                (yes if passes or size * (len(yes) + 1) <= left_bytes else no).append(key)
            left_bytes -= size * len(yes)
            for keys, where in ((yes, wanted), (no, refused)):
                where += [one._replace(keys=keys)] if keys else []
        return wanted, refused

    def _missing(self, gone: Gone, refused: list[Gone]) -> list[Gone]:
        """The missing part. What is about to be removed cannot be written meanwhile."""
        if not self._known(gone.keys):
            return [gone] if gone.groups else []
        kinds = []
        for key in gone.keys:
            held, missing = self._held.get(key), gone.groups
            if held is not None and held.doomed:
                refused.append(gone._replace(keys=(key,)))
                missing = 0
            elif held is not None:
                missing &= ~(held.stored | held.storing)
            kinds.append((missing, gone.owner))
        return in_runs(gone.keys, kinds, wanted=gone.wanted)

    def _passing(self, one: Gone, left_bytes: int, now: float) -> list[bool] | None:
        """Per key, True where its records may displace others; None: all may, or all fit."""
        if one.wanted:
            return None
        if self.spec.writes == "second-touch":
            return [self._touched.get(key, False) for key in one.keys]
        if self.spec.factor is None or len(one.keys) * self._sizes[one.groups] <= left_bytes:
            return None
        least = self.spec.factor * self._mean_worth
        return [worth >= least for worth in self.policy.worths(one.keys, now)]

    def _fitting(self, one: Gone) -> int:
        """Number of its keys that fit; where owners may have a maximum, for one at most."""
        size = self._sizes[one.groups]
        if self._tenants is not None and self._tenants.beyond(one.owner, size):
            return 0
        return max(0, self.usable_bytes - self.bytes_used) // size

    def _evict_for(self, wanted: Sequence[Gone], now: float) -> list[Gone]:
        """Victims for all of these; fewer where no more may go."""
        sizes, gone = self._sizes, list[Gone]()
        bound = self.usable_bytes - sum([sizes[one.groups] * len(one.keys) for one in wanted])
        # No more than it takes, though each be as large as any.
        while self.bytes_used > bound and (
            keys := self.policy.victims(max(1, (self.bytes_used - bound) // sizes[-1]), self._may_go, now)
        ):
            gone += self._give_up(keys, now)
        return gone

    def _evict_for_owner(self, tenants: TenantPolicy, one: Gone, now: float) -> list[Gone]:
        """The same for one of them, where its owner may have a maximum."""
        size, gone = self._sizes[one.groups], list[Gone]()
        while not self._fitting(one):
            if tenants.beyond(one.owner, size):
                key = tenants.victim_of(one.owner, self._may_go, now)
            else:
                key = next((key for key, _ in tenants.victims_for(one.owner, 1, self._may_go, now)), None)
            if key is None:
                break
            gone += self._give_up([key], now)
        return gone

    def _may_go(self, key: Key) -> bool:
        held = self._held[key]
        if held.pins or held.storing:
            held.refused = True
            return False
        return True

    def _give_up(self, keys: Sequence[Key], now: float) -> list[Gone]:
        """The policy has chosen them."""
        if self.spec.factor is not None:
            self._note_worths(self.policy.worths(keys, now))
        pop, sizes, freed, kinds = self._held.pop, self._sizes, 0, list[tuple[int, Owner]]()
        for key in keys:
            held = pop(key)
            freed += sizes[held.stored]
            kinds.append((held.stored, held.owner))
        self.bytes_used -= freed
        return in_runs(keys, kinds)

    def _note_worths(self, worths: Sequence[float]) -> None:
        """Victims were worth so much. One of unknown worth says nothing."""
        for worth in filter(isfinite, worths):
            self._worths_seen = min(self._worths_seen + 1, REMEMBERED)
            self._mean_worth += (worth - self._mean_worth) / self._worths_seen

    def _add(self, one: Gone, now: float) -> None:
        """It is about to be written."""
        held, groups, owner, fresh = self._held, one.groups, one.owner, list[Key]()
        for key in one.keys:
            if (known := held.get(key)) is not None:
                known.storing |= groups
            else:
                held[key] = Held(owner, 0, groups)
                fresh.append(key)
        size = self._sizes[groups]
        if self._tenants is None:
            self.policy.stored(fresh, now)
            self.bytes_used += size * len(one.keys)
            return
        for key in fresh:
            self._tenants.put(key, owner, now)
        for key in one.keys:
            self._weigh(key, size)

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
            if not held.refused:
                return
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
        """A record is there: it was so at the start, or another engine wrote it. False: the bound is reached."""
        bit, size = 1 << group, self.spec.record_bytes[group]
        held = self._held.get(key)
        if held is not None and (held.doomed or (held.stored | held.storing) & bit):
            return not held.doomed
        if self.bytes_used + size > self.usable_bytes:
            return False
        if held is None:
            held = self._held[key] = Held()
            self.policy.stored((key,), now)
        held.stored |= bit
        self._weigh(key, size)
        return True

    def pin(self, key: Key) -> None:
        """Its records are being loaded: they do not go meanwhile."""
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
        """Remove everything; a record that is being stored goes once it is stored."""
        for key in list(self._held):
            self.remove(key)

    def remove(self, key: Key) -> int:
        """Remove a key. Returns the groups whose stored records are to be deleted."""
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
