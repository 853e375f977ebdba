"""The measurements of devices, next to the run that created their bundle: `runs/NAME/devices/DEVICE.json`.

A file from a device is not trusted. It must be a result of the runner, its measurements must be valid, and a report
uses it only for the models that were measured.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from compress.core.errors import DataError, StoreError
from compress.core.files import explain
from compress.core.measurement import Measurement, Measurements, Metric
from compress.results.encoding import decode
from compress.results.run import DeviceRecord
from deploy.contract import bundle

FOLDER = "devices"
MAX_BYTES = 1 << 25
"""Largest results of a device, 32 MiB; chosen: `bench` writes some kilobytes, and the file comes from outside."""
HINT = "runner.pyz bench BUNDLE --out results.json"
MAX_VALUE = 1e18
"""Largest value of a measurement in any unit: an exabyte, or 30 million years in ms. NaN is refused too."""
MAX_WORD = 20
"""Longest unit or verdict in characters; longer ones would make the report's table too wide."""
_HOW = ("measured", "missing")
_STEADY = {
    "median": "latency_ms",
    "p90": "latency_p90_ms",
    "p99": "latency_p99_ms",
    "throughput": "throughput",
}
_SINGLE = {"first_inference": "first_inference_ms", "memory": "memory_bytes"}
_REQUIRED = {
    ("bundle", "models"): dict,
    ("benchmark", "model"): dict,
    ("benchmark", "host"): dict,
    ("benchmark", "steady"): dict,
    ("benchmark", "doubts"): list,
}
"""The parts that a result must have."""


def read(path: Path) -> dict[str, Any]:
    """Read a file that a device wrote.

    Raises:
        DataError: it is not a result of the runner's `bench`.
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
        content_json = json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"is not JSON: {error}", where=str(path), hint=HINT) from error
    return checked(content_json, str(path))


def checked(result: Any, where: str) -> dict[str, Any]:
    """Return a result of `bench` after checking its structure; `where` is its name in messages.

    Raises:
        DataError: it is not such a result.
    """
    if not isinstance(result, dict) or result.get("schema_version") != 1 or result.get("verb") != "bench":
        raise DataError("is not a result of `runner.pyz bench` of schema 1", where=where, hint=HINT)
    for path, kind in _REQUIRED.items():
        if not isinstance(_inner(result, *path), kind):
            raise DataError(f"{'.'.join(path)} is missing or has the wrong type", where=where, hint=HINT)
    for name, value in result["benchmark"]["steady"].items():
        if _measurement(value) is None:
            raise DataError(f"benchmark.steady.{name} is not a measurement", where=where, hint=HINT)
    return result


def _measurement(value: object) -> Measurement | None:
    """Return JSON values as a measurement, or None if they are not a valid one."""
    try:
        measurement = decode(Measurement, value)
    except ValueError:
        return None
    numbers = (measurement.value, measurement.low, measurement.high)
    in_range = all(0 <= number <= MAX_VALUE for number in numbers if number is not None)
    if not in_range or measurement.how not in _HOW or len(measurement.unit) > MAX_WORD:
        return None
    return measurement


def models(content: bytes) -> dict[str, str] | None:
    """Return the models of a bundle, role to SHA-256; None if the bytes are not a bundle."""
    try:
        manifest = bundle.Bundle(content).manifest
    except bundle.BundleError:
        return None
    digests = {row["name"]: row["sha256"] for row in manifest["members"]}
    return {role: digests[entry["file"]] for role, entry in manifest["models"].items()}


def measured(run: Path, bundle_content: bytes, metrics: Sequence[Metric]) -> tuple[DeviceRecord, ...]:
    """Return the results of devices that measured the models of this bundle, for the record of a run.

    Args:
        run: the run's folder.
        bundle_content: its bundle.
        metrics: the metrics of the task.
    """
    known = models(bundle_content)
    records = []
    for path in sorted((run / FOLDER).glob("*.json")):
        try:
            result = read(path)
        except (DataError, StoreError):
            continue
        if result["bundle"]["models"] == known:
            records.append(_record(path.stem, result, metrics))
    return tuple(records)


def _record(name: str, result: Mapping[str, Any], metrics: Sequence[Metric]) -> DeviceRecord:
    """Return the result of one device: its properties, its measurements, and the reasons for doubt."""
    model = result["benchmark"]["model"]
    host = result["benchmark"]["host"]
    golden = {role: _inner(result, "golden", role, "verdict") for role in result["bundle"]["models"]}
    doubts = [_inner(doubt, "what") for doubt in result["benchmark"]["doubts"]]
    return DeviceRecord(
        device=name,
        board=_text(host.get("board") or host.get("processor") or host.get("architecture")),
        python=_text(host.get("python")),
        runtime=_text(f"{_inner(model, 'runtime', 'name')} {_inner(model, 'runtime', 'version')}"),
        model=_text(f"{model.get('role')} on {model.get('device')}"),
        measurements=_measurements(result, metrics),
        golden={role: _text(verdict)[:MAX_WORD] for role, verdict in golden.items() if verdict is not None},
        doubts=tuple(_text(doubt) for doubt in doubts if doubt is not None),
    )


def _measurements(result: Mapping[str, Any], metrics: Sequence[Metric]) -> Measurements:
    """Return the valid measurements of a result by the name of their metric."""
    benchmark = result["benchmark"]
    values = {metric: benchmark["steady"].get(key) for key, metric in _STEADY.items()}
    values |= {metric: benchmark.get(key) for key, metric in _SINGLE.items()}
    qualities = _inner(result, "accuracy", "models", benchmark["model"].get("role"))
    values |= {metric.name: _inner(qualities, metric.name) for metric in metrics}
    measurements = {metric: _measurement(value) for metric, value in values.items()}
    return {metric: measurement for metric, measurement in measurements.items() if measurement is not None}


def _inner(value: object, *keys: object) -> Any:
    """Return the value at the end of a path of keys, or None."""
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) and isinstance(key, str) else None
    return value


def _text(value: object) -> str:
    return str(value)[:200] if isinstance(value, str) else "not recorded"
