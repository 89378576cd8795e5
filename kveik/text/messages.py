"""Chat messages as clients send them, brought into the one shape that templates can rely on. Independent of templates."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from kveik.errors import BadValue


class ToolArguments(dict[str, object]):
    """The arguments of a tool call: a mapping for templates that walk it, its JSON text for those that print it.

    Clients send JSON text. Templates differ: some iterate over a mapping, some apply `tojson`, some print what they get, some
    add it to a string; all of these give valid JSON here.
    """

    def __init__(self, arguments: Mapping[str, object], text: str) -> None:
        super().__init__(arguments)
        # An underscore, so that the sandbox hides it: a tool may have an argument called `text`.
        self._text = text

    def __str__(self) -> str:
        return self._text

    def __add__(self, other: str) -> str:
        return self._text + other

    def __radd__(self, other: str) -> str:
        return other + self._text


def normalize_messages(messages: object) -> list[dict[str, object]]:
    """The messages with plain text content, tool arguments as mappings, and no null fields.

    Content null or absent becomes '', a list of text parts one text (joined by line breaks), an empty or null `tool_calls` is
    left out, arguments '' and 'null' become {}. Raises `BadValue`, naming the field, for everything that no template can use.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise BadValue("messages must be a list of messages.", param="messages")
    return [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _message(message: object, field: str) -> dict[str, object]:
    if not isinstance(message, Mapping):
        raise BadValue(f"{field} must be an object with a role and content.", param=field)
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise BadValue(f"{field}.role must be a string such as system, user, assistant or tool.", param=f"{field}.role")
    normal = {str(key): value for key, value in message.items() if value is not None}
    normal["content"] = _content(message.get("content"), f"{field}.content")
    if "tool_calls" in normal:
        calls = _tool_calls(normal.pop("tool_calls"), f"{field}.tool_calls")
        if calls:
            normal["tool_calls"] = calls
    return normal


def _content(content: object, field: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadValue(f"{field} must be a string or a list of text parts.", param=field)
    return "\n".join(_part(part, f"{field}[{index}]") for index, part in enumerate(content))


def _part(part: object, field: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise BadValue(f"{field} must be an object with a type.", param=field)
    if part.get("type") != "text":
        raise BadValue(
            f"{field}.type must be 'text'; other parts (images, audio, files) are not supported.", param=f"{field}.type"
        )
    text = part.get("text")
    if not isinstance(text, str):
        raise BadValue(f"{field}.text must be a string.", param=f"{field}.text")
    return text


def _tool_calls(calls: object, field: str) -> list[dict[str, object]]:
    if not isinstance(calls, list):
        raise BadValue(f"{field} must be a list of tool calls.", param=field)
    return [_tool_call(call, f"{field}[{index}]") for index, call in enumerate(calls)]


def _tool_call(call: object, field: str) -> dict[str, object]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        raise BadValue(f"{field}.function must be an object with a name and arguments.", param=f"{field}.function")
    if not isinstance(function.get("name"), str):
        raise BadValue(f"{field}.function.name must be a string.", param=f"{field}.function.name")
    arguments = _arguments(function.get("arguments"), f"{field}.function.arguments")
    return {**call, "function": {**function, "arguments": arguments}}


def _arguments(arguments: object, field: str) -> ToolArguments:
    if isinstance(arguments, ToolArguments):
        return arguments
    if isinstance(arguments, Mapping):
        return ToolArguments(arguments, json.dumps(arguments, ensure_ascii=False))
    if arguments is None or (isinstance(arguments, str) and arguments.strip() in ("", "null")):
        return ToolArguments({}, "{}")
    if not isinstance(arguments, str):
        raise BadValue(f"{field} must be a JSON object, written as a string.", param=field)
    try:
        # RecursionError: JSON that is nested deeper than Python's stack.
        read = json.loads(arguments, parse_constant=_no_number)
    except (ValueError, RecursionError):
        raise BadValue(f"{field} is not valid JSON.", param=field) from None
    if not isinstance(read, dict):
        raise BadValue(f"{field} must be a JSON object.", param=field)
    return ToolArguments(read, arguments)


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is not JSON")
