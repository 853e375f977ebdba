"""Removing channels must give what the network with these channels set to zero gives."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import networks
import numpy as np
import pytest

from compress.errors import StageError
from compress.training import channels as structure
from compress.training import network, pruning
from compress.training.channels import MAKERS, Channels, Mask
from compress.training.network import Layer, Network, Tensor

pytestmark = pytest.mark.tensorflow


def silenced(net: Network, channels: Channels, kept: Mask) -> Network:
    """The network with every removed channel set to zero wherever it is made or shifted."""

    def silent(layer: Layer) -> Layer:
        if not layer.calls or not layer.weights:
            return layer
        mask = kept[channels.layouts[Tensor(layer.name)]].astype(np.float32)
        weights = [np.array(w) for w in layer.weights]
        if layer.kind in MAKERS:
            axis = MAKERS[layer.kind][1]
            weights[0] = np.moveaxis(np.moveaxis(weights[0], axis, -1) * mask, -1, axis)
            weights[1:] = [w * mask for w in weights[1:]]
        elif layer.kind == "SeparableConv2D":
            weights[1:] = [w * mask for w in weights[1:]]
        elif layer.kind == "BatchNormalization":  # gamma, beta, mean, variance
            weights[1], weights[2] = weights[1] * mask, weights[2] * mask
        elif layer.kind == "DepthwiseConv2D":
            weights[1:] = [w * mask for w in weights[1:]]
        return replace(layer, weights=tuple(weights))

    return replace(net, layers={name: silent(layer) for name, layer in net.layers.items()})


@pytest.mark.parametrize("share", [0.35, 0.7])
@pytest.mark.parametrize("builder", networks.ALL, ids=lambda b: b.__name__)
def test_removal_is_exact(keras: Any, builder: networks.Builder, share: float) -> None:
    net = network.read(networks.randomized(builder(keras)))
    channels, plan = pruning.plan(net, share)
    smaller = network.build(structure.remove(net, channels, plan.kept))
    reference = network.build(silenced(net, channels, plan.kept))
    given = np.random.default_rng(2).random((4, 12, 12, 3), np.float32)
    expected = np.asarray(reference(given))
    assert np.ptp(expected) > 1e-3  # an output that says nothing would prove nothing
    np.testing.assert_allclose(np.asarray(smaller(given)), expected, rtol=1e-5, atol=1e-5)
    assert smaller.count_params() < reference.count_params()


@pytest.mark.parametrize("builder", networks.ALL, ids=lambda b: b.__name__)
def test_macs_are_those_of_the_tflite_file(keras: Any, builder: networks.Builder) -> None:
    from compress.quantization import conversion
    from compress.tflite import arithmetic, graph

    net = network.read(builder(keras))
    smaller, plan = pruning.prune(net, 0.5)
    for kind, macs in ((net, plan.macs_before), (smaller, plan.macs_after)):
        content = conversion.convert_float(network.build(kind))
        assert arithmetic.total_macs(graph.parse(content)) == macs


@pytest.mark.parametrize("share", [0.2, 0.5, 0.9])
def test_the_share_of_macs_is_kept_and_nearly_used(keras: Any, share: float) -> None:
    _, plan = pruning.prune(network.read(networks.inverted_residual(keras)), share)
    assert plan.macs_after <= share * plan.macs_before
    assert plan.macs_after >= 0.6 * share * plan.macs_before


def test_outputs_are_never_cut(keras: Any) -> None:
    smaller, _ = pruning.prune(network.read(networks.branches(keras)), 0.3)
    assert network.build(smaller).output_shape == (None, 5)


def test_the_least_important_channels_go(keras: Any) -> None:
    model = networks.plain(keras)
    conv = next(layer for layer in model.layers if layer.__class__.__name__ == "Conv2D")
    kernel = np.array(conv.get_weights()[0])
    kernel[..., [1, 4]] *= 1e-3
    conv.set_weights([kernel])
    net = network.read(model)
    channels, plan = pruning.plan(net, 0.2)
    kept = plan.kept[channels.layouts[Tensor(conv.name)]]
    assert not kept[1]
    assert not kept[4]


def test_a_channel_whose_batch_norm_scale_is_zero_goes_first(keras: Any) -> None:
    model = networks.plain(keras)
    conv, norm = (layer for layer in model.layers[1:3])
    gamma, *rest = norm.get_weights()
    gamma[3] = 0
    norm.set_weights([gamma, *rest])
    channels, plan = pruning.plan(network.read(model), 0.2)
    assert not plan.kept[channels.layouts[Tensor(conv.name)]][3]


def test_out_of_reach_says_what_is_possible(keras: Any) -> None:
    with pytest.raises(StageError, match=r"keep_macs 0.001 is out of reach.*choose keep_macs >= 0\.\d+"):
        pruning.prune(network.read(networks.plain(keras)), 0.001)


def test_a_model_without_hidden_channels_cannot_be_pruned(keras: Any) -> None:
    image = keras.Input((4, 4, 1))
    model = keras.Model(image, keras.layers.Dense(3)(keras.layers.Flatten()(image)))
    with pytest.raises(StageError, match="no channel of this model can be removed"):
        pruning.prune(network.read(model), 0.5)


def test_what_is_not_understood_is_left_alone(keras: Any) -> None:
    image = keras.Input((8, 8, 3))
    x = keras.layers.Conv2D(8, 3, name="free")(image)
    x = keras.layers.Conv2D(8, 3, name="before")(x)
    x = keras.layers.LayerNormalization()(x)
    x = keras.layers.GlobalAveragePooling2D()(keras.layers.Conv2D(8, 3, groups=4, name="grouped")(x))
    model = keras.Model(image, keras.layers.Dense(3)(x))
    smaller, plan = pruning.prune(network.read(model), 0.7)
    assert set(plan.layers) == {"free"}
    assert network.build(smaller).get_layer("before").filters == 8


def test_a_constant_operand_holds_the_channels_that_it_is_added_to(keras: Any) -> None:
    image = keras.Input((6, 6, 3))
    x = keras.layers.Conv2D(4, 3, name="conv")(image)
    x = keras.ops.add(x, np.arange(4, dtype=np.float32))
    x = keras.layers.Conv2D(5, 1, name="next")(x)
    model = keras.Model(image, keras.layers.Dense(2)(keras.layers.GlobalAveragePooling2D()(x)))
    channels = structure.follow(network.read(model))
    assert channels.pinned[channels.layouts[Tensor("conv")]].all()
    assert not channels.pinned[channels.layouts[Tensor("next")]].any()
