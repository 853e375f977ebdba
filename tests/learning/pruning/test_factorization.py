"""Low-rank factorization: the bases of layers, and their ranks in the allocation."""

from __future__ import annotations

from typing import Any

import networks
import numpy as np
import pytest
from numpy.typing import NDArray

from compress.core.errors import StageError
from compress.learning.pruning import factorization
from compress.learning.pruning.allocation import AllocationMethod, importance_losses
from compress.learning.pruning.iterative import whole_layers
from compress.learning.pruning.layer_groups import Widths
from compress.learning.pruning.objective import Objective
from compress.learning.pruning.prunable import PrunableNetwork, prepare
from compress.model.ir import keras_graph
from compress.model.ir.keras_graph import LayerOutput
from compress.model.tflite import graph
from compress.targets import load

pytestmark = pytest.mark.tensorflow
EDGETPU = load("edgetpu")


def heavy(keras: Any) -> Any:
    """Convolutions and dense layers with many weights."""
    layers = keras.layers
    image = keras.Input((12, 12, 3))
    x = layers.Conv2D(32, 3, padding="same", use_bias=False)(image)
    x = layers.ReLU()(layers.BatchNormalization(name="norm")(x))
    x = layers.Conv2D(48, 3, 2, padding="same", activation="relu", name="window")(x)
    x = layers.Conv2D(64, 1, activation="relu", name="point")(x)
    x = layers.Dense(96, activation="relu", name="hidden")(layers.Flatten()(x))
    return keras.Model(image, layers.Dense(10, name="scores")(x))


def samples(count: int = 48) -> NDArray[np.float32]:
    return np.random.default_rng(0).random((count, 12, 12, 3), np.float32)


def prepared(model: Any) -> PrunableNetwork:
    network = keras_graph.read(model)
    return prepare(network, EDGETPU, "l2", None, factorization=factorization.find(network, samples()))


def allocated(prunable: PrunableNetwork, objective: Objective, method: AllocationMethod = "balanced") -> Widths:
    return objective.allocate(prunable, importance_losses(prunable, method), objective.limits(prunable))


@pytest.mark.parametrize("builder", [*networks.ALL, heavy], ids=lambda b: b.__name__)
def test_full_ranks_compute_the_same(keras: Any, builder: networks.Builder) -> None:
    model = networks.randomized(builder(keras))
    expanded = factorization.find(keras_graph.read(model), samples()).expanded
    expected, actual = (np.asarray(keras_model(samples(4))) for keras_model in (model, keras_graph.build(expanded)))
    np.testing.assert_allclose(actual, expected, rtol=1e-3, atol=1e-3 * float(np.abs(expected).max()))


@pytest.mark.parametrize("builder", [*networks.ALL, heavy], ids=lambda b: b.__name__)
@pytest.mark.parametrize("name", ["macs", "parameters"])
def test_costs_are_those_of_the_network_that_is_made(keras: Any, builder: networks.Builder, name: Any) -> None:
    from compress.learning.quantization import export
    from compress.model.tflite import macs as arithmetic

    prunable = prepared(networks.randomized(builder(keras)))
    for keep in (1.0, 0.5):
        widths = allocated(prunable, Objective(name, keep))
        model = keras_graph.build(prunable.pruned(widths))
        assert prunable.costs.parameters(widths) == model.count_params()
        assert prunable.costs.macs(widths) == arithmetic.total_macs(graph.parse(export.convert_float(model)))


def test_predictions_are_those_of_the_file_that_is_made(keras: Any) -> None:
    from compress.learning.quantization import export
    from compress.targets.edgetpu.estimate import estimate
    from compress.targets.edgetpu.legalize import legalize

    prunable = prepared(networks.randomized(heavy(keras)))
    widths = allocated(prunable, Objective("macs", 0.5))
    assert prunable.factorized_layers(widths)
    model = keras_graph.build(prunable.pruned(widths))
    parsed = graph.parse(export.convert_calibrated(model, samples(4), "int8"))
    legal = legalize(parsed, EDGETPU, [[samples(1)]], io="INT8").graph
    file_estimate = estimate(legal, EDGETPU, "usb3")
    assert prunable.costs.latency_ms(widths, "usb3") == pytest.approx(file_estimate.latency.total, rel=0.05)


def test_a_layer_of_low_rank_is_factorized_without_loss(keras: Any) -> None:
    """The weights of `hidden` have rank 8. Only this layer is changed, and the outputs stay the same."""
    model = networks.randomized(heavy(keras))
    hidden = model.get_layer("hidden")
    kernel, bias = hidden.get_weights()
    left, values, right = np.linalg.svd(kernel, full_matrices=False)
    hidden.set_weights([(left[:, :8] * values[:8]) @ right[:8], bias])
    prunable = prepared(model)
    widths = allocated(prunable, Objective("parameters", 0.5))
    (name,) = prunable.factorized_layers(widths)
    assert name == "hidden"
    assert not prunable.pruned_layers(widths)
    expected, actual = (
        np.asarray(keras_model(samples(4))) for keras_model in (model, keras_graph.build(prunable.pruned(widths)))
    )
    np.testing.assert_allclose(actual, expected, atol=1e-3 * float(np.abs(expected).max()))


def test_factors_are_quantized_like_all_layers(keras: Any) -> None:
    from compress.learning.quantization import post_training, search
    from compress.tasks.base import snr_db

    model = networks.randomized(heavy(keras))
    prunable = prepared(model)
    widths = allocated(prunable, Objective("macs", 0.5))
    assert {"outputs"} < set().union(*(sides.keys() for sides in prunable.factorized_layers(widths).values()))
    decibels = []
    for subject in (model, keras_graph.build(prunable.pruned(widths))):
        content = post_training.quantize(subject, samples(64), samples(32)).content
        outputs = search.file_outputs(content, samples(32))
        decibels.append(snr_db(np.asarray(subject(samples(32))), outputs).mean())
    assert decibels[1] > decibels[0] - 6


def test_a_rank_keeps_more_of_the_outputs_than_an_svd_of_the_weights(keras: Any) -> None:
    """The inputs of `point` are far from white noise; the test keeps a rank of 16."""
    model = networks.randomized(heavy(keras))
    network = keras_graph.read(model)
    (rank,) = factorization.find(network, samples()).of_layer("point")
    kernel = network.layers["point"].weights[0][0, 0].astype(np.float64)
    into, back = rank.projection.into[:, :16], rank.projection.back[:16]
    left, values, right = np.linalg.svd(kernel, full_matrices=False)
    tensor = model.get_layer("window").output
    inputs = np.asarray(keras.Model(model.inputs[0], tensor)(samples())).reshape(-1, 48)
    errors = [
        float((((inputs @ kernel) - inputs @ low) ** 2).sum())
        for low in (kernel @ into @ back, (left[:, :16] * values[:16]) @ right[:16])
    ]
    assert errors[0] < 0.9 * errors[1]


def test_channels_and_ranks_are_both_reduced_where_that_is_cheaper(keras: Any) -> None:
    prunable = prepared(networks.randomized(heavy(keras)))
    widths = allocated(prunable, Objective("macs", 0.3))
    assert prunable.factorized_layers(widths)
    assert prunable.pruned_layers(widths)
    unfactorized = prunable.with_whole_layers()
    channels_only = allocated(unfactorized, Objective("macs", 0.3))
    assert not unfactorized.factorized_layers(channels_only)
    assert unfactorized.pruned_layers(channels_only)
    assert allocated(prunable, Objective("macs", 0.3), "uniform") == allocated(
        unfactorized, Objective("macs", 0.3), "uniform"
    )


def pinned(keras: Any) -> Any:
    """A large layer, and several whose channels cannot be removed, and which cost more in factors."""
    layers = keras.layers
    image = keras.Input((12, 12, 3))
    x = layers.Conv2D(256, 3, padding="same", activation="relu")(layers.Conv2D(64, 3, padding="same")(image))
    x = layers.Conv2D(64, 3, padding="same")(x)
    for _ in range(6):
        x = layers.Activation("softmax")(layers.Conv2D(64, 1)(x))
    return keras.Model(image, layers.Dense(5)(layers.GlobalAveragePooling2D()(x)))


@pytest.mark.parametrize("method", ["balanced", "uniform"])
def test_ranks_that_cost_more_do_not_put_a_limit_out_of_reach(keras: Any, method: AllocationMethod) -> None:
    prunable = prepared(networks.randomized(pinned(keras)))
    whole = prunable.with_whole_layers()
    objective = Objective("latency", 0.97)
    limits = objective.limits(prunable)
    cost = objective.cost_of(prunable.costs, prunable.minimum_widths)
    assert cost(prunable.minimum_widths) > limits.final > cost(whole.minimum_widths)
    assert cost(prunable.cheapest_widths(cost)) <= cost(whole.minimum_widths)
    assert cost(allocated(prunable, objective, method)) <= limits.final
    in_steps = Objective("latency", 0.96).limits(prunable, steps_left=2)
    assert in_steps.step == pytest.approx((in_steps.initial * in_steps.final) ** 0.5)


def test_the_nearest_limit_with_ranks_is_the_lowest_cost(keras: Any) -> None:
    prunable = prepared(networks.randomized(pinned(keras)))
    with pytest.raises(StageError, match="cannot be reached") as refused:
        allocated(prunable, Objective("latency", 0.5))
    nearest = float(refused.value.hint.rsplit(" ", 1)[-1])
    cost = prunable.costs.latency_ms
    assert cost(allocated(prunable, Objective("latency", nearest))) <= nearest * cost(prunable.full_widths)


def test_layers_that_stay_whole_have_a_reason(keras: Any) -> None:
    prunable = prepared(networks.randomized(heavy(keras)))
    objective = Objective("compute", 0.9)
    cost = objective.cost_of(prunable.costs, prunable.minimum_widths)
    reasons = dict(whole_layers(prunable, prunable.full_widths, cost, "compute"))
    assert reasons["scores"] == "no lower rank saves compute"  # the array computes 64 outputs at once
    assert {"window", "point", "hidden"} <= set(reasons)


def test_a_factor_is_not_factorized_again(keras: Any) -> None:
    prunable = prepared(networks.randomized(heavy(keras)))
    widths = allocated(prunable, Objective("parameters", 0.4))
    factorized = prunable.factorized_layers(widths)
    again = factorization.find(prunable.pruned(widths), samples())
    assert factorized
    assert not {rank.layer for rank in again.ranks} & set(factorized)
    assert not {rank.layer for rank in again.ranks} & {f"{name}_core" for name in factorized}


def test_scales_of_a_batch_norm_count(keras: Any) -> None:
    """Channels that the batch norm switches off do not affect the basis."""
    model = networks.randomized(heavy(keras))
    weights = model.get_layer("norm").get_weights()
    weights[0][4:] = 0.0
    model.get_layer("norm").set_weights(weights)
    network = keras_graph.read(model)
    first = next(name for name, layer in network.layers.items() if layer.kind == "Conv2D")
    (rank,) = [rank for rank in factorization.find(network, samples()).of_layer(first) if rank.side == "outputs"]
    assert rank.energy[:4].sum() > 0.99 * rank.energy.sum()
    assert rank.factor not in network.layers
    assert LayerOutput(first) in network.shapes
