"""The worlds' checkers see faults: each fault below is one that a real cache has had, and is found within a few worlds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kveik.cache.block_pool import BlockPool
from kveik.cache.evictor import Evictor
from kveik.cache.group import GroupBlocks
from kveik.cache.keys import KeySpace
from kveik.cache.kv_cache_manager import KVCacheManager
from kveik.offload.loader import Loader
from kveik.offload.loads import Loads
from kveik.offload.transfer import Cancel
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
    start = Scheduler._start

    def start_without_copies(self: Scheduler, *arguments: Any) -> None:
        start(self, *arguments)
        arguments[2].copies.clear()

    patch.setattr(Scheduler, "_start", start_without_copies)


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
    """Prefill is decided before the decodes have their blocks, so decodes give way to it."""
    secure = Scheduler._secure_decodes

    def only_sometimes(self: Scheduler, draft: Any) -> None:
        if self._decodes and len(self._alive) % 3 == 0:
            self._decodes.pop(next(iter(self._decodes)))
        secure(self, draft)

    patch.setattr(Scheduler, "_secure_decodes", only_sometimes)


def victim_is_the_oldest(patch: pytest.MonkeyPatch) -> None:
    """The oldest gives way."""
    from_policy = Scheduler._secure

    def secure(self: Scheduler, *arguments: Any) -> bool:
        patch.setattr(self._policy, "yielder", lambda running: min(running, key=lambda one: one.admission))
        return from_policy(self, *arguments)

    patch.setattr(Scheduler, "_secure", secure)


def hit_counted_again(patch: pytest.MonkeyPatch) -> None:
    """Every admission is counted, also after a preemption."""
    start = Scheduler._start

    def start_and_count(self: Scheduler, *arguments: Any) -> None:
        again = arguments[0].cached_tokens is not None
        start(self, *arguments)
        self.prefix_hits += arguments[0].computed if again else 0

    patch.setattr(Scheduler, "_start", start_and_count)


def executor_reads_ahead(patch: pytest.MonkeyPatch) -> None:
    """The fake model writes into the slot behind its own."""
    write = MemoryExecutor._write

    def write_and_more(self: MemoryExecutor, chunk: Any, sequence: Any) -> None:
        write(self, chunk, sequence)
        if chunk.start % self.size:
            row = self.kv_cache.tables[0][sequence.row]
            self.slots[0][row[chunk.start // self.size]][chunk.start % self.size - 1] = -1

    patch.setattr(MemoryExecutor, "_write", write_and_more)


FAULTS: list[Callable[[pytest.MonkeyPatch], None]] = [
    registered_too_early,
    salt_left_out,
    copies_forgotten,
    window_one_too_short,
    stale_index,
    lost_block,
    written_while_shared,
    decode_forgotten,
    victim_is_the_oldest,
    hit_counted_again,
    executor_reads_ahead,
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_is_seen(fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    with pytest.raises((AssertionError, KeyError, IndexError)):
        for seed in range(WORLDS):
            Run(World.from_seed(seed)).run()


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


@pytest.mark.parametrize(
    "fault", [late_write, spilled_too_late, believed_before_it_came, load_not_held], ids=lambda fault: fault.__name__
)
def test_a_fault_below_is_seen(fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    with pytest.raises((AssertionError, KeyError, IndexError)):
        for seed in range(WORLDS):
            Run(World.from_seed(seed, 20).with_tiers(seed)).run()
