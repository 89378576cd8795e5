"""Offload manager: decides what is stored in which tier, what is loaded, and how long it is waited for. Knows no bytes.

Facts of the KV cache come in, transfers go out to the carrier, and completions come back from it. A sequence waits for a load
no longer than computing would take, and loads once for an admission (`sequence_load.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence, Set
from math import inf

import numpy as np

from kveik.cache.eviction.policy import EvictionPolicy, Learnt
from kveik.cache.kv_cache_manager import KVCacheManager
from kveik.cache.prefix_match import PrefixMatch
from kveik.observe.events import Event, LoadDecided, LoadReason
from kveik.offload.cost import ComputeCost, LoadCost, Split, best_split
from kveik.offload.sequence_load import LoadWait, SequenceLoad, State
from kveik.offload.tier import Tier
from kveik.offload.tier_chain import TierChain
from kveik.offload.tier_match import Below
from kveik.offload.transfer import (
    Answered,
    Arrived,
    Cancel,
    Carrier,
    Delete,
    LoadRecords,
    Probe,
    RecordLoad,
    Stored,
    TierStats,
    Took,
    Transfer,
)
from kveik.request.sequence import Sequence as Choice

PROBE_SHARE = 0.1
"""Of the time that computing what is not known to be anywhere takes, how much may be spent on asking for it."""

COMPARE_SECONDS = 60.0
"""At least between two comparisons of a store with what is known of it; and so long nothing is offered to a shared one that was
full."""


class OffloadManager:
    """One engine's tiers, as `Offload` promises it."""

    def __init__(
        self,
        kv_cache: KVCacheManager,
        chain: TierChain,
        compute: ComputeCost,
        costs: Sequence[LoadCost],
        carrier: Carrier,
        publish: Callable[[Event], None] = lambda _: None,
    ) -> None:
        """`costs`: of loading, per tier of the chain. `publish` gets what is decided."""
        assert len(costs) == len(chain.tiers), "not every tier has its cost"
        self.chain = chain
        self.costs = tuple(costs)
        self.carrier = carrier
        self.mailbox = carrier.mailbox
        self._kv_cache = kv_cache
        self._compute = compute
        self._publish = publish
        self._count = 0
        self._loads: dict[int, SequenceLoad] = {}
        """By waiting sequence."""

        self._active: dict[int, SequenceLoad] = {}
        """By number: those that are waited for, or hold blocks."""

        self._news = False
        """True when a record has arrived since `expire`: others that begin alike may need fewer blocks now."""

        self._transfers: list[Transfer] = []
        self._starting: dict[int, LoadRecords] = {}
        """Loads of this plan, by number."""

        self._compared = [-inf] * len(costs)

    # Questions.

    @property
    def policies(self) -> list[EvictionPolicy]:
        return [tier.policy for tier in self.chain.tiers]

    @property
    def loading(self) -> int:
        return sum(load.waited_for for load in self._active.values())

    @property
    def deadline(self) -> float | None:
        return min((load.deadline for load in self._active.values() if load.waited_for), default=None)

    @property
    def unsettled(self) -> bool:
        return self.carrier.unsettled

    def has(self, claim: Hashable) -> bool:
        load = self._active.get(claim.load) if isinstance(claim, LoadWait) else None
        return load is not None and load.waited_for

    def find(self, sequence_id: int, match: PrefixMatch | None, limit: int) -> Below:
        """Records below of the sequence's first `limit` tokens behind its match in the pool."""
        hit = (match.tokens, match.full) if match else (0, 0)
        return self.chain.found(self._kv_cache.chain_keys(sequence_id, limit), hit, self._kv_cache.in_pool)

    def stats(self) -> list[TierStats]:
        return [one._replace(contents=len(tier)) for tier, one in zip(self.chain.tiers, self.carrier.stats(), strict=True)]

    # Within a plan.

    def expire(self, now: float) -> bool:
        for load in [one for one in self._active.values() if one.waited_for and one.deadline <= now]:
            if load.state is State.ASKING:
                self._asked(load)
            else:
                self._note_late(load, now)
                self._end(load)
        news, self._news = self._news, False
        return news

    def begin(self, sequence: Choice, match: PrefixMatch | None, limit: int, now: float) -> LoadWait | None:
        load = self._loads.get(sequence.id)
        if (other := self._other(sequence.id, load, match, limit)) is not None:
            return LoadWait(other.number)
        if load is not None and load.state is not State.UNDECIDED:
            return None
        if not self._kv_cache.can_admit(sequence.id, match):
            return None
        load = load or self._new(sequence.id)
        waits = self._asks(load, sequence, match, limit, now) or self._loads_for(load, sequence, match, limit, now)
        return LoadWait(load.number) if waits else None

    def _new(self, sequence_id: int) -> SequenceLoad:
        self._count += 1
        load = self._loads[sequence_id] = SequenceLoad(self._count, sequence_id)
        return load

    def _other(self, sequence_id: int, own: SequenceLoad | None, match: PrefixMatch | None, limit: int) -> SequenceLoad | None:
        """Another's load that brings what follows `match`; a sequence waits for one once."""
        if not self._active or (own is not None and own.joined):
            return None
        keys = set(self._kv_cache.chain_keys(sequence_id, limit)[match.full if match else 0 :])
        for load in self._active.values():
            if load.state is State.LOADING and any(record.key in keys for record in load.records):
                (own or self._new(sequence_id)).joined = True
                return load
        return None

    def _asks(self, load: SequenceLoad, sequence: Choice, match: PrefixMatch | None, limit: int, now: float) -> bool:
        """Ask once, in tiers in which others write, for what is not known to be anywhere."""
        if load.asked or not self.chain.shared:
            return False
        load.asked = True
        unknown = self.chain.unknown(self._kv_cache.chain_keys(sequence.id, limit)[match.full if match else 0 :])
        if not unknown:
            return False
        tokens = max(len(keys) for _, keys in unknown) * self._kv_cache.block_size
        context = np.array([sequence.length - tokens])
        seconds = self._compute.prefill_seconds(np.array([tokens]), context, self._kv_cache.max_chunk)
        load.state, load.answers, load.deadline = State.ASKING, len(unknown), now + PROBE_SHARE * float(seconds[0])
        self._active[load.number] = load
        self._transfers += [Probe(load.number, tier, tuple(keys), load.deadline) for tier, keys in unknown]
        return True

    def _loads_for(self, load: SequenceLoad, sequence: Choice, match: PrefixMatch | None, limit: int, now: float) -> bool:
        """Decide, once for an admission, and begin."""
        load.state = State.DECLINED
        below = self.find(sequence.id, match, limit)
        split = best_split(below.prospect, sequence.length, self._compute, self._kv_cache.max_chunk, self.costs, now)
        records = below.records(split.cut)
        blocks: tuple[int, ...] | None = None
        if records:
            first, last = below.starts[:, split.cut].tolist(), int(below.cuts[split.cut])
            blocks = self._kv_cache.reserve_load(sequence.id, [(one.group, one.place) for one in records], first, last, now)
        self._tell(sequence, below, split, records, blocks)
        if blocks is None:
            return False
        self.chain.pin(records)
        load.state, load.records, load.remaining = State.LOADING, records, set(range(len(records)))
        load.began, load.deadline = now, now + split.timeout
        self._active[load.number] = load
        for record in records:
            self._queued(record, 1)
        self._starting[load.number] = LoadRecords(load.number, records, blocks, load.deadline)
        return True

    def _tell(
        self, sequence: Choice, below: Below, split: Split, records: Sequence[RecordLoad], blocks: Sequence[int] | None
    ) -> None:
        reason: LoadReason = "nothing stored"
        if below:
            reason = "compute" if not records else "no blocks" if blocks is None else "load"
        tokens = below.prospect.tokens
        self._publish(
            LoadDecided(
                request_id=sequence.request.id,
                reason=reason,
                tokens_in_pool=int(tokens[0]),
                tokens_below=int(tokens[-1] - tokens[0]),
                tokens_chosen=int(split.tokens - tokens[0]) if blocks is not None else 0,
                load_seconds=split.load_seconds,
                compute_seconds=split.compute_seconds,
                recompute_seconds=split.recompute_seconds,
            )
        )

    def release_for_blocks(self) -> bool:
        holding = [load for load in self._active.values() if load.holds_blocks]
        for latest in holding[-1:]:
            self._close(latest)
        return bool(holding)

    def plan_made(self) -> bool:
        over = [load for load in self._active.values() if load.state is State.OVER]
        for load in over:
            self._close(load)
        return bool(over)

    def admitted(self, sequence_id: int, match: PrefixMatch | None) -> dict[str, int]:
        load, counts = self._loads.pop(sequence_id, None), dict[str, int]()
        if load is not None and match is not None:
            for place, tier in load.landed.items():
                if place < match.full:
                    name = self.chain.tiers[tier].spec.name
                    counts[name] = counts.get(name, 0) + self._kv_cache.block_size
        return counts

    def dropped(self, sequence_id: int) -> None:
        self._loads.pop(sequence_id, None)
        for load in [one for one in self._active.values() if one.sequence_id == sequence_id]:
            self._close(load)

    # The lifecycle.

    def _asked(self, load: SequenceLoad) -> None:
        """Its answers have come, or have taken too long."""
        load.state = State.UNDECIDED
        del self._active[load.number]

    def _end(self, load: SequenceLoad) -> None:
        """Nothing waits for it any more; its blocks are held until the plan is made."""
        load.state = State.OVER
        if load.remaining and self._starting.pop(load.number, None) is None:
            self._transfers.append(Cancel(load.number))

    def _close(self, load: SequenceLoad) -> None:
        """Free its blocks."""
        if load.state is State.LOADING:
            self._end(load)
        if load.state is State.OVER:
            for number in load.remaining:
                self._queued(load.records[number], -1)
                self.chain.loaded(load.records[number], found=True)
            self._kv_cache.end_load(load.sequence_id)
        load.state = State.DECLINED
        del self._active[load.number]

    def _note_late(self, load: SequenceLoad, now: float) -> None:
        """A tier that was too slow is known to be slow."""
        for tier, cost in enumerate(self.costs):
            size = sum(self._size(one) for at in load.remaining if (one := load.records[at]).tier == tier)
            if size:
                cost.late(size, now - load.began, now)

    def _queued(self, record: RecordLoad, sign: int) -> None:
        self.costs[record.tier].queued(sign * self._size(record))

    def _size(self, record: RecordLoad) -> int:
        return self.chain.tiers[record.tier].spec.record_bytes[record.group]

    # Facts, transfers and completions.

    def attend(self, now: float) -> None:
        for one in self.carrier.completions():
            match one:
                case Stored():
                    self._stored(one, now)
                case Arrived():
                    self._arrived(one)
                case Answered():
                    self._answered(one, now)
                case Took(tier, size, seconds):
                    self.costs[tier].observe(size, seconds, now)
        self._resize_tiers(now)
        for load in [one for one in self._active.values() if one.state is State.LOADING and one.deadline <= now]:
            # What has come is of use, though not all of it has.
            for arrived in self.carrier.cancel(load.number):
                self._arrived(arrived)

    def carry_out(self, now: float) -> None:
        self.chain.absorb(self._kv_cache.take_facts(), now)
        transfers, self._transfers = self._transfers, []
        self.carrier.carry_out([*transfers, *self.chain.take_transfers()])

    def start_loads(self) -> None:
        starting, self._starting = self._starting, {}
        self.carrier.carry_out(starting.values())

    def _stored(self, one: Stored, now: float) -> None:
        if not one.stored:
            self.chain.failed(one.tier, one.key, one.group)
            if one.full:
                self._compare(one.tier, now)
            return
        self.chain.stored(one.tier, one.key, one.group)
        if not self.chain.tiers[one.tier].stored(one.key) >> one.group & 1:
            # It was to go while it was being written.
            self._transfers.append(Delete(one.key, one.group, one.tier))

    def _arrived(self, one: Arrived) -> None:
        load, record = self._active.get(one.load), one.record
        if one.lost:
            # It is computed again, and stored again when it goes.
            self._transfers.append(Delete(record.key, record.group, record.tier))
        if load is None or load.state is not State.LOADING or one.number not in load.remaining:
            if one.lost:
                self.chain.gone(record.tier, record.key, record.group)
            return
        if one.found or one.lost:
            load.remaining.remove(one.number)
            self._queued(record, -1)
            self.chain.loaded(record, found=one.found)
        if one.found:
            self._news = True
            self._kv_cache.finish_load(load.sequence_id, one.number)
            if record.group == self.chain.lead:
                load.landed[record.place] = record.tier
        else:
            load.miss(record.place)
        if not load.useful:
            self._end(load)

    def _answered(self, one: Answered, now: float) -> None:
        self.chain.adopt(one.tier, one.found, now)
        if (load := self._active.get(one.load)) is not None and load.state is State.ASKING:
            load.answers -= 1
            if not load.answers:
                self._asked(load)

    def _resize_tiers(self, now: float) -> None:
        """A tier of ours is as large as its store; a shared one that is full is offered nothing."""
        closed = set[int]()
        for number, tier in enumerate(self.chain.tiers):
            room = self.carrier.usage(number)
            if tier.spec.ours:
                tier.resize(room.total)
            elif room.used + max(tier.spec.record_bytes) > room.total or now < self._compared[number] + COMPARE_SECONDS:
                closed.add(number)
        self.chain.closed = frozenset(closed)

    def _compare(self, number: int, now: float) -> None:
        """A store is full where the index has space left: after an outage it may hold records that were taken for lost."""
        due, tier = now >= self._compared[number] + COMPARE_SECONDS, self.chain.tiers[number]
        if due:
            self._compared[number] = now
        if due and tier.spec.ours:
            contents = self.carrier.contents(number)
            self._transfers += [Delete(key, group, number) for key, group in contents if not tier.holds(key)]

    # The whole.

    def start(self) -> None:
        self.carrier.start()

    def reset(self) -> None:
        self.chain.reset()

    def retire(self, now: float, seconds: float) -> None:
        self.carry_out(now)
        self.chain.retire(self._kv_cache.cached_contents(), now)
        lasting = [number for number, tier in enumerate(self.chain.tiers) if tier.spec.lasts]
        self.carrier.finish(self.chain.take_transfers(), lasting, seconds)

    def learn(self, now: float) -> None:
        self.chain.learn(now)

    def learnt(self) -> Learnt:
        return {f"seconds of loading from {tier.spec.name}": cost.rates.learnt() for tier, cost in self._priced()}

    def restore(self, learnt: Learnt) -> None:
        for tier, cost in self._priced():
            if (name := f"seconds of loading from {tier.spec.name}") in learnt:
                cost.rates.restore(np.asarray(learnt[name], dtype=np.float64))

    def _priced(self) -> Iterable[tuple[Tier, LoadCost]]:
        return zip(self.chain.tiers, self.costs, strict=True)

    def check(self, waiting: Set[int]) -> None:
        self.chain.check()
        assert self._loads.keys() <= waiting, "a load is kept of a sequence that does not wait"
        assert {load.sequence_id for load in self._active.values()} <= waiting, "a sequence loads that does not wait"
        holding = [load.sequence_id for load in self._active.values() if load.holds_blocks]
        assert len(set(holding)) == len(holding), "a sequence loads twice"
        assert set(holding) == self._kv_cache.loading, "KV cache and offload know of different loads"
        assert all(load.waited_for or load.holds_blocks for load in self._active.values()), "a load is active that is closed"
