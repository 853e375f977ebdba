"""The search of post-training quantization: equalization, ranges, bias correction, and the choices that are kept."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import networks
import numpy as np
import pytest
from numpy.typing import NDArray

from compress.core.errors import StageError
from compress.learning.quantization import (
    activation_statistics,
    adaround,
    bias_correction,
    calibration,
    debug,
    equalization,
    export,
    ranges,
)
from compress.learning.quantization import search as search_module
from compress.learning.quantization.activation_statistics import ActivationHistogram, Statistics
from compress.learning.quantization.plan import (
    QuantizationPlan,
    grid,
    gridded,
    nudged,
    packed,
    rounded,
    unpacked,
)
from compress.learning.quantization.quantizer_placement import without_softmax
from compress.learning.quantization.search import PlanCandidate, Search, SearchResult, SearchState
from compress.learning.quantization.simulation import Simulation
from compress.model.ir import keras_graph
from compress.model.ir.keras_graph import LayerOutput, Network
from compress.model.ir.passes.fold import canonical
from compress.model.tflite import graph
from compress.pipeline.stages.quantize import Quantize
from compress.tasks.base import Judge, snr_db
from compress.tasks.classification import ByClass

pytestmark = pytest.mark.tensorflow


def images(count: int, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).random((count, 12, 12, 3), np.float32)


def folded(keras: Any, builder: networks.Builder) -> Network:
    return canonical(keras_graph.read(networks.randomized(builder(keras))))


def imbalanced(net: Network, times: float) -> Network:
    """Return the same function, with all scalable channels up to `times` larger or smaller."""
    channels = equalization.follow(net)
    factors = times ** np.random.default_rng(1).uniform(-1, 1, len(channels.group))
    return equalization.scaled(net, channels, factors[channels.group])


def outputs(net: Network, samples: NDArray[np.float32]) -> NDArray[Any]:
    return np.asarray(keras_graph.build(net)(samples))


# --- equalization -----------------------------------------------------------------------


def test_relu6_lets_only_channels_through_that_stay_below_it(keras: Any) -> None:
    """Of four channels one is clipped, one reaches 5.8, and two are small; the outputs on the samples do not change."""
    keras.utils.set_random_seed(0)
    layers = keras.layers
    image = keras.Input((12, 12, 3))
    x = layers.Conv2D(4, 3, name="made")(image)
    x = layers.DepthwiseConv2D(3, name="between")(layers.ReLU(6.0)(x))
    model = keras.Model(image, layers.Conv2D(5, 3, name="taken")(layers.Activation("relu6")(x)))
    kernel, bias = model.get_layer("made").get_weights()
    samples = images(16)
    reach = np.asarray(keras.ops.max(keras.ops.relu(model.get_layer("made")(samples)), axis=(0, 1, 2)))
    model.get_layer("made").set_weights([kernel / reach * np.array([9.0, 5.8, 0.3, 0.02]), bias])
    net = canonical(keras_graph.read(model))
    tensors = equalization.clipped(net)
    extremes = activation_statistics.collect(net, samples, by_channel=tensors).extremes
    magnitudes = {tensor: extremes[tensor].largest(100) for tensor in tensors}
    channels, least = equalization.careful(equalization.follow(net, relu6=True), magnitudes)
    factors = equalization.from_weights(net, channels, least)
    changed = equalization.scaled(net, channels, factors)
    np.testing.assert_allclose(outputs(changed, samples), outputs(net, samples), atol=1e-5)
    by_layer = dict(equalization.by_layer(net, channels, factors))
    assert by_layer["made"][0] == 1.0
    assert by_layer["made"][1] >= 1.0
    assert by_layer["made"][3] < by_layer["made"][2] < 1.0
    again = equalization.applied(net, by_layer)
    np.testing.assert_allclose(outputs(again, samples), outputs(net, samples), atol=1e-5)


@pytest.mark.parametrize("builder", [networks.plain, networks.branches], ids=lambda b: b.__name__)
def test_factors_from_weights_undo_an_imbalance(keras: Any, builder: networks.Builder) -> None:
    net = folded(keras, builder)
    channels = equalization.follow(net)
    expected = equalization.scaled(net, channels, equalization.from_weights(net, channels))
    worse = imbalanced(net, 64.0)
    actual = equalization.scaled(worse, channels, equalization.from_weights(worse, channels))
    for name, layer in expected.layers.items():
        for a, b in zip(layer.weights, actual.layers[name].weights, strict=True):
            np.testing.assert_allclose(a, b, atol=0.05 * np.abs(a).max(), rtol=0.05)


@pytest.mark.parametrize("name", ["conv2d_999", "dense"])
def test_a_plan_for_another_network_is_refused(keras: Any, name: str) -> None:
    with pytest.raises(StageError, match=rf"the plan has 77 factors for a layer '{name}"):
        equalization.applied(folded(keras, networks.plain), {name: (1.0,) * 77})


# --- ranges -----------------------------------------------------------------------------


def histogram(values: np.ndarray) -> ActivationHistogram:
    """Return the histogram of values, as `collect` computes it."""
    reach = 2.0 ** np.ceil(np.log2(np.abs(values).max() or 1.0))
    counts = np.histogram(values, activation_statistics.BINS, (-reach, reach))[0]
    return ActivationHistogram(float(reach), counts.astype(np.float64))


def test_histograms_of_different_reach_add_up() -> None:
    near, far = np.random.default_rng(0).normal(0, 1, 1000), np.random.default_rng(1).normal(0, 300, 1000)
    both = histogram(near) + histogram(far)
    np.testing.assert_array_equal(both.counts, histogram(np.concatenate([near, far])).counts)
    tiny = histogram(near * 1e-20) + histogram(far)
    assert tiny.counts.sum() == 2000
    assert tiny.within(-1.0, 1.0)[1].sum() >= 1000


def seen(*, corrupt: float = 1.0) -> Statistics:
    """Return statistics of 200 normally distributed samples; the values of one sample are `corrupt` times larger."""
    values = np.random.default_rng(0).normal(0, 1, (200, 500))
    values[17] *= corrupt
    counts = histogram(values)
    fixed = {"softmax": (0.0, 255 / 256)}
    rows = {"x": values, "softmax": np.abs(values)}
    low, high = (
        {name: pick(sample_values, axis=1) for name, sample_values in rows.items()} for pick in (np.min, np.max)
    )
    return Statistics(low, high, {"x": counts, "softmax": counts}, fixed)


@pytest.mark.parametrize("method", ranges.METHODS)
def test_a_range_holds_nearly_everything(method: str) -> None:
    low, high = ranges.select(seen(), method)["x"]
    assert -6 < low < -2.0
    assert 2.0 < high < 6
    assert ranges.select(seen(), method)["softmax"] == pytest.approx((0.0, 255 / 256))


def test_the_zeros_of_a_relu_do_not_narrow_the_range_of_least_divergence() -> None:
    values = np.maximum(np.random.default_rng(0).normal(0, 1, (200, 500)), 0)
    counts = histogram(values)
    low, high = ({"x": pick(values, axis=1)} for pick in (np.min, np.max))
    with_zeros = ranges.select(Statistics(low, high, {"x": counts}, {}), "entropy")["x"]
    assert with_zeros[1] > 2.5
    for others in (0.0, 1.0):
        nearly_all_zero = np.full(1000, others)
        nearly_all_zero[1:] = 0.0
        statistics = Statistics(low, high, {"x": histogram(nearly_all_zero)}, {})
        assert np.isfinite(ranges.select(statistics, "entropy")["x"]).all()


def test_every_method_is_a_setting() -> None:
    assert set(get_args(Quantize.model_fields["ranges"].annotation)) == {"auto", *ranges.METHODS}


def test_one_corrupt_sample_of_two_hundred() -> None:
    clean, damaged = (ranges.select(seen(corrupt=times), "sample_percentile")["x"] for times in (1.0, 100.0))
    np.testing.assert_allclose(clean, damaged, rtol=0.15)
    assert ranges.select(seen(corrupt=100.0), "minmax")["x"][1] > 100


def test_the_least_squared_error_is_less_than_that_of_the_whole_range() -> None:
    values = np.random.default_rng(0).standard_t(2, (50, 2000))
    counts = histogram(values)
    statistics = Statistics({"x": values.min(axis=1)}, {"x": values.max(axis=1)}, {"x": counts}, {})
    errors = []
    for method in ("minmax", "mse"):
        low, high = ranges.select(statistics, method)["x"]
        scale = (high - low) / 255
        errors.append(((np.clip(np.rint((values - low) / scale), 0, 255) * scale + low - values) ** 2).mean())
    assert errors[1] < 0.9 * errors[0]


def test_collected_statistics_are_those_of_the_values(keras: Any) -> None:
    net = folded(keras, networks.plain)
    statistics = activation_statistics.collect(net, images(40))
    name = next(name for name in statistics.low if "re_lu" in name)
    values = np.asarray(keras_graph.build(keras_graph.subnetwork(net, [LayerOutput(name)]))(images(40)))
    np.testing.assert_allclose(statistics.high[name], values.reshape(40, -1).max(axis=1), rtol=1e-5)
    assert statistics.histograms[name].counts.sum() == values.size
    centres, counts = statistics.histograms[name].within(0.0, float(values.max()))
    assert counts.sum() == values.size
    assert centres @ counts / counts.sum() == pytest.approx(values.mean(), abs=2 * float(np.diff(centres)[0]))
    means = activation_statistics.means_by_channel(net, [LayerOutput(name)], images(40))[LayerOutput(name)]
    np.testing.assert_allclose(means, values.mean(axis=(0, 1, 2)), rtol=1e-3)


@pytest.mark.parametrize("value", [128.0, -500.0, 1e20, 1e-20])
def test_a_tensor_that_is_always_the_same_has_a_range_that_holds_it(keras: Any, value: float) -> None:
    image = keras.Input((12, 12, 3))
    statistics = activation_statistics.collect(
        keras_graph.read(keras.Model(image, image * 1.0)), np.full((4, 12, 12, 3), value, "float32")
    )
    for method in ranges.METHODS:
        for low, high in ranges.select(statistics, method).values():
            assert low <= value * 0.99 <= high or high - low <= 1.1e-6
            assert high - low <= 1.01 * abs(value) + 1.1e-6


@pytest.mark.parametrize(("corrupt", "samples"), [(1, 20), (1, 30), (2, 64), (3, 100), (5, 200), (20, 100)])
def test_corrupt_samples_are_named_where_they_are_more_than_a_fiftieth(corrupt: int, samples: int) -> None:
    reach = np.random.default_rng(0).uniform(0.9, 1.1, samples)
    reach[:corrupt] *= 1000
    statistics = Statistics({"x": -reach}, {"x": reach}, {}, {})
    assert activation_statistics.outliers(statistics) == [*range(corrupt)]


def test_a_point_that_is_mostly_zero_has_no_outliers() -> None:
    reach = np.where(np.arange(100) % 5, 0.0, 1.0)
    assert activation_statistics.outliers(Statistics({"x": reach * 0}, {"x": reach}, {}, {})) == []


def test_samples_that_do_not_fit_the_model(keras: Any) -> None:
    layers = keras.layers
    image = keras.Input((12, 12, 3))
    norm = layers.BatchNormalization()
    model = keras.Model(image, layers.Dense(3)(layers.Flatten()(norm(layers.Conv2D(8, 3)(image)))))
    before = layers.Conv2D(8, 3)
    before(np.zeros((1, 12, 12, 3)))
    before.set_weights(model.layers[1].get_weights())
    activations = np.asarray(before(images(100)))
    norm.moving_mean.assign(activations.mean(axis=(0, 1, 2)))
    norm.moving_variance.assign(activations.var(axis=(0, 1, 2)))
    net = keras_graph.read(model)
    fitting, other = (activation_statistics.misfit(net, samples) for samples in (images(40, 1), images(40, 1) * 255))
    assert fitting is not None
    assert other is not None
    assert fitting.distance < 0.5
    assert 0.5 < fitting.spread < 2
    assert not fitting.is_large
    assert other.is_large
    assert other.size > fitting.size
    assert activation_statistics.misfit(canonical(net), images(4)) is None


@pytest.mark.parametrize("trained_on", [1.0, 255.0])
def test_the_preprocessing_of_a_folded_model_is_recognized(keras: Any, trained_on: float) -> None:
    layers = keras.layers
    image = keras.Input((12, 12, 3))
    convolution = layers.Conv2D(8, 3, use_bias=False)
    norm = layers.BatchNormalization()
    model = keras.Model(image, layers.ReLU()(norm(convolution(image))))
    outputs = np.asarray(convolution(images(100) * trained_on))
    norm.moving_mean.assign(outputs.mean(axis=(0, 1, 2)))
    norm.moving_variance.assign(outputs.var(axis=(0, 1, 2)))
    folded = canonical(keras_graph.read(model))
    errors = {scale: activation_statistics.preprocessing_error(folded, images(40, 1) * scale) for scale in (1.0, 255.0)}
    assert None not in errors.values()
    assert min(errors, key=lambda scale: errors[scale] or 0) == trained_on


def test_no_preprocessing_is_recognized_without_a_bias(keras: Any) -> None:
    image = keras.Input((12, 12, 3))
    model = keras.Model(image, keras.layers.Conv2D(8, 3, use_bias=False)(image))
    assert activation_statistics.preprocessing_error(keras_graph.read(model), images(4)) is None


def test_samples_fit_a_batch_norm_along_another_axis(keras: Any) -> None:
    image = keras.Input((12, 12, 3))
    norm = keras.layers.BatchNormalization(axis=1)
    norm.build((None, 12, 12, 3))
    rows = np.arange(12, dtype=np.float32)
    norm.set_weights([np.ones(12), np.zeros(12), rows, np.ones(12)])
    net = keras_graph.read(keras.Model(image, norm(image)))
    misfit = activation_statistics.misfit(net, np.zeros((4, 12, 12, 3), np.float32) + rows[:, None, None])
    assert misfit is not None
    assert misfit.distance == pytest.approx(0, abs=1e-6)
    assert misfit.spread == pytest.approx(0, abs=1e-6)


# --- bias -------------------------------------------------------------------------------


def test_a_shift_brings_the_middle_back_whatever_saturates(keras: Any) -> None:
    """The output of the last layer is compared, which the ranges of all layers before it move."""
    net = without_softmax(folded(keras, networks.plain))
    samples = images(bias_correction.SAMPLES)
    plan = calibration.calibrate(net, samples)
    (last,) = {tensor.layer for tensor in keras_graph.tensors_in(net.outputs)}
    coarse = {  # a part of the values saturates
        name: (low, high) if name == last else (low / 2, high / 2) for name, (low, high) in plan.ranges.items()
    }
    simulation = Simulation(net)
    simulation.use_float()
    expected, _ = simulation.values(samples)
    plan = QuantizationPlan(coarse, "too narrow")
    shifts = bias_correction.measured_shifts(simulation, plan, samples)
    middles = []
    for bias_shifts in ({name: shift for name, shift in shifts.items() if name != last}, shifts):
        simulation.use_plan(replace(plan, bias_shifts=bias_shifts))
        actual, _ = simulation.values(samples)
        middles.append(np.abs(np.median(actual - expected, axis=0)).max())
    assert middles[1] < 0.2 * middles[0]


def effect_network(keras: Any) -> Network:
    """Two outputs of the first two of three values."""
    image = keras.Input((3,), name="image")
    model = keras.Model(image, keras.layers.Dense(2, use_bias=False)(image))
    model.layers[-1].set_weights([np.array([[1.0, 0.0], [0.0, 2.0], [0.0, 0.0]])])
    return canonical(keras_graph.read(model))


def effect_samples(count: int) -> NDArray[np.float32]:
    """Samples for it, whose third value is a hundred times larger."""
    values = np.random.default_rng(0).uniform(0.5, 1, (count, 3)) * (1, 1, 100)
    return values.astype(np.float32)


class ByValues(Judge):
    """A judge to whom every value of the outputs counts the same."""

    def same(self, expected: Any, actual: Any) -> Any:
        return np.ones(len(expected))

    def differences(self, expected: Any, actual: Any, maths: Any = np) -> list[Any]:
        return [(actual - expected) * 0.5**0.5, (expected - actual) * 0.5**0.5]  # noise of one part only would cancel


def test_values_count_by_their_effect_on_the_outputs(keras: Any) -> None:
    samples, net = effect_samples(64), effect_network(keras)
    effects = activation_statistics.effects(net, samples, ByValues())
    assert effects is not None
    centres, counts = effects["image"].within(-100, 100)
    assert counts[centres > 2].sum() == 0  # of the third value
    assert counts.sum() == pytest.approx(64 * (1 + 4), rel=0.3)
    assert activation_statistics.effects(net, samples, ByClass()) is None


def test_a_range_is_as_narrow_as_the_outputs_allow(keras: Any) -> None:
    search = Search(effect_network(keras), effect_samples(40), effect_samples(30), judge=ByValues())
    state = search.ranges(["minmax"])
    better = search.with_weighted_ranges(state)
    assert state.plan.ranges["image"][1] == pytest.approx(100, rel=0.05)
    assert better.plan.ranges["image"][1] < 40  # a third of the whole range is the narrowest that is tried
    assert better.result.trials[-1].kept


def test_what_a_user_sees_decides_before_the_values() -> None:
    def candidate(snr_db: float, seen: float, seed: int) -> PlanCandidate:
        noise = np.random.default_rng(seed).normal(0, 1, (20, 1))
        noise -= noise.mean()
        energies = np.tile(10 ** (-(seen + noise) / 10), (1, 2))
        return PlanCandidate(
            QuantizationPlan({}, ""), "minmax", snr_db + 0.1 * noise[:, 0], np.ones(20), None, energies
        )

    best = candidate(20, 8, 0)
    assert candidate(18, 10, 1).gain(best).is_significant
    assert not candidate(22, 6, 1).gain(best).is_possible
    assert candidate(22, 8.2, 1).gain(best).is_significant  # too little for the users' view
    unclear = candidate(18, 8.2, 1).gain(best)  # all values are worse, and a user may see a gain: more samples decide
    assert unclear.is_possible
    assert not unclear.is_significant
    assert not candidate(18, 7.8, 1).gain(best).is_possible


# --- the search -------------------------------------------------------------------------


def search_of(net: Network, samples: NDArray[np.float32]) -> Search:
    return Search(net, samples, images(48, seed=9))


def searched(search: Search) -> SearchState:
    return search.with_corrected_biases(search.equalized(search.ranges(["minmax", "sample_percentile"])))


def quality(result: SearchResult) -> float:
    return max(trial.snr_db for trial in result.trials if trial.kept)


def test_an_imbalanced_network_is_as_good_as_the_balanced_one(keras: Any) -> None:
    net = folded(keras, networks.plain)
    search = search_of(imbalanced(net, 64.0), images(60))
    plain, hard = (searched(each).result for each in (search_of(net, images(60)), search))
    first = next(trial for trial in hard.trials if trial.choice == "minmax")
    assert first.snr_db < quality(plain) - 8  # the result of a plain conversion
    assert quality(hard) > quality(plain) - 3
    assert any(trial.kept for trial in hard.trials if trial.step == "equalization")
    assert hard.plan.factors
    assert not export.float_operators(search.content(hard))


def test_factors_are_tried_again_but_never_twice(keras: Any) -> None:
    search = search_of(imbalanced(folded(keras, networks.plain), 64.0), images(60))
    before = search.ranges(["mse"], searched(search))
    after, count = search.equalized(before), len(before.result.trials)
    again = after.result.trials[count:]
    assert {trial.step for trial in again} == {"equalization"}
    assert len(again) == len([trial for trial in before.result.trials if trial.step == "equalization"]) - 1
    assert (after.plan is not before.plan) == any(trial.kept for trial in again)


def test_a_corrupt_sample_does_no_harm(keras: Any) -> None:
    net = folded(keras, networks.plain)
    damaged = images(200)
    damaged[7] *= 50
    clean, hurt = (searched(search_of(net, samples)) for samples in (images(200), damaged))
    assert next(trial.choice for trial in hurt.result.trials if trial.kept).endswith("without outliers")
    assert hurt.result.trials[0].choice == "minmax"  # with the corrupt sample
    assert len(hurt.samples) == len(hurt.ordinary) == 199
    assert any("1 of 200 calibration samples" in warning for warning in hurt.result.warnings)
    assert quality(hurt.result) > quality(clean.result) - 3


def test_what_few_samples_do_not_decide_is_run_on_all(keras: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A candidate that is surely worse runs on 16 of 64 samples, one that may be better on all, and none runs twice."""
    monkeypatch.setattr(search_module, "FIRST_SAMPLES", 16)
    monkeypatch.setattr(search_module, "FEW_SAMPLES", 16)
    net = folded(keras, networks.plain)
    expected = np.asarray(keras_graph.build(without_softmax(net)).predict(images(64, seed=9), verbose=0))
    noise = np.random.default_rng(0).normal(0, 1, expected.shape)
    spread = np.where(np.arange(64)[:, None] % 2, 0.02, 0.2)  # so that 16 samples decide little
    wrong = {"minmax": spread, "mse": 0.95 * spread[::-1], "percentile": 20 * spread, "entropy": 0.01 * spread}
    ran: list[int] = []

    def run(content: bytes, inputs: NDArray[np.float32]) -> NDArray[np.float32]:
        if content == b"float":
            return expected
        ran.append(len(inputs))
        start = 0 if len(inputs) == 16 else 16
        return np.asarray((expected + wrong[content.decode()] * noise)[start : start + len(inputs)])

    search = Search(net, images(40), images(64, seed=9), "int8", run)
    monkeypatch.setattr(export, "convert_float", lambda model: b"float")
    monkeypatch.setattr(search_module._Structure, "file", lambda self, plan, io: plan.method.split()[0].encode())
    result = search.ranges(["minmax", "percentile", "mse", "entropy"]).result
    assert [(trial.choice, trial.samples) for trial in result.trials] == [
        ("minmax", 16),
        ("percentile", 16),
        ("mse", 64),
        ("entropy", 16),
    ]
    first = [
        float(snr_db(expected[:16], (expected + wrong[trial.choice] * noise)[:16]).mean()) for trial in result.trials
    ]
    assert [trial.snr_db for trial in result.trials] == pytest.approx(first, abs=0.02)  # on the samples of all of them
    assert ran == [16, 16, 16, 48, 48, 16]
    assert result.best.range_method == "entropy"


def test_signal_to_noise() -> None:
    expected = np.asarray([[3.0, 4.0], [0.0, 0.0], [1.0, 1.0]])
    actual = np.asarray([[3.0, 4.5], [0.0, 0.0], [1.0, 1.0]])
    np.testing.assert_allclose(snr_db(expected, actual), [20.0, 60.0, 60.0], atol=1e-6)


# --- the error by layer -----------------------------------------------------------------


def test_the_tensor_that_costs_most_is_first(keras: Any) -> None:
    net = folded(keras, networks.plain)
    plan = calibration.calibrate(net, images(60))
    name = next(name for name in plan.ranges if "re_lu" in name)
    coarse = QuantizationPlan({**plan.ranges, name: nudged(0.0, 200 * plan.ranges[name][1])}, "one too wide")
    rows = debug.errors(net, coarse, images(32, 5))
    assert rows[0].point == name
    assert "times the range of 99.9% of its values" in rows[0].cause
    assert "sample_percentile" in rows[0].setting
    assert rows[0].share > 0.9
    assert sum(row.share for row in rows) == pytest.approx(1.0, abs=0.01)
    shown = {row.point for row in rows if not row.point.endswith(debug.WEIGHTS)}
    assert shown == {*plan.ranges} - {net.outputs.layer}  # all but the softmax
    assert len(rows) > len(shown)
    narrow = QuantizationPlan({**plan.ranges, name: nudged(0.0, 0.3 * plan.ranges[name][1])}, "one too narrow")
    for trained, setting in ((False, "{ranges: minmax}"), (True, "{ranges: fixed}")):
        worst = debug.errors(net, replace(narrow, trained_with_rounding=trained), images(32, 5))[0]
        assert "of its values are clipped" in worst.cause
        assert setting in worst.setting


def test_an_imbalance_is_named(keras: Any) -> None:
    net = imbalanced(folded(keras, networks.plain), 64.0)
    causes = [row.cause for row in debug.errors(net, calibration.calibrate(net, images(60)), images(32, 5))]
    assert any("times the median one" in cause for cause in causes)


def test_biases_that_are_moved_wrongly_are_named(keras: Any) -> None:
    net = folded(keras, networks.plain)
    plan = calibration.calibrate(net, images(60))
    name = next(name for name, layer in net.layers.items() if layer.kind == "Conv2D")
    wrong = replace(plan, bias_shifts={name: (-30.0,) * len(net.layers[name].weights[1])})
    row = debug.errors(net, wrong, images(32, 5))[0]
    assert (row.point, row.cause) == (name + debug.SHIFTS, "its bias shifts make the error larger")
    assert row.share > 0.9
    shifts = bias_correction.measured_shifts(Simulation(net), plan, images(60))
    rows = debug.errors(net, replace(plan, bias_shifts=shifts), images(32, 5))
    assert not [row for row in rows if row.cause == "its bias shifts make the error larger"]
    assert sum(row.point.endswith(debug.SHIFTS) for row in rows) == len(shifts)


@pytest.mark.parametrize("builder", networks.ALL, ids=lambda b: b.__name__)
def test_every_network_can_be_looked_into(keras: Any, builder: networks.Builder) -> None:
    net = folded(keras, builder)
    rows = debug.errors(net, calibration.calibrate(net, images(40)), images(16, 5))
    assert all(row.snr_db is None or row.snr_db > 15 for row in rows)
    text = debug.describe(debug.to_json(rows))
    assert len(text.splitlines()) > len(rows[:20])


# --- AdaRound ---------------------------------------------------------------------------


def test_learnt_rounding_is_better_than_the_nearest_for_what_the_layer_gives(keras: Any) -> None:
    net = folded(keras, networks.plain)
    chosen = adaround.rounded_up(net, images(64))
    assert chosen
    plan = QuantizationPlan({}, "by hand", rounding=chosen)
    nearest, learnt = gridded(net), gridded(net, plan)
    for name in chosen:
        kernel, step = net.layers[name].weights[0], grid(net.layers[name])
        moved = learnt.layers[name].weights[0] / step
        np.testing.assert_allclose(moved, np.rint(moved), atol=1e-3)  # on the grid
        assert np.abs(moved - kernel / step).max() < 1.001  # rounded down or up
        assert (np.abs(moved).max(axis=tuple(range(moved.ndim - 1))) <= 127.001).all()
        layer_input = net.layers[name].inputs()[0]
        inputs = outputs(keras_graph.subnetwork(net, [layer_input]), images(40, 3))
        errors = []
        for gridded_network in (nearest, learnt):
            layer = keras.layers.deserialize(dict(net.layers[name].entry))
            layer(inputs)
            layer.set_weights([*gridded_network.layers[name].weights])
            layer_outputs = np.asarray(layer(inputs))
            layer.set_weights([*net.layers[name].weights])
            errors.append(((layer_outputs - np.asarray(layer(inputs))) ** 2).mean())
        assert errors[1] < errors[0]


def test_a_learnt_rounding_is_in_the_file(keras: Any, tmp_path: Path) -> None:
    net = folded(keras, networks.plain)
    plan = calibration.calibrate(net, images(40))
    name = next(name for name, layer in net.layers.items() if layer.kind == "Conv2D")
    shape = net.layers[name].weights[0].shape
    up = np.random.default_rng(0).random(shape) < 0.5
    changed = replace(plan, rounding={name: packed(up)})
    np.testing.assert_array_equal(unpacked(json.loads(changed.to_json())["rounding"][name], shape), up)
    expected = rounded(net.layers[name], up) / grid(net.layers[name])
    parsed = graph.parse(export.convert(net, changed))
    stored = [tensor.array() for tensor in parsed.tensors if tensor.is_constant and len(tensor.shape) == 4]
    assert any(np.array_equal(np.moveaxis(np.rint(expected), -1, 0), codes) for codes in stored)


class ByEnergies(Judge):
    """A judge that gives prepared energies of errors, [8, outputs] for each comparison."""

    def __init__(self, *rows: NDArray[Any]) -> None:
        self.rows = list(rows)

    def snr_db(self, expected: Any, actual: Any) -> Any:
        return np.zeros(len(expected))

    def same(self, expected: Any, actual: Any) -> Any:
        return np.ones(len(expected))

    def energies(self, expected: Any, actual: Any) -> Any:
        return self.rows.pop(0)


@pytest.mark.parametrize(("gain", "kept"), [((3.0, 3.0), "mse"), ((3.0, -0.4), "mse"), ((9.0, -0.6), "minmax")])
def test_no_output_pays_for_the_gain_of_others(keras: Any, gain: tuple[float, float], kept: str) -> None:
    """The gains of two outputs are in dB."""
    judge = ByEnergies(np.ones((8, 2)), np.tile(10 ** (-np.array(gain) / 10), (8, 1)))
    search = Search(folded(keras, networks.plain), images(8), images(8), judge=judge)
    assert search.ranges(["minmax", "mse"]).range_method == kept


@pytest.mark.parametrize(("factor", "kept"), [(0.9, "mse"), (1.1, "minmax"), (2.0, "minmax")])
def test_most_samples_decide_unless_the_whole_error_grows(keras: Any, factor: float, kept: str) -> None:
    """Seven of eight samples gain, and the largest error, of the last one, is multiplied."""
    before, after = np.full((8, 1), 1e-4), np.full((8, 1), 1e-5)
    before[-1] = 1.0
    after[-1] = factor
    search = Search(folded(keras, networks.plain), images(8), images(8), judge=ByEnergies(before, after))
    assert search.ranges(["minmax", "mse"]).range_method == kept
