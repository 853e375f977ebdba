"""`python -m compress data`: it describes the data of a pipeline without running any stage."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from datasets import dataset
from pictures import flat, image, pipeline
from PIL import Image

from compress.core.errors import DataError
from compress.core.progress import SILENT
from compress.data.sources import ImageFolder, Npz
from compress.data.summary import describe
from compress.pipeline.store import Store
from compress.surface.cli.main import main


def photos(folder: Path, **settings: Any) -> Path:
    """Write two classes of 12 photos, and a pipeline file."""
    flat(folder / "images", 12)
    return pipeline(folder, {"folder": {"path": "images", **settings}})


@pytest.mark.essential
def test_sound_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", str(photos(tmp_path)), "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["source"] == "folder"
    assert summary["classes"] == ["cat", "dog"]
    assert summary["samples"] == {"train": 18, "validation": 2, "test": 4}
    assert summary["counts"] == {"train": [9, 9], "validation": [1, 1], "test": [2, 2]}
    assert (summary["imbalance"], summary["missing"]) == (1.0, [])
    assert (summary["shapes"], summary["dtypes"]) == ([[4, 6, 3], [4, 6, 3]], ["uint8"])
    assert (summary["range"], summary["looked_at"]) == ([0, 111], 24)
    assert summary["corrupt"] == {"count": 0, "first": []}


def test_corrupt_files_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = photos(tmp_path)
    (tmp_path / "images" / "cat" / "5.png").write_bytes(b"no image")
    assert main(["data", str(path)]) == 3  # a run would refuse this data
    output = capsys.readouterr().out
    assert "1 samples cannot be read, and are not counted" in output
    assert "cat/5.png: is not a readable image" in output
    assert main(["data", str(photos(tmp_path / "again", corrupt="skip"))]) == 0


def test_a_run_lists_all_corrupt_files_of_all_splits_before_tensorflow_starts(tmp_path: Path) -> None:
    path = photos(tmp_path)
    text = path.read_text() + "\n  preprocess: [{resize: {size: [32, 32]}}]"
    bad = [f"{kind}/{index}.png" for kind in ("cat", "dog") for index in range(1, 12)]
    for name in bad:
        (tmp_path / "images" / name).write_bytes(b"no image")
    code = (
        "import sys; from compress.surface.cli.main import main; print(main(sys.argv[1:]), 'tensorflow' in sys.modules)"
    )

    def run(content: str) -> tuple[str, str]:
        path.write_text(content)
        command = [sys.executable, "-c", code, str(path), "--out", str(tmp_path / "runs")]
        done = subprocess.run(command, env=tiny.environment(), capture_output=True, text=True, check=False)
        return done.stdout.splitlines()[-1], done.stderr

    end, said = run(text)
    assert end == "3 False"
    assert [name for name in bad if f"{name}: is not a readable image" not in said] == []
    assert "22 samples cannot be used" in said
    assert "leave them out with `corrupt: skip`" in said
    for name in bad[1:]:
        image(tmp_path / "images" / name, value=50)
    end, said = run(text)
    assert end == "3 False"
    assert f"{bad[0]}: is not a readable image" in said
    assert "; remove or repair it, or leave it out with `corrupt: skip`" in said


def test_data_is_accepted_until_it_changes(tmp_path: Path) -> None:
    """A run of which only the last stages changed needs no sample."""
    flat(tmp_path / "images", 12)
    store = Store(tmp_path / "store")
    store.prepare()
    for accepted in (False, True):
        data = dataset(ImageFolder(path=str(tmp_path / "images")))
        data.work_in(store, SILENT)
        assert data.is_accepted() == accepted
        data.accept()
    image(tmp_path / "images" / "cat" / "5.png", value=99)
    changed = dataset(ImageFolder(path=str(tmp_path / "images")))
    changed.work_in(store, SILENT)
    assert not changed.is_accepted()


def gradient(path: Path, first: int) -> Path:
    """Write a photo that is not of one colour."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray((np.arange(6 * 8 * 3).reshape(6, 8, 3) + first).astype(np.uint8)).save(path)
    return path


def test_identical_photos_in_two_classes_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = photos(tmp_path)
    shutil.rmtree(tmp_path / "images")
    for number, kind in enumerate(("cat", "dog")):
        for index in range(12):
            gradient(tmp_path / "images" / kind / f"{index}.png", 50 * number + index)
    gradient(tmp_path / "images" / "cat" / "same.png", 3)  # twice in its own class is no contradiction
    assert main(["data", str(path)]) == 0
    assert "two classes" not in capsys.readouterr().out
    gradient(tmp_path / "images" / "dog" / "a.bmp", 5)  # the same pixels in a file of another format
    gradient(tmp_path / "images" / "dog" / "b.png", 7)
    assert main(["data", str(path)]) == 0
    said = capsys.readouterr().out
    assert "warning: equal samples are in two classes: " in said
    assert re.search(r"images/cat/5\.png \(cat\) and \S*images/dog/a\.bmp \(dog\); ", said)
    assert re.search(r"images/cat/7\.png \(cat\) and \S*images/dog/b\.png \(dog\): remove each", said)


def arrays(folder: Path, x: np.ndarray, steps: str = "") -> Path:
    np.savez(folder / "d.npz", x=x, y=np.arange(len(x)) % 3)
    return pipeline(folder, {"npz": {"file": "d.npz"}}, more=f"  preprocess: [{steps}]\n")


def test_every_sample_of_every_source_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    x = np.zeros((3000, 4, 4, 1), np.float32)
    assert main(["data", str(arrays(tmp_path, x))]) == 0
    capsys.readouterr()
    bad = np.arange(12) * 250
    x[bad] = np.nan
    assert main(["data", str(arrays(tmp_path, x)), "--json"]) == 3
    summary = json.loads(capsys.readouterr().out)
    file, reason = tmp_path / "d.npz", "has values that are NaN or infinite; remove or repair it"
    messages = [f"data.source.npz: {file}, sample {index}: {reason}" for index in bad]
    assert (summary["corrupt"], summary["refused"]) == ({"count": 12, "first": messages}, [])
    with pytest.raises(DataError, match=r"samples cannot be used: .*; remove or repair them$"):  # npz cannot skip any
        dataset(Npz(file=str(tmp_path / "d.npz"))).inputs("train")


def test_what_preprocessing_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    x = np.zeros((60, 4, 4), np.float32)
    x[7] = 3e38
    path = arrays(tmp_path, x, "{scale: {from: [0, 1.0e-3]}}")
    assert main(["data", str(path)]) == 3
    refused = f"a run would refuse this: data.source.npz: {tmp_path / 'd.npz'}, sample "
    assert f"{refused}7: has values that are NaN" in capsys.readouterr().out
    assert main(["data", str(arrays(tmp_path, x[:, :0]))]) == 3
    assert refused in capsys.readouterr().out


def test_splits_of_different_sizes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = photos(tmp_path)
    flat(tmp_path / "images" / "train", 12)
    for kind in ("cat", "dog"):
        shutil.rmtree(tmp_path / "images" / kind)
        image(tmp_path / "images" / "test" / kind / "1.png", (5, 4))
    message = "the test split has shape [4, 5, 3] after preprocessing, train [4, 6, 3]; put a resize step"
    assert main(["data", str(path)]) == 3
    assert message in capsys.readouterr().out
    data = dataset(ImageFolder(path=str(tmp_path / "images")))
    data.inputs("train")
    with pytest.raises(DataError, match=re.escape(message)):
        data.inputs("test")


def test_a_manifest_is_written_and_then_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = photos(tmp_path, manifest="sums.toml")
    assert main(["data", str(path), "--write-manifest", str(tmp_path / "sums.toml")]) == 0
    assert "checksums of 24 files" in capsys.readouterr().out
    assert '"images/dog/7.png" = "' in (tmp_path / "sums.toml").read_text()
    assert main([str(path), "--dry-run", "--out", str(tmp_path / "runs")]) == 0
    (tmp_path / "images" / "dog" / "7.png").write_bytes(b"other")
    assert main([str(path), "--dry-run", "--out", str(tmp_path / "runs")]) == 3
    assert "1 changed: images/dog/7.png" in capsys.readouterr().err
    digits = pipeline(tmp_path, {"digits": {}})
    assert main(["data", str(digits), "--write-manifest", str(tmp_path / "x")]) == 3
    assert "does not come from files" in capsys.readouterr().err


def test_imbalance_and_classes_without_samples(tmp_path: Path) -> None:
    x = np.linspace(-2, 3, 40 * 9).reshape(40, 3, 3).astype(np.float32)
    split = np.array((["train"] * 3 + ["test"]) * 9 + ["val"] * 4)
    np.savez(tmp_path / "d.npz", x=x, y=np.where(np.arange(40) % 8 == 1, 0, 1), split=split)
    source = Npz(file=str(tmp_path / "d.npz"), split="split", classes=("rare", "common"))
    data = dataset(source)
    summary = data.summary()
    assert summary["imbalance"] == 4.4
    assert summary["range"] == [-2.0, 3.0]
    text = describe({"classes": list(data.class_names), **summary})
    assert "the most frequent class has 4.4 training samples for one of the rarest" in text
    more = Npz(file=str(tmp_path / "d.npz"), split="split", classes=("rare", "common", "absent"))
    missing = dataset(more).summary()
    assert (missing["imbalance"], missing["missing"]) == (None, ["absent"])
    assert "no training sample: absent" in describe({"classes": ["rare", "common", "absent"], **missing})
    unlabelled = Npz(file=str(tmp_path / "d.npz"), split="split", y=None)
    counts = describe({"classes": [], **dataset(unlabelled).summary()}).splitlines()[1]
    assert counts.split() == ["all", "27", "4", "9"]
