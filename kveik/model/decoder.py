"""A model in memory that computes: what the engine asks of it, and which way of computing it gets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

import torch
from torch import Tensor

from kveik.errors import Unsupported
from kveik.model.batch import StepBatch
from kveik.model.spec import ModelSpec
from kveik.model.torch_decoder import load_torch_decoder
from kveik.model.w8a8 import check_w8a8
from kveik.model.weights import ModelFile

Quantization = Literal["auto", "bf16", "w8a8", "w4a8"]


class Decoder(Protocol):
    """From tokens to logits. Holds no state between steps: that lies in the storage it is given."""

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def dtype(self) -> torch.dtype:
        """Of hidden states, and of keys and values unless the storage says otherwise."""
        ...

    @property
    def weight_bytes(self) -> int:
        """Memory that the weights take, in every layout they are kept in."""
        ...

    @property
    def described(self) -> str:
        """One line for the log: how the weights are multiplied, and why that way."""
        ...

    def forward(self, batch: StepBatch, storage: Sequence[Tensor]) -> Tensor:
        """Write the step's keys and values, and return the wanted tokens' final hidden states, [wanted, hidden].

        storage: one per group of `spec.groups`, [blocks, layers in group, 2, kv_heads, block_size, head_dim].
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[wanted, hidden] -> float32 [wanted, vocab]"""
        ...


def load_decoder(file: ModelFile, dtype: torch.dtype, quantization: Quantization = "auto") -> Decoder:
    """Load the weights in the way that is asked for; auto: the best way that this machine and this file allow.

    Raises Unsupported for a way that they do not allow.
    """
    if quantization == "w4a8":
        raise Unsupported("--quantization w4a8 is not there yet; bf16 and w8a8 are.")
    if quantization == "w8a8":
        check_w8a8()
        return load_torch_decoder(
            file, dtype, "weights in int8 with a scale per output, multiplied by oneDNN: as --quantization says", w8a8=True
        )
    name = "bfloat16" if dtype is torch.bfloat16 else "float32"
    why = "as --quantization says" if quantization == "bf16" else "nothing quicker is there for this file on this machine"
    return load_torch_decoder(file, dtype, f"weights in {name}, multiplied by oneDNN: {why}")
