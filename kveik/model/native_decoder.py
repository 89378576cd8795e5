"""A decoder whose whole step is one call into the native kernels: weights stay in small blocks, activations become int8."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypedDict, Unpack

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kveik.kernels.attention import AttentionBatch
from kveik.kernels.kv_types import BFLOAT16, FLOAT32, KvType
from kveik.kernels.native_linear import Part
from kveik.model.spec import ModelSpec
from kveik.model.step_batch import StepBatch

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]
Longs = NDArray[np.int64]


class NativeLayer(TypedDict):
    """One layer. Products are parts whose outputs follow each other: qkv gives queries, keys and values, gate_up gates and then
    ups. Norms and biases: float32 [their width]."""

    group: int
    place: int
    rope: int
    attention_norm: Floats
    qkv: list[Part]
    qkv_bias: Floats | None
    query_norm: Floats | None
    key_norm: Floats | None
    key_mean: Floats | None
    output: list[Part]
    output_bias: Floats | None
    attention_post_norm: Floats | None
    feed_forward_norm: Floats
    gate_up: list[Part]
    gate_up_bias: Floats | None
    down: list[Part]
    down_bias: Floats | None
    feed_forward_post_norm: Floats | None


class NativeModel(Protocol):
    """`Model` of native/bindings/forward.cpp."""

    @property
    def workspace_bytes(self) -> int: ...

    def set_embedding(self, part: Part) -> None: ...

    def set_projection(self, parts: list[Part], bias: Floats | None) -> None: ...

    def set_norm(self, weight: Floats) -> None: ...

    def add_rope(self, frequencies: Floats, factor: float) -> None: ...

    def add_layer(self, **layer: Unpack[NativeLayer]) -> None:
        """The next layer. Raises ValueError where sizes do not agree."""
        ...

    def forward(
        self,
        token_ids: Longs,
        positions: Longs,
        logits_indices: Longs,
        groups: list[tuple[object, ...]],
        hidden: Floats,
        threads: int,
    ) -> None:
        """One step; hidden [outputs, hidden] is written. groups: as `Group` of the bindings names their parts."""
        ...

    def logits(self, hidden: Floats, logits: Floats, threads: int) -> None: ...


class NativeDecoder:
    """The protocol of `model.decoder.Decoder` over one native model."""

    def __init__(
        self, spec: ModelSpec, dtype: torch.dtype, model: NativeModel, weight_bytes: int, arithmetic: str, described: str
    ) -> None:
        self.spec = spec
        self.dtype = dtype
        self.weight_bytes = weight_bytes
        self.arithmetic = arithmetic
        self.described = described
        self._model = model
        self._flat: dict[int, NDArray[np.uint8]] = {}
        self._logits = torch.empty(0)

    @torch.inference_mode()
    def forward(self, batch: StepBatch, storage: Sequence[Tensor]) -> Tensor:
        """float32 [outputs, hidden]; writes the step's keys and values."""
        hidden = torch.empty(len(batch.logits_indices), self.spec.hidden)
        groups = [self._group(group, tensor) for group, tensor in zip(batch.groups, storage, strict=True)]
        self._model.forward(
            batch.token_ids.numpy(),
            batch.positions.numpy(),
            batch.logits_indices.numpy(),
            groups,
            hidden.numpy(),
            torch.get_num_threads(),
        )
        return hidden

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [rows, hidden] -> float32 [rows, vocab]: memory that the next call uses again."""
        rows = len(hidden)
        if len(self._logits) < rows:
            self._logits = torch.empty(rows, self.spec.vocab)
        logits = self._logits[:rows]
        if rows:
            self._model.logits(hidden.contiguous().numpy(), logits.numpy(), torch.get_num_threads())
        return logits

    def _group(self, batch: AttentionBatch, storage: Tensor) -> tuple[object, ...]:
        """The parts of a group's step, in the order of `bindings/forward.cpp`."""
        size = storage.element_size()
        return (
            self._bytes(storage),
            storage.stride(0) * size,
            storage.stride(1) * size,
            batch.block_size,
            (batch.kv_type or _plain(storage)).number,
            np.ascontiguousarray(batch.tables.numpy()),
            batch.slot_mapping.numpy(),
            batch.query_start_loc.numpy(),
            batch.seq_lens.numpy(),
            batch.decodes,
            batch.window or 0,
        )

    def _bytes(self, storage: Tensor) -> NDArray[np.uint8]:
        """The storage's memory, which stays where it is for the engine's whole life."""
        flat = self._flat.get(storage.data_ptr())
        if flat is None or flat.nbytes != storage.nbytes:
            flat = storage.view(torch.uint8).view(-1).numpy()
            self._flat[storage.data_ptr()] = flat
        return flat


def _plain(storage: Tensor) -> KvType:
    return BFLOAT16 if storage.dtype is torch.bfloat16 else FLOAT32
