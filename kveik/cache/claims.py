"""Claims on block contents that running sequences are about to compute, so that no other computes them meanwhile.

A claim has one owner, who is running and never waits for anybody. It ends when the content is registered or the owner goes;
so whoever waits for a claim is always set free.
"""

from __future__ import annotations

from collections.abc import Iterable

from kveik.cache.sequence_blocks import SequenceBlocks


class Claims:
    """Content key -> the sequence that is about to compute it. Bounded by the blocks of the running sequences' prompts."""

    def __init__(self) -> None:
        self._owner: dict[bytes, int] = {}
        self._claimed: dict[int, dict[bytes, None]] = {}

    def __len__(self) -> int:
        return len(self._owner)

    def __contains__(self, key: bytes) -> bool:
        return key in self._owner

    def blocker(self, seq: SequenceBlocks, found: int) -> bytes | None:
        """The claim on what follows the first `found` blocks of a sequence; the last one, where several follow each other."""
        if not self._owner:
            return None
        length, size, last = len(seq.tokens), seq.chain.block_size, None
        for key in seq.keys_of(found, length // size * size):
            if key not in self._owner:
                return last
            last = key
        if length % size > 1:
            (tail,) = seq.keys_of(length // size, length)
            last = tail if tail in self._owner else last
        return last

    def stake(self, owner: int, keys: Iterable[bytes]) -> None:
        """Claim what nobody has claimed yet."""
        mine = {key: None for key in keys if key not in self._owner}
        if mine:
            self._owner.update(dict.fromkeys(mine, owner))
            self._claimed.setdefault(owner, {}).update(mine)

    def fulfil(self, owner: int, key: bytes) -> None:
        """The owner has computed it; nothing where the claim was not his."""
        mine = self._claimed.get(owner)
        if mine is not None and key in mine:
            del mine[key]
            del self._owner[key]
            if not mine:
                del self._claimed[owner]

    def drop(self, owner: int) -> None:
        """The owner goes; what he has not computed can be claimed by others."""
        for key in self._claimed.pop(owner, ()):
            del self._owner[key]

    def check(self, running: Iterable[int]) -> None:
        """Every claim has one owner, who is running."""
        assert set(self._claimed) <= set(running), "a claim's owner is gone"
        assert self._owner == {key: owner for owner, keys in self._claimed.items() for key in keys}
