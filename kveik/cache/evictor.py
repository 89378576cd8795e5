"""Which cached block goes when one is needed: one policy decides on chains, and the blocks of every layer group follow.

The *leading* group is the first without a window (or the first of all): a chain that it has lost cannot be found, whatever the
others still have. The policy knows the leading group's full blocks, and says which of them goes; the others' blocks of the same
content go with it, and are the next to be taken there. A group that runs short by itself, because a window leaves it fewer
blocks, gives up what the policy values least among its `SAMPLES` oldest.

A block that no policy was told of yet (its request is running, or was preempted and will come back) goes after all others.

Where tenants are granted parts of the pool, the grants count the leading group's blocks that can be found: those of requests
that are over. What a running request holds is nobody's grant; but it never takes what is reserved for others (`available`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from functools import partial
from itertools import islice, takewhile

from kveik.cache.eviction.policy import EvictionPolicy, Owner, Visit
from kveik.cache.eviction.tenants import TenantPolicy
from kveik.cache.group import GroupBlocks
from kveik.cache.layout import LayerGroup
from kveik.offload.evicted import Gone, in_runs
from kveik.offload.manager import OffloadManager
from kveik.offload.transfer import Transfer

SAMPLES = 16


def leading(groups: Sequence[LayerGroup]) -> int:
    """Number of the group whose blocks the policy counts."""
    return next((number for number, group in enumerate(groups) if group.window is None), 0)


class Evictor:
    """Joins the groups with their policy; without one, each group goes by its pool's order, which is LRU."""

    def __init__(self, groups: Sequence[GroupBlocks], policy: EvictionPolicy | None, block_size: int = 1) -> None:
        self.policy = policy
        self.tenants = policy if isinstance(policy, TenantPolicy) else None
        self.now = 0.0
        """Seconds on the engine's clock, told by whoever sees one."""

        self.asking: Owner = b""
        """Who takes the next blocks."""

        self._below: OffloadManager | None = None
        self._transfers: list[Transfer] = []
        self._groups = groups
        self._block_size = block_size
        self._leading = leading([group.group for group in groups])
        self._lead = groups[self._leading]
        self._ends: dict[bytes, int] = {}
        """Key -> groups with a window that need the block where a chain was left, as bits."""

        if policy is None:
            return
        for group in groups:
            group.give_up = partial(self._give_up_of, group)
        self._lead.give_up = self._give_up
        self._lead.forgotten = self._forgotten
        if self.tenants is not None:
            self._lead.pool.count_parties(len(self.tenants.parties))

    @property
    def below(self) -> OffloadManager | None:
        """The tiers, where there are any; they are offered what is given up here, and told of the same requests."""
        return self._below

    @below.setter
    def below(self, directory: OffloadManager | None) -> None:
        self._below = directory
        if directory is not None:
            directory.block_of = self._block_of

    def _block_of(self, group: int, key: bytes) -> int:
        return self._groups[group].index.by_key[key]

    def finished(self, visit: Visit) -> None:
        """A request is over: nobody holds its blocks for it any more. `visit.stored` is found out here."""
        policy, by_key, keys = self.policy, self._lead.index.by_key, visit.keys
        if policy is None:
            return
        stored = sum(1 for _ in takewhile(by_key.__contains__, keys))
        # What follows a gap can never be found here; below, where the gap may be filled, it can.
        if self._below is not None:
            self._offer_rest(self._below, visit, stored)
        for key in keys[stored:]:
            self._ends.pop(key, None)
            policy.discarded(key)
        for group in self._groups:
            group.lose(keys[stored:])
        policy.used(visit._replace(stored=stored))
        if self._below is not None:
            self._note_end(keys[:stored])
            self._below.used(visit)
        if self.tenants is not None:
            self._settle_grants(self.tenants, visit.tenant, keys[:stored])

    def _offer_rest(self, below: OffloadManager, visit: Visit, first: int) -> None:
        owners = [None if place < visit.public else visit.tenant for place in range(first, len(visit.keys))]
        below.offered(self._gone(visit.keys[first:], owners), self.now)

    def _note_end(self, keys: Sequence[bytes]) -> None:
        """Who goes on here reads the blocks of each window before the end."""
        for number, group in enumerate(self._groups):
            if group.window is not None:
                for key in keys[group.first_needed(len(keys) * self._block_size, self._block_size) :]:
                    self._ends[key] = self._ends.get(key, 0) | 1 << number

    def _settle_grants(self, tenants: TenantPolicy, tenant: bytes, keys: Sequence[bytes]) -> None:
        """These are known to be whose they are; what a tenant has beyond its maximum goes."""
        pool, by_key = self._lead.pool, self._lead.index.by_key
        for key in keys:
            pool.assign(by_key[key], tenants.number_of(key))
        while tenants.beyond(tenant) and (surplus := tenants.victim_of(tenant, self._may_go, self.now)) is not None:
            self._let_go([surplus], [tenant])

    def inserted(self, key: bytes, groups: int, owner: Owner) -> None:
        """A content is complete in these groups (bits), and nobody had it before."""
        if self._below is not None:
            self._below.inserted(key, groups, self.now, owner)

    def disowned(self, keys: Iterable[bytes]) -> None:
        """These contents are not what they should be, wherever they are."""
        if self._below is not None:
            self._below.forget(keys)

    def retire(self) -> None:
        """The process ends: what is worth keeping is offered to the tiers that last."""
        if self._below is not None:
            keys = list(self._lead.index.by_key)
            self._below.retire(self._gone(keys, [self._owner(key) for key in keys]), self.now)

    def _owner(self, key: bytes) -> Owner:
        return b"" if self.tenants is None else self.tenants.owner_of(key)

    def take_transfers(self) -> list[Transfer]:
        """What is to be done below, in this order, and before the next write into the pool."""
        self._collect()
        transfers, self._transfers = self._transfers, []
        return transfers

    def transfer(self, one: Transfer) -> None:
        """This too is to be done, after all that is known of so far."""
        self._collect()
        self._transfers.append(one)

    def _collect(self) -> None:
        if self._below is not None:
            self._transfers += self._below.take_orders()

    def available(self, tenant: bytes) -> int:
        """Blocks that this tenant could take now in every group."""
        return min([group.pool.available for group in self._groups] + [self._lead.pool.available - self.withheld(tenant)])

    def withheld(self, tenant: bytes, *, at_most: bool = False) -> int:
        """Blocks of the leading group that nobody holds and that are reserved for others; or at most so many, once held ones
        are given back.
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
        """Whether a policy, here or below, has seen enough to learn from."""
        return any(policy.wants_lesson for policy in self._policies())

    def learn(self) -> None:
        """Let the policies draw conclusions if they have seen enough: milliseconds, at most once per 64 requests each."""
        for policy in self._policies():
            if policy.wants_lesson:
                policy.learn(self.now)

    def _policies(self) -> list[EvictionPolicy]:
        below = [] if self._below is None else [tier.policy for tier in self._below.tiers]
        return below if self.policy is None else [self.policy, *below]

    def _give_up(self, count: int) -> None:
        """In the leading group, and whatever belongs to it elsewhere."""
        assert self.policy is not None
        tenants = self.tenants
        if tenants is not None:
            tenants.asking = self.asking
        while count > 0:
            keys: Sequence[bytes] = self.policy.victims(count, self._may_go, self.now)
            if keys:
                self._let_go(keys, [b""] * len(keys) if tenants is None else tenants.gave_up)
            else:
                oldest = self._oldest()
                if oldest is None:
                    return
                keys = oldest.keys
                self._let_go(keys, [oldest.owner], wanted=oldest.wanted)
            count -= len(keys)

    def _let_go(self, keys: Sequence[bytes], owners: Sequence[Owner], *, wanted: bool = False) -> None:
        """The policy knows them no more. `wanted`: their request was preempted and comes back for them."""
        if self._below is not None:
            self._below.offered(self._gone(keys, owners, wanted=wanted), self.now)
        if self._ends:
            for key in keys:
                self._ends.pop(key, None)
        for group in self._groups:
            group.lose(keys)

    def _gone(self, keys: Sequence[bytes], owners: Sequence[Owner], *, wanted: bool = False) -> list[Gone]:
        """Which groups have the blocks. In those with a window a chain's end alone could be of use, unless all is wanted."""
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

    def _oldest(self) -> Gone | None:
        """The oldest block that may go for whoever is asking: one that the policy has set aside, or was never told of, and then
        it is `wanted`.
        """
        assert self.policy is not None
        pool, index, tenants = self._lead.pool, self._lead.index, self.tenants
        for block in pool.oldest():
            if tenants is None or tenants.may_take(pool.party[block], self.asking):
                entry = index.entry(block)
                assert entry is not None
                assert entry.key is not None
                oldest = Gone((entry.key,), 0, self._owner(entry.key), not self.policy.holds(entry.key))
                self.policy.discarded(entry.key)
                return oldest
        return None

    def _forgotten(self, key: bytes) -> None:
        assert self.policy is not None
        self._ends.pop(key, None)
        self.policy.discarded(key)

    def _may_go(self, key: bytes) -> bool:
        return self._lead.pool.references[self._lead.index.by_key[key]] == 0

    def _give_up_of(self, group: GroupBlocks, count: int) -> None:
        """In a group with a window."""
        for _ in range(count):
            self._give_up_one_of(group)

    def _give_up_one_of(self, group: GroupBlocks) -> None:
        """What was valued more than the one that goes is not looked at again soon."""
        assert self.policy is not None
        policy, pool, now = self.policy, group.pool, self.now
        oldest = [(block, entry.key) for block in islice(pool.oldest(), SAMPLES) if (entry := group.index.entry(block))]
        worth = policy.worths([key for _, key in oldest if key is not None], now)
        place = worth.index(min(worth))
        for passed, _ in oldest[:place]:
            pool.renew(passed)
        block, key = oldest[place]
        if self._below is not None and key is not None:
            bit = 1 << next(number for number, other in enumerate(self._groups) if other is group)
            if self._ends.get(key, 0) & bit:
                self._below.offered([Gone((key,), bit, self._owner(key))], now)
        group.forget([block])

    def check(self, open_keys: Set[bytes]) -> None:
        """The policy knows the leading group's full blocks that nobody holds, but for some in the open sequences' chains.

        Raises AssertionError.
        """
        policy = self.policy
        if policy is not None:
            known = {key for key in self._lead.index.by_key if policy.holds(key)}
            policy.check(known)
            references = self._lead.pool.references
            unheld = {key for key, block in self._lead.index.by_key.items() if references[block] == 0}
            assert unheld - known <= open_keys, "a cached block is not known to the policy"
        if self._below is not None:
            self._below.check()
            assert self._ends.keys() <= self._lead.index.by_key.keys(), "ends of chains are remembered that are gone"
        if self.tenants is not None:
            self._check_grants(self.tenants)

    def _check_grants(self, tenants: TenantPolicy) -> None:
        """Nobody's cached blocks are more than its maximum; blocks are assigned to whose content they have."""
        pool = self._lead.pool
        for key, block in self._lead.index.by_key.items():
            assert pool.party[block] == tenants.number_of(key), "a block is assigned to somebody else"
        for party in tenants.parties:
            assert party.grant.maximum is None or pool.idle[party.number] <= party.grant.maximum, "a maximum is exceeded"
