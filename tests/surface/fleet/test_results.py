"""Results from devices are not trusted."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import run_records
import tiny

from compress.core.errors import DataError, PipelineError, StoreError
from compress.pipeline import device_results
from compress.surface.fleet import results
from deploy.contract import bundle

MEASURED = {"value": 1.5, "unit": "ms", "how": "measured", "low": None, "high": None, "note": "100 runs"}


@pytest.fixture
def run(bundle_file: Callable[..., Path]) -> Path:
    return bundle_file(1).parent


def result(run: Path, **changes: Any) -> dict[str, Any]:
    """Return the parts of a result of `runner.pyz bench` that the program reads."""
    manifest = bundle.Bundle((run / "v1.coralline").read_bytes()).manifest
    digests = {row["name"]: row["sha256"] for row in manifest["members"]}
    about = {"name": "tiny", "coralline": "0", "models": {"int8": digests["int8.tflite"]}}
    measured = {"model": {}, "host": {}, "steady": {"median": MEASURED}, "doubts": []}
    return {"schema_version": 1, "verb": "bench", "bundle": about, "benchmark": measured, **changes}


def written(folder: Path, content: Any) -> Path:
    path = folder / "board.json"
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return path


def test_taken_in(run: Path, tmp_path: Path) -> None:
    path = written(tmp_path, result(run))
    assert results.take_in(path, run, None) == run / "devices" / "board.json"
    assert results.take_in(path, run, "shop-7") == run / "devices" / "shop-7.json"
    assert device_results.read(run / "devices" / "board.json") == result(run)


def test_found_by_its_name(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    run.rename(tmp_path / "runs" / "tiny")
    path = written(tmp_path, result(tmp_path / "runs" / "tiny"))
    assert results.take_in(path, None, None) == Path("runs/tiny/devices/board.json")


def test_the_new_report_still_has_the_pictures(run: Path, tmp_path: Path) -> None:
    picture = {"shows": "result", "file": "1-result.jpg", "sha256": hashlib.sha256(b"JPEG").hexdigest(), "text": "cup"}
    example = {"sample": 1, "name": "1.jpg", "kind": "typical", "difference": "none", "pictures": [picture]}
    record = run_records.full() | {"examples": {"note": "Boxes.", "samples": 9, "examples": [example]}}
    (run / "report.json").write_text(json.dumps(record))
    (run / "examples").mkdir()
    (run / "examples" / "1-result.jpg").write_bytes(b"JPEG")
    results.take_in(written(tmp_path, result(run)), run, None)
    assert base64.b64encode(b"JPEG").decode() in (run / "report.html").read_text()
    (run / "examples" / "1-result.jpg").unlink()
    results.take_in(written(tmp_path, result(run)), run, None)
    assert "The file examples/1-result.jpg is missing" in (run / "report.html").read_text()


def test_of_another_bundle(run: Path, tmp_path: Path) -> None:
    content = result(run)
    content["bundle"]["models"]["int8"] = "0" * 64
    with pytest.raises(DataError, match="models that no bundle"):
        results.take_in(written(tmp_path, content), run, None)
    with pytest.raises(DataError, match="has no bundle"):
        results.take_in(written(tmp_path, result(run)), tmp_path / "empty", None)
    assert not (run / "devices").exists()


@pytest.mark.parametrize("name", ["../up", "a/b", "", ".hidden", "a\nb", "x" * 200])
def test_names_that_are_no_file(run: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(PipelineError):
        results.store(result(run), run, name)
    content = result(run, bundle={"name": name, "models": {}})
    with pytest.raises(DataError):
        results.take_in(written(tmp_path, content), None, None)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe",
        b"[]",
        b"null",
        b"[" * 100_000,
        b'{"schema_version": 1}',
        b'{"schema_version": 2, "verb": "bench"}',
        b'{"schema_version": 1, "verb": "bench", "bundle": [], "benchmark": {}}',
        b'{"schema_version": 1, "verb": "bench", "bundle": {"models": {}}, "benchmark": {}}',
    ],
)
def test_what_is_no_result(run: Path, tmp_path: Path, content: bytes) -> None:
    with pytest.raises(DataError):
        results.take_in(written(tmp_path, content), run, None)


@pytest.mark.parametrize(
    "change",
    [
        {"value": "fast"},
        {"value": True},
        {"value": None},
        {"value": float("nan")},
        {"how": "guessed"},
        {"how": ["measured"]},
        {"unit": 1},
        {"unit": "m" * 21},
        {"note": None},
        {"low": float("inf")},
        {"value": 10**400},
        {"value": -1.5},
    ],
)
def test_what_is_no_measurement(run: Path, tmp_path: Path, change: dict[str, Any]) -> None:
    content = result(run)
    content["benchmark"]["steady"] = {"median": {**MEASURED, **change}}
    with pytest.raises(DataError, match=r"steady\.median"):
        results.take_in(written(tmp_path, content), run, None)


def test_too_large_or_not_there(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path, result(run))
    monkeypatch.setattr(device_results, "MAX_BYTES", 100)
    with pytest.raises(DataError, match="too large"):
        device_results.read(path)
    with pytest.raises(StoreError):
        device_results.read(tmp_path / "none")


@pytest.mark.essential
def test_in_the_report(tmp_path: Path, project: Callable[..., Path], coralline: tiny.Coralline) -> None:
    path = project(["compile", "package"])
    assert coralline(path).returncode == 0
    run = tmp_path / "runs" / "tiny"
    about = {"name": "tiny", "models": device_results.models((run / "tiny.coralline").read_bytes())}
    host = {"board": "Dev <b>Board</b>", "python": "3.7.3"}
    model = {"role": "int8", "device": "cpu", "runtime": {"name": "tflite_runtime", "version": "2.5"}}
    doubts = [{"what": "the Edge TPU is on USB 2"}, "no map"]
    measured = {"model": model, "host": host, "steady": {"median": MEASURED}, "doubts": doubts}
    content = {"schema_version": 1, "verb": "bench", "bundle": about, "benchmark": measured}
    done = coralline("results", written(tmp_path, {**content, "golden": {"int8": {"verdict": "equal"}}}))
    assert done.returncode == 0, done.stderr
    shown = [(run / name).read_text() for name in ("report.html", "report.md")]
    for text in shown:
        assert all(part in text for part in ("On the device", "1.50 ms", "int8 equal", "USB 2"))
    assert "<b>" not in shown[0]
    (row,) = json.loads((run / "report.json").read_text())["devices"]
    assert (row["device"], row["measurements"]["latency_ms"]["value"]) == ("board", 1.5)

    assert coralline(path).returncode == 0  # the next run of the same pipeline keeps the results
    assert "On the device" in (run / "report.html").read_text()
    (tmp_path / "project" / "model.tflite").write_bytes(tiny.classifier(seed=7))
    assert coralline(path).returncode == 0  # the results are not about another model
    assert "On the device" not in (run / "report.html").read_text()
