"""What stands on which side of a plan's copies."""

from __future__ import annotations

from kveik.offload.transfer import Cancel, Delete, Load, Spill, around_copies


def load(job: int) -> Load:
    return Load(job, (), (), 0.0)


def test_loads_begin_after_the_copies_and_all_else_comes_before_them_in_order() -> None:
    spill, delete, cancel = Spill(b"a", 0, None, 0, 3), Delete(b"b", 0, 0), Cancel(1)
    assert around_copies([spill, load(2), delete, cancel, load(3)]) == ([spill, delete, cancel], [load(2), load(3)])


def test_a_load_that_was_called_off_by_the_same_plan_never_begins() -> None:
    assert around_copies([load(2), load(3), Cancel(2)]) == ([], [load(3)])
