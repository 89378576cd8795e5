"""How far a choice has come: a length and a computed count, and nothing that could disagree with them."""

from __future__ import annotations

import numpy as np

from kveik.request.request import Request, SamplingParams
from kveik.request.sequence import Sequence, Status


def started(prompt: tuple[int, ...] = (5, 6, 7)) -> Sequence:
    request = Request(id="r", prompt=prompt, sampling=SamplingParams(max_tokens=4))
    return Sequence.start(id=1, request=request, choice=0, seed=9, arrived=2.5)


class Ran:
    """Progress of one running sequence."""

    def __init__(self, computed: int) -> None:
        self.computed = np.array([computed], dtype=np.int64)


def ran(sequence: Sequence, computed: int) -> None:
    sequence.batch, sequence.row = Ran(computed), 0


def test_a_new_sequence_waits_with_its_whole_prompt_to_compute() -> None:
    sequence = started()
    assert sequence.status is Status.WAITING
    assert (sequence.length, sequence.computed, sequence.pending) == (3, 0, 3)
    assert sequence.output == []
    assert not sequence.decoding


def test_a_sequence_decodes_when_only_its_newest_token_is_pending() -> None:
    sequence = started()
    ran(sequence, 2)
    assert sequence.pending == 1
    assert not sequence.decoding, "the last token of a prompt is no decode"
    ran(sequence, 3)
    sequence.tokens.append(8)
    assert sequence.decoding
    assert (sequence.output, sequence.output_count) == ([8], 1)


def test_after_a_preemption_all_is_pending_again_and_nothing_is_lost() -> None:
    sequence = started()
    ran(sequence, 3)
    sequence.tokens.append(8)
    sequence.batch = sequence.row = None
    assert (sequence.pending, sequence.output) == (4, [8])
    assert not sequence.decoding


def test_choices_of_one_request_do_not_share_their_tokens() -> None:
    first, second = started(), started()
    first.tokens.append(8)
    assert second.tokens == [5, 6, 7]
    assert first.request.prompt == (5, 6, 7)
