"""A host to deploy to: a real sshd on a high port of this machine, with its own keys, folder and Python."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

SSHD, KEYGEN = (shutil.which(name, path="/usr/sbin:/usr/bin:/sbin:/bin") for name in ("sshd", "ssh-keygen"))
CONFIG = """\
ListenAddress 127.0.0.1:{port}
HostKey {folder}/host
AuthorizedKeysFile {folder}/user.pub
PidFile none
UsePAM no
StrictModes no
PasswordAuthentication no
KbdInteractiveAuthentication no
MaxStartups 100
SetEnv PATH={folder}/bin:/usr/bin:/bin PYTHONDONTWRITEBYTECODE=1
"""


@dataclass(frozen=True)
class Host:
    """A running sshd.

    Attributes:
        folder: its keys and, in `bin`, its programs.
        port: the port on which it listens.
        server: its process.
    """

    folder: Path
    port: int
    server: subprocess.Popen[bytes]

    @property
    def known(self) -> Path:
        """The path of a known_hosts file with its host key."""
        return self.folder / "known_hosts"

    def address(self, path: Path | str) -> str:
        """Return the address of a folder on the host, for `--to`."""
        return f"ssh://127.0.0.1:{self.port}/{str(path).removeprefix('/')}"

    def options(self, path: Path | str) -> list[str]:
        """Return the options with which `deploy` reaches a folder on the host."""
        return [
            *("--to", self.address(path), "--known-hosts", str(self.known), "--identity", str(self.folder / "user")),
            *("--python", str(self.folder / "bin" / "python3"), "--log", str(self.folder / "log.jsonl")),
        ]

    def python(self, program: str = sys.executable, before: str = "", name: str = "python3") -> None:
        """Write its Python, a wrapper around a Python of this machine.

        Args:
            program: the Python of this machine.
            before: code that runs there before the code that `deploy` sends.
            name: the name of the wrapper.
        """
        (self.folder / f"{name}-before").write_text(before)
        text = f'if [ "$1" = -I ]; then exec {program} -I -c "$(cat {self.folder}/{name}-before)\n$3"; fi\n'
        path = self.folder / "bin" / name
        path.write_text(f'#!/bin/sh\n{text if before else ""}exec {program} "$@"\n')
        path.chmod(0o755)

    def sessions(self) -> list[int]:
        """Return the ids of the sshd processes that serve a connection."""
        return _children(self.server.pid)

    def agents(self) -> list[int]:
        """Return the ids of the Python processes that run for a connection."""
        pids, level = [], self.sessions()
        while level:
            pids += [pid for pid in level if b"-I" in _arguments(pid) and b"-c" in _arguments(pid)]
            level = [child for pid in level for child in _children(pid)]
        return [pid for pid in pids if b"python" in _arguments(pid)[:1000].split(b"\0")[0]]


def _arguments(pid: int) -> bytes:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def _children(pid: int) -> list[int]:
    children = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError):
            if int(path.read_text().rpartition(")")[2].split()[1]) == pid:
                children.append(int(path.parent.name))
    return children


def missing() -> str:
    """Return why there can be no host; empty if there can."""
    if SSHD is None or KEYGEN is None or shutil.which("ssh", path="/usr/bin:/bin") is None:
        return "there is no OpenSSH: apt-get install openssh-server openssh-client"
    return ""


@contextmanager
def running(folder: Path) -> Iterator[Host]:
    (folder / "bin").mkdir(parents=True)
    for name in ("host", "user"):
        command = [str(KEYGEN), "-q", "-t", "ed25519", "-N", "", "-C", "test", "-f", str(folder / name)]
        subprocess.run(command, check=True)
    with suppress(PermissionError):  # sshd as root needs this folder, which normally its service creates
        Path("/run/sshd").mkdir(exist_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (folder / "config").write_text(CONFIG.format(folder=folder, port=port))
    key = (folder / "host.pub").read_text()
    (folder / "known_hosts").write_text(f"[127.0.0.1]:{port} {key}")
    with (folder / "sshd.log").open("wb") as log:
        server = subprocess.Popen([str(SSHD), "-D", "-e", "-f", str(folder / "config")], stderr=log)
    host = Host(folder, port, server)
    host.python()
    try:
        _wait_for(port, server, folder / "sshd.log")
        yield host
    finally:
        for pid in host.sessions():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        server.terminate()
        server.wait(10)


def _wait_for(port: int, server: subprocess.Popen[bytes], log: Path) -> None:
    for _ in range(200):
        if server.poll() is not None:
            break
        with socket.socket() as client:
            if client.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise RuntimeError(f"sshd does not run: {log.read_text()}")
