"""Records in a Redis or Valkey server that several engines share, found by asking.

    key of the server   = "kveik:" ++ 16 hexadecimal digits of the format ++ ":" ++ group ++ ":" ++ the block's key, 32 bytes
    value               = the record; it expires after the time to live

The server's memory is the server's to bound (maxmemory). Ours is a bound on what this engine has there: what it wrote within
the last time to live. A thread waits for an answer no longer than the timeout, and a request for that thread no longer than its
deadline.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kveik.clock import Clock
from kveik.errors import BadValue, Unsupported
from kveik.tiers.address import client_address, shown
from kveik.tiers.record import VERSION, Miss, RecordFormat, RecordKey, Refusal
from kveik.tiers.store import Direct, Use

redis: Any = None
with contextlib.suppress(ImportError):
    # An extra: `pip install kveik[remote]`.
    redis = importlib.import_module("redis")

BATCH_BYTES = 4 << 20
"""In flight at once, so that a deadline is looked at between two batches."""

PROBE_BATCH = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteLimits:
    """How much, how long."""

    capacity_bytes: int = 1 << 30
    """What this engine may have written within the last time to live."""

    ttl_seconds: int = 86_400
    """A record that was not written again for so long is gone."""

    timeout_seconds: float = 1.0
    """For a connection, and for each answer."""


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
        self._client = _connect(client_address(url), limits.timeout_seconds)
        self.address = shown(url)
        """The address without user and password."""
        self._lock = threading.Lock()
        self._written: OrderedDict[RecordKey, tuple[float, int]] = OrderedDict()
        """When each expires, and its bytes; the first to expire first."""
        self._bytes = 0

    @property
    def room_bytes(self) -> int:
        return self.capacity_bytes

    @property
    def bytes_used(self) -> int:
        self._expire()
        return self._bytes

    @property
    def records(self) -> int:
        self._expire()
        return len(self._written)

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
        for number, answer in zip(sent, self._ask(commands), strict=True):
            refusals[number] = _refusal(answer)
            if refusals[number] is None:
                self._note(records[number][0], len(records[number][1]))
        return refusals

    def get_many(self, keys: Sequence[RecordKey], use: Use, deadline: float, direct: Direct | None = None) -> list[Miss | None]:
        """One round trip per batch."""
        misses: list[Miss | None] = []
        largest = max((self.cost_bytes(key.group) for key in keys), default=1)
        for batch in _batches(keys, max(BATCH_BYTES // largest, 1)):
            if self._clock.now() > deadline:
                return misses + [Miss.LATE] * (len(keys) - len(misses))
            for answer in self._ask([("GET", self._name(key)) for key in batch]):
                if isinstance(answer, bytes):
                    use(len(misses), memoryview(answer))
                misses.append(None if isinstance(answer, bytes) else Miss.ABSENT if answer is None else Miss.FAILED)
        return misses

    def probe_many(self, keys: Sequence[RecordKey], deadline: float) -> list[bool]:
        """Asks the server, so that what other engines wrote is found."""
        found: list[bool] = []
        for batch in _batches(keys, PROBE_BATCH):
            if self._clock.now() > deadline:
                return found + [False] * (len(keys) - len(found))
            found += [answer == 1 for answer in self._ask([("EXISTS", self._name(key)) for key in batch])]
        return found

    def delete_many(self, keys: Sequence[RecordKey]) -> None:
        """For all engines."""
        for batch in _batches(keys, PROBE_BATCH):
            for key, answer in zip(batch, self._ask([("UNLINK", self._name(key)) for key in batch]), strict=True):
                if not isinstance(answer, Exception):
                    self._forget(key)

    def contents(self) -> Iterator[tuple[RecordKey, int]]:
        """What this engine wrote, as far as it has not expired; what others wrote is found by asking only."""
        self._expire()
        with self._lock:
            return iter([(key, size) for key, (_, size) in self._written.items()])

    def clear(self) -> None:
        """What this engine wrote."""
        self.delete_many([key for key, _ in self.contents()])

    def close(self) -> None:
        self._client.close()

    def _name(self, key: RecordKey) -> bytes:
        return self._prefixes[key.group] + key.block

    def _ask(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        """The answer to each, which may be an exception, in one round trip."""
        if not commands:
            return []
        try:
            with self._client.pipeline(transaction=False) as pipe:
                for command in commands:
                    pipe.execute_command(*command)
                answers: list[Any] = pipe.execute(raise_on_error=False)
        except (redis.RedisError, OSError) as error:
            self.trouble = f"{self.address} does not answer ({type(error).__name__})"
            return [error] * len(commands)
        failed = next((answer for answer in answers if isinstance(answer, Exception)), None)
        self.trouble = None if failed is None else f"{self.address} refuses ({type(failed).__name__})"
        return answers

    def _note(self, key: RecordKey, size: int) -> None:
        self._forget(key)
        with self._lock:
            self._written[key] = (self._clock.now() + self._limits.ttl_seconds, size)
            self._bytes += size

    def _forget(self, key: RecordKey) -> None:
        with self._lock:
            _, size = self._written.pop(key, (0.0, 0))
            self._bytes -= size

    def _expire(self) -> None:
        now = self._clock.now()
        with self._lock:
            while self._written and next(iter(self._written.values()))[0] <= now:
                _, (_, size) = self._written.popitem(last=False)
                self._bytes -= size


def check_address(url: str) -> None:
    """Raises BadValue for an address that is none, Unsupported without the client's package. Connects to nobody."""
    _connect(url, 1.0).close()


def _connect(url: str, timeout_seconds: float) -> Any:
    """A client, which connects when it is used."""
    if redis is None:
        raise Unsupported("--kv-remote needs the package redis: pip install 'kveik[remote]'.")
    try:
        return redis.Redis.from_url(
            url,
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
