"""Tensors of a model by canonical name (transformers' names without 'model.'): the walk that checks and loaders share."""

from __future__ import annotations

from dataclasses import dataclass

from kveik.model.spec import ModelSpec

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Product:
    """Weights with the same input, multiplied as one: their outputs follow each other."""

    names: tuple[str, ...]
    """Without .weight and .bias."""

    outputs: tuple[int, ...]
    inputs: int
    biased: bool = False

    @property
    def shapes(self) -> dict[str, Shape]:
        both = list(zip(self.names, self.outputs, strict=True))
        weights = {f"{name}.weight": (outputs, self.inputs) for name, outputs in both}
        return weights | ({f"{name}.bias": (outputs,) for name, outputs in both} if self.biased else {})


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTensors:
    """Tensors of one layer. Norms by name, without .weight; None where the model has none."""

    group: int
    place: int
    """Index in the layers of its group."""

    local: bool
    """Whether its rope is `spec.rope_local`."""

    attention_norm: str
    qkv: Product
    query_norm: str | None
    key_norm: str | None
    output: Product
    attention_post_norm: str | None
    feed_forward_norm: str
    gate_up: Product
    down: Product
    feed_forward_post_norm: str | None

    def shapes(self, spec: ModelSpec) -> dict[str, Shape]:
        """Name -> shape."""
        wide = (self.attention_norm, self.attention_post_norm, self.feed_forward_norm, self.feed_forward_post_norm)
        norms = [(name, spec.hidden) for name in wide] + [(name, spec.head_dim) for name in (self.query_norm, self.key_norm)]
        shapes: dict[str, Shape] = {f"{name}.weight": (size,) for name, size in norms if name is not None}
        for product in (self.qkv, self.output, self.gate_up, self.down):
            shapes |= product.shapes
        return shapes


def embedding_of(spec: ModelSpec) -> Product:
    """The embedding table."""
    return Product(("embed_tokens",), (spec.vocab,), spec.hidden)


def projection_of(spec: ModelSpec) -> Product:
    """Hidden states to logits."""
    return embedding_of(spec) if spec.tied else Product(("lm_head",), (spec.vocab,), spec.hidden)


def layers_of(spec: ModelSpec) -> list[LayerTensors]:
    """All layers, in order."""
    places = {layer: (number, place) for number, group in enumerate(spec.groups) for place, layer in enumerate(group.layers)}
    return [_layer(spec, layer, *places[layer]) for layer in range(spec.layers)]


def _layer(spec: ModelSpec, layer: int, group: int, place: int) -> LayerTensors:
    name = f"layers.{layer}."
    attention, mlp = name + "self_attn.", name + "mlp."
    queries, keys, wide = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim, spec.intermediate
    merged = (attention + "q_proj", attention + "k_proj", attention + "v_proj")
    return LayerTensors(
        group=group,
        place=place,
        local=spec.rope_local is not None and spec.windows[layer] is not None,
        attention_norm=name + "input_layernorm",
        qkv=Product(merged, (queries, keys, keys), spec.hidden, spec.qkv_bias),
        query_norm=attention + "q_norm" if spec.head_norms else None,
        key_norm=attention + "k_norm" if spec.head_norms else None,
        output=Product((attention + "o_proj",), (spec.hidden,), queries, spec.output_bias),
        attention_post_norm=name + "post_attention_layernorm" if spec.post_norms else None,
        feed_forward_norm=name + ("pre_feedforward_layernorm" if spec.post_norms else "post_attention_layernorm"),
        gate_up=Product((mlp + "gate_proj", mlp + "up_proj"), (wide, wide), spec.hidden, spec.mlp_bias),
        down=Product((mlp + "down_proj",), (spec.hidden,), wide, spec.mlp_bias),
        feed_forward_post_norm=name + "post_feedforward_layernorm" if spec.post_norms else None,
    )


def tensor_shapes(spec: ModelSpec) -> dict[str, Shape]:
    """Every tensor that the decoder needs."""
    shapes: dict[str, Shape] = {**embedding_of(spec).shapes, "norm.weight": (spec.hidden,), **projection_of(spec).shapes}
    for layer in layers_of(spec):
        shapes |= layer.shapes(spec)
    return shapes
