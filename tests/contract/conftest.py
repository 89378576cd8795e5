"""The servers that the contract is held against. A test here knows an address, a model's name and a key, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import openai
import pytest

from kveik.config import CacheConfig, EngineConfig, ModelConfig, ScheduleConfig, ServerConfig
from kveik.engine.build import open_engine
from kveik.engine.loop import EngineLoop
from kveik.observe.events import RequestRefused
from kveik.server.state import ServerState
from tests.server.fakes import running, serving

KEY = "sk-contract"


@dataclass(frozen=True)
class Served:
    """One server under contract. It must know the key, have a chat template, and answer greedily alike every time."""

    base_url: str
    """Up to and including /v1."""

    model: str
    max_model_len: int


@pytest.fixture(scope="session", params=["script", pytest.param("engine", marks=pytest.mark.model)])
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    """Once a scripted engine, which says the same words over and over, and once a real one with a real model."""
    if request.param == "script":
        with running(api_key=(KEY,)) as server:
            yield Served(f"{server.url}/v1", "small", server.state.max_model_len)
    else:
        path = request.getfixturevalue("catalogue_file")("smollm2-135m")
        with real_engine(path, blocks=1024, keys=(KEY,)) as state, serving(state) as (url, _):
            yield Served(f"{url}/v1", state.names[0], state.max_model_len)


@contextmanager
def real_engine(
    path: Path, *, blocks: int, keys: tuple[str, ...], schedule: ScheduleConfig | None = None
) -> Iterator[ServerState]:
    """A model behind its own loop, for a server over it. float32, so that a batch's size does not decide between two tokens."""
    config = EngineConfig(
        model=ModelConfig(model=str(path), dtype="float32", max_model_len=1024),
        cache=CacheConfig(num_gpu_blocks_override=blocks),
        schedule=schedule or ScheduleConfig(),
    )
    loaded = open_engine(config, lambda line: None)
    loop = EngineLoop(loaded.engine, loaded.tokenizer, loaded.config.stream, max_waiting=256)
    loop.start()
    try:
        yield ServerState(
            door=loop,
            tokenizer=loaded.tokenizer,
            chat_template=loaded.chat_template,
            max_model_len=loaded.max_model_len,
            config=ServerConfig(port=0, api_key=keys, drain_seconds=1),
            names=(path.stem,),
            secret=b"c" * 32,
            metrics=loaded.metrics.exposition,
            counts=dict,
            fingerprint=loaded.fingerprint.hex()[:16],
            alive=lambda: loop.alive,
            refused=lambda error: loaded.bus.publish(RequestRefused.because_of(error)),
        )
    finally:
        loop.stop()
        loaded.close()


@pytest.fixture(scope="session")
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=served.base_url, api_key=KEY, max_retries=0, timeout=60) as opened:
        yield opened
