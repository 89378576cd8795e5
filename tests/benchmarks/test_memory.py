"""The measurement of memory: its own arithmetic, and a burst under which the server keeps to its plan."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

from benchmarks.memory import PROMPT_TOKENS, SHARED_TOKENS, growth, measure, memory_table, picture, prompt

MIB = 1 << 20


def test_growth_is_what_comes_after_the_first_ten_minutes() -> None:
    assert growth([(0.0, 10), (599.0, 100), (605.0, 101), (700.0, 103)]) == pytest.approx(0.03)
    assert growth([(0.0, 10), (100.0, 100)]) is None


def test_half_of_the_prompts_share_their_beginning() -> None:
    chance = random.Random(0)
    prompts = [prompt(chance) for _ in range(200)]
    long = [one for one in prompts if len(one) > SHARED_TOKENS]
    shared = [one for one in long if one[:SHARED_TOKENS] == list(range(1000, 1000 + SHARED_TOKENS))]
    assert 0.3 < len(shared) / len(long) < 0.7
    assert PROMPT_TOKENS[0] <= min(map(len, prompts)) <= max(map(len, prompts)) <= PROMPT_TOKENS[1]


def test_the_table_tells_resident_against_planned() -> None:
    found = {"auto": {"planned": 800 * MIB, "samples": [(0.0, 400 * MIB), (5.0, 600 * MIB)], "answers": 7, "failures": 0}}
    assert memory_table(found).splitlines()[2] == "| auto | 800 MiB | 400 MiB | 600 MiB | 600 MiB | 75% | – | 7 |"


def test_the_picture_has_a_curve_for_every_way() -> None:
    samples = [(float(second), 100 + second) for second in range(0, 120, 5)]
    found = {way: {"planned": 1000, "samples": samples} for way in ("auto", "bf16")}
    assert picture(found).count("<polyline") == 2


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize("way", ["auto", "bf16"])
def test_resident_memory_stays_within_the_plan_in_a_burst(way: str) -> None:
    launch = [str(Path(sys.executable).with_name("kveik"))]
    found = measure("smollm2-135m", way, minutes=0.25, clients=12, every=0.5, launch=launch)
    assert found["answers"] > 0
    assert found["failures"] == 0
    assert max(size for _, size in found["samples"]) <= found["planned"]
