"""What was learnt for eviction survives a restart, and a damaged file costs nothing but what was in it."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from kveik.cache.eviction.hazard import HazardPolicy
from kveik.cache.eviction.lru import LruPolicy
from kveik.cache.eviction.policy import Visit
from kveik.cache.eviction.priority import PriorityPolicy
from kveik.cache.eviction.tenants import Grant, TenantPolicy
from kveik.config import CacheConfig, ServerConfig
from kveik.engine.eviction import LearntFile, can_keep, eviction_policy, grants_of, learnt_path
from kveik.errors import BadValue


def taught() -> HazardPolicy:
    policy = HazardPolicy(16, random.Random(0))
    for number in range(100):
        policy.used(Visit([bytes([number % 9])], 1, 50, float(number), float(number)))
    policy.learn(100.0)
    return policy


def test_what_was_learnt_is_there_after_a_restart(tmp_path: Path) -> None:
    file, policy, again = LearntFile(tmp_path / "deep" / "learnt.npz"), taught(), HazardPolicy(16, random.Random(0))
    file.save(policy)
    assert file.load(again)
    assert {name: array.tolist() for name, array in again.learnt().items()} == {
        name: array.tolist() for name, array in policy.learnt().items()
    }
    assert [path.name for path in file.path.parent.iterdir()] == ["learnt.npz"]


def test_without_a_file_and_without_lessons_nothing_happens(tmp_path: Path) -> None:
    file, policy = LearntFile(tmp_path / "learnt.npz"), HazardPolicy(16, random.Random(0))
    assert not file.load(policy)
    file.save(policy)
    assert not file.path.exists()


@pytest.mark.parametrize("damage", ["cut", "empty", "garbage", "shape"])
def test_a_damaged_file_is_passed_over_with_a_warning(tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    file = LearntFile(tmp_path / "learnt.npz")
    file.save(taught())
    content = file.path.read_bytes()
    file.path.write_bytes({"cut": content[:-200], "empty": b"", "garbage": b"x" * 500, "shape": content}[damage])
    if damage == "shape":
        np.savez(file.path, used=np.ones((2, 3)))
    policy = HazardPolicy(16, random.Random(0))
    assert not file.load(policy)
    assert "learning anew" in caplog.text
    assert not policy.learnt()["used"].any()


def test_a_folder_that_cannot_be_written_costs_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    LearntFile(tmp_path / "file" / "learnt.npz").save(taught())
    assert "not saved" in caplog.text


def test_the_policy_is_the_one_that_is_asked_for() -> None:
    for name, kind in (("hazard", HazardPolicy), ("lru", LruPolicy)):
        policy = eviction_policy(CacheConfig(eviction_policy=name), 100, 0)
        assert isinstance(policy, PriorityPolicy)
        assert isinstance(policy.policy, kind)
    assert isinstance(eviction_policy(CacheConfig(enable_prefix_caching=False), 100, 0), LruPolicy)


def test_each_model_has_its_file_unless_one_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVEIK_HOME", "/somewhere")
    assert learnt_path(CacheConfig(), b"\xab" * 32) == Path("/somewhere/eviction/abababababababab.npz")
    assert learnt_path(CacheConfig(eviction_file="/a/b.npz"), b"") == Path("/a/b.npz")


def test_shares_of_the_cache_become_blocks() -> None:
    shares = {b"a": (0.25, 0.5), b"b": (0.0, 1.0)}
    policy = eviction_policy(CacheConfig(), 100, 0, shares)
    assert isinstance(policy, TenantPolicy)
    assert [policy.party(tenant).grant for tenant in (b"a", b"b", b"c")] == [Grant(25, 50), Grant(0, 100), Grant()]
    assert grants_of(shares, 1000)[b"a"] == Grant(250, 500)
    assert isinstance(eviction_policy(CacheConfig(enable_prefix_caching=False), 100, 0, shares), LruPolicy)


def test_shares_are_read_with_keys_that_hold_any_character_and_never_told_again() -> None:
    config = ServerConfig(api_key=("a=b:c", "d"), tenant_share=("a=b:c=0.25:0.5", "d=0.5"))
    assert config.tenant_shares() == {"a=b:c": (0.25, 0.5), "d": (0.5, 1.0)}


@pytest.mark.parametrize(
    "shares", [("key",), ("key=x",), ("other=0.1",), ("key=0.6:0.5",), ("key=-1",), ("key=nan",), ("key=0.1", "key=0.2")]
)
def test_shares_that_are_none_are_refused(shares: tuple[str, ...]) -> None:
    with pytest.raises(BadValue, match="--tenant-share number") as caught:
        ServerConfig(api_key=("key", "more"), tenant_share=shares)
    assert "key" not in str(caught.value).replace("api-key", "")


def test_no_more_than_everything_can_be_reserved() -> None:
    with pytest.raises(BadValue, match="at most 1"):
        ServerConfig(api_key=("a", "b"), tenant_share=("a=0.6", "b=0.6"))


def test_what_is_learnt_has_no_file_where_the_user_has_no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVEIK_HOME", "~nobody-of-that-name/kveik")
    assert learnt_path(CacheConfig(), b"") is None


@pytest.mark.parametrize("path", [None, Path("/proc/nowhere/eviction/a.npz")])
def test_what_cannot_be_kept_is_one_warning_that_says_what_to_set(path: Path | None, caplog: pytest.LogCaptureFixture) -> None:
    assert can_keep(path) is False
    (record,) = caplog.records
    assert "set KVEIK_HOME to a writable folder, or give --eviction-file" in record.getMessage()


def test_what_can_be_kept_needs_no_word(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert can_keep(tmp_path / "new" / "a.npz") is True
    assert caplog.records == []
