"""Files and functions stay short enough to be read at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tidy.sources import BENCHMARKS, PACKAGE, functions_in, name_of, tree_of

FILE_LINES_MAX = 400
FUNCTION_LINES_MAX = 50


@pytest.mark.parametrize("path", [*PACKAGE, *BENCHMARKS], ids=name_of)
def test_files_and_functions_stay_short(path: Path) -> None:
    assert path.read_text(encoding="utf-8").count("\n") <= FILE_LINES_MAX
    for function in functions_in(tree_of(path)):
        assert function.end_lineno is not None
        lines = function.end_lineno - function.lineno + 1
        assert lines < FUNCTION_LINES_MAX, f"{name_of(path)}:{function.lineno} {function.name} has {lines} lines"
