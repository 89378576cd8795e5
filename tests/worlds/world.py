"""A small world from one seed: who arrives when, asks what, is aborted or fails; and the laws that are checked every step."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from kveik.cache.eviction.hazard import HazardPolicy
from kveik.cache.eviction.lru import LruPolicy
from kveik.cache.eviction.policy import EvictionPolicy
from kveik.cache.kv_cache_manager import KVCacheManager
from kveik.cache.layout import LayerGroup, blocks_at_most
from kveik.config import ScheduleConfig
from kveik.offload.cost import LoadCost
from kveik.offload.manager import OffloadManager
from kveik.offload.tier_chain import TierChain
from kveik.request.request import Request, SamplingParams
from kveik.request.sequence import Sequence, Status
from kveik.schedule.plan import StepOutcome, StepPlan
from kveik.schedule.proposer import Proposer
from kveik.schedule.scheduler import Scheduler
from kveik.schedule.step_cost import StepCost
from tests.schedule.rows import behind_of, decodes_of, preempted_in
from tests.worlds.memory import MemoryExecutor, ideal_output
from tests.worlds.tiers import SimulatedTiers, draw_chain

EOS = 0
VOCABULARY = 7
SHAPES = ((None,), (None,), (None, 8), (None, 20), (5,), (None, 1, 13))
"""Windows of the layer groups."""


@dataclass
class World:
    """Everything drawn from the seed before the first step."""

    chance: random.Random
    groups: list[LayerGroup]
    blocks: list[int]
    block_size: int
    max_model_len: int
    limits: ScheduleConfig
    caching: bool
    eviction: EvictionPolicy | None = None
    proposer: Proposer | None = None
    chain: TierChain | None = None
    """Of tiers below the pool."""

    arrivals: dict[int, list[Sequence]] = field(default_factory=dict)
    """Step -> who arrives."""

    @classmethod
    def from_seed(cls, seed: int, sequences: int = 14) -> World:
        chance = random.Random(seed)
        block_size = chance.choice((4, 8, 8, 16, 16, 32, 64))
        max_model_len = chance.randrange(24, 160)
        chunk = chance.choice((1, 7, 16, 33, 64))
        rows = chance.randrange(1, 7)
        limits = ScheduleConfig(
            max_num_seqs=rows,
            max_num_batched_tokens=max(rows, chance.choice((8, 16, 64, 128))),
            prefill_chunk_size=chance.choice((chunk, chunk + 20)),
            # The KV cache manager is told the smallest of the three, and its windowed groups have not a block to spare.
            long_prefill_token_threshold=chance.choice((None, 3, chunk)),
            scheduling_policy=chance.choice(("fcfs", "priority")),
            priority_aging_seconds=chance.choice((2.0, 30.0, float("inf"))),
            look_past=chance.choice((0, 1, 8)),
            look_past_limit=chance.choice((0, 2, 64)),
        )
        groups = [LayerGroup((number,), 1, 4, window) for number, window in enumerate(chance.choice(SHAPES))]
        chunk = limits.chunk_tokens_max
        least = [blocks_at_most(group, max_model_len, block_size, chunk) for group in groups]
        extra = chance.choice((0, 0, 1, 3, 10, 60))
        blocks = [count + chance.randrange(extra + 1) for count in least]
        world = cls(chance, groups, blocks, block_size, max_model_len, limits, caching=chance.random() < 0.85)
        world._draw_arrivals(sequences)
        if chance.random() < 0.6:
            world.eviction = HazardPolicy(block_size, chance, samples=chance.choice((1, 64)))
        return world

    def with_tiers(self, seed: int) -> World:
        """The same world, with something below its pool."""
        self.caching = True
        self.eviction = self.eviction or LruPolicy()
        self.chain = draw_chain(random.Random(f"tiers {seed}"), self.groups, self.block_size)
        return self

    def with_guesses(self, seed: int) -> World:
        """The same world, in which tokens are guessed rightly, wrongly, too many and at random."""
        self.proposer = Guesses(random.Random(f"guesses {seed}"), self)
        return self

    def _draw_arrivals(self, sequences: int) -> None:
        chance, made = self.chance, 0
        bases = [[chance.randrange(1, VOCABULARY) for _ in range(self.max_model_len)] for _ in range(3)]
        while made < sequences:
            step, request = chance.randrange(60), self._draw_request(made, bases)
            for choice in range(request.sampling.n):
                sequence = Sequence.start(id=made, request=request, choice=choice, seed=0, arrived=float(step))
                self.arrivals.setdefault(step, []).append(sequence)
                made += 1

    def _draw_request(self, number: int, bases: list[list[int]]) -> Request:
        chance = self.chance
        prefix = chance.choice(bases)[: chance.choice((0, 10, 16, 40, self.max_model_len))]
        suffix = [chance.randrange(1, VOCABULARY) for _ in range(chance.choice((0, 1, 5, 30)))]
        prompt = (prefix + suffix)[: self.max_model_len - 1] or [1]
        room = self.max_model_len - len(prompt)
        max_tokens = chance.randrange(1, min(room, chance.choice((1, 8, 90))) + 1)
        sampling = SamplingParams(
            max_tokens=max_tokens,
            n=chance.choice((1, 1, 1, 2, 4)),
            ignore_eos=chance.random() < 0.5,
            stop_token_ids=chance.choice(((), (), (3,))),
            min_tokens=chance.choice((0, 0, max_tokens)),
            prompt_logprobs=chance.choice((None, None, None, 1)),
        )
        return Request(
            id=f"r{number}",
            prompt=tuple(prompt),
            sampling=sampling,
            priority=chance.choice((0, 0, 1, 5)),
            tenant=chance.choice((b"", b"", b"t")),
            cache_salt=chance.choice((None, None, "x")),
        )


class Guesses:
    """Guesses from the answer that a sequence must give: right, wrong from some place on, beyond the limit, or drawn."""

    def __init__(self, chance: random.Random, world: World) -> None:
        self._chance, self._world = chance, world
        self._answers: dict[int, list[int]] = {}
        self.right = self.wrong = 0

    def propose(self, sequence: Sequence, limit: int) -> list[int]:
        if sequence.id not in self._answers:
            self._answers[sequence.id] = ideal_output(sequence.request, self._world.caching, EOS, VOCABULARY)
        coming, chance = self._answers[sequence.id][sequence.output_count :], self._chance
        count = chance.choice((0, 1, 2, 5, limit + 3))
        match chance.randrange(4):
            case 0:
                guesses = coming[:count]
                self.right += len(guesses) > 0
            case 1:
                right = coming[: chance.randrange(count + 1)]
                guesses = [*right, *(chance.randrange(VOCABULARY) for _ in range(count - len(right)))]
            case 2:
                guesses = [(token + 1) % VOCABULARY for token in coming[:count]]
                self.wrong += len(guesses) > 0
            case _:
                guesses = [chance.randrange(VOCABULARY) for _ in range(count)]
        return guesses


def costs_of(chance: random.Random, chain: TierChain) -> list[LoadCost]:
    """A step takes a second here, and loading something like it."""
    return [LoadCost((chance.choice((0.1, 1.0, 3.0)), 1e-3)) for _ in chain.tiers]


class Run:
    """One world under the real scheduler and KV cache manager."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.kv_cache = KVCacheManager(
            world.groups,
            world.blocks,
            block_size=world.block_size,
            rows=world.limits.max_num_seqs,
            max_model_len=world.max_model_len,
            max_chunk=world.limits.chunk_tokens_max,
            enable_prefix_caching=world.caching,
            eviction=world.eviction,
            record_facts=world.chain is not None,
        )
        self.executor = MemoryExecutor(world.groups, world.blocks, self.kv_cache, vocabulary=VOCABULARY, caching=world.caching)
        self.tiers: SimulatedTiers | None = None
        offload: OffloadManager | None = None
        if world.chain is not None:
            self.tiers = SimulatedTiers(world.chance, world.chain, self.executor)
            costs = costs_of(world.chance, world.chain)
            offload = OffloadManager(self.kv_cache, world.chain, StepCost((1.0, 0.05, 1e-6)), costs, self.tiers)
        self.scheduler = Scheduler(
            self.kv_cache, world.limits, world.max_model_len, frozenset({EOS}), offload, proposer=world.proposer
        )
        self.offload = self.scheduler.offload
        self.everybody: list[Sequence] = []
        self.preemptions = 0
        self.several = 0
        """Rows that kept several tokens."""

        self.steps = 0

    def run(self) -> None:
        world = self.world
        work = sum(len(one.tokens) + one.sampling.max_tokens for ones in world.arrivals.values() for one in ones)
        while self.steps < 60 or self.scheduler.has_work:
            assert self.steps < 60 + 20 * work, "the world does not come to an end"
            self.step()
        self._check_end()

    def step(self) -> None:
        now = float(self.steps)
        for sequence in self.world.arrivals.get(self.steps, ()):
            self.scheduler.add(sequence)
            self.everybody.append(sequence)
        self._disturb()
        if self.tiers is not None:
            self.tiers.deliver(now)
            self.offload.attend(now)
            self.scheduler.check()
        before = {one.id: one for one in self.everybody if one.status is Status.RUNNING}
        decoding = {id_ for id_, one in before.items() if one.decoding}
        plan = self.scheduler.plan(now)
        self.scheduler.check()
        self._check_plan(plan, before, decoding)
        self._check_nobody_waits_in_vain(plan)
        self.offload.carry_out(now)
        self.executor.launch(plan)
        self.offload.start_loads()
        outcome = self._execute(plan)
        settled = self.scheduler.settle(plan, outcome, now)
        self.several += int((settled.kept > 1).sum())
        if self.tiers is not None and self.world.chance.random() < 0.5:
            self.offload.carry_out(now)
        learner = self.kv_cache.evictor.policy.learner
        if learner is not None and self.steps % 10 == 9:
            learner.learn(now)
        self.scheduler.check()
        self.preemptions += len(plan.preempted)
        self.steps += 1

    def _disturb(self) -> None:
        """Somebody hangs up, or an operator empties the cache."""
        chance = self.world.chance
        if self.everybody and chance.random() < 0.05:
            self.scheduler.abort(chance.choice(self.everybody).id, float(self.steps))
        if chance.random() < 0.02:
            self.kv_cache.reset()
        self.scheduler.check()

    def _execute(self, plan: StepPlan) -> StepOutcome:
        chance = self.world.chance
        outcome = self.executor.collect(self.scheduler.sequence, lambda _: chance.random() < 0.003)
        # Somebody hangs up while the step runs.
        if not plan.empty and chance.random() < 0.03:
            assert self.scheduler.abort(chance.choice(plan.sequence_ids), float(self.steps))
            self.scheduler.check()
        return outcome

    def _check_plan(self, plan: StepPlan, before: dict[int, Sequence], decoding: set[int]) -> None:
        limits = self.world.limits
        assert plan.tokens <= limits.max_num_batched_tokens
        assert plan.catch_up_tokens <= limits.prefill_chunk_size
        ids = list(plan.sequence_ids)
        assert len(set(ids)) == len(ids), "a sequence has two rows"
        rows = [one.row for id_ in ids if (one := self.scheduler.sequence(id_)) is not None]
        assert rows == list(range(len(ids))), "the block tables' first rows are not the plan's"
        # Law 5: every running decode has its token, ahead of all prefill.
        preempted = set(preempted_in(plan))
        assert {row.sequence_id for row in decodes_of(plan)} - set(plan.admitted) == decoding - preempted, (
            "a running decode gets no token"
        )
        for row in behind_of(plan):
            assert row.count <= (limits.long_prefill_token_threshold or row.count)
        self._check_reasons(plan)
        # Law 6: whoever is first among the running ones makes progress.
        if before:
            first = min(before.values(), key=self._rank)
            if not plan.admitted or limits.scheduling_policy == "fcfs":
                assert first.id in ids, "the first one stands still"
        assert not preempted & set(plan.admitted)

    def _check_reasons(self, plan: StepPlan) -> None:
        """Every live sequence is in the step, or has one reason why it is not."""
        reasons = [one.sequence_id for one in plan.not_scheduled]
        assert len(set(reasons)) == len(reasons), "a sequence has two reasons"
        assert not set(reasons) & set(plan.sequence_ids), "a sequence that runs has a reason not to"
        waiting = [one for one in self.everybody if one.status is Status.WAITING]
        assert len([one for one in waiting if one.id in reasons]) + plan.unexamined == len(waiting)
        for one in self.everybody:
            if one.status is not Status.FINISHED:
                reason = plan.reason(one.id, one.request.id)
                assert (reason is None) == (one.id in plan.sequence_ids)

    def _check_nobody_waits_in_vain(self, plan: StepPlan) -> None:
        """Whoever is first in line and fits was admitted, if there was budget and nobody gave way."""
        limits, queue = self.world.limits, self.scheduler._queue
        decodes = int(plan.decoding.sum())
        budget = min(limits.prefill_chunk_size, limits.max_num_batched_tokens - decodes)
        if plan.admitted and self.tiers is not None:
            return  # What loads held was given back when the line had been gone through.
        if plan.preempted or plan.catch_up_tokens >= budget or not queue.ready:
            return
        first = queue.at(0)
        limit = first.hit_limit
        match = self.kv_cache.match(first.id, limit)
        waits = self.kv_cache.blocker(first.id, match, limit) is not None
        assert waits or not self.kv_cache.can_admit(first.id, match), "the first in line fits and is not admitted"

    def _rank(self, sequence: Sequence) -> tuple[float, int]:
        if self.world.limits.scheduling_policy == "fcfs":
            return (0.0, sequence.admission)
        return (sequence.request.priority + sequence.arrived / self.world.limits.priority_aging_seconds, sequence.id)

    def _check_end(self) -> None:
        for usage in self.kv_cache.usage:
            assert usage.held == 0
            assert usage.free + usage.cached == usage.total
        if not self.world.caching:
            assert all(usage.cached == 0 for usage in self.kv_cache.usage), "a private block outlived its request"
        hits = sum(one.cached_tokens for one in self.everybody if one.cached_tokens is not None)
        assert self.scheduler.prefix_hits == hits, "hits are not counted once a sequence"
        admitted = [one for one in self.everybody if one.cached_tokens is not None]
        assert self.scheduler.prefix_queries == sum(one.prompt_length for one in admitted)
        for one in self.everybody:
            assert one.status is Status.FINISHED
            assert sum(one.loaded_tokens.values()) <= (one.cached_tokens or 0)
            self._check_answer(one)

    def _check_answer(self, one: Sequence) -> None:
        ideal = ideal_output(one.request, self.world.caching, EOS, VOCABULARY)
        if one.finish_reason in ("stop", "length"):
            assert one.output == ideal, "the answer depends on cache or company"
            # Law 10: what was not found was computed, once.
            if one.preemptions == 0:
                assert one.cached_tokens is not None
                computed, needed = self.executor.computed[one.id], one.length - 1 - one.cached_tokens
                assert computed == needed or (self.world.proposer is not None and computed >= needed)
        else:
            assert one.output == ideal[: one.output_count]
