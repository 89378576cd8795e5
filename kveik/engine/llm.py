"""Offline LLM: prompts in, completions out, in the caller's own thread, without server or event loop."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace

from kveik.config import EngineConfig
from kveik.engine.build import LoadedEngine, open_engine
from kveik.engine.stream import Delta, RequestText, TokenEvent
from kveik.errors import Broken, PromptTooLong, Unsupported
from kveik.request.request import Request, SamplingParams
from kveik.request.sequence import FinishReason
from kveik.text.chat_template import chat_tokens


@dataclass(frozen=True, slots=True)
class Completion:
    """One choice of one prompt."""

    prompt: int
    """Index of the prompt."""

    choice: int
    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens hit in the cache."""

    error: Broken | None = None
    """The fault, where `finish_reason` is "error"; text and tokens are those before it."""


@dataclass(frozen=True, slots=True)
class Answering:
    """A request inside the engine: its text so far, and the sequences of its choices."""

    text: RequestText
    sequences: Mapping[int, int]
    """choice -> sequence id"""


class LLM:
    """A model with its cache, which steps while the caller iterates over answers."""

    def __init__(self, config: EngineConfig, report: Callable[[str], None] = lambda line: None) -> None:
        self.loaded: LoadedEngine = open_engine(config, report)
        self._ids = itertools.count()
        self._answering: dict[int, tuple[Answering, int]] = {}
        """sequence id -> (request, choice)"""
        self._last: Answering | None = None

    def close(self) -> None:
        self.loaded.close()

    def tokens_of_chat(self, messages: Items[Mapping[str, object]]) -> list[int]:
        """Returns token ids of a conversation, up to the model's answer. Raises `Unsupported` without a template."""
        if self.loaded.chat_template is None:
            raise Unsupported("This model has no chat template. Give one with --chat-template FILE.")
        return chat_tokens(self.loaded.chat_template, self.loaded.tokenizer, messages)

    def max_new_tokens(self, prompt: Items[int]) -> int:
        """Returns the number of new tokens that fit behind a prompt. Raises `PromptTooLong` when none fits."""
        room = self.loaded.max_model_len - len(prompt)
        if room < 1:
            raise PromptTooLong(tokens=len(prompt), allowed=self.loaded.max_model_len)
        return room

    def stream(
        self, prompt: Items[int], sampling: SamplingParams, *, cache_salt: str | None = None
    ) -> Generator[Delta, None, None]:
        """Yields one prompt's deltas as they come. Closing it frees the request's blocks. Raises `Broken` where it failed."""
        answering = self.submit(prompt, sampling, cache_salt=cache_salt)
        try:
            while not answering.text.finished:
                for delta in self.step().get(answering.text, []):
                    if delta.error is not None:
                        raise delta.error
                    yield delta
        finally:
            self.abort(answering)

    def cached_tokens_last(self) -> int:
        """Prompt tokens hit in the cache by the request that was submitted last; 0 before the first."""
        return 0 if self._last is None else self._last.text.cached_tokens

    def generate(
        self, prompts: Items[Items[int]], sampling: SamplingParams, progress: Callable[[int], None] = lambda done: None
    ) -> list[Completion]:
        """Returns completions of all prompts, in their order, choice by choice; the engine batches them as memory allows.

        A choice that fails has its `error`, and the others continue; `none_failed` raises it.
        progress: called after every step with the number of prompts that are complete.
        """
        waiting = list(reversed(list(enumerate(prompts))))
        pending: dict[RequestText, tuple[int, Answering]] = {}
        texts: dict[tuple[int, int], list[Delta]] = {}
        done: dict[int, RequestText] = {}
        limit = self.loaded.config.schedule.max_waiting
        try:
            while waiting or pending:
                while waiting and self.loaded.engine.scheduler.waiting + sampling.n <= limit:
                    number, prompt = waiting.pop()
                    answering = self.submit(prompt, sampling)
                    pending[answering.text] = (number, answering)
                for text, deltas in self.step().items():
                    number, _ = pending[text]
                    for delta in deltas:
                        texts.setdefault((number, delta.choice), []).append(delta)
                    if text.finished:
                        done[number] = text
                        del pending[text]
                progress(len(done))
        except Exception:
            # Not after an interrupt: it may have come in the middle of a step, with the state half updated.
            for _, answering in pending.values():
                self.abort(answering)
            raise
        return [_completion(number, choice, deltas, done[number]) for (number, choice), deltas in sorted(texts.items())]

    def abort(self, answering: Answering) -> None:
        """End the rest of a request and free its blocks."""
        for sequence_id in answering.sequences.values():
            self._remove(sequence_id, "abort")

    def submit(self, prompt: Items[int], sampling: SamplingParams, *, cache_salt: str | None = None) -> Answering:
        """Queue a prompt without waiting for it; `step` returns its answer. Prompts with different salts share no blocks."""
        room = self.max_new_tokens(prompt)
        fitted = replace(sampling, max_tokens=min(sampling.max_tokens, room), min_tokens=min(sampling.min_tokens, room))
        request = Request(id=f"offline-{next(self._ids)}", prompt=tuple(prompt), sampling=fitted, cache_salt=cache_salt)
        ids = self.loaded.engine.add(request)
        answering = Answering(RequestText(request, self.loaded.tokenizer), dict(enumerate(ids)))
        for choice, sequence_id in answering.sequences.items():
            self._answering[sequence_id] = (answering, choice)
        self._last = answering
        return answering

    def step(self) -> dict[RequestText, list[Delta]]:
        """Run one step. Returns its deltas by request."""
        engine = self.loaded.engine
        report = engine.step()
        engine.learn()
        if pause := engine.pause:
            engine.offload.mailbox.wait(pause)
        for sequence_id, cached in report.admitted:
            answering, choice = self._answering[sequence_id]
            if choice == 0:
                answering.text.cached_tokens = cached
        for part in report.prompt_logprobs:
            self._answering[part.sequence_id][0].text.add_prompt_logprobs(part.start, part.entries)
        news: dict[RequestText, list[Delta]] = {}
        for sequence, event in report.events:
            entry = self._answering.get(sequence.id)
            if entry is not None:
                self._take(entry[0], sequence.id, event, news)
        return news

    def _take(self, answering: Answering, sequence_id: int, event: TokenEvent, news: dict[RequestText, list[Delta]]) -> None:
        for delta in answering.text.take([event]):
            if delta.finish_reason is not None:
                self._remove(sequence_id, "stop")
            news.setdefault(answering.text, []).append(delta)

    def _remove(self, sequence_id: int, reason: FinishReason) -> None:
        if self._answering.pop(sequence_id, None) is not None:
            self.loaded.engine.abort(sequence_id, reason)


def _completion(number: int, choice: int, deltas: list[Delta], text: RequestText) -> Completion:
    reason = deltas[-1].finish_reason
    assert reason is not None
    return Completion(
        prompt=number,
        choice=choice,
        text="".join(delta.text for delta in deltas),
        tokens=tuple(token for delta in deltas for token in delta.tokens),
        finish_reason=reason,
        prompt_tokens=len(text.request.prompt),
        cached_tokens=text.cached_tokens,
        error=deltas[-1].error,
    )


def none_failed(completions: list[Completion]) -> list[Completion]:
    """Returns the completions, or raises the error of the first that failed."""
    for completion in completions:
        if completion.error is not None:
            raise completion.error
    return completions
