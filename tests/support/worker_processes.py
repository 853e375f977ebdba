"""Worker processes of `execution: {strategy: multi_worker}` on this machine."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from paths import ROOT

MAIN = ("-m", "compress")


class Ended(NamedTuple):
    """The end of a worker: its exit code, and its stderr."""

    code: int
    message: str


def free_ports(count: int) -> list[int]:
    """Return free ports. Another process could take one before it is used."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("", 0))
        return [one.getsockname()[1] for one in sockets]


def tf_config(addresses: Sequence[str], index: int) -> str:
    return json.dumps({"cluster": {"worker": list(addresses)}, "task": {"type": "worker", "index": index}})


def run(
    pipeline: Path,
    programs: Sequence[Sequence[str]],
    seconds: float = 600,
) -> list[Ended]:
    """Run a pipeline on some workers at the same time, in the folder of its file.

    Args:
        pipeline: the pipeline file.
        programs: for each worker the arguments of Python before the file's name, such as `MAIN`.
        seconds: how long they may take.
    """
    addresses = [f"localhost:{port}" for port in free_ports(len(programs))]
    with ExitStack() as stack:
        processes = []
        for index, program in enumerate(programs):
            environment = {**os.environ, "PYTHONPATH": str(ROOT), "TF_CONFIG": tf_config(addresses, index)}
            process = subprocess.Popen(
                [sys.executable, *program, pipeline.name],
                cwd=pipeline.parent,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            processes.append(process)
        messages = [process.communicate(timeout=seconds)[1] for process in processes]
    return [Ended(process.returncode, message) for process, message in zip(processes, messages, strict=True)]
