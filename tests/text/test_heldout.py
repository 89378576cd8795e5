"""Texts that every Python has, and files: the same each time, and refused with a reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from kveik.errors import BadValue, Unreachable
from kveik.text import heldout
from kveik.text.heldout import heldout_text


def test_english_is_prose_and_long_enough_for_any_usual_measurement() -> None:
    text = heldout_text("english")
    assert len(text.text) > 300_000
    assert "pydoc_data.topics" in text.origin
    assert text.text.count(" the ") > 2000


def test_code_is_python_s_own_and_longer_still() -> None:
    text = heldout_text("code")
    assert len(text.text) > 700_000
    assert "class ArgumentParser" in text.text
    assert text.text == heldout_text("code").text


def test_a_file_is_read_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("Gjær på ring\n", encoding="utf-8")
    text = heldout_text(str(path))
    assert (text.name, text.text) == ("notes.txt", "Gjær på ring\n")


@pytest.mark.parametrize("cut", [0, 1, 2, 3])
def test_of_a_long_file_the_beginning_is_read_to_the_last_whole_character(
    cut: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heldout, "FILE_BYTES", 8 + cut)
    path = tmp_path / "long.txt"
    path.write_text("\N{BEER MUG}" * 9, encoding="utf-8")
    assert heldout_text(str(path)).text == "\N{BEER MUG}" * 2


@pytest.mark.parametrize(
    ("content", "error", "words"),
    [
        (None, Unreachable, "cannot be read: No such file or directory. --text is the path of a file, or 'english', or 'code'"),
        (b" \n\t", BadValue, "is empty"),
        (b"caf\xe9 au lait", BadValue, "is not text in UTF-8: invalid continuation byte at byte 3"),
        (b"cut off \xf0\x9f", BadValue, "is not text in UTF-8: unexpected end of data at byte 8"),
        (b"GGUF\x03\x00\x00", BadValue, "is not text in UTF-8: it has a byte 0 at 5"),
    ],
    ids=["no file", "blank", "latin-1", "half a character", "binary"],
)
def test_what_is_no_text_is_refused(content: bytes | None, error: type[Exception], words: str, tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(error, match=r"text\.txt") as refused:
        heldout_text(str(path))
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("path", "words"), [("/", "The text / cannot be read: Is a directory"), ("/nope", "The text /nope cannot")]
)
def test_a_path_that_is_no_file_is_named_in_full(path: str, words: str) -> None:
    with pytest.raises(Unreachable, match=words):
        heldout_text(path)


def test_a_python_without_its_sources_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heldout, "CODE", ("no_such_module.py",))
    with pytest.raises(Unreachable, match="--text FILE"):
        heldout_text("code")
