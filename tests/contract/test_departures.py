"""A real engine under clients that come and go: nothing is left behind."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.contract.conftest import KEY, Served


def gauges(served: Served) -> dict[str, float]:
    text = httpx.get(served.base_url.removesuffix("/v1") + "/metrics").text
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            state = sample.labels.get("state") or sample.labels.get("finished_reason") or sample.labels.get("reason") or ""
            found[f"{sample.name} {state}".strip()] = sample.value
    return found


def settled(served: Served, seconds: float = 10.0) -> dict[str, float]:
    """The gauges, once nothing is open any more."""
    deadline = time.monotonic() + seconds
    while True:
        found = gauges(served)
        names = ("kveik:num_requests_running", "kveik:num_requests_waiting", "kveik:http_calls_open", "kveik:http_streams_open")
        if all(found[name] == 0 for name in names) or time.monotonic() > deadline:
            return found
        time.sleep(0.02)


@pytest.mark.parametrize("served", [pytest.param("engine", marks=pytest.mark.model)], indirect=True)
def test_clients_that_leave_free_every_block_and_count_as_aborted(served: Served) -> None:
    def come_and_go(number: int) -> None:
        chance = random.Random(number)
        body = {
            "prompt": f"Story {number % 3}: once upon a time",
            "max_tokens": 900,
            "ignore_eos": True,
            "n": chance.choice([1, 3]),
        }
        patience = httpx.Timeout(chance.uniform(0.02, 0.6), connect=5, pool=5)
        with httpx.Client(base_url=served.base_url, headers={"authorization": f"Bearer {KEY}"}, timeout=patience) as client:
            try:
                if number % 2:
                    client.post("/completions", json=body)
                else:
                    with client.stream("POST", "/completions", json=body | {"stream": True}) as answer:
                        for _, _line in zip(range(chance.randrange(1, 9)), answer.iter_lines(), strict=False):
                            pass
            except httpx.TimeoutException:
                pass

    before = settled(served)
    with ThreadPoolExecutor(12) as pool:
        list(pool.map(come_and_go, range(36)))
    after = settled(served)
    for name in (
        "kveik:num_requests_running",
        "kveik:num_requests_waiting",
        "kveik:http_calls_open",
        "kveik:http_streams_open",
    ):
        assert after[name] == 0, name
    assert after["kveik:kv_cache_blocks held"] == 0
    assert after["kveik:request_success_total abort"] > before["kveik:request_success_total abort"]
    assert after["kveik:request_success_total error"] == before["kveik:request_success_total error"]
    with openai.OpenAI(base_url=served.base_url, api_key=KEY, max_retries=0) as client:
        answer = client.completions.create(model=served.model, prompt="Hello", max_tokens=3)
        assert answer.usage is not None
        assert answer.usage.completion_tokens <= 3


@pytest.mark.parametrize("served", [pytest.param("engine", marks=pytest.mark.model)], indirect=True)
def test_tenants_and_salts_share_no_blocks_and_a_repeat_computes_one_token(served: Served) -> None:
    prompt = "A prompt that nobody has sent before, long enough for a few blocks of the cache, and then a little longer still."

    def cached(**extra: object) -> tuple[int, int]:
        with openai.OpenAI(base_url=served.base_url, api_key=KEY, max_retries=0) as client:
            answer = client.completions.create(model=served.model, prompt=prompt, max_tokens=1, temperature=0, extra_body=extra)
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        return answer.usage.prompt_tokens_details.cached_tokens or 0, answer.usage.prompt_tokens

    first, length = cached()
    assert first < length / 2
    assert cached() == (length - 1, length)
    assert cached(cache_salt="mine") == (0, length)
    assert cached(cache_salt="mine") == (length - 1, length)
    assert cached(cache_salt="None") == (0, length)


@pytest.mark.parametrize("served", [pytest.param("engine", marks=pytest.mark.model)], indirect=True)
def test_refusals_are_counted_by_reason(served: Served) -> None:
    before = gauges(served)
    with openai.OpenAI(base_url=served.base_url, api_key=KEY, max_retries=0) as client:
        with pytest.raises(openai.BadRequestError):
            client.completions.create(model=served.model, prompt="Hello", max_tokens=99_999)
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="nobody", prompt="Hello")
    after = gauges(served)
    for reason in ("prompt_too_long", "model_not_found"):
        name = f"kveik:requests_refused_total {reason}"
        assert after[name] == before[name] + 1
