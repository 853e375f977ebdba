"""The measurements of devices, next to the run that created their bundle: `runs/NAME/devices/DEVICE.json`.

A file that comes back from a device is not trusted: it must be a result of the runner, its numbers must be numbers,
and a report uses it only for the models that were measured.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from compress.errors import DataError, StoreError
from compress.files import explain
from deploy.contract import bundle

FOLDER = "devices"
MAX_BYTES = 1 << 25
TODO = "runner.pyz bench BUNDLE --out results.json"
MAX_VALUE = 1e18
"""Largest value of a measurement in any unit: an exabyte, or 30 million years in ms. NaN is refused too."""
MAX_WORD = 20
"""Longest unit or verdict in characters; longer ones would make the report's table too wide."""
_HOW = ("measured", "missing")
_SHOWN = {
    "median": "latency_ms",
    "p90": "latency_p90_ms",
    "p99": "latency_p99_ms",
    "throughput": "throughput",
}


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
        raise DataError(f"is not JSON: {error}", where=str(path), todo=TODO) from error
    return checked(content_json, str(path))


def checked(result: Any, where: str) -> dict[str, Any]:
    """Return a result of `bench` after checking its structure; `where` is its name in messages.

    Raises:
        DataError: it is none.
    """
    if not isinstance(result, dict) or result.get("schema_version") != 1 or result.get("verb") != "bench":
        raise DataError("is not a result of `runner.pyz bench` of schema 1", where=where, todo=TODO)
    about, measured = result.get("bundle"), result.get("benchmark")
    if not isinstance(about, dict) or not isinstance(about.get("models"), dict) or not isinstance(measured, dict):
        raise DataError("does not describe what was measured", where=where, todo=TODO)
    parts = [measured.get(name) for name in ("model", "host", "steady")]
    if not all(isinstance(part, dict) for part in parts) or not isinstance(measured.get("doubts"), list):
        raise DataError("has no complete benchmark", where=where, todo=TODO)
    for name, value in measured["steady"].items():
        if not _is_measurement(value):
            raise DataError(f"benchmark.steady.{name} is not a measurement", where=where, todo=TODO)
    return result


def _is_measurement(value: Any) -> bool:
    if not isinstance(value, Mapping) or value.get("how") not in _HOW:
        return False
    numbers = [value.get(name) for name in ("value", "low", "high")]
    sound = all(number is None or (type(number) in (int, float) and 0 <= number <= MAX_VALUE) for number in numbers)
    texts = all(isinstance(value.get(name), str) for name in ("unit", "note")) and len(value["unit"]) <= MAX_WORD
    return sound and texts and (value.get("value") is None) == (value["how"] == "missing")


def models(content: bytes) -> dict[str, str] | None:
    """Return the models of a bundle, role to SHA-256; None if the bytes are not a bundle."""
    try:
        manifest = bundle.Bundle(content).manifest
    except bundle.BundleError:
        return None
    digests = {row["name"]: row["sha256"] for row in manifest["members"]}
    return {role: digests[entry["file"]] for role, entry in manifest["models"].items()}


def measured(run: Path, bundle_content: bytes) -> list[dict[str, Any]]:
    """Return the results of devices that measured the models of this bundle, for the record of a run.

    Args:
        run: the run's folder.
        bundle_content: its bundle.
    """
    known, rows = models(bundle_content), []
    for path in sorted((run / FOLDER).glob("*.json")):
        try:
            result = read(path)
        except (DataError, StoreError):
            continue
        if result["bundle"]["models"] == known:
            rows.append(_row(path.stem, result))
    return rows


def _row(name: str, found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the result of one device: its properties, its measurements, and what makes them doubtful."""
    result = found["benchmark"]
    model, host = result["model"], result["host"]
    runtime = model.get("runtime") if isinstance(model.get("runtime"), Mapping) else {}
    taken = {shown: result["steady"][key] for key, shown in _SHOWN.items() if key in result["steady"]}
    for key, shown in (("first_inference", "first_inference_ms"), ("memory", "memory_bytes")):
        if _is_measurement(result.get(key)):
            taken[shown] = result[key]
    for key in ("accuracy", "ap", "ap50"):
        quality = _inner(found, "accuracy", "models", model.get("role"), key)
        if _is_measurement(quality):
            taken[key] = quality
    golden = {role: _inner(found, "golden", role, "verdict") for role in found["bundle"]["models"]}
    doubts = [doubt.get("what") for doubt in result["doubts"] if isinstance(doubt, Mapping)]
    return {
        "device": name,
        "board": _text(host.get("board") or host.get("processor") or host.get("architecture")),
        "python": _text(host.get("python")),
        "runtime": _text(f"{runtime.get('name')} {runtime.get('version')}"),
        "model": _text(f"{model.get('role')} on {model.get('device')}"),
        "measurements": taken,
        "golden": {role: _text(verdict)[:MAX_WORD] for role, verdict in golden.items() if verdict is not None},
        "doubts": [_text(doubt) for doubt in doubts],
    }


def _inner(value: Any, *keys: Any) -> Any:
    """Return the value at the end of a path of keys, or None."""
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) and isinstance(key, str) else None
    return value


def _text(value: Any) -> str:
    return str(value)[:200] if isinstance(value, str) else "not recorded"
