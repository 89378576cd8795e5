"""Imports stand at the top of a file, where the import contracts can see them."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.tidy.sources import PACKAGE, functions_in, name_of, tree_of


@pytest.mark.parametrize("path", PACKAGE, ids=name_of)
def test_no_import_hides_in_a_function(path: Path) -> None:
    hidden = [
        f"{name_of(path)}:{node.lineno}"
        for function in functions_in(tree_of(path))
        for node in ast.walk(function)
        if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    assert hidden == []


@pytest.mark.parametrize("path", PACKAGE, ids=name_of)
def test_no_import_hides_behind_type_checking(path: Path) -> None:
    names = {node.id for node in ast.walk(tree_of(path)) if isinstance(node, ast.Name)}
    assert "TYPE_CHECKING" not in names
