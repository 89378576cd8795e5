"""docs/API.md promises what the code keeps."""

from __future__ import annotations

from pathlib import Path

import pytest

from kveik.request import request
from kveik.server import call_limits, http_protocol
from kveik.server.app import create_app
from kveik.server.auth import OPEN_PATHS
from kveik.server.envelope import shape
from kveik.server.openapi import MEANINGS
from kveik.server.protocol import ChatBody, CompletionBody
from tests.server.fakes import FakeDoor, make_state, make_tokenizer

PAGE = (Path(__file__).parents[2] / "docs" / "API.md").read_text("utf-8")
TABLE = [line for line in PAGE.splitlines() if line.startswith("|")]


@pytest.mark.parametrize("field", sorted({*CompletionBody.model_fields, *ChatBody.model_fields} - {"stream_options"}))
def test_every_field_is_named(field: str) -> None:
    assert f"`{field}`" in PAGE


def test_every_path_is_named_with_whether_it_needs_a_key() -> None:
    tokenizer = make_tokenizer()
    paths = create_app(make_state(FakeDoor(tokenizer), tokenizer)).openapi()["paths"]
    for path in {*paths, *OPEN_PATHS}:
        (row,) = (line for line in TABLE if f" {path.removesuffix(':path')}`" in line)
        assert row.endswith("| no |" if path in OPEN_PATHS else "| yes |"), path


@pytest.mark.parametrize("status", sorted(MEANINGS))
def test_every_status_has_its_type(status: int) -> None:
    error = shape("", status)["error"]
    assert isinstance(error, dict)
    assert any(line.startswith(f"| {status} | `{error['type']}` |") for line in TABLE)


@pytest.mark.parametrize(
    ("row", "cap"),
    [
        ("bytes of a request line and its headers", http_protocol.MAX_HEAD_BYTES),
        ("prompts", call_limits.MAX_PROMPTS),
        ("`n`", request.MAX_CHOICES),
        ("choices: prompts times `n`", call_limits.MAX_CHOICES_PER_CALL),
        ("messages", call_limits.MAX_MESSAGES),
        ("tools", call_limits.MAX_TOOLS),
        ("stop strings", f"{request.MAX_STOPS}, of {request.MAX_STOP_CHARACTERS} characters each"),
        ("`stop_token_ids`", call_limits.MAX_STOP_TOKEN_IDS),
        ("`logit_bias` entries", request.MAX_LOGIT_BIAS),
        ("`logprobs`, `top_logprobs`, `prompt_logprobs`", request.MAX_LOGPROBS),
        ("log-probabilities of prompt tokens", f"{call_limits.MAX_PROMPT_LOGPROBS}: tokens times (likeliest + 1)"),
        ("characters of a `cache_salt`", request.MAX_SALT_CHARACTERS),
        ("tokens from `/tokenize`", f"{call_limits.MAX_TOKENIZE_TOKENS}, or the context where it is longer"),
        ("ids for `/detokenize`", call_limits.MAX_DETOKENIZE_TOKENS),
    ],
)
def test_every_cap_is_told_with_its_number(row: str, cap: object) -> None:
    assert f"| {row} | {cap} |" in TABLE
