"""Recorder: publishes an event for everything that the engine did."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kveik.observe.bus import EventBus
from kveik.observe.events import (
    BlockCounts,
    FirstToken,
    Load,
    LoadChanged,
    Preempted,
    PromptComputed,
    RequestAdmitted,
    RequestArrived,
    RequestFinished,
    RequestWaits,
    Stepped,
    StreamOverrun,
)
from kveik.request.request import Request
from kveik.request.sequence import FinishReason, Sequence
from kveik.schedule.plan import Settled, StepOutcome, StepPlan
from kveik.schedule.reasons import NotScheduled
from kveik.schedule.scheduler import Scheduler


class Recorder:
    """Publishes events about one engine's scheduler and its sequences."""

    def __init__(self, bus: EventBus, scheduler: Scheduler) -> None:
        self._bus = bus
        self._scheduler = scheduler
        self._reasons: tuple[NotScheduled, ...] = ()

    def arrived(self, sequences: Iterable[Sequence]) -> None:
        choices = list(sequences)
        self._bus.publish(RequestArrived(choices[0].request.id, choices[0].prompt_length, len(choices)))
        self._bus.publish(LoadChanged(self._load()))

    def planned(self, plan: StepPlan, first_admissions: Iterable[Sequence]) -> None:
        """`first_admissions`: sequences admitted for the first time. A request's first choice stands for all."""
        for sequence in first_admissions:
            if sequence.choice == 0:
                assert sequence.admitted is not None
                self._bus.publish(
                    RequestAdmitted(
                        request_id=sequence.request.id,
                        prompt_tokens=sequence.prompt_length,
                        cached_tokens=sequence.cached_tokens or 0,
                        queue_seconds=sequence.admitted - sequence.arrived,
                        queried=sequence.sampling.prompt_logprobs is None,
                        loaded_tokens=sequence.loaded_tokens,
                    )
                )
        for one in plan.preempted:
            self._bus.publish(Preempted(one.request_id, one.cause.value, one.needed))
        self.waiting(plan)

    def waiting(self, plan: StepPlan) -> None:
        """Publish the requests whose cause to wait has changed."""
        if plan.not_scheduled is self._reasons:
            return
        before = {one.sequence_id: one.cause for one in self._reasons}
        self._reasons = plan.not_scheduled
        for one in plan.not_scheduled:
            if before.get(one.sequence_id) is not one.cause:
                self._bus.publish(RequestWaits(one.request_id, one.cause.value, one.needed, one.available))

    def stepped(
        self,
        plan: StepPlan,
        outcome: StepOutcome,
        settled: Settled,
        live: Mapping[int, Sequence],
        *,
        now: float,
        seconds: float,
    ) -> None:
        """A step is over. `live` has all its sequences, those included that it finished."""
        for sequence_id in settled.begun:
            sequence = live[sequence_id]
            self._bus.publish(FirstToken(sequence.request.id, now - sequence.arrived))
            self._prompt_computed(sequence, sequence.prompt_length)
        catch_up = plan.catch_up_tokens
        self._bus.publish(
            Stepped(
                prefill_tokens=catch_up,
                decode_tokens=plan.tokens - catch_up,
                new_tokens=int(settled.kept.sum()),
                rows=plan.rows,
                seconds=seconds,
                load=self._load(),
                gaps=settled.gaps,
            )
        )

    def finished(self, sequence: Sequence, reason: FinishReason, now: float) -> None:
        if sequence.first_token is None and sequence.cached_tokens is not None:
            self._prompt_computed(sequence, max(sequence.reached, sequence.cached_tokens))
        self._bus.publish(
            RequestFinished(
                request_id=sequence.request.id,
                reason=reason,
                prompt_tokens=sequence.prompt_length,
                cached_tokens=sequence.cached_tokens or 0,
                output_tokens=sequence.output_count,
                seconds=now - sequence.arrived,
            )
        )

    def idled(self) -> None:
        """Publish the load outside a step: at the start, after an abort and after a reset."""
        self._bus.publish(LoadChanged(self._load()))

    def overrun(self, request: Request) -> None:
        self._bus.publish(StreamOverrun(request.id))

    def _prompt_computed(self, sequence: Sequence, reached: int) -> None:
        """`reached`: prompt tokens whose keys and values have been in the cache."""
        if sequence.choice == 0:
            computed = reached - (sequence.cached_tokens or 0)
            self._bus.publish(PromptComputed(sequence.request.id, computed, sequence.prompt_length - reached))

    def _load(self) -> Load:
        scheduler = self._scheduler
        blocks = tuple(BlockCounts(usage.free, usage.cached, usage.held) for usage in scheduler.kv_cache.usage)
        return Load(scheduler.running, scheduler.waiting, blocks)
