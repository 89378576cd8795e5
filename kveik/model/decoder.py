"""Decoder protocol: the engine's view of a model in memory, and the choice of its way of computing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

import torch
from torch import Tensor

from kveik.errors import Unsupported
from kveik.kernels import native
from kveik.kernels.native_linear import PackedWeight
from kveik.model.choice import chosen, no_blocks_because, no_kernels_because
from kveik.model.native_loading import load_native_decoder, pack_blocks, pack_int8
from kveik.model.spec import ModelSpec
from kveik.model.step_batch import StepBatch
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
        """The type of hidden states, and of keys and values unless the storage says otherwise."""
        ...

    @property
    def weight_bytes(self) -> int:
        """Memory that the weights take, in every layout they are kept in."""
        ...

    @property
    def arithmetic(self) -> str:
        """The arithmetic that keys and values depend on, beside weights and tokens: bfloat16, float32, w8a8 or w4a8."""
        ...

    @property
    def described(self) -> str:
        """One line for the log: how the weights are multiplied, and why that way."""
        ...

    def forward(self, batch: StepBatch, storage: Sequence[Tensor]) -> Tensor:
        """Write the step's keys and values, and return the final hidden states of `logits_indices`, [outputs, hidden].

        storage: one per group of `spec.groups`, [blocks, layers in group, 2, kv_heads, block_size, head_dim].
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[outputs, hidden] -> float32 [outputs, vocab]; `sample.logprobs.as_rows` brings them to the host."""
        ...


def load_decoder(file: ModelFile, dtype: torch.dtype, quantization: Quantization = "auto") -> Decoder:
    """Load the weights in the way that is asked for; auto: the quickest way that loses nothing of the file's own quality.

    Raises Unsupported for a way that this machine or this file does not allow.
    """
    match quantization:
        case "w4a8":
            return _blocks(file, dtype, "as --quantization says")
        case "w8a8":
            return _int8(file, dtype)
        case "bf16":
            return _floats(file, dtype, "as --quantization says")
    choice = chosen(file)
    return (_blocks if choice.blocks else _floats)(file, dtype, choice.why)


def _floats(file: ModelFile, dtype: torch.dtype, why: str) -> Decoder:
    name = "bfloat16" if dtype is torch.bfloat16 else "float32"
    return load_torch_decoder(file, dtype, f"weights in {name}, multiplied by oneDNN: {why}")


def _blocks(file: ModelFile, dtype: torch.dtype, why: str) -> Decoder:
    if (reason := no_blocks_because(file)) is not None:
        raise Unsupported(
            f"--quantization w4a8 multiplies the blocks of a quantised GGUF file; here {reason}. Use bf16 or w8a8."
        )
    return load_native_decoder(file, dtype, pack_blocks, lambda packed: f"{_kinds(packed)}: {why}")


def _int8(file: ModelFile, dtype: torch.dtype) -> Decoder:
    if (reason := no_kernels_because(file)) is None:
        return load_native_decoder(file, dtype, pack_int8, lambda packed: f"{_kinds(packed)}: as --quantization says")
    check_w8a8()
    return load_torch_decoder(
        file, dtype, f"weights in int8 with a scale per output instead of one per 32 inputs, by oneDNN: {reason}", w8a8=True
    )


def _kinds(packed: Sequence[PackedWeight]) -> str:
    """The layout of native weights and their arithmetic, in words."""
    kinds = ", ".join(sorted({part.format for part in packed}))
    return f"weights in blocks ({kinds}) times int8 activations, native kernels for {native.isa()}"
