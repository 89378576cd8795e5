"""Packing of a model file's tensors for the native kernels, and their assembly into one native model."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from kveik.errors import Unsupported
from kveik.kernels import native
from kveik.kernels.memory import Arena
from kveik.kernels.native_linear import FORMATS, GROUP, PackedWeight, Part, pack_float, pack_together
from kveik.model.gguf import runs
from kveik.model.native_decoder import NativeDecoder, NativeLayer, NativeModel
from kveik.model.tensor_reader import TensorReader
from kveik.model.tensors import LayerTensors, Product, embedding_of, layers_of, projection_of
from kveik.model.weights import ModelFile
from kveik.words import counted

Floats = NDArray[np.float32]

ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}
"""Numbers of native/kernels/rows.h."""

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
            f"The model has products over {counted(inputs, 'input')}, which is not a multiple of {GROUP}; the native "
            "kernels need that. Use --quantization bf16."
        )
    weight = torch.empty(sum(outputs), inputs)
    first = 0
    for name, count in zip(names, outputs, strict=True):
        file.read(name, weight[first : first + count])
        first += count
    return [pack_float(weight, arena)]


class _Assembly(TensorReader):
    """One file's tensors on their way into a native model."""

    def __init__(self, file: ModelFile, packing: Packing) -> None:
        super().__init__(file)
        self.packing = packing
        self.packed: list[PackedWeight] = []
        self.arena = Arena()

    def decoder(self, dtype: torch.dtype, described: Callable[[Sequence[PackedWeight]], str]) -> NativeDecoder:
        model, spec = self.empty(), self.spec
        embedding = self.parts(embedding_of(spec))
        assert len(embedding) == 1, "a table of one tensor has one part"
        model.set_embedding(embedding[0])
        model.set_projection(embedding if spec.tied else self.parts(projection_of(spec)), None)
        model.set_norm(self.floats("norm.weight", spec.hidden).numpy())
        for local in (False, True)[: 1 if spec.rope_local is None else 2]:
            frequencies, factor = self.rope(local=local)
            model.add_rope(frequencies.numpy(), factor)
        for layer in layers_of(spec):
            model.add_layer(**self.layer(layer))
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

    def layer(self, layer: LayerTensors) -> NativeLayer:
        spec, key_mean = self.spec, self.key_mean(layer)
        return NativeLayer(
            group=layer.group,
            place=layer.place,
            rope=int(layer.local),
            attention_norm=self.norm(layer.attention_norm, spec.hidden),
            qkv=self.parts(layer.qkv),
            qkv_bias=self.float_bias(layer.qkv),
            query_norm=self.maybe_norm(layer.query_norm, spec.head_dim),
            key_norm=self.maybe_norm(layer.key_norm, spec.head_dim),
            key_mean=None if key_mean is None else key_mean.flatten().numpy(),
            output=self.parts(layer.output),
            output_bias=self.float_bias(layer.output),
            attention_post_norm=self.maybe_norm(layer.attention_post_norm, spec.hidden),
            feed_forward_norm=self.norm(layer.feed_forward_norm, spec.hidden),
            gate_up=self.parts(layer.gate_up),
            gate_up_bias=self.float_bias(layer.gate_up),
            down=self.parts(layer.down),
            down_bias=self.float_bias(layer.down),
            feed_forward_post_norm=self.maybe_norm(layer.feed_forward_post_norm, spec.hidden),
        )

    def parts(self, product: Product) -> list[Part]:
        names = [f"{name}.weight" for name in product.names]
        packed = self.packing(self.file, names, product.outputs, product.inputs, self.arena)
        self.packed.extend(packed)
        return [part.as_part() for part in packed]

    def norm(self, name: str, size: int) -> Floats:
        floats: Floats = self.floats(f"{name}.weight", size).numpy()
        return floats

    def maybe_norm(self, name: str | None, size: int) -> Floats | None:
        return None if name is None else self.norm(name, size)

    def float_bias(self, product: Product) -> Floats | None:
        bias = self.bias(product, torch.float32)
        return None if bias is None else bias.numpy()
