"""Request bodies, from bytes to a checked shape: media type, size while reading, strict JSON, fields."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass
from email.message import Message
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, from_json
from starlette.datastructures import Headers
from starlette.requests import Request

from kveik.errors import BadValue, BodyStalled, BodyTooLarge, Overloaded, WrongMediaType
from kveik.server.call_limits import MAX_BODIES_AT_ONCE, RETRY_AFTER_SECONDS

Shape = TypeVar("Shape", bound=BaseModel)


@dataclass(slots=True)
class BodyBudget:
    """Bytes of all bodies being read. Bounded, so that uploads cannot fill memory."""

    body_bytes: int
    """Bytes of one body at most."""

    stall_seconds: float
    """Seconds that a body may take to arrive."""

    held_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        return self.body_bytes * MAX_BODIES_AT_ONCE


async def read_body(request: Request, shape: type[Shape], budget: BodyBudget) -> tuple[Shape, int]:
    """Returns the body as a `shape`, and its size in bytes.

    Raises:
        WrongMediaType, BodyTooLarge, BodyStalled, Overloaded: before or while reading.
        BadValue: not a JSON object of that shape; the message names the field and repeats nothing of the input.
        starlette.requests.ClientDisconnect: the client left before the body's end.
    """
    check_media_type(request.headers)
    body = await _read(request, budget)
    return parse(body, shape), len(body)


def check_media_type(headers: Headers) -> None:
    """Require JSON by name (application/json or anything +json), in UTF-8, not compressed. Raises WrongMediaType."""
    declared = Message()
    declared["content-type"] = headers.get("content-type", "")
    media_type = declared.get_content_type() if headers.get("content-type") else ""
    if media_type != "application/json" and not media_type.endswith("+json"):
        raise WrongMediaType
    if (declared.get_content_charset() or "utf-8") not in ("utf-8", "utf8", "us-ascii"):
        raise WrongMediaType
    if headers.get("content-encoding", "identity").lower() != "identity":
        raise WrongMediaType


async def _read(request: Request, budget: BodyBudget) -> bytes:
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > budget.body_bytes:
        raise BodyTooLarge(allowed=budget.body_bytes)
    body = bytearray()
    try:
        async with asyncio.timeout(budget.stall_seconds):
            # The header may be absent or wrong, so the limit applies to the bytes that arrive.
            async for part in request.stream():
                body += part
                budget.held_bytes += len(part)
                if len(body) > budget.body_bytes:
                    raise BodyTooLarge(allowed=budget.body_bytes)
                if budget.held_bytes > budget.total_bytes:
                    raise Overloaded(
                        "Too many large request bodies are being read. Try again later.", retry_after=RETRY_AFTER_SECONDS
                    )
    except TimeoutError as error:
        raise BodyStalled(seconds=budget.stall_seconds) from error
    finally:
        budget.held_bytes -= len(body)
    return bytes(body)


def parse(body: bytes, shape: type[Shape]) -> Shape:
    """Parse strict JSON (no NaN, no Infinity, UTF-8, nested at most 200 deep): an object of the given shape.

    Of duplicate keys the last one counts.
    """
    try:
        content = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise _not_json(body, shape, error) from error
    if not isinstance(content, dict):
        raise BadValue("The body must be a JSON object.")
    try:
        return shape.model_validate(content)
    except ValidationError as error:
        raise _field_error(error.errors(include_input=False, include_url=False, include_context=False)[0]) from error


def _not_json(body: bytes, shape: type[BaseModel], error: ValueError) -> BadValue:
    try:
        content = from_json(body)
    except ValueError:
        content = None
    if not isinstance(content, dict):
        return BadValue(f"The body is not valid JSON: {error}.")
    # Only a number is wrong: name its field, where the name is not the client's own.
    field = next((name for name in shape.model_fields if not _is_finite(content.get(name))), None)
    where = "A field" if field is None else f"`{field}`"
    return BadValue(f"{where} has NaN, Infinity or a number too large. Use finite numbers.", param=field)


def _is_finite(value: object) -> bool:
    if isinstance(value, dict | list):
        return all(map(_is_finite, value.values() if isinstance(value, dict) else value))
    return not isinstance(value, float) or math.isfinite(value)


def _field_error(details: ErrorDetails) -> BadValue:
    # Deeper locations may contain the client's keys; the field's own name is enough to find the fault.
    field = str(details["loc"][0]) if details["loc"] else None
    where = f"{field}: " if field else ""
    return BadValue(f"{where}{details['msg'].rstrip('.')}.", param=field)
