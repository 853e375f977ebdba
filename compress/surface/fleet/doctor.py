"""`doctor` on this host and on others: `runner.pyz doctor` is sent over SSH, runs there, and is deleted."""

from __future__ import annotations

import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from compress.bundling import runner_pyz
from compress.core import ssh
from compress.core.errors import StageError
from compress.surface.fleet.address import DeviceAddress, parse_ssh

TIMEOUT_S = 180.0
"""Chosen: the runner's own limit for its child process is 60 s, and slow boards need more to start Python."""
_SCRIPT = """
folder=$(mktemp -d) || exit 1
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' HUP INT TERM PIPE
cat > "$folder/runner.pyz" || exit 1
if test -n "$2" && test -d "$2"; then cd "$2" || exit 1; fi
program=$1; shift 2
"$program" "$folder/runner.pyz" doctor "$@"
"""
"""Runs on the other host, which needs a POSIX shell and coreutils."""
_RESULT_CODES = (0, 14)
"""Exit codes of `runner.pyz doctor` with findings on standard output; see `deploy.contract.errors`."""
_SSH_FAILED = 255
"""The exit code of ssh if the connection itself failed."""


def run_over_ssh(
    address: DeviceAddress, script: str, arguments: list[str], content: bytes
) -> subprocess.CompletedProcess[bytes]:
    """Run a script for `sh` with $1, $2, … and a standard input on another host.

    The host must be in known_hosts, and accept an SSH key.

    Raises:
        StageError: the host cannot be reached, or the script takes too long.
    """
    options = ["-p", str(address.port)] if address.port else []
    command = ssh.command(address.login, shlex.join(["sh", "-c", script, "sh", *arguments]), options)
    try:
        process = subprocess.run(command, input=content, capture_output=True, timeout=TIMEOUT_S, check=False)
    except OSError as error:
        raise StageError(f"ssh cannot be run: {error.strerror}", hint="install OpenSSH's client") from error
    except subprocess.TimeoutExpired as error:
        hint = "run `runner.pyz doctor` on that host by hand"
        raise StageError(f"took longer than {TIMEOUT_S:g} s", where=address.login, hint=hint) from error
    if process.returncode == _SSH_FAILED:
        hint = f"try: {shlex.join(['ssh', *options, address.login, 'true'])}"
        raise StageError(f"cannot be reached: {_last_line(process.stderr)}", where=address.login, hint=hint)
    return process


def examine(to: str | None, python: str, *, as_json: bool) -> tuple[str, int]:
    """Return the output of `runner.pyz doctor`, and its exit code.

    `to` is the address of another host, and `python` the interpreter there; None: this host and this interpreter.

    Raises:
        PipelineError: `to` is not an address.
        StageError: the program cannot be run there.
    """
    options = ["--json"] if as_json else []
    if to is None:
        with tempfile.TemporaryDirectory(prefix="doctor-") as name:
            program = Path(name) / "runner.pyz"
            program.write_bytes(runner_pyz.content())
            command = [sys.executable, str(program), "doctor", *options]
            process = subprocess.run(command, capture_output=True, check=False)
    else:
        address = parse_ssh(to, where="--to")
        process = run_over_ssh(address, _SCRIPT, [python, address.path, *options], runner_pyz.content())
    if process.returncode not in _RESULT_CODES:
        message = f"doctor cannot be run there (exit code {process.returncode}): {_last_line(process.stderr)}"
        hint = "it needs Python 3.7 or newer; name it with --python"
        raise StageError(message, where=to or sys.executable, hint=hint)
    return process.stdout.decode(errors="replace").rstrip("\n"), process.returncode


def _last_line(output: bytes) -> str:
    lines = output.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else "no message"
