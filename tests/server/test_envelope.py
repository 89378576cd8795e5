"""JSON that leaves the server is strict."""

from __future__ import annotations

import json
import math

import pytest

from kveik.errors import BodyTooLarge, ModelNotFound, NotAuthorized, Overloaded, PromptTooLong
from kveik.server.auth import Tenants
from kveik.server.envelope import envelope, json_bytes


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_a_number_that_json_has_not_is_our_fault_and_never_leaves(odd: float) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        json_bytes({"logprob": odd})


def test_text_leaves_as_utf8_and_half_a_pair_harms_nobody() -> None:
    assert json.loads(json_bytes({"text": "é\U0001f336\u2028\n"})) == {"text": "é\U0001f336\u2028\n"}
    assert json_bytes("é") == b'"\xc3\xa9"'
    assert json.loads(json_bytes("a\ud800b")) == "a?b"
    assert b"\n" not in json_bytes({"text": "two\nlines"})


def test_no_reader_finds_a_line_break_inside_json() -> None:
    text = "a\u2028b\u2029c\x85d\r\n\x0b\x0c\x1c\x1d\x1e"
    written = json_bytes({"text": text}).decode()
    assert len(written.splitlines()) == 1
    assert json.loads(written) == {"text": text}


def test_errors_have_the_words_that_clients_look_for() -> None:
    # litellm 1.110 and langchain-openai 1.7 look for these before they shorten a prompt or fall back to another model.
    for error in (PromptTooLong(tokens=600, allowed=512), PromptTooLong(tokens=600, allowed=512, wanted=7)):
        assert "This model's maximum context length is 512 tokens. However, " in error.message
        assert "600" in error.message
        assert "context_length_exceeded" in str(envelope(error))
    # A rate limit is recognised by its type; a body too large must not be taken for one and sent again.
    assert "rate_limit" in str(envelope(Overloaded("full")))
    assert "Request too large" not in BodyTooLarge(allowed=5).message
    assert "does not exist" in ModelNotFound(("small",)).message
    with pytest.raises(NotAuthorized, match="Incorrect API key provided"):
        Tenants(("a",), b"s" * 32).tenant(b"Bearer b")
