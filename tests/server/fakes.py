"""A door whose tokens come from a script, and a small real tokenizer to go with it."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from kveik.config import ServerConfig
from kveik.engine.stream import Delta, Occupancy, RequestText, TokenEvent
from kveik.errors import KveikError, Overloaded
from kveik.request.request import Request, TokenLogprob
from kveik.request.sequence import FinishReason
from kveik.server.app import create_app
from kveik.server.http_server import HttpServer
from kveik.server.state import ServerState
from kveik.text.chat_template import ChatTemplate
from kveik.text.token_bytes import spelling_of_decoder
from kveik.text.tokenizer import Tokenizer

WORDS = [" the", " answer", " is", "Hello", " world", "DEF", "GHI", " 42", "."]
SPECIAL = ["<s>", "<end>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for message in messages %}{% if message.role not in ('system', 'user', 'assistant', 'tool') %}"
    "{{ raise_exception('Only system, user and assistant may speak.') }}{% endif %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tokenizer(*, bos: bool = True) -> Tokenizer:
    """Byte-level: every byte is a token, a few words are one token, and there are four special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: token for token, letter in enumerate(alphabet)}
    merges: list[tuple[str, str]] = []
    for word in WORDS:
        made = ""
        for letter in word.replace(" ", "Ġ"):
            if made and (made, letter) not in merges:
                merges.append((made, letter))
                vocabulary.setdefault(made + letter, len(vocabulary))
            made += letter
    core = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    start, end = core.token_to_id("<s>"), core.token_to_id("<end>")
    spelling = spelling_of_decoder({"type": "ByteLevel"})
    return Tokenizer(core, spelling, bos=start if bos else None, eos_ids=(end,), before=(start,) if bos else ())


Script = Callable[[Request, int], Iterable[int | KveikError]]
"""The tokens of one choice of one request; an error in their place is raised there."""


def repeat(tokenizer: Tokenizer, text: str) -> Script:
    """The same text over and over, for every choice."""
    tokens = tokenizer.encode(text, add_special=False)
    return lambda request, choice: itertools.cycle(tokens)


def exactly(tokens: Iterable[int | KveikError]) -> Script:
    """These tokens, then nothing."""
    fixed = list(tokens)
    return lambda request, choice: iter(fixed)


class FakeStream:
    """Keeps the stream's contract: one token per choice and step, ends as the engine would."""

    def __init__(self, door: FakeDoor, request: Request) -> None:
        self.request = request
        self.aborted = False
        self.read_tokens = 0
        self._door = door
        self._text = RequestText(request, door.tokenizer)
        self._text.cached_tokens = door.cached_tokens
        self._scripts = [iter(door.script(request, choice)) for choice in range(request.sampling.n)]
        self._made = [0] * request.sampling.n

    @property
    def cached_tokens(self) -> int:
        return self._text.cached_tokens

    @property
    def completion_tokens(self) -> int:
        return self._text.completion_tokens

    @property
    def prompt_logprobs(self) -> tuple[TokenLogprob | None, ...] | None:
        top = self.request.sampling.prompt_logprobs
        if top is None:
            return None
        return (None, *(self._logprob(token, top) for token in self.request.prompt[1:]))

    @property
    def ended(self) -> bool:
        return self.aborted or self._text.finished

    async def deltas(self) -> AsyncIterator[Delta]:
        await self._door.started()
        while not self._text.finished:
            await asyncio.sleep(self._door.step_seconds)
            events = [self._event(choice) for choice in range(self.request.sampling.n) if not self._ended(choice)]
            for delta in self._text.take(events):
                self.read_tokens += len(delta.tokens)
                yield delta

    def abort(self) -> None:
        if not self._text.finished and not self.aborted:
            self._door.aborted.append(self.request.id)
        self.aborted = True

    def _ended(self, choice: int) -> bool:
        return self._text.choices[choice].finished

    def _event(self, choice: int) -> TokenEvent:
        if self.aborted:
            return TokenEvent(choice, finish_reason="abort")
        token = next(self._scripts[choice], None)
        if isinstance(token, KveikError):
            raise token
        if token is None:
            return TokenEvent(choice, finish_reason="stop")
        self._made[choice] += 1
        top = self.request.sampling.logprobs
        reason = self._reason(token, self._made[choice])
        stopped = token if reason == "stop" else None
        logprobs = () if top is None else (self._logprob(token, top),)
        return TokenEvent(choice, (token,), logprobs, reason, stopped)

    def _reason(self, token: int, made: int) -> FinishReason | None:
        sampling = self.request.sampling
        ends = token in sampling.stop_token_ids or (token in self._door.tokenizer.eos_ids and not sampling.ignore_eos)
        if ends and made > sampling.min_tokens:
            return "stop"
        return "length" if made == sampling.max_tokens else None

    def _logprob(self, token: int, top: int) -> TokenLogprob:
        # Minus infinity, as a filter would leave it, and a chosen token that is not among the likeliest.
        likeliest = tuple((other, -1.0 - other if other else float("-inf")) for other in range(top))
        return TokenLogprob(token, -0.25, likeliest)


class FakeDoor:
    """Says what a script says. `hold` keeps every request in the queue."""

    def __init__(self, tokenizer: Tokenizer, script: Script | None = None, *, step_seconds: float = 0.0) -> None:
        self.tokenizer = tokenizer
        self.script = script or repeat(tokenizer, "Hello world. the answer is 42.")
        self.step_seconds = step_seconds
        self.cached_tokens = 0
        self.room: int | None = None
        """Requests of one choice that the queue takes before it refuses; None: all."""

        self.hold = False
        self.streams: list[FakeStream] = []
        self.aborted: list[str] = []

    @property
    def submitted(self) -> list[Request]:
        return [stream.request for stream in self.streams]

    @property
    def occupancy(self) -> Occupancy:
        return Occupancy(sum(not stream.ended for stream in self.streams), 0)

    def check_queue_capacity(self, count: int) -> None:
        if self.room is not None and count > self.room - len(self.streams):
            raise Overloaded("The queue is full.", retry_after=7)

    def submit(self, request: Request) -> FakeStream:
        self.check_queue_capacity(request.sampling.n)
        stream = FakeStream(self, request)
        self.streams.append(stream)
        return stream

    async def started(self) -> None:
        while self.hold:
            await asyncio.sleep(0.05)


@dataclass
class Running:
    """A server on a free port, and what is behind it."""

    url: str
    door: FakeDoor
    state: ServerState
    server: HttpServer
    tokenizer: Tokenizer

    def until(self, condition: Callable[[], bool], seconds: float = 2.0) -> bool:
        """Whether the condition comes true in time."""
        deadline = time.monotonic() + seconds
        while not condition() and time.monotonic() < deadline:
            time.sleep(0.005)
        return condition()


def make_state(door: FakeDoor, tokenizer: Tokenizer, *, template: bool = True, **changes: object) -> ServerState:
    """A state around a fake door; `changes` are fields of the state or of its `ServerConfig`."""
    settings = {key: changes.pop(key) for key in list(changes) if key in ServerConfig.__dataclass_fields__}
    config = ServerConfig(**({"port": 0, "drain_seconds": 0.2} | settings))  # type: ignore[arg-type]  # any field, by name
    fields: dict[str, object] = {
        "door": door,
        "tokenizer": tokenizer,
        "chat_template": ChatTemplate(TEMPLATE, bos="<s>", eos="<end>") if template else None,
        "max_model_len": 512,
        "config": config,
        "names": ("small", "org/small"),
        "secret": b"s" * 32,
        "metrics": lambda: "kveik_up 1\n",
        "counts": lambda: {"running": 0, "waiting": 0},
        "facts": {"type of keys and values": "int8"},
        "fingerprint": "fp_test",
    }
    return ServerState(**(fields | changes))  # type: ignore[arg-type]  # any field, by name


@contextmanager
def serving(state: ServerState) -> Iterator[tuple[str, HttpServer]]:
    """A server in a thread, and its address; ended at exit."""
    ready, urls = threading.Event(), []

    def on_ready(url: str) -> None:
        urls.append(url)
        ready.set()

    server = HttpServer(create_app(state), state.config, on_ready)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    assert ready.wait(10)
    try:
        yield urls[0], server
    finally:
        server.stop()
        thread.join(15)
        assert not thread.is_alive()


@contextmanager
def running(
    script: Script | None = None, *, bos: bool = True, step_seconds: float = 0.0, **changes: object
) -> Iterator[Running]:
    """A server over a fake door."""
    tokenizer = make_tokenizer(bos=bos)
    door = FakeDoor(tokenizer, script, step_seconds=step_seconds)
    state = make_state(door, tokenizer, **changes)
    with serving(state) as (url, server):
        yield Running(url, door, state, server, tokenizer)
