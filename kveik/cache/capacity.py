"""Capacity: the blocks that another sequence needs beside the running ones, and those that are left. Arithmetic only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kveik.cache.group import GroupBlocks
from kveik.cache.layout import blocks_at_most, blocks_for
from kveik.cache.prefix_match import PrefixMatch
from kveik.cache.sequence_blocks import SequenceBlocks
from kveik.errors import DoesNotFit
from kveik.words import counted


@dataclass(frozen=True, slots=True)
class Shortage:
    """What is lacking to admit a sequence."""

    needed: int
    """Blocks of the group that is short, those of running sequences included; or rows."""

    available: int
    rows: bool = False
    """Whether rows are lacking, and not blocks."""


class GroupCapacity:
    """One layer group's blocks, as admission counts them."""

    def __init__(self, group: GroupBlocks, number: int, block_size: int, chunk: int) -> None:
        self._group = group
        self._number = number
        self._block_size = block_size
        self._chunk = chunk

    def check_fits(self, tokens: int, reserved: int) -> None:
        """Raises DoesNotFit where one sequence of so many tokens has not enough blocks beside those reserved for others."""
        total, size, needed = self._group.pool.total, self._block_size, self.most(tokens)
        if needed > total - reserved:
            kept = f", of which {reserved} are reserved for tenants" if reserved else ""
            raise DoesNotFit(
                f"Layer group {self._number} has {counted(total, 'block')} of {counted(size, 'token')}{kept}; one sequence of "
                f"--max-model-len {tokens} needs {needed}. At most {counted(max(0, total - reserved) * size, 'token')} fit."
            )

    def most(self, length: int, first: int = 0) -> int:
        """Blocks that a sequence of `length` tokens, whose first needed block is `first`, holds at once at most."""
        most = blocks_at_most(self._group.group, length, self._block_size, self._chunk)
        return min(most, blocks_for(length, self._block_size) - first)

    def needed(self, length: int, match: PrefixMatch | None) -> int:
        """Fresh blocks that a sequence takes until all its tokens are computed."""
        if match is None:
            return self.most(length)
        return self.most(length, match.firsts[self._number]) - len(match.blocks[self._number])

    def promised(self, filling: Iterable[SequenceBlocks]) -> int:
        """Blocks that running sequences will take to reach their targets, beyond those they hold."""
        number, total = self._number, 0
        for seq in filling:
            first = seq.firsts[number]
            held = len(seq.blocks[number]) - first
            total += max(0, self.most(seq.target, first) - held)
        return total

    def left(self, match: PrefixMatch | None, gone: Sequence[SequenceBlocks]) -> int:
        """Blocks that could be taken once the matched ones are held, as if the sequences in `gone` had been released."""
        pool, counts = self._group.pool, self._counts(gone)
        freed = sum(1 for block, count in counts.items() if pool.references[block] == count)
        wanted = match.blocks[self._number] if match else ()
        unheld = sum(1 for block in wanted if pool.references[block] == counts.get(block, 0))
        return pool.available + freed - unheld

    def _counts(self, seqs: Sequence[SequenceBlocks]) -> dict[int, int]:
        """Block -> how many of these sequences hold it."""
        counts: dict[int, int] = {}
        for seq in seqs:
            for block in seq.blocks[self._number][seq.firsts[self._number] :]:
                counts[block] = counts.get(block, 0) + 1
        return counts
