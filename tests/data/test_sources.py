"""The digits, and what all sources have: paths, and what a device must know to decode files."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import dataset
from PIL import Image

from compress.core.errors import DataError
from compress.data import files
from compress.data.source import Source
from compress.data.sources import Coco, Digits, ImageFolder, Npz, TfRecord, Voc, Wav
from compress.data.sources.tfrecord import TensorFeature
from deploy.contract.decoding import parsed

# --- digits -----------------------------------------------------------------------------

#: SHA-256 of the indices and of the labels of each split. A change of one would change every measured number.
DIGITS = {
    "train": (999, "6d5470440d229054", "852c283185ca24b5"),
    "validation": (169, "e0f03b70d6f55d8b", "c408f12f0d4b6100"),
    "test": (629, "1a03f327fff7c888", "dc0fb8d88b9f9632"),
}


def sha(values: np.ndarray) -> str:
    return hashlib.sha256(values.astype("<i8").tobytes()).hexdigest()[:16]


def test_digits_split_is_fixed_disjoint_and_stratified() -> None:
    samples = Digits().load()
    splits = {
        split: (len(indices), sha(indices), sha(samples.labels[indices])) for split, indices in samples.splits.items()
    }
    assert splits == DIGITS
    together = np.concatenate(list(samples.splits.values()))
    np.testing.assert_array_equal(np.sort(together), np.arange(1797))
    for indices in samples.splits.values():
        counts = np.bincount(samples.labels[indices], minlength=10)
        assert counts.max() - counts.min() <= 0.05 * len(indices)


def test_digits_through_a_dataset() -> None:
    data = dataset(Digits(), {"scale": {"from": [0, 16]}})
    assert data.class_names == tuple("0123456789")
    assert len(data.labels("test")) >= 600
    inputs = data.inputs("test")
    assert inputs.shape == (629, 8, 8, 1)
    assert inputs.dtype == np.float32
    assert (inputs.min(), inputs.max()) == (0, 1)
    np.testing.assert_array_equal(data.raw("test", np.array([3]))[0], inputs[3, ..., 0] * 16)


def test_a_damaged_file_of_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "digest", lambda path: "0" * 64)
    with pytest.raises(DataError, match="install coralline again"):
        Digits().fingerprint()
    with pytest.raises(DataError):
        Digits().load()


@pytest.mark.parametrize(
    ("source", "decoding"),
    [
        (ImageFolder(path="x"), {"image_channels": 3, "orientation": "exif"}),
        (Voc(path="x", channels=1), {"image_channels": 1, "orientation": "exif"}),
        (Coco(file="x", orientation="ignore"), {"image_channels": 3, "orientation": "ignore"}),
        (TfRecord(path="x", image="image", label="label"), {"image_channels": 3, "orientation": "exif"}),
        (TfRecord(path="x", tensor=TensorFeature(feature="x", shape=(3,)), label="label"), {}),
        (Wav(path="x", rate=8000, seconds=1, channels="first"), {"sound_channels": "first", "sound_rate": 8000}),
        (Npz(file="x"), {}),
    ],
    ids=lambda parameter: getattr(parameter, "name", None),
)
def test_what_a_device_must_know_to_decode_files(source: Source, decoding: dict[str, Any]) -> None:
    assert source.decoding == decoding
    assert parsed(decoding)._asdict().items() >= decoding.items()


def test_relative_paths_are_beside_the_pipeline_file(tmp_path: Path) -> None:
    for kind in ("cat", "dog"):
        (tmp_path / "images" / kind).mkdir(parents=True)
        Image.new("L", (2, 2)).save(tmp_path / "images" / kind / "1.png")
    assert len(ImageFolder(path="images").with_paths_from(tmp_path).load().labels) == 2
    np.savez(tmp_path / "data.npz", x=np.zeros((30, 4, 5)), y=np.arange(30) % 3)
    assert len(Npz(file="data.npz").with_paths_from(tmp_path).load().labels) == 30
    absolute = Npz(file=str(tmp_path / "data.npz")).with_paths_from(Path("/elsewhere"))
    assert absolute.load().class_names == ("0", "1", "2")
    assert Digits().with_paths_from(tmp_path) == Digits()
