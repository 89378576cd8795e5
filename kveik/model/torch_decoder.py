"""From tokens to logits in torch: one decoder for every family, driven by a ModelSpec; read it from top to bottom."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from kveik.model.layers import Attention, FeedForward, GatedFeedForward, Layer, Norm, StepTokens
from kveik.model.linear import Gated, GatedPair, Linear, PlainLinear, make_linear
from kveik.model.rope import turns
from kveik.model.spec import ModelSpec
from kveik.model.step_batch import StepBatch
from kveik.model.tensor_reader import TensorReader
from kveik.model.tensors import LayerTensors, Product, embedding_of, layers_of, projection_of
from kveik.model.w8a8 import W8A8Gated, W8A8Linear
from kveik.model.weights import ModelFile


@dataclass(frozen=True, slots=True)
class Turning:
    """A rope, ready to be applied."""

    frequencies: Tensor
    """float32 [head_dim / 2]"""

    attention_factor: float


@dataclass(frozen=True, slots=True)
class TorchDecoder:
    """A model in memory, made of torch's and oneDNN's operations. See `decoder.Decoder`, whose promises it keeps."""

    spec: ModelSpec
    dtype: torch.dtype
    weight_bytes: int
    arithmetic: str
    described: str
    embedding: Tensor
    """[vocab, hidden]"""

    layers: tuple[Layer, ...]
    norm: Norm
    projection: Linear
    """hidden -> vocab"""

    turning: Turning
    turning_local: Turning | None

    @torch.inference_mode()
    def forward(self, batch: StepBatch, storage: Sequence[Tensor]) -> Tensor:
        """Write the step's keys and values, and return the final hidden states of `logits_indices`, [outputs, hidden].

        storage: one per group of `spec.groups`, [blocks, layers in group, 2, kv_heads, block_size, head_dim].
        """
        steps = self._steps(batch)
        stream = self._embedded(batch.token_ids)
        last = len(self.layers) - 1
        for index, layer in enumerate(self.layers):
            # Behind the last attention only the tokens of `logits_indices` matter.
            logits_indices = batch.logits_indices if index == last else None
            stream = layer(stream, storage[layer.group][:, layer.place], steps[layer.group], logits_indices)
        return self.norm(stream)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """[outputs, hidden] -> float32 [outputs, vocab]"""
        logits = self.projection(hidden).float()
        cap = self.spec.final_soft_cap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    def _embedded(self, token_ids: Tensor) -> Tensor:
        embedded = functional.embedding(token_ids, self.embedding)
        if self.spec.embedding_scale is None:
            return embedded
        # The scale itself is rounded to the model's type, as in transformers.
        return embedded.mul_(torch.tensor(self.spec.embedding_scale, dtype=self.dtype))

    def _steps(self, batch: StepBatch) -> list[StepTokens]:
        """Per group; sines and cosines once per rope."""
        full = turns(batch.positions, self.turning.frequencies, self.turning.attention_factor, self.dtype)
        local = full
        if self.turning_local is not None:
            turning = self.turning_local
            local = turns(batch.positions, turning.frequencies, turning.attention_factor, self.dtype)
        return [StepTokens(group, *(full if group.window is None else local)) for group in batch.groups]


def load_torch_decoder(file: ModelFile, dtype: torch.dtype, described: str, *, w8a8: bool = False) -> TorchDecoder:
    """Read every tensor once, straight into the target type; a packed weight's source is let go before the next is read.

    dtype: of activations, and of weights unless `w8a8`.
    """
    with torch.inference_mode():
        return (_LoadingW8A8 if w8a8 else _Loading)(file, dtype).decoder(described)


class _Loading(TensorReader):
    """The tensors of one file, put together into the decoder's parts."""

    def __init__(self, file: ModelFile, dtype: torch.dtype) -> None:
        super().__init__(file)
        self.dtype = dtype
        self.bytes = 0

    @property
    def arithmetic(self) -> str:
        return "bfloat16" if self.dtype is torch.bfloat16 else "float32"

    def decoder(self, described: str) -> TorchDecoder:
        spec = self.spec
        embedding = self.weight(embedding_of(spec), self.dtype)
        projection = self.projection(embedding)
        layers = tuple(self.layer(layer) for layer in layers_of(spec))
        self.bytes += embedding.nbytes
        return TorchDecoder(
            spec=spec,
            dtype=self.dtype,
            arithmetic=self.arithmetic,
            described=described,
            layers=layers,
            embedding=embedding,
            norm=self.norm("norm", spec.hidden),
            projection=projection,
            turning=Turning(*self.rope(local=False)),
            turning_local=None if spec.rope_local is None else Turning(*self.rope(local=True)),
            weight_bytes=self.bytes,
        )

    def layer(self, layer: LayerTensors) -> Layer:
        return Layer(
            group=layer.group,
            place=layer.place,
            attention_norm=self.bare_norm(),
            attention=self.attention(layer),
            attention_post_norm=self.maybe_norm(layer.attention_post_norm, self.spec.hidden),
            feed_forward_norm=self.bare_norm(),
            feed_forward=self.feed_forward(layer),
            feed_forward_post_norm=self.maybe_norm(layer.feed_forward_post_norm, self.spec.hidden),
        )

    def feed_forward(self, layer: LayerTensors) -> FeedForward:
        return GatedFeedForward(self.gated(layer.gate_up, self.scales(layer.feed_forward_norm)), self.linear(layer.down))

    def gated(self, product: Product, scales: Tensor) -> Gated:
        gate, up = (
            self.linear(Product((name,), (outputs,), product.inputs, product.biased), scales)
            for name, outputs in zip(product.names, product.outputs, strict=True)
        )
        return GatedPair(gate, up, self.spec.activation)

    def attention(self, layer: LayerTensors) -> Attention:
        spec, key_mean = self.spec, self.key_mean(layer)
        return Attention(
            qkv=self.linear(layer.qkv, self.scales(layer.attention_norm)),
            output=self.linear(layer.output),
            query_norm=self.maybe_norm(layer.query_norm, spec.head_dim),
            key_norm=self.maybe_norm(layer.key_norm, spec.head_dim),
            key_mean=None if key_mean is None else key_mean.to(self.dtype),
            heads=spec.heads,
            kv_heads=spec.kv_heads,
            head_dim=spec.head_dim,
            scale=spec.attention_scale,
            soft_cap=spec.attention_soft_cap,
        )

    def linear(self, product: Product, scales: Tensor | None = None) -> Linear:
        """scales: [inputs], left by the norm before the product to its weight's columns."""
        return self.counted(make_linear(self.weight(product, self.dtype, scales), self.bias(product, self.dtype), self.dtype))

    def projection(self, embedding: Tensor) -> Linear:
        if not self.spec.tied:
            return self.linear(projection_of(self.spec))
        linear = make_linear(embedding, None, self.dtype)
        # A plain product uses the table itself; a packed one has a copy in its own layout.
        return linear if isinstance(linear, PlainLinear) else self.counted(linear)

    def counted(self, linear: Linear) -> Linear:
        self.bytes += linear.weight_bytes
        return linear

    def scales(self, name: str) -> Tensor:
        """float32 [hidden]: a norm's weight and the square root of the width, for the product behind it."""
        return self.floats(f"{name}.weight", self.spec.hidden).mul_(self.spec.hidden**0.5)

    def bare_norm(self) -> Norm:
        return Norm(self.floor(self.spec.hidden), None)

    def maybe_norm(self, name: str | None, width: int) -> Norm | None:
        return None if name is None else self.norm(name, width)

    def norm(self, name: str, width: int) -> Norm:
        return Norm(self.floor(width), self.floats(f"{name}.weight", width).mul_(width**0.5))

    def floor(self, width: int) -> Tensor:
        return torch.tensor((width * self.spec.norm_eps) ** 0.5)


class _LoadingW8A8(_Loading):
    """The same with products in int8, quantised from float32."""

    @property
    def arithmetic(self) -> str:
        # Activations have one scale per row here, in the native kernels one per 256 inputs.
        return "w8a8 by rows"

    def linear(self, product: Product, scales: Tensor | None = None) -> Linear:
        return self.counted(W8A8Linear(self.weight(product, torch.float32, scales), self.bias(product, torch.float32)))

    def gated(self, product: Product, scales: Tensor) -> Gated:
        weight, bias = self.weight(product, torch.float32, scales), self.bias(product, torch.float32)
        gated = W8A8Gated(weight, bias, self.spec.activation)
        self.bytes += gated.weight_bytes
        return gated

    def projection(self, embedding: Tensor) -> Linear:
        return self.linear(projection_of(self.spec))
