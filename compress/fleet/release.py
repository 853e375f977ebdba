"""One deployment, step by step: what a bundle and runner.pyz are made of, and the order in which a device gets them."""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import struct
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from compress.errors import DeploymentError, ModelError
from compress.export import runner_pyz
from compress.files import explain
from compress.fleet import instructions
from compress.fleet.remote import AgentSession
from deploy.contract import bundle, releases

MIN_PIECE_BYTES = 4096
VERIFY_TIMEOUT_S, BENCH_TIMEOUT_S = 900.0, 7200.0
Told = Callable[[str], None]


@dataclass(frozen=True)
class Release:
    """A bundle and the runner it goes out with.

    Attributes:
        name: of the release, on every device: a digest of both files.
        title: the name in the bundle's manifest.
        files: name on the device: SHA-256, and its pieces (SHA-256, size) in order.
        contents: what the pieces hold, by SHA-256.
    """

    name: str
    title: str
    files: dict[str, Any]
    contents: dict[str, bytes]


def load(path: Path) -> Release:
    """The release of a bundle.

    Raises:
        ModelError: it is no bundle that verifies.
        StoreError: it cannot be read.
    """
    try:
        content = path.read_bytes()
        manifest = bundle.Bundle(content).manifest
    except OSError as error:
        raise explain(error, "the bundle cannot be read", path) from error
    except bundle.BundleError as error:
        raise ModelError(f"is not deployed: {error}", where=str(path), todo="run the pipeline again") from error
    files: dict[str, Any] = {}
    contents: dict[str, bytes] = {}
    for file, whole in ((releases.BUNDLE, content), (releases.RUNNER, runner_pyz.content())):
        parts = pieces(whole)
        named = [(_sha256(part), part) for part in parts]
        files[file] = {"sha256": _sha256(whole), "pieces": [(digest, len(part)) for digest, part in named]}
        contents |= dict(named)
    name = releases.release_name(files[releases.BUNDLE]["sha256"], files[releases.RUNNER]["sha256"])
    return Release(name, manifest["name"], files, contents)


def pieces(content: bytes) -> list[bytes]:
    """An archive cut at the ends of its larger members.

    Members are stored as they are, so an unchanged one is an unchanged piece, which a device that has it in another
    release takes from there: of a bundle with a new int8 model, neither the float original nor the samples are sent.
    What lies between, headers and small members, is a piece too.
    """
    cuts = {0, len(content)}
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        for info in archive.infolist():
            if info.file_size >= MIN_PIECE_BYTES and info.compress_type == zipfile.ZIP_STORED:
                name, extra = struct.unpack_from("<HH", content, info.header_offset + 26)
                start = info.header_offset + 30 + name + extra
                cuts |= {start, start + info.file_size}
    return [content[start:end] for start, end in itertools.pairwise(sorted(cuts))]


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@dataclass(frozen=True)
class ReleaseOptions:
    """What is done beside putting a release there.

    Attributes:
        keep: how many releases stay on a device.
        verify: verifies once more after the switch, through the link.
        bench: measures there.
        device: what the runner takes as `--device`.
        by: who deploys, for the device's own history.
    """

    keep: int = 3
    verify: bool = False
    bench: bool = False
    device: str = ""
    by: str = ""


@dataclass(frozen=True)
class ReleaseResult:
    """What one device runs now, and what it ran before.

    Attributes:
        result: `deployed`, `unchanged` or `rolled back`.
        before: the release that ran; None: nothing did.
        after: the release that runs.
        sent_bytes: how much had to be sent.
        python: the version of the device's Python.
        results: what the runner there said, by verb.
        removed: releases that were removed.
    """

    result: str
    before: str | None
    after: str
    sent_bytes: int = 0
    python: str = ""
    results: dict[str, Any] = field(default_factory=dict)
    removed: tuple[str, ...] = ()


def deploy(session: AgentSession, release: Release, options: ReleaseOptions, told: Told) -> ReleaseResult:
    """Brings a release to a device: sent, verified there beside the old one, and only then switched to.

    Raises:
        DeploymentError: something failed, and the device runs what it ran before; the message says so where it
            does not.
    """
    state = session.ask("open", path=session.address.path, by=options.by, create=True)
    removed = session.ask("prune", keep=options.keep)  # what deployments left that were cut behind the switch
    before, new = state["current"], release.name not in state["releases"] or release.name in removed
    sent = send(session, release, told)
    told("verifying there")
    results = {}
    try:
        results["verify"] = _run(session, release.name, "verify", options, VERIFY_TIMEOUT_S)
        _write_texts(session, state, release.name, results["verify"], options)
    except DeploymentError:
        if new:
            with suppress(DeploymentError):  # the connection may be what failed
                session.ask("discard", release=release.name)
        raise
    if before != release.name:
        session.ask("switch", release=release.name)
        told("switched")
    results |= _after(session, release.name, before, options, told)
    with _new_runs():
        removed += session.ask("prune", keep=options.keep)
    result = "unchanged" if before == release.name else "deployed"
    return ReleaseResult(result, before, release.name, sent, state["python"], results, tuple(removed))


def _write_texts(
    session: AgentSession, state: dict[str, Any], release: str, verified: dict[str, Any], options: ReleaseOptions
) -> None:
    """Writes how to run a release beside it: README.txt, and on a device its runner's unit for systemd."""
    title = str(verified["bundle"]["name"])
    session.ask("write", name="README.txt", text=instructions.readme(state, session.address, release, title))
    if session.address.host is not None:
        unit = str(_run(session, release, "serve --print-unit", options, VERIFY_TIMEOUT_S)["unit"])
        session.ask("write", name="coralline.service", text=unit.replace(f"/releases/{release}/", "/current/"))


def send(session: AgentSession, release: Release, told: Told) -> int:
    """Sends what the device lacks, and has it put together there; gives the number of bytes sent."""
    sizes = {digest: len(content) for digest, content in release.contents.items()}
    total = sum(size for entry in release.files.values() for _, size in entry["pieces"])
    sent = 0
    for _ in range(2):  # what was damaged on the way is sent once more
        asked = session.ask("want", release=release.name, pieces=sizes, total=total)
        if asked["whole"]:
            return sent
        rest = sum(sizes[digest] - there for digest, there in asked["missing"].items())
        told(f"sending {rest:,} of {total:,} bytes")
        sent += rest
        lacking = asked["missing"].items()
        if all(session.put((digest, there, release.contents[digest]) for digest, there in lacking)):
            break
    session.ask("install", release=release.name, files=release.files)
    return sent


def _after(
    session: AgentSession, release: str, before: str | None, options: ReleaseOptions, told: Told
) -> dict[str, Any]:
    """What was asked for beside the deployment, done with what now runs."""
    results = {}
    if options.verify:
        told("verifying what runs")
        try:
            results["verify"] = _run(session, None, "verify", options, VERIFY_TIMEOUT_S)
        except DeploymentError as error:
            if before not in (None, release):
                session.ask("switch", release=before)
                raise DeploymentError(f"{error.what}; switched back", where=error.where, todo=error.todo) from error
            raise
    if options.bench:
        told("measuring there")
        with _new_runs():
            results["bench"] = _run(session, None, "bench", options, BENCH_TIMEOUT_S)
    return results


@contextmanager
def _new_runs() -> Iterator[None]:
    """What fails here fails after the switch, and is told so."""
    try:
        yield
    except DeploymentError as error:
        raise DeploymentError(f"the new version runs, but: {error.what}", where=error.where, todo=error.todo) from error


def rollback(session: AgentSession, options: ReleaseOptions, told: Told) -> ReleaseResult:
    """Switches to the release that ran before, after verifying it; twice gives the first one again.

    Raises:
        DeploymentError: there is none, or it does not verify; what runs is what ran.
    """
    state = session.ask("open", path=session.address.path, by=options.by, create=False)
    before, after = state["current"], state["previous"]
    if after is None:
        raise DeploymentError("has no version before this one", where=str(session.address), todo="deploy one")
    told("verifying there")
    results = {"verify": _run(session, after, "verify", options, VERIFY_TIMEOUT_S)}
    _write_texts(session, state, after, results["verify"], options)
    session.ask("switch", release=after)
    told("switched")
    results |= _after(session, after, before, options, told)
    return ReleaseResult("rolled back", before, after, 0, state["python"], results)


def _run(
    session: AgentSession, release: str | None, verb: str, options: ReleaseOptions, timeout_s: float
) -> dict[str, Any]:
    """What a verb of the runner (with its arguments) answers; without a release, of what the link leads to.

    Raises:
        DeploymentError: it failed.
    """
    command = [*verb.split(), *(("--device", options.device) if options.device else ())]
    found = session.ask("run", release=release, command=command, timeout_s=timeout_s)
    where, said = str(session.address), found["errors"].strip().splitlines() or ["no message"]
    if found["exit_code"] == 0:
        try:
            return dict(json.loads(found["output"]))
        except ValueError as error:
            raise DeploymentError(f"`{verb}` there gave no result", where=where) from error
    if "No module named 'numpy'" in found["errors"]:
        todo = f"there: {instructions.INSTALL}; where pip refuses, in a venv, and here --python '~/VENV/bin/python3'"
        raise DeploymentError("its Python has no numpy", where=where, todo=todo)
    if found["exit_code"] < 0:
        raise DeploymentError(f"`{verb}` there was killed by signal {-found['exit_code']}", where=where)
    told = said[-1].removeprefix("runner: ")
    raise DeploymentError(f"`{verb}` failed there (exit code {found['exit_code']}): {told}", where=where)
