"""Streams of tokens from the step loop to one reader each, which turns them into text in its own thread."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from kveik.errors import Broken
from kveik.request.request import Request, TokenLogprob
from kveik.request.sequence import FinishReason
from kveik.text.detokenize import Detokenizer
from kveik.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Delta:
    """New text and tokens of one choice. The joined texts of all deltas are the choice's text."""

    choice: int
    text: str
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    """One per token, where requested."""

    finish_reason: FinishReason | None = None
    """Set on the last delta of a choice, and only there."""

    stop_reason: str | int | None = None
    """The stop string or stop token id that ended the choice."""

    error: Broken | None = None
    """The fault, where `finish_reason` is "error"."""


class Stream(Protocol):
    """One request's results. Read from one task of an event loop."""

    request: Request

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens hit in the cache; final from the first delta on."""
        ...

    @property
    def completion_tokens(self) -> int:
        """New tokens so far, all choices together, the ones that ended them included."""
        ...

    @property
    def prompt_logprobs(self) -> tuple[TokenLogprob | None, ...] | None:
        """One entry per prompt token (the first is None), where requested; complete from the first delta on."""
        ...

    def deltas(self) -> AsyncIterator[Delta]:
        """Yields every choice's deltas as they come, until all have ended. Raises `Broken` for one that failed."""
        ...

    def abort(self) -> None:
        """End all choices and free their blocks. Has no effect after the end."""
        ...


class Occupancy(NamedTuple):
    """Sequences that have not ended, at one moment."""

    running: int
    waiting: int
    """Sequences in the queue, and those still in the mailbox."""


class Door(Protocol):
    """The server's view of the engine."""

    @property
    def occupancy(self) -> Occupancy: ...

    def check_queue_capacity(self, count: int) -> None:
        """Check that `count` more sequences can be queued together; changes nothing.

        Raises:
            BadValue: the queue is smaller than that.
            Overloaded: the queue is too full now, or the engine drains.
        """
        ...

    def submit(self, request: Request) -> Stream:
        """Queue a request. Raises `Overloaded` when the queue is full or the engine drains."""
        ...


class TokenEvent(NamedTuple):
    """Tokens of one choice from one step, its end, or both. A named tuple, because a step makes hundreds of them."""

    choice: int
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    """One per token, where requested."""

    finish_reason: FinishReason | None = None
    stop_token: int | None = None
    """The token that ended the choice, where a stop or end token did; its text is not part of the answer."""

    error: Broken | None = None
    """The fault, where `finish_reason` is "error"."""

    @classmethod
    def failed(cls, choice: int, error: Broken) -> TokenEvent:
        """Returns the event of a choice that ends without a token, with this error."""
        return cls(choice, finish_reason="error", error=error)


class ChoiceText:
    """Turns one choice's tokens into deltas, and finds its stop strings."""

    def __init__(self, request: Request, choice: int, tokenizer: Tokenizer) -> None:
        sampling = request.sampling
        self.choice = choice
        self.completion_tokens = 0
        self.finished = False
        self._show_stop_token = sampling.include_stop_str_in_output
        self._detokenizer = Detokenizer(
            tokenizer,
            prompt=request.prompt,
            skip_special=sampling.skip_special_tokens,
            stops=sampling.stop,
            include_stop=sampling.include_stop_str_in_output,
            min_tokens=sampling.min_tokens,
        )

    def take(self, events: list[TokenEvent]) -> Delta:
        """Consume this choice's events in order; tokens behind a stop string are discarded."""
        last = events[-1]
        tokens = [token for event in events for token in event.tokens]
        logprobs = [logprob for event in events for logprob in event.logprobs]
        shown = list(tokens)
        if last.stop_token is not None and not self._show_stop_token:
            shown.pop()
        piece = self._detokenizer.push(shown)
        if piece.stop is not None:
            return self._delta(piece.text, tokens[: piece.tokens], logprobs[: piece.tokens], "stop", piece.stop)
        text = piece.text
        if last.finish_reason is not None:
            text += self._detokenizer.finish()
        return self._delta(text, tokens, logprobs, last.finish_reason, last.stop_token, last.error)

    def _delta(
        self,
        text: str,
        tokens: list[int],
        logprobs: list[TokenLogprob],
        reason: FinishReason | None,
        stop_reason: str | int | None,
        error: Broken | None = None,
    ) -> Delta:
        self.completion_tokens += len(tokens)
        self.finished = reason is not None
        return Delta(
            choice=self.choice,
            text=text,
            tokens=tuple(tokens),
            logprobs=tuple(logprobs),
            finish_reason=reason,
            stop_reason=stop_reason,
            error=error,
        )


class RequestText:
    """All choices of one request as text: shared by the offline LLM and the asynchronous stream."""

    def __init__(self, request: Request, tokenizer: Tokenizer) -> None:
        self.request = request
        self.choices = [ChoiceText(request, choice, tokenizer) for choice in range(request.sampling.n)]
        self.cached_tokens = 0
        self._prompt_logprobs: list[TokenLogprob] = []

    @property
    def finished(self) -> bool:
        return all(choice.finished for choice in self.choices)

    @property
    def completion_tokens(self) -> int:
        return sum(choice.completion_tokens for choice in self.choices)

    @property
    def prompt_logprobs(self) -> tuple[TokenLogprob | None, ...] | None:
        if self.request.sampling.prompt_logprobs is None:
            return None
        return (None, *self._prompt_logprobs)

    def add_prompt_logprobs(self, start: int, entries: tuple[TokenLogprob, ...]) -> None:
        """Add entries of prompt tokens from `start` on. A chunk that was computed again after a preemption changes nothing."""
        # The token at 0 has no entry, so the list is one behind the positions.
        if start == len(self._prompt_logprobs) + 1:
            self._prompt_logprobs.extend(entries)

    def take(self, events: list[TokenEvent]) -> Iterator[Delta]:
        """Yields deltas for events of any choices, in order; none for choices that a stop string has ended already."""
        by_choice: dict[int, list[TokenEvent]] = {}
        for event in events:
            by_choice.setdefault(event.choice, []).append(event)
        for number, news in by_choice.items():
            choice = self.choices[number]
            if not choice.finished:
                yield choice.take(news)


class RequestStream:
    """The asynchronous stream: the loop's thread puts, one task of one event loop reads.

    Its buffer is bounded: `put` answers False once a choice has more unread tokens than the limit, and the loop then aborts
    the request, so that a reader that stalls cannot hold blocks.
    """

    def __init__(
        self,
        request: Request,
        tokenizer: Tokenizer,
        *,
        buffer_tokens: int,
        abort: Callable[[RequestStream, int | None], None],
        reader: asyncio.AbstractEventLoop,
    ) -> None:
        self.request = request
        self.reader = reader
        self._text = RequestText(request, tokenizer)
        self._events: deque[TokenEvent | tuple[int, int]] = deque()
        """Events; and of those with one token and nothing else, which are most, choice and token alone."""

        self._buffer_tokens = buffer_tokens * request.sampling.n
        self._several = False
        """True if an event with more than one token has come."""

        self._abort = abort
        self._news = asyncio.Event()

    @property
    def cached_tokens(self) -> int:
        return self._text.cached_tokens

    @property
    def completion_tokens(self) -> int:
        return self._text.completion_tokens

    @property
    def prompt_logprobs(self) -> tuple[TokenLogprob | None, ...] | None:
        return self._text.prompt_logprobs

    # For the step thread only.

    def put(self, event: TokenEvent) -> bool:
        """Queue one event. Returns False when the reader is too far behind. Ends are always queued."""
        self._events.append(event)
        self._several = self._several or len(event.tokens) > 1
        return event.finish_reason is not None or self._unread <= self._buffer_tokens

    def put_token(self, choice: int, token: int) -> bool:
        """The same for one more token and nothing else."""
        events = self._events
        events.append((choice, token))
        return len(events) <= self._buffer_tokens if not self._several else self._unread <= self._buffer_tokens

    @property
    def _unread(self) -> int:
        """Tokens that wait to be read."""
        if not self._several:
            return len(self._events)
        return sum(len(one.tokens) if isinstance(one, TokenEvent) else 1 for one in tuple(self._events))

    def put_admission(self, cached_tokens: int) -> None:
        self._text.cached_tokens = cached_tokens

    def put_prompt_logprobs(self, start: int, entries: tuple[TokenLogprob, ...]) -> None:
        self._text.add_prompt_logprobs(start, entries)

    # For the reader.

    def wake(self) -> None:
        """Run on the reader's event loop when there is news."""
        self._news.set()

    async def deltas(self) -> AsyncIterator[Delta]:
        """Yields every choice's deltas as they come, until all have ended. Raises `Broken` for one that failed."""
        while not self._text.finished:
            await self._news.wait()
            self._news.clear()
            for delta in self._text.take(self._drain()):
                if delta.error is not None:
                    self.abort()
                    raise delta.error
                if isinstance(delta.stop_reason, str):
                    self._abort(self, delta.choice)
                yield delta

    def abort(self) -> None:
        """End all choices and free their blocks. Has no effect after the end."""
        self._abort(self, None)

    def _drain(self) -> list[TokenEvent]:
        # popleft is atomic, so that events which arrive meanwhile are either read now or announced by the next wake.
        events = []
        while self._events:
            event = self._events.popleft()
            events.append(event if isinstance(event, TokenEvent) else TokenEvent(event[0], (event[1],)))
        return events
