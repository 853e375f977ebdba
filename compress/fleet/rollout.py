"""Many devices at a time: each on its own, a row of a table for each, and two lines of the log."""

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
from compress.fleet.release import ReleaseResult, Told
from compress.fleet.remote import Access, AgentSession

Work = Callable[[AgentSession, Told], ReleaseResult]
_SHORT = 12


@dataclass(frozen=True)
class RolloutResult:
    """What became of one device.

    Attributes:
        address: which.
        seconds: how long it took.
        outcome: what it runs now; None: it failed.
        error: why it failed.
    """

    address: DeviceAddress
    seconds: float
    outcome: ReleaseResult | None
    error: CorallineError | None

    def to_json(self) -> dict[str, Any]:
        """As a plain map."""
        row: dict[str, Any] = {"address": str(self.address), "seconds": round(self.seconds, 3), "result": "failed"}
        if self.outcome is None:
            return {**row, "error": str(self.error)}
        return {**row, **vars(self.outcome)}


def deploy(
    session: AgentSession, told: Told, made: release.Release, settings: release.ReleaseOptions, folder: Path
) -> release.ReleaseResult:
    """Deploy a release to one device, and store the measurements that were made there in `folder`.

    Raises:
        CorallineError: a step failed.
    """
    outcome = release.deploy(session, made, settings, told)
    if "bench" in outcome.results:
        told(f"results: {results.store(outcome.results['bench'], folder, session.address.name)}")
    return outcome


def rollback(session: AgentSession, told: Told, settings: release.ReleaseOptions) -> release.ReleaseResult:
    """Switch one device to the version that ran before.

    Raises:
        CorallineError: a step failed.
    """
    return release.rollback(session, settings, told)


def work(
    addresses: Sequence[DeviceAddress],
    access: Access,
    step: Work,
    jobs: int,
    told: Told,
    log: Log,
) -> list[RolloutResult]:
    """Does the same on every device, some at a time. An interruption cuts every connection.

    Args:
        addresses: the devices.
        access: how they are reached.
        step: what to do with each.
        jobs: how many at a time.
        told: is told what is being done.
        log: gets a line before and one after each.

    Returns:
        A row for each, in the order of the addresses.
    """
    with ThreadPoolExecutor(max_workers=jobs) as pool:
        try:
            return list(pool.map(lambda address: _one(address, access, step, told, log), addresses))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            remote.cut_all()
            raise


def _one(address: DeviceAddress, access: Access, step: Work, told: Told, log: Log) -> RolloutResult:
    began, place = time.monotonic(), str(address)
    try:
        log.add(place, "begun")
        with remote.connected(address, access) as session:
            outcome = step(session, lambda text: told(f"{address}: {text}"))
        done = {"result": outcome.result, "before": outcome.before, "after": outcome.after}
        log.add(place, "done", **done, sent_bytes=outcome.sent_bytes)
    except CorallineError as error:
        with suppress(StoreError):
            log.add(place, "failed", error=str(error))
        return RolloutResult(address, time.monotonic() - began, None, error)
    return RolloutResult(address, time.monotonic() - began, outcome, None)


def table(rows: Sequence[RolloutResult]) -> str:
    """For people: host, version before, after, result, seconds."""
    cells = [("device", "before", "after", "result", "seconds")]
    for row in rows:
        known = row.outcome
        before, after = ((known.before or "")[:_SHORT], known.after[:_SHORT]) if known else ("", "")
        result = known.result if known else "failed"
        cells.append((str(row.address), before or "-", after or "-", result, f"{row.seconds:.1f}"))
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in cells
    )
