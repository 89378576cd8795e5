import dataclasses
import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kveik.sample.sampler import Sampler
from tests.bounds import log_norm_bound
from tests.sample import slow
from tests.sample.making import choose, logits, logs, sequence

EOS = frozenset({2, 5})
FOUR = logs([0.6, 0.3, 0.06, 0.04])
DRAWS = 10_000


def frequencies(row, draws=DRAWS, **sampling):
    """How often each token came, over that many seeds."""
    sampler = Sampler(len(row), len(row))
    choices = choose(sampler, logits(row, draws), [sequence(seed, seed=seed, **sampling) for seed in range(draws)])
    return np.bincount([choice.token for choice in choices], minlength=len(row))


def assert_drawn_from(seen, shares):
    """Chi-square with five standard deviations of room; what has no share never comes."""
    shares = np.asarray(shares, dtype=float)
    assert (seen[shares == 0] == 0).all(), "a token without a share was drawn"
    expected = seen.sum() * shares[shares > 0]
    degrees = len(expected) - 1
    distance = ((seen[shares > 0] - expected) ** 2 / expected).sum()
    assert distance <= degrees + 5 * np.sqrt(2 * degrees), "the shares are wrong"


@pytest.mark.parametrize(
    "sampling, shares",
    [
        ({}, [0.6, 0.3, 0.06, 0.04]),
        ({"min_p": 0.2}, [2 / 3, 1 / 3, 0, 0]),
        ({"min_p": 1.0}, [1, 0, 0, 0]),
        ({"top_p": 0.59}, [1, 0, 0, 0]),
        ({"top_p": 0.61}, [2 / 3, 1 / 3, 0, 0]),
        ({"top_p": 0.95}, [0.6 / 0.96, 0.3 / 0.96, 0.06 / 0.96, 0]),
        ({"top_p": 1.0}, [0.6, 0.3, 0.06, 0.04]),
        ({"top_p": 1e-300}, [1, 0, 0, 0]),
        ({"top_k": 0}, [0.6, 0.3, 0.06, 0.04]),
        ({"top_k": 1}, [1, 0, 0, 0]),
        ({"top_k": 3}, [0.6 / 0.96, 0.3 / 0.96, 0.06 / 0.96, 0]),
        ({"top_k": 1 << 30}, [0.6, 0.3, 0.06, 0.04]),
        # top_p looks at what top_k left: 0.6 of 0.9 is two thirds.
        ({"top_k": 2, "top_p": 0.66}, [1, 0, 0, 0]),
        ({"top_k": 2, "top_p": 0.67}, [2 / 3, 1 / 3, 0, 0]),
        # … and at what min_p left.
        ({"min_p": 0.2, "top_p": 0.66}, [1, 0, 0, 0]),
    ],
)
def test_filters_leave_the_right_tokens_at_the_right_shares(sampling, shares):
    assert_drawn_from(frequencies(FOUR, **sampling), shares)


def test_filters_look_at_the_probabilities_after_temperature():
    # At temperature 2 the four probabilities are as their square roots; min_p 0.3 then keeps the third, at ratio 0.316.
    roots = np.sqrt([0.6, 0.3, 0.06])
    assert_drawn_from(frequencies(FOUR, temperature=2.0, min_p=0.3), [*(roots / roots.sum()), 0])
    squares = np.square([0.6, 0.3, 0.06, 0.04])
    assert_drawn_from(frequencies(FOUR, temperature=0.5), squares / squares.sum())


def test_min_p_decides_exactly_at_its_border():
    # The float32 next to log(0.5) lies below it, and the one above lies above it.
    below = np.float32(np.log(0.5))
    above = np.nextafter(below, np.float32(0))
    assert np.exp(np.float64(below)) < 0.5 <= np.exp(np.float64(above))
    assert frequencies([0.0, below], draws=200, min_p=0.5)[1] == 0
    assert frequencies([0.0, above], draws=200, min_p=0.5)[1] > 0


def test_a_wide_vocabulary_is_drawn_from_evenly():
    real = 1000
    seen = frequencies(np.zeros(real), draws=20_000)
    assert_drawn_from(seen, np.full(real, 1 / real))


@pytest.mark.parametrize("sampling", [{"top_p": 0.9}, {"top_k": 500}, {"min_p": 0.02}])
def test_a_wide_distribution_is_filtered_as_by_hand(sampling):
    row = np.random.default_rng(0).normal(size=3000) * 1.5
    tokens, shares = slow.filtered(row.astype(np.float32).astype(np.float64), sequence(**sampling))
    expected = np.zeros(3000)
    expected[tokens] = shares
    assert_drawn_from(frequencies(row, draws=20_000, **sampling), expected)


@pytest.mark.parametrize("temperature", [1e-45, 1e-30, 1e-6, 1e-3])
def test_tiny_temperatures_are_as_good_as_greedy(temperature):
    row = np.array([3.0, 80.0, 79.0, -80.0])
    assert frequencies(row, draws=100, temperature=temperature)[1] == 100


PARAMETERS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.3, 1.0, 3.0]),
        "top_k": st.sampled_from([0, 0, 1, 3, 50, 5000]),
        "top_p": st.sampled_from([1.0, 1.0, 0.99, 0.83, 0.41, 0.013]),
        "min_p": st.sampled_from([0.0, 0.0, 0.001, 0.17, 0.7]),
        "repetition_penalty": st.sampled_from([1.0, 1.0, 1.3, 0.6]),
        "presence_penalty": st.sampled_from([0.0, 0.0, 1.7, -1.1]),
        "frequency_penalty": st.sampled_from([0.0, 0.0, 0.4, -0.3]),
        "min_tokens": st.sampled_from([0, 0, 3, 9]),
        "logit_bias": st.sampled_from([(), (), ((0, 5.0), (2, 3.0)), ((1, -100.0), (3, 100.0)), ((0, -100.0),)]),
        "stop_token_ids": st.sampled_from([(), (3,), (0, 1)]),
    }
)


ROWS = st.lists(st.tuples(PARAMETERS, st.integers(0, 12), st.integers(-(1 << 63), (1 << 64) - 1)), min_size=1, max_size=12)
SIZES = st.sampled_from([(8, 8), (200, 190), (1024, 1000), (6000, 5999)])
SPREADS = st.sampled_from([0.5, 3.0])


def assert_quick_is_slow(rows, sizes, spread, seed):
    vocab, real = sizes
    chance = np.random.default_rng(seed)
    values = (chance.normal(size=(len(rows), vocab)) * spread).astype(np.float32)
    values[:, real:] = 1e5
    sequences = [
        sequence(
            number,
            prompt=tuple(chance.integers(0, real, 6).tolist()),
            output=tuple(chance.integers(0, min(real, 9), count).tolist()),
            seed=own_seed,
            **parameters,
        )
        for number, (parameters, count, own_seed) in enumerate(rows)
    ]
    choices = choose(Sampler(vocab, real, EOS), torch.from_numpy(values.copy()), sequences)
    for row, (choice, asked) in enumerate(zip(choices, sequences, strict=True)):
        assert not choice.failed
        may_come = slow.choose(values[row], asked, real, EOS)
        assert choice.token in may_come, f"the slow sampler never chooses this with {asked.sampling}"


@settings(max_examples=150, deadline=None)
@given(ROWS, SIZES, SPREADS, st.integers(0, 1 << 30))
def test_the_quick_sampler_does_what_the_slow_one_does(rows, sizes, spread, seed):
    assert_quick_is_slow(rows, sizes, spread, seed)


@pytest.mark.slow
@settings(max_examples=5000, deadline=None)
@given(ROWS, SIZES, SPREADS, st.integers(0, 1 << 30))
def test_the_quick_sampler_does_what_the_slow_one_does_in_thousands_of_batches(rows, sizes, spread, seed):
    assert_quick_is_slow(rows, sizes, spread, seed)


def steps(sampler, table, sequences, count):
    """Let sequences grow; the logits of a step depend only on the sequence's last token and length."""
    for _ in range(count):
        rows = np.stack([table[(asked.tokens[-1] + asked.length) % len(table)] for asked in sequences])
        for asked, choice in zip(sequences, choose(sampler, torch.from_numpy(rows), sequences), strict=True):
            asked.tokens.append(choice.token)
    return [asked.output for asked in sequences]


def a_table(vocab=500, rows=40):
    return np.random.default_rng(3).normal(size=(rows, vocab)).astype(np.float32)


SEEDED = {"temperature": 0.8, "frequency_penalty": 0.2, "repetition_penalty": 1.1}


@pytest.mark.parametrize("filters", [{}, {"top_p": 0.9}, {"top_k": 40, "min_p": 0.01}, {"top_p": 0.9999}])
def test_a_seeded_sequence_does_not_depend_on_its_neighbours(filters):
    table = a_table()
    mine = SEEDED | filters

    def with_neighbours(*others, count=30):
        return steps(Sampler(500, 500), table, [*others, sequence(99, seed=42, **mine)], count)[-1]

    alone = with_neighbours()
    assert alone == with_neighbours(sequence(1, seed=5))
    assert alone == with_neighbours(sequence(1, seed=6, top_p=0.5), sequence(2, temperature=0.0), sequence(3, seed=42, **mine))
    assert alone == with_neighbours(*(sequence(number, seed=number, top_k=number) for number in range(40)))


def test_a_seeded_sequence_survives_preemption_and_being_forgotten():
    table = a_table()
    [straight] = steps(Sampler(500, 500), table, [sequence(1, seed=42, **SEEDED)], 30)
    sampler, asked = Sampler(500, 500), sequence(1, seed=42, **SEEDED)
    for _ in range(6):
        # Preemption keeps the tokens and nothing else; another sampler knows nothing of it.
        steps(sampler, table, [asked], 5)
        sampler.forget(1)
    assert asked.output == straight


@pytest.mark.parametrize("seed", [7, 0, -1, -(1 << 63), (1 << 64) - 1])
def test_choices_of_one_request_differ_and_repeat_exactly(seed):
    flat = np.zeros((1, 100), dtype=np.float32)

    def four(**sampling):
        return steps(
            Sampler(100, 100), flat, [sequence(number, seed=seed, choice=number, **sampling) for number in range(4)], 8
        )

    texts = four()
    assert len({tuple(text) for text in texts}) == 4
    assert texts == four()
    assert len({tuple(text) for text in four(temperature=0.0)}) == 1


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {}, {"top_p": 0.99}, {"top_k": 1020}, {"min_p": 1e-9}])
def test_padded_ids_are_never_sampled(sampling):
    vocab, real = 1024, 1000
    values = np.zeros((200, vocab), dtype=np.float32)
    values[:, real:] = 50.0
    choices = choose(
        Sampler(vocab, real), torch.from_numpy(values), [sequence(n, seed=n, logprobs=20, **sampling) for n in range(200)]
    )
    assert all(choice.token < real for choice in choices)
    assert all(token < real for choice in choices for token, _ in choice.logprob.top)


def test_a_tokenizer_may_know_more_ids_than_the_model_has_columns():
    asked = sequence(temperature=0.0, logit_bias=((8, 100.0), (9, 100.0)), stop_token_ids=(8,), min_tokens=1, prompt=(9,))
    [choice] = choose(Sampler(8, 10, frozenset({9})), logits(np.arange(8)), [asked])
    assert choice.token == 7


def test_a_bias_outside_the_vocabulary_touches_nobody():
    vocab, real = 1024, 1000
    values = np.random.default_rng(0).normal(size=(1, vocab)).astype(np.float32)
    wild = ((1000, 100.0), (1023, 100.0), (1024, 100.0), (191222, 100.0), (-1, 100.0))
    asked = [sequence(0), sequence(1, logit_bias=wild, seed=3), sequence(2)]
    choices = choose(Sampler(vocab, real), logits(values, 3), asked)
    plain = choose(Sampler(vocab, real), logits(values, 3), [sequence(0), sequence(1, seed=3), sequence(2)])
    assert choices == plain


def test_a_bias_of_minus_100_makes_a_token_impossible():
    row = np.zeros(1000)
    row[999] = 500.0
    seen = frequencies(row, draws=2000, logit_bias=((999, -100.0),))
    assert seen[999] == 0
    [choice] = choose(Sampler(1000, 1000), logits(row), [sequence(temperature=0.0, logit_bias=((999, -100.0),))])
    assert choice.token == 0


def test_a_bias_of_100_is_as_good_as_certain():
    assert frequencies(np.zeros(50), draws=500, logit_bias=((31, 100.0),))[31] == 500


def test_end_tokens_cannot_come_before_min_tokens():
    row = np.zeros(10)
    row[[2, 5, 7]] = 30.0, 29.0, 28.0
    sampler = Sampler(10, 10, EOS)
    asked = sequence(temperature=0.0, min_tokens=3, stop_token_ids=(7, 99), output=(1, 1))
    assert choose(sampler, logits(row), [asked])[0].token == 0
    asked.tokens.append(0)
    assert choose(sampler, logits(row), [asked])[0].token == 2
    ignoring = sequence(1, temperature=0.0, min_tokens=3, ignore_eos=True)
    assert choose(sampler, logits(row), [ignoring])[0].token == 7


@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize(
    "hidden", [{}, {"logit_bias": ((3, -100.0),)}, {"logit_bias": ((3, 1.0),)}, {"repetition_penalty": 2.0}]
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_not_finite_fails_alone(poison, hidden, temperature):
    values = np.random.default_rng(0).normal(size=(4, 300)).astype(np.float32)
    fine = choose(Sampler(300, 300), torch.from_numpy(values.copy()), [sequence(n, seed=n) for n in range(4)])
    values[1, 3] = poison
    asked = [sequence(n, seed=n) for n in range(4)]
    asked[1] = sequence(1, seed=1, prompt=(3,), logprobs=2, temperature=temperature, **hidden)
    choices = choose(Sampler(300, 300), torch.from_numpy(values), asked)
    assert choices[1].failed
    assert choices[1].logprob is None
    assert [choices[row] for row in (0, 2, 3)] == [fine[row] for row in (0, 2, 3)]


def test_a_row_with_nothing_possible_fails_alone():
    values = np.zeros((3, 4), dtype=np.float32)
    values[0] = -np.inf
    asked = [sequence(0, logprobs=1), sequence(1), sequence(2, logit_bias=tuple((token, -100.0) for token in range(4)))]
    assert [choice.failed for choice in choose(Sampler(4, 4), torch.from_numpy(values), asked)] == [True, False, True]


def test_some_impossible_tokens_are_no_failure():
    [choice] = choose(Sampler(3, 3), logits([-np.inf, 1.0, -np.inf]), [sequence(logprobs=3, top_p=0.5)])
    assert (choice.token, choice.failed) == (1, False)
    assert choice.logprob.top == ((1, 0.0), (0, -9999.0), (2, -9999.0))


def test_logprobs_are_of_the_model_before_anything_changed_them():
    row = np.random.default_rng(1).normal(size=700).astype(np.float32)
    right = torch.log_softmax(torch.from_numpy(row).double(), -1).numpy()
    allowed = float(log_norm_bound(logits(row)))
    asked = sequence(output=(4, 4, 9), temperature=0.3, top_k=1, frequency_penalty=1.0, logit_bias=((8, 100.0),), logprobs=5)
    [choice] = choose(Sampler(700, 700), logits(row), [asked])
    assert choice.token == 8
    assert choice.logprob.token == 8
    assert choice.logprob.logprob == pytest.approx(right[8], abs=allowed, rel=0)
    likeliest = np.argsort(-right)[:5].tolist()
    assert [token for token, _ in choice.logprob.top] == likeliest
    assert [value for _, value in choice.logprob.top] == pytest.approx(right[likeliest], abs=allowed, rel=0)


@pytest.mark.parametrize("count", [0, 1, 20])
def test_the_chosen_token_has_its_logprob_whether_or_not_it_is_among_the_likeliest(count):
    [choice] = choose(Sampler(4, 4), logits(FOUR), [sequence(logprobs=count, logit_bias=((3, 100.0),))])
    assert (choice.token, len(choice.logprob.top)) == (3, min(count, 4))
    assert choice.logprob.logprob == pytest.approx(np.log(0.04), abs=float(log_norm_bound(logits(FOUR))), rel=0)


def test_logprobs_are_strict_json_even_where_the_model_says_never():
    row = np.full(50, -3e38)
    row[[4, 7]] = 0.0, -np.inf
    asked = sequence(top_k=1, logprobs=5, logit_bias=((4, -100.0), (9, 100.0)))
    [choice] = choose(Sampler(50, 50), logits(row), [asked])
    assert choice.logprob.logprob == -9999.0
    assert choice.logprob is not None
    json.dumps(dataclasses.asdict(choice.logprob), allow_nan=False)


def test_rows_without_edits_keep_no_state_and_forgetting_drops_it():
    sampler = Sampler(100, 100)
    choose(sampler, logits(np.zeros(100), 3), [sequence(0), sequence(1, presence_penalty=1.0), sequence(2, top_p=0.5)])
    assert sampler.remembered == 1
    sampler.forget(1)
    sampler.forget(77)
    assert sampler.remembered == 0


def test_what_is_kept_is_bounded_and_rebuilt_when_it_fell_out(monkeypatch):
    monkeypatch.setattr("kveik.sample.edits.REMEMBERED", 4)
    table, plain = a_table(), Sampler(500, 500)
    asked = [sequence(number, seed=number, **SEEDED) for number in range(9)]
    grown = steps(plain, table, asked, 12)
    assert plain.remembered == 4
    monkeypatch.setattr("kveik.sample.edits.REMEMBERED", 100)
    assert grown == steps(Sampler(500, 500), table, [sequence(number, seed=number, **SEEDED) for number in range(9)], 12)


def test_penalties_keep_up_with_a_long_output_token_by_token():
    table, sampler = a_table(vocab=50), Sampler(50, 50)
    asked = sequence(prompt=(1, 2, 60), seed=4, **SEEDED)
    for _ in range(120):
        row = table[asked.length % len(table)]
        right = slow.choose(row, asked, 50, frozenset())
        [choice] = choose(sampler, logits(row), [asked])
        assert choice.token in right
        asked.tokens.append(choice.token)


def test_other_float_types_and_strides_are_read_alike():
    values = torch.randn(3, 400, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    asked = [sequence(number, seed=number, top_p=0.9) for number in range(3)]
    plain = choose(Sampler(400, 400), values.float(), asked)
    assert plain == choose(Sampler(400, 400), values, asked)
    assert plain == choose(Sampler(400, 400), values.T.contiguous().T, asked)


def test_logits_of_inference_mode_are_sampled_alike():
    values = torch.randn(6, 700, generator=torch.Generator().manual_seed(0))
    kinds = [{}, {"top_p": 0.9}, {"top_k": 5}, {"temperature": 0.0}, {"presence_penalty": 1.0}, {"logprobs": 3}]
    asked = [sequence(number, seed=number, **kind) for number, kind in enumerate(kinds)]
    plain = choose(Sampler(700, 700), values.clone(), asked)
    with torch.inference_mode():
        assert plain == choose(Sampler(700, 700), values.clone(), asked)


def test_an_empty_batch_has_no_choices():
    assert choose(Sampler(10, 10), torch.empty(0, 10), []) == []
