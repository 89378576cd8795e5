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
from kveik.schedule.plan import StepOutcome, StepPlan
from tests.schedule.rows import outcome_of, tokens_of


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
        self._plan = StepPlan()

    def launch(self, plan: StepPlan) -> None:
        self._plan = plan
        for copy in plan.copies:
            self.slots[copy.group][copy.target] = list(self.slots[copy.group][copy.source])

    def collect(self, sequence: Callable[[int], Sequence | None], fails: Callable[[int], bool]) -> StepOutcome:
        """`fails`: whether a sequence's logits are not finite. What is read and written is the plan's alone."""
        plan = self._plan
        contents = [self._row_contents(plan, row, sequence) for row in range(plan.rows)]
        for row, one in enumerate(contents):
            self.write(plan, row, one)
        for row, one in enumerate(contents):
            self._read(plan, row, one)

        def choose(row: int, ahead: int) -> int:
            last = int(plan.starts[row] + plan.counts[row] - plan.logits[row])
            return chosen_token(contents[row][last + ahead], self.vocabulary)

        return outcome_of(plan, choose, lambda row: fails(plan.sequence_ids[row]))

    def _row_contents(self, plan: StepPlan, row: int, sequence: Callable[[int], Sequence | None]) -> list[int]:
        """Per position up to the row's last token, what its slots must hold; the row's own tokens as the plan has them."""
        one = sequence(plan.sequence_ids[row])
        assert one is not None
        contents = self.contents(one)[: int(plan.starts[row])]
        for token in tokens_of(plan, row):
            before = contents[-1] if contents else first_content(one.request, self.caching)
            contents.append(next_content(before, token))
        certain = int(plan.starts[row] + plan.counts[row] - max(plan.logits[row] - 1, 0))
        assert contents[:certain] == self.contents(one)[:certain], "the plan computes other tokens than the sequence's"
        return contents

    def contents(self, sequence: Sequence) -> list[int]:
        """Per position, what the sequence's slots must hold."""
        known = self._contents.setdefault(sequence.id, [])
        for token in sequence.tokens[len(known) :]:
            known.append(next_content(known[-1] if known else first_content(sequence.request, self.caching), token))
        return known

    def write(self, plan: StepPlan, row: int, contents: list[int]) -> None:
        id_, start, count = plan.sequence_ids[row], int(plan.starts[row]), int(plan.counts[row])
        self.computed[id_] = self.computed.get(id_, 0) + count
        for number, table in enumerate(plan.tables.read()):
            for position in range(start, start + count):
                self.slots[number][table[row, position // self.size]][position % self.size] = contents[position]

    def _read(self, plan: StepPlan, row: int, contents: list[int]) -> None:
        start, count = int(plan.starts[row]), int(plan.counts[row])
        for number, (group, table) in enumerate(zip(self.groups, plan.tables.read(), strict=True)):
            blocks = table[row].tolist()
            first = 0 if group.window is None else max(0, start - group.window + 1)
            for position in range(first, start + count):
                found = self.slots[number][blocks[position // self.size]][position % self.size]
                assert found == contents[position], (
                    f"sequence {plan.sequence_ids[row]} reads group {number} position {position} of another content"
                )
