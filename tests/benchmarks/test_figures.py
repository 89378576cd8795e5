"""Ratios between engines, and the tables and pictures made of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks.facts import environment, sentence
from benchmarks.pages import keep, publish, read, short, write_section
from benchmarks.pages import table as markdown
from benchmarks.peers.figures import ASKED, hopeless, ratio_to_best
from benchmarks.peers.picture import picture
from benchmarks.peers.tables import missed, model_table
from benchmarks.peers.workload import COLUMNS

MODEL = "smollm2-135m"


def measured(ours: float) -> dict[str, Any]:
    """Every column: we are `ours` times as fast as b, and b is the best peer."""
    rates = {"kveik": [ours * 100, ours * 110, ours * 90], "a": [60.0], "b": [100.0, 110.0, 90.0]}
    engines = {name: {"version": "1", "weights": "w", "ready_seconds": 2.0} for name in rates}
    return {"engines": engines, "columns": dict.fromkeys(COLUMNS, rates)}


def test_the_ratio_is_of_figures_taken_one_after_the_other() -> None:
    # The machine became half as fast after the first round, for both.
    ratio = ratio_to_best({"kveik": [300.0, 150.0, 156.0], "peer": [150.0, 75.0, 75.0]})
    assert ratio is not None
    assert (ratio.best, ratio.median, ratio.low) == ("peer", 2.0, 2.0)
    assert ratio.high == pytest.approx(2.08)


def test_the_best_peer_is_the_one_with_the_highest_median() -> None:
    ratio = ratio_to_best({"kveik": [10.0] * 3, "steady": [5.0] * 3, "lucky": [9.0, 1.0, 1.0]})
    assert ratio is not None
    assert (ratio.best, ratio.median) == ("steady", 2.0)


def test_a_peer_that_fell_out_is_compared_over_its_rounds() -> None:
    ratio = ratio_to_best({"kveik": [10.0, 20.0, 30.0], "peer": [10.0, 10.0]})
    assert ratio is not None
    assert (ratio.low, ratio.high) == (1.0, 2.0)


@pytest.mark.parametrize("rates", [{}, {"kveik": [1.0]}, {"peer": [1.0]}, {"kveik": [1.0], "peer": []}])
def test_without_two_engines_there_is_no_ratio(rates: dict[str, list[float]]) -> None:
    assert ratio_to_best(rates) is None


def test_only_peers_far_behind_are_not_measured_again() -> None:
    assert hopeless({"kveik": [1.0], "a": [100.0], "b": [71.0], "c": [69.0]}) == {"c"}
    assert hopeless({}) == set()


def test_what_is_asked_for_has_every_column() -> None:
    assert all(tuple(columns) == COLUMNS for columns in ASKED.values())
    assert ASKED["smollm2-135m"]["decode_1"] == 1.2
    assert ASKED["qwen2.5-coder-1.5b"]["prefill_512"] == 1.5
    assert ASKED["qwen2.5-coder-0.5b"]["prefill_512"] == 3.0


def test_the_table_has_engines_ratios_and_what_is_asked_for() -> None:
    lines = model_table(MODEL, measured(2.0)).splitlines()
    assert len({line.count("|") for line in lines}) == 1
    assert lines[0].startswith("| smollm2-135m | prefill 512 | batch 1 | batch 8 ")
    assert "| 200 (180–220) |" in lines[2]
    assert "| 60.0 |" in lines[3]
    assert lines[5].count("**2.00** (2.00–2.00) × b") == 5
    assert lines[6].startswith("| asked for | 2 | 1.2 |")


def test_what_is_missed_is_told_column_by_column() -> None:
    assert missed(MODEL, measured(3.0)) == []
    assert missed(MODEL, measured(1.9)) == [
        "smollm2-135m, prefill 512: 1.90 of the 2 asked for, against b",
        "smollm2-135m, batch 32: 1.90 of the 2.2 asked for, against b",
    ]
    assert missed("another", measured(0.1)) == []


def test_the_picture_has_a_bar_for_every_column_of_every_model() -> None:
    drawn = ElementTree.fromstring(picture({MODEL: measured(2.0), "a<b": measured(0.5)}))
    bars = drawn.findall("{http://www.w3.org/2000/svg}rect")
    assert [bar.get("class") for bar in bars] == ["won", "won", "won", "won", "lost"] + ["lost"] * 5
    widths = [float(bar.get("width") or 0) for bar in bars]
    assert widths[0] == pytest.approx(4 * widths[5], rel=0.01)


def test_figures_are_kept_beside_those_of_other_models(tmp_path: Path) -> None:
    keep(tmp_path, "peers", {"a": {"x": 1}, "b": {"x": 2}})
    keep(tmp_path, "load", {"a": {"y": 3}})
    keep(tmp_path, "peers", {"b": {"x": 4}})
    assert read(tmp_path) == {"peers": {"a": {"x": 1}, "b": {"x": 4}}, "load": {"a": {"y": 3}}}


def test_a_section_of_a_page_is_replaced_and_nothing_else(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- figures: a -->\nold\n<!-- end of figures: a -->\nafter\n", encoding="utf-8")
    for text in ("new", "newer\n"):
        write_section(page, "a", text)
        start, end = "<!-- figures: a -->", "<!-- end of figures: a -->"
        assert page.read_text(encoding="utf-8") == f"before\n{start}\n{text.strip()}\n{end}\nafter\n"
    with pytest.raises(ValueError, match="no section for the figures 'b'"):
        write_section(page, "b", "new")


def test_what_is_published_is_printed_kept_and_written_as_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, facts = tmp_path / "page.md", environment()
    page.write_text("<!-- figures: a -->\n<!-- end of figures: a -->\n", encoding="utf-8")
    for folder in (None, tmp_path):
        publish("| a table |", facts, folder, name="a", figures={"x": 1}, page=page.name)
        assert capsys.readouterr().out == f"| a table |\n\n{sentence(facts)}\n"
        assert (read(tmp_path) == {}) == (folder is None)
    assert read(tmp_path) == {"a": {"x": 1, "environment": facts}}
    assert f"\n| a table |\n\n<sub>{sentence(facts)}</sub>\n" in page.read_text(encoding="utf-8")


def test_tables_and_numbers_are_written_for_readers() -> None:
    assert markdown([["a", "b"], ["c", "1"]]) == "| a | b |\n| --- | ---: |\n| c | 1 |"
    assert [short(value) for value in (1234.5, 99.94, 5.25)] == ["1,234", "99.9", "5.2"]
