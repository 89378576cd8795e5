"""Sizes and switches of a decoder. Independent of files' bytes and tensors' values.

`spec_config` (Hugging Face) and `spec_gguf` read it from a model's description, and refuse by name what the decoder
does not have, before any memory is taken.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from kveik.cache.layout import LayerGroup
from kveik.model.rope import RopeSpec

Architecture = Literal["llama", "mistral", "qwen2", "qwen3", "gemma3"]
Shapes = Mapping[str, tuple[int, ...]]

COUNT_MOST = 1 << 40
"""A description that counts beyond this is damaged; no width, vocabulary or context comes near."""

LAYERS_MOST = 4096
"""Likewise for layers, of which things are laid out one by one; the deepest models have a few hundred."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """One decoder-only transformer."""

    architecture: Architecture
    layers: int
    hidden: int
    """Width of the residual stream."""

    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    """Width inside the feed-forward part."""

    vocab: int
    """Rows of the embedding table, padding included."""

    context: int
    """Tokens that the model was made for, prompt and output together."""

    norm_eps: float
    activation: Literal["silu", "gelu_tanh"]
    tied: bool
    """Whether the vocabulary projection is the embedding table."""

    windows: tuple[int | None, ...]
    """Per layer: a query at position i reads keys at i - window < j <= i; None: all j <= i."""

    rope: RopeSpec
    rope_local: RopeSpec | None = None
    """For layers with a window, where they have their own."""

    qkv_bias: bool = False
    output_bias: bool = False
    """Bias of the attention's output projection."""

    mlp_bias: bool = False
    head_norms: bool = False
    """Queries and keys are normalised, head by head, before they are rotated."""

    post_norms: bool = False
    """The results of attention and feed-forward are normalised before they are added to the residual stream."""

    embedding_scale: float | None = None
    attention_scale: float
    """Factor of the product of query and key."""

    attention_soft_cap: float | None = None
    final_soft_cap: float | None = None

    @property
    def keys_lean(self) -> bool:
        """Whether keys have something in common that may be taken off all of them: their bias, which no norm changes
        afterwards, and no soft cap for which it matters that all scores of a query are less by the same.
        """
        return self.qkv_bias and not self.head_norms and self.attention_soft_cap is None

    @property
    def groups(self) -> tuple[LayerGroup, ...]:
        """Layers by window, in order of their first layer."""
        members: dict[int | None, list[int]] = {}
        for layer, window in enumerate(self.windows):
            members.setdefault(window, []).append(layer)
        return tuple(LayerGroup(tuple(layers), self.kv_heads, self.head_dim, window) for window, layers in members.items())
