"""GGUF's quantised blocks -> float32. The common types in torch, on whole chunks; the rest through the gguf package.

Bit for bit what `gguf.quants.dequantize` gives, which works on sixteen rows at a time and takes several times as long: loading
a model of 1.5 billion weights is mostly this. Block layouts: ggml-common.h of https://github.com/ggml-org/ggml.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

Kind = GGMLQuantizationType


def dequantize_rows(packed: Tensor, kind: Kind) -> Tensor:
    """uint8 [rows, bytes per row], whole blocks -> float32 [rows, values per row]."""
    values, size = GGML_QUANT_SIZES[kind]
    if kind not in _BLOCKS:
        return torch.from_numpy(dequantize(packed.numpy(), kind))
    return _BLOCKS[kind](packed.view(-1, size)).view(len(packed), packed.shape[1] // size * values)


def _half(blocks: Tensor, at: int) -> Tensor:
    """The float16 at byte `at` of each block, as float32 [blocks, 1]."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _nibbles(bytes_: Tensor, width: int) -> Tensor:
    """[blocks, bytes] -> [blocks, groups, 2, width]: the low halves of `width` bytes, then their high halves."""
    grouped = bytes_.reshape(len(bytes_), -1, 1, width)
    return torch.cat((grouped & 0x0F, grouped >> 4), 2)


def _q4_0(blocks: Tensor) -> Tensor:
    # scale · 16 bytes
    return _nibbles(blocks[:, 2:], 16).flatten(1).float().sub_(8).mul_(_half(blocks, 0))


def _q4_1(blocks: Tensor) -> Tensor:
    # scale · minimum · 16 bytes
    return _nibbles(blocks[:, 4:], 16).flatten(1).float().mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _q5_0(blocks: Tensor) -> Tensor:
    # scale · 32 fifth bits · 16 bytes
    fifth = ((blocks[:, 2:6, None] >> torch.arange(8, dtype=torch.uint8)) & 1).flatten(1)
    values = _nibbles(blocks[:, 6:], 16).flatten(1) | (fifth << 4)
    return values.float().sub_(16).mul_(_half(blocks, 0))


def _q8_0(blocks: Tensor) -> Tensor:
    # scale · 32 signed bytes
    return blocks[:, 2:].contiguous().view(torch.int8).float().mul_(_half(blocks, 0))


def _scales_and_minima(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Q4_K and Q5_K: scale · minimum · 12 bytes that hold 8 six-bit factors for each -> two float32 [blocks, 8, 1]."""
    scales, minima, mixed = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales_all = torch.cat((scales & 0x3F, (mixed & 0x0F) | ((scales >> 2) & 0x30)), 1).float()
    minima_all = torch.cat((minima & 0x3F, (mixed >> 4) | ((minima >> 2) & 0x30)), 1).float()
    return scales_all.mul_(_half(blocks, 0))[..., None], minima_all.mul_(_half(blocks, 2))[..., None]


def _q4_k(blocks: Tensor) -> Tensor:
    # scale · minimum · 12 bytes of factors · 128 bytes
    scales, minima = _scales_and_minima(blocks)
    return _nibbles(blocks[:, 16:], 32).view(-1, 8, 32).float().mul_(scales).sub_(minima)


def _q5_k(blocks: Tensor) -> Tensor:
    # scale · minimum · 12 bytes of factors · 256 fifth bits · 128 bytes
    scales, minima = _scales_and_minima(blocks)
    fifth = (blocks[:, 16:48].reshape(-1, 1, 32) >> torch.arange(8, dtype=torch.uint8)[:, None]) & 1
    values = _nibbles(blocks[:, 48:], 32).view(-1, 8, 32) | (fifth << 4)
    return values.float().mul_(scales).sub_(minima)


def _q6_k(blocks: Tensor) -> Tensor:
    # 128 bytes of low halves · 64 bytes of upper pairs of bits · 16 signed factors · scale
    scales = blocks[:, 192:208].contiguous().view(torch.int8).float().mul_(_half(blocks, 208))[..., None]
    low = _nibbles(blocks[:, :128], 64).view(-1, 8, 32)
    pairs = (blocks[:, 128:192].reshape(-1, 2, 1, 32) >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]) & 3
    values = low | (pairs.view(-1, 8, 32) << 4)
    return values.view(-1, 16, 16).float().sub_(32).mul_(scales)


_BLOCKS: dict[Kind, Callable[[Tensor], Tensor]] = {
    Kind.Q4_0: _q4_0,
    Kind.Q4_1: _q4_1,
    Kind.Q5_0: _q5_0,
    Kind.Q8_0: _q8_0,
    Kind.Q4_K: _q4_k,
    Kind.Q5_K: _q5_k,
    Kind.Q6_K: _q6_k,
}
