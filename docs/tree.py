"""Writes the tree of docs/ARCHITECTURE.md from the modules' own first sentences: `python docs/tree.py` (part of `make docs`).

With --check it writes nothing and ends with code 1 where the page and the tree differ.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "ARCHITECTURE.md"
START, END = "<!-- tree -->\n", "<!-- end of tree -->\n"

FLOORS = (
    "cli",
    "server",
    "measure",
    "engine",
    "schedule",
    "model",
    "sample",
    "offload",
    "device",
    "request",
    "cache",
    "text",
    "kernels",
    "observe",
    "machine",
)
"""From the top of the stairs to the ground; pyproject.toml has the contract."""


def sentence(path: Path) -> str:
    """The first line of a module's docstring: what it holds."""
    doc = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    assert doc, f"{path} has no docstring"
    return doc.partition("\n")[0]


def tree() -> str:
    """Every folder of the package from the top floor down, with every file in it, and the files beside them."""
    package = ROOT / "kveik"
    found = {path.parent.name for path in package.glob("*/__init__.py")}
    assert found == set(FLOORS), f"folders that the tree does not know, or that are gone: {found ^ set(FLOORS)}"
    parts = [folder(package / name) for name in FLOORS]
    ground = "".join(row(path) for path in sorted(package.glob("*.py")) if path.name != "__init__.py")
    return "".join(parts) + f"\n**kveik/**: what everybody may use.\n\n{ground}" + native_tree()


def native_tree() -> str:
    """The C++ sources, folder by folder, each with its own first line."""
    folders = sorted(path for path in (ROOT / "native").iterdir() if path.is_dir())
    return "".join(
        f"\n**native/{path.name}/**\n\n{''.join(native_row(file) for file in sorted(path.glob('*.[ch]*')))}" for path in folders
    )


def native_row(path: Path) -> str:
    """One source: the comment that it opens with, where it has one."""
    opening = path.read_text(encoding="utf-8").split("\n\n", 1)[0]
    lines = [line.removeprefix("//").strip() for line in opening.splitlines() if line.startswith("//")]
    said = " ".join(lines).partition(". ")[0].rstrip(".:")
    return f"- `{path.name}`{': ' + said if said else ''}\n"


def folder(path: Path) -> str:
    """One folder: its sentence, its files, what it ships beside Python, and the folders in it."""
    rows = "".join(row(file) for file in sorted(path.glob("*.py")) if file.name != "__init__.py")
    others = sorted(file for file in path.rglob("*") if file.is_file() and file.suffix not in (".py", ".pyc", ".so"))
    rows += "".join(f"- `{file.relative_to(path)}`\n" for file in others)
    inside = "".join(folder(inner.parent) for inner in sorted(path.glob("*/__init__.py")))
    return f"\n**{path.relative_to(ROOT)}/**: {sentence(path / '__init__.py')}\n\n{rows}{inside}"


def row(path: Path) -> str:
    """One file."""
    return f"- `{path.name}`: {sentence(path)}\n"


def page_with(tree_text: str) -> str:
    """The page with this tree in its place."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(START)
    _, end, after = rest.partition(END)
    assert end, f"{PAGE} has lost the marks of its tree"
    return before + START + tree_text + "\n" + END + after


if __name__ == "__main__":
    wanted = page_with(tree())
    if "--check" in sys.argv:
        sys.exit(wanted != PAGE.read_text(encoding="utf-8"))
    PAGE.write_text(wanted, encoding="utf-8")
