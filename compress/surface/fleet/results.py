"""Benchmark results of devices: stored in the run of their bundle, and added to its report."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import Any

from compress.core.errors import DataError, PipelineError
from compress.core.files import explain
from compress.pipeline import device_results
from compress.report import examples, render
from compress.results.run import RunRecord
from deploy.contract.durable_files import write_atomically

_writing = Lock()
"""Devices are measured in parallel; the last report must contain all results."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}\Z")


def take_in(path: Path, run: Path | None, device: str | None) -> Path:
    """Store a result file of a device in the folder of the run with its bundle.

    Without a folder, it is runs/NAME, by the name in the file. Without a name, the device is named like the file.

    Raises:
        DataError: the file is not a result of the runner, or belongs to another bundle.
        PipelineError: the name of the device is not a valid file name.
        StoreError: a file cannot be read or written.
    """
    result = device_results.read(path)
    if run is None:
        name = result["bundle"].get("name")
        if not isinstance(name, str) or not _NAME.match(name):
            raise DataError("has no valid bundle name", where=str(path), hint="--run runs/NAME")
        run = Path("runs") / name
    return store(result, run, device or path.stem)


def store(result: Mapping[str, Any], run: Path, device: str) -> Path:
    """Store a result in the run of its bundle, and add it to the report.

    Raises:
        DataError: the result belongs to another bundle, or the run has no bundle.
        PipelineError: the name of the device is not a valid file name.
        StoreError: a file cannot be written.
    """
    if not _NAME.match(device):
        raise PipelineError(f"{device!r} is not a valid device name", allowed="letters, digits, '.', '_' and '-'")
    device_results.checked(dict(result), device)
    bundles = sorted(run.glob("*.coralline"))
    path = run / device_results.FOLDER / f"{device}.json"
    try:
        contents = [bundle.read_bytes() for bundle in bundles]
        matching = [content for content in contents if device_results.models(content) == result["bundle"]["models"]]
        if not matching:
            what = f"belongs to models that no bundle in {run} has" if bundles else f"{run} has no bundle"
            raise DataError(what, where=device, hint="--run DIR with the bundle that was measured")
        with _writing:
            path.parent.mkdir(exist_ok=True)
            write_atomically(path, json.dumps(result, indent=1, sort_keys=True).encode() + b"\n")
            _report(run, matching[0])
    except OSError as error:
        raise explain(error, "the results cannot be stored", path) from error
    return path


def _report(run: Path, bundle: bytes) -> None:
    """Rewrite the report of a run, if there is one, with the results of all devices."""
    try:
        record = RunRecord.from_json(json.loads((run / "report.json").read_text(encoding="utf-8")))
    except (FileNotFoundError, ValueError, RecursionError):
        return
    devices = device_results.measured(run, bundle, record.metrics)
    pictures = examples.read(run, record)
    for name, content in render(replace(record, devices=devices), pictures).items():
        write_atomically(run / name, content)
