"""The longest prefix of a sequence whose blocks every layer group still has. A question: changes nothing.

A hit of m = full * block_size + common tokens, with a full-attention group (above) and a windowed one (below, window 2 blocks):

    block      0        1        2        3
            [shared ][shared ][shared ][copied…      ]   common leading slots of block 3 are copied into a fresh block
            [   –   ][shared ][shared ][copied…      ]   block 0 is outside every later query's window and holds nothing
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kveik.cache.group import GroupBlocks
from kveik.cache.keys import KeyChain


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """Blocks that hold a sequence's first `tokens` tokens, in every group."""

    tokens: int
    full: int
    """Whole blocks among them; they are shared."""

    blocks: tuple[tuple[int, ...], ...]
    """Per group, the shared blocks number `firsts[group]` … full - 1."""

    firsts: tuple[int, ...]
    """Per group, the number of the first block that a later query reads; 0 without a window."""

    sources: tuple[int, ...]
    """Per group, the block whose leading slots are copied; empty where `tokens` ends with a whole block."""


def longest_match(groups: Sequence[GroupBlocks], chain: KeyChain, tokens: Sequence[int], limit: int) -> PrefixMatch | None:
    """The longest hit of at most `limit` tokens; None where not one token is found.

    Candidates are tried from the longest down, and the first that satisfies every group is the answer: with one whole block
    less, even the best partial block is shorter. Time O(blocks), and O(1) candidates where no group has a window.
    """
    if limit <= 0:
        return None
    size = chain.block_size
    keys = chain.extend(tokens, limit // size)[: limit // size]
    reach = _reach(groups, keys)
    runs = [_runs(group, keys[:reach]) if group.window is not None else None for group in groups]
    for full in range(reach, -1, -1):
        sources, common = _partial(groups, chain.parent(full), tuple(tokens[full * size : min(limit, (full + 1) * size - 1)]))
        matched = full * size + common
        firsts = tuple(group.first_needed(matched, size) for group in groups)
        if matched and all(run is None or run[full] >= full - first for run, first in zip(runs, firsts, strict=True)):
            blocks = tuple(
                tuple(group.index.by_key[key] for key in keys[first:full]) for group, first in zip(groups, firsts, strict=True)
            )
            return PrefixMatch(matched, full, blocks, firsts, sources)
    return None


def _reach(groups: Sequence[GroupBlocks], keys: Sequence[bytes]) -> int:
    """How many leading blocks the groups without a window have; all, where every group has one."""
    reach = len(keys)
    for group in groups:
        if group.window is None:
            reach = next(_missing(group, keys[:reach]), reach)
    return reach


def _missing(group: GroupBlocks, keys: Sequence[bytes]) -> Iterator[int]:
    by_key = group.index.by_key
    return (number for number, key in enumerate(keys) if key not in by_key)


def _runs(group: GroupBlocks, keys: Sequence[bytes]) -> list[int]:
    """For each count of leading blocks, how many of the last ones the group has without a gap."""
    runs, by_key = [0], group.index.by_key
    for key in keys:
        runs.append(runs[-1] + 1 if key in by_key else 0)
    return runs


def _partial(groups: Sequence[GroupBlocks], parent: bytes, wanted: tuple[int, ...]) -> tuple[tuple[int, ...], int]:
    """Blocks that begin with the wanted tokens, one per group, and how many tokens all of them have in common with those."""
    found = [group.index.longest(parent, wanted) for group in groups] if wanted else []
    common = min((count for _, count in found), default=0)
    return (tuple(block for block, _ in found), common) if common else ((), 0)
