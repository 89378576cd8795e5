"""One step of the engine: plan, launch, collect, settle, record. Independent of threads, sockets and text."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

import numpy as np

from kveik.clock import Clock
from kveik.engine.executor import Executor
from kveik.engine.recorder import Recorder
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

    singles: Items[int | None] = ()
    """[rows]: the token of a row that has one; None: `details` has its news, or there are none"""

    details: Mapping[int, TokenEvent] = field(default_factory=dict)
    """By row, the news of those with more to tell than one token; they go before `singles`."""

    admitted: tuple[tuple[int, int], ...] = ()
    """(sequence id, prompt tokens hit in the cache) of sequences admitted for the first time."""

    prompt_logprobs: tuple[PromptLogprobs, ...] = ()

    @property
    def events(self) -> Iterator[tuple[Sequence, TokenEvent]]:
        """Rows that have news, in the plan's order."""
        for row, (sequence, token) in enumerate(zip(self.sequences, self.singles, strict=True)):
            event = self.details.get(row)
            if event is not None:
                yield sequence, event
            elif token is not None:
                yield sequence, TokenEvent(sequence.choice, (token,))


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
        singles, details = _singles(sequences, outcome, settled), _details(sequences, outcome, settled)
        for finished in settled.finished.values():
            self._retire(finished.sequence_id, finished.reason, now)
        self.step_cost.observe(plan.rows, plan.tokens, plan.pairs, now - started)
        self.offload.carry_out(now)
        cached = tuple((sequence.id, sequence.cached_tokens or 0) for sequence in admitted)
        return StepReport(sequences, singles, details, cached, outcome.prompt_logprobs)

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
        ends = {row: TokenEvent.failed(sequence.choice, StepFailed()) for row, sequence in enumerate(sequences)}
        return StepReport(sequences, [None] * len(sequences), ends)


def _singles(sequences: Items[Sequence], outcome: StepOutcome, settled: Settled) -> list[int | None]:
    """[rows]: a row's one token; None where it has none or several."""
    tokens: list[int | None] = outcome.tokens.tolist()
    if len(tokens) == len(sequences) == int(settled.kept.sum()) and not outcome.failed:
        return tokens
    starts, kept = outcome.offsets.tolist(), settled.kept.tolist()
    return [tokens[start] if count == 1 else None for start, count in zip(starts, kept, strict=False)]


def _details(sequences: Items[Sequence], outcome: StepOutcome, settled: Settled) -> dict[int, TokenEvent]:
    """The events of rows with more to tell than one token."""
    if outcome.failed:
        ids = ", ".join(sequences[row].request.id for row in sorted(outcome.failed)[:IDS_TOLD])
        logger.error("logits not finite, sequences ended: sequences=%d requests=%s", len(outcome.failed), ids)
    reported = {int(np.searchsorted(outcome.offsets, place, side="right")) - 1 for place in outcome.logprobs}
    several = np.flatnonzero(settled.kept > 1).tolist()
    rows = {*settled.finished, *outcome.failed, *reported, *several}
    return {row: _detailed(sequences[row], row, outcome, settled) for row in rows}


def _detailed(sequence: Sequence, row: int, outcome: StepOutcome, settled: Settled) -> TokenEvent:
    """A row's tokens with log-probabilities, and with its end."""
    start, finished = int(outcome.offsets[row]), settled.finished.get(row)
    tokens = tuple(outcome.tokens[start : start + int(settled.kept[row])].tolist())
    logprobs = [outcome.logprobs.get(place) for place in range(start, start + len(tokens))]
    return TokenEvent(
        choice=sequence.choice,
        tokens=tokens,
        logprobs=tuple(one for one in logprobs if one is not None),
        finish_reason=None if finished is None else finished.reason,
        stop_token=sequence.stop_token,
        error=NonFiniteLogits() if row in outcome.failed else None,
    )
