"""The allocation of pruning: the channels that are removed, and their number in each set."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import networks
import numpy as np
import pytest
from numpy.typing import NDArray

from compress.core.errors import StageError
from compress.learning.procedures.trial_conversion import TrialConverter
from compress.learning.pruning import cost
from compress.learning.pruning.allocation import AllocationMethod, ImportanceLosses, importance_losses, levels
from compress.learning.pruning.cost import TrialConversion
from compress.learning.pruning.layer_groups import MIN_WIDTH, Widths, layer_groups
from compress.learning.pruning.objective import Allocation, Objective
from compress.learning.pruning.prunable import PrunableNetwork, prepare
from compress.learning.quantization import calibration, export
from compress.model.ir import channel_groups as structure
from compress.model.ir import keras_graph
from compress.model.ir.keras_graph import Network
from compress.model.ir.passes import fold
from compress.model.tflite import graph
from compress.model.tflite import macs as arithmetic
from compress.model.tflite.graph import Graph
from compress.targets import load
from compress.targets.edgetpu.check import check
from compress.targets.edgetpu.estimate import estimate
from compress.targets.edgetpu.legalize import legalize

pytestmark = pytest.mark.tensorflow
EDGETPU = load("edgetpu")
BLOCKS = EDGETPU.cost.blocks
SEARCHES: tuple[AllocationMethod, ...] = ("balanced", "global", "uniform")


def prepared(model: Any) -> PrunableNetwork:
    return prepare(keras_graph.read(model), EDGETPU, "batch_norm", None)


def allocated(prunable: PrunableNetwork, objective: Objective, method: AllocationMethod = "balanced") -> Widths:
    return objective.allocate(prunable, importance_losses(prunable, method), objective.limits(prunable))


def cost_function(prunable: PrunableNetwork, objective: Objective) -> Any:
    return objective.cost_of(prunable.costs, prunable.minimum_widths)


def grouped(keras: Any) -> Any:
    """A grouped convolution, GELU, hard-swish, a batch norm after a pooling, and PReLU."""
    layers = keras.layers
    image = keras.Input((12, 12, 3))
    x = layers.Conv2D(32, 3, padding="same", activation="gelu")(image)
    x = layers.Conv2D(32, 3, padding="same", groups=8, activation="hard_silu")(x)
    x = layers.PReLU(shared_axes=[1, 2])(layers.BatchNormalization()(layers.MaxPooling2D()(x)))
    return keras.Model(image, layers.Dense(5)(layers.GlobalAveragePooling2D()(layers.Conv2D(24, 1)(x))), name="grouped")


@pytest.mark.parametrize("builder", [*networks.ALL, grouped], ids=lambda b: b.__name__)
def test_costs_are_those_of_the_network_that_is_made(keras: Any, builder: networks.Builder) -> None:
    prunable = prepared(networks.randomized(builder(keras)))
    for keep in (1.0, 0.5):
        widths = allocated(prunable, Objective("macs", keep))
        model = keras_graph.build(prunable.pruned(widths))
        assert prunable.costs.parameters(widths) == model.count_params()
        assert prunable.costs.macs(widths) == arithmetic.total_macs(graph.parse(export.convert_float(model)))


def norms_after_activations(keras: Any) -> Any:
    """Batch norms that cannot be folded (after a ReLU or a pooling, before two layers), and two in a row that can."""
    layers = keras.layers
    image = keras.Input((12, 12, 3))
    x = image
    for _ in range(2):
        x = layers.BatchNormalization()(layers.Conv2D(32, 3, padding="same", activation="relu")(x))
    x = layers.Add()([layers.Conv2D(24, 1)(x), layers.Conv2D(24, 3, padding="same")(x)])
    x = layers.ReLU()(layers.BatchNormalization()(layers.MaxPooling2D()(x)))
    x = layers.BatchNormalization()(layers.BatchNormalization()(layers.Conv2D(16, 1)(x)))
    return keras.Model(image, layers.Dense(5)(layers.GlobalAveragePooling2D()(x)))


def norms_of_dense_layers(keras: Any) -> Any:
    layers = keras.layers
    x = image = keras.Input((12, 12, 3))
    x = layers.Flatten()(x)
    for _ in range(2):
        x = layers.BatchNormalization()(layers.Dense(32, activation="relu")(x))
    return keras.Model(image, layers.Dense(5)(x))


def norms_of_concatenations(keras: Any) -> Any:
    """As in a DenseNet: each batch norm reads what other layers read too."""
    layers = keras.layers
    image = keras.Input((12, 12, 3))
    x = layers.Conv2D(12, 3, padding="same")(image)
    for _ in range(3):
        y = layers.ReLU()(layers.BatchNormalization()(x))
        x = layers.Concatenate()([x, layers.Conv2D(12, 3, padding="same")(y)])
    return keras.Model(image, layers.Dense(5)(layers.GlobalAveragePooling2D()(x)))


def norm_of_a_shared_layer(keras: Any) -> Any:
    """A batch norm after one of two calls, and one after both: only the second can be folded."""
    layers = keras.layers
    image = keras.Input((12, 12, 3))
    x = layers.Conv2D(16, 3, padding="same")(image)
    for normalizes_all in (False, True):
        convolution, norm = layers.Conv2D(16, 3, padding="same"), layers.BatchNormalization()
        x = convolution(norm(convolution(x)))
        x = norm(x) if normalizes_all else x
    return keras.Model(image, layers.Dense(5)(layers.GlobalAveragePooling2D()(x)))


def norm_of_an_output(keras: Any) -> Any:
    """A batch norm of a tensor that is an output too."""
    layers = keras.layers
    image = keras.Input((12, 12, 3))
    x = layers.Conv2D(8, 3, padding="same")(image)
    y = layers.Conv2D(16, 1)(layers.BatchNormalization()(x))
    return keras.Model(image, [layers.Dense(5)(layers.GlobalAveragePooling2D()(y)), x])


NORMS = (
    norms_after_activations,
    norms_of_dense_layers,
    norms_of_concatenations,
    norm_of_a_shared_layer,
    norm_of_an_output,
)


@pytest.mark.parametrize("builder", [*NORMS, *networks.ALL, grouped], ids=lambda b: b.__name__)
def test_predictions_are_those_of_the_file_that_is_made(keras: Any, builder: networks.Builder) -> None:
    model = networks.randomized(builder(keras))
    prunable = prepared(model)
    for keep in (1.0, 0.7):
        widths = allocated(prunable, Objective("parameters", keep))
        conversion = converted(prunable.pruned(widths), noise(model))
        assert conversion.graph is not None
        file = EDGETPU.cost.of_file(conversion.graph)
        costs, latency = prunable.costs, estimate(conversion.graph, EDGETPU, "usb3").latency
        predicted = sorted(operator.kind for operator in costs.operators(widths))
        assert predicted == sorted(layer.kind for layer in file.layers)
        assert costs.streamed_bytes(widths) == file.streamed_bytes
        assert (file.streamed_bytes > 0) == (builder in (networks.branches, grouped))  # tables of activations
        assert costs.latency_ms(widths, "usb3") == pytest.approx(latency.total, rel=0.005)
        assert costs.compute_ms(widths) == pytest.approx(latency.parts["compute_ms"], rel=0.15)
        size = len(graph.serialize(conversion.graph))
        assert costs.size_bytes(widths) == pytest.approx(size, rel=0.3)  # most of a small file is names


def test_slopes_by_position_are_no_constant_by_channel(keras: Any) -> None:
    layers = keras.layers
    image = keras.Input((12, 12, 3))
    for axes, constants in (([1, 2], 1), (None, 0)):
        x = layers.PReLU(shared_axes=axes)(layers.Conv2D(16, 3)(image))
        network = keras_graph.read(keras.Model(image, layers.Dense(5)(layers.GlobalAveragePooling2D()(x))))
        operators = cost.operators(network, structure.find_groups(network), EDGETPU.cost)
        assert sum(operator.constant for operator in operators) == constants


@pytest.mark.parametrize("allocation", SEARCHES)
@pytest.mark.parametrize("keep", [0.2, 0.5, 0.9])
def test_the_limit_is_kept_and_nearly_used(keras: Any, keep: float, allocation: AllocationMethod) -> None:
    prunable = prepared(networks.inverted_residual(keras))
    macs = prunable.costs.macs(allocated(prunable, Objective("macs", keep), allocation))
    full_macs = prunable.costs.macs(prunable.full_widths)
    assert 0.6 * keep * full_macs <= macs <= keep * full_macs


@pytest.mark.parametrize("name", ["macs", "parameters", "size", "compute", "latency"])
def test_every_objective_comes_down_to_its_limit(keras: Any, name: Any) -> None:
    prunable = prepared(wide(keras))
    goal = Objective(name, 0.8 if name == "latency" else 0.5)
    cost_of = cost_function(prunable, goal)
    full_cost, now = cost_of(prunable.full_widths), cost_of(allocated(prunable, goal))
    assert 0.7 * goal.limits(prunable, full_cost).final < now <= goal.limits(prunable, full_cost).final


def convolutions(keras: Any, side: int, filters: Sequence[int], strides: int = 1) -> Any:
    layers = keras.layers
    image = x = keras.Input((side, side, 3))
    for number in filters:
        x = layers.Conv2D(number, 3, strides, padding="same", activation="relu")(x)
    return keras.Model(image, layers.Dense(5)(layers.GlobalAveragePooling2D()(x)))


def wide(keras: Any) -> Any:
    """A model with 128 channels in every layer: two blocks of 64 outputs of the array."""
    return convolutions(keras, 48, [128] * 4)


def test_a_removal_that_saves_nothing_is_not_made(keras: Any) -> None:
    prunable = prepared(wide(keras))
    for keep in (0.9, 0.6, 0.3):
        goal = Objective("compute", keep)
        widths = allocated(prunable, goal)
        now = prunable.costs.compute_ms(widths)
        for index, (count, full) in enumerate(zip(widths, prunable.full_widths, strict=True)):
            if count < full:
                more = (*widths[:index], count + 1, *widths[index + 1 :])
                assert prunable.costs.compute_ms(more) > now


def test_streamed_parameters_are_cached_by_removing_channels(keras: Any) -> None:
    prunable = prepared(convolutions(keras, 8, [512] * 5))
    goal = Objective("cache")
    widths = allocated(prunable, goal)
    assert prunable.costs.streamed_bytes(prunable.full_widths) > 2e6
    assert prunable.costs.streamed_bytes(widths) == 0
    assert prunable.costs.cached_bytes(widths) > 0.9 * goal.limits(prunable, 0).final
    assert allocated(prepared(networks.plain(keras)), goal) == prepared(networks.plain(keras)).full_widths


def test_a_layer_that_is_never_cached_is_cut_until_it_can_be(keras: Any) -> None:
    layers = keras.layers
    image = keras.Input((16, 8, 8))
    x = layers.Conv2D(128, 3, padding="same", activation="relu")(image)
    x = layers.Dense(64, activation="relu")(layers.Flatten()(x))  # 16,384 weights for each output: always streamed
    prunable = prepared(keras.Model(image, layers.Dense(5)(x)))
    assert len(prunable.costs.never_cached(prunable.full_widths)) == 1
    widths = allocated(prunable, Objective("cache"))
    assert widths == (124, 64)
    assert not prunable.costs.never_cached(widths)


def test_the_least_important_channels_go(keras: Any) -> None:
    model = networks.plain(keras)
    conv = next(layer for layer in model.layers if layer.__class__.__name__ == "Conv2D")
    kernel = np.array(conv.get_weights()[0])
    kernel[..., [1, 4]] *= 1e-3
    conv.set_weights([kernel])
    prunable = prepared(model)
    kept = prunable.kept_channels(allocated(prunable, Objective("macs", 0.2)))[
        prunable.channels.layouts[keras_graph.LayerOutput(conv.name)]
    ]
    assert not kept[1]
    assert not kept[4]


@pytest.mark.parametrize("builder", networks.ALL, ids=lambda b: b.__name__)
def test_the_nearest_that_is_named_is_possible(keras: Any, builder: networks.Builder) -> None:
    prunable = prepared(builder(keras))
    for name in ("macs", "parameters", "size", "compute", "latency"):
        for limit in ({"keep": 0.001}, {"at_most": 1e-5}):
            message = rf"{name}: \w+ [\de.-]+ cannot be reached.* remain.*choose \w+ >= \d"
            with pytest.raises(StageError, match=message) as refused:
                allocated(prunable, Objective(name, **limit))  # type: ignore[arg-type]
            assert refused.value.hint is not None
            nearest = {key: float(refused.value.hint.split(">= ")[1]) for key in limit}
            goal = Objective(name, **nearest)  # type: ignore[arg-type]
            cost_of = cost_function(prunable, goal)
            assert cost_of(prunable.minimum_widths) <= cost_of(allocated(prunable, goal)) <= goal.limits(prunable).final


@pytest.mark.parametrize("last", ["Identity", "Softmax"])
def test_a_model_without_hidden_channels_cannot_be_pruned(keras: Any, last: str) -> None:
    image = keras.Input((4, 4, 1))
    scores = keras.layers.Dense(3)(keras.layers.Flatten()(image))
    model = keras.Model(image, getattr(keras.layers, last)()(scores))
    with pytest.raises(StageError, match="no channel of this model can be removed: every one reaches an output"):
        prepared(model)


def test_layers_that_cannot_be_followed_are_named(keras: Any) -> None:
    layers = keras.layers
    image = keras.Input((6, 4))
    x = layers.LayerNormalization(name="norm")(layers.Conv1D(8, 3)(image))
    x = layers.Bidirectional(layers.LSTM(8, return_sequences=True), name="both")(x)
    model = keras.Model(image, layers.Dense(3)(layers.GRU(8, name="last")(x)))
    with pytest.raises(StageError, match="removed: norm, both, last cannot be followed"):
        prepared(model)


@pytest.mark.parametrize("size", [1, 3, 4, 5, 17, 64, 100, 512, 2048])
def test_levels_fall_from_all_to_the_fewest(size: int) -> None:
    widths = levels(size, min(size, MIN_WIDTH), BLOCKS)
    assert widths[0] == size
    assert widths[-1] == min(size, MIN_WIDTH)
    assert widths == sorted(set(widths), reverse=True)
    assert all(level % BLOCKS.inputs == 0 for level in widths[1:-1])


def tied(keras: Any) -> Any:
    """Two sets, one of which is tied by an addition: one step of it is a sixth of all multiply-accumulates."""
    layers = keras.layers
    image = keras.Input((12, 12, 3))
    x = layers.ReLU()(layers.BatchNormalization()(layers.Conv2D(24, 3, padding="same", use_bias=False)(image)))
    x = layers.Add()([x, layers.Conv2D(24, 3, padding="same", activation="relu")(x)])
    z = layers.Conv2D(48, 1, activation="relu")(layers.DepthwiseConv2D(3, padding="same")(x))
    z = layers.GlobalAveragePooling2D()(layers.Concatenate()([x, z]))
    return keras.Model(image, layers.Dense(3)(z), name="tied")


def chain(keras: Any) -> Any:
    """Three sets of 8, 16 and 32 channels: one level of the first set is half of its channels."""
    return convolutions(keras, 16, [8, 16, 32], strides=2)


def blocks(keras: Any) -> Any:
    """Three sets of channels, in which the latency depends on the array's blocks of 64 outputs."""
    return convolutions(keras, 48, [128, 96, 128])


@pytest.mark.parametrize(
    ("builder", "name", "shares"),
    [
        (tied, "macs", (0.8, 0.5, 0.3)),
        (chain, "macs", (0.8, 0.5)),
        (networks.plain, "macs", (0.7, 0.5, 0.4)),
        (blocks, "latency", (0.9, 0.8, 0.7)),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_the_search_finds_nearly_the_best_choice(
    keras: Any, builder: networks.Builder, name: Any, shares: tuple[float, ...]
) -> None:
    """The result is compared with every choice of a small network; greedy removals alone lost up to twice as much."""
    keras.utils.set_random_seed(0)
    prunable = prepared(builder(keras))
    losses = importance_losses(prunable, "balanced")
    assert losses is not None
    cost_of = cost_function(prunable, Objective(name, 0.5))
    sizes = (levels(*bounds, BLOCKS) for bounds in zip(prunable.full_widths, prunable.minimum_widths, strict=True))
    every = [(cost_of(widths), lost(losses, widths)) for widths in itertools.product(*sizes)]
    for keep in shares:
        limit = keep * cost_of(prunable.full_widths)
        widths = allocated(prunable, Objective(name, keep))
        assert cost_of(widths) <= limit
        assert lost(losses, widths) <= 1.03 * min(total for cost, total in every if cost <= limit)


def lost(losses: ImportanceLosses, widths: Widths) -> float:
    return sum(float(group_losses[count]) for group_losses, count in zip(losses, widths, strict=True))


def test_costs_of_a_dense_layer_on_a_map(keras: Any) -> None:
    image = keras.Input((6, 6, 3))
    x = keras.layers.Dense(8, activation="silu")(image)
    model = keras.Model(image, keras.layers.Dense(4)(x))
    net = keras_graph.read(model)
    channels = structure.find_groups(net)
    costs = cost.Costs(net, channels, [], EDGETPU)
    assert costs.macs(()) == 36 * (3 * 8 + 8 * 4)
    assert [layer.kind for layer in costs.operators(())] == ["conv", "elt", "elt", "conv"]  # silu: sigmoid and product


def test_no_layer_is_left_without_channels(keras: Any) -> None:
    """Three layers share one set, and its least important half is all channels of one of these layers."""
    layers = keras.layers
    image = keras.Input((8, 8, 3))
    both = layers.Concatenate()([layers.Conv2D(16, 1, name="a")(image), layers.Conv2D(16, 1, name="b")(image)])
    x = layers.Add()([both, layers.Conv2D(32, 1, name="c")(image)])
    model = networks.randomized(keras.Model(image, layers.Dense(3)(layers.GlobalAveragePooling2D()(x))))
    model.get_layer("b").set_weights([weight * 1e-3 for weight in model.get_layer("b").get_weights()])
    prunable = prepare(keras_graph.read(model), EDGETPU, "l2", None)
    prunable.scores[prunable.channels.group[prunable.channels.layouts[keras_graph.LayerOutput("b")]]] *= 1e-3
    (group,) = layer_groups(prunable.network, prunable.channels, prunable.scores)
    prunable = replace(prunable, groups=(group,))
    assert set(group.layers) == set("abc")
    assert group.minimum == 8
    for width in range(group.minimum, len(group.members) + 1):
        smaller = prunable.pruned((width,))
        assert min(smaller.layers[name].config["filters"] for name in "abc") >= 4


def test_scores_that_vanish_or_are_no_numbers(keras: Any) -> None:
    """The scale of scores has no effect, scores of 0 are accepted, and NaN is refused."""
    prunable = prepared(networks.randomized(networks.plain(keras)))
    goal = Objective("macs", 0.5)
    small = replace(prunable, scores=prunable.scores * 1e-30)
    assert allocated(small, goal) == allocated(prunable, goal)
    none = replace(prunable, scores=prunable.scores * 0)
    assert prunable.costs.macs(allocated(none, goal)) <= 0.5 * prunable.costs.macs(prunable.full_widths)
    model = networks.plain(keras)
    model.set_weights([np.full_like(weight, np.nan) for weight in model.get_weights()])
    with pytest.raises(StageError, match="the importance of some channels is NaN or infinite"):
        prepared(model)


def calibrated(prunable: PrunableNetwork, samples: NDArray[np.float32]) -> PrunableNetwork:
    return prunable.calibrated(prunable.full_widths, converted(prunable.network, samples))


def converted(network: Network, samples: NDArray[np.float32]) -> TrialConversion:
    return TrialConverter(samples, EDGETPU)(network, keras_graph.build(network))


def verified(prunable: PrunableNetwork, objective: Objective, samples: NDArray[np.float32]) -> Allocation:
    losses, limits = importance_losses(prunable, "balanced"), objective.limits(prunable)

    def convert(widths: Widths) -> TrialConversion:
        return converted(prunable.pruned(widths), samples)

    return objective.allocate_verified(prunable, losses, limits, convert)


def noise(model: Any, count: int = 16, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).random((count, *model.inputs[0].shape[1:]), np.float32)


def quantized(model: Any) -> Graph:
    """Return the 8-bit file that `quantize` makes of a model, with other samples than a trial conversion has."""
    steps, samples = fold.canonical(keras_graph.read(model)), noise(model, 40, seed=1)
    content = export.convert(steps, calibration.calibrate(steps, samples))
    return legalize(graph.parse(content), EDGETPU, [[sample[np.newaxis]] for sample in samples], io="INT8").graph


def recurrent(layers: Any, x: Any) -> Any:
    return layers.LSTM(12, unroll=True)(x)


def attention(layers: Any, x: Any) -> Any:
    return layers.MultiHeadAttention(2, 4)(x, x)


def equation(layers: Any, x: Any) -> Any:
    return layers.EinsumDense("abc,cd->abd", (8, 12))(x)


@pytest.mark.parametrize("unknown", [recurrent, attention, equation], ids=lambda builder: builder.__name__)
def test_layers_that_cannot_be_followed_count(keras: Any, unknown: Any) -> None:
    layers = keras.layers
    inputs = keras.Input((8, 6))
    x = layers.Flatten()(unknown(layers, inputs))
    model = keras.Model(inputs, layers.Dense(5, activation="softmax")(layers.Dense(48, activation="relu")(x)))
    prunable = prepared(model)
    files = converted(prunable.network, noise(model))
    blind, seen = prunable.costs, prunable.costs.calibrated(prunable.full_widths, files)
    half = (prunable.full_widths[0] // 2,)
    smaller = keras_graph.build(prunable.pruned(half))
    for widths, keras_model in ((seen.full_widths, model), (half, smaller)):
        assert seen.macs(widths) == arithmetic.total_macs(graph.parse(export.convert_float(keras_model)))
        assert seen.macs(widths) > blind.macs(widths)
    assert files.graph is not None
    file_estimate = estimate(files.graph, EDGETPU, "pcie")
    assert seen.latency_ms(seen.full_widths, "pcie") == pytest.approx(file_estimate.latency.total)
    assert seen.streamed_bytes(seen.full_widths) == file_estimate.streamed_bytes
    assert seen.size_bytes(seen.full_widths) == len(graph.serialize(files.graph)) > blind.size_bytes(blind.full_widths)
    assert seen.latency_ms(seen.full_widths, "pcie") - seen.latency_ms(half, "pcie") == pytest.approx(
        blind.latency_ms(blind.full_widths, "pcie") - blind.latency_ms(half, "pcie")
    )


def perceptron(keras: Any) -> Any:
    layers = keras.layers
    inputs = x = keras.Input((64,))
    for units in (96, 64, 33):
        x = layers.Dense(units, activation="tanh")(x)
    return keras.Model(inputs, layers.Dense(10, activation="softmax")(x))


def several_steps(keras: Any) -> Any:
    """Layers that become several operators each."""
    layers = keras.layers
    image = keras.Input((8, 8, 1))
    x = layers.PReLU(shared_axes=[1, 2])(layers.Conv2D(24, 3, activation="elu")(image))
    x = layers.LayerNormalization()(layers.Conv2D(20, 3)(x))
    x = layers.Conv2D(10, 1)(layers.Activation("softplus")(x))
    return keras.Model(image, layers.Softmax()(layers.GlobalAveragePooling2D()(x)))


@pytest.mark.parametrize(
    "builder",
    [perceptron, several_steps, networks.plain, networks.inverted_residual, grouped],
    ids=lambda builder: builder.__name__,
)
def test_the_size_is_that_of_the_8_bit_file(keras: Any, builder: networks.Builder) -> None:
    """The real file is close to the limit of `size`, although its ranges come from other samples."""
    model = networks.randomized(builder(keras))
    samples, goal = noise(model), Objective("size", 0.85 if builder is not several_steps else 0.97)
    prunable = calibrated(prepared(model), samples)
    full_size = prunable.costs.size_bytes(prunable.full_widths)
    assert full_size == pytest.approx(len(graph.serialize(quantized(model))), rel=0.1)
    allocation = verified(prunable, goal, samples)
    widths = allocation.widths
    assert widths != prunable.full_widths
    real = len(graph.serialize(quantized(keras_graph.build(prunable.pruned(widths)))))
    assert allocation.costs.size_bytes(widths) == pytest.approx(real, rel=0.1)
    assert real < 1.1 * goal.limits(prunable, full_size).final
    assert allocation.costs.figures(widths, "usb3").size_bytes == allocation.costs.size_bytes(widths)


def test_what_is_cut_for_the_cache_fits_with_all_that_the_compiler_adds(keras: Any) -> None:
    """The table of a softmax over 10 classes takes 576 bytes. Without it, the result would exceed the memory."""
    layers = keras.layers
    inputs = x = keras.Input((64,))
    for units, activation in ((2200, "relu"), (3001, "relu"), (1000, "tanh")):
        x = layers.Dense(units, activation=activation)(x)
    model = networks.randomized(keras.Model(inputs, layers.Dense(10, activation="softmax")(x)))
    samples, goal = noise(model), Objective("cache")
    prunable = calibrated(prepare(keras_graph.read(model), EDGETPU, "l2", None), samples)
    allocation = verified(prunable, goal, samples)
    widths = allocation.widths
    sizes = check(quantized(keras_graph.build(prunable.pruned(widths))), EDGETPU).parameters
    assert sizes is not None
    limit = EDGETPU.cost.cache_bytes()
    assert sizes.streamed_bytes == allocation.costs.streamed_bytes(widths) == 0
    assert 0.99 * limit < sizes.report_on_chip_bytes <= limit


@pytest.mark.parametrize(("more", "reached"), [(0, True), (400, True), (1_000_000, False)])
def test_a_choice_whose_file_costs_more_is_made_again(keras: Any, more: int, reached: bool) -> None:
    model = networks.randomized(perceptron(keras))
    prunable = calibrated(prepared(model), noise(model))
    goal, losses = Objective("size", 0.7), importance_losses(prunable, "balanced")
    limits = goal.limits(prunable)

    def larger(widths: Widths) -> TrialConversion:
        files = converted(prunable.pruned(widths), noise(model))
        return replace(files, size_bytes=files.size_bytes + more)

    allocation = goal.allocate_verified(prunable, losses, limits, larger)
    change = goal.change(prunable, allocation)
    assert change.before == prunable.costs.size_bytes(prunable.full_widths)
    assert (change.after <= limits.final) == reached
    assert (allocation.widths == goal.allocate(prunable, losses, limits)) == (more != 400)
    assert change.after == change.figures_after.size_bytes == larger(allocation.widths).size_bytes


def test_what_removing_channels_cannot_do_is_said(keras: Any) -> None:
    prunable = prepared(networks.plain(keras))
    for goal in (Objective("latency", 0.9, host="pcie"), Objective("latency", at_most=0.01)):
        with pytest.raises(StageError, match="removing channels hardly lowers latency"):
            allocated(replace(prunable, costs=_constant(prunable)), goal)


def _constant(prunable: PrunableNetwork) -> Any:
    """Return costs with a nearly constant latency."""
    costs = copy.copy(prunable.costs)
    full_widths = costs.full_widths
    setattr(costs, "latency_ms", lambda widths, *where: 0.1121 - 1e-5 * (widths != full_widths))  # noqa: B010
    return costs
