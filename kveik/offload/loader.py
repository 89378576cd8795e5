"""Loads from tiers into blocks of the pool. Independent of bytes: the carrier says what arrived.

find ── best_split says how far ── begin ──> arrived, arrived, … ──> end ── match finds what has arrived
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kveik.cache.kv_cache_manager import KVCacheManager
from kveik.cache.prefix_match import PrefixMatch
from kveik.offload.manager import OffloadManager
from kveik.offload.tier_match import Below
from kveik.offload.transfer import Fetch


@dataclass(slots=True, eq=False)
class Loading:
    """What is being loaded for one sequence."""

    fetches: tuple[Fetch, ...]
    targets: tuple[int, ...]
    """Per fetch, the block of its group that the record is written into."""

    waiting: set[int] = field(default_factory=set)
    """Numbers of fetches that have not ended."""


class Loader:
    """All loads of one KV cache manager."""

    def __init__(self, kv_cache: KVCacheManager, manager: OffloadManager) -> None:
        self.active: dict[int, Loading] = {}
        """By sequence."""

        self._kv_cache = kv_cache
        self._manager = manager

    def find(self, sequence_id: int, match: PrefixMatch | None, limit: int) -> Below:
        """What lies below of the sequence's first `limit` tokens behind its match in the pool."""
        hit = (match.tokens, match.full) if match else (0, 0)
        return self._manager.found(self._kv_cache.chain_keys(sequence_id, limit), hit, self._kv_cache.in_pool)

    def begin(self, sequence_id: int, below: Below, cut: int, now: float) -> Loading | None:
        """Reserve the blocks; None where there are not as many. Nothing has happened since `below` was found."""
        fetches: Sequence[Fetch] = below.fetches(cut)
        wanted = [(fetch.group, fetch.place) for fetch in fetches]
        firsts = [int(first) for first in below.starts[:, cut]]
        targets = self._kv_cache.reserve_load(sequence_id, wanted, firsts, int(below.cuts[cut]), now)
        if targets is None:
            return None
        self._manager.pin(fetches)
        loading = self.active[sequence_id] = Loading(tuple(fetches), targets, set(range(len(fetches))))
        return loading

    def arrived(self, sequence_id: int, number: int, *, found: bool) -> None:
        """One fetch has ended; `found`: all bytes of the right record are in the block."""
        loading = self.active[sequence_id]
        loading.waiting.remove(number)
        self._manager.loaded(loading.fetches[number], found=found)
        if found:
            self._kv_cache.finish_load(sequence_id, number)

    def end(self, sequence_id: int) -> None:
        """Give all blocks back. What still waits was called off: nobody writes into its block any more."""
        loading = self.active.pop(sequence_id)
        for number in loading.waiting:
            self._manager.loaded(loading.fetches[number], found=True)
        self._kv_cache.end_load(sequence_id)
