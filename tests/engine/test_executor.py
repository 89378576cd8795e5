"""The executor lays out what the plan says, beside a slow layout, and copies no block table."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from kveik.cache.layout import LayerGroup
from kveik.engine.executor import ModelExecutor
from kveik.model.step_batch import StepBatch
from kveik.sample.sampler import Sampler
from kveik.schedule.plan import StepOutcome, StepPlan
from tests.schedule.making import Desk, desk
from tests.schedule.rows import behind_of, decodes_of

VOCABULARY = 120
FIRST = 10
"""The answer to the step's first token; lower ones may be end tokens."""


@dataclass
class Echo:
    """A decoder whose hidden state of a token is its place in the step; the likeliest next token is FIRST and that place."""

    tensors: tuple[torch.Tensor, ...] = ()
    batches: list[StepBatch] = field(default_factory=list)
    broken: frozenset[int] = frozenset()

    def copy_blocks(self, copies: object) -> None: ...

    def forward(self, batch: StepBatch, storage: object) -> torch.Tensor:
        self.batches.append(batch)
        return batch.logits_indices[:, None].float()

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = torch.zeros(len(hidden), VOCABULARY).scatter_(1, FIRST + hidden.long(), 5.0)
        for place in self.broken:
            logits[hidden[:, 0] == place] = torch.nan
        return logits


def executor_of(one: Desk, echo: Echo, windows: tuple[int | None, ...] = (None,)) -> ModelExecutor:
    groups = [LayerGroup((number,), 1, 4, window) for number, window in enumerate(windows)]
    model: Any = echo
    return ModelExecutor(model, Sampler(VOCABULARY, VOCABULARY), model, groups, one.scheduler.kv_cache.block_size)


def step(one: Desk, executor: ModelExecutor) -> tuple[StepPlan, StepOutcome]:
    plan = one.plan()
    executor.launch(plan)
    outcome = executor.collect()
    slow_check(one, executor, plan)
    one.scheduler.settle(plan, outcome, one.now)
    one.step_count += 1
    return plan, outcome


def slow_check(one: Desk, executor: ModelExecutor, plan: StepPlan) -> None:
    """Every field of the batch, token by token."""
    echo: Any = executor.decoder
    batch, size, tables = echo.batches[-1], executor.block_size, one.scheduler.kv_cache.tables
    tokens, positions, starts, seq_lens = [], [], [0], []
    slots: list[list[int]] = [[] for _ in tables]
    for row, sequence_id in enumerate(plan.sequence_ids):
        sequence = one.scheduler.sequence(sequence_id)
        assert sequence is not None
        assert sequence.row == row
        start, count = int(plan.starts[row]), int(plan.counts[row])
        for position in range(start, start + count):
            tokens.append(sequence.tokens[position])
            positions.append(position)
            for group, table in enumerate(tables):
                slots[group].append(int(table[row, position // size]) * size + position % size)
        starts.append(len(tokens))
        seq_lens.append(start + count)
    assert (batch.token_ids.tolist(), batch.positions.tolist()) == (tokens, positions)
    for group, attention in enumerate(batch.groups):
        assert attention.slot_mapping.tolist() == slots[group]
        assert attention.query_start_loc.tolist() == starts
        assert attention.seq_lens.tolist() == seq_lens
        assert attention.decodes == sum(plan.counts == 1)
        assert (attention.slot_mapping.dtype, attention.seq_lens.dtype, attention.tables.dtype) == (
            torch.int64,
            torch.int32,
            torch.int32,
        )
        assert np.shares_memory(attention.tables.numpy(), tables[group]), "a table was copied"


@pytest.mark.parametrize("windows", [(None,), (None, 20)])
def test_decodes_and_chunks_of_many_lengths_come_and_go(windows: tuple[int | None, ...]) -> None:
    one = desk(blocks=60, windows=windows, prefill_chunk_size=24)
    executor = executor_of(one, Echo(), windows)
    for length, new in ((5, 12), (40, 3), (17, 30), (33, 1), (8, 9), (61, 20), (3, 4)):
        one.ask(length, new, temperature=0.0)
        step(one, executor)
    seen = []
    while one.scheduler.has_work:
        plan, _ = step(one, executor)
        seen.append((len(decodes_of(plan)), len(behind_of(plan))))
    assert max(decodes for decodes, _ in seen) >= 4
    assert any(decodes and prefills for decodes, prefills in seen), "steps of both kinds together"


def test_tokens_belong_to_their_rows_and_a_broken_row_fails_alone() -> None:
    one = desk(prefill_chunk_size=64)
    echo = Echo()
    executor = executor_of(one, echo)
    for length in (4, 6):
        one.ask(length, 9, temperature=0.0)
    _, first = step(one, executor)
    assert first.tokens.tolist() == [FIRST + 3, FIRST + 9], "the last token of each prompt"
    one.ask(5, 9, temperature=0.0)
    _, second = step(one, executor)
    assert second.tokens.tolist() == [FIRST, FIRST + 1, FIRST + 6]
    echo.broken = frozenset({1})
    _, third = step(one, executor)
    assert third.failed == {1}
    assert (third.tokens.tolist(), third.offsets.tolist()) == ([FIRST, FIRST + 2], [0, 1, 1, 2])
    assert one.scheduler.running == 2


def test_a_prompt_is_scored_and_samples_in_one_step() -> None:
    one = desk(prefill_chunk_size=64)
    executor = executor_of(one, Echo())
    one.ask([1, 2, 3], 4, temperature=0.0)
    step(one, executor)
    scored = one.ask([9, 1, 2, 3], 4, temperature=0.0, prompt_logprobs=0, logprobs=1)
    _, outcome = step(one, executor)
    assert outcome.tokens.tolist() == [FIRST, FIRST + 4]
    assert list(outcome.logprobs) == [1]
    [part] = outcome.prompt_logprobs
    assert (part.sequence_id, part.start) == (scored.id, 1)
    assert [entry.token for entry in part.entries] == [1, 2, 3]


def test_launch_and_collect_alternate() -> None:
    one = desk()
    executor = executor_of(one, Echo())
    with pytest.raises(AssertionError, match="nothing is launched"):
        executor.collect()
    one.ask(3, 4)
    plan = one.plan()
    executor.launch(plan)
    with pytest.raises(AssertionError, match="before the outcome"):
        executor.launch(plan)
