"""What is wrong with this host: each finding with what, why it matters, and the one command that mends it.

`look` collects facts, with everything that could crash in a child process; `findings` is a pure function of
them and of the files below their root. So another machine's files can be examined, and the tests do.
Runs on Python 3.7 with the standard library alone; numpy and the TFLite runtime are what it asks about.
"""

from __future__ import annotations

import dataclasses
import getpass
import grp
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

from deploy import host

SEVERITIES = ("error", "warning", "note")
TIMEOUT_S = 60.0
_CHILD = "import sys; sys.path.insert(0, sys.argv.pop(1)); from deploy import doctor; doctor.child(sys.argv[1])"
_INSTALLED = re.compile(r"([A-Za-z0-9._]+)-([0-9][^-]*)(-py[0-9.]+)?\.(dist|egg)-info\Z")


class Finding(NamedTuple):
    """Something about this host.

    Attributes:
        severity: `error`: the Edge TPU or the runner does not work like this. `warning`: it may fail, or be slow.
            `note`: to know.
        kind: a word for programs; stays the same from version to version.
        what: what was found.
        why: why it matters.
        todo: the one command that mends it; empty for some notes.
    """

    severity: str
    kind: str
    what: str
    why: str
    todo: str = ""


@dataclasses.dataclass(frozen=True)
class Facts:
    """What `findings` goes by, beside the files below the root.

    Attributes:
        root: the folder that /sys, /proc, /dev, /etc and /var are in.
        python: version of the interpreter.
        bits: of its addresses; a 64-bit kernel may well have a Python of 32.
        managed: whether pip refuses to install for it, as on Debian from 12 on (PEP 668).
        told: what the child process told: `runtime`, `broken`, `pycoral`, `libedgetpu`, `unloadable`, `ended`.
        installed: versions of the packages on the path, by name in lower case with dashes.
        path: `sys.path`; an empty entry is the working directory.
        folder: the working directory.
        ours: the folder or file that this very package comes from.
        user, groups: who asks, and the names of its groups.
        page_bytes, free_bytes, now: memory page, free disk in the working directory, seconds since the epoch.
    """

    root: str = "/"
    python: Tuple[int, ...] = (3, 11)
    bits: int = 64
    managed: bool = False
    told: Dict[str, Any] = dataclasses.field(default_factory=dict)
    installed: Dict[str, str] = dataclasses.field(default_factory=dict)
    path: Tuple[str, ...] = ()
    folder: str = "/"
    ours: str = "/"
    user: str = "root"
    groups: Tuple[str, ...] = ()
    page_bytes: int = 4096
    free_bytes: int = 1 << 40
    now: float = 1.8e9


def look(library: str, root: Optional[str] = None) -> Facts:
    """The facts of this host; `library`: libedgetpu, by name or path."""
    ours = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    return Facts(
        root=host.default_root() if root is None else root,
        python=tuple(sys.version_info[:3]),
        bits=64 if sys.maxsize > 1 << 32 else 32,
        managed=_managed(),
        told=_asked(library, ours),
        installed=installed(sys.path),
        path=tuple(sys.path),
        folder=os.getcwd(),
        ours=ours,
        user=_user(),
        groups=tuple(_groups()),
        page_bytes=os.sysconf("SC_PAGE_SIZE"),
        free_bytes=shutil.disk_usage(os.getcwd()).free,
        now=time.time(),
    )


def findings(facts: Facts) -> List[Finding]:
    """All of them, the worst first."""
    from deploy import doctor_device, doctor_software

    found = doctor_software.findings(facts) + doctor_device.findings(facts)
    return sorted(found, key=lambda each: SEVERITIES.index(each.severity))


def describe(found: List[Finding]) -> str:
    """For people."""
    lines = []
    for each in found:
        lines.append("%-8s %s" % (each.severity, each.what))
        lines.append("         why: %s" % each.why)
        if each.todo:
            lines.append("         do:  %s" % each.todo)
    errors = sum(each.severity == "error" for each in found)
    warnings = sum(each.severity == "warning" for each in found)
    return "\n".join(lines + ["errors: %d, warnings: %d" % (errors, warnings)])


def installed(path: Any) -> Dict[str, str]:
    """Versions by the name of the package, by the folders that pip leaves. importlib.metadata came after Python 3.7."""
    found: Dict[str, str] = {}
    for folder in path:
        try:
            names = os.listdir(folder or ".")
        except OSError:
            continue
        for name in names:
            match = _INSTALLED.match(name)
            if match:
                found.setdefault(match.group(1).lower().replace("_", "-"), match.group(2))
    return found


def _managed() -> bool:
    """Whether this Python belongs to the system's package manager, and is no virtual environment."""
    marker = os.path.join(sysconfig.get_path("stdlib"), "EXTERNALLY-MANAGED")
    return sys.prefix == sys.base_prefix and os.path.exists(marker)


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # no entry in /etc/passwd, as in containers
        return str(os.getuid())


def _groups() -> List[str]:
    names = []
    for number in sorted(set(os.getgroups()) | {os.getgid()}):
        try:
            names.append(grp.getgrgid(number).gr_name)
        except KeyError:
            continue
    return names


# --- what could crash -----------------------------------------------------------------


def _asked(library: str, ours: str) -> Dict[str, Any]:
    """What a child process says of the runtime and of libedgetpu; `ended`: how it crashed, if it did."""
    told: Dict[str, Any] = {}
    try:
        done = subprocess.run(
            [sys.executable, "-c", _CHILD, ours, library],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=TIMEOUT_S,
        )
        out, code = done.stdout, done.returncode
    except subprocess.TimeoutExpired as error:
        out, code = error.stdout or b"", None
    for line in out.splitlines():
        try:
            told.update(json.loads(line.decode("utf-8", "replace")))
        except ValueError:  # cut off by a crash, or printed by a library
            continue
    if code != 0 or "step" not in told or told["step"] != "end":
        told["ended"] = "it did not come back" if code is None else "it ended with code %d" % code
    return told


def child(library: str) -> None:
    """The child's work: a line of JSON for each step."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def tell(**row: Any) -> None:
        out.write(json.dumps(row) + "\n")
        out.flush()

    tell(step="numpy")
    try:
        import numpy

        tell(numpy=numpy.__version__)
    except ImportError as error:
        tell(no_numpy=str(error), step="end")
        return
    tell(step="runtime")
    from deploy import probe, runtime
    from deploy.contract.errors import DeviceError

    try:
        found = runtime.find()
        tell(runtime=dict(found.describe(), too_new=found.too_new_for_libedgetpu_16))
    except DeviceError as error:
        tell(broken=error.to_json())
    tell(step="pycoral")
    tell(pycoral=runtime.pycoral(), step="library")
    try:
        tell(libedgetpu=probe.library_version(library) or "unknown")
    except OSError as error:
        tell(unloadable=str(error))
    tell(step="end")
