"""Reads parts of a text with an engine, and keeps the final hidden state of every token.

The text goes through the engine as a request does: scheduler, block tables, storage in its own KV type, and chunks of
--prefill-chunk-size, so that a later chunk reads what earlier ones have stored. Only the decoder is replaced, by one that
records.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kveik.engine.executor import ModelExecutor
from kveik.engine.llm import LLM, none_failed
from kveik.errors import Broken
from kveik.measure.distance import NOT_FINITE
from kveik.model.decoder import Decoder
from kveik.model.spec import ModelSpec
from kveik.model.step_batch import StepBatch
from kveik.model.torch_decoder import TorchDecoder
from kveik.request.request import SamplingParams

Tokens = tuple[int, ...]

Logits = Callable[[Tensor], Tensor]
"""Hidden states [rows, hidden] -> float32 [rows, vocab]; the memory may be used again by the next call."""


def windows(text: Sequence[int], total: int, context: int, lead: Tokens = ()) -> list[Tokens]:
    """Disjoint windows of `context` tokens, `total` in all or as many as the text has, spread evenly over it.

    lead: tokens that every window begins with (the model's start token), which come on top of `total` and count for `context`.
    Every token but the first of a window is predicted from those before it, so a window has at least two.
    """
    width = context - len(lead)
    total = min(total, len(text))
    count = -(-total // width)
    spare = len(text) - total
    found = []
    for number in range(count):
        first = number * width + spare * number // max(count - 1, 1)
        found.append((*lead, *text[first : first + min(width, total - number * width)]))
    return [window for window in found if len(window) >= 2]


def prompts(text: Sequence[int], count: int, length: int, lead: Tokens = ()) -> list[Tokens]:
    """`count` prompts of `length` tokens, or of what the text has, from beginnings spread evenly over it."""
    length = min(length - len(lead), len(text))
    places = [(len(text) - length) * number // max(count, 1) for number in range(count)]
    return [(*lead, *text[place : place + length]) for place in places]


class RecordingDecoder:
    """Computes every token's final hidden state, records all of them, and returns those that were wanted."""

    def __init__(self, decoder: Decoder, record: Callable[[Tensor], None], start: int = 0) -> None:
        """`start`: tokens of the text that a cache has, and that are not computed."""
        self._decoder = decoder
        self._record = record
        self._recorded = start

    @property
    def spec(self) -> ModelSpec:
        return self._decoder.spec

    @property
    def dtype(self) -> torch.dtype:
        return self._decoder.dtype

    @property
    def weight_bytes(self) -> int:
        return self._decoder.weight_bytes

    @property
    def arithmetic(self) -> str:
        return self._decoder.arithmetic

    @property
    def described(self) -> str:
        return self._decoder.described

    def forward(self, batch: StepBatch, storage: Sequence[Tensor]) -> Tensor:
        """Runs the decoder on the next tokens of the one text."""
        count = len(batch.token_ids)
        assert int(batch.positions[0]) == self._recorded, "the only request is never preempted"
        self._recorded += count
        hidden = self._decoder.forward(replace(batch, logits_indices=torch.arange(count)), storage)
        self._record(hidden)
        return hidden[batch.logits_indices]

    def logits(self, hidden: Tensor) -> Tensor:
        return self._decoder.logits(hidden)


def executor_of(llm: LLM) -> ModelExecutor:
    """The executor over the real model."""
    executor = llm.loaded.engine.executor
    assert isinstance(executor, ModelExecutor)
    return executor


def read_text(llm: LLM, tokens: Sequence[int], progress: Callable[[int], None], *, found: int = 0) -> Tensor:
    """Returns the final hidden states of a text's tokens, [tokens, hidden], in the decoder's type.

    The engine must be idle, and its context must have room for one more token. found: the number of tokens that are cached or
    loaded; the states are those of the tokens after them. progress: is called with the number of tokens of each chunk. Raises
    Broken if the model's values are not finite.
    """
    executor = executor_of(llm)
    decoder = executor.decoder
    recorded: list[Tensor] = []

    def record(hidden: Tensor) -> None:
        # A copy: a decoder may use its memory again.
        recorded.append(hidden.clone())
        progress(len(hidden))

    executor.decoder = RecordingDecoder(decoder, record, found)
    try:
        none_failed(llm.generate([tokens], SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)))
    except Broken:
        if recorded and not all(bool(torch.isfinite(hidden).all()) for hidden in recorded):
            raise Broken(NOT_FINITE) from None
        raise
    finally:
        executor.decoder = decoder
    return torch.cat(recorded)


def head_of(decoder: Decoder) -> Logits:
    """Returns the product with the vocabulary, which turns kept hidden states into logits without holding the layers.

    A native model cannot be divided and stays whole; its weights take one byte each at most.
    """
    if not isinstance(decoder, TorchDecoder):
        return decoder.logits
    return replace(decoder, layers=(), embedding=torch.empty(0)).logits
