import os
from pathlib import Path

import pytest

from kveik.errors import BadValue, Unsupported
from kveik.machine.limits import bf16_support, cpu_threads, has_native_bf16, memory_available, physical_cores

GIB = 1 << 30


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return root


def v2(path: str = "/") -> dict[str, str]:
    return {
        "proc/self/cgroup": f"0::{path}",
        "proc/self/mountinfo": "31 23 0:28 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate",
    }


def v1(path: str = "/", top: str = "/") -> dict[str, str]:
    return {
        "proc/self/cgroup": f"4:memory:{path}\n3:cpu,cpuacct:{path}\n1:name=systemd:{path}",
        "proc/self/mountinfo": "\n".join(
            [
                "20 1 8:1 / / rw - ext4 /dev/root rw",
                f"32 31 0:29 {top} /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct",
                f"35 31 0:32 {top} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory",
            ]
        ),
    }


def siblings(*cores: str) -> dict[str, str]:
    """Topology files of cores given as the kernel lists them, such as `0,4`."""
    return {f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list": core for core in cores for cpu in core.split(",")}


@pytest.mark.parametrize(
    "cpu_max, threads",
    [
        ("400000 100000", 4),
        ("max 100000", 16),
        ("max", 16),
        ("765000 100000", 7),
        ("50000 100000", 1),
        ("99999 100000", 1),
        ("200000 50000", 4),
        ("400000", 4),
        ("garbage", 16),
    ],
)
def test_threads_follow_the_quota_rounded_down(tmp_path, cpu_max, threads):
    root = write(tmp_path, v2() | {"sys/fs/cgroup/cpu.max": cpu_max})
    assert cpu_threads(root, range(16)).threads == threads


@pytest.mark.parametrize("quota, threads", [("-1", 16), ("300000", 3), ("0", 16)])
def test_threads_follow_a_quota_of_version_1(tmp_path, quota, threads):
    folder = "sys/fs/cgroup/cpu,cpuacct"
    root = write(tmp_path, v1() | {f"{folder}/cpu.cfs_quota_us": quota, f"{folder}/cpu.cfs_period_us": "100000"})
    assert cpu_threads(root, range(16)).threads == threads


@pytest.mark.parametrize("affinity", [{0, 1, 2, 3}, {5}])
def test_threads_stay_within_the_affinity(tmp_path, affinity):
    root = write(tmp_path, v2() | {"sys/fs/cgroup/cpu.max": "800000 100000"})
    plan = cpu_threads(root, affinity)
    assert plan.threads == len(affinity)
    assert plan.cpus == affinity


@pytest.mark.parametrize("tight, group", [("", "/"), ("/pod", "/pod"), ("/pod/job", "/pod/job")])
def test_the_tightest_group_on_the_way_up_decides(tmp_path, tight, group):
    levels = {f"sys/fs/cgroup{level}/cpu.max": "1200000 100000" for level in ("/pod", "/pod/job")}
    levels[f"sys/fs/cgroup{tight}/cpu.max"] = "250000 100000"
    plan = cpu_threads(write(tmp_path, v2("/pod/job") | levels), range(16))
    assert (plan.threads, plan.quota, plan.quota_group) == (2, 2.5, group)


def test_a_group_beside_ours_does_not_count(tmp_path):
    others = {"sys/fs/cgroup/other/cpu.max": "100000 100000", "sys/fs/cgroup/job/cpu.max": "600000 100000"}
    assert cpu_threads(write(tmp_path, v2("/job") | others), range(16)).threads == 6


def test_a_container_that_sees_only_its_own_part_finds_its_limits_at_the_top(tmp_path):
    files = v1("/docker/abc", top="/docker/abc") | {
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "200000",
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": str(3 * GIB),
        "sys/fs/cgroup/memory/memory.usage_in_bytes": str(GIB),
    }
    root = write(tmp_path, files)
    assert cpu_threads(root, range(16)).threads == 2
    assert memory_available(root).bytes == 2 * GIB


@pytest.mark.parametrize("shown", ["/../../other", "/elsewhere"])
def test_a_group_outside_of_what_is_mounted_falls_back_to_the_top(tmp_path, shown):
    files = v2(shown) | {"sys/fs/cgroup/cpu.max": "300000 100000"}
    assert cpu_threads(write(tmp_path, files), range(16)).threads == 3


def test_without_any_tables_of_groups_the_usual_places_are_read(tmp_path):
    assert cpu_threads(write(tmp_path / "2", {"sys/fs/cgroup/cpu.max": "400000 100000"}), range(16)).threads == 4
    old = {"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "500000", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"}
    assert cpu_threads(write(tmp_path / "1", old), range(16)).threads == 5


def test_hyper_threads_of_one_core_count_once(tmp_path):
    root = write(tmp_path, siblings("0,4", "1,5", "2,6", "3,7"))
    assert cpu_threads(root, range(8)).threads == 4
    assert cpu_threads(root, {0, 4}).threads == 1
    assert cpu_threads(root, {0, 4, 1}).threads == 2
    assert cpu_threads(root, {4, 5, 6, 7}).threads == 4


def test_cores_come_from_cpuinfo_where_there_is_no_topology(tmp_path):
    blocks = [
        f"processor\t: {cpu}\nphysical id\t: {cpu % 2}\ncore id\t\t: {core}\nflags\t\t: fpu"
        for cpu, core in enumerate([0, 0, 1, 1, 0, 0, 1, 1])
    ]
    root = write(tmp_path, {"proc/cpuinfo": "\n\n".join(blocks)})
    # Two packages with two cores each, two threads per core.
    assert physical_cores(root, range(8)) == 4
    assert physical_cores(root, {0, 1}) == 2
    assert physical_cores(root, {0, 4}) == 1


def test_a_set_of_cpus_on_the_second_node_gives_its_own_cores(tmp_path):
    root = write(tmp_path, siblings("0,16", "1,17", "8,24", "9,25"))
    plan = cpu_threads(root, {8, 9, 24, 25})
    assert (plan.threads, plan.cpus) == (2, {8, 9, 24, 25})


def test_cpus_without_any_description_are_cores_of_their_own(tmp_path):
    assert cpu_threads(tmp_path, range(3)).threads == 3


@pytest.mark.parametrize(
    "threads, omp, expected, explicit",
    [
        (6, None, 6, "--threads"),
        (6, "3", 6, "--threads"),
        (None, "3", 3, "OMP_NUM_THREADS"),
        (None, "3,2", 3, "OMP_NUM_THREADS"),
        (None, "", 4, None),
        (None, "0", 4, None),
        (None, "many", 4, None),
    ],
)
def test_an_explicit_number_of_threads_wins(tmp_path, threads, omp, expected, explicit):
    root = write(tmp_path, v2() | {"sys/fs/cgroup/cpu.max": "400000 100000"})
    plan = cpu_threads(root, range(8), threads=threads, omp_num_threads=omp)
    assert (plan.threads, plan.explicit) == (expected, explicit)


def test_no_threads_at_all_are_refused(tmp_path):
    with pytest.raises(BadValue, match="--threads is 0"):
        cpu_threads(tmp_path, {0}, threads=0)


@pytest.mark.parametrize("threads", [3, 100_000, 10**30])
def test_more_threads_than_cpus_are_refused_with_both_numbers(tmp_path, threads):
    with pytest.raises(BadValue, match=rf"--threads is {threads}; it must be at most 2, the CPUs") as refused:
        cpu_threads(tmp_path, {3, 5}, threads=threads)
    assert refused.value.param == "threads"
    assert cpu_threads(tmp_path, {3, 5}, threads=2).threads == 2


def test_more_threads_in_the_environment_than_cpus_become_their_number(tmp_path):
    plan = cpu_threads(tmp_path, {3, 5}, omp_num_threads="5000,2")
    assert plan.threads == 2
    assert plan.sentence.startswith("2 threads: OMP_NUM_THREADS sets 5000, more than the CPUs that are allowed; 2 CPUs")
    assert cpu_threads(tmp_path, {3, 5}, omp_num_threads="2").requested is None


def test_the_thread_plan_says_what_decided(tmp_path):
    root = write(tmp_path, v2("/pod") | {"sys/fs/cgroup/pod/cpu.max": "765000 100000"})
    assert cpu_threads(root, range(16)).sentence == (
        "7 threads: the least of 16 CPUs allowed, 16 physical cores, a CPU quota of 7.65 (control group /pod)."
    )
    assert cpu_threads(tmp_path / "nothing", {3}, threads=1).sentence == (
        "1 thread: as --threads says; there are 1 CPU allowed, 1 physical core, no CPU quota."
    )


MEMINFO = {"proc/meminfo": "MemTotal:       16777216 kB\nMemFree:         1048576 kB\nMemAvailable:    8388608 kB"}


def test_without_a_limit_the_system_decides(tmp_path):
    reading = memory_available(write(tmp_path, v2() | MEMINFO))
    assert reading.bytes == 8 * GIB
    assert reading.sentence == "8.00 GiB of memory are available: MemAvailable in /proc/meminfo."


def test_a_group_leaves_its_limit_less_its_working_set(tmp_path):
    files = {
        "sys/fs/cgroup/job/memory.max": str(4 * GIB),
        "sys/fs/cgroup/job/memory.current": str(3 * GIB),
        "sys/fs/cgroup/job/memory.stat": f"anon {GIB}\ninactive_file {2 * GIB}\nactive_file 5",
    }
    reading = memory_available(write(tmp_path, v2("/job") | MEMINFO | files))
    assert reading.bytes == 3 * GIB
    assert "control group /job" in reading.sentence


@pytest.mark.parametrize("tight", ["", "/pod", "/pod/job"])
def test_the_group_that_leaves_least_decides(tmp_path, tight):
    files = {}
    for level in ("", "/pod", "/pod/job"):
        files[f"sys/fs/cgroup{level}/memory.max"] = str((2 if level == tight else 6) * GIB)
        files[f"sys/fs/cgroup{level}/memory.current"] = str(GIB // 2)
    assert memory_available(write(tmp_path, v2("/pod/job") | MEMINFO | files)).bytes == 3 * GIB // 2


def test_the_system_decides_where_it_has_less_than_the_limit(tmp_path):
    files = {"sys/fs/cgroup/memory.max": str(100 * GIB), "sys/fs/cgroup/memory.current": "0"}
    assert memory_available(write(tmp_path, v2() | MEMINFO | files)).bytes == 8 * GIB


def test_memory_high_is_a_limit_too_and_max_is_none(tmp_path):
    files = {"sys/fs/cgroup/memory.max": "max", "sys/fs/cgroup/memory.high": str(GIB), "sys/fs/cgroup/memory.current": "0"}
    assert memory_available(write(tmp_path, v2() | MEMINFO | files)).bytes == GIB


@pytest.mark.parametrize("limit, left", [(9223372036854771712, 8 * GIB), (2 * GIB, GIB + GIB // 2)])
def test_version_1_counts_the_whole_tree_and_has_its_own_word_for_no_limit(tmp_path, limit, left):
    files = {
        "sys/fs/cgroup/memory/job/memory.limit_in_bytes": str(limit),
        "sys/fs/cgroup/memory/job/memory.usage_in_bytes": str(GIB),
        "sys/fs/cgroup/memory/job/memory.stat": f"inactive_file 0\ntotal_inactive_file {GIB // 2}",
    }
    assert memory_available(write(tmp_path, v1("/job") | MEMINFO | files)).bytes == left


def test_a_group_past_its_limit_leaves_nothing(tmp_path):
    files = {"sys/fs/cgroup/memory.max": str(GIB), "sys/fs/cgroup/memory.current": str(2 * GIB)}
    assert memory_available(write(tmp_path, v2() | MEMINFO | files)).bytes == 0


def test_a_system_that_tells_nothing_is_refused_with_the_knob(tmp_path):
    with pytest.raises(Unsupported, match="--kv-cache-memory-bytes"):
        memory_available(tmp_path)


@pytest.mark.parametrize(
    "line, flag",
    [
        ("flags\t\t: fpu avx512f avx512_bf16 vnni", "avx512_bf16"),
        ("flags\t\t: fpu avx512_bf16 amx_bf16 amx_tile", "amx_bf16"),
        ("Features\t: fp asimd bf16 i8mm", "bf16"),
        ("flags\t\t: fpu avx2 avx512f", None),
        ("flags\t\t: fpu not_avx512_bf16", None),
        ("model name\t: avx512_bf16", None),
    ],
)
def test_native_bfloat16_is_read_from_the_cpus_flags(tmp_path, line, flag):
    root = write(tmp_path, {"proc/cpuinfo": f"processor\t: 0\n{line}"})
    support = bf16_support(root)
    assert (support.flag, has_native_bf16(root)) == (flag, flag is not None)
    assert (flag or "float32") in support.sentence


def test_a_system_without_cpuinfo_has_no_native_bfloat16(tmp_path):
    assert not has_native_bf16(tmp_path)


@pytest.mark.skipif(not Path("/proc/meminfo").exists(), reason="needs Linux")
def test_this_machine_can_be_read():
    affinity = os.sched_getaffinity(0)
    assert 1 <= cpu_threads(Path("/"), affinity).threads <= len(affinity)
    assert 0 < memory_available(Path("/")).bytes < 1 << 50
