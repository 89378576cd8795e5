"""Cost of sampling per step: `python -m benchmarks.sampler [--threads 2] [--scale 2] [--write docs]`.

Logits are normal with a given spread, plus one peak per row as trained models have it. `flat` rows have no peak, the worst case
for top_p. Each figure is the best of several steps, in milliseconds.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch

from benchmarks.command import run
from benchmarks.facts import environment
from benchmarks.pages import publish, table
from kveik.request.request import Request, SamplingParams
from kveik.request.sampling_rows import RowDetail, SamplingRows, TokenHistory, needs_detail, seed_words
from kveik.request.sequence import Sequence
from kveik.sample.sampler import Sampler

BATCHES = (1, 8, 32, 64)
VOCABULARIES = (49152, 151936)
OUTPUT_TOKENS = 500
KINDS: dict[str, dict[str, object]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.7},
    "temperature + top_p": {"temperature": 0.7, "top_p": 0.9},
    "temperature + top_p, flat": {"temperature": 0.7, "top_p": 0.9},
    "top_k 40 + top_p": {"temperature": 0.7, "top_k": 40, "top_p": 0.9},
    "min_p": {"temperature": 0.7, "min_p": 0.05},
    "greedy + penalties": {"temperature": 0.0, "repetition_penalty": 1.1, "frequency_penalty": 0.2, "presence_penalty": 0.1},
    "greedy + 5 logprobs": {"temperature": 0.0, "logprobs": 5},
}


def sequences(count: int, vocab: int, sampling: dict[str, object]) -> list[Sequence]:
    chance = torch.Generator().manual_seed(1)
    made = []
    for number in range(count):
        tokens = torch.randint(0, vocab, (2 * OUTPUT_TOKENS,), generator=chance).tolist()
        request = Request(
            id=str(number), prompt=tuple(tokens[:OUTPUT_TOKENS]), sampling=SamplingParams(max_tokens=1 << 20, **sampling)
        )
        sequence = Sequence.start(id=number, request=request, choice=0, seed=number, arrived=0.0)
        sequence.tokens += tokens[OUTPUT_TOKENS:]
        made.append(sequence)
    return made


def rows_of(sequences: Iterable[Sequence]) -> SamplingRows:
    """One row for each, as a plan has it."""
    asked = list(sequences)
    parameters = [one.sampling for one in asked]
    histories = [TokenHistory(one.tokens, one.length, one.prompt_length) for one in asked]
    return SamplingRows(
        np.array([one.temperature for one in parameters], dtype=np.float64),
        np.array([one.top_k for one in parameters], dtype=np.int64),
        np.array([one.top_p for one in parameters], dtype=np.float64),
        np.array([one.min_p for one in parameters], dtype=np.float64),
        np.array([seed_words(one.seed) for one in asked], dtype=np.uint64).reshape(-1, 3),
        np.array([one.choice for one in asked], dtype=np.int64),
        np.array([one.output_count for one in asked], dtype=np.int64),
        {row: RowDetail(one.id, one.sampling, histories[row]) for row, one in enumerate(asked) if needs_detail(one.sampling)},
    )


def step_ms(batch: int, vocab: int, kind: str, scale: float, repeats: int) -> float:
    """Milliseconds of the quickest of several steps, each with logits that are not in the processor's cache."""
    rows = torch.randn(batch, vocab, generator=torch.Generator().manual_seed(0)) * scale
    if "flat" not in kind:
        # A likely token and some that compete with it.
        rows[:, :20] += torch.linspace(6, 3, 20) * scale
    asked, sampler, best = sequences(batch, vocab, KINDS[kind]), Sampler(vocab, vocab), float("inf")
    for _ in range(repeats + 1):
        logits = rows.clone()
        columns = rows_of(asked)
        started = time.perf_counter()
        choices = sampler.choose(logits, columns)
        best = min(best, time.perf_counter() - started)
        for sequence, token in zip(asked, choices.tokens.tolist(), strict=True):
            sequence.tokens.append(token)
    return best * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--scale", type=float, default=2.0, help="spread of the logits")
    parser.add_argument("--repeats", type=int, default=12)
    parser.add_argument("--write", type=Path, metavar="FOLDER", help="put the figures into this folder and its page")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    facts = environment()
    rows = [["rows", *(f"{vocab:,} × {batch}" for vocab in VOCABULARIES for batch in BATCHES)]]
    for kind in KINDS:
        costs = [step_ms(batch, vocab, kind, options.scale, options.repeats) for vocab in VOCABULARIES for batch in BATCHES]
        rows.append([kind, *(f"{cost:.2f}" for cost in costs)])
        print("  ".join(cell.rjust(8) for cell in rows[-1]), flush=True)
    print(f"\n{options.threads} threads, milliseconds per step\n")
    publish(table(rows), facts, options.write, name="sampler", figures={"rows": rows, "threads": options.threads})


if __name__ == "__main__":
    run(main)
