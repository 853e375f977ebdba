"""A network without some channels gives the same outputs as the network with these channels masked everywhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import networks
import numpy as np
import pytest

from compress.learning.pruning import cost
from compress.learning.pruning.importance import gated_model, produces_channels
from compress.model.ir import channel_groups as structure
from compress.model.ir import keras_graph
from compress.model.ir.channel_groups import ChannelGroups, Mask
from compress.model.ir.keras_graph import Layer, LayerOutput, Network
from compress.targets import load

pytestmark = pytest.mark.tensorflow


def chosen(net: Network, channels: ChannelGroups, share: float, seed: int = 1) -> Mask:
    """Return a mask that removes random groups of every layer, and keeps at least four."""
    random = np.random.default_rng(seed)
    kept = np.ones(len(channels.group), bool)
    for layer in net.layers.values():
        if layer.calls and produces_channels(layer):
            groups = np.unique(channels.group[channels.layouts[LayerOutput(layer.name)]])
            groups = random.permutation(groups[~channels.pinned[groups]])
            left = groups[kept[groups]]  # layers that are tied to earlier ones have already lost some
            kept[left[: max(min(int(share * len(groups)) + len(left) - len(groups), len(left) - 4), 0)]] = False
    return channels.with_coupled(kept)


def masked(net: Network, channels: ChannelGroups, kept: Mask) -> Network:
    """Return the network with a Keras layer after each tensor, which multiplies the removed channels by 0."""
    added, moved = {}, {}
    for tensor, layout in channels.layouts.items():
        mask = kept[layout].astype(float)
        if not mask.all():
            name = f"mask_{len(added)}"
            config = {"name": name, "scale": mask.tolist(), "offset": 0.0}
            entry = {"module": "keras.layers", "class_name": "Rescaling", "config": config, "registered_name": None}
            added[name] = Layer(name, "Rescaling", entry, ({"args": [tensor], "kwargs": {}},), ())
            moved[tensor] = LayerOutput(name)
    rerouted = net.edited({}, moved)
    return replace(rerouted, layers={**rerouted.layers, **added})


def outputs(model: Any, inputs: Any) -> list[Any]:
    predictions = model(inputs, training=False)
    return [np.asarray(output) for output in (predictions if isinstance(predictions, list | tuple) else [predictions])]


def assert_same(actual: list[Any], expected: list[Any]) -> None:
    for one, other in zip(actual, expected, strict=True):
        assert np.ptp(other) > 1e-3  # a constant output would prove nothing
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5 * np.abs(other).max())


def resnext(keras: Any) -> Any:
    """A grouped convolution between others, and a hard-swish of operations with constants."""
    layers = keras.layers
    image = keras.Input((12, 12, 3))
    x = layers.Conv2D(32, 3, padding="same", activation="relu")(image)
    y = layers.Conv2D(32, 3, padding="same", groups=8, use_bias=False)(x)
    y = layers.BatchNormalization()(y)
    y = y * layers.ReLU(6.0)(y + 3.0) * (1.0 / 6.0)
    x = layers.Conv2D(48, 1)(y)
    x = layers.Conv2D(48, 3, groups=48)(x)  # as many groups as channels
    x = layers.GlobalAveragePooling2D()(x)
    return keras.Model(image, layers.Dense(5)(x), name="resnext")


def detector(keras: Any) -> Any:
    """Boxes and scores from two maps, each concatenated along the positions."""
    layers = keras.layers
    image = keras.Input((24, 24, 3))
    x, boxes, scores = image, [], []
    for filters in (12, 16, 24):
        x = layers.Conv2D(filters, 3, strides=2, padding="same", use_bias=False)(x)
        x = layers.ReLU(6.0)(layers.BatchNormalization()(x))
        if filters > 12:
            head = layers.SeparableConv2D(16, 3, padding="same", activation="relu")(x)
            boxes.append(layers.Reshape((-1, 4))(layers.Conv2D(8, 1)(head)))
            scores.append(layers.Reshape((-1, 3))(layers.Conv2D(6, 1)(head)))
    return keras.Model(image, [layers.Concatenate(axis=1)(boxes), layers.Concatenate(axis=1)(scores)], name="detector")


def u_net(keras: Any) -> Any:
    """A U-Net: downsampling, upsampling, and skip connections."""
    layers = keras.layers
    image = keras.Input((16, 16, 3))
    skips, x = [], image
    for filters in (8, 16):
        x = layers.Conv2D(filters, 3, padding="same")(x)
        x = layers.ReLU()(layers.BatchNormalization()(x))
        skips.append(x)
        x = layers.MaxPooling2D()(x)
    x = layers.Conv2D(24, 3, padding="same", activation="gelu")(x)
    for filters, skip in zip((16, 8), reversed(skips), strict=True):
        x = layers.Concatenate()([layers.Conv2DTranspose(filters, 2, 2)(x), skip])
        x = layers.Conv2D(filters, 3, padding="same", activation="sigmoid")(x)  # 0 becomes 0.5
    x = layers.UpSampling2D(2)(x)
    return keras.Model(image, layers.Conv2D(3, 1)(x), name="u_net")


OWN = (*networks.ALL, networks.nested_to_the_end, networks.shared_backwards, resnext, detector, u_net)


@pytest.mark.parametrize("share", [0.3, 0.6])
@pytest.mark.parametrize("builder", OWN, ids=lambda b: b.__name__)
def test_removal_is_exact(keras: Any, builder: networks.Builder, share: float) -> None:
    model = networks.randomized(builder(keras))
    inputs = np.random.default_rng(2).random((4, *model.input_shape[1:]), np.float32)
    net = keras_graph.read(model)
    channels = structure.find_groups(net)
    kept = chosen(net, channels, share)
    smaller = keras_graph.build(structure.remove(net, channels, kept))
    expected = outputs(keras_graph.build(masked(net, channels, kept)), inputs)
    assert_same(outputs(smaller, inputs), expected)
    assert smaller.count_params() < (1 - 0.6 * share) * model.count_params()
    off = np.repeat(kept[np.newaxis].astype(np.float32), len(inputs), axis=0)
    assert_same(outputs(gated_model(net, channels), [inputs, off]), expected)


APPLICATIONS: dict[str, Callable[[Any], Any]] = {
    "MobileNetV1": lambda keras: keras.applications.MobileNet(**_small(), alpha=0.25),
    "MobileNetV2": lambda keras: keras.applications.MobileNetV2(**_small(), alpha=0.35),
    "MobileNetV3": lambda keras: keras.applications.MobileNetV3Small(**_small(), alpha=0.75),
    "ResNet50V2": lambda keras: keras.applications.ResNet50V2(**_small()),
    "DenseNet121": lambda keras: keras.applications.DenseNet121(**_small()),
    "EfficientNetB0": lambda keras: keras.applications.EfficientNetB0(**_small()),
    "Xception": lambda keras: keras.applications.Xception(**_small(71)),
}


def _small(side: int = 32) -> dict[str, Any]:
    return {"input_shape": (side, side, 3), "weights": None, "classes": 10, "classifier_activation": None}


@pytest.mark.parametrize("name", APPLICATIONS)
def test_removal_is_exact_in_known_architectures(keras: Any, name: str) -> None:
    model = networks.randomized(APPLICATIONS[name](keras))
    scale = 255 if name in ("MobileNetV3", "EfficientNetB0") else 1
    inputs = np.random.default_rng(2).random((2, *model.input_shape[1:]), np.float32) * scale
    net = keras_graph.read(model)
    channels = structure.find_groups(net)
    switched = gated_model(net, channels)
    for share in (0.3, 0.6):
        kept = chosen(net, channels, share)
        smaller = keras_graph.build(structure.remove(net, channels, kept))
        off = np.repeat(kept[np.newaxis].astype(np.float32), len(inputs), axis=0)
        assert_same(outputs(smaller, inputs), outputs(switched, [inputs, off]))
        assert smaller.count_params() < (1 - 0.6 * share) * model.count_params()


def test_a_grouped_convolution_loses_whole_groups(keras: Any) -> None:
    net = keras_graph.read(resnext(keras))
    channels = structure.find_groups(net)
    smaller = structure.remove(net, channels, chosen(net, channels, 0.5))
    first = next(layer for layer in smaller.layers.values() if layer.config.get("groups", 1) > 1)
    assert first.config["groups"] == 4
    assert first.weights[0].shape[2:] == (4, 16)  # four channels in each of four groups


def groups_of_classifier(keras: Any, image: Any, x: Any) -> ChannelGroups:
    """Return the groups of the network from an image to a map, with the end of a classifier."""
    scores = keras.layers.Dense(2)(keras.layers.GlobalAveragePooling2D()(x))
    return structure.find_groups(keras_graph.read(keras.Model(image, scores)))


def pinned(channels: ChannelGroups, *names: str) -> list[bool]:
    """Return for each layer whether all its channels, or none, are pinned."""
    masks = [channels.pinned[channels.layouts[LayerOutput(name)]] for name in names]
    assert all(mask.all() or not mask.any() for mask in masks)
    return [bool(mask.all()) for mask in masks]


def test_functions_across_channels_hold_them(keras: Any) -> None:
    layers = keras.layers
    image = keras.Input((8, 8, 3))
    inside = layers.Conv2D(8, 1, activation="softmax", name="inside")(image)
    x = layers.Conv2D(8, 1, name="before")(inside)
    x = layers.Activation("log_softmax", name="activation")(x)
    x = layers.DepthwiseConv2D(3, activation="softmax", name="depthwise")(layers.Conv2D(8, 1, name="deep")(x))
    channels = groups_of_classifier(keras, image, layers.Conv2D(8, 1, name="free")(x))
    assert pinned(channels, "inside", "before", "deep", "free") == [True, True, True, False]
    assert channels.unsupported == ("activation", "depthwise")


def test_settings_and_constants_with_a_number_for_each_channel_hold_them(keras: Any) -> None:
    layers = keras.layers
    image = keras.Input((8, 8, 3))
    x = layers.Rescaling([1.0, 2.0, 3.0, 4.0], name="scaled")(layers.Conv2D(4, 1)(image))
    x = layers.Dropout(0.5, noise_shape=(None, 1, 1, 4), name="dropped")(layers.Conv2D(4, 1)(x))
    x = keras.ops.multiply(layers.Conv2D(4, 1)(x), keras.ops.convert_to_tensor([1.0, 2.0, 3.0, 4.0]))
    channels = groups_of_classifier(keras, image, x)
    assert {"scaled", "dropped"} < set(channels.unsupported)
    assert len(channels.unsupported) == 3
    assert channels.pinned.all()


def test_what_is_not_understood_is_rebuilt_as_it_is(keras: Any) -> None:
    layers = keras.layers
    image = keras.Input((8, 8, 3))
    x = layers.Permute((3, 1, 2))(layers.Conv2D(6, 1)(image))
    x = layers.Conv2D(5, 3, data_format="channels_first", name="first")(x)
    x = layers.BatchNormalization(axis=1, name="norm")(x)
    x = layers.TimeDistributed(layers.Dense(4))(x)
    model = keras.Model(image, layers.Dense(2)(layers.Flatten()(x)))
    net = keras_graph.read(model)
    channels = structure.find_groups(net)
    whole = structure.remove(net, channels, np.ones(len(channels.group), bool))
    for _ in range(2):  # Keras removes settings from the configuration that it gets
        assert keras_graph.build(whole).count_params() == model.count_params()
    costs = cost.Costs(net, channels, [], load("edgetpu"))
    assert costs.parameters(()) == model.count_params()


def test_a_reshape_that_is_called_twice_ties_its_inputs(keras: Any) -> None:
    layers = keras.layers
    image = keras.Input((4, 4, 3))
    flat = layers.Reshape((16, -1))
    a, b = flat(layers.Conv2D(8, 1, name="a")(image)), flat(layers.Conv2D(8, 1, name="b")(image))
    x = layers.GlobalAveragePooling1D()(layers.Concatenate()([a, b]))
    net = keras_graph.read(keras.Model(image, layers.Dense(2)(x)))
    channels = structure.find_groups(net)
    kept = channels.layouts[LayerOutput("a")], channels.layouts[LayerOutput("b")]
    assert (channels.group[kept[0]] == channels.group[kept[1]]).all()
    assert keras_graph.build(structure.remove(net, channels, chosen(net, channels, 0.5))).output_shape == (None, 2)


def test_gates_reach_inputs_that_have_a_name(keras: Any) -> None:
    layers = keras.layers
    image = keras.Input((6, 6, 2))
    x = layers.Conv2D(8, 3, name="a")(inputs=image)
    x = layers.Conv2D(8, 3, name="b")(inputs=x)
    model = networks.randomized(keras.Model(image, layers.Dense(2)(layers.Flatten()(x))))
    net = keras_graph.read(model)
    channels = structure.find_groups(net)
    kept = chosen(net, channels, 0.5)
    inputs = np.random.default_rng(0).random((3, 6, 6, 2), np.float32)
    off = np.repeat(kept[np.newaxis].astype(np.float32), 3, axis=0)
    smaller = keras_graph.build(structure.remove(net, channels, kept))
    assert_same(outputs(gated_model(net, channels), [inputs, off]), outputs(smaller, inputs))
