"""What comes back from devices is not trusted."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from compress.deployment import results
from compress.errors import DataError, PipelineError, StoreError
from deploy import bundle

MEASURED = {"value": 1.5, "unit": "ms", "how": "measured", "low": None, "high": None, "note": "100 runs"}


@pytest.fixture
def run(bundle_file: Callable[..., Path]) -> Path:
    return bundle_file(1).parent


def result(run: Path, **changes: Any) -> dict[str, Any]:
    """What `runner.pyz bench` writes, as much of it as is looked at."""
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
    assert results.read(run / "devices" / "board.json") == result(run)


def test_found_by_its_name(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    run.rename(tmp_path / "runs" / "tiny")
    path = written(tmp_path, result(tmp_path / "runs" / "tiny"))
    assert results.take_in(path, None, None) == Path("runs/tiny/devices/board.json")


def test_of_another_bundle(run: Path, tmp_path: Path) -> None:
    content = result(run)
    content["bundle"]["models"]["int8"] = "0" * 64
    with pytest.raises(DataError, match="models that no bundle"):
        results.take_in(written(tmp_path, content), run, None)
    with pytest.raises(DataError, match="no bundle in"):
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
        {"note": None},
        {"low": float("inf")},
    ],
)
def test_what_is_no_measurement(run: Path, tmp_path: Path, change: dict[str, Any]) -> None:
    content = result(run)
    content["benchmark"]["steady"] = {"median": {**MEASURED, **change}}
    with pytest.raises(DataError, match=r"steady\.median"):
        results.take_in(written(tmp_path, content), run, None)


def test_too_large_or_not_there(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path, result(run))
    monkeypatch.setattr(results, "MAX_BYTES", 100)
    with pytest.raises(DataError, match="too large"):
        results.read(path)
    with pytest.raises(StoreError):
        results.read(tmp_path / "none")
