"""Tests can fail, and say what they promise."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.tidy.sources import PACKAGE, ROOT, TESTS, Function, functions_in, name_of, tree_of

TEST_FILES = [path for path in TESTS if path.name.startswith("test_")]
JUDGES = re.compile(r"^(assert|check|expect|raises|fail|warns)")
"""Functions of these names fail a test by themselves."""

SENTENCE_WORDS = 4


def promises_in(path: Path) -> list[Function]:
    return [function for function in functions_in(tree_of(path)) if function.name.startswith("test_")]


def called_names(node: ast.AST) -> set[str]:
    calls = [call.func for call in ast.walk(node) if isinstance(call, ast.Call)]
    return {f.attr if isinstance(f, ast.Attribute) else f.id for f in calls if isinstance(f, ast.Attribute | ast.Name)}


def can_fail(function: Function, judging: set[str]) -> bool:
    asserts = any(isinstance(node, ast.Assert | ast.Raise) for node in ast.walk(function))
    names = called_names(function)
    return asserts or any(JUDGES.match(name) for name in names) or bool(names & judging)


# Functions beside the tests that judge on their behalf; two rounds, since one may call the next.
JUDGING: set[str] = set()
for _ in range(2):
    beside = [function for path in TESTS for function in functions_in(tree_of(path)) if not function.name.startswith("test_")]
    JUDGING |= {function.name for function in beside if can_fail(function, JUDGING)}


@pytest.mark.parametrize("path", TEST_FILES, ids=name_of)
def test_every_test_can_fail(path: Path) -> None:
    assert [test.name for test in promises_in(path) if not can_fail(test, JUDGING)] == []


@pytest.mark.parametrize("path", TEST_FILES, ids=name_of)
def test_every_test_file_has_tests(path: Path) -> None:
    machines = "TestCase" in path.read_text(encoding="utf-8")
    assert promises_in(path) or machines


@pytest.mark.parametrize("path", TEST_FILES, ids=name_of)
def test_names_of_tests_are_sentences(path: Path) -> None:
    short = [test.name for test in promises_in(path) if test.name.count("_") < SENTENCE_WORDS - 1]
    assert short == []


@pytest.mark.parametrize("folder", sorted({path.parent for path in TESTS}), ids=name_of)
def test_every_folder_of_tests_is_a_package(folder: Path) -> None:
    assert (folder / "__init__.py").exists()


@pytest.mark.parametrize("folder", sorted({path.parent for path in PACKAGE} - {ROOT / "kveik"}), ids=name_of)
def test_every_folder_of_the_package_has_tests(folder: Path) -> None:
    mirror = ROOT / "tests" / folder.relative_to(ROOT / "kveik")
    assert list(mirror.glob("test_*.py"))
