"""Creates the configured eviction policy, and saves its learnt tables in a file over restarts."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import numpy as np

from kveik.cache.eviction.hazard import HazardPolicy
from kveik.cache.eviction.lru import LruPolicy
from kveik.cache.eviction.policy import EvictionPolicy, Learnt
from kveik.cache.eviction.priority import PriorityPolicy
from kveik.cache.eviction.tenants import Grant, TenantPolicy
from kveik.cache.evictor import Evictor
from kveik.config import CacheConfig, EngineConfig
from kveik.engine.planner import ModelPlan
from kveik.errors import BadValue
from kveik.model.catalogue import home_folder
from kveik.offload.interface import Offload
from kveik.offload.open_tiers import TierSetting
from kveik.schedule.step_cost import StepCost

logger = logging.getLogger(__name__)


Shares = Mapping[bytes, tuple[float, float]]
"""Tenant -> (reserved share of a store, maximum share)."""


def eviction_policy(config: CacheConfig, blocks: int, seed: int, shares: Shares | None = None) -> EvictionPolicy:
    """Returns the configured policy, bounded by requests' hints and tenants' shares. `blocks`: of the leading group.

    Without prefix caching there is nothing to decide, and LRU does it.
    """
    if not config.enable_prefix_caching:
        return LruPolicy()

    def bounded() -> EvictionPolicy:
        return _bounded(config, blocks, random.Random(seed))

    return TenantPolicy(grants_of(shares, blocks), bounded) if shares else bounded()


def tier_setting(
    config: EngineConfig, plan: ModelPlan, fingerprint: bytes = b"", kv_dtype: str = "", shares: Shares | None = None
) -> TierSetting:
    """Returns the tiers for this model, each with a policy of its own. Without fingerprint: for memory planning only."""

    def policy(name: str, capacity_bytes: int, record_bytes: int) -> EvictionPolicy:
        chance = random.Random(f"{config.stream.seed} {name}")

        def bounded() -> EvictionPolicy:
            return _bounded(config.cache, capacity_bytes // record_bytes, chance)

        return TenantPolicy(grants_of(shares, capacity_bytes), bounded, weighed=True) if shares else bounded()

    exact = config.model.dtype == "float32"
    return TierSetting(config.cache, plan.memory, plan.spec.groups, plan.kv_type, fingerprint, kv_dtype, exact, policy)


def _bounded(config: CacheConfig, records: int, chance: random.Random) -> EvictionPolicy:
    policy = LruPolicy() if config.eviction_policy == "lru" else HazardPolicy(config.block_size, chance)
    return PriorityPolicy(policy, records)


def grants_of(shares: Shares, capacity: int) -> dict[bytes, Grant]:
    """Returns the shares in units of the store's capacity."""
    return {tenant: Grant(int(low * capacity), int(high * capacity)) for tenant, (low, high) in shares.items()}


class Restorable(Protocol):
    """Learns while serving, and goes on from it after a restart: an eviction policy's learner, or a model of costs."""

    def learnt(self) -> Learnt: ...

    def restore(self, learnt: Learnt) -> None: ...


class LearntFile:
    """Tables of a policy, as arrays in a .npz file. Faults of the file are logged and have no other effect."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def load(self, policy: Restorable) -> bool:
        """Restore the tables that an earlier policy saved. Returns False where there are none."""
        try:
            with self.path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
                policy.restore({name: arrays[name] for name in arrays.files})
        except FileNotFoundError:
            return False
        except (OSError, ValueError, KeyError, zipfile.BadZipFile, EOFError) as error:
            logger.warning("learnt tables not readable, learning anew: path=%s error=%s", self.path, error)
            return False
        return True

    def save(self, *learners: Restorable) -> None:
        """Replace the file atomically. Without tables the file stays."""
        learnt = {name: array for one in learners for name, array in one.learnt().items()}
        if not any(array.any() for array in learnt.values()):
            return
        part = self.path.with_name(f"{self.path.name}.{os.getpid()}.part")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with part.open("wb") as file:
                np.savez(file, **learnt)  # type: ignore[arg-type]  # the names are not allow_pickle
            part.replace(self.path)
        except OSError as error:
            with contextlib.suppress(OSError):
                part.unlink()
            logger.warning("learnt tables not saved: path=%s error=%s", self.path, error)


def learnt_path(config: CacheConfig, fingerprint: bytes) -> Path | None:
    """Returns the configured file, else one per model in the user's cache folder; None without such a folder."""
    if config.eviction_file is not None:
        return Path(config.eviction_file)
    try:
        return home_folder() / "eviction" / f"{fingerprint.hex()[:16]}.npz"
    except BadValue:
        return None


def can_keep(path: Path | None) -> bool:
    """Returns whether a file can be written there. If not, logs one warning at the start rather than at the end."""
    reason = "the user has no home folder"
    if path is not None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if os.access(path.parent, os.W_OK):
                return True
            reason = f"{path.parent} cannot be written"
        except OSError as error:
            reason = f"{path.parent} cannot be made ({error.strerror})"
    logger.warning(
        "learnt tables will not be saved over a restart: reason=%s (set KVEIK_HOME to a writable folder, or give "
        "--eviction-file)",
        reason,
    )
    return False


def costs_path(path: Path) -> Path:
    """Returns the file for measured costs of loading and computing, beside the one for eviction."""
    return path.with_name(f"{path.stem}.costs.npz")


def load_learnt(path: Path, evictor: Evictor, offload: Offload, step_cost: StepCost) -> bool:
    """Restore the policies of pool and tiers, and the costs, from earlier tables. Returns whether there were any."""
    policies = (evictor.policy, *offload.policies)
    known = [LearntFile(path).load(one.learner) for one in policies if one.learner is not None]
    for costs in (step_cost, offload):
        LearntFile(costs_path(path)).load(costs)
    return any(known)


def save_learnt(path: Path, evictor: Evictor, offload: Offload, step_cost: StepCost) -> None:
    """Save the learnt tables. Tiers learn from the same requests as the pool, so its tables serve for all."""
    if evictor.policy.learner is not None:
        LearntFile(path).save(evictor.policy.learner)
    LearntFile(costs_path(path)).save(step_cost, offload)
