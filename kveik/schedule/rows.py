"""Whose row in the block tables is which: the i-th of a plan has row i, so that the executor reads them where they are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kveik.cache.kv_cache_manager import KVCacheManager
from kveik.request.sequence import Sequence
from kveik.schedule.running_batch import RunningBatch


def line_up(
    kv_cache: KVCacheManager, alive: Mapping[int, Sequence], decodes: RunningBatch, prefills: Iterable[Sequence]
) -> None:
    """Decodes have the first rows, in the running batch's order; then come the prefills."""
    for place in decodes.close_gaps():
        sequence = decodes.sequences[place]
        assert sequence is not None
        _take_row(kv_cache, alive, sequence, place)
    for row, sequence in enumerate(prefills, start=len(decodes)):
        _take_row(kv_cache, alive, sequence, row)


def _take_row(kv_cache: KVCacheManager, alive: Mapping[int, Sequence], sequence: Sequence, row: int) -> None:
    if sequence.row == row:
        return
    other = kv_cache.move(sequence.id, row)
    if other is not None:
        alive[other].row = sequence.row
    sequence.row = row
