"""Run commands while operations on files fail, by means of `fault_shim.c`.

A command of the host is forked from a process that has imported the program already (`Forge`), so that a thousand cases
take minutes. Its children, such as the agent of a deployment, are started as usual and have the same faults.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paths import ROOT

SOURCE = Path(__file__).with_name("fault_shim.c")
COMPILER = shutil.which("cc") or shutil.which("gcc")
SPACE_OPERATIONS = "open,write,truncate,mkdir,symlink,link,sync"
ALL_OPERATIONS = f"{SPACE_OPERATIONS},rename,unlink,rmdir,chmod,flock"
YEARS_S = 20 * 365 * 86_400


@dataclass(frozen=True)
class Fault:
    """A fault in the operations on files below a folder.

    Attributes:
        name: the name of the kind of fault.
        action: see `fault_shim.c`; "" for no failure.
        family: the operations that are counted, separated by commas; "" for all that write.
        error: the errno of the operations that fail.
        seconds: the change of the clock.
        nfs: whether a file that is removed while it is open gets another name.
        refuse: operations that always fail.
        plain: whether the process has no rights to the files of other users, although it runs as root.
        at: the number of the operation.
    """

    name: str
    action: str = ""
    family: str = ""
    error: int = 0
    seconds: int = 0
    nfs: bool = False
    refuse: str = ""
    plain: bool = False
    at: int = 0

    @property
    def is_harmless(self) -> bool:
        """Whether a command must succeed despite the fault."""
        return self.action == "clock" or (self.action == "" and self.refuse in ("sync_folder", "symlink"))

    @property
    def kills(self) -> bool:
        return self.action in ("kill", "torn")

    def environment(self) -> dict[str, str]:
        values = {
            "FAULT_ACTION": self.action,
            "FAULT_FAMILY": self.family,
            "FAULT_ERRNO": str(self.error),
            "FAULT_SECONDS": str(self.seconds),
            "FAULT_NFS": "1" if self.nfs else "",
            "FAULT_REFUSE": self.refuse,
            "FAULT_AT": str(self.at),
        }
        return {name: value for name, value in values.items() if value}


SOUND = Fault("none")
FAULTS = {
    fault.name: fault
    for fault in (
        Fault("killed", "kill", "open,write,sync,rename,unlink,rmdir,mkdir,symlink"),
        Fault("torn write", "torn", "write"),
        Fault("disk full", "errors", SPACE_OPERATIONS, errno.ENOSPC),
        Fault("one error", "error", ALL_OPERATIONS, errno.EIO),
        Fault("broken disk", "errors", ALL_OPERATIONS, errno.EIO),
        Fault("unreadable", "error", "read_open,read", errno.EIO),
        Fault("read-only", "errors", "open,write,truncate,mkdir,symlink,link,rename,unlink,rmdir,chmod", errno.EROFS),
        Fault("no permission", "error", "open,mkdir,symlink,rename,unlink,rmdir", errno.EACCES),
        Fault("lost reply", "lost", "rename", errno.EIO),
        Fault("lost removal", "lost", "unlink,rmdir", errno.ENOENT),
        Fault("stale handle", "error", "open,read_open,sync,rename", errno.ESTALE),
        Fault("clock forward", "clock", ALL_OPERATIONS, seconds=YEARS_S),
        Fault("clock back", "clock", ALL_OPERATIONS, seconds=-YEARS_S),
        Fault("network folder", nfs=True, refuse="sync_folder"),
        Fault("killed there", "kill", "open,write,sync,rename,unlink,rmdir,mkdir", nfs=True, refuse="sync_folder"),
        Fault("no locks", refuse="flock"),
        Fault("no links", refuse="symlink"),
    )
}


def missing() -> str:
    """Return why faults cannot be injected here; empty if they can."""
    if sys.platform != "linux" or COMPILER is None:
        return "faults need Linux and a C compiler: apt-get install gcc"
    return ""


def library(folder: Path) -> Path:
    path = folder / "fault_shim.so"
    command = [str(COMPILER), "-O1", "-shared", "-fPIC", "-Wall", "-Wextra", "-o", str(path), str(SOURCE), "-ldl"]
    subprocess.run(command, check=True)
    return path


@dataclass(frozen=True)
class Outcome:
    """The outcome of a command.

    Attributes:
        code: its exit code; negative: the signal that ended it.
        errors: its stderr.
        operations: how many operations the fault counted.
    """

    code: int
    errors: str
    operations: int


_FORGE = """
import ctypes, json, os, signal, sys
import compress.surface.cli.main, compress.surface.api, compress.surface.cli.console
import compress.pipeline.runner, compress.surface.api.exports
import compress.pipeline.starter, compress.surface.fleet.rollout, compress.surface.fleet.results
import compress.targets, compress.model.tflite.interpreter, deploy.__main__
libc = ctypes.CDLL(None)

def give_up_rights():
    # Linux: without the capabilities DAC_OVERRIDE (1), DAC_READ_SEARCH (2) and FOWNER (3), also in child processes.
    for capability in (1, 2, 3):
        if libc.prctl(24, capability, 0, 0, 0):
            raise OSError("prctl failed")
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    values = (ctypes.c_uint32 * 6)()
    if libc.capget(header, values):
        raise OSError("capget failed")
    for index in range(3):
        values[index] &= ~0b1110
    if libc.capset(header, values):
        raise OSError("capset failed")

ends = {"compress": compress.surface.cli.main.main, "deploy": deploy.__main__.main}
for line in sys.stdin:
    asked = json.loads(line)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.environ.clear()
            os.environ.update(asked["environment"])
            os.chdir(asked["folder"])
            for number, name in enumerate(("/dev/null", "/dev/null", asked["errors"])):
                os.dup2(os.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666), number)
            sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
            if asked["plain"]:
                give_up_rights()
            if asked["alone"]:
                os.execv(sys.executable, [sys.executable, "-m", asked["program"], *asked["arguments"]])
            libc.fault_reset()
            sys.argv = asked["arguments"]
            code = ends[asked["program"]](asked["arguments"])
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        except BaseException:
            import traceback
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code or 0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class Forge:
    """A process that has imported the program, from which commands are forked.

    Args:
        preload: the library.
        folder: the folder for the counter and the errors of the commands.
    """

    def __init__(self, preload: Path, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._counter, self._errors = folder / "counter", folder / "errors"
        self._environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("FAULT_")},
            "LD_PRELOAD": str(preload),
            "PYTHONPATH": str(ROOT),
            "PYTHONDONTWRITEBYTECODE": "1",
            "PATH": "/usr/bin:/bin",
            "HOME": str(folder),
        }
        self._process = subprocess.Popen(
            [sys.executable, "-c", _FORGE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=self._environment,
            text=True,
        )

    def start(
        self,
        arguments: Sequence[object],
        folder: Path,
        fault: Fault = SOUND,
        trace: Path | None = None,
        *,
        alone: bool = False,
    ) -> None:
        """Start a command.

        Args:
            arguments: `compress` or `deploy`, and the arguments of the program.
            folder: the working directory; only operations below it fail.
            fault: the fault in these operations.
            trace: a file that records all operations.
            alone: whether it runs in a process that has imported nothing: TensorFlow does not work in a forked one.
        """
        self._counter.write_bytes(bytes(8))
        program, *rest = map(str, arguments)
        environment = {
            **self._environment,
            **fault.environment(),
            "FAULT_UNDER": str(folder),
            "FAULT_COUNTER": str(self._counter),
            **({"FAULT_TRACE": str(trace)} if trace else {}),
        }
        request = {
            "program": program,
            "arguments": rest,
            "folder": str(folder),
            "environment": environment,
            "errors": str(self._errors),
            "alone": alone,
            "plain": fault.plain,
        }
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()

    def finish(self) -> Outcome:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        errors = self._errors.read_text(errors="replace")
        if not line:
            raise RuntimeError(f"the process that forks commands ended: {errors}")
        return Outcome(int(line), errors, int.from_bytes(self._counter.read_bytes(), sys.byteorder))

    def run(
        self,
        arguments: Sequence[object],
        folder: Path,
        fault: Fault = SOUND,
        trace: Path | None = None,
        *,
        alone: bool = False,
    ) -> Outcome:
        self.start(arguments, folder, fault, trace, alone=alone)
        return self.finish()

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


def temporary() -> Path:
    """Create a folder without symbolic links in its path, because operations are compared by their paths."""
    return Path(tempfile.mkdtemp(prefix="faults-")).resolve()
