"""Log-probabilities in their three forms."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kveik.engine.stream import ChoiceText, TokenEvent
from kveik.request.request import Request, SamplingParams, TokenLogprob
from kveik.server.answer_logprobs import Placement, Scored, chat_logprobs, completion_logprobs, prompt_logprobs
from kveik.server.call_limits import LOGPROB_FLOOR
from kveik.server.envelope import json_bytes
from kveik.text.detokenize import Detokenizer
from tests.server.fakes import SPECIAL, make_tokenizer

TOKENIZER = make_tokenizer()
HELLO, WORLD = (TOKENIZER.encode(text, add_special=False)[0] for text in ("Hello", " world"))
PEPPER = TOKENIZER.encode("\U0001f336", add_special=False)
START = TOKENIZER.encode("", add_special=True)[0]


@pytest.mark.parametrize("odd", [-math.inf, -1e9, math.nan])
def test_what_json_cannot_hold_stands_at_the_floor(odd: float) -> None:
    entry = TokenLogprob(HELLO, odd, ((WORLD, odd),))
    legacy = completion_logprobs([((HELLO, entry), 0)], TOKENIZER, top=1)
    written = json_bytes(
        [legacy, chat_logprobs([(HELLO, entry)], TOKENIZER, top=1), prompt_logprobs([entry], TOKENIZER, top=1)]
    )
    assert str(LOGPROB_FLOOR).encode() in written
    assert b"Inf" not in written
    assert b"NaN" not in written


def test_the_legacy_form_adds_the_chosen_token_where_it_is_not_among_the_likeliest() -> None:
    entry = TokenLogprob(HELLO, -5.0, ((WORLD, -0.1), (START, -0.2)))
    written = completion_logprobs([((HELLO, entry), 0)], TOKENIZER, top=1)
    assert written["top_logprobs"] == [{" world": -0.1, "Hello": -5.0}]


def test_without_a_number_of_likeliest_tokens_only_the_chosen_one_is_told() -> None:
    written = completion_logprobs([((HELLO, TokenLogprob(HELLO, -1.0)), 3)], TOKENIZER, top=0)
    assert written == {"tokens": ["Hello"], "token_logprobs": [-1.0], "top_logprobs": None, "text_offset": [3]}


@pytest.mark.parametrize(("skip", "text", "offsets"), [(True, "Hello", [0, 0, 5]), (False, "<s>Hello", [0, 3, 8])])
def test_offsets_point_into_the_text_as_it_is_shown(skip: bool, text: str, offsets: list[int]) -> None:
    placement = Placement(TOKENIZER, (START, HELLO), skip_special=skip, echo=text)
    scored = [(token, TokenLogprob(token, -1.0)) for token in (START, HELLO, WORLD)]
    placed = placement.take(scored, echoed=2, text=text + " world", last=True)
    assert [offset for _, offset in placed] == offsets


@pytest.mark.parametrize("spelled", ["é", "<|im_end|>Hello", "<s>", "Hello<|im_start|>", "a<end>b", "\U0001f336"])
@pytest.mark.parametrize("skip", [True, False])
def test_the_echo_of_a_text_keeps_the_special_tokens_that_it_spells(spelled: str, skip: bool) -> None:
    tokens = TOKENIZER.encode(spelled)
    placement = Placement(TOKENIZER, tokens, skip_special=skip, echo=spelled)
    placed = placement.take([(token, None) for token in tokens], echoed=len(tokens), text=spelled, last=True)
    offsets = [offset for _, offset in placed] + [len(spelled)]
    added = [spelled[start:end] for start, end in itertools.pairwise(offsets)]
    assert added[0] == ""
    shown = [text for text in added if text]
    assert "".join(shown) == spelled
    assert all(text in SPECIAL or not any(special in text for special in SPECIAL) for text in shown)


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(data=st.data())
def test_every_token_is_found_at_its_offset_streamed_or_not(data: st.DataObject) -> None:
    ids = st.integers(0, TOKENIZER.vocab_size - 1) | st.sampled_from([0xC3, 0xA9, *TOKENIZER.special_ids, HELLO, *PEPPER])
    prompt = tuple(data.draw(st.lists(ids, min_size=1, max_size=6)))
    made = data.draw(st.lists(ids, min_size=1, max_size=12))
    skip, echo = data.draw(st.booleans()), data.draw(st.booleans())
    stops = tuple(data.draw(st.lists(st.sampled_from(["Hello wo", "o w", "é", "world", "<s>H"]), max_size=2, unique=True)))
    sampling = SamplingParams(max_tokens=99, stop=stops, skip_special_tokens=skip)
    choice = ChoiceText(Request(id="r", prompt=prompt, sampling=sampling), 0, TOKENIZER)
    echoed = Detokenizer(TOKENIZER, skip_special=skip).push(prompt).text if echo else None
    news: list[tuple[list[Scored], int, str, bool]] = []
    if echo:
        news.append(([(token, None) for token in prompt], len(prompt), echoed or "", False))
    while made and not choice.finished:
        count = data.draw(st.integers(1, 3))
        now, made = made[:count], made[count:]
        events = [TokenEvent(0, (token,), (TokenLogprob(token, -1.0),)) for token in now]
        events[-1] = events[-1]._replace(finish_reason=None if made else "length")
        delta = choice.take(events)
        news.append(([(entry.token, entry) for entry in delta.logprobs], 0, delta.text, delta.finish_reason is not None))

    streaming, sent, placed = Placement(TOKENIZER, prompt, skip_special=skip, echo=echoed), "", []
    for scored, from_prompt, text, last in news:
        sent += text
        shown = streaming.take(scored, echoed=from_prompt, text=text, last=last)
        assert all(offset <= len(sent) for _, offset in shown)
        placed += shown
    everything = [entry for scored, *_ in news for entry in scored]
    at_once = Placement(TOKENIZER, prompt, skip_special=skip, echo=echoed)
    assert at_once.take(everything, echoed=len(prompt) if echo else 0, text=sent, last=True) == placed
    assert [entry for entry, _ in placed] == everything

    offsets = [offset for _, offset in placed] + [len(sent)]
    assert offsets[0] == 0
    assert offsets == sorted(offsets)
    for (token, _), (start, end) in zip(everything, itertools.pairwise(offsets), strict=True):
        own, added = TOKENIZER.token_bytes(token), sent[start:end].encode()
        if end == len(sent):
            continue  # here a stop string may have cut, or a character stayed unfinished
        if skip and token in TOKENIZER.special_ids:
            assert added == b""
        elif own.isascii() and "\ufffd" not in sent[start:end]:
            assert added == own


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
