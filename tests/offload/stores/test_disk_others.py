"""A store's folder in which others have put something too: files with names like its own, and links."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from kveik.clock import StepClock
from kveik.errors import Unreachable
from kveik.offload.stores.disk import DiskStore
from kveik.offload.stores.disk_clear import clear_folder
from kveik.offload.stores.disk_left import is_cleared, store_at
from tests.offload.stores.records import FORMATS, format_of, pairs, payloads, read
from tests.offload.stores.test_disk import MIB, scanned


def filled(folder: Path) -> None:
    store = DiskStore(folder, FORMATS, 4 * MIB, StepClock())
    for group in range(3):
        assert store.put_many(pairs(range(9), group)) == [None] * 9
    store.close()


def linked(file: Path, elsewhere: Path) -> Path:
    """As somebody does who has another disk; where the file lies now."""
    shutil.move(file, elsewhere)
    file.symlink_to(elsewhere)
    return elsewhere


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    filled(tmp_path / "kv")
    return tmp_path / "kv"


@pytest.fixture
def precious(tmp_path: Path) -> Path:
    (tmp_path / "precious").write_text("precious")
    return tmp_path / "precious"


def names(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


@pytest.mark.parametrize("index", ["sound", "damaged", "missing"])
def test_a_name_with_a_number_is_not_enough_to_be_removed(folder: Path, precious: Path, index: str) -> None:
    shutil.copy(folder / "records-0", folder / "records-3")
    (folder / "records-4").touch()
    for name in ("records-2024", "records-00"):
        (folder / name).write_text("of a shop")
    (folder / "records-9").symlink_to(precious)
    if index == "damaged":
        (folder / "index").write_bytes(random.Random(1).randbytes(40_000))
    if index == "missing":
        (folder / "index").unlink()
    theirs = ["records-00", "records-2024", "records-9"]
    cleared = clear_folder(folder, StepClock())
    assert (cleared.records, list(cleared.others)) == (27 if index == "sound" else None, theirs)
    assert names(folder) == ["lock", *theirs]
    assert [(folder / name).read_text() for name in theirs] == ["of a shop", "of a shop", "precious"]
    assert is_cleared(folder)
    assert clear_folder(folder, StepClock()).others == cleared.others


def test_a_server_that_starts_leaves_them_too_and_removes_slots_of_groups_now_gone(folder: Path, precious: Path) -> None:
    (folder / "records-2024").write_text("of a shop")
    (folder / "records-9").symlink_to(precious)
    DiskStore(folder, [format_of(0)], 4 * MIB, StepClock()).close()
    assert names(folder) == ["index", "lock", "records-0", "records-2024", "records-9"]
    assert [(folder / name).read_text() for name in ("records-2024", "records-9")] == ["of a shop", "precious"]


@pytest.mark.parametrize("index", ["sound", "missing"])
def test_slots_on_another_disk_are_counted_read_and_emptied_there(folder: Path, tmp_path: Path, index: str) -> None:
    before = scanned(folder)
    elsewhere = [linked(folder / f"records-{group}", tmp_path / f"moved-{group}") for group in (0, 1)]
    looked = store_at(folder, StepClock(), read_only=True)
    assert looked.bytes_used == before
    assert read(looked, range(9), 1) == payloads(range(9), 1)
    looked.close()
    store = DiskStore(folder, FORMATS, 4 * MIB, StepClock())
    assert store.put_many(pairs(range(9, 20), 1)) == [None] * 11
    assert store.bytes_used == scanned(folder) > before
    store.close()
    if index == "missing":
        (folder / "index").unlink()
    taken = scanned(folder) - 4096
    cleared = clear_folder(folder, StepClock())
    assert (cleared.records, cleared.bytes, cleared.others) == (38 if index == "sound" else None, taken, ())
    assert [file.stat().st_size for file in elsewhere] == [0, 0]
    assert names(folder) == ["lock"]


def test_an_index_on_another_disk_is_emptied_there(folder: Path, tmp_path: Path) -> None:
    elsewhere = linked(folder / "index", tmp_path / "moved")
    assert clear_folder(folder, StepClock()).records == 27
    assert elsewhere.read_bytes() == b""
    assert names(folder) == ["lock"]


def test_a_disk_that_is_away_is_not_called_cleared(folder: Path, tmp_path: Path) -> None:
    linked(folder / "records-0", tmp_path / "moved").rename(tmp_path / "away")
    cleared = clear_folder(folder, StepClock())
    assert (cleared.records, cleared.others) == (None, ("records-0",))
    assert names(folder) == ["lock", "records-0"]


@pytest.mark.parametrize("name", ["records-0", "records-2", "lock"])
def test_nothing_is_written_through_a_link_to_a_file_of_others(folder: Path, precious: Path, name: str) -> None:
    (folder / name).unlink()
    (folder / name).symlink_to(precious)
    with pytest.raises(Unreachable, match=f"{name} .* is a link to a file that no kveik server has written"):
        DiskStore(folder, FORMATS, 4 * MIB, StepClock())
    if name == "lock":
        with pytest.raises(Unreachable, match=r"lock .* is a link"):
            clear_folder(folder, StepClock())
    else:
        assert (cleared := clear_folder(folder, StepClock())).others == (name,)
        assert cleared.records is None
    assert precious.read_text() == "precious"
