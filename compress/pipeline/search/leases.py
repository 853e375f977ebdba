"""Leases of trials: which process runs a trial, and whether it still does, for processes on several machines.

The owner of a trial increments a number in the storage every few seconds. Another process that has seen the same number
for EXPIRY_S seconds of its own clock takes the owner for dead; clocks of different machines are never compared. On its
own machine it sees at once whether the process runs. Optuna's own heartbeats do not work with trials that are asked for
and told, nor through its gRPC proxy, nor with a journal.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from optuna.storages import BaseStorage

OWNER = "owner"
"""The attribute of a trial that identifies its owner: the machine, the process number, and when the process started."""
LEASE = "lease"
"""The attribute with the number that the owner increments."""
RENEW_S = 10.0
EXPIRY_S = 60.0
SECOND_LOOK_S = 2 * RENEW_S
"""Seconds in which a living owner renews its lease after the storage was away."""


def owner() -> dict[str, Any]:
    """Return what identifies this process among those of all machines."""
    return {"machine": machine(), "process": os.getpid(), "started": _start_of(os.getpid())}


@cache
def machine() -> str:
    """Return what identifies this machine and, in a container, its processes; "" if the system does not say it.

    Names of hosts do not: copies of a virtual machine have the same one, and containers that share a name do not see
    each other's processes.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _start_of(process: int) -> str:
    """Return the start of a process in clock ticks since the start of the machine.

    Returns:
        "" if it does not run, or if the system does not say it.
    """
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def is_elsewhere(attributes: Mapping[str, Any]) -> bool:
    """Return whether the owner of a trial is not known to be on this machine."""
    named = attributes.get(OWNER)
    return not isinstance(named, dict) or not named.get("started") or named.get("machine") != machine()


@contextmanager
def renewed(storage: BaseStorage, trial_id: int) -> Iterator[None]:
    """Renew the lease of a trial in a thread as long as the block runs."""
    ended = threading.Event()

    def renew() -> None:
        number = 0
        while not ended.wait(RENEW_S):
            number += 1
            with suppress(Exception):  # the storage is away: the lease may be lost, which `tell` will see
                storage.set_trial_user_attr(trial_id, LEASE, number)

    thread = threading.Thread(target=renew, name=f"lease of trial {trial_id}", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(timeout=RENEW_S)


class LeaseWatch:
    """The leases of other processes, as far as this one has seen them."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[object, float]] = {}

    def is_expired(self, number: int, attributes: Mapping[str, Any]) -> bool:
        """Return whether the owner of a running trial is dead, or probably dead if it is on another machine.

        The storage may have been away for a while, so a trial of another machine needs a second look.

        Args:
            number: the number of the trial.
            attributes: its user attributes.
        """
        now = time.monotonic()
        if not is_elsewhere(attributes):
            named = attributes[OWNER]
            return bool(_start_of(named["process"]) != named["started"])
        lease = attributes.get(LEASE)
        value, since = self._seen.get(number, (object(), now))
        if lease != value:
            self._seen[number] = lease, now
            return False
        return now - since > EXPIRY_S
