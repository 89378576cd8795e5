"""Waiting for what lies below the pool: who waits, with whom, for how long, and who gives way to whom."""

from __future__ import annotations

from dataclasses import dataclass, field

from kveik.cache.eviction.lru import LruPolicy
from kveik.cache.kv_cache_manager import KVCacheManager
from kveik.cache.layout import LayerGroup
from kveik.config import ScheduleConfig
from kveik.observe.events import Event, LoadDecided
from kveik.offload.cost import LoadCost
from kveik.offload.manager import OffloadManager
from kveik.offload.tier_chain import TierChain
from kveik.offload.transfer import Arrived, LoadRecords
from kveik.request.sequence import Status
from kveik.schedule.scheduler import Scheduler
from kveik.schedule.step_cost import StepCost
from tests.offload.making import HandCarrier, tier
from tests.schedule.making import Desk

SIZE, PROMPT = 4, 40
KNOWN = (PROMPT - 1) // SIZE * SIZE
"""Of a prompt that was served before, tokens in whole blocks but for the last token."""


@dataclass
class Below:
    """A desk over one tier that stores at once and loads when it is told to."""

    desk: Desk
    offload: OffloadManager
    carrier: HandCarrier
    told: list[Event] = field(default_factory=list)

    @property
    def loads(self) -> list[LoadRecords]:
        return self.carrier.loads

    @property
    def cancelled(self) -> list[int]:
        return self.carrier.cancelled

    @property
    def decided(self) -> list[tuple[str, str]]:
        """Requests and reasons of all decisions."""
        return [(one.request_id, one.reason) for one in self.told if isinstance(one, LoadDecided)]

    def step(self) -> None:
        self.offload.attend(self.desk.now)
        plan = self.desk.plan()
        self.offload.carry_out(self.desk.now)
        self.offload.start_loads()
        self.desk.settle(plan)
        self.offload.carry_out(self.desk.now)

    def arrive(self, load: LoadRecords) -> None:
        for number in range(len(load.records)):
            self.tell(load, number, found=True)

    def tell(self, load: LoadRecords, number: int, *, found: bool) -> None:
        self.carrier.ended.append(Arrived(load.load, number, load.records[number], found, lost=not found))


def below(*, blocks: int = 24, load_seconds: float = 0.1, token_seconds: float = 1.0) -> Below:
    """One prompt of `PROMPT` tokens has been served, and has gone below."""
    group = LayerGroup((0,), 1, 2, None)
    limits = ScheduleConfig(max_num_seqs=4, max_num_batched_tokens=64, prefill_chunk_size=48)
    kv_cache = KVCacheManager(
        [group], [blocks], block_size=SIZE, rows=4, max_model_len=80, max_chunk=48, eviction=LruPolicy(), record_facts=True
    )
    chain = TierChain([group], SIZE, [tier(10_000)])
    carrier, told = HandCarrier(chain), list[Event]()
    costs = [LoadCost((load_seconds, 1e-9))]
    offload = OffloadManager(kv_cache, chain, StepCost((1e-3, token_seconds, 1e-9)), costs, carrier, told.append)
    made = Below(Desk(Scheduler(kv_cache, limits, 80, offload=offload)), offload, carrier, told)
    made.desk.ask(list(range(100, 100 + PROMPT)), 1)
    made.step()
    ledger_full(made)
    return made


def ledger_full(made: Below) -> None:
    """Others push everything out of the pool."""
    for _ in range(4):
        made.desk.ask(72, 1)
        while made.desk.scheduler.has_work:
            made.step()
    assert made.desk.scheduler.kv_cache.usage[0].held == 0


def again(made: Below) -> list[int]:
    return list(range(100, 100 + PROMPT))


def test_a_sequence_waits_for_its_load_and_computes_only_the_rest() -> None:
    made = below()
    one = made.desk.ask(again(made), 1)
    made.step()
    assert (one.status, made.offload.loading) == (Status.WAITING, 1)
    (load,) = made.loads
    assert [record.place for record in load.records] == list(range(KNOWN // SIZE))
    made.arrive(load)
    made.step()
    assert (one.cached_tokens, one.loaded_tokens) == (KNOWN, {"ram": KNOWN})
    assert made.desk.computed[one.id] == PROMPT - KNOWN


def test_those_who_begin_alike_wait_for_the_same_load() -> None:
    made = below()
    ones = [made.desk.ask([*again(made), number], 1) for number in range(3)]
    made.step()
    assert len(made.loads) == 1
    assert {one.status for one in ones} == {Status.WAITING}
    made.arrive(made.loads[0])
    made.step()
    assert [one.cached_tokens for one in ones] == [PROMPT // SIZE * SIZE] * 3
    assert [sum(one.loaded_tokens.values()) for one in ones] == [PROMPT // SIZE * SIZE, 0, 0]


def test_nobody_waits_longer_than_computing_takes_and_nobody_loads_twice() -> None:
    made = below()
    one = made.desk.ask(again(made), 1)
    made.step()
    deadline = made.loads[0].deadline
    assert deadline - (made.desk.now - 1) <= PROMPT + 1
    while one.status is Status.WAITING and made.desk.now < 200:
        made.step()
    assert made.desk.now <= deadline + 2
    assert made.cancelled == [made.loads[0].load]
    assert (len(made.loads), one.cached_tokens, one.loaded_tokens) == (1, 0, {})


def test_what_is_sooner_computed_is_not_loaded() -> None:
    made = below(load_seconds=1000.0)
    one = made.desk.ask(again(made), 1)
    made.step()
    assert (one.status, made.loads) == (Status.FINISHED, [])


def test_every_decision_is_told_with_its_request_and_its_reason() -> None:
    made = below()
    made.told.clear()
    made.desk.ask(again(made), 1)
    made.desk.ask(8, 1)
    made.step()
    first, second = (one for one, _ in made.decided)
    assert made.decided == [(first, "load"), (second, "nothing stored")]
    assert first != second
    slow = below(load_seconds=1000.0)
    slow.told.clear()
    slow.desk.ask(again(slow), 1)
    slow.step()
    assert [reason for _, reason in slow.decided] == ["compute"]


def test_others_compute_while_one_loads() -> None:
    made = below()
    waits, other = made.desk.ask(again(made), 1), made.desk.ask(8, 1)
    made.step()
    assert (waits.status, other.status) == (Status.WAITING, Status.FINISHED)


def test_a_load_gives_way_before_a_running_sequence_does() -> None:
    made = below()
    # It takes 12 of the 24 blocks, and needs 8 more while the load has 9 of the others.
    runs = made.desk.ask(44, 32)
    made.step()
    waits = made.desk.ask(again(made), 1)
    while runs.status is not Status.FINISHED:
        made.step()
    assert runs.preemptions == 0
    assert made.cancelled == [made.loads[0].load]
    while made.desk.scheduler.has_work:
        made.step()
    assert waits.status is Status.FINISHED


def test_an_abort_ends_the_load_and_frees_those_who_wait_with_it() -> None:
    made = below()
    first, second = made.desk.ask([*again(made), 1], 1), made.desk.ask([*again(made), 2], 1)
    made.step()
    made.desk.scheduler.abort(first.id, made.desk.now)
    made.step()
    assert made.cancelled == [made.loads[0].load]
    assert made.loads[1].load != made.loads[0].load, "the second loads for itself"
    made.arrive(made.loads[1])
    made.step()
    assert second.loaded_tokens == {"ram": PROMPT // SIZE * SIZE}


def test_behind_a_gap_nothing_is_waited_for() -> None:
    made = below()
    one = made.desk.ask(again(made), 1)
    made.step()
    load = made.loads[0]
    for number in (0, 1):
        made.tell(load, number, found=True)
    made.tell(load, 2, found=False)
    made.step()
    assert (one.cached_tokens, one.loaded_tokens) == (2 * SIZE, {"ram": 2 * SIZE})
    assert made.offload.chain.tiers[0].stored(load.records[2].key) == 0
    assert made.cancelled == [load.load]


def test_a_load_that_is_called_off_for_a_reset_brings_nothing() -> None:
    made = below()
    choice = made.desk.ask(list(range(100, 100 + PROMPT)), 1)
    made.step()
    [load] = made.loads
    made.tell(load, 0, found=True)
    while made.offload.release_for_blocks():
        pass
    made.desk.scheduler.kv_cache.reset()
    made.offload.attend(made.desk.now)
    made.offload.reset()
    while made.desk.scheduler.has_work:
        made.step()
    assert choice.status is Status.FINISHED
    assert choice.cached_tokens == 0
