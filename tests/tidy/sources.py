"""The project's own files, as the tidy tests see them."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = sorted((ROOT / "kveik").rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
BENCHMARKS = sorted((ROOT / "benchmarks").rglob("*.py"))

Function = ast.FunctionDef | ast.AsyncFunctionDef


def name_of(path: Path) -> str:
    """As shown in a test's id."""
    return str(path.relative_to(ROOT))


@functools.cache
def tree_of(path: Path) -> ast.Module:
    """Parsed once for all tests."""
    return ast.parse(path.read_text(encoding="utf-8"))


def functions_in(tree: ast.AST) -> list[Function]:
    """All of them, nested ones too."""
    return [node for node in ast.walk(tree) if isinstance(node, Function)]
