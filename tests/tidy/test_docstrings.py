"""What is public says what it is for.

Modules, functions and classes always; methods when they are long, unless a class of the same project documents the method that
they implement. Plain shapes, classes of nothing but fields, may let their names speak.
"""

from __future__ import annotations

import ast
from pathlib import Path

from tests.tidy.sources import PACKAGE, Function, assert_none, place_of, tree_of

OBVIOUS_LINES = 12
"""A method this short may be told by its name."""


def public(body: list[ast.stmt]) -> list[Function]:
    return [node for node in body if isinstance(node, Function) and not node.name.startswith("_")]


def classes_of(path: Path) -> list[ast.ClassDef]:
    return [node for node in tree_of(path).body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]


def plain_shape(node: ast.ClassDef) -> bool:
    return all(isinstance(part, ast.AnnAssign | ast.Assign | ast.Expr | ast.Pass) for part in node.body)


PUBLIC_CLASSES = [class_ for path in PACKAGE for class_ in classes_of(path)]
DOCUMENTED = {method.name for class_ in PUBLIC_CLASSES for method in public(class_.body) if ast.get_docstring(method)}


def test_every_module_says_what_it_holds() -> None:
    assert_none(place_of(path, tree_of(path)) for path in PACKAGE if not ast.get_docstring(tree_of(path)))


def test_every_public_function_has_a_docstring() -> None:
    assert_none(
        f"{place_of(path, node)}: {node.name}"
        for path in PACKAGE
        for node in public(tree_of(path).body)
        if not ast.get_docstring(node)
    )


def test_every_public_class_has_a_docstring() -> None:
    assert_none(
        f"{place_of(path, node)}: {node.name}"
        for path in PACKAGE
        for node in classes_of(path)
        if not ast.get_docstring(node) and not plain_shape(node)
    )


def test_every_long_public_method_has_a_docstring() -> None:
    assert_none(
        f"{place_of(path, method)}: {class_.name}.{method.name}"
        for path in PACKAGE
        for class_ in classes_of(path)
        for method in public(class_.body)
        if not ast.get_docstring(method) and method.name not in DOCUMENTED
        if (method.end_lineno or 0) - method.lineno + 1 > OBVIOUS_LINES
    )


QUESTIONS = ("What", "Which", "Whether", "Who", "How", "Of", "So", "As", "All", "Whose", "Where", "When")


def test_a_module_begins_with_what_is_in_it() -> None:
    opening = ((path, (ast.get_docstring(tree_of(path)) or "x").split()[0]) for path in PACKAGE)
    assert_none(f"{path}: begins with {word}" for path, word in opening if word in QUESTIONS)


def test_no_file_name_stands_twice() -> None:
    names = [path.name for path in PACKAGE if path.name != "__init__.py"]
    assert_none(name for name in sorted(set(names)) if names.count(name) > 1)
