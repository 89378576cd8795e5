"""Time to the first token of a 2,000-token prompt: cold, repeated, and repeated under another salt.

    python -m benchmarks.prefix [MODEL]

Each round has a prompt of its own, so that its first run is cold; the figures are medians over the rounds.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from dataclasses import dataclass

from benchmarks.command import run
from kveik.config import CacheConfig, EngineConfig, ModelConfig
from kveik.engine.llm import LLM
from kveik.request.request import SamplingParams

PROMPT_TOKENS = 2000
ROUNDS = 5


@dataclass(frozen=True)
class First:
    """How a request's first token came."""

    seconds: float
    cached: int


def first_token(llm: LLM, prompt: list[int], salt: str | None = None) -> First:
    start = time.perf_counter()
    deltas = llm.stream(prompt, SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True), cache_salt=salt)
    next(deltas)
    seconds = time.perf_counter() - start
    list(deltas)
    return First(seconds, llm.cached_tokens_last())


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.prefix", description=__doc__.partition("\n")[0])
    parser.add_argument("model", nargs="?", default="smollm2-135m", help="a name, file or folder (default: %(default)s)")
    model = parser.parse_args().model
    llm = LLM(EngineConfig(model=ModelConfig(model=model), cache=CacheConfig(kv_cache_memory_bytes=2 << 30)))
    chance = random.Random(0)
    prompts = [[chance.randrange(1000, 40000) for _ in range(PROMPT_TOKENS)] for _ in range(ROUNDS + 1)]
    first_token(llm, prompts.pop())
    cold = [first_token(llm, prompt) for prompt in prompts]
    again = [first_token(llm, prompt) for prompt in prompts]
    salted = [first_token(llm, prompt, salt="another") for prompt in prompts]
    print(f"{model}, prompt of {PROMPT_TOKENS} tokens, median of {ROUNDS}")
    for name, runs in (("cold", cold), ("repeated", again), ("other salt", salted)):
        median = statistics.median(run.seconds for run in runs)
        print(f"  {name:<12} first token after {median * 1000:8.1f} ms, {runs[0].cached} tokens cached")
    ratio = statistics.median(run.seconds for run in cold) / statistics.median(run.seconds for run in again)
    print(f"  the repeated prompt is {ratio:.0f} times as fast")


if __name__ == "__main__":
    run(main)
