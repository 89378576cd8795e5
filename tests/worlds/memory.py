"""An executor without a model: its slots remember what was written, and every read is checked.

The content of a slot stands for what keys and values depend on: namespace, and all tokens up to its position. A sampled token
is a function of the content at the sequence's end, so a wrong read would also show as a wrong token.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from zlib import crc32

from kveik.cache.kv_cache_manager import KVCacheManager
from kveik.cache.layout import LayerGroup
from kveik.request.request import Request
from kveik.request.sequence import Sequence
from kveik.schedule.plan import Chunk, Sampled, StepOutcome, StepPlan


def first_content(request: Request, caching: bool) -> int:
    """What stands before a request's first token."""
    parts = (request.tenant, request.cache_salt, request.media_hash, None if caching else request.id)
    # Not hash(): that of strings differs from process to process, and a seed would not give the same world again.
    return crc32(repr(parts).encode())


def next_content(before: int, token: int) -> int:
    return hash((before, token))


def chosen_token(content: int, vocabulary: int) -> int:
    """The model's answer: depends on everything before it and on nothing else. 0 is the end token, one time in 40."""
    draw = hash((content, -2)) % (40 * vocabulary)
    return 0 if draw % 40 == 0 else 1 + draw // 40 % (vocabulary - 1)


def ideal_output(request: Request, caching: bool, eos: int, vocabulary: int) -> list[int]:
    """What the request must answer, alone and without any cache."""
    sampling, content, output = request.sampling, first_content(request, caching), []
    for token in request.prompt:
        content = next_content(content, token)
    stops = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else {eos})
    while len(output) < sampling.max_tokens:
        token = chosen_token(content, vocabulary)
        output.append(token)
        content = next_content(content, token)
        if token in stops and len(output) >= sampling.min_tokens:
            break
    return output


class MemoryExecutor:
    """Slots per group; a slot holds the content that was written last, or None."""

    def __init__(
        self, groups: Items[LayerGroup], blocks: Items[int], kv_cache: KVCacheManager, *, vocabulary: int, caching: bool
    ) -> None:
        self.groups, self.kv_cache = groups, kv_cache
        self.size, self.vocabulary, self.caching = kv_cache.block_size, vocabulary, caching
        self.slots: list[list[list[int | None]]] = [[[None] * self.size for _ in range(count)] for count in blocks]
        self.computed: dict[int, int] = {}
        """Tokens computed for each sequence, work done again included."""

        self._contents: dict[int, list[int]] = {}

    def copy(self, plan: StepPlan) -> None:
        for copy in plan.copies:
            self.slots[copy.group][copy.target] = list(self.slots[copy.group][copy.source])

    def run(self, plan: StepPlan, sequence: Callable[[int], Sequence | None], fails: Callable[[int], bool]) -> StepOutcome:
        work = [(chunk, one) for chunk in plan.chunks if (one := sequence(chunk.sequence_id)) is not None]
        for chunk, one in work:
            self.write(chunk, one)
        for chunk, one in work:
            self._read(chunk, one)
        sampled = []
        for chunk in plan.chunks:
            if chunk.samples:
                content = self._contents[chunk.sequence_id][chunk.start + chunk.count - 1]
                token = chosen_token(content, self.vocabulary)
                sampled.append(Sampled(chunk.sequence_id, token, None, fails(chunk.sequence_id)))
        return StepOutcome.of(sampled)

    def contents(self, sequence: Sequence) -> list[int]:
        """Per position, what the sequence's slots must hold."""
        known = self._contents.setdefault(sequence.id, [])
        for token in sequence.tokens[len(known) :]:
            known.append(next_content(known[-1] if known else first_content(sequence.request, self.caching), token))
        return known

    def write(self, chunk: Chunk, sequence: Sequence) -> None:
        contents = self.contents(sequence)
        self.computed[sequence.id] = self.computed.get(sequence.id, 0) + chunk.count
        for number in range(len(self.groups)):
            row = self.kv_cache.tables[number][sequence.row]
            for position in range(chunk.start, chunk.start + chunk.count):
                self.slots[number][row[position // self.size]][position % self.size] = contents[position]

    def _read(self, chunk: Chunk, sequence: Sequence) -> None:
        contents = self.contents(sequence)
        for number, group in enumerate(self.groups):
            row = self.kv_cache.tables[number][sequence.row].tolist()
            first = 0 if group.window is None else max(0, chunk.start - group.window + 1)
            for position in range(first, chunk.start + chunk.count):
                found = self.slots[number][row[position // self.size]][position % self.size]
                assert found == contents[position], (
                    f"sequence {sequence.id} reads group {number} position {position} of another content"
                )
