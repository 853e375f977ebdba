"""Costs of sub-networks that leave out layers whose costs are known from files only."""

from __future__ import annotations

from typing import Any

import networks
import numpy as np
import pytest

from compress.architecture_search import calibration
from compress.architecture_search.calibration import block_kinds, calibrate, smallest_with
from compress.architecture_search.costs import SubNetworkCosts
from compress.architecture_search.elastic import ElasticNetwork, SubNetwork, find
from compress.architecture_search.extraction import extracted
from compress.ir import keras_graph
from compress.progress import SILENT
from compress.pruning.cost import TrialConversion
from compress.stages.trial_conversion import TrialConverter
from compress.targets import load

pytestmark = pytest.mark.tensorflow
IMPORTANT = ("macs", "latency_ms")


class Converter:
    """Converts sub-networks, and stores the files."""

    def __init__(self, elastic: ElasticNetwork, shape: tuple[int, ...]) -> None:
        self.elastic = elastic
        self.convert = TrialConverter(np.random.default_rng(0).random((8, *shape), np.float32), load("edgetpu"))
        self.files: dict[SubNetwork, TrialConversion] = {}

    def __call__(self, sub_network: SubNetwork) -> TrialConversion:
        network = extracted(self.elastic, sub_network)
        self.files[sub_network] = self.convert(network, keras_graph.build(network))
        return self.files[sub_network]


def searched(model: Any) -> ElasticNetwork:
    network = keras_graph.read(networks.randomized(model))
    return find(network, (0.25, 0.5), 4, blocks=True, kernels=True)


def with_norms(keras: Any, blocks: int) -> Any:
    """Return a model whose blocks have a layer normalization, of which the cost model knows one operator."""
    layers = keras.layers
    image = keras.Input((8, 8, 1))
    x = layers.Conv2D(16, 3, padding="same")(image)
    for number in range(blocks):
        y = layers.LayerNormalization()(layers.DepthwiseConv2D(3, padding="same")(x))
        y = layers.Conv2D(16, 1)(layers.Conv2D(64, 1, activation="gelu")(y))
        x = layers.Add(name=f"sum{number}")([x, y])
    return keras.Model(image, layers.Dense(2, activation="softmax")(layers.GlobalAveragePooling2D()(x)))


def attention(keras: Any) -> Any:
    layers = keras.layers
    signal = keras.Input((8, 8))
    x = layers.Dense(16)(signal)
    x = layers.Add(name="attended")([x, layers.MultiHeadAttention(2, 8)(x, x)])
    y = layers.Dense(16)(layers.Dense(32, activation="relu")(x))
    x = layers.Add(name="mixed")([x, y])
    return keras.Model(signal, layers.Dense(2, activation="softmax")(layers.GlobalAveragePooling1D()(x)))


def expect_costs_of_files(costs: SubNetworkCosts, converter: Converter, sub_network: SubNetwork, error: float) -> None:
    target = load("edgetpu")
    conversion = converter(sub_network)
    assert conversion.graph is not None
    figures, file = costs.figures(sub_network), target.cost.of_file(conversion.graph)
    assert figures.macs == conversion.macs
    assert figures.size_bytes == pytest.approx(conversion.size_bytes, rel=10 * error + 1e-9)
    latency = file.latency_ms(target.cost.host(None), target.cost.clock(None))
    assert figures.latency_ms == pytest.approx(latency, rel=error + 1e-3)


def test_blocks_whose_costs_are_known_from_files_only(keras: Any) -> None:
    elastic = searched(with_norms(keras, 3))
    converter = Converter(elastic, (8, 8, 1))
    costs = SubNetworkCosts(elastic, load("edgetpu"))
    costs.calibrate(elastic.smallest, converter(elastic.smallest))
    calibrate(costs, elastic, converter, IMPORTANT, SILENT)
    assert len(converter.files) == 4  # the smallest, the largest, and the smallest with one block and with all
    for sub_network in (elastic.smallest, elastic.largest):
        expect_costs_of_files(costs, converter, sub_network, 0)
    for kept in ((0, 1), (1, 2)):
        expect_costs_of_files(costs, converter, smallest_with(elastic, kept), 0.01)


def test_costs_of_an_attention(keras: Any) -> None:
    elastic = searched(attention(keras))
    converter = Converter(elastic, (8, 8))
    costs = SubNetworkCosts(elastic, load("edgetpu"))
    before = costs.figures(elastic.largest).macs
    costs.calibrate(elastic.smallest, converter(elastic.smallest))
    calibrate(costs, elastic, converter, IMPORTANT, SILENT)
    assert costs.figures(elastic.largest).macs > 1.5 * before
    for sub_network in list(converter.files):
        expect_costs_of_files(costs, converter, sub_network, 0)


def test_costs_that_are_right_need_two_conversions(keras: Any) -> None:
    layers = keras.layers
    image = keras.Input((8, 8, 1))
    x = layers.Conv2D(16, 3, padding="same")(image)
    x = layers.Add()([x, layers.Conv2D(16, 1)(layers.ReLU()(layers.Conv2D(32, 1)(x)))])
    elastic = searched(keras.Model(image, layers.Dense(2)(layers.GlobalAveragePooling2D()(x))))
    converter = Converter(elastic, (8, 8, 1))
    costs = SubNetworkCosts(elastic, load("edgetpu"))
    costs.calibrate(elastic.smallest, converter(elastic.smallest))
    calibrate(costs, elastic, converter, IMPORTANT, SILENT)
    assert list(converter.files) == [elastic.smallest, elastic.largest]
    middle = elastic.sub_network([values[len(values) // 2] for values in elastic.options])
    uncorrected = SubNetworkCosts(elastic, load("edgetpu"))
    uncorrected.calibrate(elastic.smallest, converter.files[elastic.smallest])
    assert costs.figures(middle).macs == uncorrected.figures(middle).macs
    assert costs.figures(middle).latency_ms == uncorrected.figures(middle).latency_ms


def test_blocks_of_many_kinds(keras: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One block is inside of another; the most frequent kind is converted alone."""
    layers = keras.layers
    image = keras.Input((8, 8, 8))
    x = image
    for number in range(2):
        x = layers.Add(name=f"frequent{number}")(
            [x, layers.LayerNormalization()(layers.Conv2D(8, 3, padding="same")(x))]
        )
    y = layers.Add(name="inner")([x, layers.LayerNormalization()(layers.Conv2D(8, 1)(x))])
    y = layers.Conv2D(8, 5, padding="same")(y)
    x = layers.Add(name="outer")([x, y])
    elastic = searched(keras.Model(image, layers.Dense(2)(layers.GlobalAveragePooling2D()(x))))
    additions = [block.addition for block in elastic.blocks]
    kinds = [{additions[index] for index in kind} for kind in block_kinds(elastic)]
    assert kinds[0] == {"frequent0", "frequent1"}
    assert {"inner"} in kinds
    assert {"outer"} in kinds
    inner = smallest_with(elastic, [additions.index("inner")])
    assert {additions[index] for index, kept in enumerate(inner.blocks) if kept} == {"inner", "outer"}
    monkeypatch.setattr(calibration, "MAX_KINDS", 1)
    converter = Converter(elastic, (8, 8, 8))
    costs = SubNetworkCosts(elastic, load("edgetpu"))
    costs.calibrate(elastic.smallest, converter(elastic.smallest))
    calibrate(costs, elastic, converter, IMPORTANT, SILENT)
    assert len(converter.files) == 4
    for sub_network in list(converter.files):
        expect_costs_of_files(costs, converter, sub_network, 0)


def test_few_structures_stay_in_memory(keras: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("compress.architecture_search.costs.STRUCTURES", 1)
    elastic = searched(with_norms(keras, 3))
    costs = SubNetworkCosts(elastic, load("edgetpu"))
    random = np.random.default_rng(0)
    for _ in range(20):
        costs.figures(elastic.random(random))
    assert costs._structure.cache_info().currsize == 1 + len(elastic.blocks) + len(elastic.kernels)
