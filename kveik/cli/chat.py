"""kveik chat: a conversation in the terminal, or over a pipe."""

from __future__ import annotations

import contextlib
import io
import signal
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Protocol

from kveik.cli.options import Settings
from kveik.cli.start import interruptible, say
from kveik.config import EngineConfig, StreamConfig
from kveik.engine.llm import LLM
from kveik.engine.stream import Delta
from kveik.errors import KveikError
from kveik.request.request import SamplingParams
from kveik.words import counted

# Editing and recalling lines in input(); not every build of Python has it.
with contextlib.suppress(ImportError):
    import readline  # noqa: F401  # imported for what it does to input()

Message = dict[str, object]
HELP = "/clear starts a new conversation, /exit or Ctrl-D ends, Ctrl-C stops an answer."


def chat(settings: Settings, config: EngineConfig, system: str | None) -> None:
    """Answers line after line."""
    interactive = sys.stdin.isatty()
    llm = LLM(config)
    with interruptible(), contextlib.closing(llm):
        if interactive:
            seed = settings.of(StreamConfig).seed
            say(
                f"{settings.engine.model.model}, {counted(llm.loaded.max_model_len, 'token')} of context, --seed {seed}. {HELP}"
            )
        converse(Conversation(llm, settings.of(SamplingParams), system), interactive=interactive)


def converse(conversation: Conversation, *, interactive: bool) -> None:
    """Answer line after line until the input ends.

    A line that is not UTF-8 is told and passed over. So is whatever else goes wrong about one turn, where somebody sits there
    to read it and to go on; a pipe ends with the error.
    """
    for line in _lines(interactive):
        _turn(conversation, line, interactive)


NOT_UTF8 = "That line is not UTF-8, so the model was not asked; the conversation goes on without it."


def _lines(interactive: bool) -> Iterator[str]:
    """The lines that the user types, until the end of input, /exit or Ctrl-C at the prompt."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        # Decoding strictly, one bad byte would take all lines with it that were read along.
        sys.stdin.reconfigure(errors="surrogateescape")
    while True:
        try:
            line = input("> " if interactive else "").strip()
        except (EOFError, KeyboardInterrupt) as error:
            if interactive:
                # The shell's own prompt should not stand behind ours.
                sys.stdout.write("\n")
            elif isinstance(error, KeyboardInterrupt):
                # A person who types stays in the chat; a program is interrupted.
                raise
            return
        if line == "/exit":
            return
        if not _is_text(line):
            say(NOT_UTF8)
        elif line:
            yield line


def _is_text(line: str) -> bool:
    """Whether every character is one: bytes that could not be decoded came in as lone surrogates."""
    return not any("\ud800" <= character <= "\udfff" for character in line)


def _turn(conversation: Conversation, line: str, interactive: bool) -> None:
    if line == "/clear":
        conversation.clear()
        say("A new conversation.")
        return
    begun = False
    try:
        for text in conversation.ask(line):
            begun = True
            sys.stdout.write(text)
            sys.stdout.flush()
    except KveikError as error:
        if begun:
            sys.stdout.write("\n")
            sys.stdout.flush()
        # Through a pipe, /clear cannot be typed in answer to an error.
        if not interactive:
            raise
        say(f"{error.message} That turn is not part of the conversation; /clear starts a new one.")
        return
    sys.stdout.write("\n")
    sys.stdout.flush()
    say(conversation.figures)


@contextlib.contextmanager
def _interrupt_noticed() -> Iterator[Callable[[], bool]]:
    """Inside, Ctrl-C only makes the question true. Raised in the middle of a step it would leave that step half settled."""
    pressed = False

    def notice(*_: object) -> None:
        nonlocal pressed
        pressed = True

    before = signal.signal(signal.SIGINT, notice)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, before)


class Chatting(Protocol):
    """The part of `LLM` that a conversation needs."""

    def tokens_of_chat(self, messages: Sequence[Mapping[str, object]]) -> list[int]:
        """Token ids of the messages, ready for the answer."""
        ...

    def stream(self, prompt: Sequence[int], sampling: SamplingParams) -> Generator[Delta, None, None]:
        """The answer as it comes; closing it ends the request."""
        ...

    def cached_tokens_last(self) -> int:
        """Prompt tokens of the last request that were found in the cache."""
        ...


class Conversation:
    """The messages so far, and figures of the last answer."""

    def __init__(self, llm: Chatting, sampling: SamplingParams, system: str | None) -> None:
        self._llm = llm
        self._sampling = sampling
        self._first: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        self._messages = list(self._first)
        self.figures = ""

    def clear(self) -> None:
        """Forget what was said; what it computed stays in the cache."""
        self._messages = list(self._first)

    def ask(self, question: str) -> Iterator[str]:
        """The answer's text as it comes. Ctrl-C ends it early; what has come until then is part of the conversation."""
        messages: list[Message] = [*self._messages, {"role": "user", "content": question}]
        prompt = self._llm.tokens_of_chat(messages)
        texts: list[str] = []
        tokens, start = 0, time.perf_counter()
        first: float | None = None
        with _interrupt_noticed() as interrupted, contextlib.closing(self._llm.stream(prompt, self._sampling)) as deltas:
            for delta in deltas:
                first = first or time.perf_counter()
                tokens += len(delta.tokens)
                texts.append(delta.text)
                yield delta.text
                if interrupted():
                    yield " …"
                    break
        self._messages = [*messages, {"role": "assistant", "content": "".join(texts)}]
        self.figures = self._describe(len(prompt), tokens, start, first or start)

    def _describe(self, prompt: int, tokens: int, start: float, first: float) -> str:
        # The first token is the prompt's work; the pace is that of the others.
        pace = f", {(tokens - 1) / (time.perf_counter() - first):.1f} tokens/s" if tokens > 1 else ""
        cached = self._llm.cached_tokens_last()
        return (
            f"[{counted(tokens, 'token')}{pace}, first after {first - start:.2f} s; {cached} of "
            f"{counted(prompt, 'prompt token')} were cached]"
        )
