"""kveik generate: prompts in, one JSON line per answer out; no server."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, TextIO

import typer

from kveik.cli.command import single
from kveik.cli.fetch import with_model
from kveik.cli.interrupts import interruptible
from kveik.cli.options import ENGINE, SAMPLING, Settings, takes
from kveik.cli.say import say
from kveik.engine.llm import LLM, Completion
from kveik.errors import BadValue, PromptTooLong, Unreachable
from kveik.request.request import SamplingParams
from kveik.words import counted


@takes(*ENGINE, SAMPLING)
def generate(
    settings: Settings,
    prompt: Annotated[list[str] | None, typer.Option("--prompt", "-p", help="A prompt; may be given several times.")] = None,
    prompts_file: Annotated[
        Path | None,
        typer.Option(help="File with a prompt on each line, as JSON where its name ends in .jsonl; - is stdin."),
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Each prompt is a user's message: ask through the model's chat template.")
    ] = False,
    output: Annotated[Path | None, typer.Option(help="Write the lines to this file instead of stdout.")] = None,
) -> None:
    """Complete prompts, many at once, without a server.

    \b
    kveik generate -p "Once upon a time" --max-tokens 40 --temperature 0
    kveik generate qwen2.5-coder-0.5b --chat -p "Write a haiku about yeast"
    kveik generate --prompts-file questions.txt --chat --output answers.jsonl

    Each answer is one JSON line: the prompt's number, the choice, the text, why it ended, and how many tokens went in, came out
    and were found in the cache. All prompts are in the engine together; a common beginning is computed once. What takes longer
    than 2 seconds says on stderr how far it is. An answer that fails has the finish_reason "error" and an "error" that tells
    why; the others go on, and the exit code is 1.

    Answers are drawn at temperature 0.7 among the likeliest tokens (--top-p 0.95), the same at every start; --seed gives
    others, and --temperature 0 takes the likeliest token each time.
    """
    prompts = _prompts(prompt or [], prompts_file)
    llm = LLM(with_model(settings.engine), say)
    tokens = [_tokens(llm, number, text, chat) for number, text in enumerate(prompts)]
    start = time.perf_counter()
    with interruptible():
        completions = llm.generate(tokens, settings.of(SamplingParams), Pace(len(tokens), time.perf_counter).show)
        seconds = time.perf_counter() - start
        # Not in a `finally`: Ctrl-C may have come in the middle of a step, whose books need not be in order.
        llm.close()
        _write(completions, output)
    say(_summary(completions, seconds))
    failures = [line for line in map(_failure, completions) if line]
    for line in failures[:FAILURES_TOLD]:
        say(line)
    if failures:
        say(f'{len(failures)} of {counted(len(completions), "answer")} failed; their lines have an "error".')
        raise typer.Exit(1)


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


def _prompts(typed: list[str], path: Path | None) -> list[str]:
    prompts = typed if path is None else [*typed, *_read(path)]
    if not prompts:
        raise BadValue("There is no prompt. Give one with -p TEXT, or a file of them with --prompts-file.", param="prompt")
    return prompts


def _read(path: Path) -> list[str]:
    try:
        text = sys.stdin.read() if str(path) == "-" else path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise Unreachable(f"The prompts in {path} are not UTF-8: {error.reason} at byte {error.start}.") from error
    except OSError as error:
        raise Unreachable(f"The prompts cannot be read from {path}: {error.strerror}.") from error
    lines = [line for line in text.splitlines() if line.strip()]
    return [_json_prompt(line, number) for number, line in enumerate(lines, 1)] if path.suffix == ".jsonl" else lines


def _json_prompt(line: str, number: int) -> str:
    """The prompt of one JSON line: a string, or an object with a `prompt`."""
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise BadValue(f"Prompt {number} of the file is not valid JSON: {error}.", param="prompts_file") from error
    prompt = value.get("prompt") if isinstance(value, dict) else value
    if not isinstance(prompt, str):
        raise BadValue(f'Prompt {number} of the file must be a string, or an object with a "prompt".', param="prompts_file")
    return prompt


def _tokens(llm: LLM, number: int, text: str, chat: bool) -> list[int]:
    tokens = llm.tokens_of_chat([{"role": "user", "content": text}]) if chat else llm.loaded.tokenizer.encode(text)
    if not tokens:
        raise BadValue(f"Prompt {number} has 0 tokens, and at least 1 is needed.", param="prompt")
    try:
        llm.room_after(tokens)
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
        file.write(json.dumps(line, ensure_ascii=False) + "\n")


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


app = single(generate)
