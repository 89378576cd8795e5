"""GGUF files: the header read from a memory map, tensors dequantised into memory that the caller gives, or kept as blocks.

    magic 'GGUF' · version · tensor count · key count · keys (name, type, value) · tensors (name, dims, type, offset)
    · padding to the alignment · tensor data, each at its offset

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The header is parsed here rather than with the gguf
package's reader, which takes seconds to walk a vocabulary of 150k strings; `dequantize` undoes the quantised blocks.
Everything that a file says about itself is checked against its length before it is believed.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import prod
from pathlib import Path

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray
from torch import Tensor

from kveik.errors import ModelBroken, Unsupported
from kveik.model.dequantize import dequantize_rows
from kveik.words import counted

Kind = GGMLQuantizationType
PLAIN = {Kind.F32: torch.float32, Kind.F16: torch.float16, Kind.BF16: torch.bfloat16}
LEGACY = frozenset({Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0})
SUPER_BLOCKS = frozenset({Kind.Q2_K, Kind.Q3_K, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K})
SUPPORTED = frozenset(PLAIN) | LEGACY | SUPER_BLOCKS | {Kind.IQ4_NL, Kind.IQ4_XS}
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""GGUF value type -> struct code."""

STRING, ARRAY = 8, 9
DIMENSIONS_MAX = 4
NESTING_MAX = 4
"""Arrays of arrays that are followed; the format sets no bound, and no known file nests at all."""

CHUNK_VALUES = 1 << 18
"""Values dequantised at a time, so that the float32 copy of a tensor is never held whole, and stays in
the processor's cache (1 MB)."""


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor's place in the file."""

    name: str
    kind: Kind
    shape: tuple[int, ...]
    """Rows first, as in torch."""

    offset: int
    """Bytes from the file's start."""

    size: int
    """Bytes."""


@dataclass(frozen=True, slots=True)
class GgufHeader:
    metadata: dict[str, object]
    tensors: dict[str, GgufTensor]


def read_metadata(path: Path) -> dict[str, object]:
    """Every key of the file as a plain value: str, int, float, bool, or a list of them."""
    return read_header(path).metadata


def read_header(path: Path) -> GgufHeader:
    """Raises ModelBroken where the file contradicts itself or ends too early, Unsupported for what we cannot read."""
    with path.open("rb") as file:
        if not file.read(1):
            raise ModelBroken("The GGUF file is empty.")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
            return _header(_Cursor(view))


class _Cursor:
    """Reads values one after another, never past the end."""

    def __init__(self, view: mmap.mmap) -> None:
        self.view = view
        self.length = len(view)
        self.at = 0

    def take(self, size: int) -> int:
        """Step over `size` bytes; where they start."""
        at = self.at
        if size > self.length - at:
            raise ModelBroken(
                f"The GGUF file ends inside its header: {counted(size, 'byte')} wanted at {at}, it has {self.length}."
            )
        self.at = at + size
        return at

    def scalar(self, code: str) -> int | float | bool:
        value: int | float | bool = struct.unpack_from("<" + code, self.view, self.take(struct.calcsize(code)))[0]
        return value

    def count(self) -> int:
        return int(self.scalar("Q"))

    def text(self) -> str:
        size = self.count()
        at = self.take(size)
        # Some vocabularies hold tokens that are no whole characters.
        return self.view[at : at + size].decode("utf-8", errors="replace")

    def value(self, kind: int, depth: int = 0) -> object:
        if kind == STRING:
            return self.text()
        if kind == ARRAY:
            return self.array(depth + 1)
        if kind not in SCALARS:
            raise ModelBroken(f"The GGUF file has a value of unknown type {kind} at byte {self.at}.")
        return self.scalar(SCALARS[kind])

    def array(self, depth: int) -> list[object]:
        kind, count = int(self.scalar("I")), self.count()
        if depth > NESTING_MAX:
            raise Unsupported(f"The GGUF file nests arrays more than {NESTING_MAX} deep.")
        if kind in SCALARS:
            code = SCALARS[kind]
            at = self.take(count * struct.calcsize(code))
            values: list[object] = np.frombuffer(self.view, "<" + code, count, at).tolist()
            return values
        # A string or an array takes 8 bytes at least: a count beyond that is refused before a list is made.
        if count * 8 > self.length - self.at:
            raise ModelBroken(f"The GGUF file ends inside its header: an array of {count} at byte {self.at} cannot fit.")
        return self.strings(count) if kind == STRING else [self.value(kind, depth) for _ in range(count)]

    def strings(self, count: int) -> list[object]:
        """`text` in a loop without calls: vocabularies are most of a header."""
        view, at, length, unpack = self.view, self.at, self.length, struct.Struct("<Q").unpack_from
        found: list[object] = []
        for _ in range(count):
            if at + 8 > length:
                break
            end = at + 8 + unpack(view, at)[0]
            if end > length:
                break
            found.append(view[at + 8 : end].decode("utf-8", "replace"))
            at = end
        if len(found) < count:
            raise ModelBroken(f"The GGUF file ends inside its header: text {len(found)} of {count} does not fit at byte {at}.")
        self.at = at
        return found


def _header(cursor: _Cursor) -> GgufHeader:
    at = cursor.take(4)
    if cursor.view[at : at + 4] != b"GGUF":
        raise ModelBroken("The file is not a GGUF file: it does not start with 'GGUF'.")
    version = int(cursor.scalar("I"))
    if version not in (2, 3):
        raise Unsupported(f"The GGUF file has version {version}; versions 2 and 3, little-endian, are supported.")
    tensors, keys = cursor.count(), cursor.count()
    metadata: dict[str, object] = {}
    for _ in range(keys):
        name = cursor.text()
        if name in metadata:
            raise ModelBroken(f"The GGUF file has the key '{name[:80]}' twice.")
        metadata[name] = cursor.value(int(cursor.scalar("I")))
    infos = [_info(cursor) for _ in range(tensors)]
    return GgufHeader(metadata, _placed(infos, cursor, _alignment(metadata)))


@dataclass(frozen=True, slots=True)
class _Info:
    name: str
    dimensions: tuple[int, ...]
    """Fastest first, as the file has them."""

    kind: int
    offset: int


def _info(cursor: _Cursor) -> _Info:
    name, count = cursor.text(), int(cursor.scalar("I"))
    if not 1 <= count <= DIMENSIONS_MAX:
        raise ModelBroken(f"The tensor '{name[:80]}' has {counted(count, 'dimension')}; 1 to {DIMENSIONS_MAX} are possible.")
    dimensions = tuple(cursor.count() for _ in range(count))
    return _Info(name, dimensions, int(cursor.scalar("I")), cursor.count())


def _alignment(metadata: dict[str, object]) -> int:
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise ModelBroken(f"The GGUF file's general.alignment is {str(alignment)[:50]}; it must be a power of two.")
    return alignment


def _placed(infos: list[_Info], cursor: _Cursor, alignment: int) -> dict[str, GgufTensor]:
    """Each tensor with its place in the file, checked against the file's length."""
    unknown = [f"{info.name[:80]} ({_kind_name(info.kind)})" for info in infos if info.kind not in SUPPORTED]
    if unknown:
        more = f" and {len(unknown) - 5} more" if len(unknown) > 5 else ""
        raise Unsupported(f"The GGUF file has tensors of types that are not supported: {', '.join(unknown[:5])}{more}.")
    start = -(-cursor.at // alignment) * alignment
    placed: dict[str, GgufTensor] = {}
    for info in infos:
        tensor = _place(info, start, alignment)
        if tensor.name in placed:
            raise ModelBroken(f"The GGUF file has the tensor '{tensor.name[:80]}' twice.")
        if tensor.offset + tensor.size > cursor.length:
            raise ModelBroken(
                f"The GGUF file is cut off: the tensor '{tensor.name[:80]}' ends at byte {tensor.offset + tensor.size}, "
                f"the file has {cursor.length}."
            )
        placed[tensor.name] = tensor
    return placed


def _place(info: _Info, start: int, alignment: int) -> GgufTensor:
    kind = Kind(info.kind)
    block, block_bytes = GGML_QUANT_SIZES[kind]
    if info.dimensions[0] % block or info.offset % alignment or 0 in info.dimensions:
        raise ModelBroken(
            f"The tensor '{info.name[:80]}' has rows of {info.dimensions[0]} at offset {info.offset}; {kind.name} needs "
            f"rows of whole {block}s, and the file offsets of whole {alignment}s."
        )
    size = prod(info.dimensions) // block * block_bytes
    return GgufTensor(info.name, kind, tuple(reversed(info.dimensions)), start + info.offset, size)


def _kind_name(kind: int) -> str:
    known = {member.value: member.name for member in Kind}
    return known.get(kind, f"type {kind}")


def read_tensor(path: Path, tensor: GgufTensor, store: Callable[[int, Tensor], None]) -> None:
    """Hand over the tensor's rows, some at a time: store(first row, [rows, row length]).

    The rows are float32, or of the file's own type where that is plain; they are only valid during the call. A tensor of one
    dimension is one row.
    """
    width = tensor.shape[-1]
    rows = prod(tensor.shape[:-1])
    packed = np.memmap(path, np.uint8, "r", tensor.offset, (rows, tensor.size // rows))
    step = max(1, CHUNK_VALUES // width)
    for first in range(0, rows, step):
        chunk = np.array(packed[first : first + step])
        if tensor.kind in PLAIN:
            store(first, torch.from_numpy(chunk).view(PLAIN[tensor.kind]))
        else:
            store(first, dequantize_rows(torch.from_numpy(chunk), tensor.kind))


@dataclass(frozen=True, slots=True, eq=False)
class RawTensor:
    """A weight as its file holds it: rows in canonical order, each a run of its type's blocks, for kernels that read blocks."""

    kind: Kind
    shape: tuple[int, int]
    """Outputs, inputs"""

    blocks: NDArray[np.uint8]
    """[outputs, bytes per row], read-only and contiguous: the file's own pages, or memory where rows had to change places."""


def raw_tensor(path: Path, tensor: GgufTensor, places: NDArray[np.int64] | None = None) -> RawTensor:
    """places: the place of each row of the file, if rows have to move; they are then copied."""
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
