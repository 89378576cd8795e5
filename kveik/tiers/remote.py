"""Records in a Redis or Valkey server that several engines share, found by asking.

    key of the server   = "kveik:" ++ 16 hexadecimal digits of the format ++ ":" ++ group ++ ":" ++ the block's key, 32 bytes
    value               = the record; it expires after the time to live

The server's memory is the server's to bound (maxmemory). Ours is a bound on what this engine believes to have there
(`written.py`): what it wrote within the last time to live, as far as it is not known to be gone. A thread waits for an
answer no longer than the timeout, and a request for that thread no longer than its deadline. Whatever a server answers,
nothing is raised.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kveik.clock import Clock
from kveik.errors import BadValue, Unsupported
from kveik.tiers.address import client_address, shown
from kveik.tiers.record import VERSION, Miss, RecordFormat, RecordKey, Refusal
from kveik.tiers.store import Direct, Extent, Use
from kveik.tiers.written import Entry, Written

redis: Any = None
with contextlib.suppress(ImportError):
    # An extra: `pip install kveik[remote]`.
    redis = importlib.import_module("redis")

BATCH_BYTES = 4 << 20
"""In flight at once, so that a deadline is looked at between two batches."""

PROBE_BATCH = 512

CHORES_SECONDS, CHORES_MOST = 1.0, 64
"""How often, and how many records at most, are looked for beside what is asked anyway: the server may have evicted them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteLimits:
    """How much, how long."""

    capacity_bytes: int = 1 << 30
    """What this engine may have written within the last time to live."""

    ttl_seconds: int = 86_400
    """A record that was not written again for so long is gone."""

    timeout_seconds: float = 1.0
    """For a connection, and for each answer."""


def remote_extent(formats: Sequence[RecordFormat], capacity_bytes: int) -> Extent:
    """Of a `RemoteStore`."""
    return Extent(capacity_bytes, capacity_bytes, tuple(one.record_bytes for one in formats))


class RemoteStore:
    """A `Store` in a server."""

    name = "remote"

    def __init__(self, url: str, formats: Sequence[RecordFormat], limits: RemoteLimits, clock: Clock) -> None:
        """`formats`: per group. Connects when it is first asked. Raises BadValue for an address that is none, Unsupported
        without the client's package.
        """
        self.capacity_bytes = limits.capacity_bytes
        self.trouble: str | None = None
        self._limits = limits
        self._clock = clock
        self.formats: Sequence[RecordFormat] = tuple(formats)
        self._prefixes = [_prefix(one) for one in formats]
        self._client = _connect(url, limits.timeout_seconds)
        self.address = shown(url)
        """The address without user and password."""
        self._written = Written(limits.ttl_seconds)
        self._chores_after = float("-inf")

    @property
    def room_bytes(self) -> int:
        return self.capacity_bytes

    @property
    def bytes_used(self) -> int:
        return self._written.totals(self._clock.now())[1]

    @property
    def records(self) -> int:
        return self._written.totals(self._clock.now())[0]

    def cost_bytes(self, group: int) -> int:
        return self.formats[group].record_bytes

    def put_many(self, records: Sequence[tuple[RecordKey, memoryview]]) -> list[Refusal | None]:
        """One round trip. What the server has no room for is as full as what is beyond our own bound."""
        refusals: list[Refusal | None] = [Refusal.FULL] * len(records)
        sent, room = [], self.capacity_bytes - self.bytes_used
        for number, (_, record) in enumerate(records):
            if len(record) <= room:
                room -= len(record)
                sent.append(number)
        commands = [("SET", self._name(records[at][0]), records[at][1], "EX", self._limits.ttl_seconds) for at in sent]
        now = self._clock.now()
        for number, answer in zip(sent, self._ask(commands, _is_ok), strict=True):
            key, record = records[number]
            refusals[number] = _refusal(answer)
            if refusals[number] is None or isinstance(answer, _NoAnswer):
                self._written.put(key, len(record), now, sure=refusals[number] is None)
        return refusals

    def get_many(self, keys: Sequence[RecordKey], use: Use, deadline: float, direct: Direct | None = None) -> list[Miss | None]:
        """One round trip per batch."""
        misses: list[Miss | None] = []
        largest = max((self.cost_bytes(key.group) for key in keys), default=1)
        for batch in _batches(keys, max(BATCH_BYTES // largest, 1)):
            if self._clock.now() > deadline:
                return misses + [Miss.LATE] * (len(keys) - len(misses))
            believed = dict(self._written.seen(batch))
            answers = self._ask([("GET", self._name(key)) for key in batch], _is_value)
            for key, answer in zip(batch, answers, strict=True):
                if answer is None and key in believed:
                    self._written.missing(key, believed[key])
                if isinstance(answer, bytes):
                    use(len(misses), memoryview(answer))
                misses.append(None if isinstance(answer, bytes) else Miss.ABSENT if answer is None else Miss.FAILED)
        return misses

    def probe_many(self, keys: Sequence[RecordKey], deadline: float) -> list[bool | None]:
        """Asks the server, so that what other engines wrote is found."""
        found: list[bool | None] = []
        for batch in _batches(keys, PROBE_BATCH):
            if self._clock.now() > deadline:
                return found + [False] * (len(keys) - len(found))
            answers = self._ask([("EXISTS", self._name(key)) for key in batch], _is_count)
            found += [None if isinstance(answer, Exception) else answer == 1 for answer in answers]
        return found

    def delete_many(self, keys: Sequence[RecordKey]) -> None:
        """For all engines."""
        for batch in _batches(keys, PROBE_BATCH):
            answers = self._ask([("UNLINK", self._name(key)) for key in batch], _is_count)
            for key, answer in zip(batch, answers, strict=True):
                if isinstance(answer, Exception):
                    self._written.perhaps_deleted([key])
                else:
                    self._written.deleted(key)

    def contents(self) -> Iterator[tuple[RecordKey, int]]:
        """What this engine wrote, as far as it has not expired; what others wrote is found by asking only."""
        return iter(self._written.entries(self._clock.now()))

    def give_back(self) -> None:
        """The server's memory is its own concern."""

    def clear(self) -> None:
        """What this engine wrote."""
        self.delete_many([key for key, _ in self.contents()])

    def close(self) -> None:
        self._client.close()

    def _name(self, key: RecordKey) -> bytes:
        return self._prefixes[key.group] + key.block

    def _ask(self, commands: Sequence[tuple[Any, ...]], fits: Callable[[Any], bool]) -> list[Any]:
        """The answer to each, or an exception, in one round trip. What does not fit is no answer."""
        if not commands:
            return []
        now = self._clock.now()
        removed, looked_for = self._chores(now)
        chores = [("UNLINK", self._name(key)) for key, _ in removed] + [("EXISTS", self._name(key)) for key, _ in looked_for]
        answers = self._exchange([*commands, *chores])
        if not isinstance(answers[-1], Exception):
            self._written.answered(now)
        own, rest = answers[: len(commands)], answers[len(commands) :]
        for (key, entry), answer in zip(removed, rest[: len(removed)], strict=True):
            if _is_count(answer):
                self._written.settled(key, entry)
        for (key, entry), answer in zip(looked_for, rest[len(removed) :], strict=True):
            if answer == 0:
                self._written.missing(key, entry)
        own = [answer if isinstance(answer, Exception) or fits(answer) else _Nonsense() for answer in own]
        failed = next((answer for answer in own if isinstance(answer, Exception)), None)
        self.trouble = None if failed is None else _what_failed(failed)
        return own

    def _chores(self, now: float) -> tuple[list[tuple[RecordKey, Entry]], list[tuple[RecordKey, Entry]]]:
        """What is removed and what is looked for on this occasion, so that the books agree with what the server has."""
        if now < self._chores_after:
            return [], []
        self._chores_after = now + CHORES_SECONDS
        return self._written.to_settle(now, CHORES_MOST), self._written.to_look_at(CHORES_MOST)

    def _exchange(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        """One answer to each; those that have not come are `_NotSent` or `_NoAnswer`."""
        answers: list[Any] = []
        lost: type[_Lost] = _NotSent
        try:
            connection = self._client.connection_pool.get_connection()
            try:
                packed = connection.pack_commands(commands)
                lost = _NoAnswer
                connection.send_packed_command(packed)
                for _ in commands:
                    try:
                        answers.append(connection.read_response())
                    except redis.ResponseError as refused:
                        answers.append(refused)
            except BaseException:
                # What was not read would be taken for the answer to what is asked next.
                connection.disconnect()
                raise
            finally:
                self._client.connection_pool.release(connection)
        except Exception as error:
            # A server may send anything, and what the client makes of that may be anything.
            told = isinstance(error, redis.ResponseError | redis.AuthenticationError)
            return answers + [error if told else lost(type(error).__name__)] * (len(commands) - len(answers))
        return answers


class _Lost(Exception):
    """In place of an answer; `args` has the name of what the client raised."""


class _NotSent(_Lost):
    """The server was not told."""


class _NoAnswer(_Lost):
    """The server may have been told, and may do it yet."""


class _Nonsense(Exception):
    """An answer to something else."""


def _what_failed(error: Exception) -> str:
    """In words for the log, and none of the server's."""
    if isinstance(error, _Lost):
        return f"does not answer ({error.args[0]})"
    return "answers nonsense" if isinstance(error, _Nonsense) else f"refuses ({type(error).__name__})"


def _is_ok(answer: Any) -> bool:
    return bool(answer == b"OK")


def _is_value(answer: Any) -> bool:
    return answer is None or isinstance(answer, bytes)


def _is_count(answer: Any) -> bool:
    return isinstance(answer, int)


def check_address(url: str) -> None:
    """Raises BadValue for an address that is none, Unsupported without the client's package. Connects to nobody."""
    _connect(url, 1.0).close()


def _connect(url: str, timeout_seconds: float) -> Any:
    """A client, which connects when it is used."""
    if redis is None:
        raise Unsupported("--kv-remote needs the package redis: pip install 'kveik[remote]'.")
    try:
        return redis.Redis.from_url(
            client_address(url),
            socket_timeout=timeout_seconds,
            socket_connect_timeout=timeout_seconds,
            socket_read_size=1 << 20,
            # Whether to try again is the breaker's to say.
            retry=redis.retry.Retry(redis.backoff.NoBackoff(), 0),
        )
    except ValueError:
        # Its message holds the address, and that may hold a password.
        raise BadValue("The client takes no address like that of --kv-remote.", param="kv_remote") from None


def _prefix(form: RecordFormat) -> bytes:
    """Records that differ in format never meet."""
    parts = b"%d %d %d %d %b" % (VERSION, form.encoding, form.tokens, form.payload_bytes, form.fingerprint)
    return b"kveik:%b:%d:" % (hashlib.sha256(parts).hexdigest()[:16].encode(), form.group)


def _refusal(answer: object) -> Refusal | None:
    if not isinstance(answer, Exception):
        return None
    return Refusal.FULL if isinstance(answer, redis.exceptions.OutOfMemoryError) else Refusal.FAILED


def _batches(keys: Sequence[RecordKey], size: int) -> Iterator[Sequence[RecordKey]]:
    return (keys[start : start + size] for start in range(0, len(keys), size))
