import numpy as np
import pytest
import torch

from kveik.sample.logprobs import FLOOR, prompt_logprobs
from tests.bounds import log_norm_bound


def test_prompt_logprobs_are_those_of_a_log_softmax():
    values = torch.randn(40, 900, generator=torch.Generator().manual_seed(1)) * 5
    right = torch.log_softmax(values.double(), -1).numpy()
    targets = np.random.default_rng(0).integers(0, 900, 40).tolist()
    entries = prompt_logprobs(values, targets, 3)
    allowed = log_norm_bound(values)[:, 0].tolist()
    for row, (entry, target) in enumerate(zip(entries, targets, strict=True)):
        likeliest = np.argsort(-right[row])[:3].tolist()
        assert entry.token == target
        assert entry.logprob == pytest.approx(right[row, target], abs=allowed[row], rel=0)
        assert [token for token, _ in entry.top] == likeliest
        assert [value for _, value in entry.top] == pytest.approx(right[row, likeliest], abs=allowed[row], rel=0)


def test_probabilities_of_the_ids_that_exist_sum_to_one():
    values = torch.zeros(1, 64)
    values[0, 10:] = 1e4
    entries = [prompt_logprobs(values, [token], 0, tokens_real=10)[0] for token in range(10)]
    assert sum(np.exp(entry.logprob) for entry in entries) == pytest.approx(
        1.0, abs=float(log_norm_bound(values[:, :10])), rel=0
    )
    assert prompt_logprobs(values, [63], 0, tokens_real=10)[0].logprob == FLOOR


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_prompt_logprobs_are_always_finite(poison):
    values = torch.zeros(3, 200)
    values[1, :] = poison
    values[2, 5] = -np.inf
    entries = prompt_logprobs(values, [1, 2, 5], 2)
    assert entries[0].logprob == pytest.approx(-np.log(200), abs=float(log_norm_bound(values[:1])), rel=0)
    assert [entry.logprob for entry in entries[1:]] == [FLOOR, FLOOR]
    assert entries[1].top == ()


def test_no_targets_give_no_entries():
    assert prompt_logprobs(torch.empty(0, 10), [], 2) == []
