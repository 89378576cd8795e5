"""Links, pipes and other odd things in a store's folder or in its place: never waited for, never written through."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kveik.clock import StepClock
from kveik.errors import BadValue, Unreachable
from kveik.offload.stores.disk import DiskStore
from kveik.offload.stores.disk_folder import KV_FOLDER, check_folder
from kveik.offload.stores.disk_offline import Cleared, clear_folder, is_empty, store_at
from kveik.offload.stores.record import Refusal
from tests.offload.stores.records import FORMATS, pairs
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
@pytest.mark.parametrize("used", [False, True])
def test_a_file_that_is_not_plain_is_named_never_waited_for_and_cleared(
    tmp_path: Path, name: str, kind: str, used: bool
) -> None:
    if used:
        filled(tmp_path)
    (tmp_path / name).unlink(missing_ok=True)
    ODD[kind](tmp_path / name)
    for only_look in (False, True):
        with pytest.raises(BadValue, match=f"{tmp_path} cannot be used: {name} in it is not a plain file"):
            check_folder(tmp_path, only_look=only_look)
    store = DiskStore(tmp_path, FORMATS, 4 * MIB, StepClock())
    stored = store.put_many(pairs([20]))
    store.close()
    if name != "index.damaged":
        assert (stored, store.availability.reason) == ([Refusal.REFUSED], f"{name} in it is not a plain file")
    if name == "index" or (name == "lock" and used):
        with pytest.raises(Unreachable, match=name):
            store_at(tmp_path, StepClock())
    if name != "lock":
        clear_folder(tmp_path, StepClock())
        assert {file.name for file in tmp_path.iterdir()} <= {"lock"}


@pytest.mark.parametrize("name", ["index", "index.damaged", "lock", "records-0", "records-2", "records-7"])
def test_nothing_is_written_or_removed_through_a_link(tmp_path: Path, name: str) -> None:
    (tmp_path / "precious").write_text("precious")
    folder = tmp_path / KV_FOLDER
    filled(folder)
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(tmp_path / "precious")
    store = DiskStore(folder, FORMATS, 4 * MIB, StepClock())
    store.put_many(pairs(range(9)))
    store.close()
    if name != "lock":
        clear_folder(folder, StepClock())
    assert (tmp_path / "precious").read_text() == "precious"


@pytest.mark.parametrize("kind", ["a link", "a file"])
def test_what_stands_in_the_place_of_the_folder_is_refused_and_left(tmp_path: Path, kind: str) -> None:
    folder, precious = tmp_path / KV_FOLDER, tmp_path / "precious"
    precious.mkdir()
    (precious / "index").write_text("precious")
    folder.symlink_to(precious) if kind == "a link" else folder.write_text("precious")
    for only_look in (False, True):
        with pytest.raises(BadValue, match=f"--kv-disk: the folder {folder} cannot be used: it is {kind}, not a folder"):
            check_folder(folder, only_look=only_look)
    store = DiskStore(folder, FORMATS, 4 * MIB, StepClock())
    assert store.put_many(pairs([1])) == [Refusal.REFUSED]
    assert store.availability.reason == f"it is {kind}, not a folder"
    store.close()
    with pytest.raises(Unreachable, match=f"it is {kind}, not a folder"):
        clear_folder(folder, StepClock())
    assert [(file.name, file.read_text()) for file in precious.iterdir()] == [("index", "precious")]


@pytest.mark.parametrize("index", [b"x" * 1000, None], ids=["damaged", "missing"])
def test_everything_in_the_folder_is_cleared_but_the_lock(tmp_path: Path, index: bytes | None) -> None:
    filled(tmp_path)
    (tmp_path / "index").unlink() if index is None else (tmp_path / "index").write_bytes(index)
    (tmp_path / "records-2024").mkdir()
    (tmp_path / "records-2024" / "notes").write_text("x")
    taken = sum(file.lstat().st_blocks * 512 for file in tmp_path.iterdir() if file.name != "lock")
    assert clear_folder(tmp_path, StepClock()) == Cleared(None, taken)
    assert [file.name for file in tmp_path.iterdir()] == ["lock"]
    assert is_empty(tmp_path)
    assert clear_folder(tmp_path, StepClock()) == Cleared(0, 0)


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
        assert store.availability.reason
        clock.advance(400.0)
    (tmp_path / "index").rmdir() if kind == "folder" else (tmp_path / "index").unlink()
    assert store.put_many(pairs([20])) == [None]
    store.close()
