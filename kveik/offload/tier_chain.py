"""Chain of the tiers below the pool: one tier's victims are offered to the next, and a hit is what all groups can serve. Pure.

    pool ──evicted──> ram ──victims──> disk ──victims──> remote      each with its own bound and policy
      └──inserted────────────────────────┴─────────────────┘         those that write through

Decisions are transfers. Their outcome comes back as `stored`, `failed`, `gone`; whatever goes wrong below ends here as a record
that is not there, never as an error of a request.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache

from kveik.cache.eviction.policy import Key
from kveik.cache.evictor import leading
from kveik.cache.facts import Evicted, Fact, Gone, Inserted, Invalidated, Used
from kveik.cache.layout import LayerGroup
from kveik.offload.tier import Tier
from kveik.offload.tier_match import Below, InPool, find_below
from kveik.offload.transfer import Clear, Delete, RecordLoad, StoreRecord, TierTransfer


class TierChain:
    """Records of every tier."""

    def __init__(self, groups: Sequence[LayerGroup], block_size: int, tiers: Sequence[Tier]) -> None:
        """`tiers`: from the nearest to the pool down."""
        for tier in tiers:
            assert len(tier.spec.record_bytes) == len(groups), "a tier does not know how large every group's records are"
        self.tiers = tuple(tiers)
        self._learners = [tier.policy.learner for tier in tiers if tier.policy.learner is not None]
        self.lead = leading(groups)
        self.closed: frozenset[int] = frozenset()
        """Tiers whose stores take nothing at the moment: their known records are not evicted for what would be refused."""

        self._groups = tuple(groups)
        self._block_size = block_size
        self._transfers: list[TierTransfer] = []

    # Questions.

    def found(self, keys: Sequence[Key], hit: tuple[int, int], in_pool: InPool) -> Below:
        """Records below behind the pool's hit (its tokens, and whole blocks among them): O(tiers · new blocks)."""
        return find_below(self._groups, self.tiers, keys, hit, self._block_size, in_pool)

    @property
    def shared(self) -> bool:
        """True where other engines write to a tier too."""
        return any(not tier.spec.ours for tier in self.tiers)

    def unknown(self, keys: Iterable[Key]) -> list[tuple[int, list[Key]]]:
        """Tiers in which others write too, with the keys that are not known to be anywhere: worth asking for."""
        missing = [key for key in keys if not any(tier.stored(key) for tier in self.tiers)]
        return [(number, missing) for number, tier in enumerate(self.tiers) if missing and not tier.spec.ours]

    # Events above. Each may add transfers.

    def absorb(self, facts: Iterable[Fact], now: float) -> None:
        """Facts of the pool, in their order; the blocks that they name have not been written since."""
        for fact in facts:
            match fact:
                case Evicted():
                    self._offer(0, fact, fact.runs, now)
                case Inserted(key, groups, owner, blocks):
                    new = Evicted([Gone((key,), groups, owner)], (key,), [(block,) for block in blocks])
                    for number, tier in enumerate(self.tiers):
                        if tier.spec.writes == "write-through":
                            self._offer_to(number, new, new.runs, now)
                case Used(visit):
                    for number, tier in enumerate(self.tiers):
                        tier.used(visit)
                        self._delete(number, tier.surplus(visit.tenant, visit.went))
                case Invalidated(keys):
                    for key in keys:
                        self._remove(key)

    def _offer(self, first: int, source: Evicted | int, gone: Sequence[Gone], now: float) -> None:
        """Offer to one tier after the other, until one takes it. `source`: the pool's fact, or the number of a tier."""
        for number in range(first, len(self.tiers)):
            if gone:
                gone = self._offer_to(number, source, gone, now)

    def _offer_to(self, number: int, source: Evicted | int, gone: Sequence[Gone], now: float) -> list[Gone]:
        """Offer, and return what is not taken."""
        if number in self.closed:
            return list(gone)
        answer = self.tiers[number].offer(gone, now)
        # They are copied further down before they are removed, and removed before their space is needed.
        self._offer(number + 1, number, answer.victims, now)
        self._delete(number, answer.victims)
        self._store(answer.writes, source, number)
        return answer.refused

    def _store(self, gone: Sequence[Gone], source: Evicted | int, target: int) -> None:
        places = {key: place for place, key in enumerate(source.keys)} if gone and isinstance(source, Evicted) else {}
        for keys, groups, _, _ in gone:
            for group in _bits(groups):
                if isinstance(source, int):
                    self._transfers += [StoreRecord(key, group, source, target) for key in keys]
                else:
                    blocks = source.blocks[group]
                    self._transfers += [StoreRecord(key, group, None, target, blocks[places[key]]) for key in keys]

    def _delete(self, number: int, gone: Sequence[Gone]) -> None:
        if gone and self.tiers[number].spec.ours:
            for keys, groups, _, _ in gone:
                self._transfers += [Delete(key, group, number) for group in _bits(groups) for key in keys]

    def _remove(self, key: Key) -> None:
        """A content is not what it should be: it is removed from every tier."""
        for number, tier in enumerate(self.tiers):
            self._transfers += [Delete(key, group, number) for group in _bits(tier.remove(key))]

    def retire(self, pool: Evicted, now: float) -> None:
        """The process ends: contents of the pool and of tiers that go with it are offered to those that last, the most valuable
        first, so that a drain that is cut short has saved the best of it.
        """
        lasting = [number for number, tier in enumerate(self.tiers) if tier.spec.lasts]
        if not lasting:
            return
        waiting: list[tuple[Evicted | int, Gone]] = []
        places = {key: place for place, key in enumerate(pool.keys)}
        for gone in pool.runs:
            for key in gone.keys:
                one = gone._replace(keys=(key,))
                waiting.append((Evicted([one], (key,), [(blocks[places[key]],) for blocks in pool.blocks]), one))
        for number, tier in enumerate(self.tiers):
            if not tier.spec.lasts:
                waiting.extend((number, gone) for gone in tier.records())
        worths = self.tiers[lasting[0]].policy.worths([gone.keys[0] for _, gone in waiting], now)
        # A stable order: beginnings stay ahead of what follows them.
        for place in sorted(range(len(waiting)), key=worths.__getitem__, reverse=True):
            source, one = waiting[place]
            rest = [one]
            for number in lasting:
                rest = rest and self._offer_to(number, source, rest, now)

    def reset(self) -> None:
        """Remove every record; those in shared tiers are only dropped from the index."""
        for number, tier in enumerate(self.tiers):
            tier.clear()
            if tier.spec.ours:
                self._transfers.append(Clear(number))

    def take_transfers(self) -> list[TierTransfer]:
        """Returns the transfers since the last call."""
        transfers, self._transfers = self._transfers, []
        return transfers

    @property
    def wants_lesson(self) -> bool:
        """True when a tier's policy has seen enough to learn from."""
        return any(one.wants_lesson for one in self._learners)

    def learn(self, now: float) -> None:
        """Let the policies draw conclusions if they have seen enough: milliseconds, at most once per 64 requests each."""
        for one in self._learners:
            if one.wants_lesson:
                one.learn(now)

    # Loading.

    def pin(self, records: Iterable[RecordLoad]) -> None:
        """These records are about to be loaded: they are not evicted before `loaded` was told of each."""
        for record in records:
            self.tiers[record.tier].pin(record.key)

    def loaded(self, record: RecordLoad, *, found: bool) -> None:
        """A load has ended, or was cancelled. `found` False: the record is not there, or not what it should be."""
        tier = self.tiers[record.tier]
        if not found:
            tier.gone(record.key, record.group)
        tier.unpin(record.key)

    # Outcomes of transfers, and what else is known of the tiers.

    def stored(self, tier: int, key: Key, group: int) -> None:
        self.tiers[tier].settle(key, group, stored=True)

    def failed(self, tier: int, key: Key, group: int) -> None:
        """A record was not stored."""
        self.tiers[tier].settle(key, group, stored=False)

    def gone(self, tier: int, key: Key, group: int) -> None:
        self.tiers[tier].gone(key, group)

    def adopt(self, tier: int, records: Iterable[tuple[Key, int]], now: float) -> None:
        """Records (key and group) that are there already, the oldest first. Those beyond the bound are removed."""
        for key, group in records:
            if not self.tiers[tier].found(key, group, now):
                self._delete(tier, [Gone((key,), 1 << group, None)])

    def check(self) -> None:
        """Bounds, sums and policies: O(keys). Raises AssertionError."""
        for tier in self.tiers:
            tier.check()


@cache
def _bits(groups: int) -> tuple[int, ...]:
    """Numbers of the groups that these bits name; there are few, and it is asked for every record."""
    return tuple(group for group in range(groups.bit_length()) if groups >> group & 1)
