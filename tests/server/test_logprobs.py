"""Log-probabilities in their three forms."""

from __future__ import annotations

import math

import pytest

from kveik.request.request import TokenLogprob
from kveik.server.envelope import json_bytes
from kveik.server.limits import LOGPROB_FLOOR
from kveik.server.logprobs import chat_logprobs, completion_logprobs, prompt_logprobs
from tests.server.fakes import make_tokenizer

TOKENIZER = make_tokenizer()
HELLO, WORLD = (TOKENIZER.encode(text, add_special=False)[0] for text in ("Hello", " world"))
START = TOKENIZER.encode("", add_special=True)[0]


@pytest.mark.parametrize("odd", [-math.inf, -1e9, math.nan])
def test_what_json_cannot_hold_stands_at_the_floor(odd: float) -> None:
    entry = TokenLogprob(HELLO, odd, ((WORLD, odd),))
    legacy, _ = completion_logprobs([(HELLO, entry)], TOKENIZER, top=1, offset=0, skip_special=True)
    written = json_bytes(
        [legacy, chat_logprobs([(HELLO, entry)], TOKENIZER, top=1), prompt_logprobs([entry], TOKENIZER, top=1)]
    )
    assert str(LOGPROB_FLOOR).encode() in written
    assert b"Inf" not in written
    assert b"NaN" not in written


def test_the_legacy_form_adds_the_chosen_token_where_it_is_not_among_the_likeliest() -> None:
    entry = TokenLogprob(HELLO, -5.0, ((WORLD, -0.1), (START, -0.2)))
    written, _ = completion_logprobs([(HELLO, entry)], TOKENIZER, top=1, offset=0, skip_special=True)
    assert written["top_logprobs"] == [{" world": -0.1, "Hello": -5.0}]


def test_without_a_number_of_likeliest_tokens_only_the_chosen_one_is_told() -> None:
    written, _ = completion_logprobs([(HELLO, TokenLogprob(HELLO, -1.0))], TOKENIZER, top=0, offset=3, skip_special=True)
    assert written == {"tokens": ["Hello"], "token_logprobs": [-1.0], "top_logprobs": None, "text_offset": [3]}


@pytest.mark.parametrize(("skip", "offsets", "end"), [(True, [0, 0, 5], 11), (False, [0, 3, 8], 14)])
def test_offsets_point_into_the_text_as_it_is_shown(skip: bool, offsets: list[int], end: int) -> None:
    scored = [(START, None), (HELLO, TokenLogprob(HELLO, -1.0)), (WORLD, TokenLogprob(WORLD, -2.0))]
    written, after = completion_logprobs(scored, TOKENIZER, top=0, offset=0, skip_special=skip)
    assert written["text_offset"] == offsets
    assert after == end
    assert written["token_logprobs"] == [None, -1.0, -2.0]


def test_the_chat_form_tells_bytes_also_of_half_characters() -> None:
    first, second = TOKENIZER.encode("é", add_special=False)
    scored = [(token, TokenLogprob(token, -1.0, ((second, -0.5),))) for token in (first, second)]
    entries = chat_logprobs(scored, TOKENIZER, top=1)
    assert [entry["bytes"] for entry in entries] == [[0xC3], [0xA9]]
    assert entries[0]["token"] == "\ufffd"
    assert entries[0]["top_logprobs"] == [{"token": "\ufffd", "logprob": -0.5, "bytes": [0xA9]}]


def test_the_prompt_form_ranks_what_it_knows() -> None:
    listed = TokenLogprob(WORLD, -0.2, ((HELLO, -0.1), (WORLD, -0.2)))
    unlisted = TokenLogprob(START, -9.0, ((HELLO, -0.1),))
    nothing, known, unknown = prompt_logprobs([None, listed, unlisted], TOKENIZER, top=2)
    assert nothing is None
    assert known is not None
    assert known[str(WORLD)] == {"logprob": -0.2, "rank": 2, "decoded_token": " world"}
    assert unknown is not None
    assert unknown[str(START)] == {"logprob": -9.0, "rank": None, "decoded_token": "<s>"}
