"""Flat arrays of one step's tokens, which the executor hands to the decoder."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kveik.kernels.attention import AttentionBatch


@dataclass(frozen=True, slots=True)
class StepBatch:
    """All tokens of a step, sequence after sequence, decodes first."""

    token_ids: Tensor
    """int64 [tokens]"""

    positions: Tensor
    """int64 [tokens]"""

    groups: tuple[AttentionBatch, ...]
    """One per layer group, in the order of `ModelSpec.groups`."""

    logits_indices: Tensor
    """int64 [outputs]: tokens whose final hidden state is asked for, ascending."""
