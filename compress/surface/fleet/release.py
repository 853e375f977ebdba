"""The steps of one deployment: splitting a bundle and its runner into pieces, sending, verifying and switching."""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import re
import shlex
import struct
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compress.bundling import runner_pyz
from compress.core.errors import DeploymentError, ModelError, NotUsableError, PipelineError, SigningError
from compress.core.files import explain
from compress.results.run import REPORT_FILE, read_record
from compress.surface.fleet.address import DeviceAddress
from compress.surface.fleet.remote import AgentSession, StepRefusedError
from deploy.contract import bundle, releases
from deploy.contract.errors import INSTALL

if TYPE_CHECKING:
    from compress.surface.fleet.repository import Contents

MIN_PIECE_BYTES = 4096
"""Chosen: a smaller member is not worth the request for it, of about 120 bytes, and the file on the device."""
VERIFY_TIMEOUT_S, BENCH_TIMEOUT_S = 900.0, 7200.0
"""Chosen: a device that takes longer is taken for one that hangs."""
_README = """\
{title}, deployed by `python -m compress deploy`.

It needs Python 3.7 or newer with numpy and a TFLite runtime. To install them:
  {install}

In this folder, on the board:
  {python} {current}/runner.pyz verify {current}/bundle.coralline
  {python} {current}/runner.pyz bench {current}/bundle.coralline --out results.json

Copy results.json to the computer that packed the bundle, and run there:
  python -m compress results results.json --run runs/{title} --name NAME-OF-THE-BOARD
"""
_SERVICE = """
To run it as a service, run this once, and again after each deployment or rollback:
  sudo cp coralline.service /etc/systemd/system/ && sudo systemctl daemon-reload
  sudo systemctl enable coralline && sudo systemctl restart coralline
"""
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Release:
    """A bundle and the runner that is deployed with it.

    Attributes:
        name: the name of the release on every device: a digest of both files.
        title: the name in the bundle's manifest.
        files: by file name, its SHA-256 and its pieces (SHA-256, size) in order.
        contents: the bytes of each piece, by SHA-256.
    """

    name: str
    title: str
    files: dict[str, Any]
    contents: dict[str, bytes]


def load(path: Path, runner: bytes | None = None) -> Release:
    """Return the release of a bundle with a runner; None: that of this Coralline.

    Raises:
        ModelError: the verification of the bundle failed.
        NotUsableError: the report next to the bundle says that its model cannot be used.
        StoreError: the bundle cannot be read.
    """
    try:
        content = path.read_bytes()
        manifest = bundle.Bundle(content).manifest
    except OSError as error:
        raise explain(error, "the bundle cannot be read", path) from error
    except bundle.BundleError as error:
        raise ModelError(f"is not deployed: {error}", where=str(path), hint="run the pipeline again") from error
    _refuse_not_usable(path, _sha256(content))
    files: dict[str, Any] = {}
    contents: dict[str, bytes] = {}
    for file, archive in ((releases.BUNDLE, content), (releases.RUNNER, runner or runner_pyz.content())):
        parts = pieces(archive)
        named = [(_sha256(part), part) for part in parts]
        files[file] = {"sha256": _sha256(archive), "pieces": [(digest, len(part)) for digest, part in named]}
        contents |= dict(named)
    name = releases.release_name(files[releases.BUNDLE]["sha256"], files[releases.RUNNER]["sha256"])
    return Release(name, manifest["name"], files, contents)


def _refuse_not_usable(path: Path, digest: str) -> None:
    """Refuse the bundle of a run whose result cannot be used. A bundle without the report of its run is not judged.

    Raises:
        NotUsableError: the report next to the bundle says so.
    """
    try:
        record = read_record(path.with_name(REPORT_FILE))
    except PipelineError:
        return  # no report, or that of another program
    output = record.outputs.get(path.name)
    if record.status != "not usable" or output is None or output.sha256 != digest or record.verdict is None:
        return
    raise NotUsableError(
        f"the bundle is not usable: {record.verdict.reasons[0]}",
        where=str(path),
        hint="correct the cause, and run the pipeline again; a copy in a folder without the report can be deployed",
    )


def require_listed(release: Release, contents: Contents) -> None:
    """Check that a repository lists the bundle of a release, before any device is asked.

    Raises:
        SigningError: it does not.
    """
    digest = release.files[releases.BUNDLE]["sha256"]
    if digest not in {info.hashes.get("sha256") for info in contents.targets.values()}:
        what = f"{release.title}: the bundle is not in the signed targets metadata of the repository"
        raise SigningError(what, hint="python -m compress trust add REPOSITORY BUNDLE --keys FOLDER")


def pieces(content: bytes) -> list[bytes]:
    """Split an archive at the boundaries of its larger members.

    Members are stored without compression, so an unchanged member is an unchanged piece, and a device that has it in
    another release copies it from there. If only the int8 model is new, neither the float original nor the samples are
    sent. Headers and small members between them are pieces too.
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
    """The options of a deployment.

    Attributes:
        keep: the number of releases that stay on a device.
        verify: whether to verify the release again after the switch.
        bench: whether to run the benchmark on the device.
        device: the runner's `--device`.
        by: the person who deploys, for the history on the device.
        metadata: signed metadata that the device shall accept first, by file name; empty: none.
        first_root: the fingerprint of the root for a device that trusts no root yet.
    """

    keep: int = 3
    verify: bool = False
    bench: bool = False
    device: str = ""
    by: str = ""
    metadata: Mapping[str, str] = field(default_factory=dict)
    first_root: str = ""


@dataclass(frozen=True)
class Status:
    """The release that a device runs.

    Attributes:
        current: the current release; None: there is none.
        previous: the release before, if it is still there.
        name: the name in the manifest of the bundle.
        time: when it became the current release, UTC.
        by: who deployed it.
        whole: whether the checksums of its files are correct.
        python: the version of the device's Python.
    """

    current: str | None
    previous: str | None = None
    name: str | None = None
    time: str | None = None
    by: str | None = None
    whole: bool = False
    python: str = ""


def status(session: AgentSession) -> Status:
    """Ask a device what it runs, and change nothing.

    Raises:
        DeploymentError: the device does not answer, or its folder cannot be read.
    """
    try:
        answer = session.ask("look", path=session.address.path)
    except StepRefusedError as error:
        if error.kind == "absent":
            return Status(None)
        raise
    return Status(**{name: answer[name] for name in ("current", "previous", "name", "time", "by", "whole", "python")})


@dataclass(frozen=True)
class ReleaseResult:
    """The result of a deployment to one device.

    Attributes:
        result: `deployed`, `unchanged` or `rolled back`.
        before: the previous current release; None: there was none.
        after: the current release.
        sent_bytes: the number of bytes sent.
        python: the version of the device's Python.
        results: the results of the runner on the device, by command.
        removed: the releases that were removed.
    """

    result: str
    before: str | None
    after: str
    sent_bytes: int = 0
    python: str = ""
    results: dict[str, Any] = field(default_factory=dict)
    removed: tuple[str, ...] = ()


def deploy(session: AgentSession, release: Release, options: ReleaseOptions, progress: Progress) -> ReleaseResult:
    """Deploy a release to a device: send it, verify it there, and then switch to it.

    Raises:
        DeploymentError: a step failed. The device runs its previous release; otherwise the message says so.
    """
    state = session.ask("open", path=session.address.path, by=options.by, create=True)
    _update_trust(session, options, progress)
    removed = session.ask("prune", keep=options.keep)  # interrupted deployments may have left releases
    before, new = state["current"], release.name not in state["releases"] or release.name in removed
    sent = send(session, release, progress)
    progress("verifying on the device")
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
        progress("switched to the release")
    results |= _after(session, release.name, before, options, progress)
    with _new_runs():
        removed += session.ask("prune", keep=options.keep)
    result = "unchanged" if before == release.name else "deployed"
    return ReleaseResult(result, before, release.name, sent, state["python"], results, tuple(removed))


def _update_trust(session: AgentSession, options: ReleaseOptions, progress: Progress) -> None:
    """Let the device accept signed metadata, after its own rules."""
    if options.metadata:
        trusted = session.ask("trust", metadata=dict(options.metadata), first_root=options.first_root)
        first = "; it trusts this root from now on" if trusted["first_contact"] else ""
        progress(f"accepted targets metadata version {trusted['roles']['targets']['version']}{first}")


def _write_texts(
    session: AgentSession, state: dict[str, Any], release: str, verified: dict[str, Any], options: ReleaseOptions
) -> None:
    """Write README.txt into the folder of the releases, and on a device the systemd unit of its runner."""
    title = str(verified["bundle"]["name"])
    session.ask("write", name="README.txt", text=_readme(state, session.address, release, title))
    if session.address.host is not None:
        unit = str(_run(session, release, "serve --print-unit", options, VERIFY_TIMEOUT_S)["unit"])
        session.ask("write", name="coralline.service", text=unit.replace(f"/releases/{release}/", "/current/"))


def _readme(state: Mapping[str, Any], address: DeviceAddress, release: str, title: str) -> str:
    """Return the text of README.txt in the folder of the releases: how to run a release by hand and with systemd.

    A device has a systemd unit; a local folder, such as a card without symbolic links, has none.
    """
    title = "".join(letter if letter.isalnum() or letter in "._-" else "_" for letter in title)[:80]
    if address.host is None:
        return _README.format(title=title, install=INSTALL, python="python3", current=f"releases/{release}")
    python = shlex.quote(state["program"])
    return _README.format(title=title, install=INSTALL, python=python, current="current") + _SERVICE


def send(session: AgentSession, release: Release, progress: Progress) -> int:
    """Send the missing pieces, and install the release on the device; return the number of bytes sent."""
    sizes = {digest: len(content) for digest, content in release.contents.items()}
    total = sum(size for entry in release.files.values() for _, size in entry["pieces"])
    sent = 0
    for _ in range(2):  # pieces that were damaged during the transfer are sent once more
        reply = session.ask("want", release=release.name, pieces=sizes, total=total)
        if reply["whole"]:
            return sent
        missing = reply["missing"].items()
        rest = sum(sizes[digest] - offset for digest, offset in missing)
        progress(f"sending {rest:,} of {total:,} bytes")
        sent += rest
        if all(session.put((digest, offset, release.contents[digest]) for digest, offset in missing)):
            break
    session.ask("install", release=release.name, files=release.files)
    return sent


def _after(
    session: AgentSession, release: str, before: str | None, options: ReleaseOptions, progress: Progress
) -> dict[str, Any]:
    """Run the optional steps with the current release; return their results."""
    results = {}
    if options.verify:
        progress("verifying the current release on the device")
        try:
            results["verify"] = _run(session, None, "verify", options, VERIFY_TIMEOUT_S)
        except DeploymentError as error:
            if before not in (None, release):
                session.ask("switch", release=before)
                raise DeploymentError(f"{error.what}; switched back", where=error.where, hint=error.hint) from error
            raise
    if options.bench:
        progress("measuring on the device")
        with _new_runs():
            results["bench"] = _run(session, None, "bench", options, BENCH_TIMEOUT_S)
    return results


@contextmanager
def _new_runs() -> Iterator[None]:
    """Add to the message of an error that the switch has already succeeded."""
    try:
        yield
    except DeploymentError as error:
        raise DeploymentError(f"the new release runs, but: {error.what}", where=error.where, hint=error.hint) from error


def rollback(session: AgentSession, options: ReleaseOptions, progress: Progress) -> ReleaseResult:
    """Verify the previous release and switch to it. A second rollback switches back.

    Raises:
        DeploymentError: the device has no previous release, or its verification failed. The current release stays.
    """
    state = session.ask("open", path=session.address.path, by=options.by, create=False)
    before, after = state["current"], state["previous"]
    if after is None:
        raise DeploymentError("has no previous release", where=str(session.address), hint="deploy one first")
    _update_trust(session, options, progress)
    progress("verifying on the device")
    results = {"verify": _run(session, after, "verify", options, VERIFY_TIMEOUT_S)}
    _write_texts(session, state, after, results["verify"], options)
    session.ask("switch", release=after)
    progress("switched to the release")
    results |= _after(session, after, before, options, progress)
    return ReleaseResult("rolled back", before, after, 0, state["python"], results)


def _run(
    session: AgentSession, release: str | None, verb: str, options: ReleaseOptions, timeout_s: float
) -> dict[str, Any]:
    """Run a command of the runner (with its arguments) on the device; None: the runner of the current release.

    Raises:
        DeploymentError: the command failed.
    """
    command = [*verb.split(), *(("--device", options.device) if options.device else ())]
    completed = session.ask("run", release=release, command=command, timeout_s=timeout_s)
    where = str(session.address)
    stderr = completed["errors"].strip().splitlines() or ["no message"]
    if completed["exit_code"] == 0:
        try:
            return dict(json.loads(completed["output"]))
        except ValueError as error:
            raise DeploymentError(f"`{verb}` on the device printed no result", where=where) from error
    if "No module named 'numpy'" in completed["errors"]:
        hint = f"on the device: {INSTALL}; if pip refuses, use a venv and --python '~/VENV/bin/python3'"
        raise DeploymentError("its Python has no numpy", where=where, hint=hint)
    if completed["exit_code"] < 0:
        raise DeploymentError(f"`{verb}` on the device was killed by signal {-completed['exit_code']}", where=where)
    if match := re.match(r"\w*Error: (\[Errno \d+\] )?(.*)", stderr[-1]):  # Python could not read runner.pyz
        what = f"Python on the device cannot run runner.pyz (exit code {completed['exit_code']}): {match[2]}"
        raise DeploymentError(what, where=where, hint="check the disk of the device, and deploy again")
    message = stderr[-1].removeprefix("runner: ")
    raise DeploymentError(f"`{verb}` failed on the device (exit code {completed['exit_code']}): {message}", where=where)
