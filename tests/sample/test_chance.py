import numpy as np
import pytest

from kveik.sample.chance import philox
from tests.sample.making import uniforms_of

# From the authors' Random123, examples/kat_vectors: counter, key, result.
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> np.ndarray:
    return np.array([[int(word, 16)] for word in text.split()], dtype=np.uint64)


@pytest.mark.parametrize("counter, key, result", KNOWN)
def test_philox_gives_its_authors_known_answers(counter, key, result):
    assert np.array_equal(philox(words(counter), words(key)), words(result))


def test_a_number_depends_on_its_own_place_alone():
    places = [(seed, choice, position) for seed in (0, 7, -1) for choice in (0, 3) for position in (0, 1, 500)]
    together = uniforms_of(places)
    assert [uniforms_of([place])[0] for place in places] == together.tolist()


def test_seed_choice_and_position_each_change_the_number():
    base = uniforms_of([(7, 1, 2)])[0]
    assert len({base, *uniforms_of([(8, 1, 2), (7, 2, 2), (7, 1, 3), (7, 2, 1), (1, 7, 2)]).tolist()}) == 6


def test_every_64_bit_seed_works_and_differs_from_the_others():
    seeds = [0, 1, -1, 2**32, 2**63 - 1, 2**63, 2**64 - 1, -(2**63), 2**64 - 2**32]
    numbers = uniforms_of([(seed, 0, 0) for seed in seeds])
    assert len(set(numbers.tolist())) == len(seeds)
    assert ((numbers >= 0) & (numbers < 1)).all()


@pytest.mark.parametrize("axis", [0, 1, 2], ids=["seed", "choice", "position"])
def test_numbers_along_every_axis_are_even_and_unrelated(axis):
    count, cells = 100_000, 100
    numbers = uniforms_of([tuple(place if at == axis else 5 for at in range(3)) for place in range(count)])
    seen = np.bincount((numbers * cells).astype(int), minlength=cells)
    # 99 degrees of freedom: mean 99, standard deviation 14.
    assert 57 < ((seen - count / cells) ** 2 / (count / cells)).sum() < 141
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 4 / np.sqrt(count)


def test_no_places_give_no_numbers():
    assert uniforms_of([]).shape == (0,)
