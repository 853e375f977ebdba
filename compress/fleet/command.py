"""`deploy`, `rollback` and `results`: what the command line asks for, as steps for a fleet."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from compress.errors import DeploymentError, PipelineError
from compress.fleet import log, release, results, rollout
from compress.fleet.address import Address, distinct, listed, parse
from compress.fleet.release import Told
from compress.fleet.remote import Access
from compress.fleet.rollout import Row

Done = tuple[dict[str, Any], str, int]
"""The result as JSON, the same for people, and the exit code."""


def deploy(options: argparse.Namespace, told: Told) -> Done:
    """Brings a bundle to devices.

    Raises:
        CorallineError: nothing was begun: the bundle or the arguments cannot be used.
    """
    addresses = _addresses(options)
    if options.bench and any(address.host is None for address in addresses):
        todo = "deploy, and then see README.txt there"
        raise PipelineError("--bench: a folder has no device to measure on", todo=todo)
    if options.keep < 1:
        raise PipelineError("--keep keeps at least the version that runs", allowed="1 or more")
    made = release.load(options.bundle)
    by = log.person()
    wanted = release.Options(options.keep, options.verify, options.bench, options.device, by)
    step = partial(_deployed, made=made, wanted=wanted, folder=options.bundle.absolute().parent)
    about = {"action": "deploy", "bundle": made.files["bundle.coralline"]["sha256"], "name": made.title}
    return _done(_work(options, addresses, step, {**about, "release": made.name, "by": by}, told))


def _deployed(
    session: Any, told: Told, made: release.Release, wanted: release.Options, folder: Path
) -> release.Outcome:
    outcome = release.deploy(session, made, wanted, told)
    if "bench" in outcome.results:
        told(f"results: {results.store(outcome.results['bench'], folder, session.address.name)}")
    return outcome


def rollback(options: argparse.Namespace, told: Told) -> Done:
    """Switches devices to the version that ran before.

    Raises:
        CorallineError: nothing was begun: the arguments cannot be used.
    """
    by = log.person()
    step = partial(_rolled_back, wanted=release.Options(device=options.device, by=by))
    return _done(_work(options, _addresses(options), step, {"action": "rollback", "by": by}, told))


def _rolled_back(session: Any, told: Told, wanted: release.Options) -> release.Outcome:
    return release.rollback(session, wanted, told)


def take_in(options: argparse.Namespace, told: Told) -> Done:
    """Stores what a device without network has measured.

    Raises:
        CorallineError: it cannot be used; nothing was stored.
    """
    path = results.take_in(options.file, options.run, options.name)
    return {"schema_version": 1, "stored": str(path)}, f"stored as {path}", 0


def _addresses(options: argparse.Namespace) -> list[Address]:
    if options.jobs < 1:
        raise PipelineError("--jobs 0 does nothing", allowed="1 or more")
    return distinct([*map(parse, options.to), *(listed(options.hosts) if options.hosts else ())])


def _work(
    options: argparse.Namespace, addresses: Sequence[Address], step: rollout.Work, about: Mapping[str, Any], told: Told
) -> list[Row]:
    access = Access(options.python, options.known_hosts, options.identity)
    kept = log.Log(options.log or log.default_path(), about)
    return rollout.work(addresses, access, step, options.jobs, told, kept)


def _done(rows: Sequence[Row]) -> Done:
    """What a fleet's rows mean together.

    Raises:
        CorallineError: there is one device, and it failed.
    """
    failed = [row for row in rows if row.error is not None]
    if len(rows) == 1 and failed and failed[0].error is not None:
        raise failed[0].error
    result = {"schema_version": 1, "devices": [row.to_json() for row in rows], "failed": len(failed)}
    lines = [rollout.table(rows), *(f"{row.error}" for row in failed)]
    return result, "\n".join(lines), DeploymentError.exit_code if failed else 0


COMMANDS: dict[str, Callable[[argparse.Namespace, Told], Done]] = {
    "deploy": deploy,
    "rollback": rollback,
    "results": take_in,
}
