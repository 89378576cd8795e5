"""Payloads hold what the pool held, exactly or to int8; the arithmetic is that of quantised pools."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from kveik.kernels import kv_types
from kveik.offload.stores.encode import Int8Rows, Raw

DTYPES = [torch.bfloat16, torch.float32]


def view_of(x: torch.Tensor) -> memoryview:
    return memoryview(x.view(torch.uint8).numpy()).cast("B")


def int8_of(x: torch.Tensor) -> tuple[Int8Rows, bytearray]:
    codec = Int8Rows(x.numel() // x.shape[-1], x.shape[-1], x.dtype)
    payload = bytearray(codec.payload_bytes)
    codec.encode(view_of(x), memoryview(payload))
    return codec, payload


def decoded(codec: Int8Rows, payload: bytearray, x: torch.Tensor) -> torch.Tensor:
    back = torch.full_like(x, 7.0)
    codec.decode(memoryview(bytes(payload)), view_of(back))
    return back


def block(dtype: torch.dtype, shape: tuple[int, ...] = (3, 2, 2, 16, 24)) -> torch.Tensor:
    rows = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    return (rows * torch.logspace(-30, 30, shape[3])[:, None]).to(dtype)


def test_raw_payloads_are_the_block() -> None:
    content, payload, back = bytes(range(256)) * 4, bytearray(1024), bytearray(1024)
    codec = Raw(1024)
    codec.encode(memoryview(content), memoryview(payload))
    codec.decode(memoryview(payload), memoryview(back))
    assert content == payload == back


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(3, 2, 2, 16, 24), (1, 2, 1, 8, 8), (5, 2, 8, 64, 128)], ids=str)
def test_int8_payloads_hold_the_bits_of_a_quantised_pool(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = block(dtype, shape)
    _, payload = int8_of(x)
    stored, scales = kv_types.quantise(x, kv_types.INT8)
    assert payload == bytes(view_of(stored)) + bytes(view_of(scales))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_decoding_is_rounded_once(dtype: torch.dtype) -> None:
    x = block(dtype)
    codec, payload = int8_of(x)
    stored, scales = kv_types.quantise(x, kv_types.INT8)
    assert torch.equal(decoded(codec, payload, x), kv_types.dequantise(stored, scales, kv_types.INT8, dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_int8_keeps_every_value_to_a_part_of_its_rows_largest(dtype: torch.dtype) -> None:
    x = block(dtype)
    back = decoded(*int8_of(x), x).float()
    assert bool(((back - x.float()).abs() <= x.float().abs().amax(-1, keepdim=True) / 127).all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), float("-inf")])
def test_a_row_gone_wrong_stays_visible_and_alone(dtype: torch.dtype, wrong: float) -> None:
    x = block(dtype)
    x[1, 0, 1, 5, 3] = wrong
    codec, payload = int8_of(x)
    stored, _ = kv_types.quantise(x, kv_types.INT8)
    assert payload[: stored.numel()] == bytes(view_of(stored))
    back = decoded(codec, payload, x)
    assert bool(back[1, 0, 1, 5].isnan().all())
    assert int(back.isnan().sum()) == x.shape[-1]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_zeros_come_back_as_zeros(dtype: torch.dtype) -> None:
    x = torch.zeros((1, 2, 1, 16, 16), dtype=dtype)
    assert torch.equal(decoded(*int8_of(x), x), x)


def test_int8_is_about_half_of_bfloat16_and_a_quarter_of_float32() -> None:
    half, quarter = (Int8Rows(960, 64, dtype) for dtype in DTYPES)
    assert half.payload_bytes / half.block_bytes == pytest.approx(0.5156, abs=1e-4)
    assert quarter.payload_bytes / quarter.block_bytes == pytest.approx(0.2578, abs=1e-4)


def test_encoding_wakes_no_second_team_of_threads() -> None:
    script = "; ".join(
        [
            "import os, torch",
            "from kveik.offload.stores.encode import Int8Rows",
            "torch.set_num_threads(4)",
            "codecs = [Int8Rows(20000, 64, torch.bfloat16), Int8Rows(20000, 64, torch.float32)]",
            "blocks = [memoryview(bytearray(one.block_bytes)) for one in codecs]",
            "payloads = [memoryview(bytearray(one.payload_bytes)) for one in codecs]",
            "both = list(zip(codecs, blocks, payloads))",
            "before = len(os.listdir('/proc/self/task'))",
            "[(one.encode(block, payload), one.decode(payload, block)) for one, block, payload in both]",
            "print(len(os.listdir('/proc/self/task')) - before)",
        ]
    )
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment, timeout=120)
    assert done.stdout == "0\n"
