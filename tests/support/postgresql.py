"""A private PostgreSQL server in a temporary folder: from Debian's package, without root's rights."""

from __future__ import annotations

import itertools
import os
import pwd
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

PROGRAMS = next(iter(sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)), None)
_NUMBERS = itertools.count()
MISSING = "" if PROGRAMS else "PostgreSQL is not installed: apt-get install postgresql"


@dataclass(frozen=True)
class Server:
    """A running server.

    Attributes:
        folder: the folder of its files.
        port: its port on localhost.
    """

    folder: Path
    port: int

    def new_database(self) -> str:
        name = f"search_{next(_NUMBERS)}"
        run("createdb", "-h", "localhost", "-p", str(self.port), "-U", "searcher", name)
        return f"postgresql+psycopg://searcher@localhost:{self.port}/{name}"

    def start(self) -> None:
        """Start the server, and wait until it accepts connections."""
        options = f"-p {self.port} -c listen_addresses=localhost -c unix_socket_directories= -c max_connections=200"
        self._run("pg_ctl", "start", "--wait", "-o", options, "-l", str(self.folder / "log"))

    def stop(self, mode: str = "fast") -> None:
        """Stop the server; the mode "immediate" is like a crash."""
        self._run("pg_ctl", "stop", "--wait", "-m", mode)

    def _run(self, program: str, *arguments: str) -> None:
        run(program, "-D", str(self.folder / "data"), *arguments)


def run(program: str, *arguments: str) -> None:
    """Run a program of PostgreSQL. Root runs it as the user `postgres`, because PostgreSQL refuses root."""
    assert PROGRAMS is not None
    is_root = os.geteuid() == 0
    subprocess.run(
        [str(PROGRAMS / program), *arguments],
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
        user=pwd.getpwnam("postgres").pw_uid if is_root else None,
        group=pwd.getpwnam("postgres").pw_gid if is_root else None,
    )


@contextmanager
def serving() -> Iterator[Server]:
    """Start a new server; remove its files at the end."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    folder = Path(tempfile.mkdtemp(prefix="postgresql-"))
    if os.geteuid() == 0:
        shutil.chown(folder, "postgres", "postgres")
    server = Server(folder, port)
    try:
        run("initdb", "-D", str(folder / "data"), "--username=searcher", "--auth=trust", "--no-sync")
        server.start()
        yield server
        server.stop("immediate")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
