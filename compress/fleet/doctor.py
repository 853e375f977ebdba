"""`doctor` here and on other hosts: runs `runner.pyz doctor` there, which is sent along and leaves nothing behind."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from compress.errors import PipelineError, StageError
from compress.export import runner_pyz

TIMEOUT_S = 180.0
CONNECT_TIMEOUT_S = 15
_ADDRESS = re.compile(
    r"ssh://(?:(?P<user>[A-Za-z0-9._-]+)@)?(?P<host>[A-Za-z0-9.-]+|\[[0-9A-Fa-f:.]+\])(?::(?P<port>\d{1,5}))?"
    r"(?P<folder>/[^\x00-\x1f]*)?\Z"
)
_SCRIPT = """
folder=$(mktemp -d) || exit 1
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' HUP INT TERM PIPE
cat > "$folder/runner.pyz" || exit 1
if test -n "$2" && test -d "$2"; then cd "$2" || exit 1; fi
program=$1; shift 2
"$program" "$folder/runner.pyz" doctor "$@"
"""
"""What runs on the other host. Needs a POSIX shell and coreutils."""
_KNOWN = (0, 14)
"""Exit codes of `runner.pyz doctor` that come with findings; see `deploy.contract.errors`."""


class HostAddress(NamedTuple):
    """Where a host is reached.

    Attributes:
        host: its name or address, with `user@` where one was given.
        port: of its sshd; None: as OpenSSH's own settings say.
        folder: the one that is asked about; empty: the home directory.
    """

    host: str
    port: int | None
    folder: str


def address(text: str) -> HostAddress:
    """Parse `ssh://[user@]host[:port][/folder]`.

    Raises:
        PipelineError: it is something else.
    """
    found = _ADDRESS.match(text)
    if found is None or found["host"].startswith("-") or (found["user"] or "").startswith("-"):
        raise PipelineError(f"{text!r} is no address", where="--to", allowed="ssh://[user@]host[:port][/folder]")
    user = f"{found['user']}@" if found["user"] else ""
    return HostAddress(
        user + found["host"].strip("[]"), int(found["port"]) if found["port"] else None, found["folder"] or ""
    )


def over_ssh(to: HostAddress, script: str, arguments: list[str], content: bytes) -> subprocess.CompletedProcess[bytes]:
    """Run a shell script on another host, which must be known and accept a key.

    Args:
        to: where.
        script: for `sh`.
        arguments: its $1, $2, ….
        content: what it is given on standard input.

    Raises:
        StageError: the host cannot be reached, or takes too long.
    """
    settings = ["BatchMode=yes", f"ConnectTimeout={CONNECT_TIMEOUT_S}", "ServerAliveInterval=15"]
    command = ["ssh", "-T", *(part for each in settings for part in ("-o", each))]
    command += ["-p", str(to.port)] if to.port else []
    command += ["--", to.host, shlex.join(["sh", "-c", script, "sh", *arguments])]
    try:
        done = subprocess.run(command, input=content, capture_output=True, timeout=TIMEOUT_S, check=False)
    except OSError as error:
        raise StageError(f"ssh cannot be run: {error.strerror}", todo="install OpenSSH's client") from error
    except subprocess.TimeoutExpired as error:
        raise StageError(f"took longer than {TIMEOUT_S:g} s", where=to.host, todo="try it there by hand") from error
    if done.returncode == 255:  # ssh's own: it never came so far
        todo = f"try: ssh {f'-p {to.port} ' if to.port else ''}{to.host} true"
        raise StageError(f"cannot be reached: {_last(done.stderr)}", where=to.host, todo=todo)
    return done


def examine(to: str | None, python: str, *, as_json: bool) -> tuple[str, int]:
    """Return the output of `runner.pyz doctor`, and its exit code.

    Args:
        to: another host; None: this one, with this interpreter.
        python: the interpreter of another host.
        as_json: as JSON.

    Raises:
        PipelineError: `to` is no address.
        StageError: it cannot be run there.
    """
    options = ["--json"] if as_json else []
    if to is None:
        with tempfile.TemporaryDirectory(prefix="doctor-") as name:
            program = Path(name) / "runner.pyz"
            program.write_bytes(runner_pyz.content())
            command = [sys.executable, str(program), "doctor", *options]
            done = subprocess.run(command, capture_output=True, check=False)
    else:
        there = address(to)
        done = over_ssh(there, _SCRIPT, [python, there.folder, *options], runner_pyz.content())
    if done.returncode not in _KNOWN:
        what = f"doctor cannot be run there (exit code {done.returncode}): {_last(done.stderr)}"
        raise StageError(what, where=to or sys.executable, todo="it needs Python 3.7 or newer; name it with --python")
    return done.stdout.decode(errors="replace").rstrip("\n"), done.returncode


def _last(noise: bytes) -> str:
    lines = noise.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else "no message"
