"""Functions of TensorFlow between the layers of a Keras 2 model, and the layers that they become."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from compress.core.errors import ModelError
from compress.model.importers.keras import keras2
from compress.model.importers.keras.keras2_functions import FUNCTIONS
from compress.model.importers.keras.keras_file import load

pytestmark = pytest.mark.tensorflow
Save = Callable[[Any, str], Path]
Function = Callable[[Any, Any], Any]

IMAGES: dict[str, Function] = {
    "numbers beside": lambda tf, x: 3.0 / (1 - (x * 2 + 5.0)) ** 2,
    "an array beside": lambda tf, x: x * np.array([1.0, 2, 3, 4]) + tf.constant([[[1.0]]]),
    "two tensors": lambda tf, x: tf.maximum(x + x[:, :, :, :1], tf.minimum(x, x - 2.0) / (x * x + 1)),
    "one for all places": lambda tf, x: x * tf.reduce_mean(x, axis=[1, 2], keepdims=True),
    "squared difference": lambda tf, x: tf.math.squared_difference(x, 1.0) + tf.square(x),
    "add_n": lambda tf, x: tf.add_n([x, x, x * 2]),
    "activations": lambda tf, x: tf.nn.relu(x) + tf.nn.relu6(x * 9) + tf.nn.sigmoid(x) + tf.tanh(x) + tf.nn.silu(x),
    "more activations": lambda tf, x: (
        tf.nn.elu(x) + tf.nn.selu(x) + tf.nn.gelu(x, approximate=True) + tf.nn.leaky_relu(x, 0.3) + tf.nn.softplus(x)
    ),
    "softmax": lambda tf, x: tf.nn.softmax(x) + tf.nn.softmax(x, axis=1) + tf.nn.log_softmax(x),
    "mathematics": lambda tf, x: tf.exp(-tf.abs(x)) + tf.sqrt(tf.abs(x)) + tf.sin(x) + tf.floor(x) + tf.sign(x),
    "clipped": lambda tf, x: tf.clip_by_value(x, 0, 1) + tf.clip_by_value(x, -0.5, 0.5),
    "hard swish": lambda tf, x: x * tf.nn.relu6(x + 3) * (1.0 / 6.0),
    "slices": lambda tf, x: x[:, 1:-1, ::2, 1] + x[..., 1:7, ::2, 0],
    "new sides": lambda tf, x: tf.squeeze(x[:, None, :, :, :1] * 2, axis=[1, 4]),
    "an index": lambda tf, x: x[:, 3, :, -1],
    "tf.slice": lambda tf, x: tf.slice(x, [0, 1, 2, 0], [-1, 3, -1, 2]),
    "split": lambda tf, x: tf.concat(tf.split(x, 2, axis=-1)[::-1] + tf.split(x, [1, 3], axis=3), axis=-1),
    "unstack": lambda tf, x: tf.stack(tf.unstack(x, axis=1)[:3], axis=2),
    "channel shuffle": lambda tf, x: tf.reshape(
        tf.transpose(tf.reshape(x, [-1, 8, 8, 2, 2]), [0, 1, 2, 4, 3]), [-1, 8, 8, 4]
    ),
    "flattened by its shape": lambda tf, x: tf.reshape(x, (tf.shape(x)[0], x.shape[1] * 8 * 4)),
    "flattened by -1": lambda tf, x: tf.reshape(x, [tf.shape(x)[0], -1]),
    "reductions": lambda tf, x: (
        tf.reduce_mean(x, [1, 2], keepdims=True)
        + tf.reduce_max(x, axis=[1, 2], keepdims=True)
        + tf.reduce_sum(x, -1, keepdims=True)
        + tf.reduce_min(x, axis=1, keepdims=True)
    ),
    "pads": lambda tf, x: tf.pad(
        tf.pad(tf.pad(x, [[0, 0], [1, 2], [0, 1], [0, 0]]), [[0, 0], [1, 1], [1, 1], [0, 0]], mode="REFLECT"),
        [[0, 0], [0, 0], [0, 0], [0, 2]],
        constant_values=1.5,
    ),
    "tiled": lambda tf, x: tf.tile(x, [1, 2, 1, 1]),
    "gathered": lambda tf, x: tf.gather(x, [2, 0], axis=-1),
    "resized": lambda tf, x: tf.image.resize(x, [16, 12]) + tf.image.resize(x, (16, 12), method="nearest"),
    "blocks": lambda tf, x: tf.nn.depth_to_space(tf.nn.space_to_depth(x, 2), 2),
    "pooled": lambda tf, x: tf.nn.max_pool2d(x, 3, 2, "SAME") + tf.nn.avg_pool2d(x, 2, 2, "VALID"),
    "normalized": lambda tf, x: tf.nn.l2_normalize(x, axis=-1),
    "cast": lambda tf, x: tf.cast(tf.cast(x * 3, "int32"), tf.float32),
    "nothing": lambda tf, x: tf.identity(tf.stop_gradient(x)) * 1.0,
    "dense": lambda tf, x: tf.matmul(tf.reshape(x, (-1, 256)), tf.ones((256, 3)) * 0.1),
    "biases": lambda tf, x: tf.nn.bias_add(x, [1.0, 2, 3, 4]),
}


@pytest.mark.parametrize("case", IMAGES)
@pytest.mark.parametrize("name", ["m.h5", "m.keras"])
def test_a_function_computes_the_same(tf_keras: Any, saved: Save, tmp_path: Path, case: str, name: str) -> None:
    import tensorflow as tf

    image = tf_keras.Input((8, 8, 4))
    model = tf_keras.Model(image, IMAGES[case](tf, image))
    new = load(saved(model, "m.h5" if case == "slices" else name))  # Keras 2 cannot write `...` into .keras
    new.save(tmp_path / "new.keras")
    assert keras2.difference(model, load(tmp_path / "new.keras")) <= keras2.TOLERANCE


def test_functions_become_layers_where_there_are_some(tf_keras: Any, saved: Save) -> None:
    import tensorflow as tf

    image, other = tf_keras.Input((8, 8, 4), name="in"), tf_keras.Input((8, 8, 4), name="other")
    values = tf.reduce_mean(tf.concat([tf.nn.relu6(image + other), tf.pad(image, [[0, 0]] * 4)], -1), [1, 2])
    model = tf_keras.Model([image, other], values)
    new = load(saved(model, "m.h5"))
    kinds = {type(layer).__name__ for layer in new.layers}
    assert kinds == {"InputLayer", "Add", "Activation", "Concatenate", "ZeroPadding2D", "GlobalAveragePooling2D"}
    assert any(layer.name.startswith("tf.nn.relu6") for layer in new.layers)


def test_a_model_with_functions_inside_is_called_twice(tf_keras: Any, saved: Save) -> None:
    import tensorflow as tf

    inside = tf_keras.Input((6,))
    inner = tf_keras.Model(inside, tf_keras.layers.Dense(6)(tf.nn.relu(inside * 2.0)), name="inner")
    inputs = tf_keras.Input((6,))
    new = load(saved(tf_keras.Model(inputs, inner(inner(inputs)) - 1.0), "m.h5"))
    assert new.count_params() == 42


def test_hard_sigmoid_is_that_of_keras_2(tf_keras: Any, saved: Save, tmp_path: Path) -> None:
    layers, image = tf_keras.layers, tf_keras.Input((8, 8, 3))
    values = layers.Activation("hard_sigmoid")(layers.Conv2D(4, 3, activation="hard_sigmoid", name="c")(image))
    model = tf_keras.Model(image, values)
    new = load(saved(model, "m.h5"))
    assert keras2.difference(model, new) <= keras2.TOLERANCE
    assert [layer.name for layer in new.layers][2:4] == ["c_scaled", "c_clipped"]


REFUSED: dict[str, tuple[Function, str]] = {
    "samples mixed": (lambda tf, x: tf.reduce_mean(x, axis=0), "it mixes the samples of a batch"),
    "a sample": (lambda tf, x: x[0:1], "it selects samples of a batch"),
    "batch moved": (lambda tf, x: tf.transpose(x, [1, 0, 2, 3]), "it moves the batch"),
    "aspect kept": (lambda tf, x: tf.image.resize(x, [4, 4], preserve_aspect_ratio=True), "aspect ratio"),
    "unknown": (lambda tf, x: tf.math.lgamma(x), "tf.math.lgamma has no counterpart"),
    "computed axes": (lambda tf, x: tf.tile(x, tf.shape(x) * 0 + 1), "its sizes or axes"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_said_in_keras_3_is_refused_with_the_reason(tf_keras: Any, saved: Save, case: str) -> None:
    import tensorflow as tf

    function, why = REFUSED[case]
    image = tf_keras.Input((8, 8, 4))
    with pytest.raises(ModelError, match="Keras 3 has no counterpart for") as caught:
        load(saved(tf_keras.Model(image, function(tf, image)), "m.h5"))
    assert why in caught.value.what
    assert caught.value.facts["refused"][0]["operator"] in ("TFOpLambda", "SlicingOpLambda")


def test_functions_that_reach_out_are_never_given_to_tf_keras() -> None:
    assert not [name for name in FUNCTIONS if name.startswith(("io.", "py_function", "numpy_function", "raw_ops"))]
    assert not [name for name in FUNCTIONS if "file" in name or "print" in name or "load" in name]


# --- the op layers of TensorFlow 2.0 to 2.3 ------------------------------------------------

Node = tuple[str, dict[str, Any], dict[str, Any]]
NODES: dict[str, Node] = {
    "Mul": ("Mul", {}, {"1": 2.0}),
    "AddV2 of a constant before": ("AddV2", {}, {"0": [1.0, 2, 3, 4]}),
    "Relu6": ("Relu6", {}, {}),
    "Mean": ("Mean", {"keep_dims": {"b": True}, "Tidx": {"type": "DT_INT32"}}, {"1": [1, 2]}),
    "Reshape": ("Reshape", {"Tshape": {"type": "DT_INT32"}}, {"1": [-1, 256]}),
    "Pad": ("Pad", {"Tpaddings": {"type": "DT_INT32"}}, {"1": [[0, 0], [1, 1], [2, 0], [0, 0]]}),
    "StridedSlice": (
        "StridedSlice",
        {
            "begin_mask": {"i": "5"},
            "end_mask": {"i": "1"},
            "shrink_axis_mask": {"i": "8"},
            "Index": {"type": "DT_INT32"},
        },
        {"1": [0, 1, 0, 2], "2": [0, 7, 6, 3], "3": [1, 2, 1, 1]},
    ),
    "LeakyRelu": ("LeakyRelu", {"alpha": {"f": 0.25}}, {}),
    "Softmax": ("Softmax", {}, {}),
    "ResizeBilinear": ("ResizeBilinear", {"half_pixel_centers": {"b": True}}, {"1": [4, 6]}),
    "MaxPool": (
        "MaxPool",
        {
            "ksize": {"list": {"i": ["1", "2", "2", "1"]}},
            "strides": {"list": {"i": ["1", "2", "2", "1"]}},
            "padding": {"s": "U0FNRQ=="},
            "data_format": {"s": "TkhXQw=="},
        },
        {},
    ),
}


def old_file(path: Path, operator: str, attributes: dict[str, Any], constants: dict[str, Any]) -> Path:
    """Write a model of one node as Keras 2.3 did: node_def as JSON, constants by the index of their input."""
    count = 1 + len(constants)
    attr = {"T": {"type": "DT_FLOAT"}, **attributes}
    node = {"name": operator, "op": operator, "input": [f"in{at}" for at in range(count)], "attr": attr}
    input_config = {
        "batch_input_shape": [None, 8, 8, 4],
        "dtype": "float32",
        "sparse": False,
        "ragged": False,
        "name": "in",
    }
    config = {"name": operator, "trainable": True, "dtype": "float32", "node_def": node, "constants": constants}
    layers = [
        {"class_name": "InputLayer", "config": input_config, "name": "in", "inbound_nodes": []},
        {
            "class_name": "TensorFlowOpLayer",
            "config": config,
            "name": f"tf_op_layer_{operator}",
            "inbound_nodes": [[["in", 0, 0, {}]]],
        },
    ]
    ends = {"input_layers": [["in", 0, 0]], "output_layers": [[f"tf_op_layer_{operator}", 0, 0]]}
    model = {"class_name": "Model", "config": {"name": "old", "layers": layers, **ends}}
    with h5py.File(path, "w") as file:
        group = file.create_group("model_weights")
        group.attrs["layer_names"] = np.array([b"in"])
        group.create_group("in").attrs["weight_names"] = np.array([], "S1")
        file.attrs["model_config"] = json.dumps(model)
        file.attrs["keras_version"] = "2.3.0-tf"
    return path


@pytest.mark.parametrize("case", NODES)
@pytest.mark.usefixtures("tf_keras")
def test_graph_nodes_of_older_releases(tmp_path: Path, case: str) -> None:
    model = load(old_file(tmp_path / "m.h5", *NODES[case]))  # `load` compares it with tf-keras
    assert model.input_shape == (None, 8, 8, 4)


def test_graph_nodes_that_reach_out_are_refused(tmp_path: Path) -> None:
    for operator in ("ReadFile", "PyFunc", "WriteFile"):
        with pytest.raises(ModelError, match=f"the node '{operator}' has no counterpart"):
            load(old_file(tmp_path / "m.h5", operator, {}, {}), trust=True)
