"""The promises of the mover see faults: with each fault below, the named promise is broken, and says what it says."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kveik.offload.block_load import BlockLoad
from kveik.offload.mover import Mover
from kveik.offload.stores.encode import Raw
from kveik.offload.writer import Staging
from tests.offload.test_loading import test_nothing_is_written_after_a_cancel_whenever_it_comes as cancels
from tests.offload.test_mover import test_a_thousand_operations_on_a_store_that_does_everything_wrong as thousand
from tests.offload.test_mover import test_blocks_come_back_as_they_were_stored as come_back


def cancel_not_heard(patch: pytest.MonkeyPatch) -> None:
    """A load that was called off is written all the same."""
    patch.setattr(BlockLoad, "call_off", lambda self: set())


def answers_told_twice(patch: pytest.MonkeyPatch) -> None:
    completions = Mover.completions
    patch.setattr(Mover, "completions", lambda self: [one for one in completions(self) for _ in range(2)])


def buffers_lost(patch: pytest.MonkeyPatch) -> None:
    """A tenth of the buffers in front of a tier is not given back."""
    free, count = Staging.free, [0]

    def leak(self: Staging, number: int) -> None:
        count[0] += 1
        if count[0] % 40:
            free(self, number)

    patch.setattr(Staging, "free", leak)


def block_cut_short(patch: pytest.MonkeyPatch) -> None:
    """The last bytes of a block are not written."""

    def decode(self: Raw, payload: memoryview, block: memoryview) -> None:
        block[:-8] = payload[:-8]

    patch.setattr(Raw, "decode", decode)


FAULTS: dict[Callable[[pytest.MonkeyPatch], None], tuple[Callable[[], None], str]] = {
    cancel_not_heard: (cancels, "something was written after the cancel"),
    answers_told_twice: (thousand, "an answer is missing or told twice"),
    buffers_lost: (thousand, "a buffer is lost"),
    block_cut_short: (come_back, "a block differs from what was stored"),
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_breaks_its_promise(fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    promise, words = FAULTS[fault]
    fault(monkeypatch)
    with pytest.raises(AssertionError) as failure:
        promise()
    # A failure over many seeds says the seed, and comes from the promise's own.
    assert words in str(failure.value.__cause__ or failure.value)
