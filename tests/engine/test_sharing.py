"""The whole engine, from prompts to texts: what users are promised of sharing, preemption and exactness."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator

import pytest

from kveik.cache.kv_cache_manager import KVCacheManager
from kveik.config import CacheConfig, EngineConfig, ModelConfig, ScheduleConfig
from kveik.engine.llm import LLM
from kveik.engine.loop import EngineLoop
from kveik.engine.stream import RequestStream
from kveik.request.request import Request, SamplingParams
from kveik.schedule.plan import StepPlan
from tests.engine.tiny import save_tiny_llama

CONTEXT = 2304
BLOCKS = 2304 // 16


TINY = pytest.param("tiny", id="tiny")
REAL = pytest.param("smollm2-135m", id="smollm2-135m", marks=[pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(900)])


@pytest.fixture(scope="module", params=[TINY, REAL])
def llm(request, tmp_path_factory, catalogue_file) -> Iterator[LLM]:  # type: ignore[no-untyped-def]  # pytest's own fixtures
    """float32, so that a token's arithmetic hardly depends on its neighbours; blocks for little more than one full context."""
    tiny = request.param == "tiny"
    path = save_tiny_llama(tmp_path_factory.mktemp("tiny")) if tiny else catalogue_file(request.param)
    config = EngineConfig(
        model=ModelConfig(model=str(path), dtype="float32", max_model_len=CONTEXT),
        cache=CacheConfig(num_gpu_blocks_override=BLOCKS),
        schedule=ScheduleConfig(max_num_seqs=48, max_num_batched_tokens=512, prefill_chunk_size=256),
    )
    llm = LLM(config)
    yield llm
    llm.close()


def greedy(**more: object) -> SamplingParams:
    parameters: dict[str, object] = {"max_tokens": 16, "temperature": 0.0, **more}
    return SamplingParams(**parameters)  # type: ignore[arg-type]  # a test's own words


def kv_cache(llm: LLM) -> KVCacheManager:
    return llm.loaded.engine.scheduler.kv_cache


def assert_nobody_holds_anything(llm: LLM) -> None:
    llm.loaded.engine.scheduler.check()
    usage = kv_cache(llm).usage[0]
    assert usage.held == 0
    assert usage.free + usage.cached == usage.total == BLOCKS


def prompt_of(llm: LLM, seed: int, tokens: int) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(min(256, llm.loaded.tokenizer.vocab_size)) for _ in range(tokens)]


def computed_by(llm: LLM, prompt: list[int], **more: object) -> tuple[tuple[int, ...], int, int]:
    """Output tokens, cached prompt tokens, and how many tokens the engine computed for it."""
    computed = 0
    launch = llm.loaded.engine.executor.launch

    def counted(plan: StepPlan) -> None:
        nonlocal computed
        computed += plan.tokens
        launch(plan)

    llm.loaded.engine.executor.launch = counted  # type: ignore[method-assign]  # watched from outside
    try:
        (completion,) = llm.generate([prompt], greedy(max_tokens=4, **more))
    finally:
        llm.loaded.engine.executor.launch = launch  # type: ignore[method-assign]  # as it was before
    return completion.tokens, completion.cached_tokens, computed


def test_a_repeated_prompt_of_2000_tokens_computes_one_of_them(llm: LLM) -> None:
    kv_cache(llm).reset()
    prompt = prompt_of(llm, 1, 2000)
    first, none, all_of_them = computed_by(llm, prompt)
    again, cached, few = computed_by(llm, prompt)
    assert (none, all_of_them) == (0, 2000 + 3)
    assert (cached, few) == (1999, 1 + 3)
    assert again == first
    assert_nobody_holds_anything(llm)


def test_a_conversation_goes_on_from_where_its_tail_was_left(llm: LLM) -> None:
    prompt = prompt_of(llm, 2, 150)
    (answer,) = llm.generate([prompt], greedy(max_tokens=13, ignore_eos=True))
    turn = [*prompt, *answer.tokens, *prompt_of(llm, 3, 5)]
    (cached,) = llm.generate([turn], greedy())
    # The last answered token was never computed; all before it were, and the block they end in is only half full.
    assert cached.cached_tokens == 150 + 12
    kv_cache(llm).reset()
    (fresh,) = llm.generate([turn], greedy())
    assert (fresh.cached_tokens, fresh.tokens) == (0, cached.tokens)


def test_prompt_logprobs_are_the_same_with_and_without_cached_blocks(llm: LLM) -> None:
    kv_cache(llm).reset()
    prompt = prompt_of(llm, 4, 40)
    longer = [*prompt[:32], *prompt_of(llm, 5, 20)]

    def scores(tokens: list[int]) -> list[float]:
        sampling = greedy(max_tokens=1, prompt_logprobs=1)
        answering = llm.submit(tokens, sampling)
        while not answering.text.finished:
            llm.step()
        found = answering.text.prompt_logprobs
        assert found is not None
        assert found[0] is None
        assert len(found) == len(tokens)
        return [entry.logprob for entry in found[1:] if entry is not None]

    first, again, shared = scores(prompt), scores(prompt), scores(longer)
    kv_cache(llm).reset()
    fresh = scores(longer)
    assert again == pytest.approx(first, abs=1e-4)
    assert shared == pytest.approx(fresh, abs=1e-4)
    assert shared[:31] == pytest.approx(first[:31], abs=1e-4)


def mixed_requests(llm: LLM, seed: int) -> list[Request]:
    """64 of them: short and long, a third behind a common beginning, some with three choices, some cancelled."""
    chance = random.Random(seed)
    common = [prompt_of(llm, seed + 1, 70), prompt_of(llm, seed + 2, 40)]
    requests = []
    for number in range(64):
        own = prompt_of(llm, seed + 10 + number, chance.choice((5, 12, 30, 90)))
        prompt = [*chance.choice(common), *own] if chance.random() < 0.35 else own
        sampling = greedy(max_tokens=chance.choice((4, 40, 150)), n=3 if number % 8 == 0 else 1, ignore_eos=True)
        requests.append(Request(id=f"mixed-{seed}-{number}", prompt=tuple(prompt), sampling=sampling))
    return requests


async def collected(stream: RequestStream, cancel_after: int | None) -> dict[int, str] | None:
    """Texts by choice; None for one that its reader left."""
    texts: dict[int, str] = {}
    deltas = 0
    async for delta in stream.deltas():
        texts[delta.choice] = texts.get(delta.choice, "") + delta.text
        deltas += 1
        if cancel_after is not None and deltas > cancel_after:
            stream.abort()
            return None
    return texts


def test_64_mixed_requests_at_once_give_the_texts_of_each_alone(llm: LLM) -> None:
    requests = mixed_requests(llm, seed=100)
    kv_cache(llm).reset()
    alone = [llm.generate([request.prompt], request.sampling) for request in requests]
    kv_cache(llm).reset()
    engine, loaded = llm.loaded.engine, llm.loaded
    loop = EngineLoop(engine, loaded.tokenizer, loaded.config.stream, max_waiting=1024)
    preempted = 0
    settle = engine.scheduler.settle

    def watched(plan, outcome, now):  # type: ignore[no-untyped-def]  # the scheduler's own signature
        nonlocal preempted
        preempted += len(plan.preempted)
        settled = settle(plan, outcome, now)
        engine.scheduler.check()
        return settled

    engine.scheduler.settle = watched  # type: ignore[method-assign]  # the laws, after every step

    async def everybody() -> list[dict[int, str] | None]:
        # One that is cancelled at once, others later, the rest never.
        cancels = {3: 0, 12: 1, 25: 3, 40: 2, 51: 0}
        streams = [loop.submit(request) for request in requests]
        return await asyncio.gather(*(collected(stream, cancels.get(number)) for number, stream in enumerate(streams)))

    loop.start()
    try:
        together = asyncio.run(everybody())
    finally:
        loop.stop()
        engine.scheduler.settle = settle  # type: ignore[method-assign]  # as it was before
    assert preempted > 0, "the pool was meant to be too small for all of them"
    assert sum(texts is None for texts in together) == 5
    for texts, completions in zip(together, alone, strict=True):
        if texts is not None:
            assert texts == {completion.choice: completion.text for completion in completions}
    assert_nobody_holds_anything(llm)
