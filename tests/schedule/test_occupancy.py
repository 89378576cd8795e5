"""Paged memory is used: on the lengths of a production chat trace, nearly every slot held holds a token."""

from __future__ import annotations

from benchmarks.occupancy import REQUESTS, TRACE, lengths, measure


def test_blocks_in_use_hold_at_least_95_percent_live_slots() -> None:
    requests = lengths(TRACE)
    assert len(requests) == REQUESTS
    found = measure(16, requests)
    assert 0.95 <= found.live <= 1
    # The run is busy enough to mean something, and reserving contexts would waste most of the memory.
    assert found.running > 20
    assert found.reserved < 0.2
