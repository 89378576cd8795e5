"""The whole engine over int8 and fp8 keys and values: what is promised of sharing and preemption holds over them, too."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch

from kveik.cache.keys import KeySpace
from kveik.cache.layout import BlockCopy
from kveik.config import CacheConfig, EngineConfig, ModelConfig, ScheduleConfig
from kveik.engine.llm import LLM
from kveik.engine.loop import EngineLoop
from kveik.engine.stream import RequestStream
from kveik.kernels.kv_types import parts
from kveik.request.request import TokenLogprob
from tests.engine.test_sharing import BLOCKS, CONTEXT, assert_nobody_holds_anything, greedy, kv_cache, mixed_requests, prompt_of
from tests.engine.tiny import save_tiny_llama

MARGIN = 0.25
"""Nats. Rounding in float32 depends on a batch's size, and may push a stored value to its neighbour, a step of int8 away.
Of two tokens nearly as likely the other may then be chosen; but these weights are so wide that likeliest tokens mostly lead."""


QUANTISED = ["int8", "fp8_e4m3", "fp8_e5m2"]


@pytest.fixture(scope="module", params=QUANTISED)
def llm(request, tmp_path_factory) -> Iterator[LLM]:  # type: ignore[no-untyped-def]  # pytest's own fixtures
    """Blocks for little more than one full context, so that many at once must take turns."""
    path = save_tiny_llama(tmp_path_factory.mktemp("tiny"))
    config = EngineConfig(
        model=ModelConfig(model=str(path), dtype="float32", max_model_len=CONTEXT),
        cache=CacheConfig(num_gpu_blocks_override=BLOCKS, kv_cache_dtype=request.param),
        schedule=ScheduleConfig(max_num_seqs=48, max_num_batched_tokens=512, prefill_chunk_size=256),
    )
    llm = LLM(config)
    yield llm
    llm.close()


def answer(llm: LLM, prompt: list[int], **more: object) -> tuple[tuple[int, ...], int]:
    (completion,) = llm.generate([prompt], greedy(**more))
    return completion.tokens, completion.cached_tokens


def test_the_storage_holds_bytes_and_its_key_names_their_type(llm: LLM) -> None:
    loaded = llm.loaded
    (tensor,) = loaded.engine.executor.memory.tensors  # type: ignore[attr-defined]  # the real executor's
    record = 16 * 16 + 2 * 16
    assert (tensor.dtype, tuple(tensor.shape)) == (torch.uint8, (BLOCKS, 2, 2, 2, record))
    assert loaded.plan.memory.cache_bytes == tensor.numel()
    assert f'kv_cache_dtype="{loaded.kv_dtype_name}"' in loaded.metrics.exposition().decode()
    space = KeySpace(
        fingerprint=loaded.fingerprint,
        kv_dtype=f"{loaded.kv_dtype_name} of float32",
        block_size=16,
        groups=loaded.spec.groups,
    )
    assert kv_cache(llm)._naming.space.namespace() == space.namespace()


def test_a_prefix_that_is_found_gives_what_computing_it_gives(llm: LLM) -> None:
    kv_cache(llm).reset()
    prompt = prompt_of(llm, 1, 500)
    fresh, none = answer(llm, prompt)
    again, cached = answer(llm, prompt)
    assert (none, cached) == (0, 499)
    assert again == fresh
    # The hit ends within a block, which is copied, scales and all, before it is written on.
    longer = [*prompt[:491], *prompt_of(llm, 2, 9)]
    shared, cached = answer(llm, longer)
    kv_cache(llm).reset()
    alone, none = answer(llm, longer)
    assert (cached, none) == (491, 0)
    assert shared == alone
    assert_nobody_holds_anything(llm)


def test_choices_of_one_request_part_by_copying_whole_records(llm: LLM) -> None:
    kv_cache(llm).reset()
    memory = llm.loaded.engine.executor.memory  # type: ignore[attr-defined]  # the real executor's
    copied = []
    copy_blocks = memory.copy_blocks

    def watched(copies: Sequence[BlockCopy]) -> None:
        for one in copies:
            copy_blocks([one])
            copied.append(torch.equal(memory.tensors[one.group][one.source], memory.tensors[one.group][one.target]))

    memory.copy_blocks = watched
    try:
        completions = llm.generate([prompt_of(llm, 3, 37)], greedy(n=3, max_tokens=40, ignore_eos=True))
    finally:
        del memory.copy_blocks
    assert copied
    assert all(copied)
    assert len({completion.tokens for completion in completions}) == 1


def test_slots_that_nobody_wrote_are_never_read(llm: LLM) -> None:
    """All bytes 0xFF: every scale is NaN."""
    kv_cache(llm).reset()
    prompt = prompt_of(llm, 4, 61)
    before, _ = answer(llm, prompt)
    (tensor,) = llm.loaded.engine.executor.memory.tensors  # type: ignore[attr-defined]  # the real executor's
    kv_cache(llm).reset()
    tensor.fill_(0xFF)
    after, cached = answer(llm, prompt)
    assert (after, cached) == (before, 0)
    written = ~parts(tensor, 16)[1].isnan()
    # 61 prompt tokens, and all answered ones but the last.
    assert int(written.sum()) == (61 + len(after) - 1) * 2 * 2 * 2


async def collected(stream: RequestStream) -> dict[int, tuple[int, ...]]:
    """Tokens by choice."""
    tokens: dict[int, tuple[int, ...]] = {}
    async for delta in stream.deltas():
        tokens[delta.choice] = tokens.get(delta.choice, ()) + delta.tokens
    return tokens


def assert_nearly_as_likely(llm: LLM, prompt: tuple[int, ...], left: tuple[int, ...], right: tuple[int, ...]) -> None:
    """Where two answers part, the model had two likeliest tokens, one as good as the other."""
    common = next(place for place, (one, other) in enumerate(zip(left, right, strict=True)) if one != other)
    answering = llm.submit([*prompt, *left[:common]], greedy(max_tokens=1, logprobs=10, ignore_eos=True))
    found: list[TokenLogprob] = []
    while not answering.text.finished:
        found += [entry for deltas in llm.step().values() for delta in deltas for entry in delta.logprobs]
    scores = dict(found[0].top)
    assert max(scores.values()) - scores[left[common]] < MARGIN
    assert max(scores.values()) - scores[right[common]] < MARGIN


@pytest.mark.parametrize(
    "llm", [pytest.param(name, marks=[pytest.mark.slow] * (name != "int8")) for name in QUANTISED], indirect=True
)
def test_64_requests_at_once_with_preemption_give_what_each_gives_alone(llm: LLM) -> None:
    requests = mixed_requests(llm, seed=100)
    kv_cache(llm).reset()
    alone = [llm.generate([list(request.prompt)], request.sampling) for request in requests]
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

    async def everybody() -> list[dict[int, tuple[int, ...]]]:
        streams = [loop.submit(request) for request in requests]
        return await asyncio.gather(*map(collected, streams))

    loop.start()
    try:
        together = asyncio.run(everybody())
    finally:
        loop.stop()
        engine.scheduler.settle = settle  # type: ignore[method-assign]  # as it was before
    assert preempted > 0, "the pool was meant to be too small for all of them"
    pairs = [
        (request.prompt, found[completion.choice], completion.tokens)
        for request, found, completions in zip(requests, together, alone, strict=True)
        for completion in completions
    ]
    differing = [pair for pair in pairs if pair[1] != pair[2]]
    assert len(differing) <= len(pairs) // 20
    for pair in differing:
        assert_nearly_as_likely(llm, *pair)
    assert_nobody_holds_anything(llm)


TEXT = (
    "Bread is one of the oldest foods that people prepare. Flour and water are mixed into a dough, which is left to"
    " rise and then baked in an oven. Yeast eats the sugar in the flour and makes gas, and the gas makes the bread "
    "light. In the north of Europe rye is grown more than wheat, because it can stand the cold, and the bread there"
    " is dark and keeps for many days. The capital of France is Paris, and the bread that people think of when they"
    " think of Paris is long, thin and white. The capital of Germany is"
)


def reading(path: Path, kv_cache_dtype: str) -> tuple[float, str]:
    """Mean negative log-likelihood of TEXT's tokens behind the first, nats, and how it goes on."""
    config = EngineConfig(
        model=ModelConfig(model=str(path), max_model_len=512),
        cache=CacheConfig(num_gpu_blocks_override=32, kv_cache_dtype=kv_cache_dtype),  # type: ignore[arg-type]  # one of its values
    )
    llm = LLM(config)
    answering = llm.submit(llm.loaded.tokenizer.encode(TEXT), greedy(max_tokens=8, prompt_logprobs=0))
    text = ""
    while not answering.text.finished:
        text += "".join(delta.text for deltas in llm.step().values() for delta in deltas)
    scores = [entry.logprob for entry in answering.text.prompt_logprobs or () if entry is not None]
    llm.close()
    assert len(scores) > 100
    return -sum(scores) / len(scores), text


@pytest.mark.model
def test_a_real_model_reads_a_text_nearly_as_well_over_quantised_blocks(catalogue_file: Callable[[str], Path]) -> None:
    path = catalogue_file("smollm2-135m")
    plain, answer = reading(path, "bfloat16")
    assert "Berlin" in answer
    for name, most in (("int8", 0.03), ("fp8_e4m3", 0.06), ("fp8_e5m2", 0.1)):
        loss, answer = reading(path, name)
        assert "Berlin" in answer
        assert 0 < abs(loss - plain) < most
