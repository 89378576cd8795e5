"""Words that must not stand in the project's files, and marks that need a reason beside them."""

from __future__ import annotations

import ast
import itertools
import re
from pathlib import Path

import pytest

from tests.tidy.sources import BENCHMARKS, PACKAGE, ROOT, TESTS, name_of, tree_of

WRITTEN = [
    *PACKAGE,
    *TESTS,
    *BENCHMARKS,
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted(ROOT.glob("*.md")),
    *sorted(path for path in (ROOT / "kveik").rglob("*") if path.suffix in (".html", ".js", ".css")),
    *(ROOT / name for name in ("Makefile", "pyproject.toml", "constraints.txt")),
]

# Absolute folders of one machine or one person mean nothing to a reader elsewhere.
FOREIGN_PATH = re.compile(r"(?<![\w.$~}/-])/(?:work|tmp|root|home|opt|mnt|Users)/")
UNFINISHED = re.compile(r"(\b(TODO|FIXME)|#.*\bXXX)\b(?!\(#\d+\))")
CODES = r"(?:\[[\w, -]+\])?(?::\s*[A-Z]+\d+(?:,\s*[A-Z]+\d+)*)?"
MUTED = re.compile(rf"#\s*(?:type: ignore|noqa|pragma: no cover|nosec)\b{CODES}(.*)$")
EMPTY_NAMES = re.compile(r"^(?!(kv_?cache|offload)?_?manager$).*(Manager|Helper|Helpers|Utils?)$", re.IGNORECASE)
"""The two managers are the field's own names: they say what is managed."""


def lines_of(path: Path) -> list[tuple[int, str]]:
    return list(enumerate(path.read_text(encoding="utf-8").splitlines(), 1))


def found(path: Path, pattern: re.Pattern[str]) -> list[str]:
    return [f"{name_of(path)}:{number}: {line.strip()}" for number, line in lines_of(path) if pattern.search(line)]


@pytest.mark.parametrize("path", WRITTEN, ids=name_of)
def test_no_path_of_one_machine_is_written_down(path: Path) -> None:
    # This file names them in order to forbid them.
    assert path == Path(__file__) or found(path, FOREIGN_PATH) == []


@pytest.mark.parametrize("path", WRITTEN, ids=name_of)
def test_unfinished_work_names_its_issue(path: Path) -> None:
    assert path == Path(__file__) or found(path, UNFINISHED) == []


@pytest.mark.parametrize("path", [*PACKAGE, *TESTS, *BENCHMARKS], ids=name_of)
def test_a_muted_check_has_its_reason_beside_it(path: Path) -> None:
    muted = [(number, MUTED.search(line)) for number, line in lines_of(path) if path != Path(__file__)]
    bare = [f"{name_of(path)}:{number}" for number, match in muted if match and len(match[1].strip("# \t:-–()")) < 10]
    assert bare == []


@pytest.mark.parametrize("path", PACKAGE, ids=name_of)
def test_no_file_or_class_has_an_empty_name(path: Path) -> None:
    names = [path.stem, path.parent.name, *(node.name for node in ast.walk(tree_of(path)) if isinstance(node, ast.ClassDef))]
    assert [name for name in names if EMPTY_NAMES.search(name)] == []


def test_the_patterns_find_what_they_should() -> None:
    assert FOREIGN_PATH.search("see " + "/tmp" + "/x")
    assert not FOREIGN_PATH.search("https://host/home/x and $HOME/work/x")
    assert UNFINISHED.search("# TODO later")
    assert not UNFINISHED.search('("XXX", 4)')
    assert not UNFINISHED.search("# TODO(#12) later")
    match = MUTED.search("x = 1  # type: ignore[attr-defined]  # functions have it")
    assert match
    assert match[1].strip("# ") == "functions have it"
    bare = MUTED.search("x = 1  # noqa: RUF012")
    assert bare
    assert bare[1] == ""


COUNTED = (
    *(
        "tokens",
        "blocks",
        "bytes",
        "records",
        "sequences",
        "requests",
        "calls",
        "answers",
        "prompts",
        "layers",
        "heads",
        "rows",
    ),
    *("tensors", "wheels", "strings", "entries", "characters", "choices", "types", "dimensions", "inputs", "parts", "failures"),
    *("rows", "merges", "faults", "threads", "files", "groups", "rates", "windows"),
)
MANY = re.compile(rf" (?:(?!needs |holds )\w+ )?(?:{'|'.join(COUNTED)})\b(?!/)")
MANY_LOGGED = re.compile(rf"%,?d(?:{MANY.pattern})")


def counts_of(path: Path) -> list[str]:
    """Numbers before a plural, which would be wrong for 1; what is in capitals is a bound of ours, and a fraction no count."""
    found = []
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and MANY_LOGGED.search(node.value):
            found.append(node.value)
        for shown, behind in itertools.pairwise(node.values) if isinstance(node, ast.JoinedStr) else ():
            if (
                not isinstance(shown, ast.FormattedValue)
                or not isinstance(behind, ast.Constant)
                or not MANY.match(behind.value)
            ):
                continue
            value, form = ast.unparse(shown.value), ast.unparse(shown.format_spec) if shown.format_spec else ""
            if not re.fullmatch(r"(len\()?[A-Z_]+\b.*|(words\.)?counted\(.*", value) and not form.endswith(("f'", "g'")):
                found.append(f"{path.name}:{shown.lineno}: {{{value}}}{behind.value}")
    return found


@pytest.mark.parametrize("path", PACKAGE, ids=name_of)
def test_a_number_and_its_noun_agree(path: Path) -> None:
    assert counts_of(path) == [], "kveik.words.counted"
