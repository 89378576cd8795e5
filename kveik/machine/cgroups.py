"""Control groups of this process, in both versions, as far as the container shows them.

    /proc/self/cgroup       0::/user.slice/job        which group, per hierarchy
    /proc/self/mountinfo    … /sys/fs/cgroup - cgroup2 …    where the hierarchy is mounted, and which part of it

A limit may be set on the group or on any group above it, so that readers get the whole chain, the group itself first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath


@dataclass(frozen=True, slots=True)
class Group:
    """One folder of a chain."""

    folder: Path
    version: int
    """1 or 2"""

    name: str
    """Path from the mount point on, for messages: / or /job."""

    def read(self, file: str) -> str | None:
        """Returns a file's text without the newline, or None where it is absent or not readable."""
        return read_text(self.folder / file)

    def read_number(self, file: str) -> int | None:
        """Returns a file's number, or None for `max` and where there is none."""
        return to_number(self.read(file))

    def stat(self, file: str, key: str) -> int | None:
        """Returns the number of one line in a file of `key number` lines."""
        for line in (self.read(file) or "").splitlines():
            name, _, value = line.partition(" ")
            if name == key:
                return to_number(value)
        return None


@dataclass(frozen=True, slots=True)
class _Mount:
    """A mounted hierarchy, or the part of one that a container sees."""

    version: int
    controllers: frozenset[str]
    top: PurePosixPath
    """Part of the hierarchy that is mounted"""

    point: PurePosixPath
    """Mount point"""


def groups(root: Path, controller: str) -> list[Group]:
    """Returns the chains of groups that may limit this process by `controller` (cpu, memory), each from the group upwards.

    root: the file system's root, / or a copy of it.
    """
    memberships = _memberships(root)
    found: list[Group] = []
    for mount in _mounts(root):
        if mount.version == 1 and controller not in mount.controllers:
            continue
        key = controller if mount.version == 1 else ""
        found += _chain(root, mount, memberships.get(key, PurePosixPath("/")))
    return found


def read_text(path: Path) -> str | None:
    """Returns the file's text, or None where it is absent or not readable."""
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None


def to_number(text: str | None) -> int | None:
    """Returns a whole number that stands alone in the text; None for anything else."""
    try:
        return int(text) if text is not None else None
    except ValueError:
        return None


def _chain(root: Path, mount: _Mount, member: PurePosixPath) -> Iterator[Group]:
    inside = member.relative_to(mount.top) if member.is_relative_to(mount.top) else PurePosixPath(".")
    if ".." in inside.parts:
        # The group lies outside of the container's view.
        inside = PurePosixPath(".")
    point = root / mount.point.relative_to("/")
    for part in (inside, *inside.parents):
        folder = point / part
        if folder.is_dir():
            yield Group(folder, mount.version, f"/{part}" if part.parts else "/")


def _memberships(root: Path) -> dict[str, PurePosixPath]:
    """Returns controller → group; the unified hierarchy has the empty name."""
    found = {}
    for line in (read_text(root / "proc/self/cgroup") or "").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        for controller in controllers.split(","):
            found[controller] = PurePosixPath(path or "/")
    return found


def _mounts(root: Path) -> list[_Mount]:
    """Returns the mounts of mountinfo; where it lists none, the usual places."""
    found = []
    for line in (read_text(root / "proc/self/mountinfo") or "").splitlines():
        place, _, kind = line.partition(" - ")
        fields, (name, *more) = place.split(" "), kind.split(" ")
        if name in ("cgroup", "cgroup2") and len(fields) > 4:
            controllers = frozenset(more[-1].split(",")) if more else frozenset()
            version = 2 if name == "cgroup2" else 1
            found.append(_Mount(version, controllers, PurePosixPath(fields[3]), PurePosixPath(_unescaped(fields[4]))))
    return found or _usual_mounts(root)


def _unescaped(field: str) -> str:
    # mountinfo writes blanks as octal escapes.
    return field.replace("\\040", " ")


def _usual_mounts(root: Path) -> list[_Mount]:
    base, top = PurePosixPath("/sys/fs/cgroup"), PurePosixPath("/")
    found = [_Mount(2, frozenset(), top, base)]
    for name in ("cpu", "cpu,cpuacct", "memory"):
        if (root / "sys/fs/cgroup" / name).is_dir():
            found.append(_Mount(1, frozenset(name.split(",")), top, base / name))
    return found
