"""Executors of step plans: copy blocks, lay out the batch, run the decoder, sample. They need nothing but a plan."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kveik.cache.layout import LayerGroup
from kveik.device.device import PoolMemory
from kveik.kernels.attention import AttentionBatch
from kveik.kernels.kv_types import KvType
from kveik.model.decoder import Decoder
from kveik.model.step_batch import StepBatch
from kveik.request.request import TokenLogprob
from kveik.sample.sampler import Sampler, prompt_logprobs
from kveik.sample.verify import accepted
from kveik.schedule.plan import PromptLogprobs, PromptTargets, StepOutcome, StepPlan

LOGIT_ROWS = 64
"""Rows of logits in memory at once where a prompt's log-probabilities are requested; bounds the workspace."""

Ints = NDArray[np.int64]


class Executor(Protocol):
    """Runs plans, one after the other: `launch` and `collect` alternate."""

    def launch(self, plan: StepPlan) -> None:
        """Copy the plan's blocks and begin the step. Writes into the pool before the next `launch` must not touch the plan's
        blocks. Raises only when the whole step failed.
        """
        ...

    def collect(self) -> StepOutcome:
        """Returns the outcome of the launched plan. Raises only when the whole step failed."""
        ...


@dataclass(frozen=True, slots=True)
class Layout:
    """The flat arrays of a step that do not depend on a layer group."""

    positions: Ints
    """[tokens]"""

    token_rows: Ints
    """[tokens]: the row of the block tables that each token belongs to"""

    starts: Ints
    """[rows + 1]: the first token of each row"""

    seq_lens: Ints
    """[rows]: tokens in the cache after the step"""

    decodes: int
    """Leading rows with one token."""

    samples: Ints
    """[logits]: tokens whose logits are sampled, ascending"""

    logits_indices: Ints
    """[outputs]: `samples`, and tokens that a prompt's log-probabilities need; ascending"""


class ModelExecutor:
    """Decoder, sampler and pool memory of one device, joined."""

    def __init__(
        self,
        decoder: Decoder,
        sampler: Sampler,
        memory: PoolMemory,
        groups: Items[LayerGroup],
        block_size: int,
        kv_type: KvType | None = None,
    ) -> None:
        """`kv_type`: as in `AttentionBatch`."""
        self.decoder = decoder
        self.sampler = sampler
        self.memory = memory
        self.groups = groups
        self.block_size = block_size
        self.kv_type = kv_type
        self._launched: tuple[StepPlan, Layout, StepBatch] | None = None

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> None:
        assert self._launched is None, "a plan is launched before the outcome of the one before it was collected"
        self.memory.copy_blocks(plan.copies)
        for sequence_id in plan.ended:
            self.sampler.forget(sequence_id)
        if not plan.empty:
            layout = _layout(plan)
            self._launched = plan, layout, self._batch(plan, layout)

    @torch.inference_mode()
    def collect(self) -> StepOutcome:
        assert self._launched is not None, "nothing is launched"
        (plan, layout, batch), self._launched = self._launched, None
        hidden = self.decoder.forward(batch, self.memory.tensors)
        if not plan.prompt_targets:
            return self._sample(plan, hidden)
        places = np.searchsorted(layout.logits_indices, layout.samples)
        outcome = self._sample(plan, hidden[torch.from_numpy(places)])
        scored = tuple(self._score(plan, layout, hidden, row, targets) for row, targets in plan.prompt_targets.items())
        return StepOutcome(outcome.tokens, outcome.offsets, outcome.failed, outcome.logprobs, scored)

    def _batch(self, plan: StepPlan, layout: Layout) -> StepBatch:
        """Returns the plan's tokens as tensors, row after row."""
        tables = plan.tables.read()
        return StepBatch(
            token_ids=torch.from_numpy(plan.token_ids),
            positions=torch.from_numpy(layout.positions),
            groups=tuple(self._attention(number, layout, table) for number, table in enumerate(tables)),
            logits_indices=torch.from_numpy(layout.logits_indices),
        )

    def _attention(self, number: int, layout: Layout, table: NDArray[np.int32]) -> AttentionBatch:
        blocks, inside = np.divmod(layout.positions, self.block_size)
        return AttentionBatch(
            tables=torch.from_numpy(table),
            slot_mapping=torch.from_numpy(table[layout.token_rows, blocks] * np.int64(self.block_size) + inside),
            query_start_loc=torch.from_numpy(layout.starts.astype(np.int32)),
            seq_lens=torch.from_numpy(layout.seq_lens.astype(np.int32)),
            decodes=layout.decodes,
            block_size=self.block_size,
            window=self.groups[number].window,
            kv_type=self.kv_type,
        )

    def _sample(self, plan: StepPlan, hidden: Tensor) -> StepOutcome:
        logits = plan.logits
        if len(hidden) == plan.rows == plan.tokens:
            # One token of every row, and one for it: the most frequent step.
            choices = self.sampler.choose(self.decoder.logits(hidden), plan.sampling)
            if not choices.failed:
                return StepOutcome(choices.tokens, np.arange(plan.rows + 1), frozenset(), choices.logprobs)
            return _verified(choices.tokens, np.arange(plan.rows + 1), {}, choices.failed, choices.logprobs)
        starts = np.concatenate(([0], np.cumsum(logits)))
        if not len(hidden):
            return StepOutcome(offsets=starts)
        rows = np.repeat(np.arange(plan.rows), logits)
        guesses = plan.guesses if starts[-1] > np.count_nonzero(logits) else {}
        ahead = np.arange(len(rows)) - starts[rows]
        sampling = plan.sampling if len(rows) == plan.rows and not guesses else plan.sampling.take(rows, ahead, guesses)
        choices = self.sampler.choose(self.decoder.logits(hidden), sampling)
        if not guesses and not choices.failed:
            return StepOutcome(choices.tokens, starts, frozenset(), choices.logprobs)
        return _verified(choices.tokens, starts, guesses, choices.failed, choices.logprobs)

    def _score(self, plan: StepPlan, layout: Layout, hidden: Tensor, row: int, targets: PromptTargets) -> PromptLogprobs:
        """Returns log-probabilities of the prompt tokens that follow the row's tokens."""
        place = int(np.searchsorted(layout.logits_indices, layout.starts[row]))
        entries: list[TokenLogprob] = []
        for first in range(0, len(targets.tokens), LOGIT_ROWS):
            part = targets.tokens[first : first + LOGIT_ROWS]
            logits = self.decoder.logits(hidden[place + first : place + first + len(part)])
            entries.extend(prompt_logprobs(logits, part, targets.top, tokens_real=self.sampler.tokens_real))
        return PromptLogprobs(plan.sequence_ids[row], int(plan.starts[row]) + 1, tuple(entries))


def _verified(
    tokens: Ints, starts: Ints, guesses: Mapping[int, Items[int]], failed: frozenset[int], logprobs: Mapping[int, TokenLogprob]
) -> StepOutcome:
    """Returns the chosen tokens without those that follow a wrong guess or logits that were not finite."""
    counts, broken = accepted(tokens, starts, guesses, failed)
    offsets = np.concatenate(([0], np.cumsum(counts)))
    places = np.arange(offsets[-1]) + np.repeat(starts[:-1] - offsets[:-1], counts)
    kept = {place: logprobs[at] for place, at in enumerate(places.tolist()) if at in logprobs}
    return StepOutcome(tokens[places], offsets, broken, kept)


def _layout(plan: StepPlan) -> Layout:
    counts, rows = plan.counts, np.arange(plan.rows)
    if plan.tokens == plan.rows:
        starts, positions, token_rows, decodes = np.arange(plan.rows + 1), plan.starts, rows, plan.rows
    else:
        starts = np.concatenate(([0], np.cumsum(counts)))
        # Position of a token: its row's first, plus how far it lies behind the row's beginning.
        positions = np.arange(plan.tokens) + np.repeat(plan.starts - starts[:-1], counts)
        token_rows = np.repeat(rows, counts)
        decodes = int(np.argmax(counts > 1)) if (counts > 1).any() else plan.rows
    samples = np.flatnonzero(plan.logits) if plan.tokens == plan.rows else _last_tokens(starts[1:], plan.logits)
    logits_indices = samples
    if plan.prompt_targets:
        scored = [starts[row] + np.arange(len(targets.tokens)) for row, targets in plan.prompt_targets.items()]
        logits_indices = np.union1d(samples, np.concatenate(scored))
    return Layout(positions, token_rows, starts, plan.starts + counts, decodes, samples, logits_indices)


def _last_tokens(ends: Ints, counts: Ints) -> Ints:
    """Returns the last counts[i] places before each of `ends`, ascending."""
    total = int(counts.sum())
    if total == len(counts) and (counts == 1).all():
        return ends - 1
    firsts = np.cumsum(counts) - counts
    places: Ints = np.arange(total) + np.repeat(ends - counts - firsts, counts)
    return places
