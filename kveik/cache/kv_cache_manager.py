"""KV cache manager: allocates blocks to sequences and finds prefixes by content. Independent of requests and tensors.

A sequence is an id and a list of tokens. Its life here:

    open ── match, blocker, can_admit (questions) ── admit ──> grow, commit, grow, commit, … ── release ──> close
                       ↑                                                                          │
                       └──────────────────────── after a preemption ──────────────────────────────┘
"""

from __future__ import annotations

from collections.abc import Sequence, Set

import numpy as np
from numpy.typing import NDArray

from kveik.cache.block_table import BlockTables, TableView
from kveik.cache.capacity import GroupCapacity, Shortage
from kveik.cache.claims import Claims
from kveik.cache.eviction.lru import LruPolicy
from kveik.cache.eviction.policy import EvictionPolicy, Retention, Visit
from kveik.cache.evictor import Evictor
from kveik.cache.facts import Evicted, Fact
from kveik.cache.group import GroupBlocks, GroupUsage
from kveik.cache.key_chains import KeyChains, PublicPrefixes
from kveik.cache.keys import KeySpace
from kveik.cache.layout import BlockCopy, LayerGroup, blocks_for
from kveik.cache.load_reservations import LoadReservations, Place
from kveik.cache.prefix_match import PrefixMatch, longest_match
from kveik.cache.sequence_blocks import Admission, SequenceBlocks


class KVCacheManager:
    """Blocks of all layer groups, and the sequences that hold them."""

    def __init__(
        self,
        groups: Sequence[LayerGroup],
        blocks: Sequence[int],
        *,
        block_size: int,
        rows: int,
        max_model_len: int,
        max_chunk: int | None = None,
        enable_prefix_caching: bool = True,
        fingerprint: bytes = b"",
        kv_dtype: str = "float32",
        eviction: EvictionPolicy | None = None,
        public: PublicPrefixes | None = None,
        record_facts: bool = False,
    ) -> None:
        """`blocks`: per group. `rows`: sequences running at once. `max_chunk`: tokens of one sequence in one step at most.
        `eviction`: which cached block goes first; the one unused for longest unless given. `public`: beginnings of prompts
        whose blocks all tenants share. `record_facts`: a lower store reads them (`take_facts`).

        Raises DoesNotFit where a group cannot hold one sequence of `max_model_len` tokens: so whatever is admitted can run.
        """
        self.block_size = block_size
        self.max_model_len = max_model_len
        self.max_chunk = max_model_len if max_chunk is None else max_chunk
        self.rows = rows
        self._groups = [GroupBlocks(group, count) for group, count in zip(groups, blocks, strict=True)]
        self._windowed = [(number, group) for number, group in enumerate(self._groups) if group.window is not None]
        self.evictor = Evictor(self._groups, eviction or LruPolicy(), block_size, record_facts=record_facts)
        self._tables = BlockTables(len(groups), rows, blocks_for(max_model_len, block_size))
        space = KeySpace(fingerprint=fingerprint, kv_dtype=kv_dtype, block_size=block_size, groups=groups)
        self._naming = KeyChains(space, block_size, caching=enable_prefix_caching, public=public)
        self._seqs: dict[int, SequenceBlocks] = {}
        self._loads = LoadReservations(self._groups, self.evictor, block_size)
        self._filling: dict[int, SequenceBlocks] = {}
        self._claims = Claims()
        self._by_row: list[SequenceBlocks | None] = [None] * rows
        self._holders = 0
        self._rooms = [GroupCapacity(group, number, block_size, self.max_chunk) for number, group in enumerate(self._groups)]
        for number, room in enumerate(self._rooms):
            room.check_fits(max_model_len, self.evictor.reserved if number == self.evictor.lead else 0)

    # Questions: they change nothing.

    @property
    def tables(self) -> list[NDArray[np.int32]]:
        """Per group, int32 [rows, blocks per sequence at most]; updated in place."""
        return self._tables.arrays

    @property
    def usage(self) -> tuple[GroupUsage, ...]:
        """Per group, how many blocks are in which state."""
        return tuple(group.usage for group in self._groups)

    @property
    def filling(self) -> Set[int]:
        """Running sequences that have not computed what they were admitted with."""
        return self._filling.keys()

    def match(self, sequence_id: int, limit: int) -> PrefixMatch | None:
        """The longest prefix of at most `limit` tokens whose content is in the cache."""
        seq = self._seqs[sequence_id]
        return longest_match(self._groups, seq.chain, seq.tokens, limit)

    def blocker(self, sequence_id: int, match: PrefixMatch | None, limit: int) -> bytes | None:
        """The claim worth waiting for: a running sequence is about to compute what follows `match` in this one.

        The last one, where several follow each other. None: there is nothing to wait for. Of partial blocks only the tail of
        an equal prompt counts; a few tokens in common are computed sooner than waited for.
        """
        if match is not None and match.tokens >= limit:
            return None
        return self._claims.blocker(self._seqs[sequence_id], match.full if match else 0)

    def claimed(self, key: bytes) -> bool:
        """Whether a running sequence is still about to compute this content."""
        return key in self._claims

    def shortage(self, sequence_id: int, match: PrefixMatch | None, without: Sequence[int] = ()) -> Shortage | None:
        """What is lacking to admit the sequence: a row, or blocks for all its tokens beside what the running ones need next.
        None: it can be admitted.

        Needed next: the rest of what running sequences were admitted with, and one block for each of them and for this one.
        Without that reserve an admission could take the block that a decode needs a step later, be preempted for it, and so on
        without end. With nothing running there is none. `without`: as if these running sequences had been released.
        """
        if self._tables.free_rows + len(without) == 0:
            return Shortage(1, 0, rows=True)
        gone = [self._seqs[other] for other in without]
        running = self._holders - len(gone)
        reserve = running + 1 if running else 0
        filling = [seq for seq in self._filling.values() if seq not in gone]
        seq = self._seqs[sequence_id]
        withheld = [0] * len(self._rooms)
        withheld[self.evictor.lead] = self.evictor.withheld(seq.tenant, at_most=bool(gone))
        for room, kept in zip(self._rooms, withheld, strict=True):
            needed = room.needed(len(seq.tokens), match) + room.promised(filling) + reserve + kept
            if needed > (available := room.left(match, gone)):
                return Shortage(needed, available)
        return None

    def can_admit(self, sequence_id: int, match: PrefixMatch | None, without: Sequence[int] = ()) -> bool:
        return self.shortage(sequence_id, match, without) is None

    def reach(self, sequence_id: int) -> int:
        """The length in tokens up to which this sequence could be given room now."""
        seq = self._seqs[sequence_id]
        return (len(seq.blocks[0]) + self.evictor.available(seq.tenant)) * self.block_size

    def row(self, sequence_id: int) -> int | None:
        """The sequence's row in the block tables while it holds blocks."""
        return self._seqs[sequence_id].row

    def table_view(self, rows: int, length: int) -> TableView:
        """The block tables of the first `rows` rows, of which none has room for more than `length` tokens."""
        return self._tables.view(rows, blocks_for(length, self.block_size))

    def chain_keys(self, sequence_id: int, limit: int) -> list[bytes]:
        """Keys of the sequence's whole blocks within its first `limit` tokens."""
        seq, whole = self._seqs[sequence_id], max(0, limit) // self.block_size
        return seq.chain.extend(seq.tokens, whole)[:whole]

    def in_pool(self, group: int, key: bytes) -> bool:
        """The content can be found in a block of this group."""
        return key in self._groups[group].index.by_key

    def cached_contents(self) -> Evicted:
        """Contents of the pool, as if all of them were evicted now."""
        return self.evictor.contents()

    @property
    def loading(self) -> Set[int]:
        """Sequences that have blocks reserved for a load."""
        return self._loads.active.keys()

    # Actions.

    def begin_plan(self) -> None:
        """A plan is about to be made: views of the block tables that were handed out before are stale."""
        self._tables.version += 1

    def take_facts(self) -> list[Fact]:
        """Facts since the last call, in order: to be read before the next step writes into the pool."""
        return self.evictor.take_facts()

    def reserve_load(
        self, sequence_id: int, wanted: Sequence[Place], firsts: Sequence[int], last: int, now: float
    ) -> tuple[int, ...] | None:
        """Blocks to load the wanted records into; None where there are not as many (`LoadReservations.reserve`)."""
        return self._loads.reserve(self._seqs[sequence_id], wanted, firsts, last, now)

    def finish_load(self, sequence_id: int, number: int) -> None:
        """The wanted record of this number is in its block, whole, and can be found from now on."""
        self._loads.finish(self._seqs[sequence_id], number)

    def end_load(self, sequence_id: int) -> None:
        """Free the blocks of a load; what has arrived stays cached."""
        self._loads.end(sequence_id)

    def open(
        self,
        sequence_id: int,
        tokens: list[int],
        *,
        request: str,
        tenant: bytes = b"",
        salt: str | None = None,
        adapter: bytes | None = None,
        media: bytes | None = None,
        retention: Retention | None = None,
    ) -> None:
        """Get to know a sequence. `tokens` is kept and read later; `request` tells whose choices may share without caching."""
        chain = self._naming.open(tokens, request=request, tenant=tenant, salt=salt, adapter=adapter, media=media)
        blocks: list[list[int]] = [[] for _ in self._groups]
        self._seqs[sequence_id] = SequenceBlocks(
            sequence_id, tokens, chain, blocks, [0] * len(self._groups), tenant=tenant, retention=retention
        )

    def admit(self, sequence_id: int, match: PrefixMatch | None, target: int, now: float) -> Admission:
        """Give the sequence a row and the blocks that were matched, and claim what it is about to compute.

        `match` is this sequence's, and nothing was admitted or grown since it was found. `target`: how many tokens it computes
        before it goes on one by one. `now`: seconds on the engine's clock.
        """
        seq = self._seqs[sequence_id]
        seq.row = self._tables.take_row()
        self._by_row[seq.row] = seq
        seq.target = target
        seq.came = now if seq.came is None else seq.came
        self._holders += 1
        copies: tuple[BlockCopy, ...] = ()
        if match is not None:
            for number, (group, table) in enumerate(zip(self._groups, self._tables.arrays, strict=True)):
                seq.share(number, match, group.pool, table)
            seq.matched = seq.committed = match.tokens
            seq.registered = match.full
            copies = self._copy(seq, match, now)
        if seq.committed < target:
            self._filling[sequence_id] = seq
            self._claims.stake(sequence_id, seq.keys_to_compute())
        return Admission(seq.row, seq.committed, copies)

    def exchange_rows(self, one: int, other: int) -> None:
        """Exchange two rows of the block tables, with the sequences that have them; either may be free."""
        first, second = self._by_row[one], self._by_row[other]
        width = max((len(seq.blocks[0]) for seq in (first, second) if seq is not None), default=0)
        self._tables.swap_rows(one, other, width)
        self._by_row[one], self._by_row[other] = second, first
        for row in (one, other):
            if (seq := self._by_row[row]) is not None:
                seq.row = row

    def grow(self, sequence_id: int, length: int, now: float) -> int:
        """Give the sequence room for `length` tokens; there are blocks for it (`reach`). The room it has, in tokens."""
        seq = self._seqs[sequence_id]
        needed = blocks_for(length, self.block_size)
        for number, (blocks, table) in enumerate(zip(seq.blocks, self._tables.arrays, strict=True)):
            if len(blocks) < needed:
                taken = self.evictor.allocate(number, needed - len(blocks), seq.tenant, now)
                table[seq.row, len(blocks) : needed] = taken
                blocks += taken
        return len(seq.blocks[0]) * self.block_size

    def truncate(self, sequence_id: int, length: int) -> int:
        """Free the blocks behind the first `length` tokens, which are no fewer than those committed. Returns the room left."""
        seq = self._seqs[sequence_id]
        assert length >= seq.committed, f"sequence {sequence_id} has committed tokens behind the {length} that are to stay"
        needed = blocks_for(length, self.block_size)
        for number, (group, table) in enumerate(zip(self._groups, self._tables.arrays, strict=True)):
            seq.truncate(number, needed, group.pool, table)
        return len(seq.blocks[0]) * self.block_size

    def commit(self, sequence_id: int, computed: int) -> bool:
        """The step that wrote tokens up to `computed` has finished: register what became whole, free what left a window.

        Returns whether anything was freed. Needed when a block became whole or the target was reached; calls in between may be
        left out.
        """
        seq = self._seqs[sequence_id]
        seq.committed = computed
        self._register_whole(seq)
        if sequence_id in self._filling and computed >= seq.target:
            del self._filling[sequence_id]
            self._register_tail(seq)
            self._claims.drop(sequence_id)
        left = False
        for number, group in self._windowed:
            first = group.first_needed(computed, self.block_size)
            if first > seq.firsts[number]:
                seq.leave_window(number, first, self._groups[number].pool, self._tables.arrays[number])
                left = True
        return left

    def release(self, sequence_id: int, computed: int) -> None:
        """Free all blocks of the sequence. What it has computed stays findable; its tail is evicted before its head."""
        seq = self._seqs[sequence_id]
        assert seq.row is not None, f"sequence {sequence_id} holds nothing"
        # Before its first step has finished nothing is written, not even the copied slots.
        if computed > seq.matched:
            seq.committed = computed
            self._register_whole(seq)
            self._register_tail(seq)
        self._claims.drop(sequence_id)
        self._filling.pop(sequence_id, None)
        for number, (group, blocks) in enumerate(zip(self._groups, seq.blocks, strict=True)):
            group.pool.free(*reversed(blocks[seq.firsts[number] :]))
        self._tables.give_back_row(seq.row, len(seq.blocks[0]))
        self._by_row[seq.row] = None
        self._holders -= 1
        seq.released()

    def invalidate(self, sequence_id: int) -> None:
        """Remove from the cache what the sequence holds: its values are not finite, so no other may read them."""
        seq = self._seqs[sequence_id]
        for number in range(len(self._groups)):
            self.evictor.remove(number, seq.blocks[number][seq.firsts[number] :])
        self.evictor.invalidated(seq.chain.keys)
        # Release registers what goes beyond what was matched; nothing does.
        seq.matched = len(seq.tokens)

    def close(self, sequence_id: int, now: float) -> None:
        """Forget the sequence, which holds nothing. Without caching, its request's blocks go with the last choice."""
        seq = self._seqs.pop(sequence_id)
        assert seq.row is None, f"sequence {sequence_id} still holds blocks"
        if seq.came is not None:
            keys, answer = seq.chain.keys[: seq.kept], len(seq.tokens) - seq.prompt
            public = min(seq.chain.public_blocks, len(keys))
            self.evictor.finished(Visit(keys, 0, answer, seq.came, now, seq.retention, seq.tenant, public))
        for parent in self._naming.close(seq.chain):
            for number, group in enumerate(self._groups):
                self.evictor.remove(number, group.index.children(parent))

    def reset(self) -> None:
        """Remove all content. Running sequences go on with their own blocks, and nothing that they fill is found later."""
        for seq in self._seqs.values():
            if seq.held:
                seq.private = True
                self._claims.drop(seq.sequence_id)
        self.evictor.reset()

    def check(self) -> None:
        """Law 1 and the KV cache manager's part of law 2, over everything: O(blocks). Raises AssertionError."""
        running = [seq for seq in self._seqs.values() if seq.held]
        assert len(running) == self._holders
        assert all(self._by_row[one.row] is one for one in running if one.row is not None), "two sequences have one row"
        assert sum(one is not None for one in self._by_row) == len(running)
        assert len(running) + self._tables.free_rows == self._tables.rows, "a row is lost"
        assert set(self._filling) <= {seq.sequence_id for seq in running}
        self._claims.check(self._filling)
        for number, group in enumerate(self._groups):
            holders: dict[int, int] = {}
            for seq in running:
                seq.check(number, group, self._tables.arrays[number])
                for block in seq.blocks[number][seq.firsts[number] :]:
                    holders[block] = holders.get(block, 0) + 1
            self._loads.count_holders(number, holders)
            group.check(holders)
        self.evictor.check({key for seq in self._seqs.values() for key in seq.chain.keys})

    # Parts of the actions.

    def _copy(self, seq: SequenceBlocks, match: PrefixMatch, now: float) -> tuple[BlockCopy, ...]:
        """A fresh block in every group for the slots that are copied. All matched blocks are held by now."""
        copies = []
        for number, source in enumerate(match.sources):
            (target,) = self.evictor.allocate(number, 1, seq.tenant, now)
            seq.blocks[number].append(target)
            self._tables.arrays[number][seq.row, match.full] = target
            copies.append(BlockCopy(number, source, target))
        return tuple(copies)

    def _register_whole(self, seq: SequenceBlocks) -> None:
        size, first, whole = self.block_size, seq.registered, seq.committed // self.block_size
        if whole <= first or seq.private:
            return
        chain, tokens = seq.chain, seq.tokens
        keys = chain.extend(tokens, whole)
        for block in range(first, whole):
            parent = chain.parent(block)
            key, content = keys[block], tuple(tokens[block * size : (block + 1) * size])
            self._naming.remember(seq.chain, parent)
            fresh = 0
            for number, (group, blocks, needed) in enumerate(zip(self._groups, seq.blocks, seq.firsts, strict=True)):
                if block >= needed and group.register_full(blocks[block], parent, content, key):
                    fresh |= 1 << number
            if fresh:
                self.evictor.inserted(key, fresh, None if block < chain.public_blocks else seq.tenant)
            self._claims.fulfil(seq.sequence_id, key)
        seq.registered = whole

    def _register_tail(self, seq: SequenceBlocks) -> None:
        if seq.private:
            return
        whole = seq.committed // self.block_size
        content = tuple(seq.tokens[whole * self.block_size : seq.committed])
        if not content:
            return
        parent = seq.chain.parent(whole)
        self._naming.remember(seq.chain, parent)
        for blocks, group in zip(seq.blocks, self._groups, strict=True):
            group.register_partial(blocks[whole], parent, content)
