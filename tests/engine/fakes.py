"""An engine whose model is a function: real scheduler, KV cache manager and streams, tokens from the test."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kveik.cache.kv_cache_manager import KVCacheManager
from kveik.cache.layout import LayerGroup
from kveik.clock import StepClock
from kveik.config import ScheduleConfig
from kveik.engine.engine import Engine
from kveik.engine.recorder import Recorder
from kveik.observe.bus import EventBus
from kveik.observe.events import Event
from kveik.request.request import Request, SamplingParams
from kveik.request.sequence import Sequence
from kveik.schedule.plan import StepOutcome, StepPlan
from kveik.schedule.scheduler import Scheduler
from tests.schedule.rows import outcome_of

GROUP = LayerGroup(layers=(0,), kv_heads=1, head_dim=4, window=None)
EOS = 1
NextToken = Callable[[Sequence], int]


def counting(sequence: Sequence) -> int:
    """The next token is the length so far: every token says where it stands."""
    return 100 + sequence.length


def spelled(tokens: Iterable[int]) -> NextToken:
    """These output tokens, then the end token for ever."""
    fixed = list(tokens)
    return lambda sequence: fixed[sequence.output_count] if sequence.output_count < len(fixed) else EOS


class FunctionExecutor:
    """Every token comes from a function of the sequence; steps can be made to fail."""

    def __init__(self, next_token: NextToken, clock: StepClock, sequence: Callable[[int], Sequence | None]) -> None:
        self.sequence = sequence
        self.next_token = next_token
        self.clock = clock
        self.plans: list[StepPlan] = []
        self.ended: list[int] = []
        self.fail_step: Callable[[StepPlan], bool] = lambda plan: False
        self.fail_sequence: Callable[[Sequence], bool] = lambda sequence: False

    def launch(self, plan: StepPlan) -> None:
        self.ended += plan.ended
        if not plan.empty:
            self.plans.append(plan)

    def collect(self) -> StepOutcome:
        plan = self.plans[-1]
        self.clock.advance(0.01)
        if self.fail_step(plan):
            raise RuntimeError("the arithmetic broke")
        return outcome_of(plan, lambda row, _: self.next_token(self._item(plan, row)), self._fails)

    def _item(self, plan: StepPlan, row: int) -> Sequence:
        sequence = self.sequence(plan.sequence_ids[row])
        assert sequence is not None
        return sequence

    def _fails(self, row: int) -> bool:
        return self.fail_sequence(self._item(self.plans[-1], row))


class FakeEngine:
    """The engine and what a test wants to look at."""

    def __init__(
        self,
        next_token: NextToken = counting,
        *,
        blocks: int = 64,
        max_model_len: int = 256,
        limits: ScheduleConfig | None = None,
    ) -> None:
        limits = limits or ScheduleConfig(max_num_seqs=8, max_num_batched_tokens=64, prefill_chunk_size=32)
        self.clock = StepClock()
        self.kv_cache = KVCacheManager(
            [GROUP], [blocks], block_size=8, rows=limits.max_num_seqs, max_model_len=max_model_len, max_chunk=32
        )
        self.scheduler = Scheduler(self.kv_cache, limits, max_model_len, frozenset({EOS}))
        self.executor = FunctionExecutor(next_token, self.clock, self.scheduler.sequence)
        self.events: list[Event] = []
        bus = EventBus()
        bus.subscribe(self.events.append)
        self.engine = Engine(self.scheduler, self.executor, self.clock, Recorder(bus, self.scheduler), seed=0)

    def of_kind(self, kind: type) -> list[Event]:
        return [event for event in self.events if isinstance(event, kind)]

    def idle(self) -> bool:
        """Nobody holds a block, and nothing is remembered of anybody."""
        self.scheduler.check()
        usage = self.kv_cache.usage[0]
        return not self.engine.has_work and usage.held == 0 and usage.free + usage.cached == usage.total


_numbers = iter(range(1 << 30))


def request(prompt: Iterable[int] = range(200, 220), *, salt: str | None = None, **sampling: object) -> Request:
    parameters: dict[str, object] = {"max_tokens": 8, "temperature": 0.0, **sampling}
    return Request(
        id=f"r{next(_numbers)}",
        prompt=tuple(prompt),
        cache_salt=salt,
        sampling=SamplingParams(**parameters),  # type: ignore[arg-type]  # a test's own words
    )
