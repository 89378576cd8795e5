"""Whose row in the block tables is which: the i-th of a plan has row i, so that the executor reads them where they are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kveik.cache.ledger import CacheLedger
from kveik.request.sequence import Sequence
from kveik.schedule.roster import Roster


def line_up(ledger: CacheLedger, alive: Mapping[int, Sequence], decodes: Roster, prefills: Iterable[Sequence]) -> None:
    """Decodes have the first rows, in the roster's order; then come the prefills."""
    for place in decodes.close_gaps():
        sequence = decodes.sequences[place]
        assert sequence is not None
        _take_row(ledger, alive, sequence, place)
    for row, sequence in enumerate(prefills, start=len(decodes)):
        _take_row(ledger, alive, sequence, row)


def _take_row(ledger: CacheLedger, alive: Mapping[int, Sequence], sequence: Sequence, row: int) -> None:
    if sequence.row == row:
        return
    other = ledger.move(sequence.id, row)
    if other is not None:
        alive[other].row = sequence.row
    sequence.row = row
