"""The command `update`: accept signed metadata from a folder or memory card, and install a bundle that it lists."""

from __future__ import annotations

import argparse
import hashlib
import os
import time
from typing import Any, Dict, List, Tuple

from deploy.contract import releases, trust
from deploy.contract.errors import ArgumentError, DeviceError
from deploy.contract.releases import BUNDLE, RUNNER, DeviceFolder, ReleaseError
from deploy.contract.trust import TrustError, TrustFolder

VERIFY_TIMEOUT_S = 900.0
"""Chosen; the same as in `compress deploy`."""
KEEP = 3
"""The number of releases that stay in the folder."""


class UpdateError(DeviceError):
    """The folder of the releases, or its lock, cannot be used; `kind` is the kind of the `ReleaseError`."""

    exit_code = 6


def update(arguments: argparse.Namespace) -> Tuple[Dict[str, Any], str]:
    """Update what this device trusts, and install a bundle; return the result, and the same as text.

    Raises:
        ArgumentError: the options do not fit together.
        TrustError: something was refused. The current release stays.
        UpdateError: another deployment works in the folder, or a file is damaged.
    """
    if bool(arguments.install) != bool(arguments.to):
        raise ArgumentError("--install and --to belong together", "pass both, or none of them")
    try:
        return _update(arguments)
    except ReleaseError as error:
        raise UpdateError(error.what, error.hint, error.kind)


def _update(arguments: argparse.Namespace) -> Tuple[Dict[str, Any], str]:
    fetch = trust.folder_source(arguments.source)
    folder = None
    if arguments.to:
        folder = DeviceFolder(arguments.to, "runner.pyz update", True, arguments.trust_folder)
    is_new = bool(arguments.trust_folder) and not os.path.isdir(arguments.trust_folder)
    trusted = None if is_new else trust.find(arguments.trust_folder)
    if trusted is None:
        if not arguments.first_root:
            raise TrustError("this device trusts no root yet", trust.FIRST, "first_contact")
        running = folder.running() if folder else {}
        trusted = trust.first_contact(fetch, arguments.first_root, arguments.trust_folder, running)
    trusted.update(fetch)
    result: Dict[str, Any] = {"trust": trusted.describe()}
    lines = [text(result["trust"])]
    if folder is not None:
        result.update(_install(folder, trusted, arguments.source, arguments.install))
        lines.append("%s: %s, release %s" % (arguments.install, result["result"], result["release"]))
    return result, "\n".join(lines)


def text(described: Dict[str, Any]) -> str:
    """Return what a device trusts, as lines."""
    lines = ["%s:" % described["folder"]]
    for role, row in described["roles"].items():
        lines.append("  %-9s version %d, valid until %s" % (role, row["version"], row["expires"]))
    return "\n".join(lines + ["  listed: %s" % (", ".join(described["targets"]) or "nothing")])


def _install(folder: DeviceFolder, trusted: TrustFolder, source: str, name: str) -> Dict[str, Any]:
    """Install a bundle and the runner of a source as a release, verify it, and switch to it."""
    listed, consistent = trusted.listed(), trusted.root.consistent_snapshot
    contents = {BUNDLE: trust.download(source, name, listed, consistent)}
    contents[RUNNER] = trust.download(source, RUNNER, listed, consistent)
    files: Dict[str, Any] = {}
    pieces: Dict[str, bytes] = {}
    for file, content in contents.items():
        digest = hashlib.sha256(content).hexdigest()
        files[file] = {"sha256": digest, "pieces": [(digest, len(content))]}
        pieces[digest] = content
    release = releases.release_name(files[BUNDLE]["sha256"], files[RUNNER]["sha256"])
    before = folder.current()
    if not folder.whole(release):
        sizes = {digest: len(content) for digest, content in pieces.items()}
        for digest, offset in folder.missing(sizes, sum(sizes.values())).items():
            folder.put(digest, offset, sizes[digest], iter([pieces[digest][offset:]]))
        folder.install(release, files)
    verified = folder.run(release, ["verify"], VERIFY_TIMEOUT_S, time.sleep)
    if verified["exit_code"]:
        message: List[str] = verified["errors"].strip().splitlines() or ["no message"]
        if release != before:
            folder.discard(release)
        raise ReleaseError("damaged", "`verify` failed: %s" % message[-1], "package the bundle again")
    if release != before:
        folder.switch(release)
    folder.prune(KEEP)
    return {"result": "unchanged" if release == before else "installed", "release": release, "before": before}
