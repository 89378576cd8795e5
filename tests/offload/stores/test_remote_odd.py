"""Servers that answer what no server should, or too late: a reason that can be seen, a breaker that stops, true counts."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from kveik.clock import StepClock
from kveik.offload.availability import BreakerLimits
from kveik.offload.mover import MovedTier, Mover
from kveik.offload.stores.record import Miss, RecordKey, Refusal
from kveik.offload.stores.remote import CHORES_SECONDS, RemoteLimits, RemoteStore
from kveik.offload.stores.written import SETTLE_SECONDS, Written
from tests.offload.stores.odd_server import answering
from tests.offload.stores.records import FORMATS, key_of, pairs, payloads, read
from tests.offload.stores.redis_server import Server, running
from tests.offload.test_mover import CODECS
from tests.offload.test_mover import FORMATS as MOVED
from tests.seeds import over_seeds

REPLIES = {
    "no length": b"$abc\r\n",
    "no number": b":abc\r\n",
    "no count": b"*-x\r\n",
    "deep": b"*1\r\n" * 5000,
    "map": b"%1\r\n*1\r\n+a\r\n+b\r\n",
    "push": b">2\r\n+a\r\n+b\r\n",
    "always OK": b"+OK\r\n",
    "always a number": b":7\r\n",
    "always an error": b"-ERR no\r\n",
    "web": b"HTTP/1.1 400 Bad Request\r\n\r\n",
    "hangs up": b"",
}

BRIEF = RemoteLimits(timeout_seconds=0.1)


@pytest.mark.parametrize("kind", REPLIES)
def test_whatever_a_server_answers_nothing_is_raised_and_the_trouble_is_told(kind: str) -> None:
    # As many answers as are asked for: two to greet, and one to each command.
    with answering(REPLIES[kind] * 20) as url:
        store = RemoteStore(url, FORMATS, BRIEF, StepClock())
        keys = [key_of(number) for number in range(3)]
        asked: dict[str, Callable[[], object]] = {
            "probe": lambda: store.probe_many(keys, 0.0),
            "put": lambda: store.put_many(pairs(range(3))),
            "get": lambda: read(store, range(3)),
            "delete": lambda: store.delete_many(keys),
            "clear": store.clear,
            "contents": lambda: list(store.contents()),
        }
        reasons = set()
        for ask in asked.values():
            ask()
            reasons.add(store.availability.reason)
        assert reasons - {""}
        assert store.probe_many(keys, 0.0) in ([None] * 3, [False] * 3)
        assert all(miss in (Miss.FAILED, Miss.TORN) for miss in read(store, range(3)))
        stored = store.put_many(pairs(range(3)))
        assert kind == "always OK" or stored == [Refusal.FAILED] * 3
        store.check()
        store.close()


def test_probes_that_fail_stop_the_reads_and_go_on_doing_so() -> None:
    clock = StepClock()
    store = RemoteStore("redis://127.0.0.1:1/0", MOVED, BRIEF, clock)
    mover = Mover([MovedTier(store=store, codecs=CODECS, limits=BreakerLimits(failures=2))], clock, lambda: None)

    def probe() -> bool:
        """Reads are stopped after it."""
        mover.probe("remote", [key_of(1)], 1, float("inf"))
        while mover.step():
            pass
        return "reads stopped: 2 failures in a row" in mover.snapshot("remote").reason

    assert [probe(), probe()] == [False, True]
    clock.advance(1.5)
    assert probe()
    assert mover.snapshot("remote").counts.errors == 0
    mover.close()


@pytest.mark.parametrize("url", ["redis://:wr0ng@127.0.0.1:{port}/0", "redis://127.0.0.1:{port}/0"], ids=["wrong", "missing"])
def test_a_password_that_is_wrong_or_missing_makes_it_unavailable_and_nothing_counts_as_written(url: str) -> None:
    with running("--requirepass", "s3cret") as server:
        store = RemoteStore(url.format(port=server.port), FORMATS, RemoteLimits(timeout_seconds=30.0), StepClock())
        assert store.put_many(pairs([1, 2])) == [Refusal.FAILED] * 2
        assert store.availability.reason == "refuses (AuthenticationError)"
        assert store.records == 0
        store.close()


def test_a_database_that_the_server_does_not_have_is_unavailable() -> None:
    with running() as server:
        store = RemoteStore(server.url.replace("/0", "/99"), FORMATS, RemoteLimits(timeout_seconds=30.0), StepClock())
        assert store.put_many(pairs([1])) == [Refusal.FAILED]
        assert store.availability.reason == "refuses (ResponseError)"
        store.close()


def stored_by(server: Server) -> int:
    return int(server.tell("DBSIZE"))


def test_what_was_written_without_an_answer_counts_until_it_is_removed() -> None:
    clock, size = StepClock(), FORMATS[1].record_bytes
    with running() as server:
        store = RemoteStore(server.url, FORMATS, RemoteLimits(capacity_bytes=6 * size, timeout_seconds=0.3), clock)
        assert store.put_many(pairs([0], 1)) == [None]
        for turn in range(3):
            assert store.probe_many([key_of(0, 1)], clock.now()) == [True]
            with server.frozen():
                refusals = store.put_many(pairs(range(10 * turn + 10, 10 * turn + 14), 1))
            # The first four may be there, so one more fits, and then none.
            failed = [4, 1, 0][turn]
            assert refusals == [Refusal.FAILED] * failed + [Refusal.FULL] * (4 - failed)
            assert (store.records, store.bytes_used) == ([5, 6, 6][turn], [5, 6, 6][turn] * size)
        assert stored_by(server) <= 6
        store.probe_many([key_of(0, 1)], clock.now())
        clock.advance(SETTLE_SECONDS + CHORES_SECONDS)
        assert store.put_many(pairs([50], 1)) == [Refusal.FULL]
        store.probe_many([key_of(0, 1)], clock.now())
        clock.advance(CHORES_SECONDS)
        assert store.probe_many([key_of(0, 1)], clock.now()) == [True]
        assert (store.records, stored_by(server)) == (1, 1)
        assert store.put_many(pairs([50], 1)) == [None]
        store.close()


def test_what_nobody_was_told_to_store_does_not_count() -> None:
    store = RemoteStore("redis://127.0.0.1:1/0", FORMATS, BRIEF, StepClock())
    assert store.put_many(pairs([1])) == [Refusal.FAILED]
    assert (store.records, store.bytes_used) == (0, 0)
    store.close()


def test_what_was_to_be_deleted_and_was_not_is_deleted_later() -> None:
    clock = StepClock()
    with running() as server:
        store = RemoteStore(server.url, FORMATS, RemoteLimits(timeout_seconds=0.3), clock)
        assert store.put_many(pairs([1, 2])) == [None, None]
        server.kill()
        store.delete_many([key_of(1)])
        assert store.records == 2
        server.start()
        other = RemoteStore(server.url, FORMATS, RemoteLimits(timeout_seconds=30.0), clock)
        other.put_many(pairs([1, 2]))
        for _ in range(3):
            store.probe_many([key_of(3)], clock.now())
            clock.advance(SETTLE_SECONDS + CHORES_SECONDS)
        assert [key for key, _ in store.contents()] == [key_of(2)]
        assert read(other, [1, 2]) == [Miss.ABSENT, *payloads([2])]
        other.close()
        store.close()


def test_what_the_server_has_evicted_stops_to_count_as_other_things_are_asked() -> None:
    clock = StepClock()
    with running("--maxmemory", "3mb", "--maxmemory-policy", "allkeys-lru") as server:
        store = RemoteStore(server.url, FORMATS, RemoteLimits(timeout_seconds=30.0), clock)
        for start in range(0, 400, 20):
            assert store.put_many(pairs(range(start, start + 20), 1)) == [None] * 20
        assert stored_by(server) < 200
        for _ in range(8):
            clock.advance(CHORES_SECONDS)
            store.probe_many([key_of(1000, 1)], clock.now())
        assert store.records == stored_by(server)
        store.check()
        store.close()


def test_what_a_read_does_not_find_stops_to_count_at_once() -> None:
    with running() as server:
        store = RemoteStore(server.url, FORMATS, RemoteLimits(timeout_seconds=30.0), StepClock())
        store.put_many(pairs([1, 2]))
        server.tell("FLUSHALL")
        assert read(store, [1]) == [Miss.ABSENT]
        assert [key for key, _ in store.contents()] == [key_of(2)]
        store.close()


@over_seeds(20)
def test_books_of_what_was_written_agree_with_a_list(seed: int) -> None:
    chance, now, books = random.Random(seed), 0.0, Written(50.0)
    model: dict[RecordKey, tuple[float, int]] = {}
    for _ in range(400):
        key, size = key_of(chance.randrange(20)), chance.randrange(1, 100)
        now += chance.random()
        match chance.randrange(4):
            case 0 | 1:
                books.put(key, size, now, sure=chance.random() < 0.7)
                model[key] = (now + 50.0, size)
            case 2:
                books.deleted(key)
                model.pop(key, None)
            case _:
                # Unsure ones go when they are settled, and for no other reason.
                books.answered(now)
                for ripe, entry in books.to_settle(now, 3):
                    books.settled(ripe, entry)
                    del model[ripe]
        model = {key: one for key, one in model.items() if one[0] > now}
        assert dict(books.entries(now)) == {key: size for key, (_, size) in model.items()}
        assert books.totals(now) == (len(model), sum(size for _, size in model.values()))
        books.check()


def test_what_is_written_again_is_not_forgotten_for_the_old_one_that_was_missing() -> None:
    books = Written(50.0)
    books.put(key_of(1), 10, 0.0, sure=True)
    [(key, old)] = books.seen([key_of(1)])
    books.put(key_of(1), 12, 0.0, sure=True)
    books.missing(key, old)
    assert books.totals(0.0) == (1, 12)


def test_a_look_at_all_comes_to_each_before_it_comes_to_any_again() -> None:
    books = Written(50.0)
    for number in range(10):
        books.put(key_of(number), 10, 0.0, sure=True)
    looked = [key for _ in range(3) for key, _ in books.to_look_at(4)]
    assert sorted(looked) == sorted(key_of(number) for number in range(10))
