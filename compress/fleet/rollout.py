"""Deployment to many devices in parallel, with a row of a table and two lines of the log for each."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compress.errors import CorallineError, StoreError
from compress.fleet import release, remote, results
from compress.fleet.address import DeviceAddress
from compress.fleet.log import Log
from compress.fleet.release import Progress, ReleaseResult
from compress.fleet.remote import Access, AgentSession

Work = Callable[[AgentSession, Progress], ReleaseResult]
_SHORT = 12


@dataclass(frozen=True)
class RolloutResult:
    """The result of a deployment to one device, or its error.

    Attributes:
        address: the device.
        seconds: the duration.
        outcome: the result; None: the deployment failed.
        error: the error.
    """

    address: DeviceAddress
    seconds: float
    outcome: ReleaseResult | None
    error: CorallineError | None

    def to_json(self) -> dict[str, Any]:
        """Return the result as a plain map."""
        row: dict[str, Any] = {"address": str(self.address), "seconds": round(self.seconds, 3), "result": "failed"}
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


def rollback(session: AgentSession, progress: Progress, settings: release.ReleaseOptions) -> release.ReleaseResult:
    """Switch one device to its previous release.

    Raises:
        CorallineError: a step failed.
    """
    return release.rollback(session, settings, progress)


def work(
    addresses: Sequence[DeviceAddress],
    access: Access,
    step: Work,
    jobs: int,
    progress: Progress,
    log: Log,
) -> list[RolloutResult]:
    """Run one step on every device, in parallel. An interruption closes every connection.

    Args:
        addresses: the devices.
        access: the SSH settings.
        step: the function to run on each device.
        jobs: the number of parallel connections.
        progress: a function that is called with messages.
        log: receives a line before and after each device.

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


def _one(address: DeviceAddress, access: Access, step: Work, progress: Progress, log: Log) -> RolloutResult:
    start = time.monotonic()
    name = str(address)
    try:
        log.add(name, "begun")
        with remote.connected(address, access) as session:
            outcome = step(session, lambda text: progress(f"{address}: {text}"))
        done = {"result": outcome.result, "before": outcome.before, "after": outcome.after}
        log.add(name, "done", **done, sent_bytes=outcome.sent_bytes)
    except CorallineError as error:
        with suppress(StoreError):
            log.add(name, "failed", error=str(error))
        return RolloutResult(address, time.monotonic() - start, None, error)
    return RolloutResult(address, time.monotonic() - start, outcome, None)


def table(rows: Sequence[RolloutResult]) -> str:
    """Return a table: device, release before and after, result, seconds."""
    cells = [("device", "before", "after", "result", "seconds")]
    for row in rows:
        versions = ("-", "-", "failed")
        if row.outcome:
            versions = ((row.outcome.before or "-")[:_SHORT], row.outcome.after[:_SHORT], row.outcome.result)
        cells.append((str(row.address), *versions, f"{row.seconds:.1f}"))
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in cells
    )
