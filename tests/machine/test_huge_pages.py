"""Weights move onto huge pages where the system has them, and stay what they are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kveik.machine.huge_pages import HUGE_PAGE, collapse_onto_huge_pages

SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def has_huge_pages() -> bool:
    return SETTING.is_file() and "[never]" not in SETTING.read_text(encoding="ascii")


def test_resident_memory_moves_and_keeps_its_content() -> None:
    weights = [torch.full((3 << 20,), number, dtype=torch.uint8) for number in range(16)]
    on_huge_pages = collapse_onto_huge_pages()
    assert all(bool((weight == number).all()) for number, weight in enumerate(weights))
    assert (on_huge_pages >= 8 * HUGE_PAGE) == has_huge_pages()


@pytest.mark.parametrize("missing", ["maps", "smaps_rollup"])
def test_a_system_that_does_not_tell_is_left_alone(tmp_path: Path, missing: str) -> None:
    for name in {"maps", "smaps_rollup"} - {missing}:
        (tmp_path / name).write_text("", encoding="ascii")
    assert collapse_onto_huge_pages(tmp_path) == 0
