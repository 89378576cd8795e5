"""Carries out a step's plan: copies blocks, lays out the batch from the block tables, runs the decoder, samples."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kveik.cache.layout import LayerGroup
from kveik.cache.storage import BlockStorage
from kveik.kernels.attention import AttentionBatch
from kveik.kernels.kv_types import KvType
from kveik.model.batch import StepBatch
from kveik.model.decoder import Decoder
from kveik.request.request import TokenLogprob
from kveik.request.sequence import Sequence
from kveik.sample.sampler import Sampler, prompt_logprobs
from kveik.schedule.plan import Chunk, PromptLogprobs, StepOutcome, StepPlan

LOGIT_ROWS = 64
"""Rows of logits held at once where a prompt's log-probabilities are asked for; bounds the workspace."""


Prefills = Items[tuple[Chunk, Sequence]]


@dataclass(frozen=True, slots=True)
class Layout:
    """The flat arrays of a step that do not depend on a layer group."""

    tokens: NDArray[np.int64]
    """[tokens]"""

    positions: NDArray[np.int64]
    """[tokens]"""

    token_rows: NDArray[np.int64]
    """[tokens]: the row of the block tables that each token belongs to"""

    starts: NDArray[np.int64]
    """[rows + 1]: the first token of each row"""

    contexts: NDArray[np.int64]
    """[rows]: positions known after the step"""


class ModelExecutor:
    """The executor over a real decoder and real storage."""

    def __init__(
        self,
        decoder: Decoder,
        sampler: Sampler,
        storage: BlockStorage,
        tables: Items[NDArray[np.int32]],
        groups: Items[LayerGroup],
        block_size: int,
        kv_type: KvType | None = None,
    ) -> None:
        """`kv_type`: as in `AttentionBatch`."""
        self.decoder = decoder
        self.sampler = sampler
        self.storage = storage
        self.tables = tables
        self.groups = groups
        self.block_size = block_size
        self.kv_type = kv_type
        self._known: tuple[tuple[int, ...], list[Sequence]] = ((), [])

    @torch.inference_mode()
    def copy(self, plan: StepPlan) -> None:
        self.storage.copy_all(plan.copies)

    @torch.inference_mode()
    def run(self, plan: StepPlan, sequence: Callable[[int], Sequence]) -> StepOutcome:
        prefills = [(chunk, sequence(chunk.sequence_id)) for chunk in plan.prefills]
        scored = [_scored_count(chunk, item) for chunk, item in prefills]
        hidden = self.decoder.forward(self.batch(plan, prefills, scored), self.storage.tensors)
        sampling = [*self._decoding(plan, sequence), *(item for chunk, item in prefills if chunk.samples)]
        if not any(scored):
            return self._sample(hidden, sampling)
        samples, prompts = _split_wanted(plan.decodes, prefills, scored)
        outcome = self._sample(hidden[samples], sampling)
        return replace(outcome, prompt_logprobs=tuple(self._score(hidden, *prompt) for prompt in prompts))

    def forget(self, sequence_id: int) -> None:
        self.sampler.forget(sequence_id)

    def batch(self, plan: StepPlan, prefills: Prefills, scored: Items[int]) -> StepBatch:
        """The plan's tokens as flat arrays, sequence after sequence; scored: how many of a prefill's tokens are."""
        layout = _layout(plan, prefills)
        return StepBatch(
            token_ids=torch.from_numpy(layout.tokens),
            positions=torch.from_numpy(layout.positions),
            groups=tuple(self._attention(number, layout, plan.decodes) for number in range(len(self.groups))),
            wanted=torch.from_numpy(_wanted(plan.decodes, prefills, scored)),
        )

    def _attention(self, number: int, layout: Layout, decodes: int) -> AttentionBatch:
        # The plan's rows lie side by side in the tables, so nothing is copied, however long the contexts are.
        table = self.tables[number][: len(layout.contexts)]
        blocks, inside = np.divmod(layout.positions, self.block_size)
        return AttentionBatch(
            tables=torch.from_numpy(table),
            slots=torch.from_numpy(table[layout.token_rows, blocks] * np.int64(self.block_size) + inside),
            query_starts=torch.from_numpy(layout.starts.astype(np.int32)),
            contexts=torch.from_numpy(layout.contexts.astype(np.int32)),
            decodes=decodes,
            block_size=self.block_size,
            window=self.groups[number].window,
            kv_type=self.kv_type,
        )

    def _decoding(self, plan: StepPlan, sequence: Callable[[int], Sequence]) -> list[Sequence]:
        """The plan's decodes; mostly they are those of the step before."""
        ids = plan.decoding.ids
        if ids is not self._known[0]:
            self._known = (ids, [sequence(sequence_id) for sequence_id in ids])
        return self._known[1]

    def _sample(self, hidden: Tensor, sequences: list[Sequence]) -> StepOutcome:
        if not sequences:
            return StepOutcome()
        choices = self.sampler.choose(self.decoder.logits(hidden), sequences)
        return StepOutcome(choices.tokens, choices.failed, choices.logprobs)

    def _score(self, hidden: Tensor, rows: range, chunk: Chunk, item: Sequence) -> PromptLogprobs:
        """Log-probabilities of the prompt tokens that follow the chunk's tokens."""
        top = item.sampling.prompt_logprobs
        assert top is not None
        entries: list[TokenLogprob] = []
        for first in range(0, len(rows), LOGIT_ROWS):
            part = rows[first : first + LOGIT_ROWS]
            start = chunk.start + 1 + first
            targets = item.tokens[start : start + len(part)]
            entries.extend(
                prompt_logprobs(
                    self.decoder.logits(hidden[part.start : part.stop]), targets, top, tokens_real=self.sampler.tokens_real
                )
            )
        return PromptLogprobs(item.id, chunk.start + 1, tuple(entries))


def _layout(plan: StepPlan, prefills: Prefills) -> Layout:
    decoding, count = plan.decoding, plan.decodes
    rows = np.arange(count + len(prefills) + 1)
    if not prefills:
        return Layout(decoding.tokens.copy(), decoding.starts.copy(), rows[:-1], rows, decoding.starts + 1)
    counts = np.array([chunk.count for chunk, _ in prefills])
    firsts = np.array([chunk.start for chunk, _ in prefills])
    ends = np.cumsum(counts)
    # Position of a token: its chunk's first, plus how far it lies behind the chunk's beginning.
    positions = np.arange(ends[-1]) + np.repeat(firsts - (ends - counts), counts)
    tokens = [item.tokens[chunk.start : chunk.start + chunk.count] for chunk, item in prefills]
    return Layout(
        np.concatenate((decoding.tokens, *tokens)),
        np.concatenate((decoding.starts, positions)),
        np.concatenate((rows[:count], np.repeat(rows[count:-1], counts))),
        np.concatenate((rows[: count + 1], count + ends)),
        np.concatenate((decoding.starts + 1, firsts + counts)),
    )


def _scored_count(chunk: Chunk, item: Sequence) -> int:
    """How many of the chunk's tokens are followed by a prompt token whose log-probability is asked for."""
    if item.sampling.prompt_logprobs is None or item.choice:
        return 0
    return max(0, min(chunk.count, item.prompt_length - 1 - chunk.start))


def _wanted(decodes: int, prefills: Prefills, scored: Items[int]) -> NDArray[np.int64]:
    """Tokens whose hidden state is needed: a scored chunk's, then its last one where it samples. Ascending."""
    wanted = list(range(decodes))
    start = decodes
    for (chunk, _), score in zip(prefills, scored, strict=True):
        wanted.extend(range(start, start + score))
        start += chunk.count
        if chunk.samples:
            wanted.append(start - 1)
    return np.array(wanted, dtype=np.int64)


def _split_wanted(
    decodes: int, prefills: Prefills, scored: Items[int]
) -> tuple[list[int], list[tuple[range, Chunk, Sequence]]]:
    """Rows of the hidden states that sample, and those that score a prompt, in the order of `_wanted`."""
    samples = list(range(decodes))
    prompts: list[tuple[range, Chunk, Sequence]] = []
    row = decodes
    for (chunk, item), score in zip(prefills, scored, strict=True):
        if score:
            prompts.append((range(row, row + score), chunk, item))
            row += score
        if chunk.samples:
            samples.append(row)
            row += 1
    return samples, prompts
