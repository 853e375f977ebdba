"""A session with `deploy.contract.agent` in a folder on a device, over SSH, or in a local folder.

One ssh process carries the whole session: one connection and one authentication for each device. The remote shell only
receives a fixed line (`_BOOT`) and the name of the Python; paths, digests and everything else are sent as data.
"""

from __future__ import annotations

import base64
import json
import shlex
import signal
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock, Timer
from typing import Any

from compress.core import ssh
from compress.core.errors import DeploymentError, PipelineError
from compress.surface.fleet.address import DeviceAddress
from deploy.contract import agent

MAX_LINE = 1 << 26
"""Chosen, far above the largest answer, which has the output of `bench`."""
MAX_BEFORE_GREETING = 200
"""Chosen: lines that a login shell may print first, such as the message of the day."""
GREETING_TIMEOUT_S = 60.0
"""The time limit for the agent's greeting. A login shell that reads standard input itself would wait forever."""
_BOOT = (
    'import base64,os,sys,zlib;sys.version_info>=(3,7)or sys.exit("Python %d.%d is too old"%sys.version_info[:2]);'
    'exec(zlib.decompress(base64.b64decode(b"".join(iter(lambda:os.read(0,1).strip(),b"")))))'
)
"""Runs the program in the first line of standard input; the program reads the rest."""
_PROGRAM = """
import sys, types
for name, text in {sources!r}.items():
    sys.modules[name] = module = types.ModuleType(name)
    module.__path__ = []
    exec(compile(text, name, "exec"), module.__dict__)
sys.modules["deploy.contract.agent"].serve()
"""
_PROFILE = "check whether the login shell's profile reads input, prints or exits without a terminal"
UNKNOWN = "unknown"
"""The release of a device whose connection ended before it was asked, or after a switch was requested."""
HELLO = json.dumps({"hello": agent.GREETING}).encode()
_SILENT = ("it does not respond", "check its power and the network")
_SSH_FAILED = 255
_SSH = {
    "REMOTE HOST IDENTIFICATION HAS CHANGED": (
        "its host key has changed",
        "find out why; if the device was reinstalled: ssh-keygen -R HOST",
    ),
    "Host key verification failed": (
        "its host key is not known",
        "ssh-keyscan HOST >> ~/.ssh/known_hosts, and compare the key with the one that the device shows",
    ),
    "Permission denied (": ("it refuses the SSH key", "ssh-copy-id, or --identity FILE"),
    "Could not resolve hostname": ("its name cannot be resolved", "check the address"),
    "Connection refused": ("it refuses the connection", "start its SSH server, or check the port"),
    "timed out": _SILENT,
    "No route to host": _SILENT,
}
"""Messages of ssh for its own failures, with their meaning and what to do."""
_OLD_PYTHON = ("its Python is too old", "--python /path/to/python3.7 or newer")
_THERE = {
    "Unknown option: -I": _OLD_PYTHON,
    "is too old": _OLD_PYTHON,
    **dict.fromkeys(
        ("exit code 126", "exit code 127"),  # of a shell that cannot run a program, or does not find it (POSIX)
        ("it has no such Python", "sudo apt-get install python3, or --python /path/to/python3"),
    ),
}
"""The same for messages and exit codes of the device."""


@dataclass(frozen=True)
class Access:
    """The way to reach devices.

    Attributes:
        python: the Python there, by name or path; `~/…` is below the home folder there.
        known_hosts: a file of host keys, instead of the user's own.
        identity: a file with a private key, instead of the user's own.
    """

    python: str = "python3"
    known_hosts: Path | None = None
    identity: Path | None = None

    def __post_init__(self) -> None:
        if not self.python or self.python.startswith("-") or not self.python.isprintable():
            raise PipelineError(f"--python {self.python!r} is not a program", allowed="a name or a path")

    def command(self, address: DeviceAddress) -> list[str]:
        """Return the command that starts the agent; for a folder on this machine, with this Python."""
        if address.host is None:
            return [sys.executable, "-I", "-c", _BOOT]
        options = ["-o", "StrictHostKeyChecking=yes", "-o", "ServerAliveCountMax=4", "-o", "ClearAllForwardings=yes"]
        options += ["-o", "LogLevel=ERROR"]  # no banner: it is not why something failed
        options += ["-o", "ControlMaster=no", "-o", "RemoteCommand=none"]  # what the user's settings have for people
        if self.known_hosts:
            options += ["-o", f"UserKnownHostsFile={_quoted(self.known_hosts)}", "-o", "GlobalKnownHostsFile=/dev/null"]
        if self.identity:
            options += ["-i", str(self.identity.absolute()), "-o", "IdentitiesOnly=yes"]
        options += ["-p", str(address.port)] if address.port else []
        home, program = ("~/", self.python[2:]) if self.python.startswith("~/") else ("", self.python)
        return ssh.command(address.login, f"{home}{shlex.join([program, '-I', '-c', _BOOT])}", options)


def _quoted(path: Path) -> str:
    """Return a path for a setting of ssh."""
    text = str(path.absolute())
    if '"' in text or "\n" in text:
        raise PipelineError(f"{text!r} cannot be passed to ssh", hint="use a path without quotation marks")
    return '"{}"'.format(text.replace("%", "%%"))


def program() -> bytes:
    """Return the agent as one line, as `_BOOT` reads it."""
    folder = Path(agent.__file__).parent
    sources = {"deploy": "", "deploy.contract": ""}
    for name in ("errors", "durable_files", "trust", "releases", "agent"):
        sources[f"deploy.contract.{name}"] = (folder / f"{name}.py").read_text(encoding="utf-8")
    return base64.b64encode(zlib.compress(_PROGRAM.format(sources=sources).encode(), 9)) + b"\n"


class StepRefusedError(DeploymentError):
    """The agent refused a step; the connection stays open.

    Attributes:
        kind: see `deploy.contract.releases.ReleaseError`.
    """

    def __init__(self, error: Mapping[str, Any], where: str) -> None:
        super().__init__(str(error.get("what")), where=where, hint=str(error.get("hint", "")))
        self.kind = error.get("kind")
        self.current: str | None = error.get("current", UNKNOWN)


class AgentSession:
    """An open connection to the agent: requests and their answers, in the same order.

    Attributes:
        address: the device.
        before: the release that the device ran when the folder was opened; None: no release; or `UNKNOWN`.
        current: the release that it runs now, as far as its answers say.
    """

    def __init__(self, address: DeviceAddress, process: subprocess.Popen[bytes], errors: Any) -> None:
        self.address, self._process, self._errors = address, process, errors
        self._greeted, self._heard = False, b""
        self.before: str | None = UNKNOWN
        self.current: str | None = UNKNOWN

    def greet(self) -> None:
        """Send the program of the agent, and wait for its greeting."""
        late = Timer(GREETING_TIMEOUT_S + ssh.CONNECT_TIMEOUT_S, self._process.kill)
        late.start()
        try:
            self._send(program())
            for _ in range(MAX_BEFORE_GREETING):
                self._heard = self._line()
                if self._heard.rstrip().endswith(HELLO):  # behind what the login shell said
                    self._greeted = True
                    return
        except DeploymentError as error:
            if self._process.returncode != -signal.SIGKILL:
                raise
            raise self._failed("its Python does not respond", _PROFILE) from error
        finally:
            late.cancel()
        raise self._failed("its login shell prints too much", _PROFILE)

    def ask(self, do: str, **arguments: Any) -> Any:
        """Send one request; return its answer.

        Raises:
            StepRefusedError: the step failed on the device.
            DeploymentError: the connection ended.
        """
        if do == "switch":
            self.current = UNKNOWN  # until the answer comes
        self._send(json.dumps({"do": do, **arguments}).encode() + b"\n")
        try:
            answer = self._answer()
        except StepRefusedError as error:
            if do == "switch":
                self.current = error.current
            raise
        if do == "open":
            self.before = self.current = answer["current"]
        elif do == "switch":
            self.current = arguments["release"]
        return answer

    def put(self, pieces: Iterable[tuple[str, int, bytes]]) -> list[bool]:
        """Send pieces (SHA-256, number of bytes already there, content), and then wait for all answers.

        Returns:
            For each piece, whether it arrived complete.
        """
        count = 0
        for digest, offset, content in pieces:
            request = {"do": "put", "sha256": digest, "offset": offset, "size": len(content)}
            self._send(json.dumps(request).encode() + b"\n")
            self._send(content[offset:])
            count += 1
        answers: list[bool] = []
        refused = None
        for _ in range(count):
            try:
                answers.append(bool(self._answer()))
            except StepRefusedError as error:
                refused = refused or error
        if refused:
            raise refused
        return answers

    def _send(self, content: bytes) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(content)
            self._process.stdin.flush()
        except (BrokenPipeError, ValueError) as error:
            raise self._lost() from error

    def _line(self) -> bytes:
        assert self._process.stdout is not None
        line = self._process.stdout.readline(MAX_LINE)
        if not line.endswith(b"\n"):
            raise self._lost()
        return line

    def _answer(self) -> Any:
        try:
            answer = json.loads(self._line())
        except (ValueError, RecursionError) as problem:
            raise DeploymentError("its answer is invalid", where=str(self.address)) from problem
        if isinstance(answer, dict) and isinstance(answer.get("error"), dict):
            raise StepRefusedError(answer["error"], str(self.address))
        if not isinstance(answer, dict) or "error" in answer or "answer" not in answer:
            raise DeploymentError("its answer is invalid", where=str(self.address))
        return answer["answer"]

    def _lost(self) -> DeploymentError:
        """Return the error for a connection that ended, from the messages of ssh and of the device."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        self._errors.seek(0)
        stderr = self._errors.read(1 << 16).decode(errors="replace")
        code = self._process.returncode
        stdout = "" if self._greeted else self._heard.decode(errors="replace")
        last = f"{_last(stderr) or _last(stdout) or 'no message'}, exit code {code}"
        if self._greeted:
            return self._failed(f"the connection ended: {last}", "run the same command again: it continues")
        for text, (meaning, hint) in (_SSH if code == _SSH_FAILED else _THERE).items():
            if text in f"{stderr}, exit code {code}":
                return self._failed(f"{meaning} ({last})", hint)
        if code == _SSH_FAILED:
            return self._failed(f"it cannot be reached ({last})", f"read the output of: ssh -v {self.address.host}")
        return self._failed(f"the connection ended before Python answered ({last})", _PROFILE)

    def _failed(self, what: str, hint: str) -> DeploymentError:
        return DeploymentError(what, where=str(self.address), hint=hint)


def _last(text: str) -> str:
    """Return the last line that contains a letter: others belong to tracebacks or drawings."""
    lines = [line.strip() for line in text.splitlines() if any(map(str.isalpha, line))]
    return lines[-1] if lines else ""


_running: set[subprocess.Popen[bytes]] = set()
_guard = Lock()


@contextmanager
def connected(address: DeviceAddress, access: Access) -> Iterator[AgentSession]:
    """Open a session with a device. The agent ends with the session.

    Raises:
        DeploymentError: the device cannot be reached, or has no suitable Python.
    """
    with tempfile.TemporaryFile() as errors:
        command = access.command(address)
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, start_new_session=True
            )
        except OSError as error:
            what = f"{command[0]} cannot be run: {error.strerror}"
            raise DeploymentError(what, hint="sudo apt-get install openssh-client") from error
        with _guard:
            _running.add(process)
        try:
            session = AgentSession(address, process, errors)
            session.greet()
            yield session
        finally:
            _end(process)
            with _guard:
                _running.discard(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Close the connection, and wait up to two seconds until the agent has released its lock."""
    assert process.stdin is not None
    assert process.stdout is not None
    with suppress(OSError):
        process.stdin.close()
    with suppress(subprocess.TimeoutExpired):
        process.wait(2)
    process.kill()
    process.wait()
    process.stdout.close()


def cut_all() -> None:
    """Close every connection, after an interruption."""
    with _guard:
        for process in _running:
            process.kill()
