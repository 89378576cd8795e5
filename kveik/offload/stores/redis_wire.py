"""Round trips to a Redis or Valkey server, bounded in time and in bytes. Independent of records.

The connections are those of redis-py, which finds the server, signs in and speaks TLS. What it leaves open is closed here:

    time     an exchange has one deadline, whatever trickles in or is not read; that holds for connecting as well, and not for
             looking up the host's name, which takes as long as the system's resolver does
    bytes    an answer is one line, or one value up to a size; anything else is not read
    order    an answer that does not fit, or that nobody asked for, ends the connection: what follows is not trusted either
"""

from __future__ import annotations

import contextlib
import importlib
import ssl
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from kveik.clock import Clock
from kveik.errors import BadValue, Unsupported
from kveik.offload.stores.address import client_address

redis: Any = None
with contextlib.suppress(ImportError):
    # An extra: `pip install kveik[remote]`.
    redis = importlib.import_module("redis")

READ_BYTES = 1 << 16
"""Buffer for lines; a longer line is refused. Values are read to where they stay."""

JOINED_BYTES = 1 << 16
"""Parts that are longer are sent from where they lie."""

Command = tuple[bytes | memoryview, ...]
Fits = Callable[[Any], bool]
"""True for an object that can be the answer to a command."""


class Unanswered(Exception):
    """Stands in place of an answer."""

    def __init__(self, why: str, *, told: bool) -> None:
        super().__init__(why)
        self.why = why
        """Reason in words for the log, and none of the server's."""
        self.told = told
        """The server may have received the command, and may do it yet."""


class Nonsense(Exception):
    """An answer to something else, or to nothing."""


class Wire:
    """Connections to one server, one per thread that asks."""

    def __init__(self, url: str, timeout_seconds: float, value_bytes_most: int, clock: Clock) -> None:
        """Connects when it is first asked. A server may be silent for `timeout_seconds`; an exchange takes twice that at most.

        Raises BadValue for an address that is none, Unsupported without the client's package.
        """
        if redis is None:
            raise Unsupported("--kv-remote needs the package redis: pip install 'kveik[remote]'.")
        try:
            options = redis.connection.parse_url(client_address(url))
        except ValueError:
            # Its message holds the address, and that may hold a password.
            raise BadValue("The client takes no address like that of --kv-remote.", param="kv_remote") from None
        self._kind = _timed(options.pop("connection_class", redis.Connection))
        # The client's later protocol lets a server send what was not asked for. Whether to try again is the breaker's to say.
        retry = redis.retry.Retry(redis.backoff.NoBackoff(), 0)
        parser = partial(_Answers, value_bytes_most)
        self._options = {**options, "protocol": 2, "driver_info": None, "parser_class": parser, "retry": retry}
        self._timeout_seconds = timeout_seconds
        self._clock = clock
        self._free: deque[Any] = deque()

    def exchange(self, commands: Sequence[Command], fits: Sequence[Fits]) -> list[Any]:
        """One answer to each, which fits, or the server's error, or `Unanswered`. In one round trip."""
        answers: list[Any] = []
        told = False
        connection = None
        try:
            connection = self._ready()
            told = True
            connection.send_packed_command(_packed(commands))
            for fit in fits:
                answers.append(_answer(connection, fit))
            more = connection.more()
            if more:
                # Nobody knows which of the answers was one too many.
                answers = []
                raise Nonsense
            if more is None:
                self._free.append(connection)
            else:
                # It has answered, and hung up.
                connection.disconnect()
        except Exception as error:
            # A server may send anything, and what the client makes of that may be anything.
            if connection is not None:
                connection.disconnect()
            # As it signs in, the server may have told why it does nothing at all.
            refused = isinstance(error, redis.ResponseError | redis.AuthenticationError)
            rest = error if refused else Unanswered(_why(error), told=told)
            answers += [rest] * (len(commands) - len(answers))
        return answers

    def close(self) -> None:
        while self._free:
            self._free.pop().disconnect()

    def _ready(self) -> Any:
        """A connection whose deadline runs, and on which nothing has come meanwhile."""
        until = self._clock.now() + 2 * self._timeout_seconds
        while self._free:
            with contextlib.suppress(IndexError):
                connection = self._free.pop()
                if connection.more() is None:
                    connection.until = until
                    return connection
                connection.disconnect()
        connection = self._kind(self._clock, self._timeout_seconds, self._options)
        connection.until = until
        connection.connect()
        return connection


def _timed(kind: Any) -> Any:
    """One of the client's kinds of connection, with a deadline."""

    class Timed(kind):  # type: ignore[misc]  # known at run time only
        def __init__(self, clock: Clock, timeout_seconds: float, options: dict[str, Any]) -> None:
            self.until = float("inf")
            self._clock = clock
            self._timeout_seconds = timeout_seconds
            super().__init__(**options)

        def left(self) -> float:
            """Seconds until it is too late, or the server has been silent for too long."""
            left = min(self.until - self._clock.now(), self._timeout_seconds)
            if left <= 0:
                raise TimeoutError
            return left

        # The client asks for these before it connects to each of a host's addresses, and before it speaks TLS.
        socket_connect_timeout = property(left)
        socket_timeout = property(left, lambda self, seconds: None)

        def more(self) -> bytes | None:
            """Bytes that nobody asked for; empty where the server has hung up, None where there are none."""
            return self._parser.unread() or (b"" if self._sock is None else self._sock.more())

        def _connect(self) -> _Socket:
            return _Socket(super()._connect(), self.left)

    return Timed


class _Socket:
    """The calls of a socket that client and parser use. Each waits for `left()` seconds at most."""

    def __init__(self, socket: Any, left: Callable[[], float]) -> None:
        self._socket = socket
        self._left = left

    def recv_into(self, view: memoryview) -> int:
        """At least one byte."""
        self._socket.settimeout(self._left())
        count = int(self._socket.recv_into(view))
        if not count:
            raise ConnectionError
        return count

    def sendall(self, data: Any) -> None:
        view = memoryview(data).cast("B")
        while view:
            self._socket.settimeout(self._left())
            view = view[self._socket.send(view) :]

    def more(self) -> bytes | None:
        """The next byte; nothing where the connection has ended, None where none has come."""
        self._socket.settimeout(0.0)
        try:
            return bytes(self._socket.recv(1))
        except OSError as error:
            return None if isinstance(error, BlockingIOError | ssl.SSLWantReadError) else b""

    def shutdown(self, how: int) -> None:
        self._socket.shutdown(how)

    def close(self) -> None:
        self._socket.close()


class _Answers:
    """The client's parser: one line or one value at a time, since nothing that is asked is answered with more.

    Values are memoryviews, other texts bytes.
    """

    def __init__(self, value_bytes_most: int, socket_read_size: int) -> None:
        self._value_bytes_most = value_bytes_most
        self._bytes = bytearray(READ_BYTES)
        self._buffer = memoryview(self._bytes)
        self._start = self._end = 0
        """Bounds of the bytes that were received and not read yet."""
        self._socket: _Socket | None = None

    def on_connect(self, connection: Any) -> None:
        self._socket, self._start, self._end = connection._sock, 0, 0

    def on_disconnect(self) -> None:
        self._socket = None

    def unread(self) -> bytes:
        """Bytes received and not read yet."""
        return bytes(self._buffer[self._start : self._end])

    def read_response(self, disable_decoding: bool = False, timeout: object = None) -> Any:
        line = self._line()
        kind, rest = line[:1], line[1:]
        if kind == b"+":
            return rest
        if kind == b"-":
            return redis.connection.DefaultParser.parse_error(rest.decode("utf-8", errors="replace"))
        if kind == b":":
            return _number(rest)
        if kind == b"$":
            return None if rest == b"-1" else self._value(_number(rest))
        raise Nonsense

    def _line(self) -> bytes:
        searched = self._start
        while (at := self._bytes.find(b"\r\n", searched, self._end)) < 0:
            if self._start:
                self._end -= self._start
                self._buffer[: self._end] = self._buffer[self._start : self._start + self._end]
                self._start = 0
            searched = max(self._end - 1, 0)
            if self._end == READ_BYTES:
                raise Nonsense
            self._end += self._receive(self._buffer[self._end :])
        line = bytes(self._buffer[self._start : at])
        self._start = at + 2
        return line

    def _value(self, length: int) -> memoryview:
        if not 0 <= length <= self._value_bytes_most:
            raise Nonsense
        value = memoryview(bytearray(length + 2))
        have = min(self._end - self._start, length + 2)
        value[:have] = self._buffer[self._start : self._start + have]
        self._start += have
        while have < length + 2:
            have += self._receive(value[have:])
        if bytes(value[length:]) != b"\r\n":
            raise Nonsense
        return value[:length]

    def _receive(self, view: memoryview) -> int:
        if self._socket is None:
            raise ConnectionError
        return self._socket.recv_into(view)


def is_full(error: Exception) -> bool:
    """True for the error of a server without room."""
    return isinstance(error, redis.exceptions.OutOfMemoryError)


def _number(text: bytes) -> int:
    try:
        return int(text)
    except ValueError:
        raise Nonsense from None


def _answer(connection: Any, fits: Fits) -> Any:
    """The next, or the error that the server tells in its place. Raises Nonsense where it is neither."""
    try:
        answer = connection.read_response()
    except redis.ResponseError as refused:
        return refused
    if not isinstance(answer, Exception) and not fits(answer):
        raise Nonsense
    return answer


def _packed(commands: Sequence[Command]) -> list[bytes | bytearray | memoryview]:
    """Commands as they are sent, in pieces."""
    pieces: list[bytes | bytearray | memoryview] = []
    joined = bytearray()
    for parts in commands:
        joined += b"*%d\r\n" % len(parts)
        for part in parts:
            joined += b"$%d\r\n" % len(part)
            if len(part) > JOINED_BYTES:
                pieces += [joined, part]
                joined = bytearray()
            else:
                joined += part
            joined += b"\r\n"
    return [*pieces, joined]


def _why(error: BaseException) -> str:
    """Reason in words for the log: the system's or the client's, none of the server's."""
    if isinstance(error, Nonsense):
        return "answers nonsense"
    cause: BaseException | None = error
    while cause is not None and not (isinstance(cause, OSError) and cause.strerror):
        cause = cause.__context__
    return f"does not answer ({type(error).__name__ if cause is None else cause.strerror})"
