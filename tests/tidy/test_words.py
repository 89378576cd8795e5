"""Words that must not stand in the project's files, and marks that need a reason beside them."""

from __future__ import annotations

import ast
import itertools
import re
from pathlib import Path

from tests.tidy.sources import BENCHMARKS, PACKAGE, ROOT, TESTS, assert_none, name_of, nodes_of, place_of, text_of

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
    return list(enumerate(text_of(path).splitlines(), 1))


def found(path: Path, pattern: re.Pattern[str]) -> list[str]:
    return [f"{name_of(path)}:{number}: {line.strip()}" for number, line in lines_of(path) if pattern.search(line)]


# This file names what it forbids.
ELSEWHERE = [path for path in WRITTEN if path != Path(__file__)]


def test_no_path_of_one_machine_is_written_down() -> None:
    assert_none(line for path in ELSEWHERE for line in found(path, FOREIGN_PATH))


def test_unfinished_work_names_its_issue() -> None:
    assert_none(line for path in ELSEWHERE for line in found(path, UNFINISHED))


def test_a_muted_check_has_its_reason_beside_it() -> None:
    assert_none(
        f"{name_of(path)}:{number}"
        for path in ELSEWHERE
        if path.suffix == ".py"
        for number, line in lines_of(path)
        if (match := MUTED.search(line)) and len(match[1].strip("# \t:-–()")) < 10
    )


def test_no_file_or_class_has_an_empty_name() -> None:
    classes = [
        (place_of(path, node), node.name) for path in PACKAGE for node in nodes_of(path) if isinstance(node, ast.ClassDef)
    ]
    files = [(name_of(path), name) for path in PACKAGE for name in (path.stem, path.parent.name)]
    assert_none(f"{place}: {name}" for place, name in [*files, *classes] if EMPTY_NAMES.search(name))


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
MANY = re.compile(rf" (?:(?!needs |holds )\w+ )?(?:{'|'.join(COUNTED)})\b(?![/=])")
# Before a = such a word is the name of the next value: "records=%d bytes=%d".
MANY_LOGGED = re.compile(rf"%,?d(?:{MANY.pattern})")


def counts_of(path: Path) -> list[str]:
    """Numbers before a plural, which would be wrong for 1; what is in capitals is a bound of ours, and a fraction no count."""
    found = []
    for node in nodes_of(path):
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


def test_a_number_and_its_noun_agree() -> None:
    """What is found is written with kveik.words.counted."""
    assert_none(count for path in PACKAGE for count in counts_of(path))
