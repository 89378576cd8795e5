"""Carries out a step's plan: copies blocks, lays out the batch from the block tables, runs the decoder, samples."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass

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
from kveik.schedule.plan import Chunk, PromptLogprobs, Sampled, StepOutcome, StepPlan

LOGIT_ROWS = 64
"""Rows of logits held at once where a prompt's log-probabilities are asked for; bounds the workspace."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The flat arrays of a step that do not depend on a layer group."""

    rows: NDArray[np.int64]
    """[sequences] row of each in the block tables"""

    counts: NDArray[np.int64]
    """[sequences] tokens of each in this step"""

    positions: NDArray[np.int64]
    """[tokens]"""

    token_rows: NDArray[np.int64]
    """[tokens] which of `rows` each token belongs to"""

    contexts: NDArray[np.int64]
    """[sequences] positions known after the step"""


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

    @torch.inference_mode()
    def run(self, plan: StepPlan, sequence: Callable[[int], Sequence]) -> StepOutcome:
        self.storage.copy_all(plan.copies)
        chunks = [(chunk, sequence(chunk.sequence_id)) for chunk in plan.chunks]
        scored = [_scores_prompt(chunk, item) for chunk, item in chunks]
        hidden = self.decoder.forward(self.batch(plan, chunks, scored), self.storage.tensors)
        samples, prompts = _split_wanted(chunks, scored)
        return StepOutcome(
            sampled=self._sample(hidden, samples, [item for chunk, item in chunks if chunk.samples]),
            prompt_logprobs=tuple(self._score(hidden, rows, chunk, item) for rows, chunk, item in prompts),
        )

    def forget(self, sequence_id: int) -> None:
        self.sampler.forget(sequence_id)

    def batch(self, plan: StepPlan, chunks: Items[tuple[Chunk, Sequence]], scored: Items[bool]) -> StepBatch:
        """The plan's tokens as flat arrays, sequence after sequence."""
        layout = _layout(chunks)
        starts = np.concatenate(([0], np.cumsum(layout.counts)))
        tokens = np.fromiter(_tokens(chunks), dtype=np.int64, count=int(starts[-1]))
        return StepBatch(
            token_ids=torch.from_numpy(tokens),
            positions=torch.from_numpy(layout.positions),
            groups=tuple(self._attention(number, layout, starts, plan.decodes) for number in range(len(self.groups))),
            wanted=torch.from_numpy(_wanted(chunks, scored, starts)),
        )

    def _attention(self, number: int, layout: Layout, starts: NDArray[np.int64], decodes: int) -> AttentionBatch:
        blocks = -(-int(layout.contexts.max()) // self.block_size)
        table = self.tables[number][layout.rows, :blocks]
        held = table[layout.token_rows, layout.positions // self.block_size].astype(np.int64)
        slots = held * self.block_size + layout.positions % self.block_size
        return AttentionBatch(
            tables=torch.from_numpy(table),
            slots=torch.from_numpy(slots),
            query_starts=torch.from_numpy(starts.astype(np.int32)),
            contexts=torch.from_numpy(layout.contexts.astype(np.int32)),
            decodes=decodes,
            block_size=self.block_size,
            window=self.groups[number].window,
            kv_type=self.kv_type,
        )

    def _sample(self, hidden: Tensor, rows: list[int], sequences: list[Sequence]) -> tuple[Sampled, ...]:
        if not rows:
            return ()
        chosen = hidden if len(rows) == hidden.shape[0] else hidden[rows]
        choices = self.sampler.choose(self.decoder.logits(chosen), sequences)
        return tuple(
            Sampled(item.id, choice.token, choice.logprob, choice.failed)
            for item, choice in zip(sequences, choices, strict=True)
        )

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


def _layout(chunks: Items[tuple[Chunk, Sequence]]) -> Layout:
    count = len(chunks)
    rows = np.fromiter((item.row for _, item in chunks), dtype=np.int64, count=count)
    counts = np.fromiter((chunk.count for chunk, _ in chunks), dtype=np.int64, count=count)
    firsts = np.fromiter((chunk.start for chunk, _ in chunks), dtype=np.int64, count=count)
    token_rows = np.repeat(np.arange(count), counts)
    # Position of a token: its chunk's first, plus how far it lies behind the chunk's beginning in the step.
    begins = np.cumsum(counts) - counts
    positions = np.arange(len(token_rows)) + (firsts - begins)[token_rows]
    return Layout(rows, counts, positions, token_rows, firsts + counts)


def _tokens(chunks: Items[tuple[Chunk, Sequence]]) -> Items[int]:
    flat: list[int] = []
    for chunk, item in chunks:
        flat.extend(item.tokens[chunk.start : chunk.start + chunk.count])
    return flat


def _scores_prompt(chunk: Chunk, item: Sequence) -> bool:
    """Whether the chunk's tokens predict prompt tokens whose log-probabilities are asked for."""
    asked = item.sampling.prompt_logprobs is not None and item.choice == 0
    return asked and chunk.start + 1 < item.prompt_length


def _scored_count(chunk: Chunk, item: Sequence) -> int:
    """How many of the chunk's tokens are followed by a prompt token."""
    return min(chunk.count, item.prompt_length - 1 - chunk.start)


def _wanted(chunks: Items[tuple[Chunk, Sequence]], scored: Items[bool], starts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Tokens whose hidden state is needed: a scored chunk's, then its last one where it samples. Ascending."""
    wanted: list[int] = []
    for (chunk, item), score, start in zip(chunks, scored, starts.tolist(), strict=False):
        if score:
            wanted.extend(range(start, start + _scored_count(chunk, item)))
        if chunk.samples:
            wanted.append(start + chunk.count - 1)
    return np.array(wanted, dtype=np.int64)


def _split_wanted(
    chunks: Items[tuple[Chunk, Sequence]], scored: Items[bool]
) -> tuple[list[int], list[tuple[range, Chunk, Sequence]]]:
    """Rows of the hidden states that sample, and those that score a prompt, in the order of `_wanted`."""
    samples: list[int] = []
    prompts: list[tuple[range, Chunk, Sequence]] = []
    row = 0
    for (chunk, item), score in zip(chunks, scored, strict=True):
        if score:
            count = _scored_count(chunk, item)
            prompts.append((range(row, row + count), chunk, item))
            row += count
        if chunk.samples:
            samples.append(row)
            row += 1
    return samples, prompts
