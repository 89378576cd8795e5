"""kveik generate: prompts in, one JSON line per answer out; no server."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import TextIO

from kveik.cli.options import Settings
from kveik.cli.start import interruptible, say
from kveik.config import EngineConfig
from kveik.engine.llm import LLM, Completion
from kveik.errors import BadValue, PromptTooLong, Unreachable
from kveik.request.request import SamplingParams
from kveik.words import counted


def generate(settings: Settings, config: EngineConfig, prompts: list[str], chat: bool, output: Path | None) -> int:
    """Writes one JSON line per answer. Returns 1 where one of them failed."""
    llm = LLM(config, say)
    tokens = [_tokens(llm, number, text, chat) for number, text in enumerate(prompts)]
    start = time.perf_counter()
    with interruptible():
        completions = llm.generate(tokens, settings.of(SamplingParams), Pace(len(tokens), time.perf_counter).show)
        seconds = time.perf_counter() - start
        # Not in a `finally`: Ctrl-C may have come in the middle of a step, whose state need not be consistent.
        llm.close()
        _write(completions, output)
    say(_summary(completions, seconds))
    failures = [line for line in map(_failure, completions) if line]
    for line in failures[:FAILURES_TOLD]:
        say(line)
    if failures:
        say(f'{len(failures)} of {counted(len(completions), "answer")} failed; their lines have an "error".')
    return 1 if failures else 0


class Pace:
    """Says on stderr how many prompts are answered: after 2 seconds, and then in steps that double, up to a minute."""

    def __init__(self, total: int, now: Callable[[], float]) -> None:
        """now: the time in seconds."""
        self._total = total
        self._now = now
        self._start = now()
        self._wait = FIRST_WORD_SECONDS
        self._next = self._start + self._wait

    def show(self, done: int) -> None:
        """Take in one report."""
        now = self._now()
        if now < self._next or done == self._total:
            return
        self._wait = min(2 * self._wait, LONGEST_SILENCE_SECONDS)
        self._next = now + self._wait
        say(f"{done} of {counted(self._total, 'prompt')} answered after {now - self._start:.0f} s")


FIRST_WORD_SECONDS = 2.0
LONGEST_SILENCE_SECONDS = 60.0
FAILURES_TOLD = 10
"""Failed answers that are told one by one on stderr."""


def _tokens(llm: LLM, number: int, text: str, chat: bool) -> list[int]:
    tokens = llm.tokens_of_chat([{"role": "user", "content": text}]) if chat else llm.loaded.tokenizer.encode(text)
    if not tokens:
        raise BadValue(f"Prompt {number} has 0 tokens, and at least 1 is needed.", param="prompt")
    try:
        llm.max_new_tokens(tokens)
    except PromptTooLong as error:
        raise BadValue(f"Prompt {number} is too long. {error.message}", param="prompt") from error
    return tokens


def _write(completions: Iterable[Completion], path: Path | None) -> None:
    if path is None:
        _write_lines(completions, sys.stdout)
        return
    try:
        with path.open("w", encoding="utf-8") as file:
            _write_lines(completions, file)
    except OSError as error:
        raise Unreachable(f"The answers cannot be written to {path}: {error.strerror}.") from error


def _write_lines(completions: Iterable[Completion], file: TextIO) -> None:
    for completion in completions:
        line = asdict(replace(completion, error=None))
        line["completion_tokens"] = len(line.pop("tokens"))
        del line["error"]
        if completion.error is not None:
            line["error"] = {"message": completion.error.message, "code": completion.error.code}
        file.write(json_line(line) + "\n")


def json_line(value: object) -> str:
    """JSON without the characters at which some readers end a line, though JSON does not: U+0085, U+2028 and U+2029."""
    return json.dumps(value, ensure_ascii=False).translate(SEPARATORS)


SEPARATORS = {code: f"\\u{code:04x}" for code in (0x85, 0x2028, 0x2029)}


def _failure(completion: Completion) -> str | None:
    if completion.error is None:
        return None
    return f"prompt {completion.prompt}, choice {completion.choice}: {completion.error.message}"


def _summary(completions: list[Completion], seconds: float) -> str:
    first = {completion.prompt: completion for completion in completions}
    new = sum(len(completion.tokens) for completion in completions)
    asked = sum(completion.prompt_tokens for completion in first.values())
    cached = sum(completion.cached_tokens for completion in first.values())
    return (
        f"{counted(new, 'new token')} in {seconds:.1f} s, {new / seconds:.1f} tokens/s; {cached} of "
        f"{counted(asked, 'prompt token')} were cached"
    )
