"""docs/API.md promises what the code keeps."""

from __future__ import annotations

import typing
from pathlib import Path

import pytest
from openai.types import completion_create_params as completion_params
from openai.types.chat import completion_create_params as chat_params

from kveik.request import request
from kveik.server import call_limits, http_protocol
from kveik.server.app import create_app
from kveik.server.auth import OPEN_PATHS
from kveik.server.envelope import shape
from kveik.server.openapi import MEANINGS
from kveik.server.protocol import ChatBody, CompletionBody
from kveik.server.request_fields import ACCEPTED, RENAMED, UNSUPPORTED
from tests.server.fakes import FakeDoor, make_state, make_tokenizer

PAGE = (Path(__file__).parents[2] / "docs" / "API.md").read_text("utf-8")
TABLE = [line for line in PAGE.splitlines() if line.startswith("|")]


@pytest.mark.parametrize("field", sorted({*CompletionBody.model_fields, *ChatBody.model_fields} - {"stream_options"}))
def test_every_field_is_named(field: str) -> None:
    assert f"`{field}`" in PAGE


VLLM = """
add_generation_prompt add_special_tokens allowed_token_ids bad_words cache_salt chat_template chat_template_kwargs
continue_final_message documents ec_transfer_params echo frequency_penalty ignore_eos include_reasoning
include_stop_str_in_output kv_transfer_params length_penalty logit_bias logprob_token_ids logprobs max_completion_tokens
max_tokens media_io_kwargs messages min_p min_tokens mm_processor_kwargs model n parallel_tool_calls presence_penalty
priority prompt prompt_embeds prompt_logprobs reasoning_effort repetition_detection repetition_penalty request_id
response_format return_mm_kwargs return_prompt_text return_token_ids return_token_offsets return_tokens_as_token_ids
routed_experts_prompt_start seed session_id skip_special_tokens spaces_between_special_tokens stop stop_token_ids stream
stream_interval stream_options structured_outputs suffix temperature thinking_token_budget tool_choice tools top_k
top_logprobs top_p truncate_prompt_tokens truncation_side use_beam_search user vllm_xargs watermarking
"""
"""Fields of vLLM's CompletionRequest and ChatCompletionRequest at 002032ee."""

OPENAI = {
    *typing.get_type_hints(chat_params.CompletionCreateParamsBase),
    *typing.get_type_hints(completion_params.CompletionCreateParamsBase),
}


@pytest.mark.parametrize("field", sorted({*VLLM.split(), *OPENAI}))
def test_every_field_of_openais_and_vllms_schemas_is_decided_on_and_in_the_table(field: str) -> None:
    for body in (CompletionBody, ChatBody):
        known = {*body.model_fields, *ACCEPTED, *UNSUPPORTED, *RENAMED}
        assert field in known or (body is CompletionBody and field == "top_logprobs")
    assert f"`{field}`" in PAGE


@pytest.mark.parametrize("field", sorted({*ACCEPTED, *UNSUPPORTED, *RENAMED}))
def test_the_table_has_every_name_that_is_known(field: str) -> None:
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
