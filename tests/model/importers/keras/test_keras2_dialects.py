"""Files as older releases of Keras 2 wrote them, edited by hand from today's files, and whole architectures.

Source of the dialects: issues of keras-team/keras and tensorflow/tensorflow with such files (29530: wrapped lists,
types of initializers), and the sources of keras 2.0 to 2.3.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from compress.model.importers.keras import keras2, keras_file
from compress.model.importers.keras.keras_file import load

pytestmark = pytest.mark.tensorflow
Save = Callable[[Any, str], Path]
Edit = Callable[[Any], Any]


def network(tf_keras: Any) -> Any:
    layers = tf_keras.layers
    return tf_keras.Sequential(
        [
            layers.Conv2D(6, 3, padding="same", input_shape=(12, 12, 3), name="conv"),
            layers.BatchNormalization(name="norm"),
            layers.LeakyReLU(0.25, name="leaky"),
            layers.DepthwiseConv2D(3, name="depthwise"),
            layers.SeparableConv2D(4, 3, name="separable"),
            layers.ReLU(6.0, name="relu"),
            layers.UpSampling2D(name="up"),
            layers.GlobalAveragePooling2D(name="pool"),
            layers.Dropout(0.2, name="drop"),
            layers.Dense(3, activation="softmax", name="dense"),
        ],
        name="net",
    )


def listed(config: Any) -> Any:
    """Return the configuration of a Sequential as until Keras 2.2.3: the list of its layers."""
    return {"class_name": "Sequential", "config": config["config"]["layers"][1:]}


def of_layers(change: Callable[[Any, str], Any]) -> Edit:
    """Return an edit that changes each layer, which it gets with the name of the layer."""

    def edit(config: Any) -> Any:
        for layer in config["config"]["layers"]:
            change(layer, layer["config"]["name"])
        return config

    return edit


def layer_settings(**changes: Any) -> Edit:
    """Return an edit that changes settings of layers by name."""
    return of_layers(lambda layer, name: layer["config"].update(changes.get(name, {})))


def without(**removed: str) -> Edit:
    return of_layers(lambda layer, name: [layer["config"].pop(key, None) for key in removed.get(name, "").split()])


def renamed(old: str, new: str) -> Edit:
    return of_layers(lambda layer, _: layer.update(class_name=layer["class_name"].replace(old, new)))


def array(value: float) -> Any:
    return {"type": "ndarray", "value": value}


GLOROT = {"class_name": "GlorotUniform", "config": {"seed": None, "dtype": "float32"}}
SCALING = {
    "class_name": "VarianceScaling",
    "config": {"scale": 1.0, "mode": "fan_avg", "distribution": "uniform", "seed": None},
}
POLICY = {"class_name": "Policy", "config": {"name": "float32", "loss_scale": None}}
L2 = {"class_name": "L1L2", "config": {"l1": 0.0, "l2": 9.999999747378752e-05}}
DIALECTS: dict[str, Edit] = {
    "a list of layers": listed,
    "arrays": layer_settings(leaky={"alpha": array(0.25)}, relu={"max_value": array(6.0)}),
    "wrapped lists": layer_settings(norm={"axis": {"class_name": "ListWrapper", "items": [3]}}),
    "first version of normalization": renamed("BatchNormalization", "BatchNormalizationV1"),
    "second version of normalization": renamed("BatchNormalization", "BatchNormalizationV2"),
    "types of initializers": layer_settings(
        conv={"kernel_initializer": GLOROT, "bias_initializer": {"class_name": "Zeros", "config": {"dtype": "float32"}}}
    ),
    "initializers and regularizers of 2.0": layer_settings(
        dense={"kernel_initializer": SCALING, "kernel_regularizer": L2}
    ),
    "policies": layer_settings(conv={"dtype": POLICY}, dense={"dtype": POLICY}),
    "settings that came later": without(
        conv="groups dtype", up="interpolation", pool="keepdims data_format", relu="negative_slope threshold"
    ),
    "settings of no use": layer_settings(
        separable={"kernel_initializer": SCALING, "kernel_regularizer": None, "kernel_constraint": None},
        depthwise={"kernel_initializer": SCALING, "kernel_regularizer": L2},
    ),
    "names of initializers": layer_settings(conv={"kernel_initializer": "glorot_uniform", "bias_initializer": "zero"}),
}


def edited(path: Path, edit: Edit) -> Path:
    with h5py.File(path, "a") as file:
        file.attrs["model_config"] = json.dumps(edit(json.loads(file.attrs["model_config"])))
        file.attrs["keras_version"] = "2.1.3"
    return path


@pytest.mark.parametrize("case", DIALECTS)
def test_an_older_dialect(tf_keras: Any, saved: Save, case: str) -> None:
    model = network(tf_keras)
    new = load(edited(saved(model, "m.h5"), DIALECTS[case]))
    assert keras2.difference(model, new) <= keras2.TOLERANCE


def test_training_settings_and_optimizers_are_left_alone(tf_keras: Any, saved: Save, tmp_path: Path) -> None:
    model = network(tf_keras)
    model.compile("adam", "mse")
    path = saved(model, "m.h5")
    training = {"loss": "my_focal_loss", "metrics": ["my_metric"], "optimizer_config": {"class_name": "Mine"}}
    with h5py.File(path, "a") as file:
        file.attrs["training_config"] = json.dumps(training)
        file.require_group("optimizer_weights/Mine").create_dataset("m:0", data=np.zeros(3))
    assert keras2.difference(model, load(path)) <= keras2.TOLERANCE


def test_kernels_of_theano_are_turned(tf_keras: Any, saved: Save) -> None:
    image = tf_keras.Input((9, 9, 2))
    model = tf_keras.Model(image, tf_keras.layers.Dense(2)(tf_keras.layers.Conv2D(3, 3, name="conv")(image)))
    path = saved(model, "m.h5")
    with h5py.File(path, "a") as file:
        kernel = file["model_weights/conv/conv/kernel:0"]
        kernel[...] = kernel[...][::-1, ::-1]
        file.attrs["backend"] = "theano"
    assert keras2.difference(model, load(path)) <= keras2.TOLERANCE


APPLICATIONS = ("MobileNetV3Small", "EfficientNetB0", "ResNet50V2", "Xception", "RegNetX002")


@pytest.mark.parametrize("name", APPLICATIONS)
def test_whole_architectures(tf_keras: Any, tmp_path: Path, name: str) -> None:
    size = 71 if name == "Xception" else 64
    model = getattr(tf_keras.applications, name)(weights=None, input_shape=(size, size, 3), classes=5)
    random = np.random.default_rng(0)
    for layer in model.layers:
        if type(layer).__name__ == "BatchNormalization":
            layer.set_weights([random.uniform(0.5, 1.5, weight.shape) for weight in layer.get_weights()])
    path = tmp_path / "m.h5"
    with pytest.warns(UserWarning, match="HDF5"):
        model.save(path)
    new, parity = keras_file.load_scanned(path, keras_file.scan(path), trust=False)
    assert parity is not None
    assert parity.max_rel <= keras2.TOLERANCE
    assert parity.against.startswith("tf-keras ")
    assert new.count_params() == model.count_params()
