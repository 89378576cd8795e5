"""The commands as a user runs them: a replay as a table or one object per seed, and what is in a disk's folder."""

from __future__ import annotations

import errno
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kveik.cli.main import run
from kveik.clock import SystemClock
from kveik.offload.availability import AVAILABLE
from kveik.offload.stores.disk import DiskStore
from kveik.offload.stores.disk_folder import KV_FOLDER
from kveik.offload.stores.disk_index import DiskIndex
from kveik.offload.stores.record import Encoding, RecordFormat, RecordKey
from tests.offload.stores.mounts import remount, small_disk_at

TRACE = str(Path(__file__).parents[1] / "traces" / "synthetic_700.jsonl.gz")


def test_a_replay_prints_hits_and_speed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["cache", "replay", TRACE, "--blocks", "1000", "--policy", "lru"]) == 0
    shown = capsys.readouterr()
    assert "700 requests" in shown.err
    assert "hit ratio" in shown.out
    assert "0.0106" in shown.out
    assert "block touches per second" in shown.out


def test_hazard_is_run_with_several_seeds(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["cache", "replay", TRACE, "--blocks", "1000", "--seeds", "2", "--below", "2000", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(rows) == 2
    assert all(row["hit_ratio"] > row["hit_ratio_pool"] > 0 for row in rows)
    assert all(row["writes"] > 0 and row["lessons"] > 0 for row in rows)


@pytest.mark.parametrize(
    ("arguments", "message"), [([TRACE], "--blocks"), (["nowhere.jsonl", "--blocks", "3"], "cannot be read")]
)
def test_what_cannot_be_replayed_is_told(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert run(["cache", "replay", *arguments]) in (1, 2)
    assert message in capsys.readouterr().err


def test_a_trace_made_from_a_log_as_the_page_says_is_replayed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "CACHE.md").read_text(encoding="utf-8")
    program = page.partition("```python\nimport hashlib, json, sys\n")[2].partition("```")[0]
    turns = [list(range(1300)), list(range(1300, 1310)), list(range(2600))]
    log = "".join(json.dumps({"time": 60 * n, "tokens": tokens, "output": 9}) + "\n" for n, tokens in enumerate(turns))
    command = [sys.executable, "-c", f"import hashlib, json, sys\n{program}"]
    made = subprocess.run(command, input=log, capture_output=True, text=True, check=True, timeout=60).stdout
    trace = tmp_path / "trace.jsonl"
    trace.write_text(made)
    assert run(["cache", "replay", str(trace), "--blocks", "100", "--policy", "lru", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    # 3 + 1 + 6 blocks; of the last prompt the two whole ones of the first are found, and not its rest.
    assert (found["requests"], found["blocks"], found["hit_ratio"]) == (3, 10, 0.2)


def a_store(folder: Path) -> DiskStore:
    form = RecordFormat(b"f" * 32, 0, 16, Encoding.RAW, 100)
    store = DiskStore(folder / KV_FOLDER, [form], 1 << 24, SystemClock())
    for number in range(5):
        key = RecordKey(0, bytes([number]) * 32)
        record = bytearray(form.record_bytes)
        form.seal(memoryview(record), key.block)
        assert store.put_many([(key, memoryview(record))]) == [None]
    return store


def test_a_disks_folder_is_listed_verified_and_cleared(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    a_store(tmp_path).close()
    assert run(["cache", "ls", str(tmp_path)]) == 0
    assert "layer group 0: 5 records" in capsys.readouterr().out
    assert run(["cache", "verify", str(tmp_path)]) == 0
    assert "5 of 5 records are sound" in capsys.readouterr().out
    slots = tmp_path / KV_FOLDER / "records-0"
    content = bytearray(slots.read_bytes())
    content[200] ^= 1
    slots.write_bytes(content)
    assert run(["cache", "verify", str(tmp_path), "--forget"]) == 1
    shown = capsys.readouterr().out
    assert "4 of 5 records are sound, 1 damaged" in shown
    assert "1 removed" in shown
    assert run(["cache", "verify", str(tmp_path)]) == 0
    assert "removed" not in capsys.readouterr().out
    assert run(["cache", "ls", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith("layer group 0: 4 records")
    taken = sum(file.stat().st_blocks * 512 for file in (tmp_path / KV_FOLDER).iterdir() if file.name != "lock")
    assert run(["cache", "clear", str(tmp_path)]) == 0
    assert f"4 records removed, {taken:,} bytes freed" in capsys.readouterr().out
    for command in ("ls", "verify", "clear"):
        assert run(["cache", command, str(tmp_path)]) == 0
        assert capsys.readouterr().out.startswith("0 records")
    assert [file.name for file in (tmp_path / KV_FOLDER).iterdir()] == ["lock"]


def test_a_folder_in_use_or_without_a_store_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    store = a_store(tmp_path / "used")
    for folder in ("used", "nothing"):
        assert run(["cache", "clear", str(tmp_path / folder)]) != 0
        assert "folder" in capsys.readouterr().err
    store.close()


@pytest.mark.parametrize("command", ["ls", "verify"])
def test_a_damaged_index_is_called_damaged_and_left_as_it_is(
    command: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    a_store(tmp_path).close()
    noise = random.Random(1).randbytes(40_000)
    (tmp_path / KV_FOLDER / "index").write_bytes(noise)
    records = (tmp_path / KV_FOLDER / "records-0").read_bytes()
    assert run(["cache", command, str(tmp_path)]) == 1
    shown = capsys.readouterr().err
    assert "index" in shown
    assert "is damaged" in shown
    assert (tmp_path / KV_FOLDER / "index").read_bytes() == noise
    assert (tmp_path / KV_FOLDER / "records-0").read_bytes() == records


def test_a_folder_of_another_version_is_told_by_whoever_reads_it_and_left_as_it_is(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    a_store(tmp_path).close()
    index = tmp_path / KV_FOLDER / "index"
    index.write_bytes(index.read_bytes().replace(b"kveik index 1", b"kveik index 3"))
    before = {file.name: file.read_bytes() for file in (tmp_path / KV_FOLDER).iterdir()}
    for command in (["ls"], ["verify"], ["verify", "--forget"]):
        assert run(["cache", *command, str(tmp_path)]) != 0
        told = capsys.readouterr().err.replace("\n", " ")
        assert "another version" in told
        assert "kveik cache clear" in told
    assert {file.name: file.read_bytes() for file in (tmp_path / KV_FOLDER).iterdir()} == before


UNREADABLE = {
    "of a later version": b"kveik index 3\n\0\0\1",
    "of noise": random.Random(1).randbytes(40_000),
    "with a damaged description": b"kveik index 1\n\0\0\1\0\0\0aaaax",
    "that is missing": None,
}


@pytest.mark.parametrize("head", UNREADABLE.values(), ids=list(UNREADABLE))
def test_a_folder_with_an_index_that_cannot_be_read_is_emptied_and_nothing_beside_it(
    head: bytes | None, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    a_store(tmp_path).close()
    folder = tmp_path / KV_FOLDER
    (folder / "index").unlink()
    if head is not None:
        (folder / "index").write_bytes(head)
    for name in ("index.damaged", "index.new"):
        (folder / name).write_bytes(bytes(5000))
    (folder / "records-7").write_bytes((folder / "records-0").read_bytes())
    for name in ("index", "lock", "records-0", "notes.txt"):
        (tmp_path / name).write_text("mine")
    taken = sum(file.stat().st_blocks * 512 for file in folder.iterdir() if file.name != "lock")
    assert run(["cache", "clear", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{taken:,} bytes freed; the records in them could not be counted\n"
    assert [file.name for file in folder.iterdir()] == ["lock"]
    assert [(tmp_path / name).read_text() for name in ("index", "lock", "records-0", "notes.txt")] == ["mine"] * 4
    store = a_store(tmp_path)
    assert (store.records, store.availability) == (5, AVAILABLE)
    store.close()


def test_a_folder_in_use_is_not_cleared(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    store = a_store(tmp_path)
    assert run(["cache", "clear", str(tmp_path)]) == 1
    told = capsys.readouterr().err.replace("\n", " ")
    assert f"in use by another kveik (process {os.getpid()}), which must be stopped first" in told
    assert store.records == 5
    assert all(store.probe_many([key for key, _ in store.contents()], 0.0))
    assert {file.name for file in (tmp_path / KV_FOLDER).iterdir()} == {"index", "lock", "records-0"}
    store.close()


LOOKING = (["ls"], ["verify"], ["verify", "--forget"])


def refusal(command: list[str], folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    assert run(["cache", *command, str(folder)]) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    return shown.err


@pytest.mark.parametrize("command", [*LOOKING, ["clear"]], ids=" ".join)
def test_a_path_where_no_store_can_be_is_named_with_the_cause(
    command: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "index").write_text("mine")
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / KV_FOLDER).symlink_to(tmp_path / "theirs")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / KV_FOLDER).write_text("mine")
    for name in ("nowhere", "file", "file/in", "theirs"):
        assert f"kveik: There is no folder {tmp_path}/{name}/{KV_FOLDER}: no server" in refusal(
            command, tmp_path / name, capsys
        )
    for name, kind in (("linked", "link"), ("taken", "file")):
        cause = f"kveik: The folder {tmp_path}/{name}/{KV_FOLDER} cannot be read: it is a {kind}, not a folder."
        assert cause in refusal(command, tmp_path / name, capsys)
    assert (tmp_path / "theirs" / "index").read_text() == (tmp_path / "taken" / KV_FOLDER).read_text() == "mine"


@pytest.mark.parametrize("command", LOOKING, ids=" ".join)
def test_a_folder_without_records_is_named_with_the_cause(
    command: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    a_store(tmp_path).close()
    folder = tmp_path / KV_FOLDER
    (folder / "index").unlink()
    told = refusal(command, tmp_path, capsys)
    assert f"The folder {folder} has no index" in told
    assert "kveik cache clear" in told
    DiskIndex(folder / "index", 1 << 20).close()
    assert "holds no cached blocks yet" in refusal(command, tmp_path, capsys)


@pytest.mark.parametrize("command", [*LOOKING, ["clear"]], ids=" ".join)
def test_the_folder_of_a_running_server_is_told_with_what_to_do_instead(
    command: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    store = a_store(tmp_path)
    told = refusal(command, tmp_path, capsys)
    store.close()
    for words in (str(tmp_path), f"process {os.getpid()}", "must be stopped first", "/cache/stats", "POST /cache/reset"):
        assert words in told
    assert "its own" not in told


@pytest.mark.parametrize("command", [*LOOKING, ["clear"]], ids=" ".join)
def test_a_folder_that_cannot_be_read_is_told_with_the_reason(
    command: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: Path) -> Iterator[Path]:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    a_store(tmp_path).close()
    # Whoever runs the tests may be allowed everything.
    monkeypatch.setattr(Path, "iterdir", refuse)
    assert f"The folder {tmp_path / KV_FOLDER} cannot be read: Permission denied." in refusal(command, tmp_path, capsys)


@pytest.mark.parametrize("command", [*LOOKING, ["clear"]], ids=" ".join)
def test_a_folder_that_can_be_listed_and_not_entered_is_told_with_the_reason(
    command: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_store(tmp_path).close()
    stat = Path.stat

    def refuse(self: Path, *, follow_symlinks: bool = True) -> os.stat_result:
        if self.parent == tmp_path / KV_FOLDER:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return stat(self, follow_symlinks=follow_symlinks)

    monkeypatch.setattr(Path, "stat", refuse)
    assert f"The folder {tmp_path / KV_FOLDER} cannot be read: Permission denied." in refusal(command, tmp_path, capsys)


def test_clearing_what_is_empty_makes_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / KV_FOLDER).mkdir()
    assert run(["cache", "clear", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "0 records removed, 0 bytes freed\n"
    assert list((tmp_path / KV_FOLDER).iterdir()) == []


def test_a_folder_that_cannot_be_written_is_told_with_the_reason(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with small_disk_at(tmp_path / "kv", "17m") as folder:
        a_store(folder).close()
        remount(folder, "ro")
        assert run(["cache", "clear", str(folder)]) == 1
        assert "Read-only file system" in capsys.readouterr().err.replace("\n", " ")
        assert run(["cache", "verify", str(folder)]) == 0


@pytest.mark.parametrize("command", [["ls"], ["verify"], ["verify", "--forget"]])
def test_a_folder_whose_records_cannot_be_read_is_not_called_sound(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, command: list[str]
) -> None:
    a_store(tmp_path).close()
    (tmp_path / KV_FOLDER / "records-0").unlink()
    (tmp_path / KV_FOLDER / "records-0").mkdir()
    assert run(["cache", *command, str(tmp_path)]) == 1
    shown = capsys.readouterr()
    assert "sound" not in shown.out
    assert "records-0" in shown.err


def test_slots_that_are_gone_are_told_and_not_made(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    a_store(tmp_path).close()
    (tmp_path / KV_FOLDER / "records-0").unlink()
    for command in (["ls"], ["verify"], ["verify", "--forget"]):
        assert run(["cache", *command, str(tmp_path)]) == 1
        assert "the file records-0 is missing" in capsys.readouterr().err
    assert not (tmp_path / KV_FOLDER / "records-0").exists()


@pytest.mark.parametrize("command", [*LOOKING, ["clear"]], ids=" ".join)
def test_a_path_that_names_no_folder_is_refused_and_not_taken_for_the_one_at_hand(
    command: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_store(tmp_path).close()
    monkeypatch.chdir(tmp_path)
    for path, cause in (("", "it is empty; it must be a path"), ("~nobody-of-that-name/kv", "there is no such user")):
        assert run(["cache", *command, path]) == 2
        shown = capsys.readouterr()
        assert (shown.out, cause in shown.err) == ("", True)
    assert (tmp_path / KV_FOLDER / "index").exists()
    assert run(["cache", "ls", "."]) == 0
