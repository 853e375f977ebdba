"""The worker processes of a training: their addresses from the environment variable TF_CONFIG, and the wait for them.

TF_CONFIG is TensorFlow's own format: https://www.tensorflow.org/guide/distributed_training, "Setting up TF_CONFIG".
Nothing here needs TensorFlow.
"""

from __future__ import annotations

import errno
import json
import re
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Any

from compress.core.errors import PipelineError, StageError
from compress.core.files import digest_of

VARIABLE = "TF_CONFIG"
EXAMPLE = '{"cluster": {"worker": ["host-a:2222", "host-b:2222"]}, "task": {"type": "worker", "index": 0}}'
LARGEST = 1 << 20
"""Most characters of TF_CONFIG."""
MOST_WORKERS = 1024
LABEL = "[A-Za-z0-9][A-Za-z0-9_-]{0,62}"
ADDRESS = re.compile(rf"({LABEL}(?:\.{LABEL}){{0,125}}\.?|\[[0-9A-Fa-f:.]{{2,45}}\]):([0-9]{{1,5}})")
"""A host name (labels between dots), an IPv4 address, or an IPv6 address in brackets, and a port."""
START_S = 600.0
"""Seconds in which all workers of a run must have started."""
PROBE_S = 1.0
"""Seconds in which a worker must accept a connection; also the time between two attempts."""


@dataclass(frozen=True)
class WorkerCluster:
    """The workers of a run. The first one, the chief, writes the results.

    Attributes:
        addresses: host and port of each worker, in the same order everywhere.
        index: the number of this process among them.
    """

    addresses: tuple[str, ...]
    index: int

    @property
    def is_chief(self) -> bool:
        """Whether this process writes the results."""
        return self.index == 0

    @property
    def digest(self) -> str:
        """Return the digest of the addresses."""
        return digest_of(list(self.addresses))

    def named(self, index: int) -> str:
        """Return a worker's number and address, for messages."""
        role = " (the chief)" if index == 0 else ""
        return f"worker {index}{role} at {self.addresses[index]}"

    def unreachable(self) -> list[int]:
        """Return the other workers that accept no connection now."""
        others = [index for index in range(len(self.addresses)) if index != self.index]
        return [index for index in others if not _accepts(self.addresses[index])]


def from_environment(environment: Mapping[str, str]) -> WorkerCluster:
    """Return the workers that TF_CONFIG describes.

    Raises:
        PipelineError: it is missing or invalid.
    """
    text = environment.get(VARIABLE, "")
    if not text.strip():
        raise PipelineError(
            "strategy: multi_worker needs the addresses of all workers, and the environment variable is not set",
            where=VARIABLE,
            allowed=EXAMPLE,
            hint="set it on every machine, with the index of that machine",
        )
    content = _parsed(text)
    roles = _map(content, "cluster")
    task = _map(content, "task")
    if list(roles) != ["worker"]:
        raise _invalid(f"cluster has the roles {_shown(list(roles))}", "worker alone; worker 0 is the chief")
    addresses = _addresses(roles["worker"])
    if task.get("type") != "worker":
        raise _invalid(f"task.type is {_shown(task.get('type'))}", "worker")
    index = task.get("index")
    if type(index) is not int or not 0 <= index < len(addresses):
        raise _invalid(f"task.index is {_shown(index)}", f"0 to {len(addresses) - 1}, an integer")
    return WorkerCluster(addresses, index)


def _parsed(text: str) -> Any:
    """Return JSON as plain values."""
    if len(text) > LARGEST:
        raise _invalid(f"it has {len(text):,} characters", f"up to {LARGEST:,}")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _invalid(f"it is not JSON: {str(error).splitlines()[0]}", EXAMPLE) from error


def _map(content: Any, key: str) -> dict[str, Any]:
    """Return the map under a key."""
    value = content.get(key) if isinstance(content, dict) else None
    if not isinstance(value, dict):
        raise _invalid(f"the map {key!r} is missing", EXAMPLE)
    return value


def _addresses(value: Any) -> tuple[str, ...]:
    """Return the addresses after checking each of them."""
    if not isinstance(value, list) or not 2 <= len(value) <= MOST_WORKERS:
        hint = "`strategy: one` or `mirrored` continues on one machine" if isinstance(value, list) else ""
        raise _invalid(f"cluster.worker is {_shown(value)}", f"a list of 2 to {MOST_WORKERS} addresses", hint)
    for address in value:
        match = ADDRESS.fullmatch(address) if isinstance(address, str) else None
        if match is None or not 0 < int(match[2]) < 65_536:
            raise _invalid(f"cluster.worker has {_shown(address)}", "host:port, such as host-a:2222")
    twice = sorted({address for address in value if value.count(address) > 1})
    if twice:
        raise _invalid(f"cluster.worker has {twice[0]} twice", "one address for each worker")
    return tuple(value)


def _invalid(what: str, allowed: str, hint: str = "") -> PipelineError:
    return PipelineError(what, where=VARIABLE, allowed=allowed, hint=hint)


def _shown(value: Any) -> str:
    """Return a value for a message, shortened."""
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def wait_for_all(cluster: WorkerCluster, waiting: Callable[[str], None], timeout_s: float = START_S) -> None:
    """Wait until every worker has started: each listens on its own port, and connects to the ports of all others.

    Afterwards the port is free for TensorFlow's server, which answers those who still wait.

    Args:
        cluster: the workers.
        waiting: receives a line for the user, once.
        timeout_s: seconds to wait.

    Raises:
        StageError: the own port is in use, or a worker has not started in time.
    """
    end = time.monotonic() + timeout_s
    missing: Sequence[int] = [index for index in range(len(cluster.addresses)) if index != cluster.index]
    with closing(_listening(cluster)):
        is_first = True
        while missing := [index for index in missing if not _accepts(cluster.addresses[index])]:
            names = ", ".join(map(cluster.named, missing))
            if time.monotonic() > end:
                raise StageError(
                    f"{names} did not start within {timeout_s:.0f} s",
                    hint="start the same command on every machine, and check the addresses and firewalls",
                )
            if is_first:
                waiting(f"waiting for {names}")
                is_first = False
            time.sleep(PROBE_S)


def _listening(cluster: WorkerCluster) -> socket.socket:
    """Return a socket that accepts connections on the port of this worker."""
    host, port = _split(cluster.addresses[cluster.index])
    listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind(("", port))
        listening.listen(MOST_WORKERS)
    except OSError as error:
        listening.close()
        reason = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be used: {error.strerror}"
        raise StageError(
            f"the port of {cluster.named(cluster.index)} {reason}",
            hint=f"end the other program, or choose another port in {VARIABLE}",
        ) from error
    return listening


def _accepts(address: str) -> bool:
    """Return whether a program accepts connections at an address."""
    with suppress(OSError), socket.create_connection(_split(address), timeout=PROBE_S):
        return True
    return False


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)
