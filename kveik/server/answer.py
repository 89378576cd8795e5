"""Answers in OpenAI's format, whole or in chunks, from the same parts of the engine's output. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kveik.engine.stream import Delta, Stream
from kveik.request.sequence import FinishReason
from kveik.server.answer_logprobs import Placement, Scored, chat_logprobs, completion_logprobs, prompt_logprobs
from kveik.server.translate import Call
from kveik.text.tokenizer import Tokenizer


@dataclass(slots=True)
class ChoiceParts:
    """New parts of one choice, or all of them: a whole answer is one large chunk."""

    index: int
    """Index in the call: prompt times n plus choice."""

    text: str = ""
    scored: list[Scored] = field(default_factory=list)
    echoed: int = 0
    """Number of entries at the beginning of `scored` that belong to the prompt."""

    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None

    @property
    def empty(self) -> bool:
        return not (self.text or self.scored or self.finish_reason)

    @classmethod
    def joined(cls, index: int, news: Sequence[ChoiceParts]) -> ChoiceParts:
        """Returns all parts of one choice, joined in their order."""
        whole = cls(index, text="".join(parts.text for parts in news))
        whole.scored = [entry for parts in news for entry in parts.scored]
        whole.echoed = sum(parts.echoed for parts in news)
        if news:
            whole.finish_reason, whole.stop_reason = news[-1].finish_reason, news[-1].stop_reason
        return whole


class AnswerShape(Protocol):
    """Format of one endpoint's answers. Alternatives: `CompletionShape`, `ChatShape`."""

    def whole(self, choices: Sequence[ChoiceParts], streams: Sequence[Stream]) -> dict[str, object]:
        """The non-streamed answer."""
        ...

    def chunks(self, parts: ChoiceParts, streams: Sequence[Stream]) -> list[dict[str, object]]:
        """New parts of one choice, as zero or more chunks of a stream."""
        ...

    def usage_chunk(self, streams: Sequence[Stream]) -> dict[str, object]:
        """The last chunk, without choices."""
        ...


def parts_of(delta: Delta, call: Call, prompt: int, stream: Stream, *, first: bool) -> ChoiceParts:
    """Returns one delta as parts; the `first` of a choice includes the echo of its prompt."""
    parts = ChoiceParts(prompt * call.n + delta.choice, finish_reason=delta.finish_reason)
    parts.stop_reason = call.stop_reason(delta.stop_reason)
    if first and call.echo is not None:
        parts.text = call.echo[prompt]
        if call.logprobs is not None:
            # Where the engine failed early there may be no entries to pair the tokens with.
            parts.scored = list(zip(call.requests[prompt].prompt, stream.prompt_logprobs or (), strict=False))
            parts.echoed = len(parts.scored)
    if not call.echo_only:
        parts.text += delta.text
        if call.logprobs is not None:
            parts.scored += [(entry.token, entry) for entry in delta.logprobs]
    return parts


def usage(call: Call, streams: Sequence[Stream]) -> dict[str, object]:
    """Returns the usage: every prompt once, whatever n is, and the new tokens of all choices."""
    completion = 0 if call.echo_only else sum(stream.completion_tokens for stream in streams)
    return {
        "prompt_tokens": call.prompt_tokens,
        "completion_tokens": completion,
        "total_tokens": call.prompt_tokens + completion,
        "prompt_tokens_details": {"cached_tokens": sum(stream.cached_tokens for stream in streams)},
    }


class _Frame:
    """Fields around the choices that all answers of one call share."""

    def __init__(self, call: Call, tokenizer: Tokenizer, *, created: int, fingerprint: str) -> None:
        self._call = call
        self._tokenizer = tokenizer
        self._created = created
        self._fingerprint = fingerprint

    def _frame(self, kind: str, choices: list[dict[str, object]]) -> dict[str, object]:
        return {
            "id": self._call.id,
            "object": kind,
            "created": self._created,
            "model": self._call.model,
            "system_fingerprint": self._fingerprint,
            "choices": choices,
        }

    def _chunk(self, kind: str, choice: dict[str, object], streams: Sequence[Stream]) -> dict[str, object]:
        frame = self._frame(kind, [choice])
        if self._call.include_usage:
            # OpenAI: a stream that ends with its usage has null until then; others lack the field.
            frame["usage"] = usage(self._call, streams) if self._call.continuous_usage else None
        return frame

    def _ending(self, parts: ChoiceParts) -> dict[str, object]:
        return {"finish_reason": parts.finish_reason, "stop_reason": parts.stop_reason}

    def _prompt_logprobs(self, stream: Stream) -> list[dict[str, object] | None]:
        return prompt_logprobs(stream.prompt_logprobs or (), self._tokenizer, top=self._call.prompt_logprobs or 0)


class CompletionShape(_Frame):
    """POST /v1/completions. Keeps, per choice, the offsets of its tokens in the text."""

    def __init__(self, call: Call, tokenizer: Tokenizer, *, created: int, fingerprint: str) -> None:
        super().__init__(call, tokenizer, created=created, fingerprint=fingerprint)
        self._placements: dict[int, Placement] = {}

    def whole(self, choices: Sequence[ChoiceParts], streams: Sequence[Stream]) -> dict[str, object]:
        written = [self._choice(parts) for parts in choices]
        if self._call.prompt_logprobs is not None:
            for parts, choice in zip(choices, written, strict=True):
                choice["prompt_logprobs"] = self._prompt_logprobs(streams[parts.index // self._call.n])
        return self._frame("text_completion", written) | {"usage": usage(self._call, streams)}

    def chunks(self, parts: ChoiceParts, streams: Sequence[Stream]) -> list[dict[str, object]]:
        if parts.empty:
            return []
        choice = self._choice(parts)
        shown = parts.text or parts.finish_reason or choice["logprobs"]
        return [self._chunk("text_completion", choice, streams)] if shown else []

    def usage_chunk(self, streams: Sequence[Stream]) -> dict[str, object]:
        return self._frame("text_completion", []) | {"usage": usage(self._call, streams)}

    def _choice(self, parts: ChoiceParts) -> dict[str, object]:
        logprobs = self._logprobs(parts) if self._call.logprobs is not None else None
        return {"index": parts.index, "text": parts.text, "logprobs": logprobs, **self._ending(parts)}

    def _logprobs(self, parts: ChoiceParts) -> dict[str, object] | None:
        """Returns None where a part of a stream has no token to show yet."""
        last = parts.finish_reason is not None
        placed = self._placement(parts.index).take(parts.scored, echoed=parts.echoed, text=parts.text, last=last)
        return completion_logprobs(placed, self._tokenizer, top=self._call.logprobs or 0) if placed or last else None

    def _placement(self, index: int) -> Placement:
        if index not in self._placements:
            prompt = index // self._call.n
            request = self._call.requests[prompt]
            self._placements[index] = Placement(
                self._tokenizer,
                request.prompt,
                skip_special=request.sampling.skip_special_tokens,
                echo=None if self._call.echo is None else self._call.echo[prompt],
            )
        return self._placements[index]


class ChatShape(_Frame):
    """POST /v1/chat/completions. Keeps the set of choices whose role has been sent."""

    def __init__(self, call: Call, tokenizer: Tokenizer, *, created: int, fingerprint: str) -> None:
        super().__init__(call, tokenizer, created=created, fingerprint=fingerprint)
        self._begun: set[int] = set()

    def whole(self, choices: Sequence[ChoiceParts], streams: Sequence[Stream]) -> dict[str, object]:
        written: list[dict[str, object]] = [
            {
                "index": parts.index,
                "message": {"role": "assistant", "content": parts.text, "refusal": None},
                "logprobs": self._logprobs(parts),
                **self._ending(parts),
            }
            for parts in choices
        ]
        answer = self._frame("chat.completion", written) | {"usage": usage(self._call, streams)}
        if self._call.prompt_logprobs is not None:
            answer["prompt_logprobs"] = self._prompt_logprobs(streams[0])
        return answer

    def chunks(self, parts: ChoiceParts, streams: Sequence[Stream]) -> list[dict[str, object]]:
        chunks = []
        if parts.index not in self._begun:
            self._begun.add(parts.index)
            opening = ChoiceParts(parts.index)
            chunks.append(self._delta(opening, {"role": "assistant", "content": ""}, streams))
        if not parts.empty:
            chunks.append(self._delta(parts, {"content": parts.text} if parts.text else {}, streams))
        return chunks

    def usage_chunk(self, streams: Sequence[Stream]) -> dict[str, object]:
        return self._frame("chat.completion.chunk", []) | {"usage": usage(self._call, streams)}

    def _delta(self, parts: ChoiceParts, delta: dict[str, object], streams: Sequence[Stream]) -> dict[str, object]:
        choice = {"index": parts.index, "delta": delta, "logprobs": self._logprobs(parts), **self._ending(parts)}
        return self._chunk("chat.completion.chunk", choice, streams)

    def _logprobs(self, parts: ChoiceParts) -> dict[str, object] | None:
        if self._call.logprobs is None or not (parts.scored or parts.finish_reason):
            return None
        return {"content": chat_logprobs(parts.scored, self._tokenizer, top=self._call.logprobs)}
