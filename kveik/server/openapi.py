"""OpenAPI schema of bodies that the routes read themselves, and of errors that every path can return."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from kveik.server.auth import OPEN_PATHS
from kveik.server.protocol import ChatBody, CompletionBody, DetokenizeBody, ErrorAnswer, TokenizeBody

BODIES: tuple[type[BaseModel], ...] = (CompletionBody, ChatBody, TokenizeBody, DetokenizeBody)
_REFERENCE = "#/components/schemas/{model}"
MEANINGS = {
    400: "The request cannot be served; the message says what would work.",
    401: "No API key, or a wrong one.",
    404: "The path or the model does not exist.",
    405: "The path exists, the method does not.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    415: "The body is not declared as JSON.",
    429: "The queue is full; Retry-After says when to try again.",
    431: "The request line and headers are too large.",
    500: "The server failed.",
    503: "The server is stopping; Retry-After says when to try again.",
}
"""Statuses of errors, with their meaning."""

Responses = dict[int | str, dict[str, Any]]


def errors(*statuses: int) -> Responses:
    """Returns the `responses` of a route: these statuses, each with the envelope."""
    return {status: {"model": ErrorAnswer, "description": MEANINGS[status]} for status in statuses}


GENERATION_ERRORS = errors(400, 401, 404, 408, 413, 415, 429, 500, 503)
BODY_ERRORS = errors(400, 401, 404, 408, 413, 415, 429, 500)


def streamed(answer: type[BaseModel]) -> Responses:
    """Returns the `responses` of an answer that is whole or, on demand, a stream of events."""
    event_stream = {"text/event-stream": {"schema": {"type": "string", "description": "Chunks, then data: [DONE]"}}}
    return {200: {"model": answer, "content": event_stream, "description": "The answer, or its stream"}}


def takes(body: type[BaseModel]) -> dict[str, Any]:
    """Returns the `openapi_extra` of a route that reads such a body."""
    reference = {"$ref": _REFERENCE.format(model=body.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": reference}}}}


def _ask_for_keys(schema: dict[str, Any]) -> None:
    """Declare the API key in the schema, and the paths that need none."""
    schema["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    schema["security"] = [{"key": []}]
    for path in OPEN_PATHS & schema["paths"].keys():
        for operation in schema["paths"][path].values():
            operation["security"] = []


class App(FastAPI):
    """FastAPI with the bodies that the routes read by themselves in its schema."""

    def openapi(self) -> dict[str, Any]:
        """Returns the schema, created once."""
        if self.openapi_schema is None:
            schema = super().openapi()
            _, definitions = models_json_schema([(body, "validation") for body in BODIES], ref_template=_REFERENCE)
            schema.setdefault("components", {}).setdefault("schemas", {}).update(definitions["$defs"])
            if self.state.server.config.api_key:
                _ask_for_keys(schema)
            self.openapi_schema = schema
        return self.openapi_schema
