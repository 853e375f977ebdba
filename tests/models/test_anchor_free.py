"""The builder anchor_free: its outputs fit its specification, it maps as a whole, and it learns."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blobs import Blobs, context
from paths import ROOT
from scenes import CLASSES, scenes

import compress
from compress.data.types import Objects, Split
from compress.importers import builder
from compress.tasks.detection import Detection
from deploy.contract.average_precision import average_precision
from deploy.contract.detection import Detector

pytestmark = pytest.mark.tensorflow

SIDE = 64


def edited(folder: Path) -> Path:
    """Return a copy of the builder with a quarter of the channels."""
    source = (ROOT / "models" / "anchor_free.py").read_text()
    assert "WIDTH = 1.0" in source
    path = folder / "narrow.py"
    path.write_text(source.replace("WIDTH = 1.0", "WIDTH = 0.25"))
    return path


@dataclass
class Scenes(Blobs):
    """The same eight pictures in every split."""

    class_names: tuple[str, ...] = CLASSES
    input_shape: tuple[int, ...] = (SIDE, SIDE, 3)
    task: str = "detection"

    def inputs(self, split: Split) -> np.ndarray:
        return np.stack([picture for picture, _ in scenes(8)]).astype(np.float32) / 255

    def objects(self, split: Split) -> list[Objects]:
        found = []
        for _, objects in scenes(8):
            corners = np.array([box for _, box in objects], np.float32)[:, [1, 0, 3, 2]] / SIDE
            found.append(Objects(corners, np.array([CLASSES.index(name) for name, _ in objects], np.int64)))
        return found


@pytest.mark.parametrize("shape", [(160, 160, 3), (96, 128, 1)])
def test_the_outputs_are_those_of_the_specification(keras: Any, shape: tuple[int, ...]) -> None:
    path = ROOT / "models" / "anchor_free.py"
    model = builder.build(path, "build", shape, len(CLASSES))
    specification = builder.detector(path, shape)
    data = Scenes(input_shape=shape)
    assert Detection().head(model, data, specification).detector.specification["bins"] == 16
    cells = [tuple(entry["cells"]) for entry in specification["maps"]]
    assert cells == [(shape[0] // stride, shape[1] // stride) for stride in (8, 16, 32)]
    expected = [(None, *size, channels) for size in cells for channels in (64, 2)]
    assert [output.shape for output in model.outputs] == expected


def test_every_operator_runs_on_the_edge_tpu(keras: Any, tmp_path: Path) -> None:
    from compress.ir import keras_graph
    from compress.ir.passes import fold
    from compress.quantization import export
    from compress.quantization.calibration import calibrate

    network = fold.canonical(keras_graph.read(builder.build(edited(tmp_path), "build", (SIDE, SIDE, 3), 2)))
    before, after = tmp_path / "int8.tflite", tmp_path / "legal.tflite"
    before.write_bytes(export.convert(network, calibrate(network, Scenes().inputs("train"), "minmax")))
    compress.legalize(before, after)
    assert {operator.placement for operator in compress.check(after).ops} == {"tpu"}


def test_it_learns_eight_pictures_by_heart(keras: Any, tmp_path: Path) -> None:
    from compress.stages.train import Train
    from compress.training.loop import fit, own_loss

    path = edited(tmp_path)
    keras.utils.set_random_seed(0)
    model = builder.build(path, "build", (SIDE, SIDE, 3), 2)
    specification = builder.detector(path, (SIDE, SIDE, 3))
    data = Scenes()
    own = replace(context(data, tmp_path), specification=specification)
    fit(model, own_loss(model, own), Train(epochs=150, batch_size=8, learning_rate=0.01, warmup=0.1), own)
    detector = Detector(specification)
    outputs = model.predict(data.inputs("test"), verbose=0)
    detections = [detector(sample) for sample in zip(*outputs, strict=True)]
    assert average_precision(detections, data.objects("test"), 2)["ap"] > 0.9
