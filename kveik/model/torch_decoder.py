"""From tokens to logits in torch: one decoder for every family, driven by a ModelSpec; read it from top to bottom."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from kveik.model.batch import StepBatch
from kveik.model.layers import Attention, FeedForward, Layer, Norm, StepTokens
from kveik.model.linear import Gated, GatedPair, Linear, PlainLinear, make_linear
from kveik.model.rope import RopeSpec, inverse_frequencies, key_mean, turns
from kveik.model.spec import ModelSpec
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
        """Write the step's keys and values, and return the wanted tokens' final hidden states, [wanted, hidden].

        storage: one per group of `spec.groups`, [blocks, layers in group, 2, kv_heads, block_size, head_dim].
        """
        steps = self._steps(batch)
        stream = self._embedded(batch.token_ids)
        last = len(self.layers) - 1
        for index, layer in enumerate(self.layers):
            # Behind the last attention only the wanted tokens matter.
            wanted = batch.wanted if index == last else None
            stream = layer(stream, storage[layer.group][:, layer.place], steps[layer.group], wanted)
        return self.norm(stream)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """[wanted, hidden] -> float32 [wanted, vocab]"""
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


class _Loading:
    """The tensors of one file, put together into the decoder's parts."""

    def __init__(self, file: ModelFile, dtype: torch.dtype) -> None:
        self.file = file
        self.spec = file.spec
        self.dtype = dtype
        self.bytes = 0

    @property
    def arithmetic(self) -> str:
        return "bfloat16" if self.dtype is torch.bfloat16 else "float32"

    def decoder(self, described: str) -> TorchDecoder:
        spec = self.spec
        embedding = self.tensor("embed_tokens.weight", spec.vocab, spec.hidden, dtype=self.dtype)
        projection = self.projection(embedding)
        layers = tuple(
            self.layer(layer, group, place)
            for layer, group, place in sorted(
                (layer, index, place) for index, group in enumerate(spec.groups) for place, layer in enumerate(group.layers)
            )
        )
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
            turning=self.turning(spec.rope, self.file.rope_divisors()),
            turning_local=None if spec.rope_local is None else self.turning(spec.rope_local, None),
            weight_bytes=self.bytes,
        )

    def layer(self, layer: int, group: int, place: int) -> Layer:
        spec, name = self.spec, f"layers.{layer}."
        before = "pre_feedforward_layernorm" if spec.post_norms else "post_attention_layernorm"
        return Layer(
            group=group,
            place=place,
            attention_norm=self.bare_norm(),
            attention=self.attention(name + "self_attn.", self.scales(name + "input_layernorm"), spec.windows[layer]),
            attention_post_norm=self.norm(name + "post_attention_layernorm", spec.hidden) if spec.post_norms else None,
            feed_forward_norm=self.bare_norm(),
            feed_forward=self.feed_forward(name + "mlp.", self.scales(name + before)),
            feed_forward_post_norm=self.norm(name + "post_feedforward_layernorm", spec.hidden) if spec.post_norms else None,
        )

    def feed_forward(self, name: str, scales: Tensor) -> FeedForward:
        spec = self.spec
        return FeedForward(
            inner=self.gated(name, scales),
            down=self.linear([name + "down_proj"], [spec.hidden], spec.intermediate, spec.mlp_bias),
        )

    def gated(self, name: str, scales: Tensor) -> Gated:
        spec = self.spec
        gate, up = (
            self.linear([name + part], [spec.intermediate], spec.hidden, spec.mlp_bias, scales)
            for part in ("gate_proj", "up_proj")
        )
        return GatedPair(gate, up, spec.activation)

    def attention(self, name: str, scales: Tensor, window: int | None) -> Attention:
        spec = self.spec
        queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        names = [name + part for part in ("q_proj", "k_proj", "v_proj")]
        return Attention(
            qkv=self.linear(names, [queries, keys, keys], spec.hidden, spec.qkv_bias, scales),
            output=self.linear([name + "o_proj"], [spec.hidden], queries, spec.output_bias),
            query_norm=self.norm(name + "q_norm", spec.head_dim) if spec.head_norms else None,
            key_norm=self.norm(name + "k_norm", spec.head_dim) if spec.head_norms else None,
            key_mean=self.key_mean(name + "k_proj.bias", window) if spec.keys_lean else None,
            heads=spec.heads,
            kv_heads=spec.kv_heads,
            head_dim=spec.head_dim,
            scale=spec.attention_scale,
            soft_cap=spec.attention_soft_cap,
        )

    def key_mean(self, name: str, window: int | None) -> Tensor:
        """[kv_heads, head_dim]"""
        spec = self.spec
        bias = self.tensor(name, spec.kv_heads * spec.head_dim, dtype=torch.float32).view(spec.kv_heads, spec.head_dim)
        if window is not None and spec.rope_local is not None:
            turning = self.turning(spec.rope_local, None)
        else:
            turning = self.turning(spec.rope, self.file.rope_divisors())
        return key_mean(bias, turning.frequencies, turning.attention_factor).to(self.dtype)

    def linear(self, names: list[str], outputs: list[int], inputs: int, biased: bool, scales: Tensor | None = None) -> Linear:
        """Several products with the same input become one, their rows one after another.

        scales: [inputs], what the norm before the product leaves to its weight's columns.
        """
        weight, bias = self.merged(names, outputs, inputs, biased, scales, self.dtype)
        return self.counted(make_linear(weight, bias, self.dtype))

    def merged(
        self, names: list[str], outputs: list[int], inputs: int, biased: bool, scales: Tensor | None, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor | None]:
        weight = torch.empty(sum(outputs), inputs, dtype=dtype)
        bias = torch.empty(sum(outputs), dtype=dtype) if biased else None
        first = 0
        for name, count in zip(names, outputs, strict=True):
            self.file.read(name + ".weight", weight[first : first + count], scales)
            if bias is not None:
                self.file.read(name + ".bias", bias[first : first + count])
            first += count
        return weight, bias

    def projection(self, embedding: Tensor) -> Linear:
        spec = self.spec
        if not spec.tied:
            return self.linear(["lm_head"], [spec.vocab], spec.hidden, False)
        linear = make_linear(embedding, None, self.dtype)
        # A plain product uses the table itself; a packed one has a copy in its own layout.
        return linear if isinstance(linear, PlainLinear) else self.counted(linear)

    def counted(self, linear: Linear) -> Linear:
        self.bytes += linear.weight_bytes
        return linear

    def scales(self, name: str) -> Tensor:
        """float32 [hidden]: a norm's weight and the square root of the width, for the product behind it."""
        weight = self.tensor(name + ".weight", self.spec.hidden, dtype=torch.float32)
        return weight.mul_(self.spec.hidden**0.5)

    def bare_norm(self) -> Norm:
        return Norm(self.floor(self.spec.hidden), None)

    def norm(self, name: str, width: int) -> Norm:
        weight = self.tensor(name + ".weight", width, dtype=torch.float32)
        return Norm(self.floor(width), weight.mul_(width**0.5))

    def floor(self, width: int) -> Tensor:
        return torch.tensor((width * self.spec.norm_eps) ** 0.5)

    def tensor(self, name: str, *shape: int, dtype: torch.dtype) -> Tensor:
        tensor = torch.empty(shape, dtype=dtype)
        self.file.read(name, tensor)
        return tensor

    def turning(self, rope: RopeSpec, divisors: Tensor | None) -> Turning:
        frequencies = inverse_frequencies(rope, self.spec.head_dim)
        return Turning(frequencies if divisors is None else frequencies / divisors, rope.attention_factor)


class _LoadingW8A8(_Loading):
    """The same with products in int8, quantised from float32."""

    @property
    def arithmetic(self) -> str:
        # Activations have one scale per row here, in the native kernels one per 256 inputs.
        return "w8a8 by rows"

    def linear(self, names: list[str], outputs: list[int], inputs: int, biased: bool, scales: Tensor | None = None) -> Linear:
        weight, bias = self.merged(names, outputs, inputs, biased, scales, torch.float32)
        return self.counted(W8A8Linear(weight, bias))

    def gated(self, name: str, scales: Tensor) -> Gated:
        spec, names = self.spec, [name + "gate_proj", name + "up_proj"]
        weight, bias = self.merged(names, [spec.intermediate] * 2, spec.hidden, spec.mlp_bias, scales, torch.float32)
        gated = W8A8Gated(weight, bias, spec.activation)
        self.bytes += gated.weight_bytes
        return gated

    def projection(self, embedding: Tensor) -> Linear:
        name = "embed_tokens" if self.spec.tied else "lm_head"
        return self.linear([name], [self.spec.vocab], self.spec.hidden, False)
