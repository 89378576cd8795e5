"""Sequence blocks: keys, blocks and progress of one sequence."""

from __future__ import annotations

from dataclasses import dataclass, field

from kveik.cache.eviction.policy import Retention
from kveik.cache.keys import KeyChain, block_key
from kveik.cache.layout import BlockCopy


@dataclass(frozen=True, slots=True)
class Admission:
    """What a sequence got when it was admitted."""

    row: int
    matched: int
    """Tokens whose keys and values are there already, once `copies` are done."""

    copies: tuple[BlockCopy, ...]


@dataclass(slots=True, eq=False)
class SequenceBlocks:
    """One sequence's keys and blocks, from `open` to `close`.

    blocks[group]   [ 0 0 | b b b | b b ]
                      ↑     ↑       └ not all slots written yet
                      │     └ registered: whole, can be found by content
                      └ firsts[group]: left the window, given back; placeholders that mean nothing
    """

    sequence_id: int
    tokens: list[int]
    """The sequence's own list, read only; it grows with every sampled token."""

    chain: KeyChain
    blocks: list[list[int]]
    firsts: list[int]
    tenant: bytes = b""
    """Who asks; blocks are taken on its behalf."""

    retention: Retention | None = None
    """What its request asked for about the blocks that it leaves behind."""

    row: int | None = None
    """Row in the block tables while it holds blocks."""

    matched: int = 0
    """Tokens that were found by content at the latest admission."""

    committed: int = 0
    """Tokens up to which it was last committed: written, and their step has finished. It may have computed some more."""

    registered: int = 0
    """Whole blocks that have been registered or were found."""

    prompt: int = field(init=False)
    """Tokens that it was opened with."""

    came: float | None = None
    """When it was first admitted, in seconds."""

    private: bool = False
    """Whether what it fills is not to be found: the cache was reset while it ran."""

    kept: int = 0
    """Whole blocks that it ever left findable when it gave its blocks back; some may have gone since."""

    target: int = 0
    """Tokens that it computes before it goes on one by one; given at admission."""

    def __post_init__(self) -> None:
        self.prompt = len(self.tokens)

    @property
    def held(self) -> bool:
        return self.row is not None

    def keys_of(self, first: int, length: int) -> list[bytes]:
        """Keys of the first `length` tokens' blocks from number `first` on, that of a partial last block included."""
        size = self.chain.block_size
        whole = length // size
        keys = self.chain.extend(self.tokens, whole)[first:whole]
        if length % size:
            keys.append(block_key(self.chain.parent(whole), self.tokens[whole * size : length]))
        return keys

    def keys_to_compute(self) -> list[bytes]:
        """Keys of the blocks that it computes before it goes on one by one."""
        return self.keys_of(self.registered, self.target)
