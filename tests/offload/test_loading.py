"""After a load was called off nothing is written for it any more, whenever that was."""

from __future__ import annotations

import random
import threading

from kveik.clock import StepClock
from kveik.offload.block_load import BlockLoad
from kveik.offload.counts import RecordsLoaded
from kveik.offload.mover import MovedTier, Mover
from kveik.offload.stores.encode import Raw
from kveik.offload.stores.record import Miss
from tests.offload.stores.records import key_of
from tests.offload.test_mover import BLOCK, FORMATS, World, block_of, blocks_of
from tests.offload.wrong_stores import Gate, WrongStore
from tests.seeds import over_seeds


def load_of(count: int) -> BlockLoad:
    return BlockLoad(1, [(key_of(number), memoryview(bytearray(BLOCK))) for number in range(count)], 10.0)


def test_a_record_that_waits_can_be_called_off_at_once() -> None:
    load = load_of(2)
    assert load.begin(0, 0.0)
    load.end(0)
    assert load.call_off() == {key_of(0)}
    assert not load.begin(1, 0.0)
    assert load.misses == (None, Miss.LATE)


def test_a_record_is_late_after_its_deadline_and_not_at_it() -> None:
    load = load_of(2)
    assert load.begin(0, 10.0)
    load.end(0)
    assert not load.begin(1, 10.5)
    assert load.misses == (None, Miss.LATE)


def test_the_first_reason_stays_and_what_came_is_not_missed_later() -> None:
    load = load_of(3)
    load.miss(0, Miss.ABSENT)
    assert load.begin(1, 0.0)
    load.end(1)
    load.miss_rest(Miss.FAILED)
    load.miss_rest(Miss.LATE)
    assert load.misses == (Miss.ABSENT, None, Miss.FAILED)


def test_calling_off_waits_for_the_copy_that_is_under_way() -> None:
    load, done = load_of(2), threading.Event()
    assert load.begin(0, 0.0)
    found: list[object] = []

    def call_off() -> None:
        found.append(load.call_off())
        done.set()

    thread = threading.Thread(target=call_off)
    thread.start()
    while not load.called_off:
        pass
    assert not done.is_set()
    load.end(0)
    thread.join(60)
    assert found == [{key_of(0)}]


class GatedCodec(Raw):
    """Stands still in the middle of a copy."""

    def __init__(self, gate: Gate) -> None:
        super().__init__(BLOCK)
        self.gate = gate

    def decode(self, payload: memoryview, block: memoryview) -> None:
        block[:10] = payload[:10]
        self.gate()
        super().decode(payload, block)


def test_cancelling_in_the_middle_of_a_copy_returns_when_it_is_whole() -> None:
    clock, gate = StepClock(), Gate()
    store = WrongStore(FORMATS[:1], 1 << 20, clock)
    mover = Mover([MovedTier(store=store, codecs=[GatedCodec(gate)])], clock)
    for number in (1, 2):
        mover.store("ram", key_of(number), block_of(number))
    mover.step()
    mover.start()
    blocks = [bytearray(BLOCK), bytearray(BLOCK)]
    mover.load("ram", [(key_of(1), memoryview(blocks[0])), (key_of(2), memoryview(blocks[1]))], 5, 1e9)
    assert gate.reached.wait(60)
    timer = threading.Timer(0.01, gate.opened.set)
    timer.start()
    assert mover.cancel(5) == {key_of(1)}
    assert [bytes(block) for block in blocks] == [*blocks_of(1), bytes(BLOCK)]
    mover.close(60)
    told = [one for one in mover.completions() if isinstance(one, RecordsLoaded)]
    assert [one.misses for one in told] == [(None, Miss.LATE)]


@over_seeds(20)
def test_nothing_is_written_after_a_cancel_whenever_it_comes(seed: int) -> None:
    """A seeded order of events: loads begin, stores are asked, time passes and jobs are cancelled between any two records."""
    chance, world = random.Random(seed), World()
    assert isinstance(world.store, WrongStore)
    world.put(*range(20))
    blocks: dict[int, list[tuple[int, bytearray]]] = {}
    cancelled: dict[int, tuple[set[int], list[bytes]]] = {}

    def something() -> None:
        what = chance.random()
        if what < 0.3 and blocks:
            load_id = chance.choice(sorted(blocks))
            if load_id not in cancelled:
                came = {number for number, _ in blocks[load_id] if key_of(number) in world.mover.cancel(load_id)}
                cancelled[load_id] = (came, [bytes(block) for _, block in blocks[load_id]])
        elif what < 0.5:
            world.clock.advance(chance.random() * 0.2)

    def shown(number: int, record: memoryview) -> memoryview:
        something()
        return record

    world.store.shown = shown
    told: dict[int, RecordsLoaded] = {}
    for load_id in range(60):
        blocks[load_id] = [(number, bytearray(BLOCK)) for number in chance.sample(range(25), chance.randrange(1, 8))]
        records = [(key_of(number), memoryview(block)) for number, block in blocks[load_id]]
        world.mover.load("ram", records, load_id, world.clock.now() + chance.random())
        something()
        if chance.random() < 0.6:
            world.mover.step()
        told |= {one.load_id: one for one in world.mover.completions() if isinstance(one, RecordsLoaded)}
    told |= {one.load_id: one for one in world.run() if isinstance(one, RecordsLoaded)}
    assert sorted(told) == list(range(60))
    assert len(cancelled) > 5
    for load_id, loaded in told.items():
        for (number, block), miss in zip(blocks[load_id], loaded.misses, strict=True):
            assert block == (bytes(BLOCK) if miss is not None else block_of(number))
    for load_id, (came, contents) in cancelled.items():
        assert [bytes(block) for _, block in blocks[load_id]] == contents, "something was written after the cancel"
        assert all(told[load_id].misses[at] is None for at, (number, _) in enumerate(blocks[load_id]) if number in came)
