"""The native decoder gives the torch decoder's logits up to what int8 activations lose, and the same bits alone or batched."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from gguf.constants import GGMLQuantizationType as Kind
from torch import Tensor

from kveik.kernels import native
from kveik.model.choice import no_kernels_because
from kveik.model.decoder import load_decoder
from kveik.model.native_decoder import NativeDecoder
from kveik.model.native_loading import load_native_decoder, pack_blocks, pack_int8
from kveik.model.weights import open_model
from tests.model.tiny import COMMON, IN_GGUF, WIDE, save_folder, save_gguf, tiny_model
from tests.model.worlds import PagedWorld

pytestmark = pytest.mark.skipif(native.module is None, reason="installed without a compiler")

LOSS_MOST = 0.08
"""Of the logits' length. Random weights magnify what rounding loses: bfloat16 loses 0.02 here, int8 activations 0.05."""


@pytest.fixture(scope="session")
def files(tmp_path_factory):
    """(family, kind) -> a GGUF file whose matrices are blocks of that kind; made once."""
    folder = tmp_path_factory.mktemp("native")

    @cache
    def path(family: str, kind: Kind) -> Path:
        return save_gguf(tiny_model(family, **WIDE), folder / f"{family}-{kind.name}.gguf", {"": kind})

    return path


@cache
def native_decoder(path: Path) -> NativeDecoder:
    return load_native_decoder(open_model(path), torch.bfloat16, pack_blocks, lambda _: "blocks")


def prompt(length: int, seed: int = 0) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(COMMON["vocab_size"]) for _ in range(length)]


def whole(decoder, tokens: list[int], block_size: int = 8) -> Tensor:
    return PagedWorld(decoder, 1, len(tokens), block_size).step([(0, tokens)])[0].clone()


def loss(found: Tensor, right: Tensor) -> float:
    return ((found - right).norm() / right.norm()).item()


@pytest.mark.parametrize("family", IN_GGUF)
def test_a_prompt_gives_the_logits_of_the_dequantised_file(files, family):
    path, tokens = files(family, Kind.Q8_0), prompt(40)
    right = whole(load_decoder(open_model(path), torch.float32, "bf16"), tokens)
    assert loss(whole(native_decoder(path), tokens), right) < LOSS_MOST


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0], ids=lambda kind: kind.name)
@pytest.mark.parametrize("isa", native.isas())
def test_every_format_on_every_instruction_set(files, kind, isa):
    path, tokens = files("qwen2", kind), prompt(30, 1)
    right = whole(load_decoder(open_model(path), torch.float32, "bf16"), tokens)
    usual = native.isa()
    try:
        native.use(isa)
        assert loss(whole(native_decoder(path), tokens), right) < LOSS_MOST
    finally:
        native.use(usual)


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen2"])
def test_a_sequence_has_the_same_bits_alone_and_among_others(files, family):
    decoder = native_decoder(files(family, Kind.Q4_1))
    prompts = [prompt(length, seed) for seed, length in enumerate((13, 1, 30, 7))]
    alone = []
    for tokens in prompts:
        world = PagedWorld(decoder, 4, 64, 8)
        alone.append([world.step([(0, [token])])[0].clone() for token in tokens])
    world = PagedWorld(decoder, 4, 64, 8)
    for step in range(30):
        here = [(row, [tokens[step]]) for row, tokens in enumerate(prompts) if step < len(tokens)]
        for (row, _), logits in zip(here, world.step(here), strict=True):
            assert torch.equal(logits, alone[row][step])


def decoding(decoder: NativeDecoder, sequences: int, chunk: int) -> Tensor:
    """The first one's logits where so many sequences decode beside somebody's prompt of `chunk` tokens."""
    world = PagedWorld(decoder, sequences + 1, 400, 8)
    for row in range(sequences):
        world.step([(row, prompt(9, row))])
    tokens = [(row, prompt(1, 100 + row)) for row in range(sequences)]
    return world.step(tokens + ([(sequences, prompt(chunk, 99))] if chunk else []))[0].clone()


def assert_company_changes_no_bit(decoder: NativeDecoder, company: Sequence[tuple[int, int]]) -> None:
    """company: how many sequences decode, and the length of a prompt's chunk beside them."""
    alone = decoding(decoder, 1, 0)
    for sequences, chunk in company:
        assert torch.equal(decoding(decoder, sequences, chunk), alone), f"{sequences} decodes beside a chunk of {chunk}"


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_decode_has_the_same_bits_beside_any_number_of_others_and_any_prompt(files, family):
    company = (3, 0), (3, 60), (3, 80), (1, 300), (60, 72), (80, 0), (150, 200)
    assert_company_changes_no_bit(native_decoder(files(family, Kind.Q4_1)), company)


@pytest.mark.model
def test_a_decode_has_the_same_bits_where_prompts_go_the_way_for_many_rows(catalogue_file):
    assert_company_changes_no_bit(native_decoder(catalogue_file("qwen2.5-coder-0.5b")), [(2, 80), (75, 0)])


@pytest.mark.parametrize("rows", [71, 72, 150, 300])
def test_a_long_prompt_s_first_tokens_have_the_bits_of_a_short_one(files, rows):
    """Over formats whose scales are for 32 inputs, for which many rows go the way for few."""
    decoder, tokens = native_decoder(files("llama", Kind.Q5_0)), prompt(rows, 6)
    assert torch.equal(whole(decoder, tokens)[:5], whole(decoder, tokens[:5]))


def test_ragged_chunks_give_the_logits_of_one_chunk(files):
    decoder, tokens = native_decoder(files("gemma3", Kind.Q8_0)), prompt(50, 3)
    right = whole(decoder, tokens)
    world = PagedWorld(decoder, 2, 64, 8, seed=5)
    found, first = [], 0
    for count in (1, 7, 16, 2, 24):
        found.append(world.step([(1, tokens[first : first + count])])[0].clone())
        first += count
    assert loss(torch.cat(found), right) < 0.01


def test_weights_of_a_folder_become_int8_rows(tmp_path):
    folder = save_folder(tiny_model("qwen3", **WIDE), tmp_path / "qwen3")
    tokens = prompt(40)
    right = whole(load_decoder(open_model(folder), torch.float32, "bf16"), tokens)
    found = whole(load_native_decoder(open_model(folder), torch.bfloat16, pack_int8, lambda _: "int8"), tokens)
    assert loss(found, right) < LOSS_MOST


def test_a_sequence_that_goes_wrong_leaves_the_others_their_bits(files):
    decoder = native_decoder(files("llama", Kind.Q4_1))
    tokens = prompt(12)
    right = whole(decoder, tokens)
    world = PagedWorld(decoder, 2, 64, 8)
    world.step([(1, tokens[:8])])
    world.storage[0][world.tables[0][1].long(), :, 0] = torch.inf
    found = world.step([(0, tokens), (1, tokens[8:])])
    assert torch.equal(found[0], right)
    assert not found[1].isfinite().any()


def test_a_chunk_from_which_nothing_is_wanted_is_written_all_the_same(files):
    decoder, tokens = native_decoder(files("llama", Kind.Q4_1)), prompt(50, 4)
    world = PagedWorld(decoder, 1, 64, 8)
    right = [world.step([(0, part)])[0] for part in (tokens[:29], tokens[29:])][1]
    silent = PagedWorld(decoder, 1, 64, 8)
    batch = replace(silent.batch([(0, tokens[:29])]), logits_indices=torch.empty(0, dtype=torch.int64))
    assert decoder.forward(batch, silent.storage).shape == (0, decoder.spec.hidden)
    silent.computed[0] = 29
    assert torch.equal(silent.step([(0, tokens[29:])])[0], right)


def test_heads_wider_than_the_kernels_take_are_left_to_torch(files):
    file = open_model(files("llama", Kind.Q8_0))
    assert no_kernels_because(file) is None
    file.spec = replace(file.spec, head_dim=1040)
    assert no_kernels_because(file) == "the model's heads have 1040 dimensions; the native kernels take 1024 at most"
