"""The command `doctor`: the problems of this host, each with its effect and the command that fixes it.

`look` collects facts; steps that can crash run in a child process. `findings` is a pure function of these facts and of
the files below their root, so that the files of another machine can be examined.
It imports only the standard library: numpy and the TFLite runtime may be missing.
"""

from __future__ import annotations

import dataclasses
import getpass
import grp
import os
import re
import shutil
import sys
import sysconfig
import time
from typing import Any, Dict, List, Optional, Tuple

from deploy.runner import child_process, host
from deploy.runner.problems import SEVERITIES, Finding

TIMEOUT_S = 60.0
"""Chosen, far above the time of the imports: what takes longer hangs."""
_INSTALLED = re.compile(r"([A-Za-z0-9._]+)-([0-9][^-]*)(-py[0-9.]+)?\.(dist|egg)-info\Z")


@dataclasses.dataclass(frozen=True)
class Facts:
    """The input of `findings`, in addition to the files below the root.

    Attributes:
        root: the folder that /sys, /proc, /dev, /etc and /var are in.
        bits: the address size of the interpreter. A 64-bit kernel can run a 32-bit Python.
        managed: whether pip refuses to install packages for this Python, as on Debian 12 and newer (PEP 668).
        reported: the reports of the child process: `runtime`, `broken`, `pycoral`, `libedgetpu`, `unloadable`, `ended`.
        installed: the versions of the packages on the path, by name in lower case with dashes.
        path: `sys.path`; an empty entry is the working directory.
        folder: the working directory.
        package: the folder or file that this package was imported from.
        free_bytes: the free disk space in the working directory.
        now: the time in seconds since the epoch.
    """

    root: str = "/"
    python: Tuple[int, ...] = (3, 11)
    bits: int = 64
    managed: bool = False
    reported: Dict[str, Any] = dataclasses.field(default_factory=dict)
    installed: Dict[str, str] = dataclasses.field(default_factory=dict)
    path: Tuple[str, ...] = ()
    folder: str = "/"
    package: str = "/"
    user: str = "root"
    groups: Tuple[str, ...] = ()
    page_bytes: int = 4096
    free_bytes: int = 1 << 40
    now: float = 1.8e9


def look(library: str, root: Optional[str] = None) -> Facts:
    """Collect the facts of this host; `library`: the name or path of libedgetpu."""
    marker = os.path.join(sysconfig.get_path("stdlib"), "EXTERNALLY-MANAGED")
    is_virtual_environment = sys.prefix != sys.base_prefix
    return Facts(
        root=host.default_root() if root is None else root,
        python=tuple(sys.version_info[:3]),
        bits=64 if sys.maxsize > 1 << 32 else 32,
        managed=os.path.exists(marker) and not is_virtual_environment,
        reported=_run_child(library),
        installed=installed(sys.path),
        path=tuple(sys.path),
        folder=os.getcwd(),
        package=os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))),
        user=_user(),
        groups=tuple(_groups()),
        page_bytes=os.sysconf("SC_PAGE_SIZE"),
        free_bytes=shutil.disk_usage(os.getcwd()).free,
        now=time.time(),
    )


def findings(facts: Facts) -> List[Finding]:
    """Return all findings, errors first."""
    from deploy.doctor import device as doctor_device
    from deploy.doctor import software as doctor_software

    rows = doctor_software.findings(facts) + doctor_device.findings(facts)
    return sorted(rows, key=lambda row: SEVERITIES.index(row.severity))


def describe(rows: List[Finding]) -> str:
    """Return findings as text."""
    lines = []
    for row in rows:
        lines.append("%-8s %s" % (row.severity, row.what))
        lines.append("         why: %s" % row.why)
        if row.hint:
            lines.append("         do:  %s" % row.hint)
        if row.page and row.severity != "note":
            lines.append("         see: %s in the manuals of Coralline" % row.page)
    errors = sum(row.severity == "error" for row in rows)
    warnings = sum(row.severity == "warning" for row in rows)
    return "\n".join(lines + ["errors: %d, warnings: %d" % (errors, warnings)])


def installed(path: Any) -> Dict[str, str]:
    """Return versions by package name, from the folders that pip writes. Python 3.7 has no importlib.metadata."""
    versions: Dict[str, str] = {}
    for folder in path:
        try:
            names = os.listdir(folder or ".")
        except OSError:
            continue
        for name in names:
            match = _INSTALLED.match(name)
            if match:
                versions.setdefault(match.group(1).lower().replace("_", "-"), match.group(2))
    return versions


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


# --- steps that can crash -------------------------------------------------------------


def _run_child(library: str) -> Dict[str, Any]:
    """Return what a child process reports on the runtime and libedgetpu; `ended`: how it crashed, if it did."""
    ended = child_process.run("deploy.doctor.command", library.encode(), TIMEOUT_S)
    reported: Dict[str, Any] = {}
    for row in ended.reports:
        reported.update(row)
    if ended.returncode is None:
        reported["ended"] = "it did not end within %g s" % TIMEOUT_S
    elif ended.returncode != 0 or reported.get("step") != "end":
        reported["ended"] = "it ended with code %d" % ended.returncode
    return reported


def child() -> None:
    """Report on numpy, the runtime and libedgetpu, whose name is on standard input: the work of the child process."""
    report = child_process.reporter()
    library = sys.stdin.read()
    report(step="numpy")
    try:
        import numpy

        report(numpy=numpy.__version__)
    except ImportError as error:
        report(no_numpy=str(error), step="end")
        return
    report(step="runtime")
    from deploy.contract.errors import DeviceError
    from deploy.runner import probe, runtime

    try:
        tflite = runtime.find()
        report(runtime=dict(tflite.describe(), too_new=tflite.too_new_for_libedgetpu_16))
    except DeviceError as error:
        report(broken=error.to_json())
    report(step="pycoral")
    report(pycoral=runtime.pycoral(), step="library")
    try:
        report(libedgetpu=probe.library_version(library) or "unknown")
    except OSError as error:
        report(unloadable=str(error))
    report(step="end")
