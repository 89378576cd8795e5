"""Blocks reserved for loads: held while records are copied into them, and found by content as soon as each has arrived.

    reserve ──> finish, finish, … ──> end ── a match finds what has arrived

The pool's own blocks that the hit needs as well are held too. At the end all are freed, the tail first, and are the last to go
until their sequence is admitted or closed. Independent of tiers and bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kveik.cache.evictor import Evictor
from kveik.cache.group import GroupBlocks
from kveik.cache.sequence_blocks import SequenceBlocks

Place = tuple[int, int]
"""Group, and number of a block in a sequence."""


@dataclass(frozen=True, slots=True)
class Reservation:
    """Blocks held for one sequence's load."""

    wanted: tuple[Place, ...]
    targets: tuple[int, ...]
    """Per wanted record, the block of its group that it is written into."""

    beside: tuple[tuple[int, int], ...]
    """(group, block) of the pool's own blocks that the hit needs as well."""


class LoadReservations:
    """All reservations of one KV cache manager."""

    def __init__(self, groups: Sequence[GroupBlocks], evictor: Evictor, block_size: int) -> None:
        self.active: dict[int, Reservation] = {}
        """By sequence."""

        self._groups = groups
        self._evictor = evictor
        self._block_size = block_size

    def reserve(
        self, seq: SequenceBlocks, wanted: Sequence[Place], firsts: Sequence[int], last: int, now: float
    ) -> tuple[int, ...] | None:
        """Blocks for the wanted records of a hit of `last` blocks, of which each group needs those from `firsts[group]` on.

        None, and nothing changed, where there are not as many blocks as this tenant may have.
        """
        assert not seq.held, "a sequence that runs loads nothing"
        assert seq.sequence_id not in self.active, "a sequence loads twice"
        beside = self._beside(seq, wanted, firsts, last)
        if not self._fits(seq, wanted, beside):
            return None
        for number, block in beside:
            self._groups[number].pool.touch(block)
        counts = [sum(group == number for group, _ in wanted) for number in range(len(self._groups))]
        taken = [iter(self._evictor.allocate(number, count, seq.tenant, now)) for number, count in enumerate(counts)]
        targets = tuple(next(taken[group]) for group, _ in wanted)
        self.active[seq.sequence_id] = Reservation(tuple(wanted), targets, beside)
        # Its blocks are told of to the policy when it is closed, also where it is never admitted.
        seq.kept = max(seq.kept, last)
        seq.came = now if seq.came is None else seq.came
        return targets

    def _beside(
        self, seq: SequenceBlocks, wanted: Sequence[Place], firsts: Sequence[int], last: int
    ) -> tuple[tuple[int, int], ...]:
        keys, loaded = seq.chain.extend(seq.tokens, last), set(wanted)
        return tuple(
            (number, group.index.by_key[keys[place]])
            for number, group in enumerate(self._groups)
            for place in range(firsts[number], last)
            if (number, place) not in loaded
        )

    def _fits(self, seq: SequenceBlocks, wanted: Sequence[Place], beside: Sequence[tuple[int, int]]) -> bool:
        for number, group in enumerate(self._groups):
            unheld = sum(one == number and not group.pool.references[block] for one, block in beside)
            withheld = self._evictor.withheld(seq.tenant) if number == self._evictor.lead else 0
            if sum(one == number for one, _ in wanted) > group.pool.available - unheld - withheld:
                return False
        return True

    def finish(self, seq: SequenceBlocks, number: int) -> None:
        """All bytes of the wanted record of this number are in its block."""
        reservation, size = self.active[seq.sequence_id], self._block_size
        group, place = reservation.wanted[number]
        content = tuple(seq.tokens[place * size : (place + 1) * size])
        key = seq.chain.keys[place]
        self._groups[group].register_full(reservation.targets[number], seq.chain.parent(place), content, key)

    def end(self, sequence_id: int) -> None:
        """Free all blocks. Nothing writes into those whose record has not arrived any more."""
        reservation = self.active.pop(sequence_id)
        for (group, _), target in reversed(list(zip(reservation.wanted, reservation.targets, strict=True))):
            self._groups[group].pool.free(target)
        for group, block in reversed(reservation.beside):
            self._groups[group].pool.free(block)

    def count_holders(self, group: int, holders: dict[int, int]) -> None:
        """Add the blocks that are held in a group to block -> holders."""
        for one in self.active.values():
            written = [block for (number, _), block in zip(one.wanted, one.targets, strict=True) if number == group]
            for block in [*written, *(block for number, block in one.beside if number == group)]:
                holders[block] = holders.get(block, 0) + 1
