"""Error answers, {'error': {message, type, param, code}}, and strict JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping

from starlette.responses import Response

from kveik.errors import BodyStalled, Broken, KveikError, Overloaded

INTERNAL = Broken("The server failed to answer this request. Send it again; the server's log has the cause.")
"""The answer to an unexpected exception."""

_SEPARATORS = (("\x85", "\\u0085"), ("\u2028", "\\u2028"), ("\u2029", "\\u2029"))

_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}


def envelope(error: KveikError) -> dict[str, object]:
    """Returns the error in OpenAI's format."""
    return shape(error.message, error.status, param=error.param, code=error.code)


def shape(message: str, status: int, *, param: str | None = None, code: str | None = None) -> dict[str, object]:
    """Returns the envelope from its parts. `type` follows from the HTTP status."""
    kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_response(error: KveikError) -> Response:
    """Returns the error as an HTTP answer, with Retry-After where a retry can succeed."""
    headers: dict[str, str] = {}
    if isinstance(error, Overloaded):
        headers["retry-after"] = str(max(1, error.retry_after))
    if isinstance(error, BodyStalled):
        # The rest of the body may still arrive, and would be parsed as the next request.
        headers["connection"] = "close"
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return json_response(envelope(error), status=error.status, headers=headers)


def json_response(content: object, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Returns strict JSON. A NaN or an infinity here is a fault of the server and raises ValueError."""
    return Response(json_bytes(content), status_code=status, headers=headers, media_type="application/json")


def json_bytes(content: object) -> bytes:
    """Returns compact UTF-8 on one line, also for readers that split lines at U+0085, U+2028 and U+2029.

    A lone surrogate, which UTF-8 cannot carry, becomes a question mark rather than an error.
    """
    text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    # json escapes all other line breaks; on text without these, a replace is a fast search.
    for separator, escaped in _SEPARATORS:
        text = text.replace(separator, escaped)
    return text.encode(errors="replace")
