"""One step of the engine: plan, launch, collect, settle, record. Independent of threads, sockets and text."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass

import numpy as np

from kveik.clock import Clock
from kveik.engine.executor import Executor
from kveik.engine.record import Recorder
from kveik.engine.stream import TokenEvent
from kveik.errors import NonFiniteLogits, Overloaded, StepFailed
from kveik.request.request import Request
from kveik.request.sequence import FinishReason, Sequence
from kveik.schedule.plan import PromptLogprobs, Settled, StepOutcome, StepPlan
from kveik.schedule.scheduler import Scheduler
from kveik.schedule.step_cost import StepCost
from kveik.words import counted

logger = logging.getLogger(__name__)

IDS_TOLD = 8
"""Requests that one log line lists."""


@dataclass(frozen=True, slots=True)
class StepReport:
    """Results of one step for the readers."""

    sequences: tuple[Sequence, ...] = ()
    """[rows] of the plan"""

    news: Items[TokenEvent | None] = ()
    """[rows]: a row's tokens, its end, or both; None: no news"""

    admitted: tuple[tuple[int, int], ...] = ()
    """(sequence id, prompt tokens hit in the cache) of sequences admitted for the first time."""

    prompt_logprobs: tuple[PromptLogprobs, ...] = ()

    @property
    def events(self) -> Iterator[tuple[Sequence, TokenEvent]]:
        """Rows that have news, in the plan's order."""
        for sequence, event in zip(self.sequences, self.news, strict=True):
            if event is not None:
                yield sequence, event


class Engine:
    """Advances every sequence's computed tokens to its length, step by step."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        clock: Clock,
        recorder: Recorder,
        *,
        seed: int,
        step_cost: StepCost | None = None,
    ) -> None:
        """`step_cost`: an estimate shared with others; None: one of its own."""
        self.scheduler = scheduler
        self.executor = executor
        self.clock = clock
        self.recorder = recorder
        self.offload = scheduler.offload
        self.step_cost = step_cost or StepCost()
        self._stalled = False
        self._ids = itertools.count()
        self._seeds = np.random.default_rng(seed)
        self._live: dict[int, Sequence] = {}
        self._queued: set[int] = set()
        """Sequences that have not been admitted yet."""

        self._rows: tuple[tuple[int, ...], tuple[Sequence, ...]] = ((), ())
        """Rows of the latest step: ids and their sequences. Most steps have the same again."""

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    @property
    def pause(self) -> float:
        """Seconds to sleep while every sequence waits for a load; news of a tier end the sleep."""
        deadline = self.offload.deadline if self._stalled else None
        return 0.0 if deadline is None else max(0.0, deadline - self.clock.now())

    @property
    def unsettled(self) -> bool:
        """True if `attend` is due soon although nothing runs, because the state of a tier may have changed."""
        return self.offload.unsettled

    def add(self, request: Request) -> tuple[int, ...]:
        """Queue all choices of a request. Returns their sequence ids, in the order of the choices.

        Raises `PromptTooLong` where prompt and new tokens exceed the context, `Overloaded` where not all fit into the queue.
        """
        count = request.sampling.n
        left = self.scheduler.queue_capacity_left
        if left < count:
            raise Overloaded(
                f"The queue takes {counted(left, 'more sequence')} (--max-waiting); this request adds {count}. Try again later."
            )
        self._stalled = False
        now = self.clock.now()
        seed = request.sampling.seed
        if seed is None:
            seed = int(self._seeds.integers(0, 1 << 63))
        added = [
            Sequence.start(id=next(self._ids), request=request, choice=choice, seed=seed, arrived=now)
            for choice in range(count)
        ]
        for sequence in added:
            self.scheduler.add(sequence)
            self._live[sequence.id] = sequence
            self._queued.add(sequence.id)
        self.recorder.arrived(added)
        return tuple(sequence.id for sequence in added)

    def abort(self, sequence_id: int, reason: FinishReason = "abort") -> bool:
        """End a sequence now and free its blocks. Returns False when it had ended already."""
        if sequence_id not in self._live:
            return False
        now = self.clock.now()
        self.scheduler.abort(sequence_id, now)
        self._stalled = False
        self._retire(sequence_id, reason, now)
        self.attend()
        self.recorder.idled()
        return True

    def step(self) -> StepReport:
        """Compute one step and report its results. A step that fails as a whole ends its sequences; the others continue."""
        self.offload.attend(self.clock.now())
        started = self.clock.now()
        plan = self.scheduler.plan(started)
        self.offload.carry_out(started)
        try:
            self.executor.launch(plan)
            self.offload.start_loads()
            self._stalled = plan.empty
            if plan.empty:
                return StepReport()
            admitted = self._first_admissions(plan)
            self.recorder.planned(plan, admitted)
            outcome = self.executor.collect()
        except Exception:
            return self._fail_step(plan)
        now = self.clock.now()
        sequences = self._sequences(plan)
        settled = self.scheduler.settle(plan, outcome, now)
        self.recorder.stepped(plan, outcome, settled, self._live, now=now, seconds=now - started)
        news = _news(sequences, outcome, settled)
        for finished in settled.finished.values():
            self._retire(finished.sequence_id, finished.reason, now)
        self.step_cost.observe(plan.rows, plan.tokens, plan.pairs, now - started)
        self.offload.carry_out(now)
        cached = tuple((sequence.id, sequence.cached_tokens or 0) for sequence in admitted)
        return StepReport(sequences, news, cached, outcome.prompt_logprobs)

    def attend(self) -> None:
        """Between steps: process news of tiers, and start their transfers."""
        now = self.clock.now()
        self.offload.attend(now)
        self.offload.carry_out(now)

    def learn(self) -> None:
        """Update the cache's statistics. Takes milliseconds now and then; call it between two steps."""
        now = self.clock.now()
        self.scheduler.kv_cache.evictor.learn(now)
        self.offload.learn(now)

    def _sequences(self, plan: StepPlan) -> tuple[Sequence, ...]:
        ids = plan.sequence_ids
        if ids is not self._rows[0]:
            self._rows = (ids, tuple([self._live[sequence_id] for sequence_id in ids]))
        return self._rows[1]

    def _first_admissions(self, plan: StepPlan) -> list[Sequence]:
        first = [sequence_id for sequence_id in plan.admitted if sequence_id in self._queued]
        self._queued.difference_update(first)
        return [self._live[sequence_id] for sequence_id in first]

    def _retire(self, sequence_id: int, reason: FinishReason, now: float) -> None:
        """Remove a sequence that the scheduler has ended."""
        sequence = self._live.pop(sequence_id)
        self._queued.discard(sequence_id)
        self.recorder.finished(sequence, reason, now)

    def _fail_step(self, plan: StepPlan) -> StepReport:
        """End the sequences of a step that failed as a whole, with an error. None of its blocks are cached."""
        logger.exception("step failed: sequences=%d plan=%s", plan.rows, plan)
        sequences = tuple(self._live[sequence_id] for sequence_id in plan.sequence_ids)
        for sequence in sequences:
            self.abort(sequence.id, "error")
        return StepReport(sequences, [TokenEvent.failed(sequence.choice, StepFailed()) for sequence in sequences])


def _news(sequences: Items[Sequence], outcome: StepOutcome, settled: Settled) -> list[TokenEvent | None]:
    """Returns each row's tokens and end. Most rows have one token and no end."""
    tokens = outcome.tokens.tolist()
    news: list[TokenEvent | None]
    if len(tokens) == len(sequences) and not outcome.failed and (settled.kept == 1).all():
        # Positional and by the tuple's own constructor, because a step makes up to a thousand of them.
        new = tuple.__new__
        news = [
            new(TokenEvent, (sequence.choice, (token,), (), None, None, None))
            for sequence, token in zip(sequences, tokens, strict=True)
        ]
    else:
        starts, kept = outcome.offsets.tolist(), settled.kept.tolist()
        news = [
            TokenEvent(sequence.choice, tuple(tokens[start : start + count])) if count else None
            for sequence, start, count in zip(sequences, starts, kept, strict=False)
        ]
    if outcome.failed:
        ids = ", ".join(sequences[row].request.id for row in sorted(outcome.failed)[:IDS_TOLD])
        logger.error("logits not finite, sequences ended: sequences=%d requests=%s", len(outcome.failed), ids)
    reported = {int(np.searchsorted(outcome.offsets, place, side="right")) - 1 for place in outcome.logprobs}
    for row in {*settled.finished, *outcome.failed, *reported}:
        news[row] = _detailed(sequences[row], row, news[row], outcome, settled)
    return news


def _detailed(sequence: Sequence, row: int, event: TokenEvent | None, outcome: StepOutcome, settled: Settled) -> TokenEvent:
    """Returns a row's event with log-probabilities, and with its end."""
    tokens = () if event is None else event.tokens
    start, finished = int(outcome.offsets[row]), settled.finished.get(row)
    logprobs = [outcome.logprobs.get(place) for place in range(start, start + len(tokens))]
    return TokenEvent(
        choice=sequence.choice,
        tokens=tokens,
        logprobs=tuple(one for one in logprobs if one is not None),
        finish_reason=None if finished is None else finished.reason,
        stop_token=sequence.stop_token,
        error=NonFiniteLogits() if row in outcome.failed else None,
    )
