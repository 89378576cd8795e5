"""Evictor: chooses the cached blocks that go when blocks are needed, and reports what happened to contents as facts.

The *leading* group is the first without a window (or the first of all): a chain that it has lost cannot be found, whatever the
others still have. The policy knows the leading group's full blocks, and chooses among them; the others' blocks of the same
content go with them, and are the next to be allocated there. A group that runs short by itself, because a window leaves it
fewer blocks, loses the block that the policy values least among its `SAMPLES` oldest.

A block that the policy was never told of (its request is running, or was preempted and will come back) goes after all others.

Where tenants are granted parts of the pool, the grants count the leading group's blocks that can be found by content and whose
requests have ended. Blocks that a running request holds count for no grant; but it never gets blocks that are reserved for
others (`available`).
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from itertools import islice, takewhile

from kveik.cache.eviction.policy import EvictionPolicy, Owner, Visit
from kveik.cache.eviction.tenants import TenantPolicy
from kveik.cache.facts import Evicted, Fact, Gone, Inserted, Invalidated, Used, in_runs
from kveik.cache.group import GroupBlocks
from kveik.cache.layout import LayerGroup

SAMPLES = 16


def leading(groups: Sequence[LayerGroup]) -> int:
    """Number of the group whose blocks the policy counts."""
    return next((number for number, group in enumerate(groups) if group.window is None), 0)


class Evictor:
    """Joins the groups with their policy."""

    def __init__(
        self, groups: Sequence[GroupBlocks], policy: EvictionPolicy, block_size: int = 1, *, record_facts: bool = False
    ) -> None:
        """`record_facts`: a lower store reads them with `take_facts`; without one nothing is recorded."""
        self.policy = policy
        self.tenants = policy if isinstance(policy, TenantPolicy) else None
        self._record_facts = record_facts
        self._facts: list[Fact] = []
        self._groups = groups
        self._block_size = block_size
        self._leading = leading([group.group for group in groups])
        self._lead = groups[self._leading]
        self._ends: dict[bytes, int] = {}
        """Key -> groups with a window that need the block where a chain was left, as bits. Kept for facts alone."""

        if self.tenants is not None:
            self._lead.pool.count_parties(len(self.tenants.parties))

    # Facts.

    def take_facts(self) -> list[Fact]:
        """Facts since the last call, in order. The next step may write into the blocks that they name."""
        facts, self._facts = self._facts, []
        return facts

    def contents(self) -> Evicted:
        """Contents of the pool, as if all of them were evicted now. A question."""
        keys = list(self._lead.index.by_key)
        return self._evicted(keys, self._runs(keys, [self._owner(key) for key in keys]))

    def _evicted(self, keys: Sequence[bytes], runs: Sequence[Gone]) -> Evicted:
        return Evicted(runs, keys, [[group.index.by_key.get(key, -1) for key in keys] for group in self._groups])

    def _record_evicted(self, keys: Sequence[bytes], owners: Sequence[Owner], *, wanted: bool = False) -> None:
        if self._record_facts and (runs := self._runs(keys, owners, wanted=wanted)):
            self._facts.append(self._evicted(keys, runs))

    def _runs(self, keys: Sequence[bytes], owners: Sequence[Owner], *, wanted: bool = False) -> list[Gone]:
        """Groups that have each block. Of those with a window only a chain's end could be of use, unless all is wanted."""
        groups, ends = [0] * len(keys), self._ends
        for number, group in enumerate(self._groups):
            by_key, bit, anywhere = group.index.by_key, 1 << number, wanted or group.window is None
            if anywhere and all(map(by_key.__contains__, keys)):
                groups = [one | bit for one in groups]
                continue
            for place, key in enumerate(keys):
                if key in by_key and (anywhere or ends.get(key, 0) & bit):
                    groups[place] |= bit
        return in_runs(keys, list(zip(groups, owners, strict=True)), wanted=wanted)

    def _owner(self, key: bytes) -> Owner:
        return b"" if self.tenants is None else self.tenants.owner_of(key)

    # Events.

    def finished(self, visit: Visit) -> None:
        """A request has ended and holds no blocks any more. `visit.stored` is found out here."""
        policy, by_key, keys = self.policy, self._lead.index.by_key, visit.keys
        stored = sum(1 for _ in takewhile(by_key.__contains__, keys))
        # What follows a gap can never be found here; in a tier, where the gap may be filled, it can.
        self._evict(keys[stored:], [None if at < visit.public else visit.tenant for at in range(stored, len(keys))])
        for key in keys[stored:]:
            policy.discarded(key)
        policy.used(visit._replace(stored=stored))
        if self._record_facts:
            self._note_end(keys[:stored])
            self._facts.append(Used(visit))
        if self.tenants is not None:
            self._settle_grants(self.tenants, visit, keys[:stored])

    def _note_end(self, keys: Sequence[bytes]) -> None:
        """A request that goes on here reads the blocks of each window before the end."""
        for number, group in enumerate(self._groups):
            if group.window is not None:
                for key in keys[group.first_needed(len(keys) * self._block_size, self._block_size) :]:
                    self._ends[key] = self._ends.get(key, 0) | 1 << number

    def _settle_grants(self, tenants: TenantPolicy, visit: Visit, keys: Sequence[bytes]) -> None:
        """These are known to be the tenant's; what it has beyond its maximum goes."""
        pool, by_key, tenant = self._lead.pool, self._lead.index.by_key, visit.tenant
        for key in keys:
            pool.assign(by_key[key], tenants.number_of(key))
        while tenants.beyond(tenant) and (surplus := tenants.victim_of(tenant, self._may_go, visit.went)) is not None:
            self._evict([surplus], [tenant])

    def inserted(self, key: bytes, groups: int, owner: Owner) -> None:
        """A content is complete in these groups (bits), which did not have it before."""
        if self._record_facts:
            blocks = tuple(group.index.by_key.get(key, -1) for group in self._groups)
            self._facts.append(Inserted(key, groups, owner, blocks))

    def invalidated(self, keys: Sequence[bytes]) -> None:
        """These contents are wrong, wherever they are stored."""
        if self._record_facts:
            self._facts.append(Invalidated(tuple(keys)))

    def remove(self, number: int, blocks: Sequence[int]) -> None:
        """These blocks of a group cannot be found by content any more; those held stay held. No fact is recorded."""
        keys = self._groups[number].remove(blocks)
        if number == self._leading:
            for key in keys:
                self._ends.pop(key, None)
                self.policy.discarded(key)

    def reset(self) -> None:
        """Remove all content."""
        for number, group in enumerate(self._groups):
            self.remove(number, group.index.blocks())

    # Questions of tenants and learning.

    def available(self, tenant: bytes) -> int:
        """Blocks that this tenant could allocate now in every group."""
        return min([group.pool.available for group in self._groups] + [self._lead.pool.available - self.withheld(tenant)])

    def withheld(self, tenant: bytes, *, at_most: bool = False) -> int:
        """Blocks of the leading group that nobody holds and that are reserved for others; or at most so many, once held ones
        are freed.
        """
        if self.tenants is None:
            return 0
        return self.tenants.withheld(tenant, None if at_most else self._lead.pool.idle)

    @property
    def reserved(self) -> int:
        """Blocks of the leading group that are reserved for tenants."""
        return 0 if self.tenants is None else self.tenants.reserved

    @property
    def lead(self) -> int:
        """Number of the leading group."""
        return self._leading

    @property
    def wants_lesson(self) -> bool:
        """The policy has seen enough to learn from."""
        return self.policy.learner is not None and self.policy.learner.wants_lesson

    def learn(self, now: float) -> None:
        """Let the policy draw conclusions if it has seen enough: milliseconds, at most once per 64 requests."""
        if self.policy.learner is not None and self.policy.learner.wants_lesson:
            self.policy.learner.learn(now)

    # Allocation and eviction.

    def allocate(self, number: int, count: int, tenant: Owner, now: float) -> list[int]:
        """Blocks of a group for new content, each held once. Cached ones are evicted; there are as many (`available`)."""
        group = self._groups[number]
        short = count - group.pool.spare
        if short > 0:
            self._make_spare(number, short, tenant, now)
        return group.allocate(count)

    def evict(self, number: int, count: int, now: float) -> None:
        """Evict so many full cached blocks of a group, although nothing needs them now. There are as many."""
        pool = self._groups[number].pool
        left = pool.full - count
        self._make_spare(number, count, b"", now)
        self.remove(number, list(islice(pool.oldest(), max(0, pool.full - left))))

    def _make_spare(self, number: int, count: int, tenant: Owner, now: float) -> None:
        """Evict so many full blocks of a group."""
        if number == self._leading:
            self._evict_victims(count, tenant, now)
        else:
            for _ in range(count):
                self._evict_oldest(number, now)

    def _evict_victims(self, count: int, tenant: Owner, now: float) -> None:
        """In the leading group, and the blocks of the same contents elsewhere."""
        policy, tenants = self.policy, self.tenants
        while count > 0:
            if tenants is None:
                keys = policy.victims(count, self._may_go, now)
                owners: list[Owner] = [b""] * len(keys)
            else:
                victims = tenants.victims_for(tenant, count, self._may_go, now)
                keys, owners = [key for key, _ in victims], [owner for _, owner in victims]
            if keys:
                self._evict(keys, owners)
            else:
                key = self._oldest(tenant)
                if key is None:
                    return
                keys, owner, wanted = [key], self._owner(key), not policy.holds(key)
                policy.discarded(key)
                self._evict(keys, [owner], wanted=wanted)
            count -= len(keys)

    def _evict(self, keys: Sequence[bytes], owners: Sequence[Owner], *, wanted: bool = False) -> None:
        """Contents that the policy knows no more. `wanted`: their request was preempted and comes back for them."""
        self._record_evicted(keys, owners, wanted=wanted)
        if self._ends:
            for key in keys:
                self._ends.pop(key, None)
        for group in self._groups:
            group.evict(keys)

    def _oldest(self, tenant: Owner) -> bytes | None:
        """The oldest full block that may go for this tenant: the policy has set it aside, or was never told of it."""
        pool, index, tenants = self._lead.pool, self._lead.index, self.tenants
        for block in pool.oldest():
            if tenants is None or tenants.may_take(pool.party[block], tenant):
                entry = index.entry(block)
                assert entry is not None
                assert entry.key is not None
                return entry.key
        return None

    def _may_go(self, key: bytes) -> bool:
        return self._lead.pool.references[self._lead.index.by_key[key]] == 0

    def _evict_oldest(self, number: int, now: float) -> None:
        """Evict a block of a group with a window. Those valued more than it are not looked at again soon."""
        group = self._groups[number]
        pool = group.pool
        oldest = [(block, entry.key) for block in islice(pool.oldest(), SAMPLES) if (entry := group.index.entry(block))]
        worth = self.policy.worths([key for _, key in oldest if key is not None], now)
        place = worth.index(min(worth))
        for passed, _ in oldest[:place]:
            pool.renew(passed)
        block, key = oldest[place]
        if self._record_facts and key is not None and self._ends.get(key, 0) & 1 << number:
            self._facts.append(self._evicted((key,), [Gone((key,), 1 << number, self._owner(key))]))
        self.remove(number, [block])

    def check(self, open_keys: Set[bytes]) -> None:
        """The policy knows the leading group's full blocks that nobody holds, but for some in the open sequences' chains.

        Raises AssertionError.
        """
        known = {key for key in self._lead.index.by_key if self.policy.holds(key)}
        self.policy.check(known)
        references = self._lead.pool.references
        unheld = {key for key, block in self._lead.index.by_key.items() if references[block] == 0}
        assert unheld - known <= open_keys, "a cached block is not known to the policy"
        assert self._ends.keys() <= self._lead.index.by_key.keys(), "ends of chains are remembered that are gone"
        assert self._record_facts or not self._facts, "facts are recorded that nobody reads"
        if self.tenants is not None:
            self._check_grants(self.tenants)

    def _check_grants(self, tenants: TenantPolicy) -> None:
        """No tenant's cached blocks are more than its maximum; blocks are assigned to the owner of their content."""
        pool = self._lead.pool
        for key, block in self._lead.index.by_key.items():
            assert pool.party[block] == tenants.number_of(key), "a block is assigned to somebody else"
        for party in tenants.parties:
            assert party.grant.maximum is None or pool.idle[party.number] <= party.grant.maximum, "a maximum is exceeded"
