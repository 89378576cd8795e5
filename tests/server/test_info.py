"""Paths that tell: models, tokens, health, metrics, version and the page."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from dataclasses import asdict, fields, replace

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

import kveik
from kveik.cache.group import GroupUsage
from kveik.engine.cache_stats import CacheStats, PromptTokens
from kveik.observe.events import TierState
from kveik.observe.metrics import CONTENT_TYPE
from kveik.observe.tiers import TierCounts, TierSnapshot
from kveik.server.auth import Tenants
from kveik.server.traffic import STATUSES
from tests.server.fakes import Running, running


def test_every_served_name_is_a_model(client: httpx.Client) -> None:
    listed = client.get("/v1/models").json()
    assert listed["object"] == "list"
    assert [card["id"] for card in listed["data"]] == ["small", "org/small"]
    for card in listed["data"]:
        assert client.get(f"/v1/models/{card['id']}").json() == card
        assert card["max_model_len"] == 512
        assert isinstance(card["created"], int)


@pytest.mark.parametrize("name", ["nothing", "small/x", "org", "x" * 5000])
def test_an_unknown_model_is_404_with_its_code(client: httpx.Client, name: str) -> None:
    answer = client.get(f"/v1/models/{name}")
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "model_not_found"
    assert len(answer.text) < 500


def test_tokens_of_a_prompt_come_back_as_its_text(client: httpx.Client, server: Running) -> None:
    answer = client.post("/tokenize", json={"prompt": "Hello world é"}).json()
    assert answer["tokens"] == server.tokenizer.encode("Hello world é")
    assert (answer["count"], answer["max_model_len"]) == (len(answer["tokens"]), 512)
    assert client.post("/detokenize", json={"tokens": answer["tokens"]}).json() == {"prompt": "<s>Hello world é"}
    bare = client.post("/tokenize", json={"prompt": "Hello world é", "add_special_tokens": False}).json()
    assert bare["tokens"] == answer["tokens"][1:]


def test_tokens_of_a_chat_are_those_that_it_would_be_charged_for(client: httpx.Client) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    counted = client.post("/tokenize", json={"messages": messages}).json()["count"]
    usage = client.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 1}).json()["usage"]
    assert usage["prompt_tokens"] == counted


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}),
        ("/tokenize", {"prompt": ["a"]}),
        ("/tokenize", {"prompt": "a", "model": 5}),
        ("/detokenize", {}),
        ("/detokenize", {"tokens": [-1]}),
        ("/detokenize", {"tokens": [10**6]}),
        ("/detokenize", {"tokens": [1.5]}),
        ("/detokenize", {"tokens": [True]}),
        ("/detokenize", {"tokens": "abc"}),
    ],
)
def test_malformed_token_calls_are_400(client: httpx.Client, path: str, body: object) -> None:
    answer = client.post(path, json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] in ("prompt", "tokens", "model", "messages")


def test_health_is_ok_while_requests_are_taken(client: httpx.Client) -> None:
    assert client.get("/health").json() == {"status": "ok"}
    head = client.head("/health")
    assert (head.status_code, head.content) == (200, b"")


def test_health_is_503_while_draining_and_500_without_an_engine() -> None:
    with running(alive=lambda: False) as server, httpx.Client(base_url=server.url) as client:
        stopped = client.get("/health")
        assert stopped.status_code == 500
        assert stopped.json()["error"]["type"] == "server_error"
        server.state.traffic.draining = True
        draining = client.get("/health")
        assert draining.status_code == 503
        assert int(draining.headers["retry-after"]) >= 1


def test_metrics_are_the_engines_and_the_doors_in_prometheus_text() -> None:
    with running() as server, httpx.Client(base_url=server.url) as client:
        client.post("/v1/completions", json={"prompt": "Hello"})
        client.post("/v1/completions", json={"prompt": 7})
        client.get("/health")
        assert server.until(lambda: server.state.traffic.calls == 0)
        answer = client.get("/metrics")
    assert answer.headers["content-type"] == CONTENT_TYPE
    assert answer.text.startswith("kveik_up 1\n")
    found = {
        (sample.name, sample.labels.get("status")): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }
    assert found["kveik:http_calls_total", "200"] == found["kveik:http_calls_total", "400"] == 1
    assert found["kveik:http_calls_open", None] == found["kveik:http_streams_open", None] == 0
    assert found["kveik:http_body_bytes", None] == found["kveik:http_draining", None] == 0
    assert found["kveik:http_body_bytes_max", None] == server.state.bodies.total_bytes


def test_every_counter_is_there_at_0_from_the_first_scrape() -> None:
    with running() as server:
        text = httpx.get(f"{server.url}/metrics").text
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    statuses = {sample.labels["status"]: sample.value for sample in samples if sample.name == "kveik:http_calls_total"}
    assert statuses == dict.fromkeys(map(str, STATUSES), 0)
    assert [sample.value for sample in samples if sample.name == "kveik:http_unknown_fields_total"] == [0]


def test_tokenizer_info_has_what_remote_tokenizers_ask_for(client: httpx.Client) -> None:
    told = client.get("/tokenizer_info").json()
    assert (told["bos_token"], told["eos_token"], told["pad_token"]) == ("<s>", "<end>", None)
    assert "<|im_start|>" in told["chat_template"]
    (eos,) = client.post("/tokenize", json={"prompt": told["eos_token"], "add_special_tokens": False}).json()["tokens"]
    assert client.post("/detokenize", json={"tokens": [eos]}).json()["prompt"] == told["eos_token"]


def test_token_texts_come_on_demand(client: httpx.Client) -> None:
    body = {"prompt": "Hello world", "add_special_tokens": False, "return_token_strs": True}
    assert client.post("/tokenize", json=body).json()["token_strs"] == ["Hello", " world"]


def test_the_doors_counters_stand_still_while_nobody_asks() -> None:
    with running() as server, httpx.Client(base_url=server.url) as client:
        client.post("/v1/completions", json={"prompt": "Hello"})
        assert server.until(lambda: server.state.traffic.calls == 0)
        assert len({client.get("/metrics").text for _ in range(20)}) == 1


def test_metrics_that_fail_hurt_nobody_else() -> None:
    def broken() -> str:
        raise RuntimeError("counter went backwards in /secret/place")

    with running(metrics=broken) as server, httpx.Client(base_url=server.url) as client:
        answer = client.get("/metrics")
        assert answer.status_code == 500
        assert "secret" not in answer.text
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        assert client.post("/v1/completions", json={"prompt": "Hello"}).status_code == 200


def test_the_version_is_the_packages(client: httpx.Client) -> None:
    assert client.get("/version").json() == {"version": kveik.__version__}


def test_the_page_names_the_model_and_its_example_works(client: httpx.Client) -> None:
    page = client.get("/")
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert "<strong>small</strong>" in page.text
    assert "/v1/chat/completions" in page.text
    assert "{{" not in page.text
    for link in ("docs", "metrics", "health"):
        assert f'href="{link}"' in page.text
        assert client.get(f"/{link}").status_code == 200
    assert client.get("/status").json() == {
        "draining": False,
        "facts": {"type of keys and values": "int8"},
        "counts": {"running": 0, "waiting": 0},
        "prompt_tokens": {},
        "tiers": [],
    }


@pytest.mark.parametrize("template", [True, False])
def test_the_pages_example_is_a_body_that_is_answered_alike_every_time(template: bool) -> None:
    with running(template=template) as server:
        page = html.unescape(httpx.get(server.url).text)
        found = re.search(r"(/v1/\S+).*-d '(.*?)'</pre>", page, re.DOTALL)
        assert found is not None
        body = json.loads(found[2])
        assert (body["max_tokens"], body["temperature"]) == (60, 0)
        answer = httpx.post(server.url + found[1], json=body)
        assert answer.json()["usage"]["completion_tokens"] == 60


def test_the_first_page_takes_head_as_well(client: httpx.Client) -> None:
    head, whole = client.head("/"), client.get("/")
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-length"] == str(len(whole.content))


@pytest.mark.parametrize("path", ["/", "/docs"])
def test_pages_load_nothing_from_elsewhere(client: httpx.Client, path: str) -> None:
    page = client.get(path)
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert not re.search(r"(src|href)=\"(?:https?:)?//|@import|\burl\(", page.text)


def test_the_docs_page_reads_the_schema_beside_it(client: httpx.Client) -> None:
    assert 'fetch("openapi.json")' in client.get("/docs").text
    described = client.get("/openapi.json").json()["paths"]
    assert {"/", "/status", "/v1/chat/completions"} <= set(described)


def test_the_page_escapes_the_models_name() -> None:
    with running(names=("<script>alert('x')</script>",), template=False, api_key=("k",)) as server:
        page = httpx.get(server.url).text
        assert "<script>alert" not in page
        assert "&lt;script&gt;" in page
        assert "Authorization: Bearer $KEY" in page
        assert "/v1/completions" in page


def test_the_cache_tells_what_it_holds_and_forgets_on_demand() -> None:
    full = CacheStats((GroupUsage(1, 2, 3, 6),), PromptTokens(5, 4), 1, (), {"ram": 7})

    async def stats() -> CacheStats:
        return full

    async def reset() -> CacheStats:
        return CacheStats((), PromptTokens(0, 0), 0, (), {})

    with running(cache_stats=stats, cache_reset=reset) as server:
        assert httpx.get(f"{server.url}/cache/stats").json() == {
            "pool": [{"held": 1, "cached": 2, "free": 3, "total": 6}],
            "prompt_tokens": {"queried": 5, "hit": 4},
            "loads_waiting": 1,
            "tiers": [],
            "contents": {"ram": 7},
        }
        assert httpx.post(f"{server.url}/cache/reset").json()["pool"] == []
        assert httpx.get(f"{server.url}/cache/reset").status_code == 405


def test_the_description_has_every_field_of_what_the_cache_tells() -> None:
    with running() as server:
        described = httpx.get(f"{server.url}/openapi.json").json()
    schemas = described["components"]["schemas"]
    for path, method in (("/cache/stats", "get"), ("/cache/reset", "post")):
        content = described["paths"][path][method]["responses"]["200"]["content"]
        assert content["application/json"]["schema"] == {"$ref": "#/components/schemas/CacheStats"}
    for type_ in (CacheStats, TierSnapshot, TierCounts, GroupUsage, PromptTokens):
        names = [field.name for field in fields(type_)]
        assert list(schemas[type_.__name__]["properties"]) == schemas[type_.__name__]["required"] == names


def test_only_the_first_key_may_empty_everybodys_cache() -> None:
    keys = ("first", "second")
    operator = Tenants(keys, b"s" * 32).of_key("first")
    with running(api_key=keys, operator=operator) as server:
        for key, status in (("first", 200), ("second", 401)):
            headers = {"authorization": f"Bearer {key}"}
            assert httpx.post(f"{server.url}/cache/reset", headers=headers).status_code == status
            assert httpx.get(f"{server.url}/cache/stats", headers=headers).status_code == 200
        assert httpx.get(f"{server.url}/cache/stats").status_code == 401


COUNTS = TierCounts(
    records_loaded=0,
    bytes_loaded=0,
    seconds_loading=0.0,
    records_stored=3,
    bytes_stored=3000,
    seconds_storing=0.5,
    records_deleted=0,
    misses={"absent": 1},
    refusals={"full": 0},
    errors=0,
)
DISK = TierSnapshot(
    name="disk",
    state=TierState.DEGRADED,
    reason="cache-3:6379 is slow",
    capacity_bytes=10_000,
    usable_bytes=9_000,
    bytes_used=4096,
    records=3,
    loads_waiting=0,
    stores_waiting_bytes=0,
    staging_bytes=100,
    counts=COUNTS,
)
RAM = replace(DISK, name="ram", state=TierState.AVAILABLE, reason="")


def test_the_status_has_the_tiers_and_reasons_only_where_all_may_read_them() -> None:
    tokens = {"computed": 7, "cached": 2, "disk": 5}
    with running(tiers=lambda: [DISK], prompt_tokens=lambda: tokens) as server:
        status = httpx.get(f"{server.url}/status").json()
        assert status["tiers"] == [asdict(DISK)]
        assert status["prompt_tokens"] == tokens
    with running(tiers=lambda: [DISK], api_key=("k",)) as server:
        answer = httpx.get(f"{server.url}/status")
        assert "cache-3" not in answer.text
        assert answer.json()["tiers"] == [asdict(DISK) | {"reason": "see the log or /cache/stats"}]
    with running(tiers=lambda: [RAM], api_key=("k",)) as server:
        assert httpx.get(f"{server.url}/status").json()["tiers"] == [asdict(RAM)]


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("chromium"), reason="there is no chromium here")
@pytest.mark.parametrize("tiers", [[], [DISK], [RAM, DISK]], ids=len)
def test_the_page_shows_the_tiers_in_a_browser_and_nothing_where_there_are_none(tiers: list[TierSnapshot]) -> None:
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=3000", "--dump-dom"]
    with running(tiers=lambda: tiers, prompt_tokens=lambda: {"computed": 1234, "cached": 2, "disk": 5678}) as server:
        shown = subprocess.run([*command, server.url], capture_output=True, check=True, timeout=100, text=True).stdout
    assert ('<section id="below" hidden' in shown) == (not tiers)
    text = re.sub("<[^>]*>", "|", shown[shown.index('<tbody id="tiers"') : shown.index("</section>")])
    rows = re.findall(r"\|(\w+)\|+4.0 KiB of 9.8 KiB\|+3\|+([\d,]+)\|+([a-z ]+)\|", text)
    assert rows == [(one.name, "5,678" if one is tiers[-1] else "0", one.state) for one in tiers]
    assert text.count("cache-3:6379 is slow") == (len(tiers) > 0)
    assert ("2 were found in the pool, and 1,234 computed" in text) or not tiers
