"""Blocks on their way from a tier into the pool. Knows no bytes: who moves them says what arrived.

    find ── best_split says how far ── fits ── begin ──> arrived, arrived, … ──> end ── match finds what has arrived

While it lasts, the blocks that are written and those of the pool that the hit needs too are held; a block can be found as soon
as its record has arrived and was verified, never before. At the end all are given back, findable, and are the last to go until
their sequence is admitted or closed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kveik.cache.evictor import Evictor
from kveik.cache.group import GroupBlocks
from kveik.cache.prefix_match import PrefixMatch
from kveik.cache.sequence_blocks import SequenceBlocks
from kveik.offload.tier_match import Below
from kveik.offload.transfer import Fetch


@dataclass(slots=True, eq=False)
class Loading:
    """What is being loaded for one sequence."""

    fetches: tuple[Fetch, ...]
    targets: tuple[int, ...]
    """Per fetch, the block of its group that the record is written into."""

    beside: tuple[tuple[int, int], ...]
    """(group, block) of the pool's own blocks that the hit needs as well."""

    waiting: set[int] = field(default_factory=set)
    """Numbers of fetches that have not ended."""


class Loader:
    """All loads of one KV cache manager."""

    def __init__(
        self, groups: Sequence[GroupBlocks], seqs: Mapping[int, SequenceBlocks], evictor: Evictor, block_size: int
    ) -> None:
        self.active: dict[int, Loading] = {}
        """By sequence."""

        self._groups = groups
        self._seqs = seqs
        self._evictor = evictor
        self._block_size = block_size

    def find(self, sequence_id: int, match: PrefixMatch | None, limit: int) -> Below | None:
        """What lies below of the sequence's first `limit` tokens behind its match in the pool. None: there is no tier."""
        below = self._evictor.below
        if below is None:
            return None
        keys = self.keys(sequence_id, limit)
        pools = [group.index.by_key for group in self._groups]
        hit = (match.tokens, match.full) if match else (0, 0)
        return below.found(keys, hit, lambda group, key: key in pools[group])

    def keys(self, sequence_id: int, limit: int) -> list[bytes]:
        """Of the sequence's whole blocks within its first `limit` tokens."""
        seq, whole = self._seqs[sequence_id], max(0, limit) // self._block_size
        return seq.chain.extend(seq.tokens, whole)[:whole]

    def fits(self, sequence_id: int, below: Below, cut: int) -> bool:
        """Whether there are blocks for it now, as far as this tenant may have them."""
        fetches, beside = below.fetches(cut), self._beside(below, cut)
        for number, group in enumerate(self._groups):
            unheld = sum(one == number and not group.pool.references[block] for one, block in beside)
            withheld = self._evictor.withheld(self._seqs[sequence_id].tenant) if number == self._evictor.lead else 0
            if sum(fetch.group == number for fetch in fetches) > group.pool.available - unheld - withheld:
                return False
        return True

    def begin(self, sequence_id: int, below: Below, cut: int) -> Loading:
        """Take the blocks. It fits, and nothing has happened since `below` was found."""
        directory, seq = self._evictor.below, self._seqs[sequence_id]
        assert directory is not None
        assert not seq.held, "a sequence that runs loads nothing"
        assert sequence_id not in self.active, "a sequence loads twice"
        fetches, beside = below.fetches(cut), self._beside(below, cut)
        for number, block in beside:
            self._groups[number].pool.hold(block)
        directory.pin(fetches)
        self._evictor.asking = seq.tenant
        targets = self._take(fetches)
        loading = self.active[sequence_id] = Loading(fetches, targets, beside, set(range(len(fetches))))
        # Its blocks are told of to the policy when it is closed, also where it is never admitted.
        seq.kept = max(seq.kept, int(below.cuts[cut]))
        seq.came = self._evictor.now if seq.came is None else seq.came
        return loading

    def _take(self, fetches: Sequence[Fetch]) -> tuple[int, ...]:
        """A block for each, of its group."""
        taken = [iter(group.take(sum(one.group == number for one in fetches))) for number, group in enumerate(self._groups)]
        return tuple(next(taken[fetch.group]) for fetch in fetches)

    def _beside(self, below: Below, cut: int) -> tuple[tuple[int, int], ...]:
        """The pool's own blocks of the hit."""
        fetched = {(fetch.group, fetch.place) for fetch in below.fetches(cut)}
        return tuple(
            (number, group.index.by_key[below.keys[place]])
            for number, group in enumerate(self._groups)
            for place in range(int(below.starts[number, cut]), int(below.cuts[cut]))
            if (number, place) not in fetched
        )

    def arrived(self, sequence_id: int, number: int, *, found: bool) -> None:
        """One fetch has ended; `found`: all bytes of the right record are in the block."""
        loading, seq, size = self.active[sequence_id], self._seqs[sequence_id], self._block_size
        directory, fetch = self._evictor.below, loading.fetches[number]
        assert directory is not None
        loading.waiting.remove(number)
        directory.loaded(fetch, found=found)
        if found:
            content = tuple(seq.tokens[fetch.place * size : (fetch.place + 1) * size])
            parent = seq.chain.parent(fetch.place)
            self._groups[fetch.group].register_full(loading.targets[number], parent, content, fetch.key)

    def end(self, sequence_id: int) -> None:
        """Give all blocks back. What still waits was called off: nobody writes into its block any more."""
        loading, directory = self.active.pop(sequence_id), self._evictor.below
        assert directory is not None
        for number in loading.waiting:
            directory.loaded(loading.fetches[number], found=True)
        for fetch, target in reversed(list(zip(loading.fetches, loading.targets, strict=True))):
            self._groups[fetch.group].pool.give_back(target)
        for group, block in reversed(loading.beside):
            self._groups[group].pool.give_back(block)

    def count_holders(self, group: int, holders: dict[int, int]) -> None:
        """Add what loads hold in a group to block -> holders."""
        for loading in self.active.values():
            held = [block for number, block in loading.beside if number == group]
            written = [one for fetch, one in zip(loading.fetches, loading.targets, strict=True) if fetch.group == group]
            for block in [*held, *written]:
                holders[block] = holders.get(block, 0) + 1
