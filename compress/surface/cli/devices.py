"""Commands for devices: deploy, rollback, status, results, doctor."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from compress.core.errors import DeploymentError, PipelineError
from compress.surface.cli.output import note, show, write
from compress.surface.cli.parser import add_command

if TYPE_CHECKING:
    from compress.surface.cli.parser import Parser, Subparsers
    from compress.surface.fleet.address import DeviceAddress
    from compress.surface.fleet.remote import Access
    from compress.surface.fleet.repository import Contents
    from compress.surface.fleet.rollout import RolloutResult, Work


def add_parsers(subparsers: Subparsers) -> None:
    """Add the commands."""
    _add_deploy(subparsers)
    _add_fleet(add_command(subparsers, "rollback", "Switch devices to the previous version", rollback))
    _add_addresses(add_command(subparsers, "status", "Ask devices which version they run", status))
    _add_results(subparsers)
    _add_doctor(subparsers)


def _add_deploy(subparsers: Subparsers) -> None:
    parser = add_command(subparsers, "deploy", "Copy a bundle to devices and switch to it", deploy)
    parser.add_argument("bundle", type=Path, help="a .coralline file")
    _add_fleet(parser)
    verify = "verify again after the switch; the bundle is always verified before it"
    parser.add_argument("--verify", action="store_true", help=verify)
    bench = "measure on the device; the results are written to devices/ next to the bundle"
    parser.add_argument("--bench", action="store_true", help=bench)
    parser.add_argument(
        "--keep",
        type=int,
        default=3,
        metavar="N",
        help="number of versions to keep on a device (default: 3)",
    )


def _add_results(subparsers: Subparsers) -> None:
    summary = "Add a device's measurements to the report of a run"
    parser = add_command(subparsers, "results", summary, store_results)
    parser.add_argument("file", type=Path, help="the file written by `runner.pyz bench --out FILE`")
    parser.add_argument(
        "--run",
        type=Path,
        metavar="DIR",
        dest="folder",
        help="the folder of the run that created the bundle (default: runs/NAME)",
    )
    parser.add_argument("--name", metavar="DEVICE", help="the name of the device (default: the name of the file)")
    parser.add_json()


def _add_doctor(subparsers: Subparsers) -> None:
    summary = "Find what is wrong with a Coral host, and how to fix it"
    parser = add_command(subparsers, "doctor", summary, doctor)
    parser.add_argument(
        "--to",
        metavar="ssh://[USER@]HOST[:PORT][/FOLDER]",
        help="another host, over OpenSSH (default: this host)",
    )
    parser.add_argument(
        "--python",
        default="python3",
        metavar="PROGRAM",
        help="the Python interpreter on that host (default: python3)",
    )
    parser.add_json()


def _add_fleet(parser: Parser) -> None:
    _add_addresses(parser)
    parser.add_argument("--device", default="", help="the processor for the runner: cpu, usb, pci, usb:0, ...")
    repository = "a repository of `trust`: the device accepts its signed metadata first"
    parser.add_argument("--repository", type=Path, metavar="DIR", help=repository)
    first = "first contact: the fingerprint of the root that the devices will trust, from `trust status`"
    parser.add_argument("--first-root", default="", metavar="SHA256", help=first)
    log = "the log of deployments (default: ~/.local/state/coralline/deployments.jsonl)"
    parser.add_argument("--log", type=Path, metavar="FILE", help=log)


def _add_addresses(parser: Parser) -> None:
    where = "ssh://[user@]host[:port]/path, file:///path or a folder; repeatable"
    parser.add_argument("--to", action="append", default=[], metavar="ADDRESS", help=where)
    parser.add_argument("--hosts", type=Path, metavar="FILE", help="addresses, one per line; # begins a comment")
    parser.add_argument("--jobs", type=int, default=4, metavar="N", help="number of devices at a time (default: 4)")
    python = "the Python interpreter on the device (default: python3), or a path such as '~/venv/bin/python3'"
    parser.add_argument("--python", default="python3", metavar="PROGRAM", help=python)
    parser.add_argument(
        "--identity",
        type=Path,
        metavar="FILE",
        help="the private key for the login (default: OpenSSH's)",
    )
    parser.add_argument(
        "--known-hosts",
        type=Path,
        metavar="FILE",
        help="the file of host keys (default: the user's known_hosts)",
    )
    parser.add_json()


def deploy(options: argparse.Namespace) -> int:
    """`python -m compress deploy`.

    Raises:
        CorallineError: nothing was changed: the bundle or the arguments cannot be used.
    """
    from compress.surface.fleet import release, rollout

    addresses = _addresses(options)
    if options.bench and any(address.host is None for address in addresses):
        hint = "deploy, and then see README.txt there"
        raise PipelineError("--bench: a folder has no device to measure on", hint=hint)
    if options.keep < 1:
        raise PipelineError("--keep keeps at least the version that runs", allowed="1 or more")
    contents, runner = _repository(options)
    payload = release.load(options.bundle, runner)
    if contents is not None:
        release.require_listed(payload, contents)
    person = rollout.person()
    settings = release.ReleaseOptions(
        options.keep,
        options.verify,
        options.bench,
        options.device,
        person,
        contents.messages() if contents else {},
        options.first_root,
    )
    step = partial(rollout.deploy, new_release=payload, settings=settings, folder=options.bundle.absolute().parent)
    about = {
        "action": "deploy",
        "bundle": payload.files["bundle.coralline"]["sha256"],
        "name": payload.title,
        "release": payload.name,
        "by": person,
    }
    return _print_rows(_roll_out(options, addresses, step, about), as_json=options.json)


def rollback(options: argparse.Namespace) -> int:
    """`python -m compress rollback`.

    Raises:
        CorallineError: nothing was changed: the arguments cannot be used.
    """
    from compress.surface.fleet import release, rollout

    person = rollout.person()
    contents, _ = _repository(options)
    settings = release.ReleaseOptions(
        device=options.device,
        by=person,
        metadata=contents.messages() if contents else {},
        first_root=options.first_root,
    )
    rows = _roll_out(
        options,
        _addresses(options),
        lambda session, progress: release.rollback(session, settings, progress),
        {"action": "rollback", "by": person},
    )
    return _print_rows(rows, as_json=options.json)


def status(options: argparse.Namespace) -> int:
    """`python -m compress status`.

    Raises:
        PipelineError: the arguments cannot be used.
    """
    from compress.surface.fleet import release, rollout

    rows = rollout.work(
        _addresses(options), _access(options), lambda session, _: release.status(session), options.jobs, note, None
    )
    errors = [str(row.error) for row in rows if row.error is not None]
    text = "\n".join([rollout.status_table(rows), *errors])
    show({"schema_version": 1, "devices": [row.to_json() for row in rows]}, text, as_json=options.json)
    return 0 if all(row.result in ("sound", "nothing deployed") for row in rows) else DeploymentError.exit_code


def _repository(options: argparse.Namespace) -> tuple[Contents | None, bytes | None]:
    """Return the repository whose metadata is sent to the devices, and its runner."""
    if options.repository is None:
        if options.first_root:
            raise PipelineError("--first-root needs the repository of this root", hint="--repository DIR")
        return None, None
    from compress.surface.fleet import repository

    return repository.published(options.repository)


def store_results(options: argparse.Namespace) -> int:
    """`python -m compress results`.

    Raises:
        CorallineError: the file cannot be used; nothing was stored.
    """
    from compress.surface.fleet import results

    path = results.take_in(options.file, options.folder, options.name)
    show({"schema_version": 1, "stored": str(path)}, f"stored as {path}", as_json=options.json)
    return 0


def doctor(options: argparse.Namespace) -> int:
    """`python -m compress doctor`."""
    from compress.surface.fleet import doctor

    text, code = doctor.examine(options.to, options.python, as_json=options.json)
    write(text)
    return code


def _addresses(options: argparse.Namespace) -> list[DeviceAddress]:
    from compress.surface.fleet.address import distinct, parse, read_addresses

    if options.jobs < 1:
        raise PipelineError("--jobs 0 does nothing", allowed="1 or more")
    addresses = [parse(text) for text in options.to]
    if options.hosts:
        addresses += read_addresses(options.hosts)
    return distinct(addresses)


def _roll_out(
    options: argparse.Namespace, addresses: Sequence[DeviceAddress], step: Work, about: Mapping[str, str]
) -> list[RolloutResult]:
    from compress.surface.fleet import rollout

    deployments = rollout.Log(options.log or rollout.default_log(), about)
    return rollout.work(addresses, _access(options), step, options.jobs, note, deployments)


def _access(options: argparse.Namespace) -> Access:
    from compress.surface.fleet.remote import Access

    return Access(options.python, options.known_hosts, options.identity)


def _print_rows(rows: Sequence[RolloutResult], *, as_json: bool) -> int:
    """Print what became of each device, and return the exit code."""
    from compress.surface.fleet import rollout

    errors = [row.error for row in rows if row.error is not None]
    if len(rows) == 1 and errors:
        raise errors[0]
    devices = [row.to_json() for row in rows]
    text = "\n".join([rollout.table(rows), *(str(error) for error in errors)])
    show({"schema_version": 1, "devices": devices, "failed": len(errors)}, text, as_json=as_json)
    return DeploymentError.exit_code if errors else 0
