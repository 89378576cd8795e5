"""Native products with quantised weights give what the reference gives, for every format, instruction set and count of rows."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from kveik.kernels import native
from kveik.kernels.native_linear import q8_0_blocks
from kveik.model import gguf
from kveik.model.dequantize import dequantize_rows
from tests.bounds import CONFIDENCE, FLOAT32, assert_within, sum_square
from tests.kernels import reference_linear
from tests.kernels.reference_linear import Quantised

pytestmark = pytest.mark.skipif(native.module is None, reason="installed without a compiler")

FORMATS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
SUPER = ("Q4_K", "Q5_K", "Q6_K")
HALVES_AT = {"Q4_0": {0: 0.02}, "Q4_1": {0: 0.02, 2: 0.2}, "Q5_0": {0: 0.01}, "Q5_1": {0: 0.01, 2: 0.2}, "Q8_0": {0: 0.002}}
HALVES_AT |= {"Q4_K": {0: 0.002, 2: 0.01}, "Q5_K": {0: 0.001, 2: 0.01}, "Q6_K": {208: 0.001}}
"""Where in a block its float16 lie, and how large they are in these tests."""

SHAPES = ((16, 256), (37, 512), (5, 32), (1, 96), (33, 608), (52, 768))
ROWS_MANY = reference_linear.ROWS_MANY


@pytest.fixture(params=native.isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    before = native.isa()
    native.use(request.param)
    yield request.param
    assert before is not None
    native.use(before)


@dataclass
class Weight:
    """A weight in both forms."""

    format: str
    outputs: int
    inputs: int
    packed: np.ndarray
    right: Quantised
    span_asked: int = 0

    @property
    def arguments(self) -> tuple[object, int, int, np.ndarray]:
        return getattr(native.module.WeightFormat, self.format), self.outputs, self.inputs, self.packed

    @property
    def span(self) -> int:
        """Of a product whose weight is of this format alone."""
        return self.span_asked or int(native.module.span_of(getattr(native.module.WeightFormat, self.format)))

    def times(self, x: np.ndarray, bias: np.ndarray | None = None, threads: int = 1) -> np.ndarray:
        out = np.full((len(x), self.outputs), 7, np.float32)
        return self.into(out, x, bias, add=False, threads=threads)

    def into(self, out: np.ndarray, x: np.ndarray, bias: np.ndarray | None, *, add: bool, threads: int = 1) -> np.ndarray:
        rows = np.full(native.module.activation_bytes(*x.shape, self.span), 0xAB, np.uint8)
        native.module.quantise(x, rows, threads, self.span)
        native.module.linear(*self.arguments, rows, bias, out, add, threads, self.span)
        return out

    def unpacked(self, wanted: list[int]) -> np.ndarray:
        out = np.empty((len(wanted), self.inputs), np.float32)
        native.module.unpack(*self.arguments, np.array(wanted, np.int32), out, 2)
        return out


def blocks_of(kind: str, count: int, seed: int, scale: float = 1.0) -> np.ndarray:
    """uint8 [count, block bytes], every value of every field possible, the float16 of a sensible size."""
    chance = np.random.default_rng(seed)
    blocks = chance.integers(0, 256, (count, GGML_QUANT_SIZES[GGMLQuantizationType[kind]][1]), np.uint8)
    for at, size in HALVES_AT[kind].items():
        halves = (chance.standard_normal(count) * size * scale).astype(np.float16)
        blocks[:, at : at + 2] = halves.view(np.uint8).reshape(-1, 2)
    return blocks


def packed_weight(kind: str, blocks: np.ndarray, outputs: int, inputs: int) -> Weight:
    which = getattr(native.module.WeightFormat, kind)
    packed = np.full(native.module.packed_bytes(which, outputs, inputs), 0xCD, np.uint8)
    native.module.pack(which, outputs, inputs, blocks.reshape(-1), packed, 2)
    return Weight(kind, outputs, inputs, packed, reference_linear.read(kind, blocks, outputs))


def weight_of(kind: str, outputs: int, inputs: int, seed: int = 0) -> Weight:
    values = GGML_QUANT_SIZES[GGMLQuantizationType[kind]][0]
    return packed_weight(kind, blocks_of(kind, outputs * inputs // values, seed), outputs, inputs)


def rows_of(rows: int, inputs: int, seed: int = 1) -> np.ndarray:
    """Rows of sizes from 1e-3 to 1e3, some numbers in them far larger than the rest, as in a real model's."""
    chance = np.random.default_rng(seed)
    x = chance.standard_normal((rows, inputs)) * np.exp(chance.uniform(-7, 7, (rows, 1)))
    return (x * np.where(chance.random((rows, inputs)) < 0.01, 30, 1)).astype(np.float32)


def allowed(right: np.ndarray, weight: Weight, x: np.ndarray, bias: np.ndarray | None = None) -> np.ndarray:
    """Sums of integers are exact; their product with the two scales has up to four roundings."""
    count, squares = reference_linear.squares(weight.right, x, bias, weight.span)
    square = sum_square(count, torch.from_numpy(right), torch.from_numpy(squares)).numpy() + 4 * FLOAT32**2 * squares
    # The scales' product may be too small for a normal float.
    least = count * 2.0**-149 * 255 * 127 * reference_linear.SPAN
    return CONFIDENCE * np.sqrt(square) + least


def assert_right(found: np.ndarray, weight: Weight, x: np.ndarray, bias: np.ndarray | None = None) -> None:
    right = reference_linear.linear(weight.right, x, bias, weight.span)
    assert_within(torch.from_numpy(found), torch.from_numpy(right), torch.from_numpy(allowed(right, weight, x, bias)))


def shapes_for(kind: str) -> list[tuple[int, int]]:
    return [shape for shape in SHAPES if kind not in SUPER or shape[1] % 256 == 0]


@pytest.mark.parametrize("kind", FORMATS)
def test_the_reference_reads_blocks_as_the_gguf_package_does(kind: str) -> None:
    blocks = blocks_of(kind, 600, seed=3)
    right = dequantize(blocks, GGMLQuantizationType[kind])
    found = reference_linear.dequantised(reference_linear.read(kind, blocks, 600))
    np.testing.assert_array_equal(found.view(np.uint32), right.view(np.uint32))


@pytest.mark.parametrize("kind", FORMATS)
def test_unpacked_rows_are_the_file_s_values_bit_for_bit(kind: str, isa: str) -> None:
    for outputs, inputs in shapes_for(kind):
        weight = weight_of(kind, outputs, inputs, seed=outputs)
        wanted = [outputs - 1, 0, outputs // 2, 0]
        right = reference_linear.dequantised(weight.right)[wanted]
        np.testing.assert_array_equal(weight.unpacked(wanted).view(np.uint32), right.view(np.uint32))


@pytest.mark.parametrize("kind", FORMATS)
def test_products_equal_the_reference_for_every_shape(kind: str, isa: str) -> None:
    for (outputs, inputs), rows in itertools.product(shapes_for(kind), (1, 3, 17, ROWS_MANY)):
        weight, x = weight_of(kind, outputs, inputs, seed=rows), rows_of(rows, inputs, seed=inputs)
        assert_right(weight.times(x), weight, x)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("span", [32, 128])
def test_products_of_many_rows_equal_the_reference_with_either_span(kind: str, span: int, isa: str) -> None:
    for outputs, inputs in shapes_for(kind):
        weight, x = weight_of(kind, outputs, inputs, seed=span), rows_of(ROWS_MANY + 1, inputs)
        weight.span_asked = span
        assert_right(weight.times(x), weight, x)


@pytest.mark.parametrize("kind", FORMATS)
def test_products_equal_the_reference_for_every_number_of_rows(kind: str) -> None:
    weight, x = weight_of(kind, 40, 768), rows_of(ROWS_MANY + 30, 768)
    for rows in [*range(1, 40), *range(40, ROWS_MANY, 7), ROWS_MANY - 1, ROWS_MANY, ROWS_MANY + 11, ROWS_MANY + 30]:
        assert_right(weight.times(x[:rows], threads=2), weight, x[:rows])


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K", "Q8_0", "Q4_1"])
def test_products_equal_the_reference_at_the_sizes_of_a_model(kind: str) -> None:
    for (outputs, inputs), rows in itertools.product(((64, 8960), (400, 2048)), (1, 12, 512)):
        if kind in SUPER or rows < 512:
            weight, x = weight_of(kind, outputs, inputs), rows_of(rows, inputs)
            assert_right(weight.times(x, threads=2), weight, x)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("rows_most", [ROWS_MANY - 1, ROWS_MANY + 40])
def test_a_row_s_result_does_not_depend_on_the_others(kind: str, rows_most: int, isa: str) -> None:
    """Bit for bit, on either side of ROWS_MANY."""
    weight, x = weight_of(kind, 35, 512), rows_of(rows_most, 512)
    together = weight.times(x)
    for first, rows in ((0, 1), (3, 2), (10, 13), (1, 40)) if rows_most < ROWS_MANY else ((0, ROWS_MANY), (17, ROWS_MANY + 3)):
        np.testing.assert_array_equal(weight.times(x[first : first + rows]), together[first : first + rows])


@pytest.mark.parametrize("kind", FORMATS)
def test_two_threads_compute_what_one_does(kind: str) -> None:
    for rows in (1, 5, 70, ROWS_MANY + 5):
        weight, x = weight_of(kind, 335, 512), rows_of(rows, 512)
        np.testing.assert_array_equal(weight.times(x, threads=2), weight.times(x, threads=1))


@pytest.mark.parametrize("kind", ["Q4_K", "Q5_0", "Q8_0"])
def test_bias_sum_and_distance_between_rows(kind: str, isa: str) -> None:
    for outputs, rows in itertools.product((32, 37, 64), (1, 6, ROWS_MANY)):
        weight, x = weight_of(kind, outputs, 256), rows_of(rows, 256)
        bias = np.random.default_rng(5).standard_normal(outputs).astype(np.float32)
        wide = np.full((rows, outputs + 9), 3.0, np.float32)
        weight.into(wide[:, 4 : 4 + outputs], x, bias, add=False)
        assert_right(wide[:, 4 : 4 + outputs], weight, x, bias)
        assert (wide[:, :4] == 3).all() and (wide[:, 4 + outputs :] == 3).all()
        added = weight.into(np.full((rows, outputs), 0.5, np.float32), x, None, add=True)
        np.testing.assert_array_equal(added, weight.times(x) + np.float32(0.5))


@pytest.mark.parametrize("rows", [2, 20, ROWS_MANY + 10])
def test_a_nan_or_an_infinity_spoils_its_own_row_only(rows: int, isa: str) -> None:
    for kind in ("Q4_0", "Q4_K", "Q6_K", "Q8_0"):
        weight, x = weight_of(kind, 20, 768), rows_of(rows, 768)
        right = weight.times(x)
        for poison, where in itertools.product((np.nan, np.inf, -np.inf), (0, 255, 700)):
            spoilt = x.copy()
            spoilt[1, where] = poison
            found = weight.times(spoilt)
            assert np.isnan(found[1]).all()
            np.testing.assert_array_equal(np.delete(found, 1, 0), np.delete(right, 1, 0))


@pytest.mark.parametrize("rows", [3, ROWS_MANY])
@pytest.mark.parametrize("kind", FORMATS)
def test_scales_of_zero_the_smallest_and_the_largest(kind: str, rows: int, isa: str) -> None:
    values = GGML_QUANT_SIZES[GGMLQuantizationType[kind]][0]
    for half in (0.0, -0.0, 6e-8, -5e-5, 65504.0, -65504.0):
        blocks = blocks_of(kind, 21 * 512 // values, seed=9)
        at = next(iter(HALVES_AT[kind]))
        # Every third block, so that groups of very different sizes share a chunk.
        blocks[::3, at : at + 2] = np.array([half], np.float16).view(np.uint8)
        weight, x = packed_weight(kind, blocks, 21, 512), rows_of(rows, 512)
        assert_right(weight.times(x), weight, x)


@pytest.mark.parametrize("rows", [2, ROWS_MANY])
def test_rows_of_zeros_the_smallest_and_the_largest(rows: int, isa: str) -> None:
    for kind, size in itertools.product(("Q4_1", "Q6_K", "Q8_0"), (0.0, 1e-45, 1e-39, 2e-36, 1e-20, 1e20, 3e33)):
        weight = weight_of(kind, 18, 512)
        x = (np.random.default_rng(2).uniform(-1, 1, (rows, 512)) * size).astype(np.float32)
        assert_right(weight.times(x), weight, x)


def test_a_group_that_is_not_finite_makes_its_output_nan_and_no_other(isa: str) -> None:
    weight = torch.randn(40, 64, generator=torch.Generator().manual_seed(0))
    weight[3, 5], weight[20, 63], weight[7] = torch.nan, torch.inf, 0
    packed = packed_weight("Q8_0", q8_0_blocks(weight), 40, 64)
    for rows in (1, ROWS_MANY):
        found = packed.times(rows_of(rows, 64))
        assert np.isnan(found[:, [3, 20]]).all()
        assert np.isfinite(np.delete(found, [3, 20], 1)).all()
        assert (found[:, 7] == 0).all()


def test_weights_quantised_here_are_off_by_half_a_step_at_most() -> None:
    for size in (0.0, 1e-30, 1e-3, 1.0, 1e6):
        weight = size * torch.randn(48, 256, generator=torch.Generator().manual_seed(1))
        steps = weight.double().unflatten(1, (-1, 32)).abs().amax(-1, keepdim=True) / 127
        found = reference_linear.dequantised(reference_linear.read("Q8_0", q8_0_blocks(weight), 48))
        off = (torch.from_numpy(found).double() - weight).unflatten(1, (-1, 32)).abs()
        # A float16 scale is off by 2^-11 of itself, or by 2^-25 where it is subnormal: 127 times at most. The quotient is
        # rounded in float32: 127 units of a step.
        scale = torch.maximum(steps * 2**-11, torch.tensor(2.0**-25))
        assert (off <= (0.5 + 127 * FLOAT32) * steps + 127 * scale).all()


@pytest.mark.parametrize("kind", FORMATS)
def test_a_scale_that_is_nan_makes_its_output_nan(kind: str, isa: str) -> None:
    blocks = blocks_of(kind, 8 * 512 // GGML_QUANT_SIZES[GGMLQuantizationType[kind]][0], seed=4)
    per_output = len(blocks) // 8
    at = next(iter(HALVES_AT[kind]))
    blocks[3 * per_output, at : at + 2] = np.array([np.nan], np.float16).view(np.uint8)
    for rows in (1, ROWS_MANY):
        found = packed_weight(kind, blocks, 8, 512).times(rows_of(rows, 512))
        assert np.isnan(found[:, 3]).all()
        assert np.isfinite(np.delete(found, 3, 1)).all()


@pytest.mark.parametrize("kind", FORMATS)
def test_rounding_costs_half_a_percent_for_few_rows_and_one_for_many(kind: str) -> None:
    """Against the product in float32: rounded rows alone, and rows and weights rounded with a scale per span."""
    weight, x = weight_of(kind, 64, 1024), np.random.default_rng(7).standard_normal((ROWS_MANY, 1024)).astype(np.float32)
    right = x.astype(np.float64) @ reference_linear.dequantised(weight.right).T
    few = np.concatenate([weight.times(part) for part in np.split(x, 2)])
    assert np.linalg.norm(few - right) < 0.006 * np.linalg.norm(right)
    assert np.linalg.norm(weight.times(x) - right) < 0.0095 * np.linalg.norm(right)


def test_memory_for_many_rows_does_for_fewer() -> None:
    for inputs in (32, 576, 8960):
        sizes = [native.module.activation_bytes(rows, inputs) for rows in range(1, 300)]
        assert sizes == sorted(sizes)


def test_the_threshold_is_the_reference_s() -> None:
    assert native.module.ROWS_MANY == ROWS_MANY


@pytest.mark.parametrize("kind", FORMATS)
def test_packed_weights_are_hardly_larger_than_the_file_s(kind: str) -> None:
    values, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    for shape in ((1536, 8960), (8960, 1536), (576, 1536), (1536, 576), (256, 640), (151936, 896)):
        if shape[1] % values == 0:
            packed = native.module.packed_bytes(getattr(native.module.WeightFormat, kind), *shape)
            assert packed <= shape[0] * shape[1] // values * size * 1.002


def wrong_calls() -> dict[str, Callable[[], object]]:
    m, q4_0 = native.module, native.module.WeightFormat.Q4_0
    packed, rows = np.zeros(m.packed_bytes(q4_0, 16, 64), np.uint8), np.zeros(m.activation_bytes(2, 64), np.uint8)
    x, out = np.zeros((2, 64), np.float32), np.zeros((2, 16), np.float32)
    return {
        "inputs": lambda: m.packed_bytes(m.WeightFormat.Q4_K, 16, 64),
        "outputs": lambda: m.packed_bytes(q4_0, 0, 64),
        "blocks": lambda: m.pack(q4_0, 16, 64, np.zeros(575, np.uint8), packed, 1),
        "packed": lambda: m.linear(q4_0, 16, 64, packed[:-1], rows, None, out, False, 1),
        "rows": lambda: m.linear(q4_0, 16, 64, packed, rows[:-64], None, out, False, 1),
        "bias": lambda: m.linear(q4_0, 16, 64, packed, rows, out[0, :15], out, False, 1),
        "columns": lambda: m.linear(q4_0, 16, 64, packed, rows, None, out[:, :15], False, 1),
        "transposed": lambda: m.quantise(np.zeros((64, 2), np.float32).T, rows, 1),
        "wanted": lambda: m.unpack(q4_0, 16, 64, packed, np.array([16], np.int32), np.zeros((1, 64), np.float32), 1),
        "activations": lambda: m.quantise(x, rows[:-1], 1),
    }


@pytest.mark.parametrize("which", list(wrong_calls()) if native.module else [])
def test_arrays_of_the_wrong_size_are_refused(which: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        wrong_calls()[which]()


@pytest.mark.model
def test_a_real_file_s_tensors_survive_being_packed(catalogue_file: Callable[[str], Path]) -> None:
    path = catalogue_file("smollm2-135m")
    for tensor in gguf.read_header(path).tensors.values():
        if tensor.kind in (GGMLQuantizationType.Q4_1, GGMLQuantizationType.Q8_0) and "blk.1" not in tensor.name:
            blocks = np.array(np.memmap(path, np.uint8, "r", tensor.offset, tensor.size))
            weight = packed_weight(tensor.kind.name, blocks, *tensor.shape)
            right = dequantize_rows(torch.from_numpy(blocks.reshape(tensor.shape[0], -1)), tensor.kind).numpy()
            wanted = list(range(0, tensor.shape[0], 97))
            np.testing.assert_array_equal(weight.unpacked(wanted), right[wanted])
