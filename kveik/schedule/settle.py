"""Commits of a settled step: full blocks are cached, and blocks of wrong guesses are freed."""

from __future__ import annotations

import numpy as np

from kveik.cache.kv_cache_manager import KVCacheManager
from kveik.schedule.plan import Ints, StepPlan
from kveik.schedule.running_batch import RunningBatch


def commit_rows(kv_cache: KVCacheManager, batch: RunningBatch, plan: StepPlan, computed: Ints, failed: frozenset[int]) -> bool:
    """Commit what the plan's rows have computed, up to `computed` [rows]. Returns whether blocks may have become free.

    Rows that catch up are committed every time: their blocks may leave windows, and blocks reserved for the rest of a prompt
    become free at its end. The other rows only need it where a block became full.
    """
    size, behind = kv_cache.block_size, ~plan.decoding
    freed = bool(behind.any())
    for row in np.flatnonzero((computed // size != plan.starts // size) | behind).tolist():
        sequence = batch.sequences[row]
        if sequence is not None and row not in failed:
            freed |= kv_cache.commit(sequence.id, int(computed[row]))
    for row in np.flatnonzero(plan.logits > 1).tolist():
        sequence = batch.sequences[row]
        if sequence is not None and batch.capacity[row] >= sequence.length + size:
            batch.capacity[row] = kv_cache.truncate(sequence.id, sequence.length)
            freed = True
    return freed
