"""kveik for the comparison: python -m benchmarks.peers.inside.kveik_engine MODEL THREADS [SETTINGS.toml]

Its defaults, but for the prefix cache, which is off, and 2 GiB for keys and values, as the others have. Settings are a file as
`--config` of the command line takes it.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from benchmarks.bytes_read import bytes_per_step, file_bytes_per_step
from benchmarks.peers.workload import answer
from kveik import __version__
from kveik.cli.config_file import read_config_file
from kveik.cli.options import ENGINE, Settings, every_setting
from kveik.config import EngineConfig
from kveik.engine.executor import ModelExecutor
from kveik.engine.llm import LLM, Answering
from kveik.kernels import native
from kveik.model.decoder import Decoder
from kveik.request.request import SamplingParams

OURS = {"enable_prefix_caching": False, "kv_cache_memory_bytes": 2 << 30}


class KveikEngine:
    """An `LLM` as the workload drives it."""

    def __init__(self, config: EngineConfig) -> None:
        self._path = Path(config.model.model)
        self.said: list[str] = []
        self._llm = LLM(config, self.said.append)
        self._answering: list[Answering] = []
        self._counts: dict[int, int] = {}

    @property
    def step_bytes(self) -> int:
        """Weights that a step reads at least."""
        return bytes_per_step(self._decoder, self._path)

    @property
    def arithmetic(self) -> str:
        """How weights are multiplied, without the reason, and what keys and values are kept in."""
        return f"{self._decoder.described.partition(':')[0]}; cache in {self._llm.loaded.kv_dtype_name}"

    @property
    def _decoder(self) -> Decoder:
        executor = self._llm.loaded.engine.executor
        assert isinstance(executor, ModelExecutor)
        return executor.decoder

    def submit(self, prompts: list[list[int]], new: int) -> None:
        sampling = SamplingParams(max_tokens=new, temperature=0.0, ignore_eos=True)
        self._answering = [self._llm.submit(prompt, sampling) for prompt in prompts]
        self._counts = {id(answering.text): 0 for answering in self._answering}

    def step(self) -> list[int]:
        for text, deltas in self._llm.step().items():
            for delta in deltas:
                # A figure of an engine that fails would be no figure.
                if delta.error is not None:
                    raise delta.error
            self._counts[id(text)] += sum(len(delta.tokens) for delta in deltas)
        return [self._counts[id(answering.text)] for answering in self._answering]


def config_for(model: str, threads: int, settings: Path | None) -> EngineConfig:
    """The file's settings over those of the comparison."""
    given = read_config_file(settings, every_setting()) if settings else {}
    return Settings(ENGINE, {**OURS, **given, "model": model, "threads": threads}).engine


def main() -> None:
    settings = Path(sys.argv[3]) if len(sys.argv) > 3 else None
    engine = KveikEngine(config_for(sys.argv[1], int(sys.argv[2]), settings))
    answer(
        engine,
        {
            "version": f"{__version__}, torch {torch.__version__}",
            "weights": engine.arithmetic,
            "settings": settings.read_text(encoding="utf-8") if settings else "",
            "step_bytes": engine.step_bytes,
            "file_bytes": file_bytes_per_step(Path(sys.argv[1])),
            "said": [native.described(), *engine.said],
        },
    )


if __name__ == "__main__":
    main()
