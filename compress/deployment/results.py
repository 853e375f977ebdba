"""What devices have measured, beside the run that made their bundle: `runs/NAME/devices/DEVICE.json`.

A file that comes back from a device is not trusted: it must be a result of the runner about just this bundle.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from compress.errors import DataError, PipelineError
from compress.store import explain, write_atomically
from deploy import bundle

FOLDER = "devices"
MAX_BYTES = 1 << 25
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}\Z")
_HOW = ("measured", "missing")


def take_in(path: Path, run: Path | None, device: str | None) -> Path:
    """Stores a file that a device wrote.

    Args:
        path: the file.
        run: the folder with the bundle; if not given, runs/NAME by the name in the file.
        device: its name; if not given, the name of the file.

    Raises:
        DataError: it is no result of the runner, or not about the bundle of this run.
        PipelineError: the name of the device cannot be one of a file.
        StoreError: something cannot be read or written.
    """
    found = read(path)
    if run is None:
        name = str(found["bundle"]["name"])
        if not _NAME.match(name):
            raise DataError("names no run", where=str(path), todo="--run runs/NAME")
        run = Path("runs") / name
    return store(found, run, device or path.stem)


def read(path: Path) -> dict[str, Any]:
    """A file that a device wrote, as plain values.

    Raises:
        DataError: it is no result of the runner's `bench`.
        StoreError: it cannot be read.
    """
    try:
        with path.open("rb") as stream:
            content = stream.read(MAX_BYTES + 1)
    except OSError as error:
        raise explain(error, "the results cannot be read", path) from error
    if len(content) > MAX_BYTES:
        raise DataError("is too large for results", where=str(path), allowed=f"{MAX_BYTES} bytes")
    try:
        found = json.loads(content.decode("utf-8"))
        return checked(found, str(path))
    except (ValueError, RecursionError) as error:
        raise DataError(f"is no JSON: {error}", where=str(path), todo="runner.pyz bench --out results.json") from error


def checked(found: Any, where: str) -> dict[str, Any]:
    """A result of `bench`, if it is one.

    Raises:
        DataError: it is none.
    """
    todo = "runner.pyz bench BUNDLE --out results.json"
    if not isinstance(found, dict) or found.get("schema_version") != 1 or found.get("verb") != "bench":
        raise DataError("is no result of `runner.pyz bench` of schema 1", where=where, todo=todo)
    about, measured = found.get("bundle"), found.get("benchmark")
    if not isinstance(about, dict) or not isinstance(about.get("models"), dict) or not isinstance(measured, dict):
        raise DataError("does not say what was measured", where=where, todo=todo)
    parts = [measured.get(name) for name in ("model", "host", "steady")]
    if not all(isinstance(part, dict) for part in parts) or not isinstance(measured.get("doubts"), list):
        raise DataError("has no complete benchmark", where=where, todo=todo)
    for name, value in measured["steady"].items():
        if not _is_measurement(value):
            raise DataError(f"benchmark.steady.{name} is no measurement", where=where, todo=todo)
    return found


def _is_measurement(value: Any) -> bool:
    if not isinstance(value, Mapping) or value.get("how") not in _HOW:
        return False
    numbers = [value.get(name) for name in ("value", "low", "high")]
    sound = all(each is None or (type(each) in (int, float) and math.isfinite(each)) for each in numbers)
    texts = all(isinstance(value.get(name), str) for name in ("unit", "note"))
    return sound and texts and (value.get("value") is None) == (value["how"] == "missing")


def store(found: Mapping[str, Any], run: Path, device: str) -> Path:
    """Writes a result beside the bundle that it is about.

    Raises:
        DataError: it is about another bundle, or there is none.
        PipelineError: the device's name cannot be one of a file.
        StoreError: it cannot be written.
    """
    if not _NAME.match(device):
        raise PipelineError(f"{device!r} is no name for a device", allowed="letters, digits, '.', '_' and '-'")
    known = [_models(path) for path in sorted(run.glob("*.coralline"))]
    if found["bundle"]["models"] not in known:
        what = f"is about models that no bundle in {run} has" if known else f"there is no bundle in {run}"
        raise DataError(what, where=device, todo="--run DIR with the bundle that was measured")
    path = run / FOLDER / f"{device}.json"
    try:
        path.parent.mkdir(exist_ok=True)
        write_atomically(path, json.dumps(found, indent=1, sort_keys=True).encode() + b"\n")
    except OSError as error:
        raise explain(error, "the results cannot be stored", path) from error
    return path


def _models(path: Path) -> dict[str, str] | None:
    """The models of a bundle, role to SHA-256; None for what is no bundle."""
    try:
        manifest = bundle.Bundle(path.read_bytes()).manifest
    except (OSError, bundle.BundleError):
        return None
    digests = {row["name"]: row["sha256"] for row in manifest["members"]}
    return {role: digests[entry["file"]] for role, entry in manifest["models"].items()}
