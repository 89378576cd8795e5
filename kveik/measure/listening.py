"""Reads a text with an engine and hears every token's final hidden state.

The text goes through the engine as a request does: scheduler, block tables, storage in its own KV type, and chunks of
--prefill-chunk-size, so that a later chunk reads what earlier ones have stored. Only the decoder is overheard.
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
from kveik.model.batch import StepBatch
from kveik.model.decoder import Decoder
from kveik.model.spec import ModelSpec
from kveik.model.torch_decoder import TorchDecoder
from kveik.request.request import SamplingParams

Logits = Callable[[Tensor], Tensor]
"""Hidden states [rows, hidden] -> float32 [rows, vocab]; the memory may be used again by the next call."""


class Listening:
    """A decoder that computes every token's final hidden state, tells of them, and answers with those that were wanted."""

    def __init__(self, decoder: Decoder, hear: Callable[[Tensor], None], start: int = 0) -> None:
        """`start`: tokens of the text that are found in a cache, and not computed."""
        self._decoder = decoder
        self._hear = hear
        self._heard = start

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
        """As the decoder's own, for steps that go on with the one text."""
        count = len(batch.token_ids)
        assert int(batch.positions[0]) == self._heard, (
            "a text that is alone is never preempted, and what is found of it is known"
        )
        self._heard += count
        hidden = self._decoder.forward(replace(batch, wanted=torch.arange(count)), storage)
        self._hear(hidden)
        return hidden[batch.wanted]

    def logits(self, hidden: Tensor) -> Tensor:
        return self._decoder.logits(hidden)


def executor_of(llm: LLM) -> ModelExecutor:
    """The executor over the real model."""
    executor = llm.loaded.engine.executor
    assert isinstance(executor, ModelExecutor)
    return executor


def read_text(llm: LLM, tokens: Sequence[int], progress: Callable[[int], None], *, found: int = 0) -> Tensor:
    """The final hidden states of a text's tokens, [tokens, hidden], in the type that the decoder gives.

    The engine must be idle, and its context must have room for one token more. found: tokens that it has in its cache or loads;
    the states are of those behind them. progress: gets the tokens of each chunk. Raises Broken where the model's values are
    not finite.
    """
    executor = executor_of(llm)
    decoder = executor.decoder
    heard: list[Tensor] = []

    def hear(hidden: Tensor) -> None:
        # A copy: a decoder may use its memory again.
        heard.append(hidden.clone())
        progress(len(hidden))

    executor.decoder = Listening(decoder, hear, found)
    try:
        none_failed(llm.generate([tokens], SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)))
    except Broken:
        if heard and not all(bool(torch.isfinite(hidden).all()) for hidden in heard):
            raise Broken(NOT_FINITE) from None
        raise
    finally:
        executor.decoder = decoder
    return torch.cat(heard)


def head_of(decoder: Decoder) -> Logits:
    """The product with the vocabulary alone: what turns kept hidden states into logits again, without holding the layers.

    A native model is one piece and stays whole; its weights take a byte each at most.
    """
    if not isinstance(decoder, TorchDecoder):
        return decoder.logits
    return replace(decoder, layers=(), embedding=torch.empty(0)).logits
