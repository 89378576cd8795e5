"""Keys with a large bias in pairs that hardly turn, as Qwen2's are, keep their small parts when they are stored in bytes."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kveik.kernels import native
from kveik.kernels.kv_types import FP8_E4M3, INT8, KvType
from kveik.model.decoder import load_decoder
from kveik.model.native_loading import load_native_decoder, pack_int8
from kveik.model.torch_decoder import TorchDecoder
from kveik.model.weights import open_model
from tests.model.tiny import COMMON, WIDE, save_folder, tiny_model
from tests.model.worlds import PagedWorld

TOKENS = 120


def heavy(folder: Path, family: str = "qwen2") -> Path:
    """A tiny model whose keys are near 200 in their slowest pairs, and near 1 elsewhere."""
    rope = {"rope_type": "default", "rope_theta": 1e6}
    model = tiny_model(family, **WIDE, rope_parameters=rope)
    with torch.no_grad():
        for layer in model.model.layers:  # type: ignore[union-attr]  # every family has them
            bias = layer.self_attn.k_proj.bias.view(2, 16)
            bias[:, 7] = 200.0
            bias[:, 14] = -150.0
    return save_folder(model, folder / family)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return heavy(tmp_path_factory.mktemp("heavy"))


@pytest.fixture(scope="module")
def decoder(folder: Path) -> TorchDecoder:
    loaded = load_decoder(open_model(folder), torch.float32, "bf16")
    assert isinstance(loaded, TorchDecoder)
    return loaded


def prompt() -> list[int]:
    chance = random.Random(1)
    return [chance.randrange(COMMON["vocab_size"]) for _ in range(TOKENS)]


def logits(decoder: object, kv_type: KvType | None) -> Tensor:
    """Of the prompt, in two chunks and then token by token, so that much is read from the cache."""
    world, tokens = PagedWorld(decoder, 1, TOKENS, 8, kv_type=kv_type), prompt()  # type: ignore[arg-type]  # any decoder
    cuts = [0, 50, 90, *range(91, TOKENS + 1)]
    return torch.cat([world.step([(0, tokens[first:stop])])[0].clone() for first, stop in pairwise(cuts)])


def loss(found: Tensor, right: Tensor) -> float:
    return ((found - right).norm() / right.norm()).item()


def without_mean(decoder: TorchDecoder) -> TorchDecoder:
    layers = tuple(replace(layer, attention=replace(layer.attention, key_mean=None)) for layer in decoder.layers)
    return replace(decoder, layers=layers)


@pytest.mark.parametrize(("kv_type", "most"), [(INT8, 0.05), (FP8_E4M3, 0.15)], ids=["int8", "fp8_e4m3"])
def test_small_parts_of_keys_beside_a_large_bias_survive_in_bytes(decoder: TorchDecoder, kv_type: KvType, most: float) -> None:
    right = logits(decoder, None)
    careful, careless = loss(logits(decoder, kv_type), right), loss(logits(without_mean(decoder), kv_type), right)
    assert careful < most
    assert careless > 4 * careful


@pytest.mark.skipif(native.module is None, reason="installed without a compiler")
@pytest.mark.parametrize(("kv_type", "most"), [(None, 0.1), (INT8, 0.12), (FP8_E4M3, 0.18)], ids=["bf16", "int8", "fp8_e4m3"])
def test_the_native_decoder_takes_the_same_off(
    folder: Path, decoder: TorchDecoder, kv_type: KvType | None, most: float
) -> None:
    """Of bfloat16 storage, too, whose own steps are as large as 1 beside 200."""
    compiled = load_native_decoder(open_model(folder), torch.bfloat16, pack_int8, lambda _: "int8")
    assert loss(logits(compiled, kv_type), logits(decoder, None)) < most


@pytest.mark.parametrize("family", ["qwen3", "gemma3-capped", "llama"])
def test_where_keys_have_no_bias_or_its_sum_counts_nothing_is_taken_off(tmp_path: Path, family: str) -> None:
    loaded = load_decoder(open_model(save_folder(tiny_model(family), tmp_path / family)), torch.float32, "bf16")
    assert isinstance(loaded, TorchDecoder)
    assert [layer.attention.key_mean for layer in loaded.layers] == [None] * loaded.spec.layers
