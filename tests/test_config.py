"""Settings of which nothing would come, or an error much later, are refused with the number and the option."""

from __future__ import annotations

import pytest

from kveik.config import CacheConfig, ModelConfig
from kveik.errors import BadValue


@pytest.mark.parametrize("name", ["kv_disk", "kv_remote"])
def test_a_tier_without_a_place_is_refused(name: str) -> None:
    flag = "--" + name.replace("_", "-")
    for empty in ("", " "):
        with pytest.raises(BadValue, match=f"{flag} is empty"):
            CacheConfig(**{name: empty})  # type: ignore[arg-type]  # a setting by its name
    with pytest.raises(BadValue, match=f"{flag}-bytes is 5000, but there is no {flag} "):
        CacheConfig(**{f"{name}_bytes": 5000})  # type: ignore[arg-type]  # a setting by its name


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
