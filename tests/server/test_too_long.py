"""A text that no context holds is refused with little work: what the encoder sees is bounded, whatever the body weighs."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from kveik.server import info
from kveik.text import tokenizer as cutting
from tests.server.fakes import Running, running

MEGABYTES = 14
HUGE = "a " * (MEGABYTES * 500_000)
SLICE = 1 << 16
"""Characters of one slice."""


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running() as started:
        yield started


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The length of every text that the encoder gets."""
    lengths: list[int] = []
    encode = cutting._encode

    def counting(core: object, text: str, add_special: bool) -> list[int]:
        lengths.append(len(text))
        return encode(core, text, add_special)  # type: ignore[arg-type]  # handed through

    monkeypatch.setattr(cutting, "_encode", counting)
    return lengths


def message(role: str) -> dict[str, object]:
    return {"messages": [{"role": role, "content": HUGE}]}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": HUGE}, "prompt"),
        ("/v1/completions", {"prompt": ["a", HUGE], "stream": True}, "prompt"),
        ("/v1/chat/completions", message("user"), "messages"),
        ("/v1/chat/completions", message("assistant"), "messages"),
    ],
)
@pytest.mark.parametrize("bounded", [True, False])
def test_what_cannot_fit_is_refused_before_it_is_cut(
    server: Running, seen: list[int], monkeypatch: pytest.MonkeyPatch, path: str, body: object, param: str, bounded: bool
) -> None:
    if not bounded:
        # As with a vocabulary that has one very long token.
        monkeypatch.setattr(server.tokenizer, "_reach", 1 << 30)
    answer = httpx.post(server.url + path, json=body, timeout=60)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", param)
    assert "512 tokens" in error["message"]
    assert "at least" in error["message"]
    assert sum(seen) <= (10 if bounded else SLICE + 10)


def test_tokenize_stops_at_its_cap(server: Running, seen: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(info, "MAX_TOKENIZE_TOKENS", 100_000)
    answer = httpx.post(f"{server.url}/tokenize", json={"prompt": HUGE}, timeout=60)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "prompt"
    assert "at most 100000" in answer.json()["error"]["message"]
    assert sum(seen) <= 2 * SLICE


def test_tokenize_still_counts_what_is_longer_than_the_context(server: Running) -> None:
    answer = httpx.post(f"{server.url}/tokenize", json={"prompt": "a" * 100_000}, timeout=60)
    assert answer.json()["count"] == 100_001
