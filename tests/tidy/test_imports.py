"""Imports stand at the top of a file, where the import contracts can see them."""

from __future__ import annotations

import ast

from tests.tidy.sources import PACKAGE, assert_none, functions_of, nodes_of, place_of


def test_no_import_hides_in_a_function() -> None:
    assert_none(
        f"{place_of(path, node)}: in {function.name}"
        for path in PACKAGE
        for function in functions_of(path)
        for node in ast.walk(function)
        if isinstance(node, ast.Import | ast.ImportFrom)
    )


def test_no_import_hides_behind_type_checking() -> None:
    assert_none(
        place_of(path, node)
        for path in PACKAGE
        for node in nodes_of(path)
        if isinstance(node, ast.Name) and node.id == "TYPE_CHECKING"
    )
