"""Post-training quantization as a function, and the simulation of its plans."""

from __future__ import annotations

from typing import Any

import networks
import numpy as np
import pytest
from numpy.typing import NDArray

from compress.learning.quantization import (
    activation_statistics,
    calibration,
    equalization,
    export,
)
from compress.learning.quantization.post_training import quantize
from compress.learning.quantization.quantizer_placement import without_softmax
from compress.learning.quantization.search import Search, file_outputs
from compress.learning.quantization.simulation import Simulation
from compress.model.ir import keras_graph
from compress.model.ir.keras_graph import Network
from compress.model.ir.passes.fold import canonical
from compress.tasks.base import snr_db

pytestmark = pytest.mark.tensorflow


def images(count: int, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).random((count, 12, 12, 3), np.float32)


def logits(model: Any) -> Network:
    return without_softmax(canonical(keras_graph.read(model)))


@pytest.mark.parametrize("builder", networks.ALL, ids=lambda b: b.__name__)
def test_a_simulation_computes_the_float_network_and_what_the_file_computes(
    keras: Any, builder: networks.Builder
) -> None:
    network = logits(networks.randomized(builder(keras)))
    samples = images(40, 1)
    expected = np.asarray(keras_graph.build(network)(samples))
    simulation = Simulation(network)
    np.testing.assert_allclose(simulation.values(samples)[0], expected, rtol=1e-5, atol=1e-5)
    plan = calibration.calibrate(network, images(60))
    simulation.use_plan(plan)
    simulated = simulation.values(samples)[0]
    converted = file_outputs(export.convert(network, plan), samples)
    assert snr_db(expected, simulated).mean() == pytest.approx(snr_db(expected, converted).mean(), abs=2.5)
    simulation.use_float()
    np.testing.assert_allclose(simulation.values(samples)[0], expected, rtol=1e-5, atol=1e-5)


def test_statistics_of_an_equalized_network_follow_from_those_of_the_original(keras: Any) -> None:
    network = logits(networks.randomized(networks.branches(keras)))
    channels = equalization.follow(network, relu6=True)
    by_channel = equalization.observed_tensors(network, channels)
    statistics = activation_statistics.collect(network, images(60), by_channel=by_channel)
    tops = {tensor: statistics.extremes[tensor].largest(100) for tensor in equalization.clipped(network)}
    channels, least = equalization.careful(channels, tops)
    factors = equalization.from_weights(network, channels, least)
    derived = statistics.divided(equalization.divisors(channels, factors))
    scaled = equalization.scaled(network, channels, factors)
    collected = activation_statistics.collect(scaled, images(60), histograms=False)
    assert any(statistics.high[point] != pytest.approx(collected.high[point], rel=0.05) for point in statistics.high)
    for point in collected.low:
        np.testing.assert_allclose(derived.low[point], collected.low[point], rtol=1e-3, atol=1e-4)
        np.testing.assert_allclose(derived.high[point], collected.high[point], rtol=1e-3, atol=1e-4)


def test_a_model_is_quantized_without_a_pipeline(keras: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One conversion gives the files of all candidates, and a second conversion gives the result."""
    conversions = []
    convert = export.convert

    def counted(network: Network, *arguments: Any) -> bytes:
        conversions.append(network.name)
        return convert(network, *arguments)

    monkeypatch.setattr(export, "convert", counted)
    result = quantize(networks.randomized(networks.plain(keras)), images(60), images(40, 1))
    assert len(conversions) == 2
    assert result.plan is not None
    assert sum(row.share for row in result.layer_errors) == pytest.approx(1.0, abs=0.01)
    assert not export.float_operators(result.content)


def test_candidates_that_change_next_to_nothing_are_not_tried(keras: Any) -> None:
    network = canonical(keras_graph.read(networks.randomized(networks.plain(keras))))
    one = np.repeat(images(1), 60, axis=0)  # all methods that do not clip find the same extremes
    result = Search(network, one, images(40, 1)).ranges(["minmax", "sample_percentile"]).result
    (skipped,) = result.skipped
    assert (skipped.step, skipped.choice) == ("ranges", "sample_percentile")
    assert skipped.reason == "its ranges equal those of minmax"
    assert [trial.choice for trial in result.trials] == ["minmax"]
