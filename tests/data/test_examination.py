"""`python -m compress data`: what a pipeline's data is, with nothing run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pictures import flat

from compress.__main__ import main
from compress.data import Dataset
from compress.data.sources import Npz
from compress.data.summary import describe
from deploy.preprocessing import Preprocessing

HEAD = "schema_version: 1\nname: t\nmodel: {builder: digits_cnn}\nstages: [{train: {epochs: 1}}, quantize]\n"


def pipeline(folder: Path, **settings: Any) -> Path:
    flat(folder / "images", 12)
    path = folder / "pipeline.yaml"
    path.write_text(HEAD + "data:\n  source: " + json.dumps({"folder": {"path": "images", **settings}}))
    return path


def test_sound_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", str(pipeline(tmp_path)), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["source"] == "folder"
    assert found["classes"] == ["cat", "dog"]
    assert found["samples"] == {"train": 18, "validation": 2, "test": 4}
    assert found["counts"] == {"train": [9, 9], "validation": [1, 1], "test": [2, 2]}
    assert (found["imbalance"], found["missing"]) == (1.0, [])
    assert (found["shapes"], found["dtypes"]) == ([[4, 6, 3], [4, 6, 3]], ["uint8"])
    assert (found["range"], found["looked_at"]) == ([0, 111], 24)
    assert found["corrupt"] == {"count": 0, "first": []}


def test_corrupt_files_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = pipeline(tmp_path)
    (tmp_path / "images" / "cat" / "5.png").write_bytes(b"no image")
    assert main(["data", str(path)]) == 3  # a run would refuse this
    told = capsys.readouterr().out
    assert "1 samples cannot be read, and are not counted" in told
    assert "cat/5.png: is not a readable image" in told
    assert main(["data", str(pipeline(tmp_path / "again", corrupt="skip"))]) == 0


def test_a_manifest_is_written_and_then_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = pipeline(tmp_path, manifest="sums.toml")
    assert main(["data", str(path), "--write-manifest", str(tmp_path / "sums.toml")]) == 0
    assert "checksums of 24 files" in capsys.readouterr().out
    assert '"images/dog/7.png" = "' in (tmp_path / "sums.toml").read_text()
    assert main([str(path), "--dry-run", "--out", str(tmp_path / "runs")]) == 0
    (tmp_path / "images" / "dog" / "7.png").write_bytes(b"other")
    assert main([str(path), "--dry-run", "--out", str(tmp_path / "runs")]) == 3
    assert "1 changed: images/dog/7.png" in capsys.readouterr().err
    (tmp_path / "p.yaml").write_text(HEAD + "data: {source: digits}")
    assert main(["data", str(tmp_path / "p.yaml"), "--write-manifest", str(tmp_path / "x")]) == 3
    assert "comes from no files of yours" in capsys.readouterr().err


def test_imbalance_and_classes_without_samples(tmp_path: Path) -> None:
    x = np.linspace(-2, 3, 40 * 9).reshape(40, 3, 3).astype(np.float32)
    split = np.array((["train"] * 3 + ["test"]) * 9 + ["val"] * 4)
    np.savez(tmp_path / "d.npz", x=x, y=np.where(np.arange(40) % 8 == 1, 0, 1), split=split)
    source = Npz(file=str(tmp_path / "d.npz"), split="split", classes=("rare", "common"))
    data = Dataset(source, Preprocessing([]), None)
    found = data.summary()
    assert found["imbalance"] == 4.4
    assert found["range"] == [-2.0, 3.0]
    text = describe({"classes": list(data.class_names), **found})
    assert "the most frequent class has 4.4 training samples for one of the rarest" in text
    more = Npz(file=str(tmp_path / "d.npz"), split="split", classes=("rare", "common", "absent"))
    missing = Dataset(more, Preprocessing([]), None).summary()
    assert (missing["imbalance"], missing["missing"]) == (None, ["absent"])
    assert "no training sample: absent" in describe({"classes": ["rare", "common", "absent"], **missing})
