"""Grants of tenants in a store, as a bound on any policy: one policy object per tenant, and a rule whose record goes first.

    reserved   a tenant that has no more than this never loses a record to another
    maximum    a tenant never has more than this; for more it gives up its own

A tenant that has more than is reserved borrows. When somebody wants room, it is made by, in this order:

    1. whoever borrows, he himself included: of their next victims the one that is worth least
    2. what is everybody's (public prefixes, which all tenants' chains stand on)
    3. he himself, although he does not borrow

All tenants without a grant are one party with nothing reserved. What is everybody's belongs to no tenant and counts for none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from kveik.cache.eviction.policy import EvictionPolicy, Key, Learner, Learnt, MayGo, Owner, Rank, Visit


@dataclass(frozen=True, slots=True)
class Grant:
    """What one tenant is granted of one store, in the store's units: blocks or bytes."""

    reserved: int = 0
    maximum: int | None = None


class Party:
    """A tenant with a grant, all tenants without one, or everybody."""

    __slots__ = ("grant", "number", "owner", "policy", "weight")

    def __init__(self, number: int, owner: Owner, grant: Grant, policy: EvictionPolicy) -> None:
        self.owner = owner
        self.number = number
        """From 1 on; who needs a short name for it has one."""

        self.grant = grant
        self.policy = policy
        self.weight = 0


class Learners:
    """What learns in the parties' policies, that of the party without a grant first."""

    def __init__(self, learners: Sequence[Learner]) -> None:
        self._learners = learners

    @property
    def wants_lesson(self) -> bool:
        return any(one.wants_lesson for one in self._learners)

    def learn(self, now: float) -> None:
        for one in self._learners:
            if one.wants_lesson:
                one.learn(now)

    def learnt(self) -> Learnt:
        """What those without a grant have taught, which is of use to everybody."""
        return self._learners[0].learnt()

    def restore(self, learnt: Learnt) -> None:
        for one in self._learners:
            one.restore(learnt)


class TenantPolicy:
    """As many policies as parties. Every call costs what the party's own policy takes; a victim also O(parties)."""

    def __init__(self, grants: Mapping[bytes, Grant], make: Callable[[], EvictionPolicy], *, weighed: bool = False) -> None:
        """`make`: a policy for one party. `weighed`: the store says what its records weigh (`weigh`); else each counts 1."""
        self.share = 1.0
        """Of every grant, how much holds: less while the store has less room than grants were measured by."""

        self._weighed = weighed
        self._common, self._public = Party(1, b"", Grant(), make()), Party(2, None, Grant(), make())
        self._granted: dict[Owner, Party] = {
            tenant: Party(number, tenant, grant, make()) for number, (tenant, grant) in enumerate(grants.items(), start=3)
        }
        self.parties = (self._common, self._public, *self._granted.values())
        learners = [one.policy.learner for one in self.parties if one.policy.learner is not None]
        self.learner = Learners(learners) if learners else None
        self._party_of: dict[Key, Party] = {}
        self._weights: dict[Key, int] = {}
        self._unclaimed: dict[Key, None] = {}
        """Records whose owners have not shown themselves: from an earlier life, or of requests that were preempted."""

    # Whose is what.

    def party(self, owner: Owner) -> Party:
        return self._public if owner is None else self._granted.get(owner, self._common)

    def amount(self, party: Party) -> int:
        """What it has in this store."""
        return party.weight if self._weighed else party.policy.stored_count

    def borrowed(self, party: Party) -> int:
        return 0 if party is self._public else max(0, self.amount(party) - self._reserved(party))

    def _reserved(self, party: Party) -> int:
        return int(party.grant.reserved * self.share)

    @property
    def reserved(self) -> int:
        """All reservations together."""
        return sum(self._reserved(party) for party in self.parties)

    def beyond(self, owner: Owner, more: int = 0) -> bool:
        """Whether the owner would have more than its maximum with so much more."""
        party = self.party(owner)
        return party.grant.maximum is not None and self.amount(party) + more > int(party.grant.maximum * self.share)

    def number_of(self, key: Key) -> int:
        """Of the party whose record in this store it is; 0: it is not known."""
        party = self._party_of.get(key)
        return 0 if party is None else party.number

    def owner_of(self, key: Key) -> Owner:
        """Whose record in this store it is."""
        return self._party_of.get(key, self._common).owner

    def may_take(self, number: int, owner: Owner) -> bool:
        """Whether this owner may have a record of that party now; a record that is not known may be anybody's."""
        party = self.parties[number - 1] if number else self._common
        return self._reserved(party) == 0 or party is self.party(owner) or self.borrowed(party) > 0

    def withheld(self, owner: Owner, idle: Sequence[int] | None) -> int:
        """Records that nobody holds and this owner may not have, because they are reserved for others.

        `idle`: by party's number, records that nobody holds; None: as if nobody held any.
        """
        mine, total = self.party(owner), 0
        for party in self.parties:
            if party is not mine and (reserved := self._reserved(party)):
                amount = self.amount(party)
                free = amount if idle is None else idle[party.number]
                total += free - min(free, max(0, amount - reserved))
        return total

    # The store says what happens.

    @property
    def stored_count(self) -> int:
        return sum(party.policy.stored_count for party in self.parties)

    def holds(self, key: Key) -> bool:
        return key in self._party_of

    def used(self, visit: Visit) -> None:
        """The public beginning is one chain, and what follows it another."""
        party, public = self.party(visit.tenant), visit.public
        if self._unclaimed:
            self._claim(visit.keys[:public], self._public, visit.came)
            self._claim(visit.keys[public:], party, visit.came)
        stored = visit.keys[: visit.stored]
        if public:
            self._public.policy.used(
                Visit(visit.keys[:public], min(visit.stored, public), visit.tokens_out, visit.came, visit.went)
            )
            self._party_of.update(dict.fromkeys(stored[:public], self._public))
        own, count = visit.keys[public:], max(0, visit.stored - public)
        party.policy.used(Visit(own, count, visit.tokens_out, visit.came, visit.went, visit.retention))
        self._party_of.update(dict.fromkeys(stored[public:], party))

    def _claim(self, keys: Sequence[Key], party: Party, now: float) -> None:
        """Records that nobody has claimed yet are this party's."""
        for key in keys:
            if key in self._unclaimed:
                weight = self._weights.get(key, 0)
                self.discarded(key)
                self._put(key, party, now)
                self.weigh(key, weight)

    def returned(self, keys: Sequence[Key]) -> None:
        for party in self.parties:
            mine = [key for key in keys if self._party_of.get(key) is party]
            if mine:
                party.policy.returned(mine)

    def stored(self, keys: Sequence[Key], now: float) -> None:
        """Whose they are, is not known."""
        for key in keys:
            if key not in self._party_of:
                self.put(key, b"", now)

    def put(self, key: Key, owner: Owner, now: float) -> None:
        """A record of this owner is stored; of nobody's in particular, that of whoever uses it first."""
        self._put(key, self.party(owner), now)
        if owner == b"":
            self._unclaimed[key] = None

    def _put(self, key: Key, party: Party, now: float) -> None:
        self._party_of[key] = party
        party.policy.stored((key,), now)

    def weigh(self, key: Key, change: int) -> None:
        """A record that is stored weighs so much more."""
        self._weights[key] = self._weights.get(key, 0) + change
        self._party_of[key].weight += change

    def discarded(self, key: Key) -> None:
        party = self._party_of.get(key)
        if party is not None:
            party.policy.discarded(key)
            self._forget(key)

    def _forget(self, key: Key) -> None:
        self._party_of.pop(key).weight -= self._weights.pop(key, 0)
        self._unclaimed.pop(key, None)

    # Who goes.

    def victims(self, count: int, may_go: MayGo, now: float) -> list[Key]:
        """Victims for a tenant without a grant."""
        return [key for key, _ in self.victims_for(b"", count, may_go, now)]

    def victims_for(self, owner: Owner, count: int, may_go: MayGo, now: float) -> list[tuple[Key, Owner]]:
        """Victims, and their owners, that make room for this owner; fewer where no more must go for it."""
        victims = list[tuple[Key, Owner]]()
        # One by one: with every record that goes it may be another's turn.
        while len(victims) < count and (victim := self._next(owner, may_go, now)) is not None:
            victims.append(victim)
        return victims

    def _next(self, owner: Owner, may_go: MayGo, now: float) -> tuple[Key, Owner] | None:
        """The next to go, and whose it is."""
        ranks = [
            (rank, party.number)
            for party in self.parties
            if self.borrowed(party) and (rank := party.policy.least(may_go, now)) is not None
        ]
        if ranks:
            return self._take(self.parties[min(ranks)[1] - 1], may_go, now)
        return self._take(self._public, may_go, now) or self._take(self.party(owner), may_go, now)

    def victim_of(self, owner: Owner, may_go: MayGo, now: float) -> Key | None:
        """What this owner gives up; None where none of its records may go."""
        taken = self._take(self.party(owner), may_go, now)
        return None if taken is None else taken[0]

    def _take(self, party: Party, may_go: MayGo, now: float) -> tuple[Key, Owner] | None:
        gone = party.policy.victims(1, may_go, now)
        if not gone:
            return None
        self._forget(gone[0])
        return gone[0], party.owner

    def least(self, may_go: MayGo, now: float) -> Rank | None:
        """Of those who borrow."""
        ranks = [party.policy.least(may_go, now) for party in self.parties if self.borrowed(party)]
        return min((rank for rank in ranks if rank is not None), default=None)

    def worths(self, keys: Sequence[Key], now: float) -> list[float]:
        """By the policy of the party whose a record is, or else of whoever knows it."""
        return [max(one.policy.worths((key,), now)[0] for one in self._knowing(key)) for key in keys]

    def _knowing(self, key: Key) -> Sequence[Party]:
        party = self._party_of.get(key)
        return self.parties if party is None else (party,)

    def check(self, keys: Iterable[Key]) -> None:
        stored = set(keys)
        assert stored == self._party_of.keys(), "the policy's keys are not the store's"
        assert self._unclaimed.keys() <= stored
        for party in self.parties:
            mine = [key for key, other in self._party_of.items() if other is party]
            party.policy.check(mine)
            weight = sum(self._weights.get(key, 0) for key in mine)
            assert weight == party.weight, "weights are miscounted"
