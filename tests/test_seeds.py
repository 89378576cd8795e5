"""A test over many seeds is one case, and a failure names its seed."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from tests.seeds import VARIABLE, over_seeds


@pytest.fixture(autouse=True)
def all_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)


def test_every_seed_runs_once_in_order() -> None:
    seen = list[tuple[str, int]]()

    @over_seeds(3)
    def one(word: str, seed: int) -> None:
        seen.append((word, seed))

    one(word="a")
    assert seen == [("a", 0), ("a", 1), ("a", 2)]
    assert list(inspect.signature(one).parameters) == ["word"]


@pytest.mark.parametrize("letter", ["a'b"])
def test_a_failure_names_its_seed_and_the_command_that_replays_it(letter: str, request: pytest.FixtureRequest) -> None:
    @over_seeds(5)
    def one(seed: int) -> None:
        assert seed < 3, "too large"

    with pytest.raises(AssertionError, match="seed 3 of 5 fails") as failure:
        one()
    assert "too large" in str(failure.value.__cause__)
    assert request.node.nodeid.replace("'", "'\"'\"'") in str(failure.value)
    assert re.search(rf"\b{VARIABLE}=3 \.venv/bin/pytest", str(failure.value))


@pytest.mark.parametrize("error", [ValueError("no"), pytest.fail.Exception("no")])
def test_whatever_a_seed_fails_with_is_a_failure(error: BaseException) -> None:
    @over_seeds(1)
    def one(seed: int) -> None:
        raise error

    with pytest.raises(AssertionError, match="seed 0 of 1") as failure:
        one()
    assert failure.value.__cause__ is error


def test_a_seed_that_is_asked_for_runs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[int]()
    monkeypatch.setenv(VARIABLE, "17")
    over_seeds(20)(lambda seed: seen.append(seed))()
    assert seen == [17]


def test_each_seed_has_its_own_folder_and_patches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Thing:
        value = 0

    @over_seeds(3)
    def one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
        assert not list(tmp_path.iterdir())
        assert Thing.value == 0
        (tmp_path / "file").touch()
        monkeypatch.setattr(Thing, "value", 1 + seed)

    one(tmp_path=tmp_path, monkeypatch=monkeypatch)
    assert Thing.value == 0
    assert len(list(tmp_path.glob("*/file"))) == 3


def test_a_test_without_a_seed_is_refused() -> None:
    with pytest.raises(AssertionError, match="takes no seed"):
        over_seeds(3)(lambda: None)
