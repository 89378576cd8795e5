"""Draft: a step plan under construction."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from kveik.cache.kv_cache_manager import KVCacheManager
from kveik.cache.layout import BlockCopy
from kveik.request.sequence import Sequence
from kveik.schedule.plan import Ints, PromptTargets, StepPlan
from kveik.schedule.reasons import Cause, NotScheduled, Preemption
from kveik.schedule.running_batch import RunningBatch


class Draft:
    """Blocks are secured first and rows written last, so a sequence that is preempted in between leaves no row behind."""

    def __init__(self, batch: RunningBatch) -> None:
        self.budget = 0
        """Prompt tokens that may still be scheduled."""

        self.copies: list[BlockCopy] = []
        self.admitted: list[int] = []
        self.short = False
        """True if a running sequence was preempted because no block was left."""

        self.any_behind = True
        """True if a running sequence has more to compute than its newest output token."""

        self._batch = batch
        self._counts: dict[Sequence, int] = {}
        self._guesses: dict[Sequence, tuple[int, ...]] = {}
        self._preempted: dict[int, Preemption] = {}

    @property
    def tokens(self) -> int:
        """Tokens scheduled so far, with those of all decodes."""
        return sum(self._counts.values()) + len(self.decoding())

    def decoding(self) -> list[Sequence]:
        """Sequences that compute their newest output token."""
        single = self._batch.single().tolist()
        return [one for one, alone in zip(self._batch.sequences, single, strict=True) if one is not None and alone]

    def starved(self, behind: list[Sequence]) -> list[NotScheduled]:
        """Sequences of `behind` that still run and compute nothing."""
        starved = [one for one in behind if one.row is not None and one not in self._counts]
        return [NotScheduled(one.id, one.request.id, Cause.BUDGET, one.pending, self.budget) for one in starved]

    def is_preempted(self, sequence: Sequence) -> bool:
        """True if it was preempted in this step."""
        return sequence.id in self._preempted

    def schedule(self, sequence: Sequence, count: int) -> None:
        """The sequence, which is behind, computes `count` tokens."""
        self._counts[sequence] = count
        self.budget -= count

    def guess(self, sequence: Sequence, guesses: tuple[int, ...]) -> None:
        """The sequence computes these guesses behind its newest token."""
        self._guesses[sequence] = guesses

    def preempt(self, sequence: Sequence, cause: Cause) -> None:
        """The sequence is preempted; its tokens return to the budget."""
        self.budget += self._counts.pop(sequence, 0)
        self._preempted[sequence.id] = Preemption(sequence.id, sequence.request.id, cause, sequence.computed)

    def plan(
        self, kv_cache: KVCacheManager, ended: tuple[int, ...], not_scheduled: Iterable[NotScheduled], unexamined: int
    ) -> StepPlan:
        """Returns the final plan. Rows are arranged so that those with one token come first."""
        batch = self._batch
        counts = self._arranged(kv_cache)
        rows = len(counts)
        starts = batch.computed[:rows].copy()
        logits = (starts + counts >= batch.lengths[:rows]).astype(np.int64) if self._counts else counts
        if self._guesses:
            logits = logits.copy()
            for sequence, guesses in self._guesses.items():
                logits[sequence.row] = 1 + len(guesses)
        return StepPlan(
            request_ids=batch.request_ids(rows),
            sequence_ids=batch.sequence_ids(rows),
            starts=starts,
            counts=counts,
            logits=logits,
            token_ids=self._token_ids(counts),
            tables=kv_cache.table_view(rows, int(batch.capacity[:rows].max(initial=0))),
            sampling=batch.sampling(rows),
            prompt_targets=self._prompt_targets(),
            copies=tuple(self.copies),
            admitted=tuple(self.admitted),
            preempted=tuple(self._preempted.values()),
            not_scheduled=tuple(not_scheduled),
            unexamined=unexamined,
            ended=ended,
        )

    def _arranged(self, kv_cache: KVCacheManager) -> Ints:
        """[rows of the step]: tokens of each, once the rows are in the plan's order."""
        batch = self._batch
        if not self._counts and not self._guesses and not self.any_behind and batch.gapless:
            return np.ones(len(batch), dtype=np.int64)  # Decodes alone, which are in order already.
        counts = batch.single().astype(np.int64)
        for sequence, count in self._counts.items():
            counts[sequence.row] = count
        for sequence, guesses in self._guesses.items():
            counts[sequence.row] = 1 + len(guesses)
        for one, other in batch.arrange(counts):
            kv_cache.exchange_rows(one, other)
        return counts[: int(np.count_nonzero(counts))]

    def _token_ids(self, counts: Ints) -> Ints:
        batch = self._batch
        if not self._counts and not self._guesses:
            return batch.newest(len(counts))
        alone = int(np.count_nonzero(counts == 1))
        parts = [batch.newest(alone)]
        for sequence in self._counts:
            if counts[sequence.row] == 1:  # Its one token may be a prompt's, which the newest is too.
                parts[0][sequence.row] = sequence.tokens[sequence.computed]
        for row in range(alone, len(counts)):
            several = batch.sequences[row]
            assert several is not None
            start = several.computed
            tokens = [*several.tokens[start : start + int(counts[row])], *self._guesses.get(several, ())]
            parts.append(np.array(tokens, dtype=np.int64))
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _prompt_targets(self) -> dict[int, PromptTargets]:
        """Returns, by row, the tokens that follow the computed ones, where log-probabilities of the prompt are requested."""
        by_row = {}
        for sequence, count in self._counts.items():
            top = sequence.sampling.prompt_logprobs
            if top is not None and sequence.choice == 0 and sequence.row is not None:
                first = sequence.computed + 1
                targets = tuple(sequence.tokens[first : min(first + count, sequence.prompt_length)])
                if targets:
                    by_row[sequence.row] = PromptTargets(targets, top)
        return dict(sorted(by_row.items()))
