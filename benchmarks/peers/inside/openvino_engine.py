"""OpenVINO GenAI's continuous batching for the comparison; runs in OpenVINO's own environment, not in kveik's.

    python -m benchmarks.peers.inside.openvino_engine MODEL.gguf THREADS

It reads Q4_1 and Q4_K files of Llama and Qwen2; it refuses Q5_0.
"""

from __future__ import annotations

import itertools
import sys

import numpy as np
import openvino
import openvino_genai as genai

from benchmarks.peers.workload import answer


class OpenVinoEngine:
    """A `ContinuousBatchingPipeline` as the workload drives it: the same steps that its `generate` makes."""

    def __init__(self, model: str, threads: int) -> None:
        schedule = genai.SchedulerConfig()
        schedule.cache_size = 2
        schedule.enable_prefix_caching = False
        schedule.max_num_batched_tokens = 512
        self._pipe = genai.ContinuousBatchingPipeline(model, schedule, "CPU", {"INFERENCE_NUM_THREADS": threads})
        self._ids = itertools.count()
        self._handles: list[genai.GenerationHandle] = []
        self._counts: list[int] = []

    def submit(self, prompts: list[list[int]], new: int) -> None:
        config = genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = new, True, False
        inputs = [openvino.Tensor(np.array([prompt], dtype=np.int64)) for prompt in prompts]
        self._handles = [self._pipe.add_request(next(self._ids), tokens, config) for tokens in inputs]
        self._counts = [0] * len(prompts)

    def step(self) -> list[int]:
        self._pipe.step()
        for row, handle in enumerate(self._handles):
            while handle.can_read():
                self._counts[row] += sum(len(output.generated_ids) for output in handle.read().values())
        return list(self._counts)


def main() -> None:
    engine = OpenVinoEngine(sys.argv[1], int(sys.argv[2]))
    answer(engine, {"version": f"GenAI {genai.__version__.partition('-')[0]}", "weights": "weights as in the file"})


if __name__ == "__main__":
    main()
