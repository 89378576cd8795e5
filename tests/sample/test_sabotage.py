"""The promises of the sampler see faults: with each fault below, the named promise is broken, and says what it says."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from kveik.sample import sampler as module
from kveik.sample.chance import uniforms
from kveik.sample.draw import draw
from kveik.sample.edits import LogitEdits
from kveik.sample.tiles import TiledLogits
from tests.sample.test_sampler import FOUR, assert_drawn_from, assert_quick_is_slow, frequencies


def chances_always_low(patch: pytest.MonkeyPatch) -> None:
    """Every draw takes the lower half of what may come."""
    patch.setattr(module, "uniforms", lambda *places: uniforms(*places) / 2)


def filters_left_out(patch: pytest.MonkeyPatch) -> None:
    """No top_p."""

    def draw_from_all(tiles, rows, filters, chances):
        filters.top_p[:] = 1.0
        return draw(tiles, rows, filters, chances)

    patch.setattr(module, "draw", draw_from_all)


def edits_left_out(patch: pytest.MonkeyPatch) -> None:
    """Bias and penalties are forgotten."""
    patch.setattr(LogitEdits, "apply", lambda self, flat, vocab, rows: np.empty(0, np.int64))


def worst_for_best(patch: pytest.MonkeyPatch) -> None:
    """The greedy token is the one before the best."""
    best = TiledLogits.best
    patch.setattr(TiledLogits, "best", lambda self, rows: np.maximum(best(self, rows) - 1, 0))


def shares_are_right() -> None:
    assert_drawn_from(frequencies(FOUR), [0.6, 0.3, 0.06, 0.04])


def top_p_ends_the_nucleus() -> None:
    assert_drawn_from(frequencies(FOUR, top_p=0.61), [2 / 3, 1 / 3, 0, 0])


def quick_is_slow() -> None:
    greedy, penalised = (
        {"temperature": 0.0},
        {"temperature": 0.0, "repetition_penalty": 1.3, "logit_bias": ((0, 5.0), (2, 3.0))},
    )
    for seed in range(10):
        assert_quick_is_slow([(greedy, 3, 1), (penalised, 4, 2)], (200, 190), 3.0, seed)


FAULTS: dict[Callable[[pytest.MonkeyPatch], None], tuple[Callable[[], None], str]] = {
    chances_always_low: (shares_are_right, "the shares are wrong"),
    filters_left_out: (top_p_ends_the_nucleus, "a token without a share was drawn"),
    edits_left_out: (quick_is_slow, "the slow sampler never chooses"),
    worst_for_best: (quick_is_slow, "the slow sampler never chooses"),
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_breaks_its_promise(fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    promise, words = FAULTS[fault]
    promise()
    fault(monkeypatch)
    with pytest.raises(AssertionError, match=words):
        promise()
