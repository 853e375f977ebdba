"""Memory of this machine: how much is left, and what takes it. Linux only; elsewhere nothing is known.

In a container the limit of its control group counts, version 1 or 2, and not only what the machine has.

Sources: proc_meminfo(5) (MemAvailable); Documentation/admin-guide/cgroup-v2.rst (memory.max, memory.current,
memory.stat) and cgroup-v1/memory.rst of the Linux kernel.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from compress.core.errors import StageError

ROOT = Path("/")
UNLIMITED = 1 << 60
"""The value of version 1 for no limit: the largest multiple of a page."""
SHORT_FRACTION = 0.05
"""Chosen; see SHORT_BYTES."""
SHORT_BYTES = 256 << 20
"""Memory is short below this fraction of all, or this many bytes, whichever is less."""

IN_MESSAGES = ("std::bad_alloc", "OOM when allocating", "Cannot allocate memory")
"""Texts of C++ libraries whose errors have no type of their own."""


@dataclass(frozen=True)
class Memory:
    """The memory that processes can use.

    Attributes:
        total: bytes in all: of the machine, or the limit of the container.
        available: bytes that are left, caches that can be dropped included.
        own: bytes that this process takes.
        limited: whether the limit is that of a control group.
    """

    total: int
    available: int
    own: int
    limited: bool = False

    @property
    def is_short(self) -> bool:
        """Whether little is left."""
        return self.available < max(min(SHORT_FRACTION * self.total, SHORT_BYTES), 1)

    def __str__(self) -> str:
        where = "of the limit of this container" if self.limited else "of this machine"
        return f"{size(self.available)} of {size(self.total)} {where} are left; this process takes {size(self.own)}"


def memory(root: Path = ROOT) -> Memory | None:
    """Return the present memory; None on systems without /proc/meminfo.

    Args:
        root: the folder that has proc and sys.
    """
    values = _fields(root / "proc/meminfo")
    if "MemTotal" not in values or "MemAvailable" not in values:
        return None
    total, available, limited = values["MemTotal"] * 1024, values["MemAvailable"] * 1024, False
    for limit, used in _limits(root):
        if limit < total:
            total, limited = limit, True
        available = min(available, max(limit - used, 0))
    resident = _fields(root / "proc/self/status").get("VmRSS", 0) * 1024
    return Memory(total, available, resident, limited)


def size(count: float) -> str:
    """Return a number of bytes for people: 1.5 GB, 300 MB."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6)):
        if count >= factor:
            value = count / factor
            return f"{value:.1f} {unit}" if value < 10 else f"{value:.0f} {unit}"
    return f"{count / 1e3:.0f} kB"


def _limits(root: Path) -> Iterator[tuple[int, int]]:
    """Yield limit and use of every control group that this process is in, in bytes; the groups are nested."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, name = rest.partition(":")
        if number == "0" and not controllers:
            names = ("memory.max", "memory.current", "inactive_file")
            yield from _nested(root / "sys/fs/cgroup", name, names)
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            yield from _nested(root / "sys/fs/cgroup/memory", name, names)


def _nested(base: Path, name: str, names: tuple[str, str, str]) -> Iterator[tuple[int, int]]:
    """Yield limit and use of a group and of those around it. In a container, the path may start outside of it."""
    steps = [step for step in name.split("/") if step not in ("", ".", "..")]
    for count in range(len(steps), -1, -1):
        folder = base.joinpath(*steps[:count])
        texts = [_text(folder / file).strip() for file in names[:2]]
        if not all(text.isascii() and text.isdigit() for text in texts):  # "max", or no such file
            continue
        limit, used = (int(text) for text in texts)
        if limit >= UNLIMITED:
            continue
        reclaimable = _fields(folder / "memory.stat").get(names[2], 0)
        yield limit, max(used - reclaimable, 0)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _fields(path: Path) -> dict[str, int]:
    """Return the numbers of a file with one name and one number in each line."""
    values = {}
    for line in _text(path).splitlines():
        words = line.replace(":", " ").split()
        if len(words) >= 2 and words[1].isdigit():
            values[words[0]] = int(words[1])
    return values


def killed_for_memory(status: int) -> bool:
    """Whether a child process was probably killed because memory was short.

    Args:
        status: its exit status; negative for the signal that killed it, 128 and more from a shell or a container.
    """
    return os.name == "posix" and status in (-9, 137)


def advice(settings: Sequence[str]) -> str:
    """Return what to do about too little memory.

    Args:
        settings: the settings of the stage that lower its memory.
    """
    lower = f"lower {', '.join(settings)}, " if settings else ""
    return f"{lower}use smaller samples (resize in data.preprocess), or end other programs"


def is_exhausted(error: BaseException) -> bool:
    """Whether an error, or its cause, is that there was not enough memory: in Python, numpy, TensorFlow or C++."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, MemoryError) or getattr(cause, "errno", None) == errno.ENOMEM:
            return True
        if type(cause).__name__ == "ResourceExhaustedError" or any(text in str(cause) for text in IN_MESSAGES):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def exhausted(what: str, settings: Sequence[str] = ()) -> StageError:
    """Return the error for work that did not get enough memory.

    Args:
        what: what happened.
        settings: the settings of the stage that lower its memory.
    """
    usage = memory()
    state = f"; now {usage}" if usage is not None else ""
    return StageError(f"{what}{state}", hint=advice(settings))
