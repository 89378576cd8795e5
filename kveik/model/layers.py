"""One decoder layer, from the residual stream back to it. Independent of files.

x ─ norm ─ q, k, v ─ (head norms) ─ rope ─ write, attend ─ output ─ (norm) ─ + ─ norm ─ gate · up ─ down ─ (norm) ─ +
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kveik.kernels import attention
from kveik.kernels.attention import AttentionBatch
from kveik.model.linear import Gated, Linear
from kveik.model.rope import rotate


@dataclass(frozen=True, slots=True)
class Norm:
    """Root mean square norm over the last dimension: x / sqrt(mean(x²) + eps) * weight, in float32, rounded once.

    Computed as x / sqrt(sum(x²) + width * eps), which takes fewer passes; the square root of the width that this lacks lies in
    `weight`, or in the rows of the products that follow where `weight` is None.
    """

    floor: Tensor
    """float32 []: sqrt(width * eps)"""

    weight: Tensor | None
    """float32 [width], times the square root of the width."""

    def __call__(self, x: Tensor) -> Tensor:
        wide = x.float()
        normed = wide.div(torch.linalg.vector_norm(wide, dim=-1, keepdim=True).hypot_(self.floor))
        return (normed if self.weight is None else normed.mul_(self.weight)).to(x.dtype)


@dataclass(frozen=True, slots=True)
class StepTokens:
    """The step's tokens, as a layer needs them."""

    batch: AttentionBatch
    cos: Tensor
    """[tokens, 1, head_dim], as `rope.turns` gives them."""

    sin: Tensor


@dataclass(frozen=True, slots=True)
class Attention:
    """Queries, keys and values in one product; keys and values go to the cache before they are read."""

    qkv: Linear
    """hidden -> (heads + 2 * kv_heads) * head_dim: queries, then keys, then values."""

    output: Linear
    query_norm: Norm | None
    key_norm: Norm | None
    key_mean: Tensor | None
    """[kv_heads, head_dim]: taken off keys that are stored in bytes; see `rope.key_mean`."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    soft_cap: float | None

    def __call__(self, x: Tensor, cache: Tensor, step: StepTokens) -> Tensor:
        """x [tokens, hidden]; cache: this layer's, [blocks, 2, kv_heads, block_size, head_dim] -> [tokens, heads * head_dim]"""
        turning = self.heads + self.kv_heads
        merged = self.qkv(x).view(-1, turning + self.kv_heads, self.head_dim)
        turned = rotate(self._normed(merged[:, :turning]), step.cos, step.sin)
        keys = turned[:, self.heads :]
        if self.key_mean is not None and step.batch.kv_type is not None:
            keys = keys - self.key_mean
        attention.write(cache, keys, merged[:, turning:], step.batch)
        attended = attention.attend(turned[:, : self.heads], cache, step.batch, scale=self.scale, soft_cap=self.soft_cap)
        return attended.flatten(1)

    def _normed(self, heads: Tensor) -> Tensor:
        """Queries and keys [tokens, heads + kv_heads, head_dim], normalised head by head where the model does so."""
        if self.query_norm is not None and self.key_norm is not None:
            heads[:, : self.heads] = self.query_norm(heads[:, : self.heads])
            heads[:, self.heads :] = self.key_norm(heads[:, self.heads :])
        return heads


class FeedForward(Protocol):
    """The part of a layer behind attention, [tokens, hidden] -> [tokens, hidden]. Layers may have different ones."""

    def __call__(self, x: Tensor) -> Tensor: ...

    def plus(self, x: Tensor, onto: Tensor) -> Tensor:
        """y + onto; which may be written to."""
        ...


@dataclass(frozen=True, slots=True)
class GatedFeedForward:
    """down(activation(gate(x)) * up(x))"""

    inner: Gated
    down: Linear

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self.inner(x))

    def plus(self, x: Tensor, onto: Tensor) -> Tensor:
        return self.down.plus(self.inner(x), onto)


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer: its place in its group's storage, and its parts."""

    group: int
    place: int
    """Index in the group's layers."""

    attention_norm: Norm
    attention: Attention
    attention_post_norm: Norm | None
    feed_forward_norm: Norm
    feed_forward: FeedForward
    feed_forward_post_norm: Norm | None

    def __call__(self, stream: Tensor, cache: Tensor, step: StepTokens, logits_indices: Tensor | None) -> Tensor:
        """The residual stream [tokens, hidden] after this layer; rows of `logits_indices` alone where they are given."""
        attended = self.attention(self.attention_norm(stream), cache, step)
        if logits_indices is not None:
            stream, attended = stream[logits_indices], attended[logits_indices]
        stream = _added(self.attention.output, attended, stream, self.attention_post_norm)
        return _added(self.feed_forward, self.feed_forward_norm(stream), stream, self.feed_forward_post_norm)


def _added(part: Linear | FeedForward, x: Tensor, stream: Tensor, post_norm: Norm | None) -> Tensor:
    return part.plus(x, stream) if post_norm is None else post_norm(part(x)).add_(stream)
