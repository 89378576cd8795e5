"""Conversations whose right answers are known, and engines that must give them whatever happens to their tiers."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from kveik.engine.llm import LLM, Answering
from kveik.engine.stream import RequestText
from kveik.request.request import SamplingParams
from tests.engine.tiered import carrier, metric, mover, opened

ANSWER = 10
GREEDY = SamplingParams(max_tokens=ANSWER, temperature=0.0, ignore_eos=True)
SOURCES = ("computed", "cached", "ram", "disk", "remote")


@dataclass(frozen=True)
class Asked:
    """One turn of a conversation."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    """What it is without any cache."""

    text: str


def conversations(model: str, *, count: int = 8, turns: int = 3, seed: int = 0) -> list[Asked]:
    """All turns, answered by an engine without a cache. Three system prompts begin them; together they are more than a pool."""
    chance = random.Random(seed)
    systems = [drawn(chance, 90) for _ in range(3)]
    prompts = [[*systems[number % 3], *drawn(chance, 60)] for number in range(count)]
    plain = opened(model, enable_prefix_caching=False)
    found = []
    for _ in range(turns):
        answers = plain.generate(prompts, GREEDY)
        found += [Asked(tuple(prompt), one.tokens, one.text) for prompt, one in zip(prompts, answers, strict=True)]
        prompts = [[*one.prompt, *one.answer, *drawn(chance, 40)] for one in found[-count:]]
    plain.close()
    return found


def drawn(chance: random.Random, count: int) -> list[int]:
    return [chance.randrange(256) for _ in range(count)]


class Traffic:
    """Requests side by side on one engine, each of which must be answered as without a cache. A failed one raises."""

    def __init__(self, llm: LLM, known: Sequence[Asked], chance: random.Random, at_once: int = 4) -> None:
        self.llm = llm
        self.answered = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self._known = known
        self._chance = chance
        self._at_once = at_once
        self._running: dict[RequestText, tuple[Answering, Asked, list[int]]] = {}

    def go(self, count: int, between: Callable[[], object] = lambda: None) -> None:
        """Until so many more were answered, drawn by chance; `between` steps something may happen."""
        for _ in self.steps(count):
            between()

    def ask_all(self, asked: Sequence[Asked], between: Callable[[], object] = lambda: None) -> None:
        """Each of these once, in order."""
        for _ in self._answers(iter(asked)):
            between()

    def steps(self, count: int) -> Iterator[None]:
        """As `go`, step by step."""
        return self._answers(self._chance.choice(self._known) for _ in range(count))

    def _answers(self, asked: Iterator[Asked]) -> Iterator[None]:
        while True:
            for one in islice(asked, self._at_once - len(self._running)):
                self._ask(one)
            if not self._running:
                return
            for text, deltas in self.llm.step().items():
                self._running[text][2].extend(token for delta in deltas for token in delta.tokens)
                if text.finished:
                    self._judge(text)
            yield

    def _ask(self, one: Asked) -> None:
        answering = self.llm.submit(one.prompt, GREEDY)
        self._running[answering.text] = (answering, one, [])
        self.prompt_tokens += len(one.prompt)

    def _judge(self, text: RequestText) -> None:
        _, asked, tokens = self._running.pop(text)
        differ = [place for place, (one, other) in enumerate(zip(tokens, asked.answer, strict=True)) if one != other]
        where = f"{len(asked.prompt)} tokens, {text.cached_tokens} of them cached"
        assert not differ, f"a wrong answer from its token {differ[0]} on, behind {where}"
        self.answered += 1
        self.cached_tokens += text.cached_tokens

    def check(self) -> None:
        """Between requests: books in order, bounds kept, every prompt token counted once by where it came from."""
        engine = self.llm.loaded.engine
        mover(self.llm).drain(engine.clock.now() + 60)
        engine.attend()
        engine.scheduler.check()
        source = {name: metric(self.llm, "prompt_tokens_by_source_total", name) for name in SOURCES}
        assert sum(source.values()) == self.prompt_tokens
        assert sum(source.values()) - source["computed"] == self.cached_tokens
        for store in carrier(self.llm).stores:
            assert store.bytes_used <= store.capacity_bytes
            # A store answers whatever happens; it never raises.
            assert mover(self.llm).snapshot(store.name).counts.errors == 0
