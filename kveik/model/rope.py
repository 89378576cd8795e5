"""Rotary position embeddings: the frequency of each pair of dimensions, and the sines and cosines of a step.

RoPE: Su et al. 2021, arXiv:2104.09864. YaRN: Peng et al. 2023, arXiv:2309.00071. llama3: the scaling that Meta published with
Llama 3.1. Halves are rotated against each other, as in transformers: dimension i turns with dimension i + head_dim / 2.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kveik.errors import ModelBroken, Unsupported

REAL_MOST = 1e30
"""Factors and bases beyond this are damage. JSON has infinities, and whole numbers that no float can hold."""

MEAN_POSITIONS = 4096
"""Over which keys' mean is taken: as long as conversations are. Further on it is only less of a help."""

RopeKind = Literal["default", "linear", "llama3", "yarn"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """A way of making angles of positions."""

    base: float
    kind: RopeKind = "default"
    factor: float = 1.0
    """The factor by which the context became longer."""

    original_context: int | None = None
    """Tokens of context before it was stretched; llama3 and yarn need it."""

    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    """yarn: round the range of blended dimensions outward to whole dimensions."""

    attention_factor: float = 1.0
    """Factor of sines and cosines."""


def inverse_frequencies(rope: RopeSpec, head_dim: int) -> Tensor:
    """float32 [head_dim / 2]: radians per position of each pair."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / (rope.base**exponents)
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        return _llama3(frequencies, rope)
    if rope.kind == "yarn":
        return _yarn(frequencies, rope, head_dim)
    return frequencies


def _llama3(frequencies: Tensor, rope: RopeSpec) -> Tensor:
    """Long waves are slowed by the factor, short ones kept, those between blended."""
    assert rope.original_context is not None
    waves = 2 * math.pi / frequencies
    low, high = rope.low_frequency_factor, rope.high_frequency_factor
    smooth = ((rope.original_context / waves - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - smooth) * frequencies / rope.factor + smooth * frequencies


def _yarn(frequencies: Tensor, rope: RopeSpec, head_dim: int) -> Tensor:
    """Dimensions that turn often are kept, those that turn rarely are slowed, those between blended."""
    assert rope.original_context is not None
    original = rope.original_context

    def dimension(turns: float) -> float:
        return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope.base))

    first, last = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    # A range of no width would divide by zero.
    width = last - first if last != first else 0.001
    slowed = ((torch.arange(head_dim // 2).float() - first) / width).clamp(0.0, 1.0)
    return frequencies / rope.factor * slowed + frequencies * (1 - slowed)


def yarn_attention_factor(factor: float, mscale: float | None = None, mscale_all_dim: float | None = None) -> float:
    """The paper's 0.1 ln(factor) + 1, or DeepSeek's quotient where both scales are given."""

    def scaled(by: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * by * math.log(factor) + 1.0

    if mscale and mscale_all_dim:
        return scaled(mscale) / scaled(mscale_all_dim)
    return scaled(1.0)


def turns(positions: Tensor, frequencies: Tensor, attention_factor: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines of a step's tokens, each [tokens, 1, head_dim].

    The sines of the first half are negative, so that rotating is x * cos + (x with its halves swapped) * sin.
    """
    angles = positions.float()[:, None] * frequencies
    cos, sin = angles.cos() * attention_factor, angles.sin() * attention_factor
    return torch.cat((cos, cos), -1).to(dtype)[:, None], torch.cat((-sin, sin), -1).to(dtype)[:, None]


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn every head by its token's angle: [tokens, heads, head_dim] -> a new array of that shape."""
    return (heads * cos).addcmul_(heads.roll(heads.shape[-1] // 2, -1), sin)


def key_mean(bias: Tensor, frequencies: Tensor, attention_factor: float) -> Tensor:
    """The common part of a layer's keys: their bias, turned as it is on average over the first `MEAN_POSITIONS` positions.

    Taken off every key it changes nothing, since all scores of a query become less by the same, and softmax does not see that.
    But what is left is small: Qwen2 has biases of several hundred in pairs that hardly turn, beside which the rest of a key,
    near 5, would be lost in the steps of one byte. (Smoothing keys by their mean: SageAttention, Zhang et al. 2024,
    arXiv:2410.02367. Theirs is measured in each call; a cache needs one that is the same for all tokens.)

    bias: [kv_heads, head_dim]; frequencies: [head_dim / 2] -> float32 [kv_heads, head_dim]
    """
    cos, sin = turns(torch.arange(MEAN_POSITIONS), frequencies, attention_factor, torch.float32)
    return rotate(bias.float()[None], cos.mean(0, keepdim=True), sin.mean(0, keepdim=True))[0]


def rope_from_config(parameters: Mapping[str, object], base: float, context: int, original: object = None) -> RopeSpec:
    """A `rope_scaling` or `rope_parameters` mapping of a Hugging Face config -> RopeSpec.

    base: where the mapping has no rope_theta of its own. context: max_position_embeddings. original: a config's own
    original_max_position_embeddings, which wins over the mapping's as in transformers.
    Raises Unsupported for a kind that we do not have, ModelBroken for a contradiction or a missing value.
    """
    kind = _kind(parameters)
    base = _number(parameters, "rope_theta", base)
    if float(_number(parameters, "partial_rotary_factor", 1.0)) != 1.0:
        raise Unsupported("The model rotates only part of each head (partial_rotary_factor); that is not supported.")
    if kind == "default":
        return RopeSpec(base=base)
    before = original if isinstance(original, int) else int(_number(parameters, "original_max_position_embeddings", context))
    if not 0 < before < REAL_MOST:
        raise ModelBroken(f"The model's original_max_position_embeddings is {str(before)[:50]}; it must be at least 1.")
    factor = _number(parameters, "factor", context / before if kind == "yarn" and before != context else None)
    if kind == "linear":
        return RopeSpec(base=base, kind="linear", factor=factor)
    if kind == "llama3":
        return RopeSpec(
            base=base,
            kind="llama3",
            factor=factor,
            original_context=before,
            low_frequency_factor=_number(parameters, "low_freq_factor"),
            high_frequency_factor=_number(parameters, "high_freq_factor"),
        )
    return _yarn_from_config(parameters, base, factor, before)


def _yarn_from_config(parameters: Mapping[str, object], base: float, factor: float, original: int) -> RopeSpec:
    scales = [_number(parameters, name, 0.0) for name in ("mscale", "mscale_all_dim")]
    return RopeSpec(
        base=base,
        kind="yarn",
        factor=factor,
        original_context=original,
        beta_fast=_number(parameters, "beta_fast", 32.0),
        beta_slow=_number(parameters, "beta_slow", 1.0),
        truncate=bool(parameters.get("truncate", True)),
        attention_factor=_number(parameters, "attention_factor", yarn_attention_factor(factor, *scales)),
    )


def _kind(parameters: Mapping[str, object]) -> RopeKind:
    """The kind under either spelling; both at once must agree."""
    spelled = {str(parameters[name]) for name in ("rope_type", "type") if parameters.get(name) is not None}
    if len(spelled) > 1:
        raise ModelBroken(f"The rope kind is given twice and differently: {' and '.join(sorted(spelled))}.")
    kind = spelled.pop() if spelled else "default"
    match kind:
        case "default" | "linear" | "llama3" | "yarn":
            return kind
    raise Unsupported(f"The model's rope kind '{kind[:50]}' is not supported; default, linear, llama3 and yarn are.")


def _number(parameters: Mapping[str, object], name: str, default: float | None = None) -> float:
    value = parameters.get(name)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int | float) or not -REAL_MOST < value < REAL_MOST:
        raise ModelBroken(f"The model's rope parameters need a number '{name}'; they have {str(value)[:50]}.")
    return float(value)
