"""Folders with things in them that no store has made: nothing is waited for, nothing of others touched."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kveik.clock import StepClock
from kveik.errors import KveikError, Unreachable
from kveik.offload.stores.disk import DiskStore
from kveik.offload.stores.disk_check import check_folder
from kveik.offload.stores.disk_clear import clear_folder
from kveik.offload.stores.disk_left import store_at
from tests.offload.stores.records import FORMATS, pairs, payloads, read
from tests.offload.stores.test_disk import MIB


def a_socket(file: Path) -> None:
    # Its address may have 107 bytes, and the folders of tests are deep.
    before = Path.cwd()
    os.chdir(file.parent)
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(file.name)
    os.chdir(before)


ODD: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "socket": a_socket,
    "folder": Path.mkdir,
    "leads nowhere": lambda file: file.symlink_to(file.parent / "nowhere"),
    "in circles": lambda file: file.symlink_to(file),
    "device": lambda file: file.symlink_to("/dev/zero"),
}


@pytest.fixture(autouse=True)
def impatience() -> Iterator[None]:
    """Whoever waits for the other end of a pipe waits for ever."""
    signal.alarm(20)
    yield
    signal.alarm(0)


def filled(folder: Path) -> None:
    store = DiskStore(folder, FORMATS, 4 * MIB, StepClock())
    assert store.put_many(pairs(range(9))) == [None] * 9
    store.close()


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("name", ["index", "lock", "records-0", "index.damaged"])
@pytest.mark.parametrize("ours", [False, True])
def test_what_is_no_plain_file_is_named_and_never_waited_for(tmp_path: Path, name: str, kind: str, ours: bool) -> None:
    if ours:
        filled(tmp_path)
    (tmp_path / name).unlink(missing_ok=True)
    ODD[kind](tmp_path / name)
    with pytest.raises(Unreachable, match=name) as refused:
        DiskStore(tmp_path, FORMATS, 4 * MIB, StepClock())
    assert kind in refused.value.message or "no kveik server has written" in refused.value.message
    for only_look in (False, True):
        with pytest.raises(KveikError, match=name):
            check_folder(tmp_path, only_look=only_look)
    for act in (lambda: store_at(tmp_path, StepClock()), lambda: clear_folder(tmp_path, StepClock())):
        try:
            act()
        except Unreachable as error:
            assert error.message
    assert (tmp_path / name).is_symlink() or (tmp_path / name).exists() or ours


@pytest.mark.parametrize("kind", ODD)
def test_what_comes_into_a_running_store_is_trouble_until_it_is_gone(tmp_path: Path, kind: str) -> None:
    clock, store = StepClock(), DiskStore(tmp_path, FORMATS, 4 * MIB, StepClock())
    store.close()
    store = DiskStore(tmp_path, FORMATS, 4 * MIB, clock)
    store.put_many(pairs(range(9)))
    (tmp_path / "index").unlink()
    ODD[kind](tmp_path / "index")
    for _ in range(3):
        assert store.put_many(pairs([20])) != [None]
        assert store.trouble is not None
        clock.advance(400.0)
    (tmp_path / "index").rmdir() if kind == "folder" else (tmp_path / "index").unlink()
    assert store.put_many(pairs([20])) == [None]
    store.close()


@pytest.mark.parametrize("name", ["foo", "records-9"])
def test_a_link_that_leads_nowhere_is_in_nobodys_way(tmp_path: Path, name: str) -> None:
    filled(tmp_path)
    (tmp_path / name).symlink_to(tmp_path / "nowhere")
    found = store_at(tmp_path, StepClock(), read_only=True)
    assert read(found, range(9)) == payloads(range(9))
    found.close()
    cleared = clear_folder(tmp_path, StepClock())
    assert (cleared.records, cleared.others) == (9, (name,))
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted(["lock", name])


@pytest.mark.parametrize("first", [0, 3])
def test_a_folder_is_ours_by_its_records_where_index_and_lock_are_no_help(tmp_path: Path, first: int) -> None:
    """`first`: so many slots at the beginning are holes."""
    store = DiskStore(tmp_path, FORMATS, 4 * MIB, StepClock())
    store.put_many(pairs(range(9)))
    store.delete_many([key for key, _ in list(store.contents())[:first]])
    store.give_back()
    store.close()
    (tmp_path / "lock").unlink()
    (tmp_path / "index").write_bytes(b"x" * 1000)
    store = DiskStore(tmp_path, FORMATS, 4 * MIB, StepClock())
    assert (store.records, store.trouble) == (0, None)
    assert (tmp_path / "index.damaged").read_bytes() == b"x" * 1000
    assert store.put_many(pairs([1])) == [None]
    store.close()
    (tmp_path / "lock").unlink()
    (tmp_path / "index").unlink()
    assert clear_folder(tmp_path, StepClock()).others == ()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["lock"]


LMDB = bytes(16) + b"\xde\xc0\xef\xbe" + bytes(8172)


@pytest.mark.parametrize("content", [b"precious" * 1000, LMDB], ids=["anything", "lmdb"])
def test_a_folder_is_not_ours_for_a_name_and_a_number(tmp_path: Path, content: bytes) -> None:
    """Other programs have locks with their process in it, and files of LMDB."""
    files = {"index": content, "records-0": b"precious" * 1000}
    if content != LMDB:
        files["lock"] = b"123\n"
    for name, text in files.items():
        (tmp_path / name).write_bytes(text)
    with pytest.raises(Unreachable, match="no kveik server has written"):
        DiskStore(tmp_path, FORMATS, 4 * MIB, StepClock())
    with pytest.raises(Unreachable, match="no kveik server has written"):
        clear_folder(tmp_path, StepClock())
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == files


def test_a_former_folder_is_still_ours(tmp_path: Path) -> None:
    """Whose lock was not signed, whether anything else is left in it or not."""
    (tmp_path / "lock").write_bytes(b"123\n")
    DiskStore(tmp_path, FORMATS, 4 * MIB, StepClock()).close()
    filled(tmp_path)
    (tmp_path / "lock").write_bytes(b"123\n")
    store = DiskStore(tmp_path, FORMATS, 4 * MIB, StepClock())
    assert store.records == 9
    store.close()
    (tmp_path / "lock").write_bytes(b"123\n")
    (tmp_path / "index").write_bytes(LMDB)
    store = DiskStore(tmp_path, FORMATS, 4 * MIB, StepClock())
    assert (store.records, store.trouble) == (0, None)
    store.close()
