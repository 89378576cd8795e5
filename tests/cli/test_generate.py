"""How a long `kveik generate` tells that it is alive."""

from __future__ import annotations

import pytest

from kveik.cli.generate import Pace


def said_after(seconds: float, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """What is said when a step ends every tenth of a second and 1,000 prompts are never all answered."""
    now = 100.0
    pace = Pace(1000, lambda: now)
    for step in range(int(seconds * 10)):
        now = 100.0 + step / 10
        pace.show(min(step, 999))
    return capsys.readouterr().err.splitlines()


def test_a_short_generate_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert said_after(2.0, capsys) == []


def test_a_long_generate_says_how_far_it_is_and_seldom(capsys: pytest.CaptureFixture[str]) -> None:
    lines = said_after(600.0, capsys)
    assert lines[:2] == ["20 of 1000 prompts are answered after 2 s", "60 of 1000 prompts are answered after 6 s"]
    # 2, 4, 8, 16, 32 seconds, then one a minute.
    assert len(lines) == 5 + (600 - 62) // 60


def test_the_last_answer_is_told_by_the_summary_alone(capsys: pytest.CaptureFixture[str]) -> None:
    now = 0.0
    pace = Pace(3, lambda: now)
    now = 50.0
    pace.show(3)
    assert capsys.readouterr().err == ""
