"""Files and functions stay short enough to be read at once."""

from __future__ import annotations

from tests.tidy.sources import BENCHMARKS, PACKAGE, assert_none, functions_of, name_of, place_of, text_of

FILE_LINES_MAX = 400
FUNCTION_LINES_MAX = 50


def test_files_stay_short() -> None:
    counts = [(path, text_of(path).count("\n")) for path in [*PACKAGE, *BENCHMARKS]]
    assert_none(f"{name_of(path)} has {lines} lines" for path, lines in counts if lines > FILE_LINES_MAX)


def test_functions_stay_short() -> None:
    functions = [(path, function) for path in [*PACKAGE, *BENCHMARKS] for function in functions_of(path)]
    counts = [(path, function, (function.end_lineno or 0) - function.lineno + 1) for path, function in functions]
    assert all(lines > 0 for _, _, lines in counts)
    assert_none(
        f"{place_of(path, function)}: {function.name} has {lines} lines"
        for path, function, lines in counts
        if lines >= FUNCTION_LINES_MAX
    )
