"""Reading of a file's tensors, as both decoders need it: norms, merged products, and what follows from ropes."""

from __future__ import annotations

import torch
from torch import Tensor

from kveik.model.rope import RopeSpec, inverse_frequencies, key_mean
from kveik.model.tensors import LayerTensors, Product
from kveik.model.weights import ModelFile


class TensorReader:
    """One file's tensors, on their way into a decoder."""

    def __init__(self, file: ModelFile) -> None:
        self.file = file
        self.spec = file.spec

    def floats(self, name: str, size: int) -> Tensor:
        """float32 [size]"""
        tensor = torch.empty(size)
        self.file.read(name, tensor)
        return tensor

    def weight(self, product: Product, dtype: torch.dtype, scales: Tensor | None = None) -> Tensor:
        """[all outputs, inputs]; scales: [inputs], multiplied with the columns."""
        weight = torch.empty(sum(product.outputs), product.inputs, dtype=dtype)
        for name, rows in zip(product.names, torch.split(weight, list(product.outputs)), strict=True):
            self.file.read(f"{name}.weight", rows, scales)
        return weight

    def bias(self, product: Product, dtype: torch.dtype) -> Tensor | None:
        """[all outputs]"""
        if not product.biased:
            return None
        bias = torch.empty(sum(product.outputs), dtype=dtype)
        for name, part in zip(product.names, torch.split(bias, list(product.outputs)), strict=True):
            self.file.read(f"{name}.bias", part)
        return bias

    def rope(self, *, local: bool) -> tuple[Tensor, float]:
        """Frequencies, float32 [head_dim / 2], and the factor of attention."""
        spec: RopeSpec = self.spec.rope_local if local and self.spec.rope_local is not None else self.spec.rope
        frequencies = inverse_frequencies(spec, self.spec.head_dim)
        divisors = None if local else self.file.rope_divisors()
        return (frequencies if divisors is None else frequencies / divisors), spec.attention_factor

    def key_mean(self, layer: LayerTensors) -> Tensor | None:
        """float32 [kv_heads, head_dim]; None where keys have nothing in common."""
        spec = self.spec
        if not spec.keys_lean:
            return None
        bias = self.floats(f"{layer.qkv.names[1]}.bias", spec.kv_heads * spec.head_dim)
        return key_mean(bias.view(spec.kv_heads, spec.head_dim), *self.rope(local=layer.local))
