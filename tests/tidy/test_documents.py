"""Pages that are made from the source are as the source says, and pages that are written name what is there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.tidy.sources import ROOT, assert_none, name_of, text_of

PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_the_configuration_page_is_what_the_settings_say() -> None:
    command = [sys.executable, ROOT / "docs" / "configuration.py"]
    page = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60, encoding="utf-8").stdout
    assert (ROOT / "docs" / "CONFIGURATION.md").read_text(encoding="utf-8") == page, "run: make docs"


def test_the_architecture_page_names_every_folder_and_file() -> None:
    page = (ROOT / "docs" / "ARCHITECTURE.md").read_text(encoding="utf-8")
    for path in sorted((ROOT / "kveik").rglob("*.py")):
        name = f"**{path.parent.relative_to(ROOT)}/**" if path.name == "__init__.py" else f"- `{path.name}`: "
        assert path.parent == ROOT / "kveik" or name in page, name_of(path)


def test_the_tree_of_the_architecture_page_is_the_tree() -> None:
    done = subprocess.run([sys.executable, ROOT / "docs" / "tree.py", "--check"], check=False, timeout=60)
    assert done.returncode == 0, "run: make docs"


def missing_from(page: Path) -> list[str]:
    text = text_of(page)
    folders = "|".join(sorted(path.name for path in (ROOT / "kveik").iterdir() if path.is_dir() and path.name != "__pycache__"))
    named = set(re.findall(rf"`((?:kveik/)?(?:{folders})/[\w/]+\.\w+)`", text))
    missing = [name for name in named if not (ROOT / "kveik" / name.removeprefix("kveik/")).exists()]
    linked = [link for link in re.findall(r"\]\((?!https?:|#)([^)#]+)", text) if not (page.parent / link).exists()]
    return [f"{name_of(page)}: {name}" for name in missing + linked]


def test_files_that_pages_name_exist() -> None:
    assert_none(name for page in PAGES for name in missing_from(page))


def test_the_glossary_has_twenty_terms_at_most_and_is_found() -> None:
    rows = re.findall(r"^\| ([^|]+) \| [^|]+ \|$", text_of(ROOT / "docs" / "GLOSSARY.md"), re.MULTILINE)
    terms = [row for row in rows if row not in ("term", "---")]
    assert 10 <= len(terms) <= 20, terms
    assert "](docs/GLOSSARY.md)" in text_of(ROOT / "README.md")
    assert "](GLOSSARY.md)" in text_of(ROOT / "docs" / "ARCHITECTURE.md")


def test_the_licence_is_the_one_that_the_package_names() -> None:
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in text
    assert "Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text
    assert 'license = "Apache-2.0"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def test_every_package_that_is_needed_is_pinned() -> None:
    wanted = re.findall(
        r'^    "([\w.-]+)(?:\[[\w,]+\])?>=', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE
    )
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {pin.partition("==")[0].lower().replace("_", "-") for pin in pins if "==" in pin}
    assert len(wanted) > 20
    assert [name for name in wanted if name.lower().replace("_", "-") not in pinned] == []
