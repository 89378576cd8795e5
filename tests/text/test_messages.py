"""Messages reach templates in one shape."""

from __future__ import annotations

import json
import re

import pytest

from kveik.errors import BadValue
from kveik.text.messages import ToolArguments, normalize_messages


def call(arguments: object) -> dict[str, object]:
    function = {"name": "add", "arguments": arguments}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": function}]}


def arguments_of(message: dict[str, object]) -> object:
    return message["tool_calls"][0]["function"]["arguments"]  # type: ignore[index]  # the shape is what is tested


@pytest.mark.parametrize("content", [None, "", [], "absent"])
def test_content_null_or_absent_or_empty_is_an_empty_text(content: object) -> None:
    message = {"role": "assistant"} if content == "absent" else {"role": "assistant", "content": content}
    assert normalize_messages([message]) == [{"role": "assistant", "content": ""}]


def test_text_parts_become_one_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert normalize_messages([{"role": "user", "content": parts}])[0]["content"] == "a\nb"


@pytest.mark.parametrize("calls", [[], None])
def test_empty_tool_calls_are_as_if_absent(calls: object) -> None:
    assert "tool_calls" not in normalize_messages([{"role": "assistant", "content": "x", "tool_calls": calls}])[0]


@pytest.mark.parametrize(
    ("given", "read"), [('{"a":3}', {"a": 3}), ("", {}), ("null", {}), (None, {}), ({"a": [1]}, {"a": [1]}), (" {} ", {})]
)
def test_arguments_reach_the_template_as_a_mapping(given: object, read: dict[str, object]) -> None:
    arguments = arguments_of(normalize_messages([call(given)])[0])
    assert arguments == read
    assert json.loads(str(arguments)) == read


def test_arguments_print_as_the_text_that_came() -> None:
    arguments = arguments_of(normalize_messages([call('{"a":3,  "b":"é"}')])[0])
    assert f"{arguments}" == '{"a":3,  "b":"é"}'
    assert isinstance(arguments, ToolArguments)
    assert "x" + arguments + "y" == 'x{"a":3,  "b":"é"}y'


@pytest.mark.parametrize("given", ["{", '{"a":', "[1]", "3", '"text"', '{"a": NaN}', "[" * 100_000, 7, ["a"]])
def test_arguments_that_are_no_object_are_refused_naming_the_field(given: object) -> None:
    field = "messages[1].tool_calls[0].function.arguments"
    with pytest.raises(BadValue, match=re.escape(field)) as refused:
        normalize_messages([{"role": "user", "content": "x"}, call(given)])
    assert refused.value.param == field
    assert len(refused.value.message) < 200


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ("text", "messages"),
        (None, "messages"),
        ({"role": "user"}, "messages"),
        (["text"], "messages[0]"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": 3, "content": "x"}], "messages[0].role"),
        ([{"role": "", "content": "x"}], "messages[0].role"),
        ([{"role": "user", "content": 3}], "messages[0].content"),
        ([{"role": "user", "content": {"a": 1}}], "messages[0].content"),
        ([{"role": "user", "content": [3]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "assistant", "tool_calls": "x"}], "messages[0].tool_calls"),
        ([{"role": "assistant", "tool_calls": ["x"]}], "messages[0].tool_calls[0].function"),
        ([{"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]}], "messages[0].tool_calls[0].function.name"),
    ],
)
def test_messages_that_no_template_can_use_are_refused_naming_the_field(messages: object, field: str) -> None:
    with pytest.raises(BadValue, match=re.escape(field)) as refused:
        normalize_messages(messages)
    assert refused.value.param == field


def test_normalising_twice_changes_nothing_more() -> None:
    once = normalize_messages([call('{"a": 1}'), {"role": "tool", "content": None, "tool_call_id": "1", "name": None}])
    assert normalize_messages(once) == once
    assert str(arguments_of(normalize_messages(once)[0])) == '{"a": 1}'
    assert once[1] == {"role": "tool", "content": "", "tool_call_id": "1"}


def test_the_callers_messages_are_left_alone() -> None:
    message = call('{"a": 1}')
    before = json.dumps(message)
    normalize_messages([message])
    assert json.dumps(message) == before
