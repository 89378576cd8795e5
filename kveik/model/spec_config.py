"""A Hugging Face config.json -> ModelSpec. Refuses by name what the decoder does not have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from kveik.errors import ModelBroken, Unsupported
from kveik.model.rope import REAL_MOST, RopeSpec, rope_from_config
from kveik.model.spec import COUNT_MOST, LAYERS_MOST, Architecture, ModelSpec
from kveik.words import counted

Config = Mapping[str, Any]

ARCHITECTURES: dict[str, Architecture] = {
    "llama": "llama",
    "mistral": "mistral",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma3_text": "gemma3",
}

ACTIVATIONS: dict[str, Literal["silu", "gelu_tanh"]] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
}

REFUSED = {
    "quantization_config": "weights quantised by another tool",
    "num_local_experts": "mixture of experts",
    "num_experts": "mixture of experts",
    "n_routed_experts": "mixture of experts",
    "use_bidirectional_attention": "bidirectional attention",
    "attention_sinks": "attention sinks",
    "vision_config": "a vision tower",
    "audio_config": "an audio tower",
    "is_encoder_decoder": "an encoder",
    "cross_attention_layers": "cross attention",
}
"""Keys that, where they say anything, change the arithmetic into one that the decoder does not have."""


def spec_from_config(config: Config) -> ModelSpec:
    """Raises Unsupported naming what we do not have, ModelBroken naming a missing or impossible value."""
    architecture = _architecture(config)
    layers = _count(config, "num_hidden_layers", most=LAYERS_MOST)
    hidden, heads = _count(config, "hidden_size"), _count(config, "num_attention_heads")
    gemma = architecture == "gemma3"
    head_dim = _head_dim(config, architecture, hidden, heads)
    context = _count(config, "max_position_embeddings", default=DEFAULT_CONTEXT.get(architecture))
    rope, rope_local = _ropes(config, context, gemma)
    bias = bool(config.get("attention_bias", False)) and architecture != "mistral"
    spec = ModelSpec(
        architecture=architecture,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=_count(config, "num_key_value_heads", default=heads),
        head_dim=head_dim,
        intermediate=_count(config, "intermediate_size"),
        vocab=_count(config, "vocab_size"),
        context=context,
        norm_eps=_real(config, "rms_norm_eps", 1e-6),
        activation=_activation(config, gemma),
        tied=bool(config.get("tie_word_embeddings", gemma)),
        windows=_windows(config, architecture, layers),
        rope=rope,
        rope_local=rope_local,
        qkv_bias=bias or architecture == "qwen2",
        output_bias=bias,
        mlp_bias=bool(config.get("mlp_bias", False)) and architecture == "llama",
        head_norms=architecture in ("qwen3", "gemma3"),
        post_norms=gemma,
        embedding_scale=hidden**0.5 if gemma else None,
        attention_scale=(_real(config, "query_pre_attn_scalar", 256.0) if gemma else head_dim) ** -0.5,
        attention_soft_cap=_optional_real(config, "attn_logit_softcapping") if gemma else None,
        final_soft_cap=_optional_real(config, "final_logit_softcapping") if gemma else None,
    )
    if spec.heads % spec.kv_heads:
        raise ModelBroken(f"The model has {counted(spec.heads, 'head')}, which {spec.kv_heads} key/value heads do not divide.")
    return spec


DEFAULT_CONTEXT: dict[str, int] = {"gemma3": 131072}
"""The value that transformers assumes where Google's published configs leave the key out."""


def _architecture(config: Config) -> Architecture:
    kind = str(config.get("model_type"))
    classes = config.get("architectures")
    for key, meaning in REFUSED.items():
        if config.get(key):
            raise Unsupported(f"The model '{kind[:50]}' has {meaning} ({key}); that is not supported.")
    if kind not in ARCHITECTURES:
        raise Unsupported(f"The model type '{kind[:50]}' is not supported; these are: {', '.join(ARCHITECTURES)}.")
    for name in classes if isinstance(classes, list) else []:
        if not str(name).endswith("ForCausalLM"):
            raise Unsupported(f"The model's head '{str(name)[:80]}' is not supported; only ...ForCausalLM is.")
    if _real(config, "partial_rotary_factor", 1.0) != 1.0:
        raise Unsupported("The model rotates only part of each head (partial_rotary_factor); that is not supported.")
    return ARCHITECTURES[kind]


def _head_dim(config: Config, architecture: Architecture, hidden: int, heads: int) -> int:
    fixed = {"qwen3": 128, "gemma3": 256}.get(architecture)
    if fixed is None and config.get("head_dim") is None and hidden % heads:
        raise ModelBroken(
            f"The model's width {hidden} is not a multiple of its {counted(heads, 'head')}, and head_dim is not given."
        )
    head_dim = _count(config, "head_dim", default=fixed or hidden // heads)
    if head_dim % 2:
        raise Unsupported(f"The model's heads are {head_dim} wide; rotary positions need an even number.")
    return head_dim


def _activation(config: Config, gemma: bool) -> Literal["silu", "gelu_tanh"]:
    key, default = ("hidden_activation", "gelu_pytorch_tanh") if gemma else ("hidden_act", "silu")
    name = str(config.get(key) or default)
    if name not in ACTIVATIONS:
        raise Unsupported(f"The activation '{name[:50]}' ({key}) is not supported; {', '.join(ACTIVATIONS)} are.")
    return ACTIVATIONS[name]


def _windows(config: Config, architecture: Architecture, layers: int) -> tuple[int | None, ...]:
    """Per layer. A list of layer types wins; else each family's own rule."""
    window = None if config.get("sliding_window") is None else _count(config, "sliding_window")
    types = config.get("layer_types")
    if types is not None:
        return _windows_by_type(types, window, layers)
    if architecture == "mistral":
        return (window,) * layers
    if architecture == "gemma3":
        # The default is transformers'; Google's 270m and 1b spell out layer types or the pattern.
        window = window if "sliding_window" in config else 4096
        pattern = _count(config, "sliding_window_pattern", default=6)
        return tuple(None if (layer + 1) % pattern == 0 else window for layer in range(layers))
    if architecture in ("qwen2", "qwen3") and config.get("use_sliding_window", False) and window is not None:
        full = _count(config, "max_window_layers", default=28, least=0)
        return tuple(window if layer >= full else None for layer in range(layers))
    return (None,) * layers


def _windows_by_type(types: object, window: int | None, layers: int) -> tuple[int | None, ...]:
    if not isinstance(types, list) or len(types) != layers:
        raise ModelBroken(f"The model's layer_types do not name each of its {counted(layers, 'layer')}.")
    for name in types:
        if name not in ("full_attention", "sliding_attention"):
            raise Unsupported(f"The layer type '{str(name)[:50]}' is not supported; full and sliding attention are.")
    if window is None and "sliding_attention" in types:
        raise ModelBroken("The model's layer_types name sliding attention, and it has no sliding_window.")
    return tuple(window if name == "sliding_attention" else None for name in types)


def _ropes(config: Config, context: int, gemma: bool) -> tuple[RopeSpec, RopeSpec | None]:
    """The rope of full layers, and of windowed ones where it is another. Old and new spelling of the key."""
    old, new = config.get("rope_scaling"), config.get("rope_parameters")
    base = _real(config, "rope_theta", 1_000_000.0 if gemma else 10_000.0)
    local = _real(config, "rope_local_base_freq", 10_000.0)
    if any(given is not None and not isinstance(given, Mapping) for given in (old, new)):
        raise ModelBroken("The model's rope_scaling and rope_parameters must be objects.")
    original = config.get("original_max_position_embeddings")
    if isinstance(new, Mapping) and any(isinstance(value, Mapping) for value in new.values()):
        full = rope_from_config(new.get("full_attention") or {}, base, context, original)
        sliding = rope_from_config(new.get("sliding_attention") or {}, local if gemma else base, context, original)
        return full, sliding
    ropes = {rope_from_config(given, base, context, original) for given in (old, new) if given}
    if len(ropes) > 1:
        raise ModelBroken("The model's rope_scaling and rope_parameters contradict each other.")
    rope = ropes.pop() if ropes else RopeSpec(base=base)
    return rope, RopeSpec(base=local) if gemma else None


def _count(config: Config, key: str, *, default: int | None = None, least: int = 1, most: int = COUNT_MOST) -> int:
    value = config.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ModelBroken(f"The model's config.json needs a number '{key}' of at least {least}; it has {str(value)[:50]}.")
    if value > most:
        raise ModelBroken(f"The model's config.json has a '{key}' of {str(value)[:50]}; no model has more than {most}.")
    return value


def _real(config: Config, key: str, default: float) -> float:
    value = config.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < REAL_MOST:
        raise ModelBroken(f"The model's config.json needs a positive number '{key}'; it has {str(value)[:50]}.")
    return float(value)


def _optional_real(config: Config, key: str) -> float | None:
    return None if config.get(key) is None else _real(config, key, 0.0)
