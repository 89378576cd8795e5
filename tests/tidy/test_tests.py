"""Tests can fail, and say what they promise."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.tidy.sources import PACKAGE, ROOT, TESTS, Function, assert_none, functions_of, name_of, place_of, text_of

TEST_FILES = [path for path in TESTS if path.name.startswith("test_")]
JUDGES = re.compile(r"^(assert|check|expect|raises|fail|warns)")
"""Functions of these names fail a test by themselves."""

SENTENCE_WORDS = 4


def promises_in(path: Path) -> list[Function]:
    return [function for function in functions_of(path) if function.name.startswith("test_")]


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
    beside = [function for path in TESTS for function in functions_of(path) if not function.name.startswith("test_")]
    JUDGING |= {function.name for function in beside if can_fail(function, JUDGING)}


def test_every_test_can_fail() -> None:
    assert_none(
        f"{place_of(path, test)}: {test.name}"
        for path in TEST_FILES
        for test in promises_in(path)
        if not can_fail(test, JUDGING)
    )


def test_every_test_file_has_tests() -> None:
    assert_none(name_of(path) for path in TEST_FILES if not promises_in(path) and "TestCase" not in text_of(path))


def test_names_of_tests_are_sentences() -> None:
    assert_none(
        f"{place_of(path, test)}: {test.name}"
        for path in TEST_FILES
        for test in promises_in(path)
        if test.name.count("_") < SENTENCE_WORDS - 1
    )


def test_every_folder_of_tests_is_a_package() -> None:
    folders = sorted({path.parent for path in TESTS})
    assert_none(name_of(folder) for folder in folders if not (folder / "__init__.py").exists())


def test_every_folder_of_the_package_has_tests() -> None:
    folders = sorted({path.parent for path in PACKAGE} - {ROOT / "kveik"})
    mirrors = [ROOT / "tests" / folder.relative_to(ROOT / "kveik") for folder in folders]
    assert_none(name_of(mirror) for mirror in mirrors if not list(mirror.glob("test_*.py")))
