"""The builder anchor_free: its outputs fit its specification, all its operators are mapped, and it learns."""

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
from compress.core.errors import ModelError
from compress.data.types import Objects, Split
from compress.learning.quantization import export
from compress.learning.quantization.calibration import calibrate
from compress.learning.training.loop import fit, own_loss
from compress.model.importers import builder
from compress.model.ir import keras_graph
from compress.model.ir.passes import fold
from compress.pipeline.stages.origin import Origin
from compress.pipeline.stages.train import Train
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
        scene_objects = []
        for _, objects in scenes(8):
            corners = np.array([box for _, box in objects], np.float32)[:, [1, 0, 3, 2]] / SIDE
            scene_objects.append(Objects(corners, np.array([CLASSES.index(name) for name, _ in objects], np.int64)))
        return scene_objects


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
    network = fold.canonical(keras_graph.read(builder.build(edited(tmp_path), "build", (SIDE, SIDE, 3), 2)))
    before, after = tmp_path / "int8.tflite", tmp_path / "legal.tflite"
    before.write_bytes(export.convert(network, calibrate(network, Scenes().inputs("train"), "minmax")))
    compress.legalize(before, after)
    assert {operator.placement for operator in compress.check(after).ops} == {"tpu"}


def test_it_learns_eight_pictures_by_heart(keras: Any, tmp_path: Path) -> None:
    path = edited(tmp_path)
    keras.utils.set_random_seed(0)
    model = builder.build(path, "build", (SIDE, SIDE, 3), 2)
    specification = builder.detector(path, (SIDE, SIDE, 3))
    data = Scenes()
    stage_context = replace(context(data, tmp_path), specification=specification)
    fit(
        model,
        own_loss(model, stage_context),
        Train(epochs=100, batch_size=8, learning_rate=0.01, warmup=0.1),
        stage_context,
    )
    detector = Detector(specification)
    outputs = model.predict(data.inputs("test"), verbose=0)
    detections = [detector(sample) for sample in zip(*outputs, strict=True)]
    assert average_precision(detections, data.objects("test"), 2)["ap"] > 0.9


def trained(keras: Any, stages: int, side: int = 32) -> Any:
    """Return a network with random weights that halves the image in every stage."""
    x = image = keras.Input((side, side, 3))
    for filters in range(4, 4 + stages):
        x = keras.layers.Conv2D(filters, 3, 2, padding="same", activation="relu")(x)
    return keras.Model(image, keras.layers.Dense(5)(keras.layers.GlobalAveragePooling2D()(x)))


def test_a_backbone_gives_the_feature_maps_for_any_size_of_the_image(
    keras: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    network = trained(keras, 5)
    network.save("classifier.keras")
    data = Scenes()
    origin = Origin(builder="anchor_free", backbone="classifier.keras").with_paths_from(tmp_path)
    facts = origin.loader(Path(), trust=False).run(context(data, tmp_path).original, context(data, tmp_path))
    assert [entry["cells"] for entry in facts["specification"]["maps"]] == [[8, 8], [4, 4], [2, 2]]
    model = keras.models.load_model("model.keras")
    kernels = [layer.get_weights()[0] for layer in network.layers if isinstance(layer, keras.layers.Conv2D)]
    copied = [layer.get_weights()[0] for layer in model.layers if isinstance(layer, keras.layers.Conv2D)][:5]
    assert [kernel.shape for kernel in copied] == [kernel.shape for kernel in kernels]
    for kernel, copy in zip(kernels, copied, strict=True):
        np.testing.assert_array_equal(kernel, copy)


def test_a_backbone_without_batch_norms_gets_some_that_change_nothing(
    keras: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    network = trained(keras, 5, SIDE)
    network.save("classifier.keras")
    data = Scenes()
    origin = Origin(builder="anchor_free", backbone="classifier.keras").with_paths_from(tmp_path)
    origin.loader(Path(), trust=False).run(context(data, tmp_path).original, context(data, tmp_path))
    model = keras.models.load_model("model.keras")
    norms = [layer for layer in model.layers if isinstance(layer, keras.layers.BatchNormalization)][:5]
    assert [layer.name for layer in norms] == [f"{layer.name}_norm" for layer in network.layers[1:6]]
    samples = data.inputs("train")[:64]
    map_of = keras.Model(model.inputs[0], model.get_layer(norms[2].name.replace("_norm", "_activation")).output)
    expected = keras.Model(network.inputs[0], network.layers[3].output)(samples)
    np.testing.assert_allclose(map_of(samples), expected, atol=1e-4)
    _, _, mean, variance = norms[0].get_weights()
    values = keras.Model(model.inputs[0], norms[0].input)(samples)
    np.testing.assert_allclose(mean, np.mean(values, axis=(0, 1, 2)), atol=0.05)
    np.testing.assert_allclose(variance, np.var(values, axis=(0, 1, 2)), rtol=0.2)


def test_the_backbone_is_part_of_the_key(keras: Any, tmp_path: Path) -> None:
    origin = Origin(builder="anchor_free", backbone="classifier.keras").with_paths_from(tmp_path)
    keys = []
    for _ in range(2):
        trained(keras, 5).save(tmp_path / "classifier.keras")
        keys.append(origin.loader(Path(), trust=False).identity()["backbone"])
    assert keys[0] != keys[1]
    with pytest.raises(
        ModelError, match=r"gone.keras: cannot be read: No such file or directory; check the setting backbone"
    ):
        Origin(builder="anchor_free", backbone="gone.keras").loader(tmp_path, trust=False).identity()
    with pytest.raises(ValueError, match="'backbone' can be used only with 'builder'"):
        Origin(file="model.keras", backbone="classifier.keras")


def test_a_backbone_without_a_map_of_every_size_is_refused(keras: Any) -> None:
    with pytest.raises(ModelError, match="the backbone has no feature map at 1/32 of its image"):
        builder.build(ROOT / "models" / "anchor_free.py", "build", (SIDE, SIDE, 3), 2, trained(keras, 4))
