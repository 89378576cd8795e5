"""The arithmetic before anything is loaded."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kveik.config import CacheConfig, EngineConfig, ModelConfig, ScheduleConfig
from kveik.engine import planner
from kveik.engine.planner import ModelPlan, estimated_weight_bytes, plan_model
from kveik.errors import BadValue, DoesNotFit
from kveik.kernels.kv_types import BFLOAT16
from kveik.model.decoder import load_decoder
from kveik.model.spec import ModelSpec
from kveik.model.weights import open_model
from tests.engine.tiny import CONTEXT, save_tiny_llama

GIB = 1 << 30


@pytest.fixture(autouse=True)
def small_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that runs the tests has whatever other tests left in it; the plan is for one of a known size."""
    monkeypatch.setattr(planner, "resident_bytes", lambda: 64 << 20)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def spec(folder: Path) -> ModelSpec:
    return open_model(folder).spec


def config(*, model: dict[str, object] | None = None, cache: dict[str, object] | None = None) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(**{"dtype": "float32", **(model or {})}),  # type: ignore[arg-type]  # a test's own words
        cache=CacheConfig(**(cache or {})),  # type: ignore[arg-type]  # a test's own words
        schedule=ScheduleConfig(max_num_seqs=4, max_num_batched_tokens=64, prefill_chunk_size=64),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_estimate_of_the_weights_is_what_loading_takes(folder: Path, spec: ModelSpec, dtype: torch.dtype) -> None:
    loaded = load_decoder(open_model(folder), dtype).weight_bytes
    assert estimated_weight_bytes(spec, dtype) == pytest.approx(loaded, rel=0.02)


def test_the_plan_says_everything_that_was_decided(spec: ModelSpec) -> None:
    plan = plan_model(config(), spec, available_bytes=GIB)
    text = "\n".join(plan.lines())
    assert plan.max_model_len == CONTEXT
    assert str(plan.memory.blocks[0]) in text
    assert "float32" in text
    assert plan.threads.sentence in text


def test_without_a_context_of_ones_own_it_is_the_models(spec: ModelSpec) -> None:
    assert plan_model(config(model={"max_model_len": 77}), spec, available_bytes=GIB).max_model_len == 77
    with pytest.raises(BadValue, match=rf"{CONTEXT + 1}.*{CONTEXT}"):
        plan_model(config(model={"max_model_len": CONTEXT + 1}), spec, available_bytes=GIB)


def test_weights_that_do_not_fit_are_refused_before_they_are_read(spec: ModelSpec) -> None:
    with pytest.raises(DoesNotFit, match=r"weights need \d+ bytes; --gpu-memory-utilization 0.5 of the 1000 bytes"):
        plan_model(config(), spec, available_bytes=1000)


def test_a_cache_larger_than_the_machine_is_refused_with_the_size_that_works(spec: ModelSpec) -> None:
    with pytest.raises(DoesNotFit, match=r"Blocks may take (\d+) bytes") as refused:
        plan_model(config(cache={"kv_cache_memory_bytes": 2 * GIB}), spec, available_bytes=GIB)
    room = int(re.findall(r"may take (\d+) bytes", refused.value.message)[0])
    assert plan_model(config(cache={"kv_cache_memory_bytes": room}), spec, available_bytes=GIB).memory.cache_bytes <= room


def test_a_context_that_does_not_fit_is_refused_with_numbers_that_work(spec: ModelSpec) -> None:
    budget = {"kv_cache_memory_bytes": 1 << 20}
    with pytest.raises(DoesNotFit) as refused:
        plan_model(config(cache=budget), spec, available_bytes=GIB)
    message = refused.value.message
    shorter = int(re.findall(r"--max-model-len (\d+)", message)[-1])
    larger = int(re.findall(r"--kv-cache-memory-bytes (\d+)", message)[-1])
    blocks = int(re.findall(r"--num-gpu-blocks-override (\d+)", message)[-1])
    plan_model(config(model={"max_model_len": shorter}, cache=budget), spec, available_bytes=GIB)
    plan_model(config(cache={"kv_cache_memory_bytes": larger}), spec, available_bytes=GIB)
    plan_model(config(cache={"num_gpu_blocks_override": blocks}), spec, available_bytes=GIB)
    with pytest.raises(DoesNotFit):
        plan_model(config(model={"max_model_len": shorter + 17}, cache=budget), spec, available_bytes=GIB)


def test_blocks_of_a_narrower_type_are_twice_as_many(spec: ModelSpec) -> None:
    wide = plan_model(config(cache={"kv_cache_memory_bytes": 64 << 20}), spec, available_bytes=GIB)
    narrow = plan_model(
        config(cache={"kv_cache_memory_bytes": 64 << 20, "kv_cache_dtype": "bfloat16"}), spec, available_bytes=GIB
    )
    assert narrow.memory.blocks[0] == 2 * wide.memory.blocks[0]


@pytest.mark.parametrize("dtype", ["int8", "fp8_e4m3", "fp8_e5m2"])
def test_blocks_of_bytes_are_nearly_twice_those_of_bfloat16(spec: ModelSpec, dtype: str) -> None:
    def planned(name: str) -> ModelPlan:
        return plan_model(config(cache={"kv_cache_memory_bytes": 64 << 20, "kv_cache_dtype": name}), spec, available_bytes=GIB)

    wide, narrow = planned("bfloat16"), planned(dtype)
    # 16 values and a scale of two bytes in place of 16 values of two bytes.
    assert spec.head_dim == 16
    assert narrow.memory.blocks[0] == wide.memory.blocks[0] * 32 // 18
    assert f"keys and values in {dtype}, 1 byte each and a scale per token and head" in "\n".join(narrow.lines())
    assert narrow.memory.layouts[0].block_bytes * 32 == wide.memory.layouts[0].block_bytes * 18


@pytest.mark.parametrize(("alias", "name"), [("bf16", "bfloat16"), ("fp8", "fp8_e4m3"), ("auto", "float32")])
def test_a_type_of_keys_and_values_may_be_named_as_elsewhere(spec: ModelSpec, alias: str, name: str) -> None:
    assert plan_model(config(cache={"kv_cache_dtype": alias}), spec, available_bytes=GIB).kv_type.name == name


def test_auto_is_the_models_arithmetic(spec: ModelSpec) -> None:
    assert plan_model(config(model={"dtype": "bfloat16"}), spec, available_bytes=GIB).kv_type is BFLOAT16


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_heads_that_a_type_cannot_hold_are_refused_with_those_that_can(spec: ModelSpec, dtype: str) -> None:
    odd = replace(spec, head_dim=12)
    with pytest.raises(BadValue, match=rf"--kv-cache-dtype is {dtype}.*multiple of 8.*is 12\. bfloat16 and float32") as refused:
        plan_model(config(cache={"kv_cache_dtype": dtype}), odd, available_bytes=GIB)
    assert refused.value.param == "kv_cache_dtype"
    plan_model(config(cache={"kv_cache_dtype": "bfloat16"}), odd, available_bytes=GIB)
