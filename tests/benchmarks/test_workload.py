"""The clockwork of the comparison with other engines, with an engine whose speed is known."""

from __future__ import annotations

import pytest

from benchmarks.peers.workload import BATCHES, COLUMNS, NEW_TOKENS, PREFILL, heard, measure, prompts


class Clock:
    """Time that moves only when told to."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


class Engine:
    """Reads `chunk` prompt tokens a step and prompt after prompt; a step takes a second, and a hundred while it reads."""

    def __init__(self, clock: Clock, chunk: int = 512) -> None:
        self.clock, self.chunk = clock, chunk
        self.left: list[int] = []
        self.counts: list[int] = []
        self.new = 0
        self.asked: list[tuple[int, int, int]] = []

    def submit(self, prompts: list[list[int]], new: int) -> None:
        assert min(self.counts, default=self.new) >= self.new, "the last batch has not been answered in full"
        self.left, self.counts, self.new = [len(prompt) for prompt in prompts], [0] * len(prompts), new
        self.asked.append((len(prompts), len(prompts[0]), new))

    def step(self) -> list[int]:
        self.clock.seconds += 100 if any(self.left) else 1
        room = self.chunk
        for row, left in enumerate(self.left):
            read = min(left, room)
            self.left[row] -= read
            room -= read
            if self.left[row] == 0 and self.counts[row] < self.new:
                self.counts[row] += 1
        return list(self.counts)


@pytest.mark.parametrize("batch", BATCHES)
def test_decoding_counts_from_the_last_first_token_to_the_first_last_one(batch: int) -> None:
    clock = Clock()
    engine = Engine(clock, chunk=64)
    # A step gives every sequence of the batch one token and takes a second.
    assert measure(engine, f"decode_{batch}", 1, clock) == pytest.approx(batch)
    assert engine.asked[-1] == (batch, 32, NEW_TOKENS + 1)
    assert engine.counts == [NEW_TOKENS + 1] * batch


def test_a_prefill_lasts_until_its_first_new_token() -> None:
    clock = Clock()
    assert measure(Engine(clock), PREFILL, 1, clock) == pytest.approx(512 / 100)
    assert measure(Engine(clock, chunk=128), PREFILL, 1, clock) == pytest.approx(512 / 400)


def test_no_prompt_begins_like_another() -> None:
    first_blocks = [tuple(prompt[:8]) for number in range(40) for prompt in prompts(number, 32, 32)]
    assert len(set(first_blocks)) == len(first_blocks)


def test_prompts_are_the_same_in_every_engine() -> None:
    assert prompts(3, 4, 32) == prompts(3, 4, 32)
    assert all(1000 <= token < 25_000 for prompt in prompts(3, 4, 512) for token in prompt)


def test_columns_are_those_of_the_published_table() -> None:
    assert COLUMNS == ("prefill_512", "decode_1", "decode_8", "decode_16", "decode_32")


def test_lines_of_others_are_not_heard() -> None:
    assert heard("INFO loading 40% " + 'peers-bench: {"rate": 2.5}\n') == {"rate": 2.5}
    assert heard('{"rate": 2.5}') is None
