"""Gates of SiLU that are separated because 8 bits are too coarse: when they are tried, and every use of such a plan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import networks
import numpy as np
import pytest
from blobs import Blobs, context
from numpy.typing import NDArray

from compress.core.errors import StageError
from compress.learning.quantization import (
    activation_statistics,
    calibration,
    debug,
    export,
    plan,
    post_training,
    qat,
    quantizer_placement,
)
from compress.learning.quantization.plan import edited
from compress.learning.quantization.search import Search, file_outputs
from compress.learning.quantization.settings import PostTrainingSettings
from compress.model.ir import keras_graph
from compress.model.ir.keras_graph import LayerOutput, Network
from compress.model.ir.passes import separate_gates
from compress.model.ir.passes.fold import canonical
from compress.model.tflite import graph, macs
from compress.pipeline.stages.quantize import Quantize
from compress.tasks.base import snr_db

pytestmark = pytest.mark.tensorflow
IMAGES = np.random.default_rng(0).random((96, 8, 8, 1), np.float32)
MAX_SIZE = 64.0
SETTINGS = PostTrainingSettings(ranges="minmax")


def model_of(keras: Any, function: str = "silu", *, size: float = MAX_SIZE, added: bool = False) -> Any:
    """Return a model whose channels have sizes from 1 to `size`; the next convolution needs all of them."""
    layers = keras.layers
    image = keras.Input((8, 8, 1), name="image")
    x = layers.Conv2D(8, 3, name="stem")(image)
    x = layers.Activation(function, name="act")(x)
    if added:
        x = layers.Add()([x, layers.Activation("silu")(layers.Conv2D(8, 3)(image))])
    x = layers.ReLU()(layers.Conv2D(8, 3, name="next")(x))
    x = layers.GlobalAveragePooling2D()(x)
    model = networks.randomized(keras.Model(image, layers.Dense(2, activation="softmax", name="scores")(x)))
    sizes = np.geomspace(1, size, 8).astype(np.float32)
    stem, following = model.get_layer("stem"), model.get_layer("next")
    stem.set_weights([stem.get_weights()[0] * sizes, stem.get_weights()[1] * sizes])
    kernel, bias = following.get_weights()
    following.set_weights([kernel / sizes[:, np.newaxis], bias])
    return model


def quantized(model: Any, settings: PostTrainingSettings = SETTINGS, **options: Any) -> Any:
    return post_training.quantize(model, IMAGES[:64], IMAGES[64:], settings, **options)


def fidelity(content: bytes, model: Any) -> float:
    """Return the signal-to-noise ratio of the logits of a file."""
    actual, expected = (np.log(np.maximum(rows, 1e-3)) for rows in (file_outputs(content, IMAGES), rows_of(model)))
    return float(np.median(snr_db(expected - expected[:, :1], actual - actual[:, :1])))


def rows_of(model: Any) -> NDArray[np.float32]:
    return np.asarray(model(IMAGES))


@pytest.mark.parametrize("function", ["silu", "hard_silu"])
def test_a_gate_is_separated_where_large_channels_hide_small_ones(keras: Any, function: str) -> None:
    model = model_of(keras, function)
    without = quantized(model, PostTrainingSettings(ranges="minmax", separate_gates="off"))
    result = quantized(model)
    _, kept = result.calibrated()
    assert kept.separated_gates == ("act",)
    assert any(trial.kept for trial in result.trials if trial.step == "gates")
    assert fidelity(result.content, model) > fidelity(without.content, model) + 3
    assert not export.float_operators(result.content)
    before, after = (macs.total_macs(graph.parse(outcome.content)) for outcome in (without, result))
    assert after == before + 6 * 6 * 9 * 8
    assert result.to_json()["separated_gates"] == [{"activation": "act", "copied": "stem", "macs": 6 * 6 * 9 * 8}]


@pytest.mark.parametrize("function", ["relu", "silu"])
def test_channels_of_similar_size_cause_no_trial(keras: Any, function: str) -> None:
    result = quantized(model_of(keras, function, size=2.0))
    assert not [candidate for candidate in (*result.trials, *result.skipped) if candidate.step == "gates"]
    assert not result.calibrated()[1].separated_gates


def test_a_layer_whose_channels_cannot_be_scaled_stays(keras: Any) -> None:
    result = quantized(model_of(keras, added=True))
    assert not result.calibrated()[1].separated_gates
    assert [candidate.choice for candidate in result.skipped if candidate.step == "gates"] == ["of act"]


def test_equalization_is_needed(keras: Any) -> None:
    result = quantized(model_of(keras), PostTrainingSettings(ranges="minmax", equalize="off"))
    assert not [trial for trial in result.trials if trial.step == "gates"]


def test_a_stored_plan_makes_the_same_file(keras: Any, tmp_path: Path) -> None:
    model = model_of(keras)
    result = quantized(model)
    path = tmp_path / "quantization.json"
    path.write_text(result.calibrated()[1].to_json())
    again = quantized(model, plan=plan.read(path))
    assert again.content == result.content
    assert again.calibrated()[1].separated_gates == ("act",)


def test_rounding_and_errors_use_the_network_of_the_plan(keras: Any) -> None:
    result = quantized(model_of(keras), PostTrainingSettings(ranges="minmax", rounding="adaround"))
    assert any(trial.step == "rounding" for trial in result.trials)
    network, kept = result.calibrated()
    errors = {row.point for row in debug.errors(network, kept, IMAGES[:8])}
    assert errors == {row.point for row in result.layer_errors}
    assert {"stem", "stem_gate", "stem (weights)", "stem_gate (weights)", "act"} <= errors


def planned(keras: Any) -> tuple[Network, plan.QuantizationPlan]:
    return quantized(model_of(keras)).calibrated()


def test_a_plan_without_factors_is_refused(keras: Any) -> None:
    network, kept = planned(keras)
    with pytest.raises(StageError, match="no factors for stem, whose gate it separates"):
        export.refuse_mismatch(network, replace(kept, factors={}))


def test_a_plan_for_another_activation_is_refused(keras: Any) -> None:
    network, kept = planned(keras)
    with pytest.raises(StageError, match="the gate of 'next', which has none"):
        export.refuse_mismatch(network, replace(kept, separated_gates=("next",)))
    with pytest.raises(StageError, match="a range for act_"):
        export.refuse_mismatch(network, replace(kept, ranges={**kept.ranges, "act_": (0.0, 1.0)}))


def test_both_layers_are_trained(keras: Any, tmp_path: Path) -> None:
    network, kept = planned(keras)
    trained, learned, _ = qat.train(network, kept, Quantize(method="qat", epochs=1), context(Blobs(), tmp_path))
    assert separate_gates.source_of(trained, "act") == "stem"
    assert learned.separated_gates == ("act",)
    export.refuse_mismatch(trained, learned)
    assert not export.float_operators(export.convert(trained, learned))
    with pytest.raises(StageError, match="no factors for stem"):  # they are already in the trained weights
        export.refuse_mismatch(network, learned)


@pytest.mark.parametrize("function", ["silu", "hard_silu"])
def test_statistics_are_collected_once(keras: Any, function: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the first run of the network, only the tensors that a separated gate and factors change are observed."""
    observed: list[int] = []
    run = activation_statistics._runs

    def counted(network: Network, tensors: list[LayerOutput], *arguments: Any) -> Any:
        observed.append(len(tensors))
        return run(network, tensors, *arguments)

    search = Search(canonical(keras_graph.read(model_of(keras, function))), IMAGES[:64], IMAGES[64:])
    monkeypatch.setattr(activation_statistics, "_runs", counted)
    plan = search.with_separated_gates(search.ranges(["mse"])).plan
    assert plan.separated_gates == ("act",)
    factors_alone = replace(plan, bias_shifts={})
    derived = search._collected(factors_alone, IMAGES[:64], ["mse"])
    assert max(observed[1:]) < observed[0]
    network = edited(search.network, factors_alone)
    points = quantizer_placement.find(network)
    direct = activation_statistics.collect(network, IMAGES[:64], by_channel=list(derived.extremes))
    assert derived.points == direct.points
    for point in points.values():
        if point not in direct.prescribed:
            np.testing.assert_allclose(derived.low[point], direct.low[point], rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(derived.high[point], direct.high[point], rtol=1e-4, atol=1e-5)
            assert derived.histograms[point].reach == direct.histograms[point].reach
            difference = np.abs(derived.histograms[point].counts - direct.histograms[point].counts).sum()
            assert difference < 0.01 * direct.histograms[point].counts.sum()


def test_statistics_of_the_first_factor_are_not_limited(keras: Any) -> None:
    network = canonical(keras_graph.read(model_of(keras)))
    before = calibration.calibrate(network, IMAGES)
    after = calibration.calibrate(separate_gates.separated(network, ["act"]), IMAGES)
    assert before.ranges["stem"][0] > -9
    assert after.ranges["stem"][0] < -9
    assert -7 < after.ranges["stem_gate"][0] < after.ranges["stem_gate"][1] < 7
