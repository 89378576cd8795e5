"""The OpenAPI page tells the truth: whatever fits it, or just misses it, is answered as it says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode

from kveik.server.app import create_app
from kveik.server.openapi import BODIES
from tests.server.fakes import FakeDoor, Running, make_state, make_tokenizer, running

TOKENIZER = make_tokenizer()
DESCRIBED = create_app(make_state(FakeDoor(TOKENIZER), TOKENIZER)).openapi()
OPERATIONS = {found.ok().label: found.ok() for found in schemathesis.openapi.from_dict(DESCRIBED).get_all_operations()}

CASES = [(name, GenerationMode.POSITIVE) for name in OPERATIONS]
# Only a body can miss its schema: the one path parameter is any string.
CASES += [(name, GenerationMode.NEGATIVE) for name, operation in OPERATIONS.items() if operation.body]


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running() as started:
        yield started


@pytest.mark.parametrize(("name", "mode"), CASES)
def test_every_path_answers_as_its_description_says(name: str, mode: GenerationMode, server: Running) -> None:
    @settings(max_examples=25, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(case=OPERATIONS[name].as_strategy(generation_mode=mode))
    def check(case: Any) -> None:
        answer = case.call(base_url=server.url)
        assert answer.status_code < 500
        if answer.status_code >= 400:
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        # A body can fit the schema and still ask for too much, or for a model that is not there; all other checks apply.
        case.validate_response(answer, excluded_checks=[schemathesis.checks.positive_data_acceptance])

    check()


def numbers_in(described: object) -> Iterator[int]:
    """Of one field's schema, wherever they stand in it."""
    if isinstance(described, dict | list):
        for inner in described.values() if isinstance(described, dict) else described:
            yield from numbers_in(inner)
    elif isinstance(described, int):
        yield described


def test_limits_that_a_browser_would_round_are_told_in_words() -> None:
    told = set()
    for schema in DESCRIBED["components"]["schemas"].values():
        for name, field in schema.get("properties", {}).items():
            rounded = [number for number in numbers_in(field) if abs(number) >= 1 << 53]
            assert all(str(number) in field["description"] for number in rounded), name
            told |= {name} if rounded else set()
    assert told == {"seed"}


def test_the_page_asks_for_a_key_where_one_is_needed() -> None:
    keyed = create_app(make_state(FakeDoor(TOKENIZER), TOKENIZER, api_key=("k",))).openapi()
    assert keyed["components"]["securitySchemes"] == {"key": {"type": "http", "scheme": "bearer"}}
    assert keyed["security"] == [{"key": []}]
    assert keyed["paths"]["/health"]["get"]["security"] == []
    assert "security" not in keyed["paths"]["/v1/completions"]["post"]
    assert "security" not in DESCRIBED


def test_the_page_knows_every_body_and_path() -> None:
    assert {body.__name__ for body in BODIES} <= set(DESCRIBED["components"]["schemas"])
    assert {"/v1/completions", "/v1/chat/completions", "/v1/models", "/tokenize", "/health", "/metrics"} <= set(
        DESCRIBED["paths"]
    )
    fields = DESCRIBED["components"]["schemas"]["ChatBody"]["properties"]
    assert {"messages", "temperature", "top_k", "cache_salt", "chat_template_kwargs"} <= set(fields)
