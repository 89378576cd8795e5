"""The remote tier, against a real server: what one engine wrote another finds; what the server does, the engine survives."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kveik.clock import StepClock
from kveik.offload.availability import AVAILABLE
from kveik.offload.stores.record import Encoding, Miss, Refusal
from kveik.offload.stores.remote import RemoteLimits, RemoteStore
from kveik.offload.stores.store import verify
from tests.offload.stores.records import FORMATS, format_of, key_of, pairs, payloads, read, record_of
from tests.offload.stores.redis_server import Server, running

LIMITS = RemoteLimits(timeout_seconds=30.0)
IMPATIENT = RemoteLimits(timeout_seconds=1.0)


@pytest.fixture(scope="module")
def shared() -> Iterator[Server]:
    with running() as server:
        yield server


@pytest.fixture
def server(shared: Server) -> Iterator[Server]:
    yield shared
    shared.tell("FLUSHALL")


def store_on(server: Server, limits: RemoteLimits = LIMITS, clock: StepClock | None = None) -> RemoteStore:
    return RemoteStore(server.url, FORMATS, limits, clock or StepClock())


def test_what_one_engine_wrote_another_finds_by_asking(server: Server) -> None:
    first, second = store_on(server), store_on(server)
    for group in range(3):
        assert first.put_many(pairs(range(5), group)) == [None] * 5
    assert second.probe_many([key_of(number, 1) for number in range(7)], 0.0) == [True] * 5 + [False] * 2
    assert read(second, range(7), 1) == [*payloads(range(5), 1), Miss.ABSENT, Miss.ABSENT]
    assert (second.records, first.records) == (0, 15)
    first.close()
    second.close()


def test_many_records_go_over_in_batches_and_every_deadline_counts(server: Server) -> None:
    clock = StepClock()
    store = store_on(server, clock=clock)
    assert store.put_many(pairs(range(2000))) == [None] * 2000
    assert read(store, range(2000)) == payloads(range(2000))
    shown_records: list[int] = []

    def use(number: int, record: memoryview) -> None:
        shown_records.append(number)
        clock.seconds = 2.0

    misses = store.get_many([key_of(number) for number in range(2000)], use, 1.0)
    batch = (4 << 20) // FORMATS[0].record_bytes
    assert misses == [None] * batch + [Miss.LATE] * (2000 - batch)
    assert shown_records == list(range(batch))
    store.close()


def test_engines_with_other_formats_do_not_meet(server: Server) -> None:
    store = store_on(server)
    store.put_many(pairs([1]))
    for form in (format_of(0, 3001), format_of(0, 3000, Encoding.INT8)):
        other = RemoteStore(server.url, [form], LIMITS, StepClock())
        assert other.probe_many([key_of(1)], 0.0) == [False]
        other.close()
    store.close()


def test_damaged_values_are_misses_and_can_be_swept_out(server: Server) -> None:
    store = store_on(server)
    store.put_many(pairs([1, 2, 3]))
    server.tell("SETRANGE", store.server_key(key_of(1)), 700, b"xx")
    server.tell("SET", store.server_key(key_of(2)), b"short")
    server.tell("DEL", store.server_key(key_of(3)))
    assert read(store, [1, 2, 3]) == [Miss.DAMAGED, Miss.TORN, Miss.ABSENT]
    assert verify(store, remove=True).sound == 0
    assert store.records == 0
    store.close()


def test_a_value_of_another_type_is_a_strangers_and_is_written_over(server: Server) -> None:
    store = store_on(server)
    store.put_many(pairs([1, 2]))
    server.tell("DEL", store.server_key(key_of(1)))
    server.tell("LPUSH", store.server_key(key_of(1)), b"x")
    assert read(store, [1, 2]) == [Miss.FOREIGN, *payloads([2])]
    assert (store.availability, store.records) == (AVAILABLE, 1)
    assert store.put_many(pairs([1])) == [None]
    assert read(store, [1, 2]) == payloads([1, 2])
    store.close()


def test_one_that_is_longer_than_a_record_is_torn_and_written_over(server: Server) -> None:
    store = store_on(server)
    store.put_many(pairs([1, 2]))
    server.tell("SET", store.server_key(key_of(1)), record_of(1) + bytes(1 << 20))
    assert read(store, [1, 2]) == [Miss.TORN, *payloads([2])]
    assert store.put_many(pairs([1])) == [None]
    assert read(store, [1, 2]) == payloads([1, 2])
    store.close()


def test_what_was_written_within_the_time_to_live_is_bounded(server: Server) -> None:
    clock, size = StepClock(), FORMATS[0].record_bytes
    store = store_on(server, RemoteLimits(capacity_bytes=3 * size, ttl_seconds=100), clock)
    assert store.put_many(pairs([1, 2])) == [None, None]
    clock.advance(60.0)
    assert store.put_many(pairs([3, 4])) == [None, Refusal.FULL]
    assert store.bytes_used == 3 * size
    clock.advance(41.0)
    assert store.put_many(pairs([4, 5, 6])) == [None, None, Refusal.FULL]
    store.delete_many([key_of(4)])
    assert store.records == 2
    assert store.put_many(pairs([6])) == [None]
    assert 0 < server.tell("TTL", store.server_key(key_of(6))) <= 100
    store.close()


def test_clearing_takes_what_this_engine_wrote_and_leaves_the_rest(server: Server) -> None:
    mine, other = store_on(server), store_on(server)
    mine.put_many(pairs([1]))
    other.put_many(pairs([2]))
    mine.clear()
    assert other.probe_many([key_of(1), key_of(2)], 0.0) == [False, True]
    mine.close()
    other.close()


def test_a_server_without_room_is_full_and_still_read() -> None:
    with running("--maxmemory", "3mb", "--maxmemory-policy", "noeviction") as server:
        store = store_on(server)
        stored = store.put_many(pairs(range(100), 1)) + store.put_many(pairs(range(100, 200), 1))
        assert stored.count(None) > 10
        assert set(stored) == {None, Refusal.FULL}
        kept = [number for number, refusal in enumerate(stored) if refusal is None]
        assert read(store, kept, 1) == payloads(kept, 1)
        # It deletes, and takes nothing new for that.
        assert store.put_many(pairs([300], 1)) == [Refusal.FULL]
        store.delete_many([key_of(1000, 1)])
        assert store.availability.reason == "refuses (OutOfMemoryError)"
        server.tell("CONFIG", "SET", "maxmemory", "0")
        assert store.serves(writing=True)
        assert store.availability == AVAILABLE
        store.close()


def test_a_server_that_stays_full_is_in_trouble_until_it_has_room_for_a_record() -> None:
    form = format_of(0, 700_000)
    one = (key_of(1000), memoryview(record_of(1000, form)))
    with running("--maxmemory", "10mb", "--maxmemory-policy", "noeviction") as server:
        store = RemoteStore(server.url, [form], LIMITS, StepClock())
        while store.put_many([(key_of(store.records), one[1])]) == [None]:
            pass
        kept = store.records
        for _ in range(10):
            assert store.serves(writing=True)
            assert store.availability.reason == "refuses (OutOfMemoryError)"
            assert store.put_many([one]) == [Refusal.FULL]
        server.tell("DEL", *(store.server_key(key_of(number)) for number in range(2)))
        assert store.serves(writing=True)
        assert store.availability == AVAILABLE
        # The check has left the room to records, at once.
        assert server.tell("EXISTS", "kveik:check") == 0
        assert store.put_many([one]) == [None]
        assert kept > 5
        store.close()


@pytest.mark.parametrize("bound", ["maxmemory", "proto-max-bulk-len"])
def test_what_is_smaller_than_what_was_not_stored_ends_no_trouble(bound: str) -> None:
    small, large = format_of(0, 1000), format_of(1, 4 << 20)
    with running() as server:
        store = RemoteStore(server.url, [small, large], LIMITS, StepClock())
        assert store.put_many([(key_of(1, 1), record_of(1, large))]) == [None]
        unbound = server.client.config_get(bound)[bound]
        used = server.tell("INFO", "memory")["used_memory"] if bound == "maxmemory" else 0
        server.tell("CONFIG", "SET", bound, used + (2 << 20))
        assert store.put_many([(key_of(2, 1), record_of(2, large))]) != [None]
        for number in range(3):
            # It may hang up after what was too long for it.
            assert any(store.put_many([(key_of(number), record_of(number, small))]) == [None] for _ in range(3))
            assert store.availability.reason
            store.serves(writing=True)
            assert store.availability.reason
        server.tell("CONFIG", "SET", bound, unbound)
        assert store.put_many([(key_of(2, 1), record_of(2, large))]) == [None]
        assert store.availability == AVAILABLE
        store.close()


def test_a_server_that_is_killed_frozen_and_restarted_costs_misses_only() -> None:
    with running() as server:
        store, impatient = store_on(server), store_on(server, IMPATIENT)
        assert store.put_many(pairs(range(5))) == [None] * 5
        with server.frozen():
            assert read(impatient, [1]) == [Miss.FAILED]
            assert impatient.put_many(pairs([6])) == [Refusal.FAILED]
        # An answer to an earlier question must not be taken for one to this.
        assert read(impatient, range(5)) == payloads(range(5))
        impatient.close()
        server.kill()
        assert read(store, [1, 2]) == [Miss.FAILED, Miss.FAILED]
        assert store.availability.reason == "does not answer (Connection refused)"
        server.start()
        assert read(store, [1]) == [Miss.ABSENT]
        assert store.put_many(pairs([1])) == [None]
        assert read(store, [1]) == payloads([1])
        assert store.availability == AVAILABLE
        store.close()


def test_a_password_is_used_and_never_shown() -> None:
    with running("--requirepass", "s3cret") as server:
        url = f"redis://:s3cret@127.0.0.1:{server.port}/0"
        store = RemoteStore(url, FORMATS, LIMITS, StepClock())
        assert store.put_many(pairs([1])) == [None]
        assert store.address == f"redis://127.0.0.1:{server.port}/0"
        store.close()
        stranger = RemoteStore(url.replace("s3cret", "wr0ng"), FORMATS, LIMITS, StepClock())
        assert stranger.put_many(pairs([1])) == [Refusal.FAILED]
        assert stranger.availability.reason
        assert "wr0ng" not in stranger.availability.reason
        stranger.close()


def test_nobody_listening_is_trouble_and_no_more() -> None:
    store = RemoteStore("valkey://127.0.0.1:1/0", FORMATS, LIMITS, StepClock())
    assert store.put_many(pairs([1])) == [Refusal.FAILED]
    assert read(store, [1]) == [Miss.FAILED]
    store.delete_many([key_of(1)])
    store.clear()
    store.close()
