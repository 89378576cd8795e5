"""The worlds' checkers see faults: each fault below is one that a real cache has had, and is found within a few worlds."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kveik.cache.block_pool import BlockPool
from kveik.cache.evictor import Evictor
from kveik.cache.group import GroupBlocks
from kveik.cache.keys import KeySpace
from kveik.cache.kv_cache_manager import KVCacheManager
from kveik.offload.loader import Loader
from kveik.offload.loads import Loads
from kveik.offload.transfer import Cancel
from kveik.schedule.plan import Decodes, StepPlan
from kveik.schedule.policy import FirstCome, PriorityWithAging
from kveik.schedule.running_batch import RunningBatch
from kveik.schedule.scheduler import Scheduler
from tests.worlds.memory import MemoryExecutor
from tests.worlds.tiers import SimulatedTiers
from tests.worlds.world import Run, World

WORLDS = 120


def registered_too_early(patch: pytest.MonkeyPatch) -> None:
    """Blocks are registered when room is made for them, before the step that fills them."""
    grow = KVCacheManager.grow

    def grow_and_register(self: KVCacheManager, sequence_id: int, length: int) -> int:
        room = grow(self, sequence_id, length)
        seq = self._seqs[sequence_id]
        seq.computed = length
        self._register_whole(seq)
        return room

    patch.setattr(KVCacheManager, "grow", grow_and_register)


def salt_left_out(patch: pytest.MonkeyPatch) -> None:
    """The namespace forgets who asks."""
    namespace = KeySpace.namespace
    patch.setattr(KeySpace, "namespace", lambda self, **parts: namespace(self, media=parts.get("media")))


def copies_forgotten(patch: pytest.MonkeyPatch) -> None:
    """The scheduler drops the copies."""
    plan = Scheduler.plan
    patch.setattr(Scheduler, "plan", lambda self, now: replace(plan(self, now), copies=()))


def window_one_too_short(patch: pytest.MonkeyPatch) -> None:
    """The window group gives a block back that the next query still reads."""
    first_needed = GroupBlocks.first_needed
    patch.setattr(GroupBlocks, "first_needed", lambda self, computed, size: first_needed(self, computed + size, size))


def stale_index(patch: pytest.MonkeyPatch) -> None:
    """A block that is taken for something else can still be found as what it was."""
    patch.setattr(GroupBlocks, "take", lambda self, count: self.pool.take(count))


def lost_block(patch: pytest.MonkeyPatch) -> None:
    """Every hundredth block that is given back is not."""
    give_back, count = BlockPool.give_back, [0]

    def leak(self: BlockPool, *blocks: int) -> None:
        for block in blocks:
            count[0] += 1
            if count[0] % 100:
                give_back(self, block)

    patch.setattr(BlockPool, "give_back", leak)


def written_while_shared(patch: pytest.MonkeyPatch) -> None:
    """A partial hit shares the block instead of copying it."""

    def share(self: KVCacheManager, seq: Any, match: Any) -> tuple[()]:
        for number, source in enumerate(match.sources):
            self._groups[number].pool.hold(source)
            seq.blocks[number].append(source)
            self._tables.arrays[number][seq.row, match.full] = source
        return ()

    patch.setattr(KVCacheManager, "_copy", share)


def decode_forgotten(patch: pytest.MonkeyPatch) -> None:
    """The last decode is left out of a step whose prefill could have its place."""
    decodes = RunningBatch.decodes

    def all_but_the_last(self: RunningBatch) -> Decodes:
        found = decodes(self)
        return Decodes(found.ids[:-1], found.starts[:-1], found.tokens[:-1]) if len(found.ids) > 1 else found

    patch.setattr(RunningBatch, "decodes", all_but_the_last)


def victim_is_the_oldest(patch: pytest.MonkeyPatch) -> None:
    """The oldest gives way."""
    for policy in (FirstCome, PriorityWithAging):
        patch.setattr(policy, "victim", lambda self, running: min(running, key=lambda one: one.admission))


def hit_counted_again(patch: pytest.MonkeyPatch) -> None:
    """Every admission is counted, also after a preemption."""
    plan = Scheduler.plan

    def plan_and_count(self: Scheduler, now: float) -> StepPlan:
        decided = plan(self, now)
        admitted = [one for id_ in decided.admitted if (one := self.sequence(id_)) is not None]
        self.prefix_hits += sum(one.computed for one in admitted if one.preemptions)
        return decided

    patch.setattr(Scheduler, "plan", plan_and_count)


def executor_reads_ahead(patch: pytest.MonkeyPatch) -> None:
    """The fake model writes into the slot behind its own."""
    write = MemoryExecutor.write

    def write_and_more(self: MemoryExecutor, chunk: Any, sequence: Any) -> None:
        write(self, chunk, sequence)
        if chunk.start % self.size:
            row = self.kv_cache.tables[0][sequence.row]
            self.slots[0][row[chunk.start // self.size]][chunk.start % self.size - 1] = -1

    patch.setattr(MemoryExecutor, "write", write_and_more)


def capacity_not_noted(patch: pytest.MonkeyPatch) -> None:
    """The running batch does not hear of a decode's new block."""
    patch.setattr(RunningBatch, "give_room", lambda self, place, capacity: None)


def stops_not_seen(patch: pytest.MonkeyPatch) -> None:
    """The running batch looks at lengths alone."""
    ending = RunningBatch.ending
    patch.setattr(RunningBatch, "ending", lambda self, tokens: ending(self, np.full_like(tokens, -1)))


def moves_not_told(patch: pytest.MonkeyPatch) -> None:
    """Who moved into a gap is not told, so that the block tables stay as they were."""
    close_gaps = RunningBatch.close_gaps

    def close_and_be_silent(self: RunningBatch) -> list[int]:
        close_gaps(self)
        return []

    patch.setattr(RunningBatch, "close_gaps", close_and_be_silent)


OTHER_CONTENT = "reads group . position .* of another content"

FAULTS: dict[Callable[[pytest.MonkeyPatch], None], str] = {
    registered_too_early: OTHER_CONTENT,
    salt_left_out: OTHER_CONTENT,
    copies_forgotten: OTHER_CONTENT,
    window_one_too_short: OTHER_CONTENT,
    stale_index: "a block is found under another prefix",
    lost_block: "a block is lost",
    written_while_shared: "a block that is being written is shared",
    decode_forgotten: "a running decode gets no token",
    victim_is_the_oldest: "the first one stands still",
    hit_counted_again: "hits are not counted once a sequence",
    executor_reads_ahead: OTHER_CONTENT,
    capacity_not_noted: "a capacity differs from its sequence's",
    stops_not_seen: "the answer depends on cache or company",
    moves_not_told: "the block tables' first rows are not the plan's",
}
"""What is wrong -> the law that must fire, by what it says."""


def assert_fires(law: str, worlds: Callable[[int], World]) -> None:
    """The law fires in one of some worlds; in others the same fault may break another law first, or a structure."""
    seen = Counter[str]()
    for seed in range(WORLDS):
        try:
            Run(worlds(seed)).run()
        except (AssertionError, KeyError, IndexError) as error:
            if isinstance(error, AssertionError) and re.search(law, str(error)):
                return
            seen[repr(error)] += 1
    pytest.fail(f"{law!r} never fires; what does: {seen.most_common(5)}")


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_is_seen_by_its_law(fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    assert_fires(FAULTS[fault], World.from_seed)


def late_write(patch: pytest.MonkeyPatch) -> None:
    """A load that was called off writes all the same."""
    carry_out = SimulatedTiers.carry_out

    def carry_out_but_cancel(self: SimulatedTiers, transfers: Any, now: float) -> None:
        carry_out(self, [one for one in transfers if not isinstance(one, Cancel)], now)

    patch.setattr(SimulatedTiers, "carry_out", carry_out_but_cancel)


def spilled_too_late(patch: pytest.MonkeyPatch) -> None:
    """What was given up is copied a step later, when something else stands there."""
    take, kept = Evictor.take_transfers, []

    def take_later(self: Evictor) -> list[Any]:
        kept.append(take(self))
        return kept[-2] if len(kept) > 1 else []

    patch.setattr(Evictor, "take_transfers", take_later)


def believed_before_it_came(patch: pytest.MonkeyPatch) -> None:
    """Whatever became of a record, its block counts as loaded."""
    arrived = Loads.arrived
    patch.setattr(Loads, "arrived", lambda self, number, fetch, *, found, sound=True: arrived(self, number, fetch, found=True))


def load_not_held(patch: pytest.MonkeyPatch) -> None:
    """Blocks that are being loaded are free for others."""
    begin = Loader.begin

    def begin_and_let_go(self: Loader, *arguments: Any) -> Any:
        loading = begin(self, *arguments)
        for fetch, block in zip(loading.fetches, loading.targets, strict=True):
            self._groups[fetch.group].pool.give_back(block)
        return loading

    patch.setattr(Loader, "begin", begin_and_let_go)


FAULTS_BELOW = {
    late_write: OTHER_CONTENT,
    spilled_too_late: "a block is spilled before it was written",
    believed_before_it_came: OTHER_CONTENT,
    load_not_held: "a block is free and held",
}


@pytest.mark.parametrize("fault", FAULTS_BELOW, ids=lambda fault: fault.__name__)
def test_a_fault_below_is_seen_by_its_law(fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    assert_fires(FAULTS_BELOW[fault], lambda seed: World.from_seed(seed, 20).with_tiers(seed))
