"""A server whose pool is too small for everybody at once, and whose callers are of two tenants."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kveik.config import ScheduleConfig
from tests.contract.conftest import real_engine
from tests.engine.tiny import save_tiny_llama
from tests.server.fakes import serving

ALICE, BOB = "sk-alice", "sk-bob"
BLOCKS = 1024 // 16
"""As many as one request of the full context needs."""


@dataclass(frozen=True)
class Pressed:
    """The server, as HTTP sees it."""

    url: str

    def ask(self, body: dict[str, object], *, key: str = ALICE) -> dict[str, object]:
        """A whole answer."""
        answer = httpx.post(f"{self.url}/v1/completions", json=body, headers={"authorization": f"Bearer {key}"}, timeout=120)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def stream(self, body: dict[str, object], *, leave_after: int | None = None) -> dict[int, str] | None:
        """Joined texts by choice; None for a caller who left after so many events."""
        texts: dict[int, str] = {}
        headers = {"authorization": f"Bearer {ALICE}"}
        with httpx.stream(
            "POST", f"{self.url}/v1/completions", json={**body, "stream": True}, headers=headers, timeout=120
        ) as answer:
            assert answer.status_code == 200
            lines = (line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: "))
            for number, line in enumerate(lines):
                if line == "[DONE]":
                    return texts
                if leave_after is not None and number >= leave_after:
                    return None
                for choice in json.loads(line)["choices"]:
                    texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
        raise AssertionError("the stream ended without [DONE]")

    def metric(self, name: str, **labels: str) -> float:
        families = text_string_to_metric_families(httpx.get(f"{self.url}/metrics").text)
        samples = (sample for family in families for sample in family.samples)
        return sum(one.value for one in samples if one.name == name and labels.items() <= one.labels.items())

    def calm(self) -> bool:
        """Whether everybody has left, within a few seconds."""
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            if self.metric("kveik:num_requests_running") + self.metric("kveik:num_requests_waiting") == 0:
                return True
            time.sleep(0.02)
        return False


@pytest.fixture(scope="module")
def pressed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pressed]:
    schedule = ScheduleConfig(max_num_seqs=48, max_num_batched_tokens=512, prefill_chunk_size=128)
    folder = save_tiny_llama(tmp_path_factory.mktemp("tiny"))
    with real_engine(folder, blocks=BLOCKS, keys=(ALICE, BOB), schedule=schedule) as state, serving(state) as (url, _):
        yield Pressed(url)


def bodies() -> list[dict[str, object]]:
    """64 requests: short and long, a third behind one beginning, every eighth with three choices."""
    chance = random.Random(7)

    def tokens(count: int) -> list[int]:
        return [chance.randrange(256) for _ in range(count)]

    beginning = tokens(60)
    made: list[dict[str, object]] = []
    for number in range(64):
        own = tokens(chance.choice((4, 20, 80)))
        prompt = [*beginning, *own] if number % 3 == 0 else own
        made.append(
            {
                "prompt": prompt,
                "max_tokens": chance.choice((3, 40, 150)),
                "temperature": 0,
                "ignore_eos": True,
                "n": 3 if number % 8 == 0 else 1,
            }
        )
    return made


def texts_of(answer: dict[str, object]) -> dict[int, str]:
    choices = answer["choices"]
    assert isinstance(choices, list)
    return {choice["index"]: choice["text"] for choice in choices}


def test_64_callers_at_once_read_what_each_would_read_alone(pressed: Pressed) -> None:
    alone = [texts_of(pressed.ask({**body, "cache_salt": "alone"})) for body in bodies()]
    preempted = pressed.metric("kveik:num_preemptions_total")

    def one(numbered: tuple[int, dict[str, object]]) -> dict[int, str] | None:
        number, body = numbered
        if number % 11 == 5:
            return pressed.stream({**body, "max_tokens": 400}, leave_after=number % 3)
        return pressed.stream(body) if number % 2 else texts_of(pressed.ask(body))

    with ThreadPoolExecutor(64) as pool:
        together = list(pool.map(one, enumerate(bodies())))
    left = [number for number, texts in enumerate(together) if texts is None]
    assert left == [number for number in range(64) if number % 11 == 5]
    assert [texts for texts in together if texts is not None] == [
        texts for number, texts in enumerate(alone) if number not in left
    ]
    assert pressed.metric("kveik:num_preemptions_total") > preempted
    assert pressed.calm()
    assert pressed.metric("kveik:kv_cache_blocks", state="held") == 0
    assert (
        pressed.metric("kveik:kv_cache_blocks", state="free") + pressed.metric("kveik:kv_cache_blocks", state="cached")
        == BLOCKS
    )


def cached(answer: dict[str, object]) -> int:
    usage = answer["usage"]
    assert isinstance(usage, dict)
    return int(usage["prompt_tokens_details"]["cached_tokens"])


def test_nobody_finds_what_another_key_or_another_salt_has_left(pressed: Pressed) -> None:
    body: dict[str, object] = {"prompt": list(range(200)), "max_tokens": 2, "temperature": 0}
    assert cached(pressed.ask(body)) == 0
    assert cached(pressed.ask(body)) == 199
    assert cached(pressed.ask(body, key=BOB)) == 0
    assert cached(pressed.ask(body, key=BOB)) == 199
    assert cached(pressed.ask({**body, "cache_salt": "mine"})) == 0
    assert cached(pressed.ask({**body, "cache_salt": "mine"})) == 199
    assert cached(pressed.ask({**body, "cache_salt": "mine"}, key=BOB)) == 0
    assert cached(pressed.ask({**body, "cache_salt": "mine"}, key=BOB)) == 199
