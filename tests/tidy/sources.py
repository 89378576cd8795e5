"""The project's own files, as the tidy tests see them."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = sorted((ROOT / "kveik").rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
BENCHMARKS = sorted((ROOT / "benchmarks").rglob("*.py"))

Function = ast.FunctionDef | ast.AsyncFunctionDef


def name_of(path: Path) -> str:
    """As shown in a complaint."""
    return str(path.relative_to(ROOT))


def place_of(path: Path, node: ast.AST) -> str:
    """Where a complaint sends its reader."""
    return f"{name_of(path)}:{getattr(node, 'lineno', 1)}"


@functools.cache
def text_of(path: Path) -> str:
    """Read once for all tests."""
    return path.read_text(encoding="utf-8")


@functools.cache
def tree_of(path: Path) -> ast.Module:
    """Parsed once for all tests."""
    return ast.parse(text_of(path))


@functools.cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    """Walked once for all tests."""
    return tuple(ast.walk(tree_of(path)))


@functools.cache
def functions_of(path: Path) -> tuple[Function, ...]:
    """All of them, nested ones too."""
    return tuple(node for node in nodes_of(path) if isinstance(node, Function))


def assert_none(complaints: Iterable[str]) -> None:
    """Fails with all of them, one a line."""
    found = list(complaints)
    assert not found, "\n".join(["", *found])
