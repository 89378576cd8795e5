"""Rotary frequencies and rotations, against transformers and values written out."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from kveik.model.decoder import load_decoder
from kveik.model.rope import MEAN_POSITIONS, RopeSpec, inverse_frequencies, key_mean, rope_from_config, rotate, turns
from kveik.model.weights import open_model
from tests.model.tiny import llama3_divisors, save_folder, save_gguf, tiny_model

LLAMA31 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
KINDS = [
    {"rope_type": "linear", "rope_theta": 10000.0, "factor": 8.0},
    LLAMA31,
    {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768},
    {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "mscale": 0.7,
        "mscale_all_dim": 0.5,
        "truncate": False,
    },
]


@pytest.mark.parametrize("parameters", KINDS, ids=lambda kind: kind["rope_type"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_frequencies_are_transformers(parameters, head_dim):
    config = LlamaConfig(
        hidden_size=head_dim * 2, num_attention_heads=2, max_position_embeddings=131072, rope_parameters=dict(parameters)
    )
    right, attention = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, "cpu")
    rope = rope_from_config(parameters, base=1.0, context=131072)
    torch.testing.assert_close(inverse_frequencies(rope, head_dim), right, rtol=1e-6, atol=0)
    assert rope.attention_factor == pytest.approx(attention)


def test_llama_31_divides_its_slow_frequencies():
    plain = inverse_frequencies(RopeSpec(base=500000.0), 64)
    divided = plain / inverse_frequencies(rope_from_config(LLAMA31, 1.0, 131072), 64)
    right = [1.0] * 15 + [1.6513, 3.2923, 9.6667] + [32.0] * 14
    torch.testing.assert_close(divided, torch.tensor(right), atol=1e-4, rtol=0)


def test_a_files_divisors_give_the_frequencies_of_the_folder(tmp_path):
    model = tiny_model("llama-rope-llama3")
    from_folder = load_decoder(open_model(save_folder(model, tmp_path / "folder")), torch.float32)
    from_gguf = load_decoder(open_model(save_gguf(model, tmp_path / "model.gguf")), torch.float32)
    plain = inverse_frequencies(RopeSpec(base=10000.0), 8)
    assert not torch.allclose(from_folder.turning.frequencies, plain)
    torch.testing.assert_close(from_gguf.turning.frequencies, from_folder.turning.frequencies, rtol=1e-6, atol=0)


def test_the_tests_divisors_are_those_of_llama_31():
    around = llama3_divisors(LLAMA31, 64)[14:19].tolist()
    assert around == pytest.approx([1, 1.6513, 3.2923, 9.6667, 32], abs=1e-4)


@pytest.mark.parametrize("start", [0, 9000])
def test_heads_are_rotated_as_transformers_rotates_them(start):
    config = LlamaConfig(hidden_size=128, num_attention_heads=2, max_position_embeddings=131072, rope_parameters=dict(LLAMA31))
    positions = torch.arange(start, start + 7)
    heads = torch.randn(7, 2, 64, generator=torch.Generator().manual_seed(0))
    cos, sin = LlamaRotaryEmbedding(config)(heads, positions[None])
    right, _ = apply_rotary_pos_emb(heads[None].transpose(1, 2), heads[None].transpose(1, 2), cos, sin)
    rope = rope_from_config(LLAMA31, 1.0, 131072)
    ours = rotate(heads, *turns(positions, inverse_frequencies(rope, 64), rope.attention_factor, torch.float32))
    torch.testing.assert_close(ours, right[0].transpose(0, 1), atol=1e-5, rtol=1e-5)


def test_yarn_with_one_dimension_between_does_not_divide_by_zero():
    rope = RopeSpec(base=10000.0, kind="yarn", factor=2.0, original_context=4, beta_fast=1.0, beta_slow=1.0, truncate=False)
    assert torch.isfinite(inverse_frequencies(rope, 8)).all()


def test_a_rope_is_a_value():
    assert len({RopeSpec(base=1e4), RopeSpec(base=1e4), RopeSpec(base=1e4, kind="linear", factor=2.0)}) == 2


def test_the_mean_of_keys_is_their_turned_bias_s_mean_and_all_of_it_in_pairs_that_hardly_turn():
    frequencies = inverse_frequencies(RopeSpec(base=1e6), 64)
    bias = torch.randn(2, 64, generator=torch.Generator().manual_seed(1))
    found = key_mean(bias, frequencies, 1.0)
    cos, sin = turns(torch.arange(MEAN_POSITIONS), frequencies, 1.0, torch.float32)
    turned = torch.stack([rotate(bias[None], cos[at : at + 1], sin[at : at + 1])[0] for at in range(MEAN_POSITIONS)])
    torch.testing.assert_close(found, turned.mean(0), atol=1e-4, rtol=1e-4)
    pair = torch.tensor([31, 63])
    torch.testing.assert_close(found[:, pair], bias[:, pair], atol=0.02, rtol=0)
    assert found[:, [0, 32]].abs().max() < 0.01
