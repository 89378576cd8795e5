"""vLLM for the comparison; runs in vLLM's own environment, not in kveik's.

    python -m benchmarks.peers.inside.vllm_engine MODEL_FOLDER

MODEL_FOLDER: the model in bfloat16, in Hugging Face layout. Threads are bound by VLLM_CPU_OMP_THREADS_BIND.
"""

from __future__ import annotations

import itertools
import sys

import vllm
from vllm import LLM, SamplingParams

from benchmarks.peers.workload import answer


class VllmEngine:
    """An `LLM` as the workload drives it: the same steps that its `generate` makes, and no text made of tokens."""

    def __init__(self, folder: str) -> None:
        self._engine = LLM(
            model=folder,
            dtype="bfloat16",
            max_model_len=4096,
            max_num_seqs=32,
            max_num_batched_tokens=4096,
            enable_prefix_caching=False,
            skip_tokenizer_init=True,
        ).llm_engine
        self._ids = itertools.count()
        self._counts: dict[str, int] = {}

    def submit(self, prompts: list[list[int]], new: int) -> None:
        sampling = SamplingParams(max_tokens=new, temperature=0, ignore_eos=True, detokenize=False)
        self._counts = {}
        for prompt in prompts:
            name = str(next(self._ids))
            self._engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
            self._counts[name] = 0

    def step(self) -> list[int]:
        for output in self._engine.step():
            self._counts[output.request_id] = len(output.outputs[0].token_ids)
        return list(self._counts.values())


def main() -> None:
    answer(VllmEngine(sys.argv[1]), {"version": vllm.__version__, "weights": "weights in bfloat16"})


if __name__ == "__main__":
    main()
