"""Engine loop: the only thread that steps. Requests come in through a mailbox; tokens leave through streams.

             submit / abort                        call_soon_threadsafe
event loop ─────────────────▶ mailbox ─▶ step ─▶ stream.put ─────────────▶ reader turns tokens into text
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from kveik.config import StreamConfig
from kveik.engine.engine import Engine, StepReport
from kveik.engine.stream import Occupancy, RequestStream, TokenEvent
from kveik.errors import BadValue, EngineStopped, Overloaded
from kveik.offload.mailbox import Nudge
from kveik.request.request import Request
from kveik.request.sequence import Sequence
from kveik.text.tokenizer import Tokenizer
from kveik.words import counted

logger = logging.getLogger(__name__)

IDLE_CHECK_SECONDS = 60.0
"""Seconds between two checks of all invariants while the engine is idle."""


@dataclass(frozen=True, slots=True)
class Submit:
    stream: RequestStream


@dataclass(frozen=True, slots=True)
class Abort:
    """End one choice of a stream (the reader found a stop string), or all of them (the reader has gone)."""

    stream: RequestStream
    choice: int | None


@dataclass(frozen=True, slots=True)
class Call:
    """Run something on the loop's thread, between steps."""

    ask: Callable[[Engine], Any]
    answer: Future[Any]


Message = Nudge | Submit | Abort | Call
Fault = type[EngineStopped] | None
"""Error with which all streams end; None: the server stops."""


class EngineLoop:
    """Owns the engine from `start` to `stop`. Any thread may call its public methods."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer, config: StreamConfig, *, max_waiting: int) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._config = config
        self._max_waiting = max_waiting
        self._mailbox = engine.offload.mailbox
        self._lock = threading.Lock()
        self._unplaced = 0
        self._draining = False
        self._stopping = False
        self._streams: dict[int, tuple[RequestStream, int]] = {}
        """sequence id -> (stream, choice), of sequences that have not ended; touched by the loop's thread only."""
        self._sequences: dict[RequestStream, dict[int, int]] = {}
        """stream -> choice -> sequence id; the inverse of `_streams`."""
        self._woken: set[RequestStream] = set()
        self._rows: tuple[tuple[Sequence, ...], list[RequestStream]] = ((), [])
        self._idle_check_due = 0.0
        self._thread = threading.Thread(target=self._run, name="kveik-step", daemon=True)

    # For any thread.

    @property
    def active(self) -> int:
        """Sequences that have not ended, those in the mailbox included."""
        with self._lock:
            return len(self._streams) + self._unplaced

    @property
    def occupancy(self) -> Occupancy:
        """All active sequences, by whether they wait. Exact in its sum, also in the middle of a step."""
        with self._lock:
            active = len(self._streams) + self._unplaced
            waiting = min(self._engine.scheduler.waiting + self._unplaced, active)
        return Occupancy(active - waiting, waiting)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def start(self) -> None:
        self._thread.start()

    def submit(self, request: Request) -> RequestStream:
        """Queue a request. Call it from a running event loop, which will be the stream's reader.

        Raises `Overloaded` when the queue is full (429) or the engine drains or has stopped (503).
        """
        stream = RequestStream(
            request,
            self._tokenizer,
            buffer_tokens=self._config.stream_buffer_tokens,
            abort=self._send_abort,
            reader=asyncio.get_running_loop(),
        )
        # The message is sent under the lock: after `drain` none can follow.
        with self._lock:
            self.check_queue_capacity(request.sampling.n)
            self._unplaced += request.sampling.n
            self._mailbox.put(Submit(stream))
        return stream

    def check_queue_capacity(self, count: int) -> None:
        """Raises `BadValue` where `count` exceeds the queue's capacity, `Overloaded` where it exceeds what is left of it."""
        if count > self._max_waiting:
            raise BadValue(
                f"The call needs {counted(count, 'sequence')} (prompts times `n`); the queue takes at most "
                f"{self._max_waiting} (--max-waiting). Send fewer prompts or a smaller `n`.",
                param="n",
            )
        if self._draining or not self.alive:
            raise Overloaded("The server is stopping and accepts no new requests. Try again later.", retry_after=5, status=503)
        waiting = self._engine.scheduler.waiting + self._unplaced
        if waiting + count > self._max_waiting:
            raise Overloaded(
                f"The queue holds {counted(waiting, 'sequence')} and takes at most {self._max_waiting} (--max-waiting); "
                f"this call adds {count}. Try again later."
            )

    def drain(self) -> None:
        """Refuse new requests from now on; those inside continue."""
        with self._lock:
            self._draining = True

    async def ask(self, question: Callable[[Engine], Any]) -> Any:
        """Run `question(engine)` between steps, on the loop's thread, and return its result."""
        call = Call(question, Future())
        with self._lock:
            if self._draining or not self.alive:
                raise Overloaded("The engine is stopping. Try again later.", retry_after=5, status=503)
            self._mailbox.put(call)
        return await asyncio.wrap_future(call.answer)

    def stop(self, timeout: float = 10.0) -> None:
        """End every sequence with `abort`, then the thread."""
        self.drain()
        self._stopping = True
        self._mailbox.put(None)
        self._thread.join(timeout)

    def _send_abort(self, stream: RequestStream, choice: int | None) -> None:
        self._mailbox.put(Abort(stream, choice))

    # For the loop's thread.

    def _run(self) -> None:
        while not self._stopping:
            try:
                self._read_mail()
                if self._engine.has_work:
                    self._deliver(self._engine.step())
                else:
                    self._engine.attend()
                self._wake_readers()
                self._engine.learn()
            except Exception:
                # A fault outside the model's step (plan, settle, delivery): the state may be wrong, so every request ends.
                logger.exception("engine stopped after a fault, all requests end: streams=%d", len(self._sequences))
                self.drain()
                self._end_all(EngineStopped)
                self._wake_readers()
                return
        self._end_all(None)
        self._wake_readers()

    def _read_mail(self) -> None:
        """Handle every message that is there; sleep for the next one when there is no work."""
        if not self._engine.has_work:
            self._wake_readers()
            self._handle(self._wait_for_mail())
        elif pause := self._engine.pause:
            # Every sequence waits for a tier, which nudges.
            self._wake_readers()
            with contextlib.suppress(queue.Empty):
                self._handle(self._mailbox.get(timeout=pause))
        while True:
            try:
                self._handle(self._mailbox.get(timeout=0))
            except queue.Empty:
                return

    def _wait_for_mail(self) -> Message | None:
        message: Message | None = Nudge()
        try:
            message = self._mailbox.get(timeout=1.0)
        except queue.Empty:
            self._check_when_idle()
            if not self._engine.unsettled:
                message = self._mailbox.get()
        return message

    def _check_when_idle(self) -> None:
        now = time.monotonic()
        if now >= self._idle_check_due:
            self._engine.scheduler.check()
            self._idle_check_due = now + IDLE_CHECK_SECONDS

    def _handle(self, message: Message | None) -> None:
        match message:
            case Submit(stream):
                self._place(stream)
            case Abort(stream, choice):
                self._abort(stream, choice)
            case Call(ask, answer):
                _answer(ask, answer, self._engine)

    def _place(self, stream: RequestStream) -> None:
        ids = self._engine.add(stream.request)
        self._sequences[stream] = dict(enumerate(ids))
        # Together, so that `active` counts every sequence exactly once.
        with self._lock:
            self._unplaced -= len(ids)
            self._streams.update({sequence_id: (stream, choice) for choice, sequence_id in enumerate(ids)})

    def _abort(self, stream: RequestStream, choice: int | None) -> None:
        if choice is None:
            self._end(stream)
            return
        # The reader ends a single choice where it found a stop string.
        sequence_id = self._sequences.get(stream, {}).get(choice)
        if sequence_id is not None:
            self._remove(sequence_id)
            self._engine.abort(sequence_id, "stop")

    def _deliver(self, report: StepReport) -> None:
        for sequence_id, cached in report.admitted:
            stream, choice = self._streams[sequence_id]
            if choice == 0:
                stream.put_admission(cached)
        for part in report.prompt_logprobs:
            self._streams[part.sequence_id][0].put_prompt_logprobs(part.start, part.entries)
        rows, details = self._rows_of(report), report.details
        self._woken.update(rows)
        for row, (stream, token) in enumerate(zip(rows, report.singles, strict=True)):
            if row in details:
                self._put(report.sequences[row], stream, details[row])
            elif token is not None and not stream.put_token(report.sequences[row].choice, token):
                self._overrun(stream)

    def _put(self, sequence: Sequence, stream: RequestStream, event: TokenEvent) -> None:
        if not stream.put(event):
            self._overrun(stream)
        elif event.finish_reason is not None and sequence.id in self._streams:
            # Without an entry, a row before this one has ended the stream.
            self._remove(sequence.id)

    def _rows_of(self, report: StepReport) -> list[RequestStream]:
        """The stream of each row; mostly the rows are those of the step before."""
        if report.sequences is not self._rows[0]:
            self._rows = (report.sequences, [self._streams[sequence.id][0] for sequence in report.sequences])
        return self._rows[1]

    def _overrun(self, stream: RequestStream) -> None:
        self._engine.recorder.overrun(stream.request)
        self._end(stream)

    def _end(self, stream: RequestStream, fault: Fault = None) -> None:
        """End all choices of a stream, and notify its reader."""
        for choice, sequence_id in list(self._sequences.get(stream, {}).items()):
            self._remove(sequence_id)
            self._engine.abort(sequence_id, "abort" if fault is None else "error")
            stream.put(_last_word(choice, fault))
        self._woken.add(stream)

    def _end_all(self, fault: Fault) -> None:
        while True:
            try:
                message = self._mailbox.get(timeout=0)
            except queue.Empty:
                break
            if isinstance(message, Submit):
                self._refuse_late(message.stream, fault)
            elif isinstance(message, Call):
                message.answer.cancel()
        for stream in list(self._sequences):
            self._end(stream, fault)

    def _refuse_late(self, stream: RequestStream, fault: Fault) -> None:
        for choice in range(stream.request.sampling.n):
            stream.put(_last_word(choice, fault))
        self._woken.add(stream)

    def _remove(self, sequence_id: int) -> None:
        stream, choice = self._streams.pop(sequence_id)
        choices = self._sequences[stream]
        del choices[choice]
        if not choices:
            del self._sequences[stream]

    def _wake_readers(self) -> None:
        """Make one call into each reader's event loop per step, however many streams have news there."""
        woken, self._woken = self._woken, set()
        readers = {stream.reader for stream in woken}
        for reader in readers:
            streams = list(woken) if len(readers) == 1 else [stream for stream in woken if stream.reader is reader]
            try:
                reader.call_soon_threadsafe(_wake, streams)
            except RuntimeError:
                # The reader's event loop has closed, so no stream is read any more.
                for stream in streams:
                    self._abort(stream, None)
                self._woken.difference_update(streams)


def _last_word(choice: int, fault: Fault) -> TokenEvent:
    # Each choice has an error object of its own: raising one writes into it.
    return TokenEvent(choice, finish_reason="abort") if fault is None else TokenEvent.failed(choice, fault())


def _wake(streams: list[RequestStream]) -> None:
    for stream in streams:
        stream.wake()


def _answer(ask: Callable[[Engine], Any], answer: Future[Any], engine: Engine) -> None:
    if not answer.set_running_or_notify_cancel():
        return
    try:
        answer.set_result(ask(engine))
    except Exception as error:
        answer.set_exception(error)
