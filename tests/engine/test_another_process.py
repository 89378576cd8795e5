"""A plan is all that an executor needs: one in another process, which sees nothing but pickled plans, gives the same tokens."""

from __future__ import annotations

import multiprocessing
import pickle
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from kveik.config import CacheConfig, EngineConfig, ModelConfig, ScheduleConfig, StreamConfig
from kveik.engine.llm import LLM, Completion
from kveik.measure.hidden_states import executor_of
from kveik.request.request import SamplingParams
from kveik.schedule.plan import StepOutcome, StepPlan
from tests.engine.tiny import save_tiny_gemma, save_tiny_llama

PROMPTS = [list(range(40, 140)), list(range(40, 130)), list(range(40, 140)), [7] * 30]
SAMPLINGS = [
    SamplingParams(max_tokens=12, temperature=0.0),
    SamplingParams(max_tokens=12, temperature=0.9, top_p=0.8, seed=5, n=2),
    SamplingParams(max_tokens=12, temperature=0.7, top_k=20, seed=6, repetition_penalty=1.3, frequency_penalty=0.4),
    SamplingParams(max_tokens=8, temperature=1.0, min_p=0.05, seed=7, logit_bias=((65, 5.0), (66, -100.0)), min_tokens=4),
    SamplingParams(max_tokens=4, temperature=0.0, logprobs=3, prompt_logprobs=2),
]


def config_of(folder: Path) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(model=str(folder), dtype="float32", max_model_len=256),
        cache=CacheConfig(block_size=16, num_gpu_blocks_override=40),
        schedule=ScheduleConfig(prefill_chunk_size=32, max_num_seqs=4),
        stream=StreamConfig(seed=1),
    )


def serve(folder: str, pipe: Connection) -> None:
    """The other process: plans in, outcomes out, as bytes."""
    executor = executor_of(LLM(config_of(Path(folder))))
    pipe.send_bytes(b"ready")
    while plan := pipe.recv_bytes():
        executor.launch(pickle.loads(plan))
        pipe.send_bytes(pickle.dumps(executor.collect()) if pickle.loads(plan).rows else b"")


class Elsewhere:
    """An executor that only passes bytes."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe = pipe
        self.bytes = 0

    def launch(self, plan: StepPlan) -> None:
        sent = pickle.dumps(plan)
        self.bytes += len(sent)
        self.pipe.send_bytes(sent)
        if plan.empty:
            assert self.pipe.recv_bytes() == b""

    def collect(self) -> StepOutcome:
        outcome: StepOutcome = pickle.loads(self.pipe.recv_bytes())
        return outcome


def answers(llm: LLM) -> list[list[Completion]]:
    return [llm.generate(PROMPTS, sampling) for sampling in SAMPLINGS]


@pytest.mark.parametrize("save", [save_tiny_llama, save_tiny_gemma])
def test_an_executor_in_another_process_gives_the_same_tokens(save, tmp_path: Path) -> None:
    folder = save(tmp_path)
    here = answers(LLM(config_of(folder)))
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(str(folder), theirs), daemon=True)
    process.start()
    assert ours.poll(120), "the other process did not start"
    ours.recv_bytes()
    llm = LLM(config_of(folder))
    elsewhere = Elsewhere(ours)
    llm.loaded.engine.executor = elsewhere
    try:
        there = answers(llm)
    finally:
        ours.send_bytes(b"")
        process.join(30)
    assert [[one.tokens for one in part] for part in there] == [[one.tokens for one in part] for part in here]
    assert elsewhere.bytes > 0
    assert process.exitcode == 0
