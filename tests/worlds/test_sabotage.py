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
from kveik.cache.group import GroupBlocks
from kveik.cache.keys import KeySpace
from kveik.cache.kv_cache_manager import KVCacheManager
from kveik.cache.load_reservations import LoadReservations
from kveik.offload.manager import OffloadManager
from kveik.offload.transfer import Cancel, StoreRecord
from kveik.schedule.plan import StepPlan
from kveik.schedule.running_batch import RunningBatch
from kveik.schedule.scheduler import Scheduler
from kveik.schedule.scheduling_policy import FirstCome, PriorityWithAging
from tests.schedule import rows
from tests.worlds.memory import MemoryExecutor
from tests.worlds.tiers import SimulatedTiers
from tests.worlds.world import Run, World

WORLDS = 120


def registered_too_early(patch: pytest.MonkeyPatch) -> None:
    """Blocks are registered when room is made for them, before the step that fills them."""
    grow = KVCacheManager.grow

    def grow_and_register(self: KVCacheManager, sequence_id: int, length: int, now: float) -> int:
        room = grow(self, sequence_id, length, now)
        seq = self._seqs[sequence_id]
        seq.committed = length
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
    """A block that is allocated for something else can still be found as what it was."""
    patch.setattr(GroupBlocks, "allocate", lambda self, count: self.pool.allocate(count))


def lost_block(patch: pytest.MonkeyPatch) -> None:
    """Every hundredth block that is freed is not."""
    free, count = BlockPool.free, [0]

    def leak(self: BlockPool, *blocks: int) -> None:
        for block in blocks:
            count[0] += 1
            if count[0] % 100:
                free(self, block)

    patch.setattr(BlockPool, "free", leak)


def written_while_shared(patch: pytest.MonkeyPatch) -> None:
    """A partial hit shares the block instead of copying it."""

    def share(self: KVCacheManager, seq: Any, match: Any, now: float) -> tuple[()]:
        for number, source in enumerate(match.sources):
            self._groups[number].pool.touch(source)
            seq.blocks[number].append(source)
            self._tables.arrays[number][seq.row, match.full] = source
        return ()

    patch.setattr(KVCacheManager, "_copy", share)


def decode_forgotten(patch: pytest.MonkeyPatch) -> None:
    """The last decode is left out of a step."""
    single = RunningBatch.single

    def all_but_the_last(self: RunningBatch) -> Any:
        found = single(self)
        if found.sum() > 1:
            found[np.flatnonzero(found)[-1]] = False
        return found

    patch.setattr(RunningBatch, "single", all_but_the_last)


def victim_is_the_oldest(patch: pytest.MonkeyPatch) -> None:
    """The oldest gives way."""
    for policy in (FirstCome, PriorityWithAging):
        patch.setattr(policy, "victim", lambda self, running, now: min(running, key=lambda one: one.admission))


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

    def write_and_more(self: MemoryExecutor, plan: StepPlan, row: int, contents: Any) -> None:
        write(self, plan, row, contents)
        start = int(plan.starts[row])
        if start % self.size:
            block = plan.tables.read()[0][row, start // self.size]
            self.slots[0][block][start % self.size - 1] = -1

    patch.setattr(MemoryExecutor, "write", write_and_more)


def capacity_not_noted(patch: pytest.MonkeyPatch) -> None:
    """The running batch does not hear of new blocks."""
    patch.setattr(Scheduler, "_grow", lambda self, sequence, length, now: self.kv_cache.grow(sequence.id, length, now))


def stops_not_seen(patch: pytest.MonkeyPatch) -> None:
    """The running batch looks at lengths alone."""
    ending = RunningBatch.ending

    def ending_by_length(self: RunningBatch, given: Any) -> list[int]:
        return [row for row in ending(self, given) if (one := self.sequences[row]) and one.length >= one.end_length]

    patch.setattr(RunningBatch, "ending", ending_by_length)


def moves_not_told(patch: pytest.MonkeyPatch) -> None:
    """Rows are exchanged, and the block tables stay as they were."""
    arrange = RunningBatch.arrange

    def arrange_in_silence(self: RunningBatch, counts: Any) -> list[tuple[int, int]]:
        arrange(self, counts)
        return []

    patch.setattr(RunningBatch, "arrange", arrange_in_silence)


OTHER_CONTENT = "reads group . position .* of another content"


def guesses_always_kept(patch: pytest.MonkeyPatch) -> None:
    """Wrong guesses are committed as if they had been right."""
    patch.setattr(rows, "accepted", lambda tokens, starts, guesses, failed: (np.diff(starts), frozenset()))


def rejected_guesses_keep_their_place(patch: pytest.MonkeyPatch) -> None:
    """Progress counts the guesses that were wrong."""
    advance = RunningBatch.advance

    def advance_all(self: RunningBatch, computed: Any, tokens: Any, offsets: Any, now: float) -> list[float]:
        return advance(self, np.maximum(computed, self.computed[: len(computed)] + 2), tokens, offsets, now)

    patch.setattr(RunningBatch, "advance", advance_all)


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
    capacity_not_noted: "a sequence is computed beyond its blocks",
    stops_not_seen: "the answer depends on cache or company",
    moves_not_told: "a sequence has another row in the block tables",
}
"""What is wrong -> the law that must fire, by what it says."""

GUESS_FAULTS: dict[Callable[[pytest.MonkeyPatch], None], str] = {
    guesses_always_kept: "the answer depends on cache or company",
    rejected_guesses_keep_their_place: "a sequence is past its end",
}


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


@pytest.mark.parametrize("fault", GUESS_FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_with_guesses_is_seen_by_its_law(
    fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    assert_fires(GUESS_FAULTS[fault], lambda seed: World.from_seed(seed).with_guesses(seed))


def late_write(patch: pytest.MonkeyPatch) -> None:
    """A load that was called off writes all the same."""
    carry_out = SimulatedTiers.carry_out

    def carry_out_but_cancel(self: SimulatedTiers, transfers: Any) -> None:
        carry_out(self, [one for one in transfers if not isinstance(one, Cancel)])

    patch.setattr(SimulatedTiers, "carry_out", carry_out_but_cancel)
    patch.setattr(SimulatedTiers, "cancel", lambda self, load: [])


def stored_too_late(patch: pytest.MonkeyPatch) -> None:
    """What was given up is copied a step later, when something else stands there."""
    carry_out, kept = SimulatedTiers.carry_out, []

    def carry_out_later(self: SimulatedTiers, transfers: Any) -> None:
        now = list(transfers)
        late, kept[:] = list(kept), [one for one in now if isinstance(one, StoreRecord)]
        carry_out(self, [*late, *(one for one in now if not isinstance(one, StoreRecord))])

    patch.setattr(SimulatedTiers, "carry_out", carry_out_later)


def believed_before_it_came(patch: pytest.MonkeyPatch) -> None:
    """Whatever became of a record, its block counts as loaded."""
    arrived = OffloadManager._arrived
    patch.setattr(OffloadManager, "_arrived", lambda self, one: arrived(self, one._replace(found=True, lost=False)))


def load_not_held(patch: pytest.MonkeyPatch) -> None:
    """Blocks that are being loaded are free for others."""
    reserve = LoadReservations.reserve

    def reserve_and_let_go(self: LoadReservations, sequence_id: int, wanted: Any, *arguments: Any) -> Any:
        blocks = reserve(self, sequence_id, wanted, *arguments)
        for (group, _), block in zip(wanted, blocks or (), strict=False):
            self._groups[group].pool.free(block)
        return blocks

    patch.setattr(LoadReservations, "reserve", reserve_and_let_go)


FAULTS_BELOW = {
    late_write: OTHER_CONTENT,
    stored_too_late: "a block is stored before it was written",
    believed_before_it_came: OTHER_CONTENT,
    load_not_held: "a block is free and held",
}


@pytest.mark.parametrize("fault", FAULTS_BELOW, ids=lambda fault: fault.__name__)
def test_a_fault_below_is_seen_by_its_law(fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    assert_fires(FAULTS_BELOW[fault], lambda seed: World.from_seed(seed, 20).with_tiers(seed))
