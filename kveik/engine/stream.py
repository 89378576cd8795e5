"""Tokens on their way from the step loop to one reader, who turns them into text on his own side."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

from kveik.request.request import Request, TokenLogprob
from kveik.request.sequence import FinishReason


@dataclass(frozen=True, slots=True)
class Delta:
    """What is new in one choice. Joined texts of all deltas are the choice's text."""

    choice: int
    text: str
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    """One per token, where the request asked for them."""

    finish_reason: FinishReason | None = None
    """Set on the last delta of a choice, and only there."""

    stop_reason: str | int | None = None
    """The stop string or stop token id that ended the choice."""


class Stream(Protocol):
    """One request's results. Read from one task of an event loop."""

    request: Request

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens found in the cache; final once the first delta is there."""
        ...

    @property
    def completion_tokens(self) -> int:
        """New tokens so far, all choices together, the ones that ended them included."""
        ...

    @property
    def prompt_logprobs(self) -> tuple[TokenLogprob | None, ...] | None:
        """One entry per prompt token (the first is None), where asked for; complete once the first delta is there."""
        ...

    def deltas(self) -> AsyncIterator[Delta]:
        """Every choice's deltas as they come; ends after the last choice's last. Raises `Broken` for one that failed."""
        ...

    def abort(self) -> None:
        """Nobody reads on: end all choices and free their blocks. Harmless after the end."""
        ...


class Door(Protocol):
    """What the server sees of the engine."""

    def submit(self, request: Request) -> Stream:
        """Queue a request. Raises `Overloaded` when the queue is full or the engine drains."""
        ...
