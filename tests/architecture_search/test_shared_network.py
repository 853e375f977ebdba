"""Sub-networks that share weights: each has the outputs and the costs of the network that is extracted from it."""

from __future__ import annotations

from typing import Any

import networks
import numpy as np
import pytest

from compress.architecture_search.costs import SubNetworkCosts
from compress.architecture_search.elastic import ElasticNetwork, SubNetwork, find, residual_blocks
from compress.architecture_search.extraction import extracted
from compress.architecture_search.network import SharedNetwork
from compress.errors import StageError
from compress.ir import keras_graph
from compress.stages.trial_conversion import TrialConverter
from compress.targets import load
from compress.training import bn_recalibration

pytestmark = pytest.mark.tensorflow


def residual(keras: Any) -> Any:
    """Residual blocks of all forms, large kernels, biases, dense layers, and a concatenation."""
    layers = keras.layers
    image = keras.Input((12, 12, 3))
    x = layers.Conv2D(16, 5, strides=2, padding="same", name="stem")(image)
    x = layers.BatchNormalization(name="stem_norm")(x)
    x = layers.ReLU()(x)
    for number in range(2):
        y = layers.Conv2D(32, 1, use_bias=False, name=f"expand{number}")(x)
        y = layers.ReLU(6.0)(layers.BatchNormalization()(y))
        y = layers.DepthwiseConv2D(7, padding="same", name=f"depthwise{number}")(y)
        y = layers.Conv2D(16, 1, name=f"project{number}")(y)
        x = layers.Add(name=f"sum{number}")([x, y] if number else [y, x])
    z = layers.Conv2D(8, 3, padding="same", activation="relu", name="branch")(x)
    x = layers.Concatenate()([x, z])
    x = layers.Flatten()(layers.AveragePooling2D(3)(x))
    x = layers.Dense(24, activation="relu", name="dense")(x)
    return keras.Model(image, layers.Dense(5, activation="softmax", name="scores")(x), name="residual")


@pytest.fixture(scope="module")
def elastic(keras: Any) -> ElasticNetwork:
    model = networks.randomized(residual(keras))
    return find(keras_graph.read(model), (0.25, 0.5), 4, blocks=True, kernels=True)


@pytest.fixture(scope="module")
def shared(elastic: ElasticNetwork) -> SharedNetwork:
    return SharedNetwork(elastic)


def chosen(elastic: ElasticNetwork) -> list[SubNetwork]:
    """Return the largest, the smallest, four random ones, and ones that are smallest in a single option each."""
    random = np.random.default_rng(0)
    largest = elastic.values(elastic.largest)
    single = [
        elastic.sub_network([*largest[:index], options[-1], *largest[index + 1 :]])
        for index, options in enumerate(elastic.options)
    ]
    return [elastic.largest, elastic.smallest, *(elastic.random(random) for _ in range(4)), *single]


def test_the_parts_that_may_be_smaller(elastic: ElasticNetwork) -> None:
    assert {block.addition for block in elastic.blocks} == {"sum0", "sum1"}
    assert {kernel.layer: kernel.sizes for kernel in elastic.kernels} == {
        "stem": (5, 3),
        "depthwise0": (7, 5, 3),
        "depthwise1": (7, 5, 3),
    }
    by_layers = {frozenset(group.layers): levels for group, levels in zip(elastic.groups, elastic.levels, strict=True)}
    assert by_layers[frozenset({"stem", "project0", "project1"})] == (16, 8, 4)
    assert by_layers[frozenset({"expand0"})] == (32, 16, 8)
    assert by_layers[frozenset({"dense"})] == (24, 12, 8)  # 8 is the next multiple of 4 above a quarter of 24
    assert elastic.count == 3**4 * 2 * 2**2 * 2 * 3**2  # "branch" has 8 channels, and no layer has fewer than 4


def test_a_sub_network_has_the_outputs_of_the_extracted_network(
    keras: Any, elastic: ElasticNetwork, shared: SharedNetwork
) -> None:
    inputs = np.random.default_rng(1).random((16, 12, 12, 3), np.float32)
    for sub_network in chosen(elastic):
        choice = shared.choice(sub_network)
        statistics = shared.statistics(inputs, choice)
        actual = np.asarray(shared.outputs(inputs, choice, statistics))
        alone = keras_graph.build(extracted(shared.trained(), sub_network))
        pairs = zip(statistics[::2], statistics[1::2], strict=True)
        measured = {norm.name: pair for norm, pair in zip(shared._norms, pairs, strict=True)}
        for norm in bn_recalibration._trained_batch_norms(alone):
            norm.set_weights([*norm.get_weights()[:2], *measured[norm.name]])
        np.testing.assert_allclose(actual, np.asarray(alone(inputs)), atol=1e-5, err_msg=str(sub_network))


def test_extraction_alone_keeps_the_outputs_with_stored_statistics(
    keras: Any, elastic: ElasticNetwork, shared: SharedNetwork
) -> None:
    inputs = np.random.default_rng(1).random((8, 12, 12, 3), np.float32)
    largest = keras_graph.build(extracted(shared.trained(), elastic.largest))
    np.testing.assert_allclose(np.asarray(largest(inputs)), np.asarray(shared.model(inputs)), atol=1e-5)


def test_costs_are_those_of_real_conversions(keras: Any, elastic: ElasticNetwork) -> None:
    target = load("edgetpu")
    host, clock = target.cost.host(None), target.cost.clock(None)
    costs = SubNetworkCosts(elastic, target)
    convert = TrialConverter(np.random.default_rng(2).random((8, 12, 12, 3), np.float32), target)
    sub_networks = [elastic.smallest, elastic.largest, elastic.random(np.random.default_rng(0))]
    for index, sub_network in enumerate(sub_networks):
        network = extracted(elastic, sub_network)
        file = convert(network, keras_graph.build(network))
        assert file.graph is not None
        if not index:
            costs.calibrate(sub_network, file)
        predicted, actual = costs.figures(sub_network), target.cost.of_file(file.graph)
        assert predicted.macs == file.macs
        assert predicted.parameters == sum(w.size for layer in network.layers.values() for w in layer.weights)
        assert predicted.size_bytes == pytest.approx(file.size_bytes, rel=0.2)  # the bytes per operator are an average
        assert predicted.latency_ms == pytest.approx(actual.latency_ms(host, clock), rel=0.01)
        assert predicted.streamed_bytes == actual.streamed_bytes


def test_a_block_that_something_else_reads_is_none(keras: Any) -> None:
    layers = keras.layers
    image = keras.Input((4, 4, 8))
    inside = layers.Conv2D(8, 1, name="inside")(image)
    total = layers.Add()([image, layers.ReLU()(inside)])
    outside = layers.Concatenate()([total, inside])
    network = keras_graph.read(keras.Model(image, layers.Flatten()(outside)))
    assert not residual_blocks(network)


def fixed_convolutions(keras: Any, groups: int = 1, padding: str = "same") -> Any:
    """Return a model with a convolution that keeps its channels, between two others."""
    layers = keras.layers
    signal = keras.Input((12, 4))
    x = layers.Conv1D(16, 3, activation="relu")(signal)
    x = layers.Conv1D(16, 5, padding=padding, groups=groups, name="fixed")(x)
    x = layers.Conv1D(16, 1, activation="relu", name="elastic")(x)
    return keras.Model(signal, layers.Dense(3)(layers.GlobalAveragePooling1D()(x)))


@pytest.mark.parametrize("kind", ["Conv1D", "Conv2D", "DepthwiseConv2D"])
@pytest.mark.parametrize(("size", "rate"), [(3, 2), (2, 3)])
def test_dilated_convolutions_keep_the_size(keras: Any, kind: str, size: int, rate: int) -> None:
    layers = keras.layers
    shape = (11,) if kind == "Conv1D" else (11, 9)
    inputs = keras.Input((*shape, 3))
    first, last = (layers.Conv1D, layers.Conv1D) if kind == "Conv1D" else (layers.Conv2D, layers.Conv2D)
    x = first(16, 3, padding="same", activation="relu")(inputs)
    settings: dict[str, Any] = {} if kind == "DepthwiseConv2D" else {"filters": 16}
    x = getattr(layers, kind)(kernel_size=size, dilation_rate=rate, padding="same", name="dilated", **settings)(x)
    x = layers.Flatten()(last(16, 1, activation="relu")(x))
    model = networks.randomized(keras.Model(inputs, layers.Dense(3)(x)))
    elastic = find(keras_graph.read(model), (0.5,), 4, blocks=True, kernels=True)
    shared = SharedNetwork(elastic)
    samples = np.random.default_rng(1).random((4, *shape, 3), np.float32)
    for sub_network in (elastic.largest, elastic.smallest):
        alone = keras_graph.build(extracted(elastic, sub_network))
        actual = shared.outputs(samples, shared.choice(sub_network), [])
        np.testing.assert_allclose(np.asarray(actual), np.asarray(alone(samples)), atol=1e-5)


def test_layers_named_like_gates_stay(keras: Any) -> None:
    layers = keras.layers
    image = keras.Input((6, 6, 8))
    x = layers.ReLU()(layers.Conv2D(8, 3, padding="same", name="sum_gate")(image))
    x = layers.Add(name="sum")([image, layers.Conv2D(8, 3, padding="same", name="sum_gate_")(x)])
    model = networks.randomized(keras.Model(image, layers.Dense(3)(layers.GlobalAveragePooling2D()(x))))
    elastic = find(keras_graph.read(model), (0.5,), 4, blocks=True, kernels=True)
    shared = SharedNetwork(elastic)
    inputs = np.random.default_rng(1).random((4, 6, 6, 8), np.float32)
    np.testing.assert_allclose(np.asarray(shared.model(inputs)), np.asarray(model(inputs)), atol=1e-5)
    alone = keras_graph.build(extracted(elastic, elastic.smallest))
    actual = shared.outputs(inputs, shared.choice(elastic.smallest), [])
    np.testing.assert_allclose(np.asarray(actual), np.asarray(alone(inputs)), atol=1e-5)


def test_layers_that_a_concatenation_joins_keep_multiples(keras: Any) -> None:
    layers = keras.layers
    image = keras.Input((6, 6, 3))
    branches = [layers.Conv2D(width, 3, padding="same", name=f"b{width}")(image) for width in (32, 20)]
    joined = layers.Concatenate()(branches)
    x = layers.Add()([joined, layers.Conv2D(52, 3, padding="same", name="inner")(joined)])
    model = networks.randomized(keras.Model(image, layers.Dense(3)(layers.GlobalAveragePooling2D()(x))))
    elastic = find(keras_graph.read(model), (0.25, 0.5, 0.75), 8, blocks=True, kernels=True)
    (levels,) = elastic.levels
    assert levels[0] == 52
    assert levels[-1] == 16
    for width in levels[1:]:
        sub_network = elastic.sub_network([width, 1])
        filters = {name: layer.config.get("filters") for name, layer in extracted(elastic, sub_network).layers.items()}
        assert filters["b32"] % 8 == 0
        assert filters["b20"] == 20 or filters["b20"] % 8 == 0
        assert filters["b32"] + filters["b20"] == width


@pytest.mark.parametrize("settings", [{"groups": 4}, {"padding": "causal"}])
def test_convolutions_that_keep_their_channels_train_and_run(keras: Any, settings: dict[str, Any]) -> None:
    import tensorflow

    model = networks.randomized(fixed_convolutions(keras, **settings))
    elastic = find(keras_graph.read(model), (0.5,), 4, blocks=True, kernels=True)
    assert [group.layers for group in elastic.groups] == [("elastic",)]
    shared = SharedNetwork(elastic)
    choice = shared.choice(elastic.smallest)
    inputs = np.random.default_rng(1).random((8, 12, 4), np.float32)
    alone = keras_graph.build(extracted(elastic, elastic.smallest))
    np.testing.assert_allclose(np.asarray(shared.outputs(inputs, choice, [])), np.asarray(alone(inputs)), atol=1e-5)

    @tensorflow.function  # type: ignore[untyped-decorator]
    def gradients() -> Any:
        with tensorflow.GradientTape() as tape:
            loss = tensorflow.reduce_mean(shared.run(inputs, choice, training=True))
        return tape.gradient(loss, [variable.value for variable in shared.model.trainable_variables])

    assert all(np.asarray(gradient).any() for gradient in gradients())


def test_a_grouped_convolution_keeps_its_kernel(keras: Any) -> None:
    layers = keras.layers
    image = keras.Input((8, 8, 4))
    x = layers.Conv2D(16, 5, padding="same", groups=4)(image)
    x = layers.Conv2D(16, 5, padding="same", name="elastic")(x)
    network = keras_graph.read(keras.Model(image, layers.GlobalAveragePooling2D()(x)))
    elastic = find(network, (0.5,), 4, blocks=True, kernels=True)
    assert [kernel.layer for kernel in elastic.kernels] == ["elastic"]


def test_a_network_without_elastic_parts_is_refused(keras: Any) -> None:
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
    with pytest.raises(StageError, match="no part of this model can be smaller"):
        find(keras_graph.read(model), (0.5,), 8, blocks=True, kernels=True)
