"""Temperature, threshold and references in a bundle, and images that show none of the classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import several
import small_shop
import tiny
from PIL import Image

from compress.bundling.packing import Packing, pack
from compress.bundling.recognition import RecognitionSettings, unknown_files
from compress.core.errors import DataError
from compress.data.dataset import Dataset
from compress.pipeline.stages.package import Package
from compress.tasks import TASKS
from deploy import Model, Recognizer
from deploy.contract import bundle
from deploy.contract.embedding import CosineHead


def unknown_folder(folder: Path) -> Path:
    """Write all images of the digits that were not trained into a folder; return the folder."""
    images, labels = small_shop.digits()
    folder.mkdir()
    for number in np.flatnonzero(np.isin(labels, small_shop.NEW)):
        Image.fromarray(images[number, ..., 0]).save(folder / f"{number:04}.png")
    return folder


@pytest.mark.parametrize(
    ("settings", "form"),
    [
        ({}, "head"),
        ({"softmax": False}, "head"),
        ({"expose": False}, "probabilities"),
        ({"expose": False, "softmax": False}, "scores"),
        ({"task": "embeddings"}, "head"),
    ],
    ids=["head", "logits with head", "probabilities", "scores", "embeddings"],
)
def test_calibration(settings: dict[str, Any], form: str) -> None:
    """The network is too uncertain; a temperature corrects that, and few known digits become unknown."""
    entry = small_shop.opened(**settings).manifest["confidence"]
    measured = entry["measured"]
    assert entry["logits"] == form
    assert measured["validation"]["false_reject"]["value"] <= 0.05
    assert measured["test"]["false_reject"]["value"] < 0.1
    assert measured["test"]["ece_after"]["value"] < 0.6 * measured["test"]["ece_before"]["value"]
    assert measured["unknown"]["false_accept"]["value"] is None
    assert "recognition.unknown" in measured["unknown"]["false_accept"]["note"]


def test_false_accepts_are_measured_with_images(tmp_path: Path) -> None:
    folder = unknown_folder(tmp_path / "unknown")
    rates = []
    for rate in (0.02, 0.2):
        settings = RecognitionSettings(false_reject_rate=rate, unknown=folder)
        measured = small_shop.opened(recognition=settings).manifest["confidence"]["measured"]["unknown"]
        rates.append(measured["false_accept"]["value"])
        assert f"{len(list(folder.iterdir()))} samples" in measured["false_accept"]["note"]
    assert 0 < rates[1] < rates[0] < 1


def test_unusable_images_are_named(tmp_path: Path) -> None:
    folder = tmp_path / "unknown"
    with pytest.raises(DataError, match="is not a folder"):
        unknown_files(folder)
    folder.mkdir()
    settings = RecognitionSettings(unknown=folder)
    with pytest.raises(DataError, match="has no images"):
        small_shop.opened(recognition=settings)
    (folder / "note.png").write_bytes(b"not an image")
    with pytest.raises(DataError, match=r"note\.png.*cannot be used"):
        small_shop.opened(recognition=settings)


def test_the_images_are_part_of_the_key(tmp_path: Path) -> None:
    folder = tmp_path / "unknown"
    folder.mkdir()
    Image.fromarray(np.zeros((8, 8), np.uint8)).save(folder / "a.png")
    stage = Package(recognition=RecognitionSettings(unknown=Path("unknown"))).with_paths_from(tmp_path)
    before = stage.identity()
    assert str(tmp_path) not in str(before)
    Image.fromarray(np.ones((8, 8), np.uint8)).save(folder / "a.png")
    assert stage.identity() != before


def test_no_references(tmp_path: Path) -> None:
    """The validation embeddings stay, because the bias of new classes needs them."""
    opened = small_shop.opened(recognition=RecognitionSettings(references=0))
    assert opened.embedding is not None
    assert set(opened.embedding.references) == {"validation"}


def test_a_binary_classifier_has_two_classes(tmp_path: Path) -> None:
    """One logit for two classes: the first class gets the logit 0."""
    images = np.random.default_rng(1).random((60, 4, 4, 1), np.float32)
    data = Dataset.from_arrays((images, np.arange(60) % 2), class_names=["no", "yes"])
    files = {"original": tmp_path / "original.tflite", "int8": tmp_path / "int8.tflite"}
    files["original"].write_bytes(several.binary(int8=False, sigmoid=False))
    files["int8"].write_bytes(small_shop.exposed(several.binary(sigmoid=False)))
    packing = Packing(
        name="binary",
        files=files,
        task=TASKS["classification"],
        tools={},
        progress=tiny.Notes(),
        data=data,
        specification={"binary": "logit"},
    )
    opened = bundle.Bundle(pack(packing))
    assert opened.embedding is not None
    assert opened.embedding.head is not None
    assert opened.embedding.head.weights.shape == (2, 32)
    assert not opened.embedding.head.weights[0].any()


def test_embeddings_are_imprinted() -> None:
    opened = small_shop.opened(task="embeddings")
    assert opened.embedding is not None
    assert opened.embedding.head is None
    with Recognizer(Model(opened, "int8", device="cpu"), "") as recognizer:
        assert isinstance(recognizer._parts.old, CosineHead)
        assert recognizer.labels == small_shop.NAMES
