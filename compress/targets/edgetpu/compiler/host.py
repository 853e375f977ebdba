"""Hosts of the vendor's compiler: this machine, a Docker image, or another host over SSH.

Each host takes the bytes of a model and returns a `CompilerRun`. Temporary files are removed afterwards. A timeout or
Ctrl-C ends all started processes, also on another host.
"""

from __future__ import annotations

import io
import os
import shlex
import shutil
import signal
import subprocess
import tarfile
import tempfile
import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from compress.core import ssh
from compress.core.errors import StageError
from compress.core.files import file_digest

MODEL = "model.tflite"
LOG = "compiler.log"
_EXIT_CODE = "exit_code"
CLEAN_UP_TIMEOUT_S = 30.0
"""A host that does not answer any more is not waited for."""


@dataclass(frozen=True)
class CompilerRun:
    """The result of one run of the compiler.

    Attributes:
        exit_code: the exit code; if negative, the signal that killed the process.
        log: the complete output.
        files: the requested files that exist, by name.
    """

    exit_code: int
    log: str
    files: Mapping[str, bytes]


class Host(Protocol):
    """A host that runs the compiler."""

    @property
    def where(self) -> str:
        """The host's name in messages."""

    def identity(self) -> str:
        """Return the compiler's identity without running it; "none" if it does not exist."""

    def run(self, model: bytes, options: Sequence[str], outputs: Sequence[str], timeout_s: float) -> CompilerRun:
        """Run the compiler once.

        `outputs` has the names of the files to return. The time limit includes transfers.

        Raises:
            StageError: the compiler cannot be run, or takes too long.
        """


@dataclass(frozen=True)
class Local:
    """The compiler on this machine; `folder` is its working folder."""

    program: Path
    folder: Path | None = None

    @property
    def where(self) -> str:
        """The path of the program, for messages."""
        return str(self.program)

    def identity(self) -> str:
        """Return the digest of the program, and of the binary that the vendor's start script runs."""
        path = self.program.resolve()
        if not path.is_file():
            return "none"
        real = path.parent / "edgetpu_compiler_bin" / "edgetpu_compiler"
        return "+".join(file_digest(file) for file in (path, real) if file.is_file())

    def run(self, model: bytes, options: Sequence[str], outputs: Sequence[str], timeout_s: float) -> CompilerRun:
        """See `Host.run`."""
        if not (self.program.is_file() and os.access(self.program, os.X_OK)):
            raise StageError("is not an executable program", where=self.where, hint="check compile.compiler")
        with tempfile.TemporaryDirectory(prefix=".compiler-", dir=self.folder) as name:
            folder = Path(name)
            (folder / MODEL).write_bytes(model)
            # The compiler runs in the folder, so that the log has no paths and is the same on every machine.
            done = _execute([str(self.program), *options, MODEL], self.where, timeout_s, cwd=folder)
            files = {output: folder / output for output in outputs}
            contents = {output: path.read_bytes() for output, path in files.items() if path.is_file()}
        return CompilerRun(done.returncode, done.stdout.decode(errors="replace"), contents)


_SCRIPT = """
size=$1 limit=$2; shift 2
exec 3<&0
folder=$(mktemp -d) || exit 1
compiler=
finish() { test -z "$compiler" || kill "$compiler"; rm -rf "$folder"; }
trap finish EXIT
trap "exit 1" HUP INT TERM PIPE
mkdir "$folder/out" && cd "$folder/out" || exit 1
head -c "$size" > model.tflite
test "$(wc -c < model.tflite)" -eq "$size" || exit 1
timeout -k 1 "$limit" "$@" model.tflite < /dev/null > compiler.log 2>&1 3<&- &
compiler=$!
{ cat <&3; kill $$; } > /dev/null 2>&1 &
watcher=$!
wait "$compiler"
echo $? > exit_code
compiler=
kill "$watcher"
rm model.tflite
tar -cf - .
"""
"""The script that runs the compiler in a container or on another host.

The model comes on standard input, which stays open until the result is sent. If standard input ends, the client is
gone, and the script stops the compiler. `timeout` ends all processes of the compiler even if that end is not noticed.
The script needs a POSIX shell, coreutils and tar.
"""


def _run_remotely(
    command: Sequence[str], where: str, model: bytes, outputs: Sequence[str], timeout_s: float
) -> CompilerRun:
    """Run a command that runs `_SCRIPT` in a container or on another host."""
    done = _execute(command, where, timeout_s, content=model)
    files = _unpacked(done.stdout, {LOG, _EXIT_CODE, *outputs})
    if done.returncode != 0 or LOG not in files or not files.get(_EXIT_CODE, b"").strip().isdigit():
        said = done.stderr.decode(errors="replace").strip().splitlines()
        message = said[-1] if said else "no message"
        what = f"the compiler cannot be run (exit code {done.returncode}): {message}"
        raise StageError(what, where=where, hint="run the same command manually, or use another host")
    exit_code = int(files.pop(_EXIT_CODE))
    log = files.pop(LOG).decode(errors="replace")
    if exit_code in (126, 127):
        raise StageError(f"the compiler was not found: {log.strip()}", where=where)
    return CompilerRun(exit_code, log, files)


def _script(program: str, options: Sequence[str], model: bytes, timeout_s: float) -> list[str]:
    """Return the arguments of `sh` that run the compiler. The limit there is one second longer than ours."""
    return ["-c", _SCRIPT, "sh", str(len(model)), str(int(timeout_s) + 1), program, *options]


@dataclass(frozen=True)
class Docker:
    """The compiler in a Docker image, without network."""

    image: str
    program: str

    @property
    def where(self) -> str:
        """The image."""
        return f"docker image {self.image}"

    def identity(self) -> str:
        """Return the image's id; "none" if the image does not exist (yet)."""
        command = ["docker", "image", "inspect", "--format", "{{.Id}}", self.image]
        try:
            return _execute(command, self.where, CLEAN_UP_TIMEOUT_S).stdout.decode(errors="replace").strip() or "none"
        except StageError:
            return "none"

    def run(self, model: bytes, options: Sequence[str], outputs: Sequence[str], timeout_s: float) -> CompilerRun:
        """See `Host.run`. The container has a name, so that it can always be removed."""
        name = f"coralline-{uuid.uuid4().hex}"
        closed = ["--network", "none", "--cap-drop", "ALL", "--log-driver", "none"]
        command = ["docker", "run", "--rm", "--interactive", "--name", name, *closed, "--entrypoint", "sh", self.image]
        try:
            return _run_remotely(
                [*command, *_script(self.program, options, model, timeout_s)], self.where, model, outputs, timeout_s
            )
        except BaseException:
            with suppress(StageError):
                _execute(["docker", "rm", "--force", name], self.where, CLEAN_UP_TIMEOUT_S)
            raise


@dataclass(frozen=True)
class Ssh:
    """The compiler on another host; SSH must need no password, and the host's key must be known."""

    host: str
    program: str

    @property
    def where(self) -> str:
        """The host."""
        return f"ssh {self.host}"

    def identity(self) -> str:
        """Return the host's name; anything else would need a connection at every run, even without work."""
        return self.host

    def run(self, model: bytes, options: Sequence[str], outputs: Sequence[str], timeout_s: float) -> CompilerRun:
        """See `Host.run`."""
        there = shlex.join(["sh", *_script(self.program, options, model, timeout_s)])
        return _run_remotely(ssh.command(self.host, there), self.where, model, outputs, timeout_s)


def _unpacked(content: bytes, names: set[str]) -> dict[str, bytes]:
    """Return the regular files with these names in a tar archive; none if it is not an archive."""
    files: dict[str, bytes] = {}
    try:
        with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as archive:
            for member in archive:
                name = member.name.removeprefix("./")
                if name in names and member.isreg() and not member.issparse() and member.size <= len(content):
                    stream = archive.extractfile(member)
                    files[name] = stream.read() if stream else b""
    except (tarfile.TarError, OSError, ValueError, EOFError):
        return {}
    return files


def _execute(
    command: Sequence[str], where: str, timeout_s: float, *, cwd: Path | None = None, content: bytes | None = None
) -> subprocess.CompletedProcess[bytes]:
    """Run a command in a new session; an interruption ends all processes of the session.

    `where` is the host's name in messages. With the working directory `cwd`, standard error is merged into standard
    output. `content` is the standard input, which stays open until the command has ended.

    Raises:
        StageError: the command cannot be run, or takes too long.
    """
    out, errors = subprocess.PIPE, subprocess.PIPE if cwd is None else subprocess.STDOUT
    try:
        with (
            _standard_input(content) as source,
            subprocess.Popen(
                command, stdin=source, stdout=out, stderr=errors, cwd=cwd, start_new_session=True
            ) as process,
        ):
            try:
                printed = process.communicate(timeout=timeout_s)
            except BaseException:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # the compiler works in a child process
                process.wait()
                raise
    except OSError as error:
        missing = shutil.which(command[0]) is None
        what = f"{command[0]} was not found" if missing else f"the compiler cannot be run: {error.strerror}"
        raise StageError(what, where=where) from error
    except subprocess.TimeoutExpired as error:
        what = f"the compiler took longer than {timeout_s:g} s"
        raise StageError(what, where=where, hint="increase compile.timeout_s") from error
    return subprocess.CompletedProcess(command, process.returncode, printed[0], printed[1] or b"")


@contextmanager
def _standard_input(content: bytes | None) -> Iterator[int]:
    """Yield a pipe with `content` that stays open until this context ends; without content, the null device."""
    if content is None:
        yield subprocess.DEVNULL
        return
    read_end, write_end = os.pipe()
    ended = threading.Event()
    feeder = threading.Thread(target=_feed, args=(write_end, content, ended), daemon=True)
    feeder.start()
    try:
        yield read_end
    finally:
        os.close(read_end)
        ended.set()
        feeder.join(timeout=1.0)


def _feed(handle: int, content: bytes, ended: threading.Event) -> None:
    rest = memoryview(content)
    with suppress(BrokenPipeError):  # the reader has closed the pipe
        while rest:
            rest = rest[os.write(handle, rest) :]
    ended.wait()
    os.close(handle)
