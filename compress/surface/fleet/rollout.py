"""Deployment to many devices in parallel, with a row of a table and two lines of the log for each; and their status.

The log is append-only: a line of JSON for each start and each end.
"""

from __future__ import annotations

import datetime
import fcntl
import getpass
import json
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compress.core.errors import CorallineError, StoreError
from compress.core.files import explain
from compress.surface.fleet import release, remote, results
from compress.surface.fleet.address import DeviceAddress
from compress.surface.fleet.release import Progress, ReleaseResult, Status
from compress.surface.fleet.remote import Access, AgentSession
from deploy.contract import printable

Work = Callable[[AgentSession, Progress], ReleaseResult | Status]
_SHORT = 12
"""Digits of a release in a table: the beginning of a SHA-256, which differs between the releases of a device."""


def default_log() -> Path:
    """Return `~/.local/state/coralline/deployments.jsonl`, or the file below XDG_STATE_HOME."""
    state = os.environ.get("XDG_STATE_HOME", "")
    base = Path(state) if state.startswith("/") else Path.home() / ".local" / "state"
    return base / "coralline" / "deployments.jsonl"


def person() -> str:
    """Return the current user as `user@machine`."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


@dataclass(frozen=True)
class Log:
    """The log of one command.

    The file and its folder are created if they are missing. `about` has the values of every line, such as the user.
    """

    path: Path
    about: Mapping[str, Any]

    def add(self, address: str, event: str, **more: Any) -> None:
        """Append a line and flush it to the disk; the event is `begun`, `done` or `failed`.

        Raises:
            StoreError: the log cannot be written.
        """
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        entry = {"schema_version": 1, "time": now, **self.about, "address": address, "event": event, **more}
        line = json.dumps(entry).encode() + b"\n"
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a+b") as stream:
                fcntl.flock(stream, fcntl.LOCK_EX)
                if stream.seek(0, os.SEEK_END):
                    stream.seek(-1, os.SEEK_END)
                    line = line if stream.read(1) == b"\n" else b"\n" + line  # the previous line was truncated
                stream.write(line)
                stream.flush()
                os.fsync(stream.fileno())
        except OSError as error:
            raise explain(error, "the log of deployments cannot be written", self.path) from error


@dataclass(frozen=True)
class RolloutResult:
    """The result of a step on one device, or its error.

    Attributes:
        address: the device.
        seconds: the duration.
        outcome: the result; None: the step failed.
        error: the error.
        before: the release that the device ran before; None: no release; or `remote.UNKNOWN`.
        after: the release that it runs afterwards. It is unknown if the device was not reached, and if the connection
            ended between the request to switch and its answer.
    """

    address: DeviceAddress
    seconds: float
    outcome: ReleaseResult | Status | None
    error: CorallineError | None
    before: str | None = remote.UNKNOWN
    after: str | None = remote.UNKNOWN

    @property
    def result(self) -> str:
        """One word for tables and programs."""
        if isinstance(self.outcome, ReleaseResult):
            return self.outcome.result
        if self.outcome is None:
            return "failed"
        if self.outcome.current is None:
            return "nothing deployed"
        return "sound" if self.outcome.whole else "damaged"

    def to_json(self) -> dict[str, Any]:
        """Return the result as a plain map."""
        row: dict[str, Any] = {"address": str(self.address), "seconds": round(self.seconds, 3), "result": self.result}
        if isinstance(self.outcome, Status):
            return {**row, **vars(self.outcome)}
        row |= {"before": self.before, "after": self.after}
        if self.outcome is None:
            return {**row, "error": str(self.error)}
        return {**row, **vars(self.outcome)}


def deploy(
    session: AgentSession,
    progress: Progress,
    new_release: release.Release,
    settings: release.ReleaseOptions,
    folder: Path,
) -> release.ReleaseResult:
    """Deploy a release to one device, and store the measurements that were made there in `folder`.

    Raises:
        CorallineError: a step failed.
    """
    outcome = release.deploy(session, new_release, settings, progress)
    if "bench" in outcome.results:
        progress(f"results: {results.store(outcome.results['bench'], folder, session.address.name)}")
    return outcome


def work(
    addresses: Sequence[DeviceAddress],
    access: Access,
    step: Work,
    jobs: int,
    progress: Progress,
    log: Log | None,
) -> list[RolloutResult]:
    """Run one step on every device, in parallel. An interruption closes every connection.

    Args:
        addresses: the devices.
        access: the SSH settings.
        step: the function to run on each device.
        jobs: the number of parallel connections.
        progress: a function that is called with messages.
        log: None: nothing is logged.

    Returns:
        A result for each device, in the order of the addresses.
    """
    with ThreadPoolExecutor(max_workers=jobs) as pool:
        try:
            return list(pool.map(lambda address: _one(address, access, step, progress, log), addresses))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            remote.cut_all()
            raise


def _one(address: DeviceAddress, access: Access, step: Work, progress: Progress, log: Log | None) -> RolloutResult:
    start = time.monotonic()
    name = str(address)
    session: AgentSession | None = None
    try:
        if log:
            log.add(name, "begun")
        with remote.connected(address, access) as session:
            outcome = step(session, lambda text: progress(f"{address}: {text}"))
        if log and isinstance(outcome, ReleaseResult):
            done = {"result": outcome.result, "before": outcome.before, "after": outcome.after}
            log.add(name, "done", **done, sent_bytes=outcome.sent_bytes)
    except CorallineError as error:
        before, after = (session.before, session.current) if session else (remote.UNKNOWN, remote.UNKNOWN)
        with suppress(StoreError):
            if log:
                log.add(name, "failed", error=str(error), before=before, after=after)
        return RolloutResult(address, time.monotonic() - start, None, error, before, after)
    return RolloutResult(address, time.monotonic() - start, outcome, None, session.before, session.current)


def table(rows: Sequence[RolloutResult]) -> str:
    """Return a table of a deployment: device, release before and after, result, seconds."""
    cells = [("device", "before", "after", "result", "seconds")]
    cells += [
        (str(row.address), _short(row.before), _short(row.after), row.result, f"{row.seconds:.1f}") for row in rows
    ]
    text = _aligned(cells)
    if any(row.after == remote.UNKNOWN for row in rows):
        text += f"\n{remote.UNKNOWN}: not reached, or the connection ended during the switch; `status` asks the device"
    return text


def status_table(rows: Sequence[RolloutResult]) -> str:
    """Return a table of what devices run, and how many run each release."""
    cells = [("device", "release", "name", "since", "by", "state")]
    counts: Counter[str] = Counter()
    for row in rows:
        status = row.outcome if isinstance(row.outcome, Status) else Status(remote.UNKNOWN)
        name, since, by = (printable.line(text or "-") for text in (status.name, status.time, status.by))
        cells.append((str(row.address), _short(status.current), name, since, by, row.result))
        counts[_short(status.current) if row.result == "sound" else row.result] += 1
    return "\n".join([_aligned(cells), *(f"{count} of {len(rows)}: {what}" for what, count in counts.most_common())])


def _short(release: str | None) -> str:
    return (release or "-")[:_SHORT]


def _aligned(cells: Sequence[tuple[str, ...]]) -> str:
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in cells
    )
