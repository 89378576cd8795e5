"""Products of int8 weights, one scale per output, with u8 activations, one scale per row, by oneDNN's VNNI kernels.

    y[r, o] = row_scale[r] * weight_scale[o] * Σ (u8[r, i] - 128) * int8[o, i]

Rows are quantised as they come (dynamically), symmetrically around 128: oneDNN is quick with unsigned activations only. It gets
one scale for all activations, 1, and takes the zero point of 128 out of the sums itself, exactly; what belongs to a row is
multiplied in afterwards.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from kveik.errors import Unsupported
from kveik.model.linear import Activation

LEVELS = 127
"""Steps to either side of zero, of weights and of activations."""

ZERO_POINT = 128

TILE_VALUES = 1 << 17
"""Activations quantised at a time, so that what lies between two passes stays in the processor's cache (512 KB)."""


def check_w8a8() -> None:
    """Raises Unsupported where oneDNN would be slow or, on processors older than VNNI, let sums of two products saturate."""
    capabilities = torch.cpu.get_capabilities()
    if not (capabilities.get("avx512_vnni") or capabilities.get("avx_vnni")):
        raise Unsupported(
            "--quantization w8a8 needs a CPU that multiplies 8-bit integers itself (avx512_vnni or avx_vnni), and this one "
            "does not; use --quantization bf16."
        )


def quantised_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """[rows, inputs] -> uint8 [rows, inputs] around 128, and float32 [rows, 1]: what a step of each row is worth.

    A row with a NaN or an infinity gets such a scale, whatever its integers: its outputs are not finite, and no other row's.
    """
    quantised, scales = torch.empty(x.shape, dtype=torch.uint8), torch.empty(len(x), 1)
    for first in range(0, len(x), step := max(1, TILE_VALUES // x.shape[1])):
        tile = slice(first, first + step)
        wide = x[tile].float()
        # The least normal number, so that a row of zeros is not divided by zero.
        scale = torch.amax(wide.abs(), 1, keepdim=True).mul_(1 / LEVELS).clamp_min_(torch.finfo(torch.float32).tiny)
        # Half a step above the zero point: the cast cuts off what is behind the point.
        quantised[tile] = wide.div(scale).add_(ZERO_POINT + 0.5)
        scales[tile] = scale
    return quantised, scales


class W8A8Linear:
    """See `linear.Linear`; sums, scales, bias and what follows are float32, rounded once."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """weight: float32 [outputs, inputs], which is overwritten; bias: [outputs]."""
        self.scales = torch.amax(weight.abs(), 1).mul_(1 / LEVELS).clamp_min_(torch.finfo(torch.float32).tiny)
        quantised = weight.div_(self.scales[:, None]).round_().to(torch.int8)
        self.packed = torch.ops.onednn.qlinear_prepack(quantised, None)
        self.zero_points = torch.zeros(len(quantised), dtype=torch.int32)
        self.bias = None if bias is None else bias.float()
        self.weight_bytes = quantised.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        return self.wide(x).to(x.dtype)

    def activated(self, x: Tensor, activation: Activation) -> Tensor:
        y = self.wide(x)
        y = functional.silu(y, inplace=True) if activation == "silu" else functional.gelu(y, approximate="tanh")
        return y.to(x.dtype)

    def times(self, x: Tensor, factor: Tensor) -> Tensor:
        return factor.mul_(self.wide(x))

    def plus(self, x: Tensor, onto: Tensor) -> Tensor:
        return onto.add_(self.wide(x))

    def wide(self, x: Tensor) -> Tensor:
        """float32 [rows, outputs]: the product before it is rounded."""
        rows, row_scales = quantised_rows(x)
        y: Tensor = torch.ops.onednn.qlinear_pointwise(
            rows, 1.0, ZERO_POINT, self.packed, self.scales, self.zero_points, None, 1.0, 0, torch.float32, "none", [], ""
        )
        y.mul_(row_scales)
        return y if self.bias is None else y.add_(self.bias)


class W8A8Gated:
    """See `linear.Gated`: gate and up as one product, whose rows are quantised once."""

    def __init__(self, weight: Tensor, bias: Tensor | None, activation: Activation) -> None:
        """weight: float32 [2 * outputs, inputs], gate first, which is overwritten; bias: [2 * outputs]."""
        self.both = W8A8Linear(weight, bias)
        self.activation: Activation = activation
        self.weight_bytes = self.both.weight_bytes

    def __call__(self, x: Tensor) -> Tensor:
        both = self.both.wide(x)
        gate, up = both.chunk(2, 1)
        gate = functional.silu(gate, inplace=True) if self.activation == "silu" else functional.gelu(gate, approximate="tanh")
        return gate.mul_(up).to(x.dtype)
