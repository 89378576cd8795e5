"""Whether a server is there, and the right one, is known before it is needed; and that it is back as well."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from kveik.clock import StepClock, SystemClock
from kveik.observe.events import TierState
from kveik.offload import mover as mover_module
from kveik.offload.availability import AVAILABLE, BreakerLimits
from kveik.offload.counts import RecordStored
from kveik.offload.mover import MovedTier, Mover
from kveik.offload.stores.record import Refusal
from kveik.offload.stores.remote import RemoteLimits, RemoteStore
from tests.offload.stores.odd_server import answering
from tests.offload.stores.records import key_of
from tests.offload.stores.redis_server import running
from tests.offload.test_mover import CODECS, FORMATS, block_of

NOBODY = "redis://127.0.0.1:1/0"
LIMITS = BreakerLimits(failures=2, pause=0.1, pause_max=0.2)


def until(reached: Callable[[], bool], between: Callable[[], object] = lambda: None) -> None:
    deadline = time.monotonic() + 30
    while not reached():
        assert time.monotonic() < deadline
        between()
        time.sleep(0.02)


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mover_module, "CHECK_SECONDS", 0.1)


@contextmanager
def started(url: str, timeout: float = 1.0) -> Iterator[tuple[Mover, RemoteStore, threading.Event]]:
    """A mover with threads, which nobody has asked anything."""
    woken = threading.Event()
    store = RemoteStore(url, FORMATS, RemoteLimits(timeout_seconds=timeout), SystemClock())
    mover = Mover([MovedTier(store=store, codecs=CODECS, limits=LIMITS)], SystemClock(), woken.set)
    began = time.monotonic()
    mover.start()
    assert time.monotonic() - began < 0.5
    yield mover, store, woken
    mover.close()


def test_a_server_that_is_not_there_is_noticed_before_anything_is_asked() -> None:
    with started(NOBODY) as (mover, store, woken):
        assert woken.wait(30)
        until(lambda: store.availability.reason)
        assert store.availability.reason == "does not answer (Connection refused)"
        until(lambda: mover.snapshot("remote").state is TierState.UNAVAILABLE)
        assert mover.unsettled
        # Who listens has nothing to do with it.
        assert mover.completions() == []
        # It is asked again, and left alone after so many failures.
        until(lambda: "reads stopped: 2 failures in a row" in mover.snapshot("remote").reason, mover.check_tiers)


@pytest.mark.parametrize(
    ("reply", "words"), [(b"HTTP/1.1 400 Bad Request\r\n\r\n", "answers nonsense"), (b"", "does not answer (")]
)
def test_another_kind_of_server_is_noticed_before_anything_is_asked(reply: bytes, words: str) -> None:
    with answering(reply) as url, started(url) as (_, store, _):
        until(lambda: store.availability.reason)
        assert store.availability.reason
        assert store.availability.reason.startswith(words)


def test_a_wrong_password_is_noticed_before_anything_is_asked_and_is_not_shown() -> None:
    with running("--requirepass", "s3cret") as server, started(server.url.replace("://", "://:wr0ng@")) as (_, store, _):
        until(lambda: store.availability.reason == "refuses (AuthenticationError)")


def test_a_server_that_may_only_be_read_is_noticed_before_anything_is_written() -> None:
    with running("--replicaof", "127.0.0.1 1") as server, started(server.url) as (mover, store, _):
        until(lambda: store.availability.reason == "refuses (ReadOnlyError)")
        # One that fails is enough to tell, and what is read goes on.
        until(lambda: mover.snapshot("remote").reason.startswith("writes stopped"), mover.check_tiers)
        assert mover.snapshot("remote").state is TierState.DEGRADED
        server.tell("REPLICAOF", "NO", "ONE")
        until(lambda: mover.snapshot("remote").state is TierState.AVAILABLE, mover.check_tiers)


def test_a_server_that_serves_is_available_and_is_left_as_it_was() -> None:
    with running() as server, started(server.url) as (mover, store, woken):
        assert woken.wait(30)
        until(lambda: not mover.busy)
        assert (store.availability, store.records, mover.unsettled) == (AVAILABLE, 0, False)
        until(lambda: server.tell("DBSIZE") == 0)


def test_a_server_that_is_back_is_known_to_be_without_anything_asked() -> None:
    with running() as server, started(server.url, timeout=0.2) as (mover, store, _):
        until(lambda: not mover.busy)
        server.kill()
        mover.store("remote", key_of(1), block_of(1))
        until(lambda: store.availability.reason, mover.check_tiers)
        until(lambda: mover.snapshot("remote").reason.count("stopped") == 2, mover.check_tiers)
        server.start()
        until(lambda: mover.snapshot("remote").state is TierState.AVAILABLE, mover.check_tiers)
        with server.frozen():
            mover.store("remote", key_of(2), block_of(2))
            until(lambda: store.availability.reason, mover.check_tiers)
        until(lambda: mover.snapshot("remote").state is TierState.AVAILABLE, mover.check_tiers)


def test_a_server_that_is_unavailable_is_asked_once_per_pause_and_only_where_nothing_waits() -> None:
    clock = StepClock()
    store = RemoteStore(NOBODY, FORMATS, RemoteLimits(), clock)
    asked: list[bool] = []
    serves = store.serves

    def counted(*, writing: bool) -> bool:
        asked.append(writing)
        return serves(writing=writing)

    store.serves = counted  # type: ignore[method-assign]  # its calls are counted
    mover = Mover([MovedTier(store=store, codecs=CODECS, limits=BreakerLimits(failures=100))], clock)
    mover.check_tiers()
    assert not mover.step()
    assert mover.store("remote", key_of(1), block_of(1)) is None
    mover.step()
    assert mover.completions() == [RecordStored("remote", key_of(1), Refusal.FAILED)]
    for _ in range(4):
        for _ in range(5):
            mover.check_tiers()
            mover.step()
        clock.advance(mover_module.CHECK_SECONDS)
    assert asked == [False, True] * 4
    assert mover.store("remote", key_of(2), block_of(2)) is None
    mover.check_tiers()
    while mover.step():
        pass
    assert asked == [False, True] * 4 + [False]
    clock.advance(mover_module.CHECK_SECONDS)
    mover.probe("remote", [key_of(2)], 1, float("inf"))
    mover.check_tiers()
    while mover.step():
        pass
    assert asked == [False, True] * 4 + [False, True]
    mover.close()


def test_a_stop_waits_for_a_silent_server_no_longer_than_for_its_answer() -> None:
    with running() as server, started(server.url, timeout=0.5) as (mover, store, _):
        until(lambda: not mover.busy)
        with server.frozen():
            mover.store("remote", key_of(2), block_of(2))
            until(lambda: store.availability.reason, mover.check_tiers)
            until(lambda: mover.busy, mover.check_tiers)
            began = time.monotonic()
            mover.close()
            assert time.monotonic() - began < 0.5 + 0.4
