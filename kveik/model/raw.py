"""Weights as their file holds them: quantised blocks as they are, for kernels that multiply with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np
from gguf.constants import GGMLQuantizationType
from numpy.typing import NDArray

from kveik.model.gguf import GgufTensor


@dataclass(frozen=True, slots=True, eq=False)
class RawTensor:
    """A weight's rows in canonical order, each a run of its type's blocks."""

    kind: GGMLQuantizationType
    shape: tuple[int, int]
    """Outputs, inputs"""

    blocks: NDArray[np.uint8]
    """[outputs, bytes per row], read-only and contiguous: the file's own pages, or memory where rows had to change places."""


def raw_tensor(path: Path, tensor: GgufTensor, places: NDArray[np.int64] | None = None) -> RawTensor:
    """places: where each row of the file belongs, where that is not its own place; the rows are then copied."""
    rows, columns = tensor.shape
    blocks: NDArray[np.uint8] = np.memmap(path, np.uint8, "r", tensor.offset, (rows, tensor.size // rows))
    if places is not None:
        moved = np.empty_like(blocks, subok=False)
        moved[places] = blocks
        moved.flags.writeable = False
        blocks = moved
    return RawTensor(tensor.kind, (rows, columns), blocks)


def runs(parts: Sequence[RawTensor]) -> list[list[RawTensor]]:
    """Parts of one product, in order: neighbours of one type together.

    Queries, keys and values, for example, which files often store in two types: [q, k, v] -> [[q, k], [v]].
    """
    return [list(run) for _, run in groupby(parts, key=lambda part: part.kind)]
