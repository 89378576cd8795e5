"""Blocks go down and come back as they were; what stores do wrong costs misses, never memory or threads."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping

import torch

from kveik.clock import StepClock, SystemClock
from kveik.observe.events import TierState
from kveik.offload.availability import BreakerLimits
from kveik.offload.counts import Probed, RecordsLoaded, RecordStored, ThreadCompletion
from kveik.offload.mover import MovedTier, Mover
from kveik.offload.stores.encode import Codec, Int8Rows, Raw
from kveik.offload.stores.ram import RamStore
from kveik.offload.stores.record import Miss, RecordFormat, Refusal
from tests.offload.stores.records import FINGERPRINT, key_of, payload_of
from tests.offload.wrong_stores import Gate, WrongStore
from tests.seeds import over_seeds

BLOCK = 2048
CODECS: list[Codec] = [Raw(BLOCK), Raw(3 * BLOCK)]
LIMITS = BreakerLimits(failures=3, timeout=2.0, pause=1.0, pause_max=8.0)


def formats_of(codecs: list[Codec]) -> list[RecordFormat]:
    return [RecordFormat(FINGERPRINT, group, 16, one.encoding, one.payload_bytes) for group, one in enumerate(codecs)]


FORMATS = formats_of(CODECS)


def tier_of(clock: StepClock, name: str = "ram", pages: int = 64, staging: int = 1 << 16) -> MovedTier:
    store = WrongStore(FORMATS, pages * 4096, clock, name)
    return MovedTier(store=store, codecs=CODECS, staging_bytes=staging, limits=LIMITS)


class World:
    """A mover without threads over one or more wrong stores, and a pool of blocks."""

    def __init__(self, *names: str, pages: int = 64, staging: int = 1 << 16) -> None:
        self.clock = StepClock()
        self.tiers = [tier_of(self.clock, name, pages, staging) for name in names or ("ram",)]
        self.mover = Mover(self.tiers, self.clock)
        self.store = self.tiers[0].store
        assert isinstance(self.store, WrongStore)

    def run(self) -> list[ThreadCompletion]:
        """Everything that can be done, and what it came to."""
        while self.mover.step():
            pass
        return self.mover.completions()

    def put(self, *numbers: int, group: int = 0, tier: str = "ram") -> list[Refusal | None]:
        """StoreRecord, and what became of it in the end."""
        at_once = [self.mover.store(tier, key_of(number, group), block_of(number, group)) for number in numbers]
        told = {one.key: one.refusal for one in self.run() if isinstance(one, RecordStored)}
        return [told.get(key_of(number, group), refusal) for number, refusal in zip(numbers, at_once, strict=True)]

    def load(self, *numbers: int, group: int = 0, tier: str = "ram", deadline: float = 1e9) -> list[Miss | bytes]:
        """Load into fresh blocks; the bytes of those that came, or why not."""
        blocks = [bytearray(CODECS[group].block_bytes) for _ in numbers]
        records = [(key_of(number, group), memoryview(block)) for number, block in zip(numbers, blocks, strict=True)]
        self.mover.load(tier, records, 1, deadline)
        [loaded] = [one for one in self.run() if isinstance(one, RecordsLoaded)]
        return [bytes(block) if miss is None else miss for miss, block in zip(loaded.misses, blocks, strict=True)]


def block_of(number: int, group: int = 0) -> memoryview:
    return memoryview(payload_of(number, CODECS[group].block_bytes))


def happened(counts: Mapping[str, int]) -> dict[str, int]:
    """Reasons that have occurred."""
    return {reason: count for reason, count in counts.items() if count}


def blocks_of(*numbers: int, group: int = 0) -> list[bytes]:
    return [bytes(block_of(number, group)) for number in numbers]


def test_blocks_come_back_as_they_were_stored() -> None:
    world = World()
    assert world.put(1, 2, 3) == [None] * 3
    assert world.put(1, group=1) == [None]
    assert world.load(3, 1, 4) == [*blocks_of(3, 1), Miss.ABSENT], "a block differs from what was stored"
    assert world.load(1, group=1) == blocks_of(1, group=1)


def test_a_block_may_be_written_again_as_soon_as_it_is_stored() -> None:
    world, block = World(), bytearray(block_of(1))
    assert world.mover.store("ram", key_of(1), memoryview(block)) is None
    block[:] = bytes(len(block))
    world.run()
    assert world.load(1) == blocks_of(1)


def test_int8_tiers_give_back_what_quantising_keeps() -> None:
    codec = Int8Rows(64, 16, torch.bfloat16)
    [form], clock = formats_of([codec]), StepClock()
    mover = Mover([MovedTier(store=RamStore([form], 1 << 20, clock), codecs=[codec])], clock)
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(1)).bfloat16()
    back, expected, payload = torch.zeros_like(x), torch.zeros_like(x), bytearray(codec.payload_bytes)
    views = [memoryview(one.view(torch.uint8).numpy()).cast("B") for one in (x, back, expected)]
    codec.encode(views[0], memoryview(payload))
    codec.decode(memoryview(payload), views[2])
    assert mover.store("ram", key_of(1), views[0]) is None
    mover.step()
    mover.load("ram", [(key_of(1), views[1])], 1, 1e9)
    mover.step()
    assert [type(one) for one in mover.completions()] == [RecordStored, RecordsLoaded]
    assert torch.equal(back, expected)


def test_what_finds_no_room_in_front_of_a_tier_is_dropped_and_counted() -> None:
    world = World(staging=4 * 6336)
    assert world.mover.free_buffers("ram") == 4
    at_once = [world.mover.store("ram", key_of(number), block_of(number)) for number in range(6)]
    assert at_once == [None] * 4 + [Refusal.DROPPED] * 2
    assert len(world.run()) == 4
    assert happened(world.mover.snapshot("ram").counts.refusals) == {Refusal.DROPPED: 2}
    assert world.mover.free_buffers("ram") == 4


def test_a_full_tier_refuses_and_is_not_stopped() -> None:
    world = World(pages=2)
    assert world.put(*range(6)) == [None, None] + [Refusal.FULL] * 4
    assert world.mover.snapshot("ram").state is TierState.AVAILABLE
    assert world.mover.delete("ram", [key_of(0)])
    assert world.put(7) == [None]


def test_moving_makes_room_above_and_keeps_the_record_below() -> None:
    world = World("ram", "disk", pages=2)
    world.put(1, 2)
    assert world.mover.move("ram", [key_of(1), key_of(9)], "disk")
    assert world.mover.store("ram", key_of(3), block_of(3)) is None
    told = world.run()
    assert RecordStored("disk", key_of(9), Refusal.DROPPED) in told
    assert RecordStored("disk", key_of(1), None) in told
    assert RecordStored("ram", key_of(3), None) in told
    assert world.load(1, 2, 3) == [Miss.ABSENT, *blocks_of(2, 3)]
    assert world.load(1, tier="disk") == blocks_of(1)


def test_what_is_damaged_or_gone_when_it_is_moved_is_counted_where_it_was() -> None:
    world = World("ram", "disk")
    world.put(1, 2)
    assert isinstance(world.store, WrongStore)
    world.store.shown = lambda number, record: (
        memoryview(bytes(record[:-1]) + bytes([record[-1] ^ 1])) if number == 1 else record
    )
    world.mover.move("ram", [key_of(1), key_of(2), key_of(9)], "disk")
    told = world.run()
    assert [RecordStored("disk", key_of(number), Refusal.DROPPED) in told for number in (1, 2, 9)] == [True, False, True]
    assert happened(world.mover.snapshot("ram").counts.misses) == {Miss.DAMAGED: 1, Miss.ABSENT: 1}
    assert not happened(world.mover.snapshot("disk").counts.misses)
    assert world.load(1, 2, tier="disk") == [Miss.ABSENT, *blocks_of(2)]


def test_moving_between_tiers_of_different_encodings_goes_by_the_block() -> None:
    int8, raw = Int8Rows(64, 16, torch.bfloat16), Raw(2048)
    clock = StepClock()
    tiers = []
    for name, codec in (("ram", int8), ("disk", raw)):
        [form] = formats_of([codec])
        tiers.append(MovedTier(store=WrongStore([form], 1 << 20, clock, name), codecs=[codec]))
    mover, block = Mover(tiers, clock), bytearray(2048)
    x = torch.ones(64, 16).bfloat16()
    mover.store("ram", key_of(1), memoryview(x.view(torch.uint8).numpy()).cast("B"))
    mover.move("ram", [key_of(1)], "disk")
    while mover.step():
        pass
    mover.load("disk", [(key_of(1), memoryview(block))], 1, 1e9)
    mover.step()
    assert torch.equal(torch.frombuffer(block, dtype=torch.bfloat16).view(64, 16), x)


def test_a_damaged_record_leaves_the_block_untouched() -> None:
    world = World()
    world.put(1)
    assert isinstance(world.store, WrongStore)
    world.store.shown = lambda _, record: memoryview(bytes(record[:-1]) + bytes([record[-1] ^ 1]))
    block = bytearray(b"\x77" * BLOCK)
    world.mover.load("ram", [(key_of(1), memoryview(block))], 1, 1e9)
    [loaded] = world.run()
    assert isinstance(loaded, RecordsLoaded)
    assert loaded.misses == (Miss.DAMAGED,)
    assert block == b"\x77" * BLOCK
    assert happened(world.mover.snapshot("ram").counts.misses) == {Miss.DAMAGED: 1}


def test_a_store_that_takes_five_seconds_a_record_is_waited_for_until_the_deadline_and_then_left() -> None:
    world = World()
    assert isinstance(world.store, WrongStore)
    world.put(*range(40))

    def slow(number: int, record: memoryview) -> memoryview:
        world.clock.advance(5.0)
        return record

    world.store.shown = slow
    assert world.load(*range(40), deadline=12.0) == [*blocks_of(0, 1), Miss.LATE, *[Miss.LATE] * 29, *[Miss.REFUSED] * 8]
    assert world.store.gets_shown == 3
    assert world.mover.snapshot("ram").reason == "reads stopped: a try took 15.0 s, more than 2"
    assert world.load(1) == [Miss.REFUSED]
    assert world.store.gets_shown == 3


def test_nothing_is_put_behind_a_read_that_does_not_come_back() -> None:
    world = World()
    world.put(1)
    assert isinstance(world.store, WrongStore)
    refused: list[ThreadCompletion] = []

    def hang(number: int) -> None:
        world.clock.advance(2.5)
        world.mover.load("ram", [(key_of(1), memoryview(bytearray(BLOCK)))], 2, 1e9)
        refused.extend(world.mover.completions())

    world.store.gets = hang
    world.load(1)
    assert [one.misses for one in refused if isinstance(one, RecordsLoaded)] == [(Miss.REFUSED,)]


def raise_on(number: int, *, every: int) -> None:
    if number % every == 0:
        raise RuntimeError("a store must not do this")


@over_seeds(3)
def test_a_thousand_operations_on_a_store_that_does_everything_wrong(seed: int) -> None:
    chance, world, told = random.Random(seed), World(pages=40, staging=8 * 6336), Counter[str]()
    store, clock = world.store, world.clock
    assert isinstance(store, WrongStore)

    def puts(number: int) -> list[Refusal | None] | None:
        raise_on(number, every=3)
        if number % 5 == 0:
            clock.advance(3.0)
        return [] if number % 11 == 0 else None

    store.puts = puts
    store.gets = lambda number: [None] * 3 if number % 13 == 0 else raise_on(number // 4, every=5)
    store.shown = lambda number, record: memoryview(bytes(9)) if number % 7 == 0 else record
    stored = loads = 0
    for load_id in range(1000):
        clock.advance(chance.random() * 0.5)
        number = chance.randrange(30)
        if chance.random() < 0.5:
            stored += world.mover.store("ram", key_of(number), block_of(number)) is None
        elif chance.random() < 0.8:
            block = bytearray(BLOCK)
            world.mover.load("ram", [(key_of(number), memoryview(block))], load_id, clock.now() + 1.0)
            loads += 1
        else:
            world.mover.delete("ram", [key_of(number)])
        if chance.random() < 0.7:
            world.mover.step()
        for one in world.mover.completions():
            told[type(one).__name__] += 1
    told.update(type(one).__name__ for one in world.run())
    assert told == {"RecordStored": stored, "RecordsLoaded": loads}, "an answer is missing or told twice"
    state = world.mover.snapshot("ram")
    assert world.mover.free_buffers("ram") == 8, "a buffer is lost"
    assert state.loads_waiting == 0
    assert state.counts.errors > 10
    assert state.counts.records_stored > 20
    assert state.counts.records_loaded > 20
    assert not world.mover.busy
    assert state.counts.misses[Miss.REFUSED] > 0
    assert state.counts.refusals[Refusal.REFUSED] > 0
    store.check()
    clock.advance(100.0)
    store.puts, store.gets, store.shown = (lambda _: None), (lambda _: None), (lambda _, record: record)
    assert world.put(1) == [None]
    assert world.load(1) == blocks_of(1)


def test_asking_which_records_are_there() -> None:
    world = World()
    world.put(1, 3)
    world.mover.probe("ram", [key_of(1), key_of(2), key_of(3)], 7, 1e9)
    assert world.run() == [Probed("ram", 7, (key_of(1), key_of(2), key_of(3)), (True, False, True))]


def test_samples_are_told_once() -> None:
    world = World()
    world.put(1, 2)
    world.load(1)
    assert [(one.writing, one.records) for one in world.mover.samples("ram")] == [(True, 2), (False, 1)]
    assert world.mover.samples("ram") == []


def threaded(wake: Callable[[], None] = lambda: None) -> tuple[Mover, WrongStore]:
    clock = SystemClock()
    store = WrongStore(FORMATS, 64 * 4096, clock, "ram")
    mover = Mover([MovedTier(store=store, codecs=CODECS)], clock, wake)
    mover.start()
    return mover, store


def test_draining_waits_for_all_that_was_stored() -> None:
    mover, store = threaded()
    refused = [mover.store("ram", key_of(number), block_of(number)) for number in range(50)]
    assert refused == [None] * 50
    assert mover.drain(SystemClock().now() + 60)
    assert store.records == 50
    mover.close()


def test_draining_ends_at_its_deadline_and_closing_gives_all_memory_back() -> None:
    mover, store = threaded()
    gate = Gate()
    store.puts = gate
    for number in range(5):
        mover.store("ram", key_of(number), block_of(number))
    assert gate.reached.wait(60)
    assert not mover.drain(SystemClock().now() + 0.01)
    mover.close(seconds=0.01)
    gate.opened.set()
    assert mover.drain(SystemClock().now() + 60)
    assert mover.snapshot("ram").stores_waiting_bytes == 0
    assert len(mover.completions()) == 5


def test_threads_live_on_and_who_waits_is_woken_though_waking_fails() -> None:
    woken = Gate()
    woken.opened.set()

    def wake() -> None:
        woken()
        raise RuntimeError("nobody is there")

    mover, store = threaded(wake)
    store.puts = lambda number: raise_on(number, every=1)
    mover.store("ram", key_of(1), block_of(1))
    assert woken.reached.wait(60)
    assert mover.drain(SystemClock().now() + 60)
    store.puts = lambda number: None
    mover.store("ram", key_of(2), block_of(2))
    assert mover.drain(SystemClock().now() + 60)
    told = [(one.key, one.refusal) for one in mover.completions() if isinstance(one, RecordStored)]
    assert told == [(key_of(1), Refusal.FAILED), (key_of(2), None)]
    mover.close()
