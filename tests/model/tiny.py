"""Tiny random models of every family, saved in both formats: by transformers, and as llama.cpp's converter would."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFWriter
from gguf.constants import GGMLQuantizationType as Kind
from gguf.quants import quantize
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

COMMON: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
LAYER_TYPES = ["sliding_attention", "full_attention", "sliding_attention"]

FAMILIES: dict[str, tuple[type, type, dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "llama-tied": (LlamaConfig, LlamaForCausalLM, {"tie_word_embeddings": True}),
    "llama-biased": (LlamaConfig, LlamaForCausalLM, {"attention_bias": True, "mlp_bias": True}),
    "llama-rope-llama3": (LlamaConfig, LlamaForCausalLM, {"rope_parameters": LLAMA3}),
    "llama-rope-linear": (LlamaConfig, LlamaForCausalLM, {"rope_parameters": LINEAR}),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": None}),
    "mistral-window": (MistralConfig, MistralForCausalLM, {"sliding_window": 8}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen2-yarn": (Qwen2Config, Qwen2ForCausalLM, {"rope_parameters": YARN, "tie_word_embeddings": True}),
    "qwen2-window": (
        Qwen2Config,
        Qwen2ForCausalLM,
        {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    ),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 16}),
    "gemma3": (
        Gemma3TextConfig,
        Gemma3ForCausalLM,
        {"head_dim": 16, "sliding_window": 8, "layer_types": LAYER_TYPES, "query_pre_attn_scalar": 16},
    ),
    "gemma3-capped": (
        Gemma3TextConfig,
        Gemma3ForCausalLM,
        {
            "head_dim": 16,
            "sliding_window": 5,
            "layer_types": LAYER_TYPES,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
}

IN_GGUF = [
    "llama",
    "llama-tied",
    "llama-biased",
    "llama-rope-llama3",
    "llama-rope-linear",
    "mistral",
    "mistral-window",
    "qwen2",
    "qwen2-yarn",
    "qwen3",
    "gemma3",
]
"""Not the others: GGUF has no key for qwen's windows in use, nor for a Gemma scale other than its head size."""


def tiny_model(family: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Random weights of a size that makes logits differ; norms and biases that are not their defaults."""
    config_class, model_class, extra = FAMILIES[family]
    torch.manual_seed(seed)
    # The eager attention is the one of transformers' implementations that knows soft caps.
    config = config_class(**(COMMON | extra | changes), attn_implementation="eager")
    model: PreTrainedModel = model_class(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.add_(torch.randn_like(parameter) * 0.3)
            elif name.endswith(".bias"):
                parameter.normal_(0, 0.5)
            else:
                parameter.normal_(0, 0.15)
    return model


def save_folder(model: PreTrainedModel, folder: Path, **how: Any) -> Path:
    model.save_pretrained(folder, **how)
    return folder


PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


WIDE = {"hidden_size": 96, "intermediate_size": 160}
"""Sizes that blocks of 32 divide."""


def save_gguf(model: PreTrainedModel, path: Path, kinds: Mapping[str, Kind] | None = None) -> Path:
    """With llama.cpp's names and conventions: interleaved q and k for llama, 1 + w for gemma's norms.

    In float32, but for weights in whose name a part of `kinds` occurs, the first that does: {"v_proj": Kind.Q8_0}.
    """
    config = model.config
    kind = str(config.model_type)
    architecture = {"mistral": "llama", "gemma3_text": "gemma3"}.get(kind, kind)
    writer = GGUFWriter(path, architecture)
    _write_keys(writer, config, architecture)
    tied = config.tie_word_embeddings
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and tied:
            continue
        values = tensor.float()
        if architecture == "llama" and (".q_proj." in name or ".k_proj." in name):
            heads = config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads
            # As convert_hf_to_gguf.py's LlamaModel.permute.
            halves = values.reshape(heads, 2, len(values) // heads // 2, *values.shape[1:])
            values = halves.transpose(1, 2).reshape(values.shape)
        if architecture == "gemma3" and name.endswith("norm.weight"):
            values = values + 1
        kind = next((kind for part, kind in (kinds or {}).items() if part in name and values.dim() > 1), Kind.F32)
        writer.add_tensor(_gguf_name(name, architecture), quantize(values.contiguous().numpy(), kind), raw_dtype=kind)
    _finish(writer)
    return path


def _gguf_name(name: str, architecture: str) -> str:
    whole = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    stem, kind = name.rsplit(".", 1)
    if stem in whole:
        return f"{whole[stem]}.{kind}"
    _, _, layer, part = stem.split(".", 3)
    gemma = {
        "post_attention_layernorm": "post_attention_norm",
        "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
    }
    norms = gemma if architecture == "gemma3" else {"post_attention_layernorm": "ffn_norm"}
    return f"blk.{layer}.{(PARTS | norms)[part]}.{kind}"


def _write_keys(writer: GGUFWriter, config: Any, architecture: str) -> None:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_eos_token_id(config.eos_token_id)
    if architecture == "gemma3" or (config.model_type == "mistral" and config.sliding_window):
        writer.add_sliding_window(config.sliding_window)
    if architecture == "gemma3":
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
    _write_rope(writer, rope, head_dim)


def _write_rope(writer: GGUFWriter, rope: dict[str, Any], head_dim: int) -> None:
    kind = rope["rope_type"]
    if kind == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_divisors(rope, head_dim).astype(np.float32))
    elif kind != "default":
        writer.add_string(f"{writer.arch}.rope.scaling.type", kind)
        writer.add_rope_scaling_factor(rope["factor"])
        if kind == "yarn":
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


def llama3_divisors(rope: dict[str, Any], head_dim: int) -> np.ndarray:
    """As llama.cpp's converter computes them for Llama 3.1."""
    frequencies = 1.0 / rope["rope_theta"] ** (np.arange(0, head_dim, 2) / head_dim)
    low = rope["original_max_position_embeddings"] / rope["low_freq_factor"]
    high = rope["original_max_position_embeddings"] / rope["high_freq_factor"]
    divisors = []
    for frequency in frequencies:
        wave = 2 * np.pi / frequency
        if wave < high:
            divisors.append(1.0)
        elif wave > low:
            divisors.append(rope["factor"])
        else:
            smooth = (rope["original_max_position_embeddings"] / wave - rope["low_freq_factor"]) / (
                rope["high_freq_factor"] - rope["low_freq_factor"]
            )
            divisors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(divisors)


def _finish(writer: GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
