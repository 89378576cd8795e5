"""A model file's tensors, packed for the native kernels and put together into one native model."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kveik.errors import Unsupported
from kveik.kernels import native
from kveik.kernels.memory import Arena
from kveik.kernels.native_linear import FORMATS, GROUP, PackedWeight, Part, pack_float, pack_together
from kveik.model.native_decoder import NativeDecoder, NativeModel
from kveik.model.raw import runs
from kveik.model.rope import RopeSpec, inverse_frequencies, key_mean
from kveik.model.weights import ModelFile
from kveik.words import counted

Floats = NDArray[np.float32]

ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}
"""As native/kernels/rows.h numbers them."""

Packing = Callable[[ModelFile, Sequence[str], Sequence[int], int, Arena], list[PackedWeight]]
"""(file, names, outputs of each, inputs, where they are to lie) -> the parts of one product, rows one after another."""


def load_native_decoder(
    file: ModelFile, dtype: torch.dtype, packing: Packing, described: Callable[[Sequence[PackedWeight]], str]
) -> NativeDecoder:
    """dtype: of keys and values, unless the storage says otherwise.

    described: from the weights as they were packed to a line for the log.

    Raises Unsupported where a shape or a tensor's type does not allow the packing.
    """
    return _Assembly(file, packing).decoder(dtype, described)


def pack_blocks(file: ModelFile, names: Sequence[str], outputs: Sequence[int], inputs: int, arena: Arena) -> list[PackedWeight]:
    """The file's own blocks. A product of which a part has a type that no kernel reads becomes int8."""
    raws = [file.raw(name) for name in names]
    present = [raw for raw in raws if raw is not None and raw.kind.name in FORMATS]
    if len(present) < len(raws):
        return pack_int8(file, names, outputs, inputs, arena)
    return [pack_together(run[0].kind.name, [part.blocks for part in run], inputs, arena) for run in runs(present)]


def pack_int8(file: ModelFile, names: Sequence[str], outputs: Sequence[int], inputs: int, arena: Arena) -> list[PackedWeight]:
    """Any weights as int8, with one scale per group of inputs."""
    if inputs % GROUP:
        raise Unsupported(
            f"The model has products over {counted(inputs, 'input')}, which is no multiple of {GROUP}; the native "
            "kernels need that. "
            "Use --quantization bf16."
        )
    weight = torch.empty(sum(outputs), inputs)
    first = 0
    for name, count in zip(names, outputs, strict=True):
        file.read(name, weight[first : first + count])
        first += count
    return [pack_float(weight, arena)]


class _Assembly:
    """One file's tensors on their way into a native model."""

    def __init__(self, file: ModelFile, packing: Packing) -> None:
        self.file = file
        self.spec = file.spec
        self.packing = packing
        self.packed: list[PackedWeight] = []
        self.arena = Arena()

    def decoder(self, dtype: torch.dtype, described: Callable[[Sequence[PackedWeight]], str]) -> NativeDecoder:
        model = self.empty()
        spec = self.spec
        embedding = self.parts(["embed_tokens.weight"], [spec.vocab], spec.hidden)
        assert len(embedding) == 1, "a table of one tensor has one part"
        model.set_embedding(embedding[0].as_part())
        projection = embedding if spec.tied else self.parts(["lm_head.weight"], [spec.vocab], spec.hidden)
        model.set_projection([part.as_part() for part in projection], None)
        model.set_norm(self.floats("norm.weight", spec.hidden))
        model.add_rope(self.frequencies(spec.rope, self.file.rope_divisors()), spec.rope.attention_factor)
        if spec.rope_local is not None:
            model.add_rope(self.frequencies(spec.rope_local, None), spec.rope_local.attention_factor)
        for layer, (group, place) in enumerate(self.places()):
            self.add_layer(model, layer, group, place)
        weight_bytes = sum(part.bytes.nbytes for part in self.packed)
        arithmetic = "w8a8" if self.packing is pack_int8 else "w4a8"
        return NativeDecoder(spec, dtype, model, weight_bytes, arithmetic, described(self.packed))

    def empty(self) -> NativeModel:
        assert native.module is not None
        spec = self.spec
        # The scale itself is rounded to bfloat16, as in transformers.
        scale = 1.0 if spec.embedding_scale is None else torch.tensor(spec.embedding_scale, dtype=torch.bfloat16).item()
        model: NativeModel = native.module.Model(
            hidden=spec.hidden,
            intermediate=spec.intermediate,
            heads=spec.heads,
            kv_heads=spec.kv_heads,
            head_dim=spec.head_dim,
            vocab=spec.vocab,
            norm_eps=spec.norm_eps,
            attention_scale=spec.attention_scale,
            attention_soft_cap=spec.attention_soft_cap or 0.0,
            final_soft_cap=spec.final_soft_cap or 0.0,
            embedding_scale=scale,
            activation=ACTIVATIONS[spec.activation],
        )
        return model

    def places(self) -> list[tuple[int, int]]:
        """Per layer of the model: its group, and which of the group's layers it is."""
        places = {
            layer: (number, place) for number, group in enumerate(self.spec.groups) for place, layer in enumerate(group.layers)
        }
        return [places[layer] for layer in range(self.spec.layers)]

    def add_layer(self, model: NativeModel, layer: int, group: int, place: int) -> None:
        spec, name = self.spec, f"layers.{layer}."
        attention, mlp = name + "self_attn.", name + "mlp."
        queries, keys, wide = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim, spec.intermediate
        before = "pre_feedforward_layernorm" if spec.post_norms else "post_attention_layernorm"
        merged = [attention + part for part in ("q_proj", "k_proj", "v_proj")]
        pair = [mlp + part for part in ("gate_proj", "up_proj")]
        local = spec.rope_local is not None and spec.groups[group].window is not None
        model.add_layer(
            group=group,
            place=place,
            rope=int(local),
            attention_norm=self.floats(name + "input_layernorm.weight", spec.hidden),
            qkv=self.product(merged, [queries, keys, keys], spec.hidden),
            qkv_bias=self.bias(merged, [queries, keys, keys], spec.qkv_bias),
            query_norm=self.floats(attention + "q_norm.weight", spec.head_dim) if spec.head_norms else None,
            key_norm=self.floats(attention + "k_norm.weight", spec.head_dim) if spec.head_norms else None,
            key_mean=self.key_mean(attention + "k_proj.bias", local) if spec.keys_lean else None,
            output=self.product([attention + "o_proj"], [spec.hidden], queries),
            output_bias=self.bias([attention + "o_proj"], [spec.hidden], spec.output_bias),
            attention_post_norm=self.post_norm(name + "post_attention_layernorm"),
            feed_forward_norm=self.floats(f"{name}{before}.weight", spec.hidden),
            gate_up=self.product(pair, [wide, wide], spec.hidden),
            gate_up_bias=self.bias(pair, [wide, wide], spec.mlp_bias),
            down=self.product([mlp + "down_proj"], [spec.hidden], wide),
            down_bias=self.bias([mlp + "down_proj"], [spec.hidden], spec.mlp_bias),
            feed_forward_post_norm=self.post_norm(name + "post_feedforward_layernorm"),
        )

    def post_norm(self, name: str) -> Floats | None:
        return self.floats(f"{name}.weight", self.spec.hidden) if self.spec.post_norms else None

    def product(self, names: Sequence[str], outputs: Sequence[int], inputs: int) -> list[Part]:
        return [part.as_part() for part in self.parts([f"{name}.weight" for name in names], outputs, inputs)]

    def parts(self, names: Sequence[str], outputs: Sequence[int], inputs: int) -> list[PackedWeight]:
        parts = self.packing(self.file, names, outputs, inputs, self.arena)
        self.packed.extend(parts)
        return parts

    def bias(self, names: Sequence[str], outputs: Sequence[int], biased: bool) -> Floats | None:
        if not biased:
            return None
        return np.concatenate([self.floats(f"{name}.bias", count) for name, count in zip(names, outputs, strict=True)])

    def key_mean(self, name: str, local: bool) -> Floats:
        """float32 [kv_heads * head_dim]"""
        spec = self.spec
        rope = spec.rope_local if local and spec.rope_local is not None else spec.rope
        frequencies = torch.from_numpy(self.frequencies(rope, None if local else self.file.rope_divisors()))
        bias = torch.from_numpy(self.floats(name, spec.kv_heads * spec.head_dim)).view(spec.kv_heads, spec.head_dim)
        floats: Floats = key_mean(bias, frequencies, rope.attention_factor).flatten().numpy()
        return floats

    def floats(self, name: str, size: int) -> Floats:
        """float32 [size]"""
        tensor = torch.empty(size)
        self.file.read(name, tensor)
        floats: Floats = tensor.numpy()
        return floats

    def frequencies(self, rope: RopeSpec, divisors: Tensor | None) -> Floats:
        """float32 [head_dim / 2]"""
        frequencies = inverse_frequencies(rope, self.spec.head_dim)
        floats: Floats = (frequencies if divisors is None else frequencies / divisors).numpy()
        return floats
