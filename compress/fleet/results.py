"""Results of devices, stored beside the run that made their bundle, and put into its report."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from threading import Lock
from typing import Any

from compress.errors import DataError, PipelineError
from compress.files import explain, write_atomically
from compress.pipeline import device_results
from compress.report import render

_writing = Lock()
"""A fleet measures in threads, and the report that is written last must have them all."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}\Z")


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
    found = device_results.read(path)
    if run is None:
        name = found["bundle"].get("name")
        if not isinstance(name, str) or not _NAME.match(name):
            raise DataError("names no run", where=str(path), todo="--run runs/NAME")
        run = Path("runs") / name
    return store(found, run, device or path.stem)


def store(found: Mapping[str, Any], run: Path, device: str) -> Path:
    """Writes a result beside the bundle that it is about, and into the report that is there.

    Raises:
        DataError: it is about another bundle, or there is none.
        PipelineError: the device's name cannot be one of a file.
        StoreError: it cannot be written.
    """
    if not _NAME.match(device):
        raise PipelineError(f"{device!r} is no name for a device", allowed="letters, digits, '.', '_' and '-'")
    device_results.checked(dict(found), device)
    bundles = sorted(run.glob("*.coralline"))
    path = run / device_results.FOLDER / f"{device}.json"
    try:
        made = [each.read_bytes() for each in bundles]
        fitting = [each for each in made if device_results.models(each) == found["bundle"]["models"]]
        if not fitting:
            what = f"is about models that no bundle in {run} has" if bundles else f"there is no bundle in {run}"
            raise DataError(what, where=device, todo="--run DIR with the bundle that was measured")
        with _writing:
            path.parent.mkdir(exist_ok=True)
            write_atomically(path, json.dumps(found, indent=1, sort_keys=True).encode() + b"\n")
            _report(run, fitting[0])
    except OSError as error:
        raise explain(error, "the results cannot be stored", path) from error
    return path


def _report(run: Path, made: bytes) -> None:
    """Writes the report of a run anew, with what devices have measured; nothing where there is no report."""
    try:
        record = json.loads((run / "report.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return
    if isinstance(record, dict) and record.get("schema_version") == 1:
        for name, content in render({**record, "devices": device_results.measured(run, made)}).items():
            write_atomically(run / name, content)
