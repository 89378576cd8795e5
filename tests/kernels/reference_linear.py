"""Products with quantised weights, slow and obvious: in numpy, the sums in float64. It defines the right answer.

A weight is w = scale * (value - zero), or scale * value + minimum, with a scale and a minimum per output and group of inputs;
rows are int8 with a scale per group of 32 inputs. Many rows are multiplied otherwise: weights and rows are both int8, a scale
per span of 128 inputs. Block layouts: ggml-common.h of https://github.com/ggml-org/ggml.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

GROUP = 32
SPAN = 128
"""Inputs; a row's last span may be shorter."""

ROWS_MANY = 72
"""From this many rows on, scales are those of spans."""

SMALLEST = np.float32(1e-36)
"""A group or span of a row whose magnitudes are all below counts as zeros: 127 / largest must be finite."""


@dataclass(frozen=True, slots=True)
class Quantised:
    """A weight [outputs, inputs]."""

    bits: int
    values: Bytes
    """[outputs, inputs], unsigned."""

    zero: int
    scale: Floats
    """[outputs, groups]: a group is 16 or 32 inputs."""

    minimum: Floats | None
    """[outputs, groups], where the format has one."""


def read(kind: str, blocks: Bytes, outputs: int) -> Quantised:
    """A GGUF tensor's own bytes. kind: Q4_0 and the like."""
    block_bytes, split = _KINDS[kind]
    parts = split(blocks.reshape(-1, block_bytes))
    minimum = None if parts.minimum is None else parts.minimum.reshape(outputs, -1)
    return Quantised(parts.bits, parts.values.reshape(outputs, -1), parts.zero, parts.scale.reshape(outputs, -1), minimum)


def dequantised(weight: Quantised) -> Floats:
    """[outputs, inputs], each rounded to float32 after the product and after the sum, as everybody does."""
    group = weight.values.shape[1] // weight.scale.shape[1]
    scaled = (weight.values.astype(np.float32) - np.float32(weight.zero)) * weight.scale.repeat(group, 1)
    return scaled if weight.minimum is None else scaled + weight.minimum.repeat(group, 1)


def quantised_rows(x: Floats, span: int = SPAN) -> Doubles:
    """[rows, inputs] -> what the int8 rows stand for. A group or span with a NaN or an infinity becomes NaN."""
    rows = np.empty(x.shape, np.float64)
    width = span if len(x) >= ROWS_MANY else GROUP
    for first in range(0, x.shape[1], width):
        values, scale = _int8(x[:, first : first + width])
        rows[:, first : first + width] = values * scale[:, None].astype(np.float64)
    return rows


def coarse(weight: Quantised, span: int = SPAN) -> Doubles:
    """[outputs, inputs] -> what the weight stands for once it is int8 with a scale per output and span."""
    group = weight.values.shape[1] // weight.scale.shape[1]
    if weight.minimum is None and group == span:
        return dequantised(weight).astype(np.float64)
    rounded = np.empty(weight.values.shape, np.float64)
    for first in range(0, weight.values.shape[1], span):
        groups = slice(first // group, (first + span) // group)
        minimum = None if weight.minimum is None else weight.minimum[:, groups]
        values = weight.values[:, first : first + span].astype(np.int64)
        part = Quantised(weight.bits, values.astype(np.uint8), weight.zero, weight.scale[:, groups], minimum)
        rounded[:, first : first + span] = _coarse_span(part)
    return rounded


def linear(weight: Quantised, x: Floats, bias: Floats | None, span: int = SPAN) -> Doubles:
    """x [rows, inputs] -> [rows, outputs]."""
    scaled, minimum = _operands(weight, span, many=len(x) >= ROWS_MANY)
    with np.errstate(invalid="ignore"):
        product: Doubles = quantised_rows(x, span) @ (scaled + minimum).T
    return product if bias is None else product + bias


def squares(weight: Quantised, x: Floats, bias: Floats | None, span: int = SPAN) -> tuple[int, Doubles]:
    """How many floats add up to a result, and the sum of their squares [rows, outputs].

    Each is a sum of integers times the scales of a group or span, or a group's minimum times the sum of a row's integers.
    """
    many = len(x) >= ROWS_MANY
    width = span if many else min(GROUP, x.shape[1] // weight.scale.shape[1])
    rows, total = quantised_rows(x, span), np.zeros((len(x), len(weight.values)))
    parts = _operands(weight, span, many=many)
    for part in parts if weight.minimum is not None and not many else parts[:1]:
        for first in range(0, x.shape[1], width):
            total += (rows[:, first : first + width] @ part[:, first : first + width].T) ** 2
    count = 2 * -(-x.shape[1] // width)
    return (count, total) if bias is None else (count + 1, total + bias.astype(np.float64) ** 2)


def _operands(weight: Quantised, span: int, *, many: bool) -> tuple[Doubles, Doubles]:
    """What rows meet, each [outputs, inputs]: scaled values, and minima where they meet them on their own."""
    group = weight.values.shape[1] // weight.scale.shape[1]
    if many:
        scaled = coarse(weight, span)
        return scaled, np.zeros_like(scaled)
    scaled = (weight.values.astype(np.float64) - weight.zero) * weight.scale.repeat(group, 1)
    return scaled, np.zeros_like(scaled) if weight.minimum is None else weight.minimum.repeat(group, 1).astype(np.float64)


def _int8(x: Floats) -> tuple[Ints, Floats]:
    """Symmetric, [rows, any] -> values and the scale of each row: 0 where it counts as zeros, NaN where it is not finite."""
    largest = np.abs(x).max(1)
    finite = np.isfinite(largest)
    some = finite & (largest > SMALLEST)
    factor = np.divide(np.float32(127), largest, out=np.zeros_like(largest), where=some)
    values = np.rint(np.where(some[:, None], x, np.float32(0)) * factor[:, None]).astype(np.int64)
    scale = np.where(some, largest / np.float32(127), np.float32(0))
    return values, np.where(finite, scale, np.float32(np.nan)).astype(np.float32)


def _coarse_span(part: Quantised) -> Doubles:
    """One span, in the fixed point of the native kernels: 8 bits behind the point, or 15 for values of 8 bits."""
    group = part.values.shape[1] // part.scale.shape[1]
    low = part.scale * np.float32(part.zero) if part.minimum is None else part.minimum
    high = low if part.minimum is None else part.minimum + part.scale * np.float32((1 << part.bits) - 1)
    largest = np.maximum(np.abs(low), np.abs(high)).max(1)
    per_unit = np.divide(np.float32(256 * 127), largest, out=np.zeros_like(largest), where=largest > 0)[:, None]
    values = part.values.astype(np.int64)
    if part.bits == 8:
        factor = np.rint(part.scale * per_unit * np.float32(128)).astype(np.int64).repeat(group, 1)
        scaled = ((values - 128) * 256 * factor + 16384) >> 15
    else:
        factor = np.rint(part.scale * per_unit).astype(np.int64)
        offset = -part.zero * factor if part.minimum is None else np.rint(part.minimum * per_unit).astype(np.int64)
        scaled = values * factor.repeat(group, 1) + offset.repeat(group, 1)
    units: Doubles = ((scaled + 128) >> 8) * (largest / np.float32(127)).astype(np.float64)[:, None]
    return units


@dataclass(frozen=True, slots=True)
class _Blocks:
    """Of blocks [blocks, bytes]: values [blocks, inputs], scale and minimum [blocks, groups]."""

    bits: int
    zero: int
    values: Bytes
    scale: Floats
    minimum: Floats | None = None


def _half(blocks: Bytes, at: int) -> Floats:
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16).astype(np.float32)


def _nibbles(blocks: Bytes, width: int) -> Bytes:
    """The low halves of `width` bytes, then their high halves."""
    grouped = blocks.reshape(len(blocks), -1, 1, width)
    return np.concatenate((grouped & 15, grouped >> 4), 2, dtype=np.uint8).reshape(len(blocks), -1)


def _fifth(blocks: Bytes) -> Bytes:
    """32 bits, in order."""
    return np.left_shift(np.unpackbits(blocks, axis=1, bitorder="little"), 4, dtype=np.uint8)


def _factors(blocks: Bytes) -> tuple[Floats, Floats]:
    """Of q4_k and q5_k: d · dmin · 12 bytes of 8 scales and 8 minima of 6 bits -> [blocks, 8] each, the minima negative."""
    scales, minima, mixed = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scale = np.concatenate((scales & 63, mixed & 15 | scales >> 6 << 4), 1).astype(np.float32)
    minimum = np.concatenate((minima & 63, mixed >> 4 | minima >> 6 << 4), 1).astype(np.float32)
    return scale * _half(blocks, 0), -(minimum * _half(blocks, 2))


def _q4_k(b: Bytes) -> _Blocks:
    return _Blocks(4, 0, _nibbles(b[:, 16:], 32), *_factors(b))


def _q5_k(b: Bytes) -> _Blocks:
    fifth = (b[:, 16:48].reshape(-1, 1, 32) >> np.arange(8, dtype=np.uint8)[:, None] & 1) << 4
    values = _nibbles(b[:, 48:], 32) | fifth.reshape(len(b), -1)
    return _Blocks(5, 0, values.astype(np.uint8), *_factors(b))


def _q6_k(b: Bytes) -> _Blocks:
    pairs = b[:, 128:192].reshape(-1, 2, 1, 32) >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3
    values = (_nibbles(b[:, :128], 64) | (pairs << 4).reshape(len(b), -1)).astype(np.uint8)
    return _Blocks(6, 32, values, np.ascontiguousarray(b[:, 192:208]).view(np.int8).astype(np.float32) * _half(b, 208))


def _q5(b: Bytes, fifth_at: int) -> Bytes:
    """Of q5_0 and q5_1: 4 bytes of fifth bits, 16 of nibbles."""
    values: Bytes = _nibbles(b[:, fifth_at + 4 :], 16) | _fifth(b[:, fifth_at : fifth_at + 4])
    return values


_KINDS: dict[str, tuple[int, Callable[[Bytes], _Blocks]]] = {
    "Q4_0": (18, lambda b: _Blocks(4, 8, _nibbles(b[:, 2:], 16), _half(b, 0))),
    "Q4_1": (20, lambda b: _Blocks(4, 0, _nibbles(b[:, 4:], 16), _half(b, 0), _half(b, 2))),
    "Q5_0": (22, lambda b: _Blocks(5, 16, _q5(b, 2), _half(b, 0))),
    "Q5_1": (24, lambda b: _Blocks(5, 0, _q5(b, 4), _half(b, 0), _half(b, 2))),
    "Q8_0": (34, lambda b: _Blocks(8, 128, b[:, 2:] ^ np.uint8(128), _half(b, 0))),
    "Q4_K": (144, _q4_k),
    "Q5_K": (176, _q5_k),
    "Q6_K": (210, _q6_k),
}
"""Bytes of a block, and how it is read."""
