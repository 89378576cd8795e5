"""Models by what the user called them, and how a pull looks where there is no terminal."""

from __future__ import annotations

from pathlib import Path

import pytest

from kveik.cli.download import PullDisplay
from kveik.cli.fetch import fetch_model
from kveik.errors import Unreachable
from kveik.model.catalogue import PullProgress


def test_a_file_of_one_s_own_is_taken_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "mine.gguf"
    file.write_bytes(b"GGUF")
    assert fetch_model(str(file)) == file


def test_an_unknown_name_is_told_with_what_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Unreachable) as refused:
        fetch_model("qwen2.5-coder-0.6b")
    assert "Did you mean qwen2.5-coder-0.5b?" in refused.value.message
    assert "smollm2-135m" in refused.value.message


@pytest.mark.parametrize(
    "name",
    [
        *("./nosuch.gguf", "../nosuch", "/nosuch", "~/nosuch", "~nobody-here/model", "folder/nosuch.gguf", "a--b/c", "a/b/c"),
        *("org/name..", "-org/name", "org/name.git", "x" * 5000),
    ],
)
def test_a_path_that_is_not_there_is_never_asked_of_the_hub(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("kveik.cli.download.pull_hub", lambda *_, **__: pytest.fail("the hub was asked"))
    with pytest.raises(Unreachable, match=r"^There is no model '"):
        fetch_model(name)


def test_without_a_terminal_a_pull_says_a_line_for_every_quarter(capsys: pytest.CaptureFixture[str]) -> None:
    with PullDisplay("yeast") as display:
        for done in range(0, 101, 5):
            display.show(PullProgress("downloading", done * 10**6, 100 * 10**6))
        display.show(PullProgress("joining", 1, 100))
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "yeast: downloading, 0 of 100 MB",
        "yeast: downloading, 25 of 100 MB",
        "yeast: downloading, 50 of 100 MB",
        "yeast: downloading, 75 of 100 MB",
        "yeast: downloading, 100 of 100 MB",
        "yeast: joining and checking, 0 of 0 MB",
    ]
