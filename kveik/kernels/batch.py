"""Flat arrays of one step for attention: cache blocks read, slots written. Independent of models and requests."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from kveik.kernels.kv_types import KvType


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """Cache blocks that the tokens of one step read, and slots that they write, in one layer group.

    Row i is one sequence; its queries are tokens [query_start_loc[i], query_start_loc[i+1]) of the step and sit at positions
    [seq_lens[i] - queries_i, seq_lens[i]). The first `decodes` rows have one query each.
    """

    tables: Tensor
    """int32 [rows, blocks at most]: entry b holds positions [b * block_size, (b + 1) * block_size). Entries that lie wholly
    outside the window, or behind the context, are undefined and must not be read."""

    slot_mapping: Tensor
    """int64 [tokens]: where each new token is written, as block * block_size + slot."""

    query_start_loc: Tensor
    """int32 [rows + 1]"""

    seq_lens: Tensor
    """int32 [rows]: positions known after this step, the new tokens included."""

    decodes: int
    block_size: int
    window: int | None

    kv_type: KvType | None = None
    """How the storage's bytes are read, where they are quantised; None: it holds plain bfloat16 or float32."""

    memo: dict[object, object] = field(default_factory=dict, repr=False, compare=False)
    """What a kernel derived from the fields above at the step's first layer, for the layers that follow. It lives and dies
    with the batch."""
