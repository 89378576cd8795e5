"""The servers that the contract is held against. A test here knows an address, a model's name and a key, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import openai
import pytest

from tests.server.fakes import running

KEY = "sk-contract"


@dataclass(frozen=True)
class Served:
    """One server under contract. It must know the key, have a chat template, and answer greedily alike every time."""

    base_url: str
    """Up to and including /v1."""

    model: str
    max_model_len: int


@pytest.fixture(scope="session")
def served() -> Iterator[Served]:
    """A server over a scripted engine, which says the same words over and over."""
    with running(api_key=(KEY,)) as server:
        yield Served(f"{server.url}/v1", "small", server.state.max_model_len)


@pytest.fixture(scope="session")
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=served.base_url, api_key=KEY, max_retries=0, timeout=60) as opened:
        yield opened
