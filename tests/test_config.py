"""Settings of which nothing would come, or an error much later, are refused with the number and the option."""

from __future__ import annotations

from dataclasses import fields

import pytest

from kveik.config import CacheConfig, ModelConfig
from kveik.errors import BadValue

TIERS = {"kv_ram_bytes": 1 << 20, "hybrid_kv_cache_fraction": 0.2, "kv_disk": "x", "kv_remote": "redis://x"}
TIERS_OF = {
    "kv_disk_bytes": ("kv_disk",),
    "kv_remote_bytes": ("kv_remote",),
    "kv_ram_encoding": ("kv_ram_bytes", "hybrid_kv_cache_fraction"),
    "kv_write_policy": ("kv_ram_bytes", "hybrid_kv_cache_fraction", "kv_disk", "kv_remote"),
}
VALUES: dict[str, tuple[object, ...]] = {
    "kv_disk_bytes": (5000,),
    "kv_remote_bytes": (5000,),
    "kv_ram_encoding": ("auto", "int8", "raw"),
    "kv_write_policy": ("filtered", "write-through", "second-touch"),
}


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def test_a_device_that_is_not_the_cpu_is_refused_by_name() -> None:
    for name in ("cuda", "cuda:0", "gpu", "mps", "xpu", "auto", "CPU", ""):
        with pytest.raises(BadValue) as refused:
            ModelConfig(device=name)
        assert refused.value.message == (f'--device is "{name}"; this version computes on the CPU alone. Use --device cpu.')
        assert refused.value.param == "device"
    assert ModelConfig(device="cpu").device == ModelConfig().device


@pytest.mark.parametrize("name", ["kv_disk", "kv_remote"])
def test_a_tier_without_a_place_is_refused(name: str) -> None:
    flag = "--" + name.replace("_", "-")
    for empty in ("", " "):
        with pytest.raises(BadValue, match=f"{flag} is empty"):
            CacheConfig(**{name: empty})  # type: ignore[arg-type]  # a setting by its name


def test_a_tier_setting_without_its_tier_is_refused_with_what_it_wants() -> None:
    for name, tiers in TIERS_OF.items():
        for value in VALUES[name]:
            others: dict[str, object] = {tier: at for tier, at in TIERS.items() if tier not in tiers}
            for without in ({}, others):
                with pytest.raises(BadValue, match=f"^{flag_of(name)} is {value}; it has no effect without ") as refused:
                    CacheConfig(**{name: value}, **without)  # type: ignore[arg-type]  # a setting by its name
                assert all(flag_of(tier) in refused.value.message for tier in tiers)
                assert refused.value.param == name
            for tier in tiers:
                given = CacheConfig(**{name: value, tier: TIERS[tier]})  # type: ignore[arg-type]  # a setting by its name
                assert getattr(given, name) == value


def test_a_share_of_nothing_is_no_tier() -> None:
    with pytest.raises(BadValue, match="--kv-write-policy is filtered; it has no effect without --kv-disk, "):
        CacheConfig(kv_write_policy="filtered", hybrid_kv_cache_fraction=0)


def test_every_setting_of_a_tier_needs_one() -> None:
    of_tiers = {field.name for field in fields(CacheConfig) if field.name.startswith(("kv_", "hybrid_"))}
    assert TIERS_OF.keys() | TIERS.keys() == of_tiers - {"kv_cache_dtype", "kv_cache_memory_bytes"}


def test_a_tier_has_the_bound_that_was_given_or_the_default() -> None:
    given = CacheConfig(kv_disk="x", kv_disk_bytes=5 << 20, kv_remote="redis://x", kv_remote_bytes=6 << 20)
    assert (given.disk_bytes, given.remote_bytes) == (5 << 20, 6 << 20)
    default = CacheConfig(kv_disk="x", kv_remote="redis://x")
    assert (default.disk_bytes, default.remote_bytes) == (16 << 30, 16 << 30)


def test_a_number_that_no_machine_has_is_refused() -> None:
    with pytest.raises(BadValue, match="--kv-disk-bytes is 99999999999999999999999; it must be at most 9223372036854775807"):
        CacheConfig(kv_disk="x", kv_disk_bytes=99999999999999999999999)
    with pytest.raises(BadValue, match="--max-model-len is 1000000"):
        ModelConfig(max_model_len=10**30)
