"""Schedulers over a fake executor, for tests that read like a story."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kveik.cache.kv_cache_manager import KVCacheManager
from kveik.cache.layout import LayerGroup
from kveik.config import ScheduleConfig
from kveik.request.request import Request, SamplingParams
from kveik.request.sequence import Sequence as Choice
from kveik.schedule.plan import Settled, StepPlan
from kveik.schedule.scheduler import Scheduler
from tests.schedule.rows import outcome_of, rows_of

EOS = 0
WORD = 9
"""What the fake model says, unless told otherwise."""


@dataclass
class Desk:
    """A scheduler, a clock that counts steps, and a model that answers WORD."""

    scheduler: Scheduler
    says: Callable[[int], int] = lambda _: WORD
    step_count: int = 0
    computed: dict[int, int] = field(default_factory=dict)
    """Tokens computed per sequence."""

    ids: itertools.count[int] = field(default_factory=itertools.count)
    seconds_per_step: float = 1.0

    @property
    def now(self) -> float:
        return self.step_count * self.seconds_per_step

    def ask(
        self,
        prompt: Sequence[int] | int,
        max_tokens: int = 4,
        *,
        priority: int = 0,
        salt: str | None = None,
        **sampling: object,
    ) -> Choice:
        """Queue one request of one choice; a number stands for a prompt of that many tokens that nobody else has."""
        (choice,) = self.ask_many(prompt, 1, max_tokens, priority=priority, salt=salt, **sampling)
        return choice

    def ask_many(
        self,
        prompt: Sequence[int] | int,
        n: int,
        max_tokens: int = 4,
        *,
        priority: int = 0,
        salt: str | None = None,
        **sampling: object,
    ) -> list[Choice]:
        """Queue a request with n choices."""
        first = next(self.ids)
        if isinstance(prompt, int):
            prompt = [10_000 + first * 1000 + place for place in range(prompt)]
        parameters = SamplingParams(max_tokens=max_tokens, n=n, **sampling)  # type: ignore[arg-type]  # given by name
        request = Request(id=f"r{first}", prompt=tuple(prompt), sampling=parameters, priority=priority, cache_salt=salt)
        choices = []
        for choice in range(n):
            id_ = first if choice == 0 else next(self.ids)
            sequence = Choice.start(id=id_, request=request, choice=choice, seed=0, arrived=self.now)
            self.scheduler.add(sequence)
            choices.append(sequence)
        return choices

    def plan(self) -> StepPlan:
        plan = self.scheduler.plan(self.now)
        self.scheduler.check()
        return plan

    def settle(self, plan: StepPlan, *, failed: Sequence[int] = ()) -> Settled:
        for row in rows_of(plan):
            self.computed[row.sequence_id] = self.computed.get(row.sequence_id, 0) + row.count
        ids = plan.sequence_ids
        outcome = outcome_of(plan, lambda row, _: self.says(ids[row]), lambda row: ids[row] in failed)
        settled = self.scheduler.settle(plan, outcome, self.now)
        self.scheduler.check()
        self.step_count += 1
        return settled

    def step(self) -> StepPlan:
        plan = self.plan()
        self.settle(plan)
        return plan

    def steps(self, count: int) -> list[StepPlan]:
        return [self.step() for _ in range(count)]

    def finish(self, most: int = 5000) -> list[StepPlan]:
        """Step until nobody is left."""
        plans = []
        while self.scheduler.has_work:
            assert len(plans) < most, "it does not come to an end"
            plans.append(self.step())
        return plans


def desk(
    blocks: int = 100,
    *,
    block_size: int = 16,
    max_model_len: int = 256,
    windows: Sequence[int | None] = (None,),
    caching: bool = True,
    says: Callable[[int], int] | None = None,
    **limits: object,
) -> Desk:
    given = {"max_num_seqs": 8, "max_num_batched_tokens": 512, "prefill_chunk_size": 64, **limits}
    config = ScheduleConfig(**given)  # type: ignore[arg-type]  # given by name
    groups = [LayerGroup((number,), 1, 4, window) for number, window in enumerate(windows)]
    kv_cache = KVCacheManager(
        groups,
        [blocks] * len(groups),
        block_size=block_size,
        rows=config.max_num_seqs,
        max_model_len=max_model_len,
        max_chunk=config.prefill_chunk_size,
        enable_prefix_caching=caching,
    )
    made = Desk(Scheduler(kv_cache, config, max_model_len, frozenset({EOS})))
    if says is not None:
        made.says = says
    return made
