"""A PostgreSQL server of our own in a temporary folder: from Debian's package, without root's rights."""

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
    """A server that runs.

    Attributes:
        folder: its files.
        port: on localhost.
    """

    folder: Path
    port: int

    def new_database(self) -> str:
        """Make a database, and return its URL for SQLAlchemy."""
        name = f"search_{next(_NUMBERS)}"
        run("createdb", "-h", "localhost", "-p", str(self.port), "-U", "searcher", name)
        return f"postgresql+psycopg://searcher@localhost:{self.port}/{name}"

    def start(self) -> None:
        """Start it, and wait until it takes connections."""
        options = f"-p {self.port} -c listen_addresses=localhost -c unix_socket_directories= -c max_connections=200"
        self._run("pg_ctl", "start", "--wait", "-o", options, "-l", str(self.folder / "log"))

    def stop(self, mode: str = "fast") -> None:
        """Stop it; "immediate" is like a crash."""
        self._run("pg_ctl", "stop", "--wait", "-m", mode)

    def _run(self, program: str, *arguments: str) -> None:
        run(program, "-D", str(self.folder / "data"), *arguments)


def run(program: str, *arguments: str) -> None:
    """Run one of its programs; root's are refused, so it runs as `postgres` then."""
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
    """A new server; its files are removed at the end."""
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
