"""The tiers below the pool, as one chain: what one gives up is offered to the next, and a hit is what all groups can serve.

    pool ──offered──> ram ──victims──> disk ──victims──> remote      each with its own bound and policy
      └──inserted────────────────────────┴─────────────────┘         those that write through

Decisions are orders (`orders.py`), taken by whoever moves bytes. What becomes of them is told back: `stored`, `failed`, `gone`.
Whatever goes wrong below ends here as a record that is not there: never as an error of a request.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache

from kveik.cache.eviction.policy import Key, Visit
from kveik.cache.facts import Evicted, Fact, Gone, Inserted, Invalidated, Used
from kveik.cache.layout import LayerGroup
from kveik.offload.tier import Tier
from kveik.offload.tier_match import Below, InPool, find_below
from kveik.offload.transfer import Clear, Delete, Fetch, Spill, Transfer


class OffloadManager:
    """Who has which record. Single-threaded, pure; time comes in as an argument."""

    def __init__(self, groups: Sequence[LayerGroup], block_size: int, tiers: Sequence[Tier]) -> None:
        """`tiers`: from the nearest to the pool down."""
        for tier in tiers:
            assert len(tier.spec.record_bytes) == len(groups), "a tier does not know how large every group's records are"
        self.tiers = tuple(tiers)
        self._groups = tuple(groups)
        self._block_size = block_size
        self._transfers: list[Transfer] = []
        self.closed: frozenset[int] = frozenset()
        """Tiers whose stores take nothing at the moment: what they are known to have does not go for what would be refused."""

    # Questions.

    def found(self, keys: Sequence[Key], hit: tuple[int, int], in_pool: InPool) -> Below:
        """What lies below behind the pool's hit (its tokens, and whole blocks among them): O(tiers · new blocks)."""
        return find_below(self._groups, self.tiers, keys, hit, self._block_size, in_pool)

    @property
    def shared(self) -> bool:
        """Whether there is a tier in which others write too."""
        return any(not tier.spec.ours for tier in self.tiers)

    def unknown(self, keys: Iterable[Key]) -> list[tuple[int, list[Key]]]:
        """Per tier in which others write too, those keys of which nothing is known to be there: worth asking for."""
        return [
            (number, [key for key in keys if not tier.stored(key)])
            for number, tier in enumerate(self.tiers)
            if not tier.spec.ours
        ]

    # What happens above. Each may give orders.

    def apply(self, facts: Iterable[Fact], now: float) -> None:
        """Take facts of the pool over, in order, before the next step writes into the blocks that they name."""
        for fact in facts:
            match fact:
                case Evicted():
                    self._offer(0, fact, fact.runs, now)
                case Inserted():
                    self._inserted(fact, now)
                case Used(visit):
                    self.used(visit)
                case Invalidated(keys):
                    self.forget(keys)

    def _inserted(self, new: Inserted, now: float) -> None:
        source = Evicted([Gone((new.key,), new.groups, new.owner)], (new.key,), [(block,) for block in new.blocks])
        for number, tier in enumerate(self.tiers):
            if tier.spec.writes == "write-through":
                self._offer_to(number, source, source.runs, now)

    def used(self, visit: Visit) -> None:
        """A request is done."""
        for number, tier in enumerate(self.tiers):
            tier.used(visit)
            self._delete(number, tier.surplus(visit.tenant, visit.went))

    def _offer(self, first: int, source: Evicted | int, gone: Sequence[Gone], now: float) -> None:
        """To one tier after the other, until one has it. `source`: what the pool evicted, or the number of a tier."""
        for number in range(first, len(self.tiers)):
            if gone:
                gone = self._offer_to(number, source, gone, now)

    def _offer_to(self, number: int, source: Evicted | int, gone: Sequence[Gone], now: float) -> list[Gone]:
        """What it does not take."""
        if number in self.closed:
            return list(gone)
        answer = self.tiers[number].offer(gone, now)
        # They are copied further down before they are removed, and removed before their room is needed.
        self._offer(number + 1, number, answer.victims, now)
        self._delete(number, answer.victims)
        self._spill(answer.writes, source, number)
        return answer.refused

    def _spill(self, gone: Sequence[Gone], source: Evicted | int, target: int) -> None:
        places = {key: place for place, key in enumerate(source.keys)} if gone and isinstance(source, Evicted) else {}
        for keys, groups, _, _ in gone:
            for group in _bits(groups):
                if isinstance(source, int):
                    self._transfers += [Spill(key, group, source, target) for key in keys]
                else:
                    blocks = source.blocks[group]
                    self._transfers += [Spill(key, group, None, target, blocks[places[key]]) for key in keys]

    def _delete(self, number: int, gone: Sequence[Gone]) -> None:
        if gone and self.tiers[number].spec.ours:
            for keys, groups, _, _ in gone:
                self._transfers += [Delete(key, group, number) for group in _bits(groups) for key in keys]

    def retire(self, pool: Evicted, now: float) -> None:
        """The process ends: what is in the pool or in a tier that goes with it is offered to those that last, the most valuable
        first, so that a drain that is cut short has saved the best of it.
        """
        lasting = [number for number, tier in enumerate(self.tiers) if tier.spec.lasts]
        if not lasting:
            return
        places = {key: place for place, key in enumerate(pool.keys)}
        waiting: list[tuple[Evicted | int, Gone]] = []
        for one in (run._replace(keys=(key,)) for run in pool.runs for key in run.keys):
            waiting.append((Evicted([one], one.keys, [(blocks[places[one.keys[0]]],) for blocks in pool.blocks]), one))
        for number, tier in enumerate(self.tiers):
            if not tier.spec.lasts:
                waiting.extend((number, gone) for gone in tier.records())
        worths = self.tiers[lasting[0]].policy.worths([gone.keys[0] for _, gone in waiting], now)
        # A stable order: beginnings stay ahead of what follows them.
        for place in sorted(range(len(waiting)), key=worths.__getitem__, reverse=True):
            source, one = waiting[place]
            gone = [one]
            for number in lasting:
                gone = gone and self._offer_to(number, source, gone, now)

    def reset(self) -> None:
        """Everything is forgotten and removed, where it is ours to remove."""
        for number, tier in enumerate(self.tiers):
            tier.clear()
            if tier.spec.ours:
                self._transfers.append(Clear(number))

    def forget(self, keys: Iterable[Key]) -> None:
        """These contents are not what they should be: they are removed everywhere, whoever else could use them."""
        for key in keys:
            for number, tier in enumerate(self.tiers):
                self._transfers.extend(Delete(key, group, number) for group in _bits(tier.forget(key)))

    def transfer(self, one: Transfer) -> None:
        """This too is to be done, after all that is known of so far."""
        self._transfers.append(one)

    def take_transfers(self) -> list[Transfer]:
        """What is to be done, in this order, and before the next write into the pool."""
        transfers, self._transfers = self._transfers, []
        return transfers

    # Learning.

    @property
    def wants_lesson(self) -> bool:
        """A tier's policy has seen enough to learn from."""
        return any(tier.policy.wants_lesson for tier in self.tiers)

    def learn(self, now: float) -> None:
        """Let the tiers' policies draw conclusions if they have seen enough."""
        for tier in self.tiers:
            if tier.policy.wants_lesson:
                tier.policy.learn(now)

    # Loading.

    def pin(self, fetches: Iterable[Fetch]) -> None:
        """These records are about to be loaded: they do not go before `loaded` was told of each."""
        for fetch in fetches:
            self.tiers[fetch.tier].pin(fetch.key)

    def loaded(self, fetch: Fetch, *, found: bool) -> None:
        """A load has ended, or was given up. `found` False: the record is not there, or not what it should be."""
        tier = self.tiers[fetch.tier]
        if not found:
            tier.gone(fetch.key, fetch.group)
        tier.unpin(fetch.key)

    # What became of orders, and what else is known of the tiers.

    def stored(self, tier: int, key: Key, group: int) -> None:
        self.tiers[tier].settle(key, group, stored=True)

    def failed(self, tier: int, key: Key, group: int) -> None:
        """A spill was not carried out."""
        self.tiers[tier].settle(key, group, stored=False)

    def gone(self, tier: int, key: Key, group: int) -> None:
        self.tiers[tier].gone(key, group)

    def adopt(self, tier: int, records: Iterable[tuple[Key, int]], now: float) -> None:
        """Records (key and group) that are there already, the oldest first. What is beyond the bound is removed."""
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
