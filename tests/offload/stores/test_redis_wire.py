"""A server that answers too much, too long or too slowly is left, and the next answer is one to what is asked."""

from __future__ import annotations

import gc
import shutil
import subprocess
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from kveik.clock import SystemClock
from kveik.offload.availability import AVAILABLE
from kveik.offload.stores.record import Miss, Refusal
from kveik.offload.stores.redis_wire import Wire
from kveik.offload.stores.remote import RemoteLimits, RemoteStore
from tests.offload.stores.odd_server import HANG_UP, Answered, Keeper
from tests.offload.stores.records import FORMATS, key_of, pairs, payloads, read
from tests.offload.stores.redis_server import free_port, running

TIMEOUT = 0.2
PATIENT = RemoteLimits(timeout_seconds=10.0)

SURPLUS: dict[str, tuple[bytes, Answered]] = {
    "a value before": (b"GETRANGE", lambda _, answer: [b"$3\r\nabc\r\n" + answer]),
    "a value before, by itself": (b"GETRANGE", lambda _, answer: [b"$3\r\nabc\r\n", 0.05, answer]),
    "a value after": (b"GETRANGE", lambda _, answer: [answer + b"$3\r\nabc\r\n"]),
    "a value long after": (b"GETRANGE", lambda _, answer: [answer, 0.05, b"$3\r\nabc\r\n"]),
    "half a line after": (b"GETRANGE", lambda _, answer: [answer + b"+"]),
    "OK twice": (b"SET", lambda _, answer: [answer * 2]),
    "a number before OK": (b"SET", lambda _, answer: [b":1\r\n" + answer]),
    "an error after OK": (b"SET", lambda _, answer: [answer + b"-OOM no room\r\n"]),
    "a number twice": (b"EXISTS", lambda _, answer: [answer * 2]),
}


@pytest.fixture
def keeper() -> Keeper:
    return Keeper()


@pytest.fixture
def store(keeper: Keeper) -> Iterator[RemoteStore]:
    """Patient."""
    with keeper.serving() as url:
        store = RemoteStore(url, FORMATS, PATIENT, SystemClock())
        yield store
        store.check()
        store.close()


@pytest.fixture
def impatient(keeper: Keeper) -> Iterator[RemoteStore]:
    with keeper.serving() as url:
        store = RemoteStore(url, FORMATS, RemoteLimits(timeout_seconds=TIMEOUT), SystemClock())
        yield store
        store.check()
        store.close()


def only(command: bytes, answered: Answered) -> Answered:
    """All others are answered as they should be."""
    return lambda asked, answer: answered(asked, answer) if asked == command else [answer]


@pytest.mark.parametrize("kind", SURPLUS)
def test_one_answer_too_many_costs_one_exchange_and_its_connection(kind: str, store: RemoteStore, keeper: Keeper) -> None:
    assert store.put_many(pairs(range(5))) == [None] * 5
    keeper.answered = only(*SURPLUS[kind])
    assert read(store, [0])[0] in (Miss.FAILED, Miss.TORN, *payloads([0]))
    assert store.put_many(pairs([5]))[0] in (Refusal.FAILED, None)
    store.probe_many([key_of(0)], float("inf"))
    # What comes late has come.
    time.sleep(0.1)
    keeper.answered = lambda command, answer: [answer]
    for number in range(6):
        assert read(store, [number]) == payloads([number])
        assert store.put_many(pairs([10 + number])) == [None]
        assert store.probe_many([key_of(number), key_of(99)], float("inf")) == [True, False]
    assert store.availability == AVAILABLE
    assert 2 <= keeper.connections <= 4
    assert store.records == len(keeper.kept) == 12


def test_an_answer_with_another_behind_it_is_not_believed(store: RemoteStore, keeper: Keeper) -> None:
    keeper.answered = lambda command, answer: [answer * 2]
    assert store.put_many(pairs([1])) == [Refusal.FAILED]
    assert read(store, [1]) == [Miss.FAILED]
    assert store.probe_many([key_of(1)], float("inf")) == [None]
    assert store.availability.reason == "answers nonsense"
    # It is there, perhaps.
    assert store.records == 1


def hung_up(store: RemoteStore) -> None:
    """Return when it is known that the server has."""
    while any(connection.more() is None for connection in store._wire._free):
        time.sleep(0.01)


def test_a_server_that_hangs_up_after_its_answer_has_answered(store: RemoteStore, keeper: Keeper) -> None:
    keeper.answered = lambda command, answer: [answer, HANG_UP]
    for number in range(3):
        assert store.put_many(pairs([number])) == [None]
        hung_up(store)
        assert read(store, [number]) == payloads([number])
        hung_up(store)
    assert store.availability == AVAILABLE
    assert keeper.connections == 6


def test_a_server_that_hangs_up_after_its_answer_costs_no_descriptor(keeper: Keeper) -> None:
    def late(answer: object) -> bool:
        # The server has hung up by then.
        time.sleep(0.05)
        return answer == b"OK"

    keeper.answered = lambda command, answer: [answer, HANG_UP]
    with keeper.serving() as url:
        wire = Wire(url, 10.0, 100, SystemClock())
        gc.collect()
        gc.disable()
        try:
            before = len(list(Path("/proc/self/fd").iterdir()))
            for _ in range(5):
                assert wire.exchange([(b"PING",)], [late]) == [b"OK"]
            assert len(list(Path("/proc/self/fd").iterdir())) == before
        finally:
            gc.enable()
            wire.close()


def test_what_is_stored_by_a_server_that_is_out_of_step_stays_bounded(keeper: Keeper) -> None:
    with keeper.serving() as url:
        limits = RemoteLimits(capacity_bytes=6 * FORMATS[0].record_bytes, timeout_seconds=10.0)
        store = RemoteStore(url, FORMATS, limits, SystemClock())
        keeper.answered = only(b"SET", lambda _, answer: [b":1\r\n", answer])
        told = [store.put_many(pairs([number]))[0] for number in range(30)]
        assert told == [Refusal.FAILED] * 6 + [Refusal.FULL] * 24
        assert store.records == 6 >= len(keeper.kept)
        store.close()


def sent_without_end(start: bytes) -> Answered:
    def answered(command: bytes, answer: bytes) -> Iterable[bytes]:
        yield start
        while True:
            yield bytes(1 << 16)

    return answered


STREAMS = {
    "a value of 6 GB": b"$6000000000\r\n",
    "a value of a byte too much": b"$%d\r\n" % (max(form.record_bytes for form in FORMATS) + 2),
    "a value of less than nothing": b"$-7\r\n",
    "a list of 2 billion": b"*2000000000\r\n",
    "a list in a list": b"*1\r\n" * 10_000,
    "a line": b"+",
    "a number": b":1" * 10_000,
}


@pytest.mark.parametrize("kind", STREAMS)
def test_what_is_too_long_is_not_read(kind: str, store: RemoteStore, keeper: Keeper) -> None:
    assert store.put_many(pairs([1])) == [None]
    before = keeper.bytes_sent
    keeper.answered = only(b"GETRANGE", sent_without_end(STREAMS[kind]))
    assert read(store, [1]) == [Miss.FAILED]
    assert store.availability.reason == "answers nonsense"
    # What the system holds of a connection, on both sides, and not what we have read.
    assert keeper.bytes_sent - before < 16 << 20
    keeper.answered = lambda command, answer: [answer]
    assert read(store, [1]) == payloads([1])


def trickled(command: bytes, answer: bytes) -> Iterable[bytes | float]:
    for byte in answer:
        yield 0.75 * TIMEOUT
        yield bytes([byte])


@pytest.mark.parametrize("password", ["", ":secret@"], ids=["", "signing in"])
def test_a_server_that_trickles_is_left_in_time(password: str, keeper: Keeper) -> None:
    with keeper.serving() as url:
        address = url.replace("://", f"://{password}")
        store = RemoteStore(address, FORMATS, RemoteLimits(timeout_seconds=TIMEOUT), SystemClock())
        keeper.answered = trickled
        asked = [
            lambda: read(store, [1]) == [Miss.FAILED],
            lambda: store.put_many(pairs([1])) == [Refusal.FAILED],
            lambda: not store.serves(writing=True),
        ]
        for ask in asked:
            began = time.monotonic()
            assert ask()
            assert 0.7 * TIMEOUT < time.monotonic() - began < 3 * TIMEOUT
            assert store.availability.reason
        store.close()


def test_a_server_that_does_not_read_is_left_in_time(impatient: RemoteStore, keeper: Keeper) -> None:
    keeper.reads = False
    began = time.monotonic()
    # More than the system holds of a connection.
    assert impatient.put_many([*pairs(range(800), 1)] * 2) == [Refusal.FAILED] * 1600
    assert time.monotonic() - began < 3 * TIMEOUT
    assert impatient.records == 800
    keeper.reads = True


def test_a_silent_server_is_waited_for_once_however_much_is_asked(impatient: RemoteStore, keeper: Keeper) -> None:
    while impatient.put_many(pairs([1])) != [None]:
        pass
    keeper.answered = lambda command, answer: [10.0]
    keys = [key_of(number) for number in range(3000)]
    asked = [
        lambda: impatient.get_many(keys, lambda number, record: None, float("inf")) == [Miss.FAILED] * 3000,
        lambda: impatient.probe_many(keys, float("inf")) == [None] * 3000,
        lambda: impatient.delete_many(keys) is None,
    ]
    for ask in asked:
        began = time.monotonic()
        assert ask()
        assert time.monotonic() - began < 2 * TIMEOUT
    assert impatient.records == 1


def test_all_that_a_user_of_the_server_must_be_allowed_is_four_commands_on_our_keys() -> None:
    with running() as server:
        rights = ["~kveik:*", "+set", "+getrange", "+exists", "+unlink", "+select"]
        server.tell("ACL", "SETUSER", "kveik", "on", ">s3cret", *rights)
        url = server.url.replace("://", "://kveik:s3cret@").replace("/0", "/1")
        store = RemoteStore(url, FORMATS, RemoteLimits(timeout_seconds=30.0), SystemClock())
        assert store.serves(writing=False)
        assert store.serves(writing=True)
        assert store.put_many(pairs(range(5))) == [None] * 5
        assert read(store, range(5)) == payloads(range(5))
        assert store.probe_many([key_of(0)], float("inf")) == [True]
        store.clear()
        assert (store.availability, store.records) == (AVAILABLE, 0)
        store.close()


def test_a_socket_of_this_machine_will_do(tmp_path: Path) -> None:
    with running("--unixsocket", str(tmp_path / "socket")):
        store = RemoteStore(f"unix://{tmp_path}/socket?db=1", FORMATS, RemoteLimits(timeout_seconds=30.0), SystemClock())
        assert store.put_many(pairs(range(100), 1)) == [None] * 100
        assert read(store, range(100), 1) == payloads(range(100), 1)
        store.close()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
def test_tls_is_spoken_with_a_server_that_is_trusted_and_with_no_other(tmp_path: Path) -> None:
    made = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj", "/CN=127.0.0.1"]
    named = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", f"{tmp_path}/key", "-out", f"{tmp_path}/cert"]
    subprocess.run(["openssl", "req", "-x509", *made, *named], check=True, capture_output=True)
    port, file = free_port(), f"{tmp_path}/cert"
    options = [
        "--tls-port",
        str(port),
        "--tls-cert-file",
        file,
        "--tls-key-file",
        f"{tmp_path}/key",
        "--tls-ca-cert-file",
        file,
    ]
    with running(*options, "--tls-auth-clients", "no"):
        url, limits = f"rediss://127.0.0.1:{port}/0", RemoteLimits(timeout_seconds=30.0)
        store = RemoteStore(f"{url}?ssl_ca_certs={file}", FORMATS, limits, SystemClock())
        for _ in range(3):
            assert store.put_many(pairs(range(100), 1)) == [None] * 100
            assert read(store, range(100), 1) == payloads(range(100), 1)
        assert store.availability == AVAILABLE
        # One connection, on which nothing but answers ever came.
        assert len(store._wire._free) == 1
        store.close()
        stranger = RemoteStore(url, FORMATS, limits, SystemClock())
        assert stranger.put_many(pairs([1])) == [Refusal.FAILED]
        assert stranger.availability.reason
        assert "certificate verify failed" in stranger.availability.reason
        stranger.close()
