"""Real files: the same greedy tokens as transformers computes from the same file, in float32."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from kveik.model.decoder import Decoder, load_decoder
from kveik.model.gguf import read_metadata
from kveik.model.weights import open_model
from kveik.text.gguf_vocabulary import tokenizer_from_gguf
from tests.bounds import assert_likeliest, assert_within, logits_bound
from tests.model.worlds import PagedWorld

PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "<|im_start|>user\nWhat is yeast?<|im_end|>\n<|im_start|>assistant\n",
    "Once upon a time, in a valley between two mountains, there lived an old brewer who",
    "1, 1, 2, 3, 5, 8, 13,",
)
NEW = 64


def oracle(path: Path) -> PreTrainedModel:
    """transformers' own reading of a GGUF file, by the parts that do not ask for accelerate."""
    config = load_gguf_checkpoint(str(path))["config"]
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.float32)
    tensors = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert set(missing) <= {"lm_head.weight"}
    assert not unexpected
    model.tie_weights()
    return model.eval()


def allowed(decoder: Decoder, right: Tensor) -> Tensor:
    spec = decoder.spec
    return logits_bound(right, spec.layers, max(spec.hidden, spec.intermediate))


@torch.inference_mode()
def assert_greedy(decoder: Decoder, model: PreTrainedModel, prompt: Sequence[int], found: Sequence[int]) -> None:
    """Behind the prompt and each of the found tokens transformers chooses the next, or as good a one: all in one pass."""
    right = model(torch.tensor([[*prompt, *found]])).logits[0, len(prompt) - 1 : -1]
    assert_likeliest(torch.tensor(found), right, allowed(decoder, right))


def greedy_together(decoder: Decoder, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """All prompts in one first step, then all decodes together."""
    world = PagedWorld(decoder, len(prompts), max(map(len, prompts)) + NEW, block_size=16)
    logits = world.step(list(enumerate(prompts)))
    found = [[int(rows[-1].argmax())] for rows in logits]
    for _ in range(NEW - 1):
        logits = world.step([(row, tokens[-1:]) for row, tokens in enumerate(found)])
        for tokens, rows in zip(found, logits, strict=True):
            tokens.append(int(rows[-1].argmax()))
    return found


def assert_same_greedy_tokens(path: Path, prompts: Sequence[str]) -> None:
    tokenizer = tokenizer_from_gguf(read_metadata(path))
    encoded = [tokenizer.encode(prompt) for prompt in prompts]
    decoder = load_decoder(open_model(path), torch.float32, "bf16")
    found = greedy_together(decoder, encoded)
    assert all(len(set(tokens)) > 5 for tokens in found)
    model = oracle(path)
    for prompt, tokens in zip(encoded, found, strict=True):
        assert_greedy(decoder, model, prompt, tokens)


@pytest.mark.model
def test_smollm2_says_what_transformers_says_from_the_same_file(catalogue_file):
    assert_same_greedy_tokens(catalogue_file("smollm2-135m"), PROMPTS)


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize("model", ["qwen2.5-coder-0.5b", "gemma-3-270m"])
def test_other_families_say_what_transformers_says_from_the_same_file(catalogue_file, model):
    assert_same_greedy_tokens(catalogue_file(model), PROMPTS[:2])


@pytest.mark.model
@pytest.mark.slow
@torch.inference_mode()
def test_gemma_beyond_its_window_gives_transformers_logits(catalogue_file):
    """A prompt longer than the window of 512, in ragged chunks, so that old blocks have gone."""
    path = catalogue_file("gemma-3-270m")
    tokens = torch.randint(300, 200_000, (700,), generator=torch.Generator().manual_seed(0)).tolist()
    decoder = load_decoder(open_model(path), torch.float32, "bf16")
    world = PagedWorld(decoder, 1, 700, block_size=16)
    cuts = [0, 300, 301, 650, 651, 700]
    found = torch.cat([world.step([(0, tokens[a:b])])[0] for a, b in pairwise(cuts)])
    right = oracle(path)(torch.tensor([tokens])).logits[0]
    assert_within(found, right, allowed(decoder, right))
    assert_likeliest(found.argmax(-1), right, allowed(decoder, right))
