"""Laws 1 to 4 over the KV cache manager alone: any moves in any order, with the whole structure checked after each."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as some
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kveik.cache.eviction.hazard import HazardPolicy
from kveik.cache.eviction.lru import LruPolicy
from kveik.cache.eviction.policy import EvictionPolicy
from kveik.cache.kv_cache_manager import KVCacheManager
from kveik.cache.layout import LayerGroup, blocks_at_most
from tests.schedule.making import desk
from tests.seeds import over_seeds

CHUNK = 8
CONTEXT = 40
SIZE = 4


class LedgerMachine(RuleBasedStateMachine):
    """Law 1 after every move; law 2: what is found was computed, under the same salt, by a step that has finished."""

    @initialize(
        windows=some.sampled_from([(None,), (None, 6), (5,)]),
        extra=some.integers(0, 12),
        caching=some.booleans(),
        policy=some.sampled_from([LruPolicy, lambda: HazardPolicy(SIZE, random.Random(0), samples=4)]),
    )
    def build(self, windows: tuple[int | None, ...], extra: int, caching: bool, policy: Callable[[], EvictionPolicy]) -> None:
        groups = [LayerGroup((number,), 1, 1, window) for number, window in enumerate(windows)]
        blocks = [blocks_at_most(group, CONTEXT, SIZE, CHUNK) + extra for group in groups]
        self.kv_cache = KVCacheManager(
            groups,
            blocks,
            block_size=SIZE,
            rows=3,
            max_model_len=CONTEXT,
            max_chunk=CHUNK,
            enable_prefix_caching=caching,
            eviction=policy(),
        )
        self.tokens: dict[int, list[int]] = {}
        self.names: dict[int, tuple[str | None, str]] = {}
        self.computed: dict[int, int] = {}
        self.room: dict[int, int] = {}
        self.caching = caching
        self.written: set[tuple[object, ...]] = set()
        self.count = 0

    def name(self, sequence_id: int) -> object:
        salt, request = self.names[sequence_id]
        return (salt, None if self.caching else request)

    @rule(
        prompt=some.lists(some.integers(1, 2), min_size=1, max_size=30),
        salt=some.sampled_from([None, "s"]),
        request=some.sampled_from(["a", "b"]),
    )
    def open(self, prompt: list[int], salt: str | None, request: str) -> None:
        self.tokens[self.count], self.names[self.count] = prompt, (salt, request)
        self.kv_cache.open(self.count, prompt, request=request, salt=salt)
        self.count += 1

    @precondition(lambda self: set(self.tokens) - set(self.computed))
    @rule(draw=some.data())
    def admit(self, draw: some.DataObject) -> None:
        one = draw.draw(some.sampled_from(sorted(set(self.tokens) - set(self.computed))))
        tokens = self.tokens[one]
        match = self.kv_cache.match(one, len(tokens) - 1)
        if match is not None:
            assert match.tokens < len(tokens)
            assert (self.name(one), *tokens[: match.tokens]) in self.written, "something is found that nobody wrote"
        if self.kv_cache.can_admit(one, match):
            admission = self.kv_cache.admit(one, match, len(tokens), 0.0)
            self.computed[one] = admission.matched
            self.room[one] = self.kv_cache.grow(one, min(len(tokens), admission.matched + CHUNK), 0.0)

    @precondition(lambda self: self.computed)
    @rule(draw=some.data(), word=some.integers(1, 2))
    def compute(self, draw: some.DataObject, word: int) -> None:
        one = draw.draw(some.sampled_from(sorted(self.computed)))
        tokens = self.tokens[one]
        if self.computed[one] == len(tokens):
            if len(tokens) == CONTEXT:
                return
            tokens.append(word)
        end = min(len(tokens), self.computed[one] + CHUNK)
        if end > self.room[one]:
            if self.kv_cache.reach(one) < end:
                return
            self.room[one] = self.kv_cache.grow(one, end, 0.0)
        for length in range(self.computed[one] + 1, end + 1):
            self.written.add((self.name(one), *tokens[:length]))
        self.computed[one] = end
        self.kv_cache.commit(one, end)

    @precondition(lambda self: self.computed)
    @rule(draw=some.data(), preempt=some.booleans())
    def release(self, draw: some.DataObject, preempt: bool) -> None:
        one = draw.draw(some.sampled_from(sorted(self.computed)))
        self.kv_cache.release(one, self.computed.pop(one))
        if not preempt:
            self.kv_cache.close(one, 0.0)
            del self.tokens[one]

    @rule()
    def reset(self) -> None:
        self.kv_cache.reset()
        assert all(usage.cached == 0 for usage in self.kv_cache.usage)

    @invariant()
    def law_1(self) -> None:
        self.kv_cache.check()
        for usage in self.kv_cache.usage:
            assert usage.free + usage.cached + usage.held == usage.total
        if not self.computed:
            assert all(usage.held == 0 for usage in self.kv_cache.usage)


LedgerMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=60, deadline=None)
TestAnyOrderOfMoves = LedgerMachine.TestCase


@over_seeds(10)
def test_no_block_is_shared_between_tenants_whatever_they_ask(seed: int) -> None:
    """Law 4: two tenants ask the same prompts in turn; a tenant finds only what it asked itself."""
    chance, one = random.Random(seed), desk(400, max_model_len=200)
    seen: dict[str, list[list[int]]] = {"a": [], "b": []}
    for _ in range(40):
        tenant = chance.choice(("a", "b"))
        prompt = [chance.randrange(2) for _ in range(chance.randrange(1, 60))]
        best = max((common(prompt, earlier) for earlier in seen[tenant]), default=0)
        sequence = one.ask(prompt, 1, salt=tenant)
        one.finish()
        assert sequence.cached_tokens is not None
        assert sequence.cached_tokens <= min(best, len(prompt) - 1)
        seen[tenant].append(prompt)


def common(left: list[int], right: list[int]) -> int:
    return next((place for place, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


@pytest.mark.parametrize("size", [8, 16, 32, 64])
def test_a_repeated_prompt_computes_exactly_one_token_at_every_length(size: int) -> None:
    """The two-token law: one hit, one token of work; asserted on what was computed."""
    for length in (1, 2, size - 1, size, size + 1, 2 * size, 2 * size + 5, 5 * size - 1):
        one = desk(60, block_size=size, max_model_len=400, prefill_chunk_size=400)
        prompt = list(range(length))
        one.ask(prompt, 1)
        one.finish()
        again = one.ask(prompt, 1)
        plan = one.step()
        assert plan.tokens == 1
        assert again.cached_tokens == length - 1
        assert len(plan.copies) == ((length - 1) % size > 0)
