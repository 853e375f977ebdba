"""Memory limits, read from copies of the files of Linux, and errors that mean too little memory."""

from __future__ import annotations

import errno
from pathlib import Path

import numpy as np
import pytest

from compress.core import memory
from compress.core.memory import Memory

GB = 1 << 30
MEMINFO = (
    "MemTotal:       8388608 kB\nMemFree:         100000 kB\nMemAvailable:   4194304 kB\nHugePages_Total:       0\n"
)


def machine(root: Path, files: dict[str, str]) -> Memory | None:
    """Return the memory of a machine with these files."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return memory.memory(root)


def test_a_machine_without_limits(tmp_path: Path) -> None:
    machine_memory = machine(
        tmp_path, {"proc/meminfo": MEMINFO, "proc/self/status": "Name:\tpython\nVmRSS:\t 1048576 kB\n"}
    )
    assert machine_memory == Memory(total=8 * GB, available=4 * GB, own=1 * GB)
    assert str(machine_memory) == "4.3 GB of 8.6 GB of this machine are left; this process takes 1.1 GB"


def test_other_systems_say_nothing(tmp_path: Path) -> None:
    assert machine(tmp_path, {}) is None
    assert machine(tmp_path, {"proc/meminfo": "MemTotal: 5 kB\n"}) is None
    assert machine(tmp_path, {"proc/meminfo": "\0\xff nonsense"}) is None


def test_the_limit_of_a_group_of_version_2_and_of_one_around_it(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/user/job"
    files = {
        "proc/meminfo": MEMINFO,
        "proc/self/cgroup": "0::/user/job\n",
        f"{group}/memory.max": "max\n",
        f"{group}/memory.current": f"{GB}\n",
        "sys/fs/cgroup/user/memory.max": f"{2 * GB}\n",
        "sys/fs/cgroup/user/memory.current": f"{GB + GB // 2}\n",
        "sys/fs/cgroup/user/memory.stat": f"anon 5\ninactive_file {GB // 4}\n",
    }
    machine_memory = machine(tmp_path, files)
    assert machine_memory == Memory(2 * GB, 2 * GB - (GB + GB // 4), 0, limited=True)
    assert "of the limit of this container are left" in str(machine_memory)


def test_in_a_container_the_path_of_the_group_may_start_outside(tmp_path: Path) -> None:
    files = {
        "proc/meminfo": MEMINFO,
        "proc/self/cgroup": "0::/../../docker/abc\n",
        "sys/fs/cgroup/memory.max": f"{GB}\n",
        "sys/fs/cgroup/memory.current": "0\n",
    }
    assert machine(tmp_path, files) == Memory(GB, GB, 0, limited=True)


def test_the_limit_of_a_group_of_version_1(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/memory/job"
    files = {
        "proc/meminfo": MEMINFO,
        "proc/self/cgroup": "5:cpu,cpuacct:/job\n4:memory:/job\n0::/\n",
        f"{group}/memory.limit_in_bytes": f"{3 * GB}\n",
        f"{group}/memory.usage_in_bytes": f"{2 * GB}\n",
        f"{group}/memory.stat": f"inactive_file 1\ntotal_inactive_file {GB}\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "1\n",
    }
    assert machine(tmp_path, files) == Memory(3 * GB, 2 * GB, 0, limited=True)


@pytest.mark.parametrize(
    ("total", "available", "short"),
    [(8 * GB, 300 << 20, False), (8 * GB, 200 << 20, True), (GB, 100 << 20, False), (GB, 40 << 20, True)],
)
def test_when_memory_is_short(total: int, available: int, short: bool) -> None:
    assert Memory(total, available, 0).is_short is short


@pytest.mark.parametrize(
    ("count", "expected"), [(1_500, "2 kB"), (250e6, "250 MB"), (3.21e9, "3.2 GB"), (64e9, "64 GB")]
)
def test_sizes(count: float, expected: str) -> None:
    assert memory.size(count) == expected


class ResourceExhaustedError(Exception):
    """An error named like TensorFlow's."""


def allocation_error() -> MemoryError:
    """The error of numpy for an array that no machine can hold."""
    with pytest.raises(MemoryError) as caught:
        np.empty(1 << 55, np.float64)
    return caught.value


@pytest.mark.parametrize(
    ("error", "exhausted"),
    [
        (MemoryError(), True),
        (allocation_error(), True),
        (ResourceExhaustedError("OOM"), True),
        (RuntimeError("std::bad_alloc"), True),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), True),
        (OSError(errno.ENOSPC, "No space left on device"), False),
        (ValueError("shapes"), False),
    ],
)
def test_errors_that_mean_too_little_memory(error: BaseException, exhausted: bool) -> None:
    assert memory.is_exhausted(error) is exhausted
    outer = ValueError("something else")
    outer.__cause__ = error
    assert memory.is_exhausted(outer) is exhausted


@pytest.mark.parametrize(
    ("status", "killed"), [(0, False), (-9, True), (137, True), (-6, False), (-11, False), (1, False)]
)
def test_the_status_of_a_killed_process(status: int, killed: bool) -> None:
    assert memory.killed_for_memory(status) is killed
