"""A GGUF file's metadata -> ModelSpec, as llama.cpp reads it. Refuses by name what the decoder does not have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from kveik.errors import ModelBroken, Unsupported
from kveik.model.rope import REAL_MOST, RopeSpec, yarn_attention_factor
from kveik.model.spec import COUNT_MOST, LAYERS_MOST, Architecture, ModelSpec, Shapes
from kveik.words import counted

ARCHITECTURES: dict[str, Architecture] = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3": "gemma3"}

GEMMA3_27B_LAYERS = 62
"""The one Gemma 3 whose attention scale comes from hidden / heads; files carry no key for it, llama.cpp knows it so too."""


def spec_from_gguf(metadata: Mapping[str, object], tensors: Shapes | None = None) -> ModelSpec:
    """tensors: shape by name in the file, where known; they tell tied embeddings, biases and the padded vocabulary.

    Raises Unsupported naming what we do not have, ModelBroken naming a missing or impossible key.
    """
    tensors = tensors or {}
    name = str(metadata.get("general.architecture"))
    if name not in ARCHITECTURES:
        raise Unsupported(f"The GGUF architecture '{name[:50]}' is not supported; these are: {', '.join(ARCHITECTURES)}.")
    keys = _Keys(metadata, name)
    architecture, gemma = ARCHITECTURES[name], name == "gemma3"
    _refuse(keys)
    layers = keys.count("block_count", most=LAYERS_MOST)
    hidden, heads = keys.count("embedding_length"), keys.count("attention.head_count")
    head_dim = keys.count("attention.key_length", hidden // heads)
    _refuse_uneven(keys, head_dim)
    spec = ModelSpec(
        architecture=architecture,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=keys.count("attention.head_count_kv", heads),
        head_dim=head_dim,
        intermediate=keys.count("feed_forward_length"),
        vocab=_vocab(keys, tensors),
        context=keys.count("context_length"),
        norm_eps=keys.real("attention.layer_norm_rms_epsilon"),
        activation="gelu_tanh" if gemma else "silu",
        tied="output.weight" not in tensors if tensors else gemma,
        windows=_windows(keys, architecture, layers),
        rope=_rope(keys),
        # The factor of Gemma 3 stretches the full layers only.
        rope_local=RopeSpec(base=keys.real("rope.freq_base_swa", 10_000.0)) if gemma else None,
        qkv_bias="blk.0.attn_q.bias" in tensors if tensors else architecture == "qwen2",
        output_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_down.bias" in tensors,
        head_norms=architecture in ("qwen3", "gemma3"),
        post_norms=gemma,
        embedding_scale=hidden**0.5 if gemma else None,
        attention_scale=keys.real("attention.scale", head_dim**-0.5),
        attention_soft_cap=keys.optional_real("attn_logit_softcapping") if gemma else None,
        final_soft_cap=keys.optional_real("final_logit_softcapping") if gemma else None,
    )
    if spec.heads % spec.kv_heads:
        raise ModelBroken(f"The model has {counted(spec.heads, 'head')}, which {spec.kv_heads} key/value heads do not divide.")
    if gemma and layers == GEMMA3_27B_LAYERS:
        return replace(spec, attention_scale=keys.real("attention.scale", (hidden / heads) ** -0.5))
    return spec


class _Keys:
    """The metadata under one architecture's prefix, checked as it is read."""

    def __init__(self, metadata: Mapping[str, object], architecture: str) -> None:
        self.metadata = metadata
        self.prefix = f"{architecture}."

    def value(self, key: str) -> object:
        return self.metadata.get(self.prefix + key)

    def count(self, key: str, default: int | None = None, *, most: int = COUNT_MOST) -> int:
        value = self.value(key)
        value = default if value is None else value
        if isinstance(value, list) and value and all(one == value[0] for one in value):
            value = value[0]
        if isinstance(value, list):
            raise Unsupported(f"The model's layers differ in '{self.prefix}{key}'; that is not supported.")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ModelBroken(f"The GGUF file needs a positive whole number '{self.prefix}{key}'; it has {str(value)[:50]}.")
        if value > most:
            raise ModelBroken(f"The GGUF file has a '{self.prefix}{key}' of {value}; no model has more than {most}.")
        return value

    def real(self, key: str, default: float | None = None) -> float:
        value = self.value(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < REAL_MOST:
            raise ModelBroken(f"The GGUF file needs a positive number '{self.prefix}{key}'; it has {str(value)[:50]}.")
        return float(value)

    def optional_real(self, key: str) -> float | None:
        return None if not self.value(key) else self.real(key)


def _refuse(keys: _Keys) -> None:
    if keys.value("expert_count"):
        raise Unsupported(f"The model is a mixture of experts ({keys.prefix}expert_count); that is not supported.")
    split = keys.metadata.get("split.count")
    if isinstance(split, int) and split > 1:
        raise Unsupported(f"The GGUF file is one of {counted(split, 'part')}; join them first (llama-gguf-split --merge).")
    if keys.value("attention.causal") is False:
        raise Unsupported("The model has bidirectional attention (attention.causal); that is not supported.")
    for key in ("logit_scale", "residual_scale", "embedding_scale", "attention.clamp_kqv", "attention.temperature_scale"):
        if keys.value(key):
            raise Unsupported(f"The model has '{keys.prefix}{key}'; that is not supported.")


def _refuse_uneven(keys: _Keys, head_dim: int) -> None:
    if keys.count("attention.value_length", head_dim) != head_dim:
        raise Unsupported("The model's keys and values differ in width; that is not supported.")
    if keys.count("rope.dimension_count", head_dim) != head_dim:
        raise Unsupported("The model rotates only part of each head (rope.dimension_count); that is not supported.")


def _vocab(keys: _Keys, tensors: Shapes) -> int:
    if "token_embd.weight" in tensors:
        return tensors["token_embd.weight"][0]
    tokens = keys.metadata.get("tokenizer.ggml.tokens")
    return len(tokens) if isinstance(tokens, list) else keys.count("vocab_size")


def _windows(keys: _Keys, architecture: Architecture, layers: int) -> tuple[int | None, ...]:
    """llama: on every layer (Mistral's, converted). gemma3: all but every sixth. qwen: none, for the files do not say whether
    their window is in use, and llama.cpp does not use it."""
    if architecture == "gemma3":
        window = keys.count("attention.sliding_window")
        pattern = keys.value("attention.sliding_window_pattern")
        if isinstance(pattern, list):
            if len(pattern) != layers:
                raise ModelBroken(f"The model's sliding_window_pattern does not name each of its {counted(layers, 'layer')}.")
            return tuple(window if slides else None for slides in pattern)
        every = keys.count("attention.sliding_window_pattern", 6)
        return tuple(None if (layer + 1) % every == 0 else window for layer in range(layers))
    if architecture == "llama" and keys.value("attention.sliding_window"):
        return (keys.count("attention.sliding_window"),) * layers
    return (None,) * layers


def _rope(keys: _Keys) -> RopeSpec:
    base = keys.real("rope.freq_base", 10_000.0)
    kind = str(keys.value("rope.scaling.type") or ("linear" if keys.value("rope.scale_linear") else "none"))
    attention = keys.real("rope.scaling.attn_factor", 1.0)
    if kind == "none":
        return RopeSpec(base=base, attention_factor=attention)
    factor = keys.real("rope.scaling.factor", keys.real("rope.scale_linear", 1.0))
    if kind == "linear":
        return RopeSpec(base=base, kind="linear", factor=factor, attention_factor=attention)
    if kind == "yarn":
        return RopeSpec(
            base=base,
            kind="yarn",
            factor=factor,
            original_context=keys.count("rope.scaling.original_context_length", keys.count("context_length")),
            beta_fast=keys.real("rope.scaling.yarn_beta_fast", 32.0),
            beta_slow=keys.real("rope.scaling.yarn_beta_slow", 1.0),
            attention_factor=attention * yarn_attention_factor(factor),
        )
    raise Unsupported(f"The model's rope kind '{kind[:50]}' is not supported; none, linear and yarn are.")
