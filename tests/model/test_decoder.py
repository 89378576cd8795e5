"""The decoder gives transformers' logits, from both formats, however the prompt is cut and whoever else is in the step."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kveik.model.decoder import Decoder, load_decoder
from kveik.model.weights import open_model
from tests.bounds import assert_within, logits_bound
from tests.model.tiny import COMMON, FAMILIES, IN_GGUF, save_folder, save_gguf, tiny_model
from tests.model.worlds import PagedWorld

FORMATS = [(family, "folder") for family in FAMILIES] + [(family, "gguf") for family in IN_GGUF]


def assert_logits(found: Tensor, right: Tensor) -> None:
    assert_within(found, right, logits_bound(right, COMMON["num_hidden_layers"], COMMON["intermediate_size"]))


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """(family, format) -> path of the saved model, and transformers' logits for any tokens; made once."""
    folder = tmp_path_factory.mktemp("tiny")

    @cache
    def oracle(family: str):
        return tiny_model(family)

    @cache
    def path(family: str, kind: str) -> Path:
        if kind == "gguf":
            return save_gguf(oracle(family), folder / f"{family}.gguf")
        return save_folder(oracle(family), folder / family)

    class Models:
        @staticmethod
        @cache
        def decoder(family: str, kind: str, dtype: torch.dtype = torch.float32) -> Decoder:
            return load_decoder(open_model(path(family, kind)), dtype)

        @staticmethod
        @torch.inference_mode()
        def logits(family: str, tokens: list[int]) -> Tensor:
            model = oracle(family)
            # transformers' Gemma 3 reads this key and forgets to hand it on to its attention, which does know caps.
            cap = getattr(model.config, "attn_logit_softcapping", None)
            found: Tensor = model(torch.tensor([tokens]), **({} if cap is None else {"softcap": cap})).logits[0]
            return found

    return Models


def prompt(length: int, seed: int = 0) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(COMMON["vocab_size"]) for _ in range(length)]


@pytest.mark.parametrize(("family", "kind"), FORMATS)
def test_a_prompt_in_one_chunk_gives_transformers_logits(models, family, kind):
    tokens = prompt(50)
    (found,) = PagedWorld(models.decoder(family, kind), 1, 50, 16).step([(0, tokens)])
    assert_logits(found, models.logits(family, tokens))


@pytest.mark.parametrize(("family", "kind"), FORMATS)
def test_a_prompt_token_by_token_gives_transformers_logits(models, family, kind):
    tokens = prompt(40, seed=1)
    world = PagedWorld(models.decoder(family, kind), 1, 40, 8)
    found = torch.cat([world.step([(0, [token])])[0] for token in tokens])
    assert_logits(found, models.logits(family, tokens))


@pytest.mark.parametrize(("family", "kind"), FORMATS)
@pytest.mark.parametrize("block_size", [8, 16, 32, 64])
def test_ragged_chunks_of_several_sequences_give_transformers_logits(models, family, kind, block_size):
    """Sequences of different length, cut at random, a random few of them in each step."""
    chance = random.Random(block_size)
    prompts = [prompt(length, seed=length) for length in (70, 9, 33, 8, 1, 51)]
    world = PagedWorld(models.decoder(family, kind), len(prompts), 70, block_size)
    found: list[list[Tensor]] = [[] for _ in prompts]
    while unfinished := [row for row, tokens in enumerate(prompts) if world.computed[row] < len(tokens)]:
        chosen = chance.sample(unfinished, chance.randint(1, len(unfinished)))
        chunks = [(row, prompts[row][world.computed[row] :][: chance.choice([1, 1, 3, 12, 30])]) for row in chosen]
        chunks.sort(key=lambda chunk: len(chunk[1]) > 1)
        for (row, _), logits in zip(chunks, world.step(chunks), strict=True):
            found[row].append(logits)
    for tokens, logits in zip(prompts, found, strict=True):
        assert_logits(torch.cat(logits), models.logits(family, tokens))


@pytest.mark.parametrize(("family", "kind"), FORMATS)
def test_bfloat16_stays_near_transformers_float32(models, family, kind):
    tokens = prompt(50)
    right = models.logits(family, tokens)
    (found,) = PagedWorld(models.decoder(family, kind, torch.bfloat16), 1, 50, 16).step([(0, tokens)])
    assert found.dtype == torch.float32
    assert (found - right).norm() / right.norm() < 3e-2


def test_only_wanted_tokens_come_back(models):
    decoder, tokens = models.decoder("llama", "folder"), prompt(40)
    (whole,) = PagedWorld(decoder, 1, 40, 16).step([(0, tokens)])
    world = PagedWorld(decoder, 1, 40, 16)
    batch = replace(world.batch([(0, tokens)]), logits_indices=torch.tensor([0, 25]))
    hidden = decoder.forward(batch, world.storage)
    assert hidden.shape == (2, COMMON["hidden_size"])
    assert_logits(decoder.logits(hidden), whole[[0, 25]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_that_wants_nothing_still_writes_the_cache(models, dtype):
    decoder, tokens = models.decoder("gemma3", "folder", dtype), prompt(30)
    whole, silent = PagedWorld(decoder, 1, 30, 8), PagedWorld(decoder, 1, 30, 8)
    whole.step([(0, tokens[:29])])
    batch = replace(silent.batch([(0, tokens[:29])]), logits_indices=torch.empty(0, dtype=torch.int64))
    assert decoder.logits(decoder.forward(batch, silent.storage)).shape == (0, COMMON["vocab_size"])
    silent.computed[0] = 29
    torch.testing.assert_close(silent.step([(0, tokens[29:])]), whole.step([(0, tokens[29:])]), atol=0, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weight_bytes_count_every_matrix_once_and_a_packed_tied_table_twice(models, dtype):
    decoder = models.decoder("llama-tied", "folder", dtype)
    hidden, wide, keys = 48, 80, 16
    matrices = 3 * (hidden * (hidden + 2 * keys) + hidden * hidden + 3 * hidden * wide) + 97 * hidden
    packed = dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    assert decoder.weight_bytes == (matrices + (97 * hidden if packed else 0)) * dtype.itemsize


def test_gemma_norms_mean_the_same_from_both_formats(models):
    """GGUF stores 1 + w, transformers w; neither is shifted twice, and the head norms and post norms are of the kind too."""
    folder, gguf = models.decoder("gemma3", "folder"), models.decoder("gemma3", "gguf")
    for ours, theirs in zip(folder.layers, gguf.layers, strict=True):
        for norm in ("attention_post_norm", "feed_forward_post_norm"):
            torch.testing.assert_close(getattr(ours, norm).weight, getattr(theirs, norm).weight)
        torch.testing.assert_close(ours.attention.query_norm.weight, theirs.attention.query_norm.weight)
        torch.testing.assert_close(ours.attention.key_norm.weight, theirs.attention.key_norm.weight)
    torch.testing.assert_close(folder.norm.weight, gguf.norm.weight)
