"""What waiting sequences load from below the pool, and how long they wait for it.

    waiting ──ask──> parked until a tier that others share has told what it has, or that has taken too long
            ──begin──> parked, its records arrive ──all there, a gap, or its patience ends──> over ──> in line again
                           ↑ others with the same beginning wait with it                               finds them in the pool

Nobody waits longer for a load than computing would have taken, and nobody loads twice for one admission. What was loaded is
held until the plan behind the load's end is made. Values in, transfers out: whoever has the tiers carries them out, in order
and before the step's first write, and tells what became of them.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from kveik.cache.kv_cache_manager import KVCacheManager
from kveik.cache.prefix_match import PrefixMatch
from kveik.offload.cost import Costs, Split, best_split
from kveik.offload.loader import Loader, Loading
from kveik.offload.manager import OffloadManager
from kveik.offload.transfer import Cancel, Fetch, Load, Probe, Transfer
from kveik.request.sequence import Sequence

PROBE_SHARE = 0.1
"""Of the time that computing what is not known to be anywhere takes, how much may be spent on asking for it."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What a sequence could have loaded, what it did load, and why."""

    sequence_id: int
    tokens_in_pool: int
    tokens_reachable: int
    """Known if all that lies below were loaded, those in the pool included."""

    split: Split


@dataclass(slots=True, eq=False)
class Asking:
    """A sequence that waits for what a tier may know."""

    sequence_id: int
    deadline: float

    @property
    def claim(self) -> bytes:
        """What the sequence is parked on."""
        return b"ask %d" % self.sequence_id


@dataclass(slots=True, eq=False)
class Job:
    """One sequence's load."""

    number: int
    sequence_id: int
    loading: Loading
    began: float
    deadline: float
    over: bool = False
    """Nobody waits for it any more; what it has brought is held until the plan is made."""

    gap: int | None = None
    """The first block that will not come: what lies behind it is of no use."""

    @property
    def claim(self) -> bytes:
        """What sequences are parked on."""
        return b"load %d" % self.number

    @property
    def useful(self) -> bool:
        """Whether something may still come that is of use."""
        return any(self.gap is None or self.loading.fetches[number].place < self.gap for number in self.loading.waiting)


class Loads:
    """All loads of one scheduler. Without costs there are no tiers, and it does nothing."""

    def __init__(self, kv_cache: KVCacheManager, manager: OffloadManager | None = None, costs: Costs | None = None) -> None:
        """`costs`: with the manager's tiers, in its order. Costs without a manager do not happen."""
        assert costs is None or manager is not None, "there are costs of tiers, but no tiers"
        self.costs = costs
        self.manager = manager
        self.loader = None if manager is None else Loader(kv_cache, manager)
        self._decisions: list[Decision] = []
        self._kv_cache = kv_cache
        self._jobs: dict[int, Job] = {}
        self._count = 0
        self._asking: dict[int, Asking] = {}
        self._asked: set[int] = set()
        """Waiting sequences for which it was asked what lies where others write."""

        self._tried: set[int] = set()
        """Waiting sequences that have loaded, or have found that it does not pay."""

        self._joined: set[int] = set()
        """Waiting sequences that have waited for another's load."""

        self._landed: dict[int, dict[int, int]] = {}
        """Waiting sequence -> its block of the leading group -> number of the tier that it came from."""

        self._news = False
        """Whether something has become findable since this was last asked."""

    @property
    def loading(self) -> int:
        """Loads, and answers, that somebody waits for."""
        return len(self._asking) + sum(not job.over for job in self._jobs.values())

    @property
    def deadline(self) -> float | None:
        """When the next one is not waited for any more, on the engine's clock."""
        asking = [one.deadline for one in self._asking.values()]
        return min([*asking, *(job.deadline for job in self._jobs.values() if not job.over)], default=None)

    def claimed(self, claim: Hashable) -> bool:
        """Whether a load or an answer is still waited for."""
        if any(one.claim == claim for one in self._asking.values()):
            return True
        return any(job.claim == claim for job in self._jobs.values() if not job.over)

    def due(self, now: float) -> list[int]:
        """Numbers of loads whose time is over: what has come of them can still be told before the next plan."""
        return [job.number for job in self._jobs.values() if not job.over and job.deadline <= now]

    def take_decisions(self) -> list[Decision]:
        """Those since this was last asked."""
        decisions, self._decisions = self._decisions, []
        return decisions

    # Asked by the scheduler.

    def take_news(self) -> bool:
        """Whether a record has arrived since this was last asked: others who begin alike may need less room now."""
        news, self._news = self._news, False
        return news

    def blocker(self, sequence: Sequence, match: PrefixMatch | None, limit: int) -> bytes | None:
        """The claim of another's load that brings what follows `match` in this one."""
        if not self._jobs or sequence.id in self._joined:
            return None
        keys = set(self._kv_cache.chain_keys(sequence.id, limit)[match.full if match else 0 :])
        for job in self._jobs.values():
            if not job.over and any(fetch.key in keys for fetch in job.loading.fetches):
                self._joined.add(sequence.id)
                return job.claim
        return None

    def begin(self, sequence: Sequence, match: PrefixMatch | None, limit: int, now: float) -> bytes | None:
        """Load what lies below and pays, if the sequence could be admitted now: the claim to wait for."""
        if self.costs is None or sequence.id in self._tried or not self._kv_cache.can_admit(sequence.id, match):
            return None
        manager, loader = self._below()
        manager.apply(self._kv_cache.take_facts(), now)
        if (claim := self._ask(sequence, match, limit, now)) is not None:
            return claim
        self._tried.add(sequence.id)
        below = loader.find(sequence.id, match, limit)
        if not below:
            return None
        split = best_split(below.prospect, sequence.length, self.costs.prefill, list(self.costs.tiers.values()), now)
        tokens = below.prospect.tokens
        self._decisions.append(Decision(sequence.id, int(tokens[0]), int(tokens[-1]), split))
        if split.cut == 0 or not below.fetches(split.cut):
            return None
        loading = loader.begin(sequence.id, below, split.cut, now)
        if loading is None:
            return None
        self._count += 1
        job = self._jobs[self._count] = Job(self._count, sequence.id, loading, now, now + split.patience)
        for fetch in loading.fetches:
            self._queued(fetch, 1)
        # What was evicted for it is copied first.
        manager.apply(self._kv_cache.take_facts(), now)
        manager.transfer(Load(job.number, loading.fetches, loading.targets, job.deadline))
        return job.claim

    def _ask(self, sequence: Sequence, match: PrefixMatch | None, limit: int, now: float) -> bytes | None:
        """Once, what others have written of that which is not known to be anywhere."""
        directory, _ = self._below()
        assert self.costs is not None
        if not directory.shared or sequence.id in self._asked:
            return None
        self._asked.add(sequence.id)
        keys = self._kv_cache.chain_keys(sequence.id, limit)[match.full if match else 0 :]
        unknown = directory.unknown([key for key in keys if not any(tier.stored(key) for tier in directory.tiers)])
        asked = {tier: missing for tier, missing in unknown if missing}
        if not asked:
            return None
        missing = max(len(one) for one in asked.values()) * self._kv_cache.block_size
        patience = PROBE_SHARE * self.costs.prefill.seconds(missing, sequence.length - missing)
        asking = Asking(sequence.id, now + patience)
        for tier, some in asked.items():
            self._count += 1
            self._asking[self._count] = asking
            directory.transfer(Probe(self._count, tier, tuple(some), asking.deadline))
        return asking.claim

    def expire(self, now: float) -> None:
        """Who has waited for as long as computing would have taken waits no longer."""
        for number in [number for number, one in self._asking.items() if one.deadline <= now]:
            del self._asking[number]
        for number in self.due(now):
            job = self._jobs[number]
            self._note_late(job, now)
            self._call_off(job)

    def give_way(self) -> bool:
        """Give the blocks of the latest load back, whether it has ended or not; False: there is none."""
        if not self._jobs:
            return False
        self._close(next(reversed(self._jobs.values())))
        return True

    def tidy(self) -> bool:
        """The plan is made: give back what loads that are over have brought. Whether there was any."""
        over = [job for job in self._jobs.values() if job.over]
        for job in over:
            self._close(job)
        return bool(over)

    def admitted(self, sequence_id: int, match: PrefixMatch | None) -> dict[str, int]:
        """The sequence runs: how many tokens of its match were loaded for it, by the tier's name."""
        self._tried.discard(sequence_id)
        self._asked.discard(sequence_id)
        self._joined.discard(sequence_id)
        landed, directory = self._landed.pop(sequence_id, None), self.manager
        counts: dict[str, int] = {}
        if landed is not None and match is not None and directory is not None:
            for place, tier in landed.items():
                if place < match.full:
                    name = directory.tiers[tier].spec.name
                    counts[name] = counts.get(name, 0) + self._kv_cache.block_size
        return counts

    def dropped(self, sequence_id: int) -> None:
        """The sequence has ended."""
        self.admitted(sequence_id, None)
        for number in [number for number, one in self._asking.items() if one.sequence_id == sequence_id]:
            del self._asking[number]
        for job in [one for one in self._jobs.values() if one.sequence_id == sequence_id]:
            self._close(job)

    # Told by whoever carries transfers out.

    def arrived(self, number: int, fetch: int, *, found: bool, sound: bool = True) -> bool:
        """A job's fetch of this number has ended. `found`: all bytes of the right record are in the block; if not, `sound`: the
        record may still be there. False: nobody waited for it.
        """
        job = self._jobs.get(number)
        if job is None or job.over or fetch not in job.loading.waiting:
            return False
        one = job.loading.fetches[fetch]
        if found or not sound:
            self._queued(one, -1)
            self._below()[1].arrived(job.sequence_id, fetch, found=found)
        self._news |= found
        if not found:
            job.gap = one.place if job.gap is None else min(job.gap, one.place)
        elif one.group == self._kv_cache.evictor.lead:
            self._landed.setdefault(job.sequence_id, {})[one.place] = one.tier
        if not job.useful:
            self._call_off(job)
        return True

    def answered(self, number: int) -> None:
        """A tier has said what it has, and the directory knows it."""
        self._asking.pop(number, None)

    def _call_off(self, job: Job) -> None:
        """It is over; what still waits is not written any more."""
        job.over = True
        if job.loading.waiting:
            self._below()[0].transfer(Cancel(job.number))

    def _close(self, job: Job) -> None:
        if not job.over:
            self._call_off(job)
        for number in job.loading.waiting:
            self._queued(job.loading.fetches[number], -1)
        self._below()[1].end(job.sequence_id)
        del self._jobs[job.number]

    def _note_late(self, job: Job, now: float) -> None:
        """A tier that was too slow is known to be slow."""
        assert self.costs is not None
        for tier, cost in enumerate(self.costs.tiers.values()):
            size = sum(self._size(one) for at in job.loading.waiting if (one := job.loading.fetches[at]).tier == tier)
            if size:
                cost.late(size, now - job.began, now)

    def _queued(self, fetch: Fetch, sign: int) -> None:
        assert self.costs is not None
        list(self.costs.tiers.values())[fetch.tier].queued(sign * self._size(fetch))

    def _size(self, fetch: Fetch) -> int:
        return self._below()[0].tiers[fetch.tier].spec.record_bytes[fetch.group]

    def take_transfers(self, now: float) -> list[Transfer]:
        """What is to be done below, in this order, and before the next write into the pool."""
        if self.manager is None:
            return []
        self.manager.apply(self._kv_cache.take_facts(), now)
        return self.manager.take_transfers()

    def _below(self) -> tuple[OffloadManager, Loader]:
        assert self.manager is not None
        assert self.loader is not None
        return self.manager, self.loader

    def check(self, waiting: set[int]) -> None:
        """Every load is of a sequence that waits, and the KV cache manager knows of the same ones. Raises AssertionError."""
        loading = {job.sequence_id for job in self._jobs.values()}
        assert len(loading) == len(self._jobs), "a sequence loads twice"
        assert loading == self._kv_cache.loading, "KV cache manager and scheduler know of different loads"
        assert {one.sequence_id for one in self._asking.values()} <= self._asked, "a tier is asked for somebody unknown"
        assert loading | self._asked | self._tried | self._joined | self._landed.keys() <= waiting, (
            "somebody loads who does not wait"
        )
        if self.manager is not None:
            self.manager.check()
