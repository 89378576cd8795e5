"""The baseline, from one word: presets, settings, and what is no baseline."""

from __future__ import annotations

import pytest

from kveik.cli.baselines import PRESETS, baseline_of
from kveik.config import CacheConfig, EngineConfig, ModelConfig, ScheduleConfig
from kveik.errors import BadValue

CONFIG = EngineConfig(
    model=ModelConfig(model="some", quantization="w8a8", threads=3), cache=CacheConfig(kv_cache_dtype="float32", block_size=32)
)


@pytest.mark.parametrize(("preset", "dtype"), [("bf16", "bfloat16"), ("file", "float32")])
def test_a_preset_quantises_nothing_and_keeps_the_rest(preset: str, dtype: str) -> None:
    assert baseline_of(CONFIG, preset) == EngineConfig(
        model=ModelConfig(model="some", dtype=dtype, quantization="bf16", threads=3),  # type: ignore[arg-type]  # one of them
        cache=CacheConfig(kv_cache_dtype="auto", block_size=32),
    )


def test_settings_replace_the_configuration_s_own_and_nothing_else() -> None:
    found = baseline_of(CONFIG, "quantization=w4a8, block_size=8,kv-cache-memory-bytes=2GiB,--prefill-chunk-size = 64")
    assert found == EngineConfig(
        model=ModelConfig(model="some", quantization="w4a8", threads=3),
        cache=CacheConfig(kv_cache_dtype="float32", block_size=8, kv_cache_memory_bytes=2 << 30),
        schedule=ScheduleConfig(prefill_chunk_size=64),
    )


def test_settings_may_follow_a_preset() -> None:
    found = baseline_of(CONFIG, "bf16,kv-cache-dtype=float32,enable-prefix-caching=off,gpu-memory-utilization=0.25")
    assert (found.model.dtype, found.model.quantization) == ("bfloat16", "bf16")
    assert found.cache == CacheConfig(
        kv_cache_dtype="float32", block_size=32, enable_prefix_caching=False, gpu_memory_utilization=0.25
    )


def test_another_model_may_be_the_baseline() -> None:
    assert baseline_of(CONFIG, "model=other.gguf").model.model == "other.gguf"


@pytest.mark.parametrize(
    ("against", "words"),
    [
        ("", "--against is empty"),
        (",", "--against is empty"),
        ("fp8", "knows no 'fp8'; it is bf16, file, or settings as name=value"),
        ("kv-cache-dtyp=int8", "not a setting of an engine. Did you mean kv-cache-dtype?"),
        ("temperature=0", "'temperature', which is not a setting of an engine"),
        ("dtype=float64", "sets dtype to 'float64'; it must be: auto | bfloat16 | float32"),
        ("block-size=big", "sets block-size to 'big'; it must be: integer"),
        ("block-size=9", "--block-size is 9; it must be one of"),
        ("kv-cache-memory-bytes=lots", "it must be: bytes, as 500000000"),
        ("enable-prefix-caching=maybe", "it must be: switch"),
        ("model=", "sets model to ''"),
    ],
)
def test_what_is_no_baseline_is_refused_with_what_is(against: str, words: str) -> None:
    with pytest.raises(BadValue) as refused:
        baseline_of(CONFIG, against)
    assert words in refused.value.message


def test_every_preset_sets_what_a_configuration_has() -> None:
    fields = {*ModelConfig.__dataclass_fields__, *CacheConfig.__dataclass_fields__}
    assert all(values.keys() <= fields for values in PRESETS.values())
