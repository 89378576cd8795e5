"""A prompt that fills a long context, loses its blocks to others, and goes on from the disk: no token is computed twice."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from kveik.config import CacheConfig, EngineConfig, ModelConfig, ScheduleConfig
from kveik.engine.llm import LLM
from kveik.request.request import SamplingParams
from tests.engine.tiered import believe, metric, mover
from tests.engine.tiny import save_tiny_llama

BLOCK, CHUNK, ANSWER = 16, 2048, 8
GREEDY = SamplingParams(max_tokens=ANSWER, temperature=0.0, ignore_eos=True)

ROOM = 96 << 20
"""Bytes that Python's own objects, the tiers' index and libraries may take beside the plan."""


def anonymous_bytes() -> int:
    """Memory of this process that is no file's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) << 10


def opened(model: Path, folder: Path, context: int, blocks: int) -> LLM:
    llm = LLM(
        EngineConfig(
            model=ModelConfig(model=str(model), dtype="float32", max_model_len=context),
            cache=CacheConfig(num_gpu_blocks_override=blocks, kv_disk=str(folder), kv_disk_bytes=1 << 30, block_size=BLOCK),
            schedule=ScheduleConfig(max_num_seqs=4, max_num_batched_tokens=CHUNK, prefill_chunk_size=CHUNK),
        )
    )
    # Loading is worth it, whatever else this machine is doing.
    believe(llm, 0.01)
    return llm


def asked(llm: LLM, prompt: list[int]) -> tuple[tuple[int, ...], int]:
    """The answer and how many of the prompt's tokens were not computed; what is to be written is written then."""
    (completion,) = llm.generate([prompt], GREEDY)
    mover(llm).drain(llm.loaded.engine.clock.now() + 3600)
    llm.loaded.engine.attend()
    llm.loaded.engine.scheduler.check()
    return completion.tokens, completion.cached_tokens


@pytest.mark.parametrize(
    ("length", "context"), [(12_000, 16_384), pytest.param(120_000, 131_072, marks=pytest.mark.slow)], ids=["12k", "120k"]
)
def test_a_long_prompt_goes_on_from_the_disk_after_others_had_its_blocks(length: int, context: int, tmp_path: Path) -> None:
    model = save_tiny_llama(tmp_path / "model", width=32, layers=1, context=context)
    chance = random.Random(3)
    prompt, other = ([chance.randrange(256) for _ in range(length)] for _ in range(2))
    before = anonymous_bytes()
    llm = opened(model, tmp_path / "disk", context, blocks=context // BLOCK)
    answer, cached = asked(llm, prompt)
    assert cached == 0
    assert asked(llm, other)[1] == 0

    turn = [*prompt, *answer, 1, 2, 3]
    went_on, cached = asked(llm, turn)
    kept = (length + ANSWER - 1) // BLOCK * BLOCK
    assert cached == kept
    assert metric(llm, "prompt_tokens_by_source_total", "disk") > kept // 2
    plan = llm.loaded.plan.memory
    assert anonymous_bytes() - before <= plan.cache_bytes + plan.workspace_bytes + plan.weight_bytes + ROOM
    llm.close()

    plain = opened(model, tmp_path / "empty", context, blocks=context // BLOCK)
    assert asked(plain, turn) == (went_on, 0)
    plain.close()
