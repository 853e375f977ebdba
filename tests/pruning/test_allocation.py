"""Which channels go, and how many of which set."""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace
from typing import Any

import networks
import numpy as np
import pytest
from numpy.typing import NDArray

from compress.errors import StageError
from compress.ir import channel_groups as structure
from compress.ir import keras_graph
from compress.ir.keras_graph import Network
from compress.pruning import allocation as pruning
from compress.pruning import cost
from compress.pruning.allocation import Allocation, Counts, Cut
from compress.pruning.cost import Draft
from compress.pruning.objective import Objective
from compress.stages.draft import draft
from compress.targets import load
from compress.targets.edgetpu.check import check
from compress.targets.edgetpu.estimate import estimate
from compress.tflite import graph
from compress.tflite.graph import Graph

pytestmark = pytest.mark.tensorflow
EDGETPU = load("edgetpu")
BLOCKS = EDGETPU.cost.blocks
SEARCHES: tuple[Allocation, ...] = ("balanced", "global", "uniform")


def prepared(model: Any) -> Cut:
    return pruning.prepare(keras_graph.read(model), EDGETPU, "batch_norm", None)


def chosen(cut: Cut, goal: Objective, allocation: Allocation = "balanced") -> Counts:
    return goal.chosen(cut, pruning.losses(cut, allocation), None, 1)


def grouped(keras: Any) -> Any:
    """A grouped convolution, GELU, hard-swish, a batch norm of its own, and slopes."""
    layers = keras.layers
    image = keras.Input((12, 12, 3))
    x = layers.Conv2D(32, 3, padding="same", activation="gelu")(image)
    x = layers.Conv2D(32, 3, padding="same", groups=8, activation="hard_silu")(x)
    x = layers.PReLU(shared_axes=[1, 2])(layers.BatchNormalization()(layers.MaxPooling2D()(x)))
    return keras.Model(image, layers.Dense(5)(layers.GlobalAveragePooling2D()(layers.Conv2D(24, 1)(x))), name="grouped")


@pytest.mark.parametrize("builder", [*networks.ALL, grouped], ids=lambda b: b.__name__)
def test_costs_are_those_of_the_network_that_is_made(keras: Any, builder: networks.Builder) -> None:
    from compress.quantization import export
    from compress.tflite import macs as arithmetic

    cut = prepared(networks.randomized(builder(keras)))
    for keep in (1.0, 0.5):
        counts = chosen(cut, Objective("macs", keep))
        model = keras_graph.build(pruning.without(cut, pruning.plan(cut, counts)))
        assert cut.costs.parameters(counts) == model.count_params()
        assert cut.costs.macs(counts) == arithmetic.total_macs(graph.parse(export.convert_float(model)))


@pytest.mark.parametrize("builder", [*networks.ALL, grouped], ids=lambda b: b.__name__)
def test_predictions_are_those_of_the_file_that_is_made(keras: Any, builder: networks.Builder) -> None:
    from compress.quantization import export
    from compress.targets.edgetpu.legalize import legalize

    cut = prepared(networks.randomized(builder(keras)))
    counts = chosen(cut, Objective("macs", 0.6))
    model = keras_graph.build(pruning.without(cut, pruning.plan(cut, counts)))
    samples = np.random.default_rng(0).random((4, 12, 12, 3), np.float32)
    parsed = graph.parse(export.convert_calibrated(model, samples, "int8"))
    legal = legalize(parsed, EDGETPU, [[samples[:1]]], io="INT8").graph
    content, found = graph.serialize(legal), estimate(legal, EDGETPU, "usb3")
    assert cut.costs.latency_ms(counts, "usb3") == pytest.approx(found.latency.total, rel=0.05)
    assert cut.costs.compute_ms(counts) == pytest.approx(found.latency.parts["compute_ms"], rel=0.15)
    assert cut.costs.size_bytes(counts) == pytest.approx(len(content), rel=0.3)  # small files are mostly names


@pytest.mark.parametrize("allocation", SEARCHES)
@pytest.mark.parametrize("keep", [0.2, 0.5, 0.9])
def test_the_limit_is_kept_and_nearly_used(keras: Any, keep: float, allocation: Allocation) -> None:
    cut = prepared(networks.inverted_residual(keras))
    macs = cut.costs.macs(chosen(cut, Objective("macs", keep), allocation))
    whole = cut.costs.macs(cut.costs.everything)
    assert 0.6 * keep * whole <= macs <= keep * whole


@pytest.mark.parametrize("name", ["macs", "parameters", "size", "compute", "latency"])
def test_every_objective_comes_down_to_its_limit(keras: Any, name: Any) -> None:
    cut = prepared(wide(keras))
    goal = Objective(name, 0.8 if name == "latency" else 0.5)
    cost_of = goal.cost(cut)
    whole, now = cost_of(cut.costs.everything), cost_of(chosen(cut, goal))
    assert 0.7 * goal.limit(cut, whole) < now <= goal.limit(cut, whole)


def wide(keras: Any) -> Any:
    """128 channels in every layer: two blocks of the array's outputs."""
    layers = keras.layers
    image = keras.Input((48, 48, 3))
    x = image
    for _ in range(4):
        x = layers.Conv2D(128, 3, padding="same", activation="relu")(x)
    return keras.Model(image, layers.Dense(5)(layers.GlobalAveragePooling2D()(x)), name="wide")


def test_the_array_s_blocks_are_seen(keras: Any) -> None:
    """Half the channels of a layer are a quarter less than three quarters of them, to the array."""
    cut = prepared(wide(keras))
    full = cut.costs.everything
    slower, faster = ((full[0], count, *full[2:]) for count in (68, 64))
    saved = cut.costs.compute_ms(slower) - cut.costs.compute_ms(faster)
    assert saved > 5 * (cut.costs.compute_ms(full) - cut.costs.compute_ms(slower)) / 15


def test_a_removal_that_saves_nothing_is_not_made(keras: Any) -> None:
    cut = prepared(wide(keras))
    for keep in (0.9, 0.6, 0.3):
        goal = Objective("compute", keep)
        counts = chosen(cut, goal)
        now = cut.costs.compute_ms(counts)
        for index, (count, members) in enumerate(zip(counts, cut.sets, strict=True)):
            if count < len(members):
                more = (*counts[:index], count + 1, *counts[index + 1 :])
                assert cut.costs.compute_ms(more) > now


def test_streamed_parameters_are_cached_by_removing_channels(keras: Any) -> None:
    layers = keras.layers
    image = keras.Input((8, 8, 64))
    x = layers.Conv2D(512, 3, padding="same", activation="relu")(image)
    for _ in range(4):
        x = layers.Conv2D(512, 3, padding="same", activation="relu")(x)
    cut = prepared(keras.Model(image, layers.Dense(5)(layers.GlobalAveragePooling2D()(x))))
    goal = Objective("cache")
    counts = chosen(cut, goal)
    assert cut.costs.streamed_bytes(cut.costs.everything) > 2e6
    assert cut.costs.streamed_bytes(counts) == 0
    assert cut.costs.cached_bytes(counts) > 0.9 * goal.limit(cut, 0)
    assert chosen(prepared(networks.plain(keras)), goal) == prepared(networks.plain(keras)).costs.everything


def test_a_layer_that_is_never_cached_is_cut_until_it_can_be(keras: Any) -> None:
    layers = keras.layers
    image = keras.Input((16, 8, 8))
    x = layers.Conv2D(128, 3, padding="same", activation="relu")(image)
    x = layers.Dense(64, activation="relu")(layers.Flatten()(x))  # 16,384 weights for each output: always streamed
    cut = prepared(keras.Model(image, layers.Dense(5)(x)))
    assert len(cut.costs.never_cached(cut.costs.everything)) == 1
    counts = chosen(cut, Objective("cache"))
    assert counts == (124, 64)
    assert not cut.costs.never_cached(counts)


def test_the_least_important_channels_go(keras: Any) -> None:
    model = networks.plain(keras)
    conv = next(layer for layer in model.layers if layer.__class__.__name__ == "Conv2D")
    kernel = np.array(conv.get_weights()[0])
    kernel[..., [1, 4]] *= 1e-3
    conv.set_weights([kernel])
    cut = prepared(model)
    kept = pruning.plan(cut, chosen(cut, Objective("macs", 0.2))).kept[
        cut.channels.layouts[keras_graph.LayerOutput(conv.name)]
    ]
    assert not kept[1]
    assert not kept[4]


def test_out_of_reach_says_what_is_possible(keras: Any) -> None:
    cut = prepared(networks.plain(keras))
    with pytest.raises(StageError, match=r"macs: keep 0.001 is out of reach.*MACs remain.*choose keep >= 0\.\d+"):
        chosen(cut, Objective("macs", 0.001))
    with pytest.raises(StageError, match=r"latency: at_most 0.1 is out of reach.*ms remain.*choose at_most >= 0\.\d+"):
        chosen(cut, Objective("latency", at_most=0.1))
    cpu = pruning.prepare(cut.network, load("cpu"), "l1", None)
    with pytest.raises(StageError, match="compute is not predicted for the target cpu"):
        chosen(cpu, Objective("compute", 0.5))


@pytest.mark.parametrize("builder", networks.ALL, ids=lambda b: b.__name__)
def test_the_nearest_that_is_named_is_possible(keras: Any, builder: networks.Builder) -> None:
    cut = prepared(builder(keras))
    for name in ("macs", "parameters", "size", "compute", "latency"):
        for limit in ({"keep": 0.001}, {"at_most": 1e-5}):
            with pytest.raises(StageError) as refused:
                chosen(cut, Objective(name, **limit))  # type: ignore[arg-type]
            assert refused.value.todo is not None
            nearest = {key: float(refused.value.todo.split(">= ")[1]) for key in limit}
            goal = Objective(name, **nearest)  # type: ignore[arg-type]
            cost_of = goal.cost(cut)
            assert cost_of(cut.least) <= cost_of(chosen(cut, goal)) <= goal.limit(cut, cost_of(cut.costs.everything))


@pytest.mark.parametrize("last", ["Identity", "Softmax"])
def test_a_model_without_hidden_channels_cannot_be_pruned(keras: Any, last: str) -> None:
    image = keras.Input((4, 4, 1))
    scores = keras.layers.Dense(3)(keras.layers.Flatten()(image))
    model = keras.Model(image, getattr(keras.layers, last)()(scores))
    with pytest.raises(StageError, match="no channel of this model can be removed: every one reaches an output"):
        prepared(model)


def test_a_model_that_cannot_be_followed_is_told_why(keras: Any) -> None:
    image = keras.Input((8, 8, 3))
    x = keras.layers.LayerNormalization(name="norm")(keras.layers.Conv2D(8, 3)(image))
    model = keras.Model(image, keras.layers.Dense(3)(keras.layers.Flatten()(x)))
    with pytest.raises(StageError, match="no channel of this model can be removed: norm cannot be followed"):
        prepared(model)


def test_recurrent_layers_are_named_as_what_cannot_be_followed(keras: Any) -> None:
    layers = keras.layers
    image = keras.Input((6, 4))
    x = layers.Bidirectional(layers.LSTM(8, return_sequences=True), name="both")(image)
    model = keras.Model(image, layers.Dense(3)(layers.GRU(8, name="last")(x)))
    with pytest.raises(StageError, match="no channel of this model can be removed: both, last cannot be followed"):
        prepared(model)


@pytest.mark.parametrize("size", [1, 3, 4, 5, 17, 64, 100, 512, 2048])
def test_levels_fall_from_all_to_the_fewest(size: int) -> None:
    found = pruning.levels(size, min(size, pruning.MIN_KEPT), BLOCKS)
    assert found[0] == size
    assert found[-1] == min(size, pruning.MIN_KEPT)
    assert found == sorted(set(found), reverse=True)
    assert all(level % BLOCKS.inputs == 0 for level in found[1:-1])


def tied(keras: Any) -> Any:
    """Two sets, of which one is an addition's: a step of it is a sixth of all multiply-accumulates."""
    layers = keras.layers
    image = keras.Input((12, 12, 3))
    x = layers.ReLU()(layers.BatchNormalization()(layers.Conv2D(24, 3, padding="same", use_bias=False)(image)))
    x = layers.Add()([x, layers.Conv2D(24, 3, padding="same", activation="relu")(x)])
    z = layers.Conv2D(48, 1, activation="relu")(layers.DepthwiseConv2D(3, padding="same")(x))
    z = layers.GlobalAveragePooling2D()(layers.Concatenate()([x, z]))
    return keras.Model(image, layers.Dense(3)(z), name="tied")


def chain(keras: Any) -> Any:
    """Three sets of 8, 16 and 32: one level of the first is half of it."""
    layers = keras.layers
    image = x = keras.Input((16, 16, 3))
    for filters in (8, 16, 32):
        x = layers.Conv2D(filters, 3, padding="same", strides=2, activation="relu")(x)
    return keras.Model(image, layers.Dense(10)(layers.GlobalAveragePooling2D()(x)), name="chain")


def blocks(keras: Any) -> Any:
    """Three sets in which the array's blocks of 64 outputs are what counts for latency."""
    layers = keras.layers
    image = x = keras.Input((48, 48, 3))
    for filters in (128, 96, 128):
        x = layers.Conv2D(filters, 3, padding="same", activation="relu")(x)
    return keras.Model(image, layers.Dense(5)(layers.GlobalAveragePooling2D()(x)), name="blocks")


@pytest.mark.parametrize(
    ("builder", "name", "shares"),
    [
        (tied, "macs", (0.8, 0.5, 0.3)),
        (chain, "macs", (0.8, 0.5)),
        (networks.plain, "macs", (0.7, 0.5, 0.4)),
        (blocks, "latency", (0.9, 0.8, 0.7)),
    ],
    ids=lambda each: getattr(each, "__name__", None),
)
def test_the_search_finds_nearly_the_best_choice(
    keras: Any, builder: networks.Builder, name: Any, shares: tuple[float, ...]
) -> None:
    """Every choice of a small network is tried beside it; greedy removals alone lost up to twice as much."""
    keras.utils.set_random_seed(0)
    cut = prepared(builder(keras))
    losses = pruning.losses(cut, "balanced")
    assert losses is not None
    cost_of = Objective(name, 0.5).cost(cut)
    sizes = (pruning.levels(len(each), least, BLOCKS) for each, least in zip(cut.sets, cut.least, strict=True))
    every = [(cost_of(counts), lost(losses, counts)) for counts in itertools.product(*sizes)]
    for keep in shares:
        limit = keep * cost_of(cut.costs.everything)
        counts = chosen(cut, Objective(name, keep))
        assert cost_of(counts) <= limit
        assert lost(losses, counts) <= 1.03 * min(total for cost, total in every if cost <= limit)


def lost(losses: pruning.Lost, counts: Counts) -> float:
    return sum(float(each[count]) for each, count in zip(losses, counts, strict=True))


def test_a_choice_of_groups_that_stand_several_times_in_a_tensor_is_counted_right(keras: Any) -> None:
    cut = prepared(networks.branches(keras))
    random = np.random.default_rng(0)
    for _ in range(5):
        counts = tuple(int(random.integers(low, len(each) + 1)) for low, each in zip(cut.least, cut.sets, strict=True))
        smaller = structure.remove(cut.network, cut.channels, pruning.plan(cut, counts).kept)
        assert cut.costs.parameters(counts) == keras_graph.build(smaller).count_params()


def test_costs_of_a_dense_layer_on_a_map(keras: Any) -> None:
    image = keras.Input((6, 6, 3))
    x = keras.layers.Dense(8, activation="silu")(image)
    model = keras.Model(image, keras.layers.Dense(4)(x))
    net = keras_graph.read(model)
    channels = structure.follow(net)
    found = cost.Costs(net, channels, [], EDGETPU)
    assert found.macs(()) == 36 * (3 * 8 + 8 * 4)
    assert [layer.kind for layer in found.layers(())] == ["conv", "elt", "elt", "conv"]  # silu: a sigmoid, a product


def test_no_layer_is_left_without_channels(keras: Any) -> None:
    """Two layers that are one set with a third: the least important half of it is all that one of them makes."""
    layers = keras.layers
    image = keras.Input((8, 8, 3))
    both = layers.Concatenate()([layers.Conv2D(16, 1, name="a")(image), layers.Conv2D(16, 1, name="b")(image)])
    x = layers.Add()([both, layers.Conv2D(32, 1, name="c")(image)])
    model = networks.randomized(keras.Model(image, layers.Dense(3)(layers.GlobalAveragePooling2D()(x))))
    model.get_layer("b").set_weights([weight * 1e-3 for weight in model.get_layer("b").get_weights()])
    cut = pruning.prepare(keras_graph.read(model), EDGETPU, "l2", None)
    cut.score[cut.channels.group[cut.channels.layouts[keras_graph.LayerOutput("b")]]] *= 1e-3
    (members,), (least,) = pruning.sets(cut.network, cut.channels, cut.score)
    assert least == 8
    for count in range(least, len(members) + 1):
        smaller = pruning.without(cut, pruning.plan(cut, (count,)))
        assert min(smaller.layers[name].config["filters"] for name in "abc") >= 4


def test_scores_that_vanish_or_are_no_numbers(keras: Any) -> None:
    """The size of scores means nothing; where there are none, norms stand in; what is no number is refused."""
    cut = prepared(networks.randomized(networks.plain(keras)))
    goal = Objective("macs", 0.5)
    small = pruning.Cut(cut.network, cut.channels, cut.sets, cut.least, cut.score * 1e-30, cut.importance, cut.costs)
    assert chosen(small, goal) == chosen(cut, goal)
    none = pruning.Cut(cut.network, cut.channels, cut.sets, cut.least, cut.score * 0, cut.importance, cut.costs)
    assert cut.costs.macs(chosen(none, goal)) <= 0.5 * cut.costs.macs(cut.costs.everything)
    model = networks.plain(keras)
    model.set_weights([np.full_like(weight, np.nan) for weight in model.get_weights()])
    with pytest.raises(StageError, match="importance is not a number"):
        prepared(model)


def anchored(cut: Cut, samples: NDArray[np.float32]) -> Cut:
    files = draft(cut.network, samples, EDGETPU)
    return replace(cut, costs=cut.costs.anchored(cut.costs.everything, files))


def noise(model: Any, count: int = 16, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).random((count, *model.inputs[0].shape[1:]), np.float32)


def quantized(model: Any) -> Graph:
    """The 8-bit file that `quantize` makes of a model, with other samples than a draft has."""
    from compress.ir.passes import fold
    from compress.quantization import calibration, export
    from compress.targets.edgetpu.legalize import legalize

    steps, samples = fold.canonical(keras_graph.read(model)), noise(model, 40, seed=1)
    content = export.convert(steps, calibration.calibrate(steps, samples))
    return legalize(graph.parse(content), EDGETPU, [[each[np.newaxis]] for each in samples], io="INT8").graph


def recurrent(layers: Any, x: Any) -> Any:
    return layers.LSTM(12, unroll=True)(x)


def attention(layers: Any, x: Any) -> Any:
    return layers.MultiHeadAttention(2, 4)(x, x)


def equation(layers: Any, x: Any) -> Any:
    return layers.EinsumDense("abc,cd->abd", (8, 12))(x)


@pytest.mark.parametrize("unknown", [recurrent, attention, equation], ids=lambda each: each.__name__)
def test_layers_that_cannot_be_followed_count(keras: Any, unknown: Any) -> None:
    from compress.quantization import export
    from compress.tflite import macs as arithmetic

    layers = keras.layers
    given = keras.Input((8, 6))
    x = layers.Flatten()(unknown(layers, given))
    model = keras.Model(given, layers.Dense(5, activation="softmax")(layers.Dense(48, activation="relu")(x)))
    cut = prepared(model)
    files = draft(cut.network, noise(model), EDGETPU)
    blind, seen = cut.costs, cut.costs.anchored(cut.costs.everything, files)
    half = (len(cut.sets[0]) // 2,)
    smaller = keras_graph.build(pruning.without(cut, pruning.plan(cut, half)))
    for counts, made in ((seen.everything, model), (half, smaller)):
        assert seen.macs(counts) == arithmetic.total_macs(graph.parse(export.convert_float(made)))
        assert seen.macs(counts) > blind.macs(counts)
    assert files.graph is not None
    told = estimate(files.graph, EDGETPU, "pcie")
    assert seen.latency_ms(seen.everything, "pcie") == pytest.approx(told.latency.total)
    assert seen.streamed_bytes(seen.everything) == told.streamed_bytes
    assert seen.size_bytes(seen.everything) == len(graph.serialize(files.graph)) > blind.size_bytes(blind.everything)
    assert seen.latency_ms(seen.everything, "pcie") - seen.latency_ms(half, "pcie") == pytest.approx(
        blind.latency_ms(blind.everything, "pcie") - blind.latency_ms(half, "pcie")
    )


def perceptron(keras: Any) -> Any:
    layers = keras.layers
    given = x = keras.Input((64,))
    for units in (96, 64, 33):
        x = layers.Dense(units, activation="tanh")(x)
    return keras.Model(given, layers.Dense(10, activation="softmax")(x))


def several_steps(keras: Any) -> Any:
    """Layers of which each becomes several operators."""
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
    """What `size` comes down to is met by the real file, though its ranges come from other samples."""
    model = networks.randomized(builder(keras))
    samples, goal = noise(model), Objective("size", 0.85 if builder is not several_steps else 0.97)
    cut = anchored(prepared(model), samples)
    whole = cut.costs.size_bytes(cut.costs.everything)
    assert whole == pytest.approx(len(graph.serialize(quantized(model))), rel=0.1)
    losses = pruning.losses(cut, "balanced")
    after, counts = goal.settled(cut, losses, None, 1, lambda smaller: draft(smaller, samples, EDGETPU))
    assert counts != cut.costs.everything
    real = len(graph.serialize(quantized(keras_graph.build(pruning.without(cut, pruning.plan(cut, counts))))))
    assert after.costs.size_bytes(counts) == pytest.approx(real, rel=0.1)
    assert real < 1.1 * goal.limit(cut, whole)
    assert after.costs.to_json(counts, "usb3")["size_bytes"] == after.costs.size_bytes(counts)


def test_what_is_cut_for_the_cache_fits_with_all_that_the_compiler_adds(keras: Any) -> None:
    """The table of a softmax over 10 classes is 576 bytes: without it the fill-up would go beyond the memory."""
    layers = keras.layers
    given = x = keras.Input((64,))
    for units, activation in ((2200, "relu"), (3001, "relu"), (1000, "tanh")):
        x = layers.Dense(units, activation=activation)(x)
    model = networks.randomized(keras.Model(given, layers.Dense(10, activation="softmax")(x)))
    samples, goal = noise(model), Objective("cache")
    cut = anchored(pruning.prepare(keras_graph.read(model), EDGETPU, "l2", None), samples)
    after, counts = goal.settled(
        cut, pruning.losses(cut, "balanced"), None, 1, lambda net: draft(net, samples, EDGETPU)
    )
    sizes = check(quantized(keras_graph.build(pruning.without(cut, pruning.plan(cut, counts)))), EDGETPU).parameters
    assert sizes is not None
    limit = EDGETPU.tables["memory"]["plan_bytes"]
    assert sizes.streamed_bytes == after.costs.streamed_bytes(counts) == 0
    assert 0.99 * limit < sizes.report_on_chip_bytes <= limit


@pytest.mark.parametrize(("more", "reached"), [(0, True), (400, True), (1_000_000, False)])
def test_a_choice_whose_file_costs_more_is_made_again(keras: Any, more: int, reached: bool) -> None:
    model = networks.randomized(perceptron(keras))
    cut = anchored(prepared(model), noise(model))
    goal, losses = Objective("size", 0.7), pruning.losses(cut, "balanced")
    whole = cut.costs.size_bytes(cut.costs.everything)

    def larger(smaller: Network) -> Draft:
        made = draft(smaller, noise(model), EDGETPU)
        return replace(made, size_bytes=made.size_bytes + more)

    after, counts = goal.settled(cut, losses, None, 1, larger)
    assert (goal.missed(after, counts, whole) == "") == reached
    told = goal.compared(cut, after, counts, None)
    assert (told["cost"]["before"], told["done"]) == (whole, reached)
    assert (counts == goal.chosen(cut, losses, None, 1)) == (more != 400)
    assert after.costs.size_bytes(counts) == larger(pruning.without(cut, pruning.plan(cut, counts))).size_bytes


def test_what_removing_channels_cannot_do_is_said(keras: Any) -> None:
    cut = prepared(networks.plain(keras))
    for goal in (Objective("latency", 0.9, host="pcie"), Objective("latency", at_most=0.01)):
        with pytest.raises(StageError, match="removing channels hardly lowers latency"):
            chosen(replace(cut, costs=_constant(cut)), goal)


def _constant(cut: Cut) -> Any:
    """Costs of a network whose latency is all but fixed."""
    costs = copy.copy(cut.costs)
    whole = costs.everything
    setattr(costs, "latency_ms", lambda counts, *where: 0.1121 - 1e-5 * (counts != whole))  # noqa: B010
    return costs
