"""From a configuration to an engine, and every way in which that must not go wrong silently."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import tokenizers
import torch

from kveik.config import CacheConfig, EngineConfig, ModelConfig, ScheduleConfig
from kveik.engine.build import open_engine
from kveik.engine.llm import LLM, none_failed
from kveik.errors import BadValue, ModelBroken, NonFiniteLogits, PromptTooLong, Unreachable, Unsupported
from kveik.request.request import SamplingParams
from tests.engine.tiny import save_tiny_llama


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("tiny"))


def config(folder: Path, *, blocks: int = 64, **model: object) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(**{"model": str(folder), "dtype": "float32", "max_model_len": 512, **model}),  # type: ignore[arg-type]  # a test's own words
        cache=CacheConfig(num_gpu_blocks_override=blocks),
        schedule=ScheduleConfig(max_num_seqs=4, max_num_batched_tokens=64, prefill_chunk_size=64),
    )


def quiet(line: str) -> None:
    """Nobody reads the start-up lines."""


def test_the_start_up_lines_hold_the_memory_arithmetic(folder: Path) -> None:
    lines: list[str] = []
    loaded = open_engine(config(folder), lines.append)
    text = "\n".join(lines)
    assert "weights" in text
    assert "workspace" in text
    assert "64 blocks" in text
    assert loaded.plan.memory.workspace_bytes > 0
    loaded.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_cached_and_stored_types_may_differ(folder: Path, dtype: str) -> None:
    mixed = EngineConfig(
        model=ModelConfig(model=str(folder), dtype=dtype, max_model_len=512),  # type: ignore[arg-type]  # one of its values
        cache=CacheConfig(num_gpu_blocks_override=64, kv_cache_dtype="bfloat16" if dtype == "float32" else "float32"),
    )
    llm = LLM(mixed)
    (first,) = llm.generate([list(range(40))], SamplingParams(max_tokens=8, temperature=0.0))
    (again,) = llm.generate([list(range(40))], SamplingParams(max_tokens=8, temperature=0.0))
    assert again.cached_tokens == 39
    assert again.tokens == first.tokens
    llm.close()


def test_a_model_that_is_not_here_is_told_with_the_command_that_fetches_it(tmp_path: Path) -> None:
    with pytest.raises(Unreachable, match="kveik pull"):
        open_engine(config(tmp_path / "nothing"), quiet)


def test_a_tokenizer_larger_than_the_embedding_is_refused(folder: Path, tmp_path: Path) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    core = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    core.add_special_tokens([f"<more{number}>" for number in range(10)])
    core.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ModelBroken, match="267 tokens, the model's embedding table only 260"):
        open_engine(config(tmp_path), quiet)


def test_the_operators_template_stands_in_for_the_models(folder: Path, tmp_path: Path) -> None:
    template = tmp_path / "mine.jinja"
    template.write_text("{% for message in messages %}<{{ message.content }}>{% endfor %}", encoding="utf-8")
    llm = LLM(config(folder, chat_template=str(template)))
    tokens = llm.tokens_of_chat([{"role": "user", "content": "hi"}])
    assert llm.loaded.tokenizer.decode(tokens) == "<hi>"
    with pytest.raises(BadValue, match="--chat-template cannot be read"):
        open_engine(config(folder, chat_template=str(tmp_path / "none.jinja")), quiet)


def test_a_model_without_a_template_answers_no_chat_but_completes(folder: Path, tmp_path: Path) -> None:
    for file in folder.iterdir():
        if file.name not in ("chat_template.jinja", "tokenizer_config.json"):
            (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}), encoding="utf-8")
    llm = LLM(config(tmp_path))
    with pytest.raises(Unsupported, match="--chat-template"):
        llm.tokens_of_chat([{"role": "user", "content": "hi"}])
    (answer,) = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2))
    assert answer.prompt_tokens == 3


def test_a_prompt_longer_than_the_context_is_refused_with_both_numbers(folder: Path) -> None:
    llm = LLM(config(folder))
    with pytest.raises(PromptTooLong, match=r"512 tokens.*resulted in 512 tokens"):
        llm.generate([[1] * 512], SamplingParams(max_tokens=1))
    (answer,) = llm.generate([[1] * 511], SamplingParams(max_tokens=8, ignore_eos=True))
    assert (len(answer.tokens), answer.finish_reason) == (1, "length")


def test_a_closed_stream_frees_what_it_held(folder: Path) -> None:
    llm = LLM(config(folder))
    deltas = llm.stream(list(range(30)), SamplingParams(max_tokens=100, ignore_eos=True))
    next(deltas)
    assert llm.loaded.engine.scheduler.running == 1
    deltas.close()  # type: ignore[attr-defined]  # it is a generator
    assert llm.loaded.engine.scheduler.running == 0
    assert llm.loaded.engine.scheduler.kv_cache.usage[0].held == 0


def test_more_prompts_than_the_queue_holds_are_answered_all_the_same(folder: Path) -> None:
    few = EngineConfig(
        model=ModelConfig(model=str(folder), dtype="float32", max_model_len=128),
        cache=CacheConfig(num_gpu_blocks_override=16),
        schedule=ScheduleConfig(max_num_seqs=2, max_num_batched_tokens=64, prefill_chunk_size=64, max_waiting=3),
    )
    llm = LLM(few)
    answers = llm.generate([[number] * 5 for number in range(20)], SamplingParams(max_tokens=2, ignore_eos=True, n=2))
    assert [(answer.prompt, answer.choice) for answer in answers] == [(number // 2, number % 2) for number in range(40)]


def test_a_stream_that_fails_raises_what_failed_and_leaves_the_engine_whole(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(config(folder), quiet)
    sampling = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    logits = llm.loaded.engine.executor.decoder.logits  # type: ignore[attr-defined]  # the real executor
    with monkeypatch.context() as patch:
        patch.setattr(type(llm.loaded.engine.executor.decoder), "logits", lambda self, hidden: logits(hidden) * math.nan)  # type: ignore[attr-defined]  # the real executor
        with pytest.raises(NonFiniteLogits):
            list(llm.stream([1, 2, 3], sampling))
        with pytest.raises(NonFiniteLogits):
            none_failed(llm.generate([[1, 2, 3]], sampling))
    assert len(none_failed(llm.generate([[1, 2, 3]], sampling))[0].tokens) == 4
    llm.loaded.engine.scheduler.check()


def test_threads_are_those_of_the_plan(folder: Path) -> None:
    before = torch.get_num_threads()
    try:
        loaded = open_engine(config(folder, threads=1), quiet)
        assert torch.get_num_threads() == loaded.plan.threads.threads == 1
    finally:
        torch.set_num_threads(before)
