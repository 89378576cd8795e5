"""JSON that leaves the server is strict."""

from __future__ import annotations

import json
import math

import pytest

from kveik.server.envelope import json_bytes


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_a_number_that_json_has_not_is_our_fault_and_never_leaves(odd: float) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        json_bytes({"logprob": odd})


def test_text_leaves_as_utf8_and_half_a_pair_harms_nobody() -> None:
    assert json.loads(json_bytes({"text": "é\U0001f336\u2028\n"})) == {"text": "é\U0001f336\u2028\n"}
    assert json_bytes("é") == b'"\xc3\xa9"'
    assert json.loads(json_bytes("a\ud800b")) == "a?b"
    assert b"\n" not in json_bytes({"text": "two\nlines"})
