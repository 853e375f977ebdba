from __future__ import annotations

from typing import Any

import networks
import numpy as np
import pytest

from compress.core.errors import ModelError, StageError
from compress.learning.quantization import calibration, export, fake_quantization, quantizer_placement
from compress.learning.quantization.plan import QuantizationPlan, nudged, on_grid
from compress.learning.quantization.search import file_outputs
from compress.model.ir import keras_graph as network
from compress.model.ir.passes.fold import canonical
from compress.model.tflite import graph
from compress.targets import load
from compress.targets.edgetpu.placement import place

pytestmark = pytest.mark.tensorflow


def images(count: int) -> np.ndarray:
    return np.random.default_rng(count).random((count, 12, 12, 3), np.float32)


def quantized(keras: Any, builder: networks.Builder, io: Any = "int8") -> tuple[Any, QuantizationPlan, bytes]:
    model = networks.randomized(builder(keras))
    folded = canonical(network.read(model))
    plan = calibration.calibrate(folded, images(40))
    return model, plan, export.convert(folded, plan, io)


@pytest.mark.parametrize("names", [("sigmoid", None), (None, "tanh"), ("sigmoid", "tanh"), ("sigmoid", "sigmoid")])
def test_a_concatenation_is_as_wide_as_all_of_its_parts(keras: Any, names: tuple[Any, Any]) -> None:
    image, layers = keras.Input((12, 12, 3)), keras.layers
    parts = [layers.Conv2D(4, 3, activation=name)(image) for name in names]
    features = layers.Conv2D(4, 3)(layers.Concatenate()(parts))
    model = networks.randomized(keras.Model(image, layers.GlobalMaxPooling2D()(features)))
    model.layers[1].set_weights([weight * 5 for weight in model.layers[1].get_weights()])
    folded = canonical(network.read(model))
    plan = calibration.calibrate(folded, images(40))
    prescribed = quantizer_placement.fixed(folded, quantizer_placement.find(folded))
    assert [*prescribed.values()] == ([(0.0, 255 / 256)] if names == ("sigmoid", "sigmoid") else [])
    export.refuse_mismatch(folded, plan)
    expected = np.asarray(model(images(30)))
    actual = file_outputs(export.convert(folded, plan), images(30))
    assert np.abs(actual - expected).max() < 0.06 * np.abs(expected).max()


@pytest.mark.parametrize("builder", networks.ALL, ids=lambda b: b.__name__)
def test_everything_is_integer_and_maps_to_the_edge_tpu(keras: Any, builder: networks.Builder) -> None:
    model, _, content = quantized(keras, builder)
    expected = np.asarray(model(images(30)))
    actual = file_outputs(content, images(30))
    assert np.abs(actual - expected).max() < 0.06 * np.abs(expected).max()
    assert np.corrcoef(actual.ravel(), expected.ravel())[0, 1] > 0.99
    parsed = graph.parse(content)
    assert not export.float_operators(content)
    assert {"DEQUANTIZE", "QUANTIZE"}.isdisjoint(operator.name for operator in parsed.operators)
    assert {parsed.tensors[i].dtype for i in (*parsed.inputs, *parsed.outputs)} == {"INT8"}
    for operator in parsed.operators:
        if operator.name == "FULLY_CONNECTED":
            assert not parsed.tensors[operator.inputs[1]].quantization.per_channel  # type: ignore[union-attr]
    placed = place(parsed, load("edgetpu"))
    assert [op.op for op in placed.ops if op.placement == "cpu"] == []


@pytest.mark.parametrize("io", ["int8", "uint8"])
def test_input_and_output_have_the_type_that_was_asked_for(keras: Any, io: str) -> None:
    _, _, content = quantized(keras, networks.plain, io)
    parsed = graph.parse(content)
    assert {parsed.tensors[i].dtype for i in (*parsed.inputs, *parsed.outputs)} == {io.upper()}


def test_the_ranges_in_the_file_are_those_of_the_plan(keras: Any) -> None:
    _, plan, content = quantized(keras, networks.plain)
    parsed = graph.parse(content)
    stored = {
        round(tensor.quantization.scale[0] * 255, 4)
        for tensor in parsed.tensors
        if tensor.dtype == "INT8" and not tensor.is_constant and tensor.quantization
    }
    planned = {round(high - low, 4) for low, high in plan.ranges.values()}
    assert stored == planned


def test_concatenated_tensors_share_a_range_and_pooling_hands_it_on(keras: Any) -> None:
    folded = canonical(network.read(networks.branches(keras)))
    named = quantizer_placement.find(folded)
    concat = next(layer for layer in folded.layers.values() if layer.kind == "Concatenate")
    shared = {named.get(tensor) for tensor in named if named[tensor] == named[network.LayerOutput(concat.name)]}
    assert len(shared) == 1
    assert sum(name == named[network.LayerOutput(concat.name)] for name in named.values()) == 3
    pools = [layer.name for layer in folded.layers.values() if "Pooling" in layer.kind]
    assert pools
    assert not any(tensor.layer in pools for tensor in named)


def test_every_output_of_an_operation_rounds_but_integers_and_truth_values_do_not(keras: Any) -> None:
    image = keras.Input((12, 12, 3), name="image")
    largest, places = keras.ops.top_k(image, 2)
    halves = keras.ops.split(image, 3, axis=1)
    taken = [keras.layers.Flatten()(tensor) for tensor in (largest, keras.ops.cast(places, "float32"), *halves[1:])]
    net = network.read(
        keras.Model(image, keras.ops.where(image[:, 0, 0] > 0, *(tensor[:, :3] for tensor in taken[:2])))
    )
    names = set(quantizer_placement.find(net).values())
    kinds = {net.layers[name.partition(":")[0]].kind for name in names}
    assert kinds == {"InputLayer", "TopK", "Cast", "Where"}
    joined = network.read(keras.Model(image, taken))
    points = quantizer_placement.find(joined)
    assert {"InputLayer", "TopK", "Cast"} == {joined.layers[name.partition(":")[0]].kind for name in points.values()}


def test_further_outputs_are_named_after_their_number(keras: Any) -> None:
    image = keras.Input((4, 4, 2), name="image")
    recurrent = keras.layers.GRU(2, return_state=True, unroll=True, name="gru")
    output, state = recurrent(keras.layers.Reshape((4, 8))(image))
    net = network.read(keras.Model(image, [output, state * 2.0]))
    assert {"gru", "gru:0:1"} <= set(quantizer_placement.find(net).values())
    plan = calibration.calibrate(net, np.random.default_rng(0).random((8, 4, 4, 2), np.float32))
    assert plan.ranges["gru:0:1"] == plan.ranges["gru"]


def test_a_dead_tensor_and_constant_data_are_no_problem(keras: Any) -> None:
    model = networks.plain(keras)
    for layer in model.layers:
        if layer.__class__.__name__ == "Conv2D":
            layer.set_weights([np.zeros_like(w) for w in layer.get_weights()])
    folded = canonical(network.read(model))
    plan = calibration.calibrate(folded, np.zeros((4, 12, 12, 3), np.float32))
    assert not export.float_operators(export.convert(folded, plan))


def test_activations_that_explode_are_an_error(keras: Any) -> None:
    model = networks.plain(keras)
    folded = canonical(network.read(model))
    with pytest.raises(StageError, match="the input is not finite for calibration sample 0"):
        calibration.calibrate(folded, np.full((4, 12, 12, 3), np.inf, np.float32))


def test_a_layer_that_cannot_be_quantized_is_named(keras: Any) -> None:
    image = keras.Input((12, 12, 3))
    x = keras.layers.ReLU(4.0, 0.1, 0.2, name="late")(keras.layers.Conv2D(4, 3)(image))
    x = keras.layers.GlobalAveragePooling2D()(keras.layers.Conv2D(4, 3)(x))
    model = keras.Model(image, keras.layers.Dense(3)(x))
    folded = canonical(network.read(model))
    plan = calibration.calibrate(folded, images(8))
    with pytest.raises(export.FloatOperatorsError, match=r"operators would stay float in ReLU 'late': "):
        export.convert(folded, plan)


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_a_layer_that_works_in_a_loop_is_named(keras: Any, kind: str) -> None:
    """TensorFlow's own calibration would end the process."""
    image = keras.Input((257, 3))  # more steps than are unrolled
    x = keras.layers.Bidirectional(getattr(keras.layers, kind)(2), name="both")(image)
    folded = canonical(network.read(keras.Model(image, keras.layers.Dense(3)(x))))
    plan = calibration.calibrate(folded, np.random.default_rng(0).random((8, 257, 3), np.float32))
    reason = r"WHILE in Bidirectional 'both' \(it has 257 time steps, and at most 256 are unrolled\) is a loop, which"
    with pytest.raises(StageError, match=reason) as error:
        export.convert(folded, plan)
    assert not isinstance(error.value, export.FloatOperatorsError)


def test_a_lookup_is_refused(keras: Any) -> None:
    """TensorFlow's own calibration refuses it without naming the layer."""
    numbers = keras.Input((6,))
    x = keras.layers.Flatten()(keras.layers.Embedding(9, 4, name="words")(numbers))
    folded = canonical(network.read(keras.Model(numbers, keras.layers.Dense(2)(x))))
    plan = calibration.calibrate(folded, np.ones((8, 6), np.float32))
    with pytest.raises(
        StageError, match=r"the lookup in Embedding 'words' takes indices, .*look up the vectors in your program"
    ):
        export.convert(folded, plan)


def test_a_layer_that_the_format_does_not_have_is_named(keras: Any) -> None:
    image = keras.Input((4, 4, 3))
    inner = keras.Sequential([keras.Input((4, 4, 3)), keras.layers.Conv2D(2, 1), keras.layers.ReLU()])
    x = keras.ops.cast(keras.ops.argmax(inner(image), axis=-1, keepdims=True), "float32")
    x = keras.ops.erf(x) + keras.layers.Flatten()(keras.ops.erf(x))[:, :1, None, None]
    kinds = r"TensorFlow Lite has no BitwiseAnd, Erf of Argmax '\w+', Erf '\w+', Erf '\w+'; replace these layers"
    with pytest.raises(ModelError, match=kinds):
        export.convert_float(keras.Model(image, x))
    tail = keras.Sequential([keras.Input((2,)), keras.layers.Activation(keras.ops.erf)], name="tail")
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2), tail])
    with pytest.raises(ModelError, match=r"no Erf of Sequential 'tail'"):
        export.convert_float(model)


@pytest.mark.parametrize(
    ("kinds", "attempts"),
    [
        ([["DEQUANTIZE", "SPLIT", "QUANTIZE"], ["SPLIT"], [], ["SPLIT"]], 3),
        ([["SPLIT"]] * 20, export.ATTEMPTS),
        ([["SPLIT", "ADD"], []], 1),
        ([["DEQUANTIZE", "QUANTIZE"], []], 1),
    ],
)
def test_a_quantizer_that_leaves_a_split_float_by_chance_is_asked_again(
    monkeypatch: pytest.MonkeyPatch, kinds: list[list[str]], attempts: int
) -> None:
    files: list[bytes] = []
    monkeypatch.setattr(export, "_convert", lambda *_: files.append(bytes([len(files)])) or files[-1])
    monkeypatch.setattr(export, "float_operators", lambda content: {kind: kind for kind in kinds[content[0]]})
    assert export.convert_calibrated(None, images(1)) == files[-1]
    assert len(files) == attempts


def test_a_split_of_which_one_part_is_taken_is_quantized_every_time(keras: Any) -> None:
    image = keras.Input((4, 4, 4))
    x = keras.ops.split(keras.layers.Conv2D(4, 1)(image), 2, axis=-1)[1] * 2.0
    folded = canonical(network.read(keras.Model(image, x)))
    plan = calibration.calibrate(folded, np.random.default_rng(0).random((8, 4, 4, 4), np.float32))
    assert len({export.convert(folded, plan) for _ in range(4)}) == 1


@pytest.mark.parametrize("builder", networks.ALL, ids=lambda b: b.__name__)
def test_ranges_as_operations_give_the_bytes_that_layers_give(
    keras: Any, builder: networks.Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    folded = canonical(network.read(networks.randomized(builder(keras))))
    plan = calibration.calibrate(folded, images(8))
    fixed_network = fake_quantization.fixed(fake_quantization.insert(folded, quantizer_placement.find(folded), plan))
    assert {layer.kind for layer in fixed_network.layers.values()} & {
        fake_quantization.FAKE,
        fake_quantization.FIXED,
    } == {fake_quantization.FIXED}
    content = export.convert(folded, plan)
    monkeypatch.setattr(fake_quantization, "fixed", lambda network: network)
    assert export.convert(folded, plan) == content


@pytest.mark.parametrize(
    ("low", "high"), [(-1.0, 1.0), (0.0, 6.0), (0.3, 2.0), (-5.0, -1.0), (0.0, 0.0), (-0.001, 1000.0)]
)
def test_a_nudged_range_has_zero_on_a_step(low: float, high: float) -> None:
    a, b = nudged(low, high)
    scale = (b - a) / 255
    assert abs(-a / scale - round(-a / scale)) < 1e-6
    assert a <= 0 <= b
    assert abs(a - min(low, 0)) <= scale
    assert abs(b - max(high, 0)) <= scale + 1e-6


def test_weights_on_the_grid_stay_there() -> None:
    weights = np.random.default_rng(0).normal(size=(3, 3, 8, 16)).astype(np.float32)
    weights[..., 5] = 0
    once = on_grid(weights, (0, 1, 2))
    np.testing.assert_array_equal(on_grid(once, (0, 1, 2)), once)
    scale = np.abs(weights).max(axis=(0, 1, 2)) / 127
    assert (np.abs(once - weights).max(axis=(0, 1, 2)) <= scale / 2 + 1e-7).all()
