"""Threads, memory and bfloat16 support that this process has on this machine.

Reads /proc and the control groups' files under a root that is passed in; decides nothing about how they are used. Numbers of
the host are not numbers of the container: a thread more than the quota stalls all of them at every barrier.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from kveik.errors import BadValue, Unsupported
from kveik.machine.cgroups import Group, groups, read_text, to_number
from kveik.words import counted

_NO_LIMIT_V1 = 1 << 60
"""Version 1 writes the absence of a limit as a number near 2^63."""

_BF16_FLAGS = ("amx_bf16", "avx512_bf16", "bf16")
"""Of x86 (the first two) and of ARM, the quickest first."""


@dataclass(frozen=True, slots=True)
class ThreadPlan:
    """Number of threads for the arithmetic, and its reason."""

    threads: int
    cpus: frozenset[int]
    """The CPUs that this process may run on; pins belong inside."""

    cores: int
    """Physical cores among them"""

    quota: float | None
    """CPUs' worth of time that the tightest control group gives; None: no limit."""

    quota_group: str | None
    """Name of that group"""

    explicit: str | None = None
    """The setting that decided; None: the machine's limits did."""

    requested: int | None = None
    """Number in that setting, where it exceeds the CPUs."""

    @property
    def sentence(self) -> str:
        quota = "no CPU quota" if self.quota is None else f"a CPU quota of {self.quota:g} (control group {self.quota_group})"
        given = f"{counted(len(self.cpus), 'CPU')} allowed, {counted(self.cores, 'physical core')}, {quota}"
        why = f"as {self.explicit} says; there are" if self.explicit else "the least of"
        if self.requested is not None:
            why = f"{self.explicit} sets {self.requested}, more than the CPUs that are allowed;"
        return f"{counted(self.threads, 'thread')}: {why} {given}."


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """Bytes of memory that are available, and the source of the number."""

    bytes: int
    source: str

    @property
    def sentence(self) -> str:
        return f"{self.bytes / (1 << 30):.2f} GiB of memory are available: {self.source}."


@dataclass(frozen=True, slots=True)
class Bf16Support:
    """Support of the CPU for bfloat16 products."""

    flag: str | None
    """The CPU's flag for it; None: no support."""

    @property
    def native(self) -> bool:
        return self.flag is not None

    @property
    def sentence(self) -> str:
        if self.flag is None:
            return "The CPU does not multiply bfloat16 itself (neither avx512_bf16 nor amx_bf16); float32 is faster here."
        return f"The CPU multiplies bfloat16 itself ({self.flag})."


def cpu_threads(
    root: Path, affinity: Collection[int], *, threads: int | None = None, omp_num_threads: str | None = None
) -> ThreadPlan:
    """min(CPUs allowed, floor(quota), physical cores), at least 1; an explicit number wins, `threads` over `omp_num_threads`.

    root: / or a copy of it. affinity: what `os.sched_getaffinity(0)` gives. threads: --threads. omp_num_threads: the
    environment's OMP_NUM_THREADS, which OpenMP lets be a list, outermost first. More threads than CPUs would only wait for each
    other: --threads beyond them, or below 1, raises BadValue. OMP_NUM_THREADS beyond them, which other programs read too, means
    all CPUs.
    """
    cpus = frozenset(affinity)
    if threads is not None and not 1 <= threads <= len(cpus):
        bound = "at least 1" if threads < 1 else f"at most {len(cpus)}, the CPUs that this process may use"
        raise BadValue(f"--threads is {threads}; it must be {bound}.", param="threads")
    cores = physical_cores(root, cpus)
    quota, quota_group = _cpu_quota(root)
    # Rounded down: the group of threads waits for its slowest, and one too many is the slowest.
    least = min(len(cpus), cores, int(quota) if quota is not None else cores)
    from_environment = _omp_threads(omp_num_threads)
    if threads is not None:
        return ThreadPlan(threads, cpus, cores, quota, quota_group, "--threads")
    if from_environment is not None:
        requested = from_environment if from_environment > len(cpus) else None
        return ThreadPlan(min(from_environment, len(cpus)), cpus, cores, quota, quota_group, "OMP_NUM_THREADS", requested)
    return ThreadPlan(max(1, least), cpus, cores, quota, quota_group)


def physical_cores(root: Path, cpus: Collection[int]) -> int:
    """Number of physical cores that these CPUs belong to; hyper-threads of one core count once."""
    listed = _cores_of_cpuinfo(root)
    return len({_siblings(root, cpu) or listed.get(cpu, f"cpu {cpu}") for cpu in cpus})


def memory_available(root: Path) -> MemoryReading:
    """Returns the least of the bytes that the system and every control group above this process leave.

    A group leaves its limit less its working set: usage without the file pages that the kernel reclaims first.
    Raises Unsupported where nothing can be read.
    """
    readings = [reading for group in groups(root, "memory") if (reading := _left_by(group))]
    system = _left_by_system(root)
    if system:
        readings.append(system)
    if not readings:
        raise Unsupported("This system does not report free memory (/proc/meminfo). Give --kv-cache-memory-bytes.")
    return min(readings, key=lambda reading: reading.bytes)


def bf16_support(root: Path) -> Bf16Support:
    """Reads the flags of the first CPU in /proc/cpuinfo."""
    for line in (read_text(root / "proc/cpuinfo") or "").splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            flags = set(value.split())
            return Bf16Support(next((flag for flag in _BF16_FLAGS if flag in flags), None))
    return Bf16Support(None)


def has_native_bf16(root: Path) -> bool:
    """True if the CPU multiplies bfloat16 itself."""
    return bf16_support(root).native


def _omp_threads(text: str | None) -> int | None:
    first = to_number((text or "").split(",")[0].strip())
    return first if first is not None and first >= 1 else None


def _cpu_quota(root: Path) -> tuple[float | None, str | None]:
    """Returns the tightest quota in the chain, in CPUs, and its group."""
    found = [(quota, group.name) for group in groups(root, "cpu") if (quota := _quota_of(group)) is not None]
    return min(found, key=lambda pair: pair[0]) if found else (None, None)


def _quota_of(group: Group) -> float | None:
    """CPUs' worth of time per period; None: no limit."""
    if group.version == 2:
        limit, _, length = (group.read("cpu.max") or "max").partition(" ")
        quota, period = to_number(limit), to_number(length or "100000")
    else:
        quota, period = group.read_number("cpu.cfs_quota_us"), group.read_number("cpu.cfs_period_us")
    # Version 1 writes -1 for no limit.
    if quota is None or period is None or quota <= 0 or period <= 0:
        return None
    return quota / period


def _siblings(root: Path, cpu: int) -> str | None:
    """The CPUs of the same core, as the kernel lists them: equal text, same core."""
    topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
    return read_text(topology / "core_cpus_list") or read_text(topology / "thread_siblings_list")


def _cores_of_cpuinfo(root: Path) -> dict[int, str]:
    """Returns CPU → name of its core, where /proc/cpuinfo has it."""
    found: dict[int, str] = {}
    for block in (read_text(root / "proc/cpuinfo") or "").split("\n\n"):
        fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in block.splitlines())}
        cpu = to_number(fields.get("processor"))
        if cpu is not None and "core id" in fields:
            found[cpu] = f"core {fields['core id']} of package {fields.get('physical id', '0')}"
    return found


def _left_by(group: Group) -> MemoryReading | None:
    """Returns the bytes that a group leaves; None: it has no limit."""
    if group.version == 2:
        # Past memory.high a process is not killed but slowed down until it is of no use.
        limits = [limit for file in ("memory.max", "memory.high") if (limit := group.read_number(file)) is not None]
        usage, droppable = group.read_number("memory.current"), group.stat("memory.stat", "inactive_file")
    else:
        limits = [limit] if (limit := group.read_number("memory.limit_in_bytes")) is not None else []
        usage, droppable = group.read_number("memory.usage_in_bytes"), group.stat("memory.stat", "total_inactive_file")
    bounds = [limit for limit in limits if 0 <= limit < _NO_LIMIT_V1]
    if not bounds:
        return None
    working_set = max(0, (usage or 0) - (droppable or 0))
    limit = min(bounds)
    source = f"control group {group.name} has a limit of {counted(limit, 'byte')} and a working set of {working_set}"
    return MemoryReading(max(0, limit - working_set), source)


def _left_by_system(root: Path) -> MemoryReading | None:
    for line in (read_text(root / "proc/meminfo") or "").splitlines():
        name, _, value = line.partition(":")
        kib = to_number(value.split()[0]) if name == "MemAvailable" and value.split() else None
        if kib is not None:
            return MemoryReading(kib * 1024, "MemAvailable in /proc/meminfo")
    return None
