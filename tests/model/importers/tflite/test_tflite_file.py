"""Float .tflite files as Keras models: real networks, the forms that converters store them in, and errors."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import networks
import numpy as np
import pytest
import tiny
from one_op import Op, Tensor, content

from compress.core.errors import ModelError
from compress.learning.quantization import export
from compress.model.importers import model_file
from compress.model.importers.common import verification
from compress.model.importers.common.unsupported import Refused
from compress.model.importers.tflite import tflite_file
from compress.model.importers.tflite.ops import layers as tflite_rules
from compress.model.tflite import dequantization, graph
from compress.model.tflite.interpreter import LoadedModel

pytestmark = pytest.mark.tensorflow
EXACT = 1e-5
Written = Callable[[bytes], Path]


@pytest.fixture
def written(tmp_path: Path) -> Written:
    """Return a function that writes a .tflite file."""

    def write(data: bytes) -> Path:
        path = tmp_path / "model.tflite"
        path.write_bytes(data)
        return path

    return write


def converted(model: Any, *optimizations: Any, types: Any = ()) -> bytes:
    """Convert a model with TensorFlow's converter as its users do: the batch size is that of the model."""
    import tensorflow as tf

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        converter = tf.lite.TFLiteConverter.from_keras_model(model)
        converter.optimizations = list(optimizations)
        converter.target_spec.supported_types = list(types)
        return bytes(converter.convert())


def difference(model: Any, other: Any) -> float:
    """Return the relative difference of the outputs for seven samples, which are more than the batch of the file."""
    samples = np.random.default_rng(1).random((7, *model.input_shape[1:]), np.float32)
    return verification.compare_output(np.asarray(model(samples)), np.asarray(other(samples))).relative


@pytest.mark.parametrize("builder", networks.ALL, ids=lambda b: b.__name__)
@pytest.mark.essential
def test_a_network_comes_back_from_its_file(keras: Any, builder: networks.Builder, written: Written) -> None:
    model = networks.randomized(builder(keras))
    path = written(export.convert_float(model))
    imported_model, parity = tflite_file.load(tflite_file.read(path))
    assert parity.max_rel < EXACT
    assert difference(model, imported_model) < EXACT
    assert imported_model.count_params() >= 0.9 * sum(np.prod(w.shape) for w in model.weights if "moving" not in w.path)
    assert all(weight.trainable for weight in imported_model.weights)


def reshaping(keras: Any, batch: int | None) -> Any:
    """A model with shapes that a converter computes from the batch if the batch is not fixed."""
    layers = keras.layers
    image = keras.Input((8, 8, 3), batch_size=batch)
    x = layers.Conv2DTranspose(4, 3, strides=2, padding="same")(image)
    x = layers.Reshape((64, 16))(x)
    x = layers.Dense(6, activation="gelu")(layers.LayerNormalization()(x))
    return keras.Model(image, layers.Dense(5, activation="softmax")(layers.Flatten()(x)))


@pytest.mark.parametrize("batch", [None, 4])
def test_a_batch_of_any_size(keras: Any, written: Written, batch: int | None) -> None:
    model = networks.randomized(reshaping(keras, batch))
    file = tflite_file.read(written(converted(model)))
    assert file.problems == ()
    assert file.batch == (batch or 1)
    imported_model, parity = tflite_file.load(file)
    assert parity.max_rel < EXACT
    assert imported_model.input_shape == (None, 8, 8, 3)


def atrous(keras: Any) -> Any:
    """Dilated convolutions as DeepLab has them."""
    layers, image = keras.layers, keras.Input((16, 15, 3))
    x = layers.Conv2D(4, 3, dilation_rate=2, padding="same", activation="relu")(image)
    x = layers.Add()([x, layers.DepthwiseConv2D(3, dilation_rate=(3, 3), padding="same")(x)])
    return keras.Model(image, layers.Conv2D(2, (3, 2), dilation_rate=(1, 2))(x))


def causal(keras: Any) -> Any:
    """Dilated convolutions over time."""
    layers, sound = keras.layers, keras.Input((40, 3))
    x = layers.Conv1D(4, 3, dilation_rate=4, padding="causal", activation="relu")(sound)
    return keras.Model(sound, layers.Conv1D(4, 3, dilation_rate=2, padding="same")(x))


@pytest.mark.parametrize("build", [atrous, causal])
def test_dilated_convolutions_stay_one_layer_each(keras: Any, written: Written, build: Callable[[Any], Any]) -> None:
    model = networks.randomized(build(keras))
    file = tflite_file.read(written(converted(model)))
    assert "SPACE_TO_BATCH_ND" in [operator.name for operator in file.graph.operators]
    assert file.problems == ()
    imported_model, parity = tflite_file.load(file)
    assert parity.max_rel < EXACT
    kinds = [type(layer).__name__ for layer in imported_model.layers]
    assert kinds.count("Conv2D") == 2
    assert difference(model, imported_model) < EXACT


@pytest.mark.parametrize(("types", "dtype"), [(["float16"], "FLOAT16"), ([], "INT8")])
def test_weights_stored_in_fewer_bits_are_taken_as_floats(
    keras: Any, written: Written, types: list[str], dtype: str
) -> None:
    import tensorflow as tf

    image = keras.Input((8, 8, 8))
    x = keras.layers.Conv2D(32, 3, activation="relu")(image)
    x = keras.layers.Dense(40)(keras.layers.GlobalAveragePooling2D()(x))
    model = networks.randomized(keras.Model(image, x))
    data = converted(model, tf.lite.Optimize.DEFAULT, types=[getattr(tf, name) for name in types])
    assert dtype in {tensor.dtype for tensor in graph.parse(data).tensors}
    file = tflite_file.read(written(data))
    assert any(f"of {dtype} are taken as float32" in note for note in file.notes)
    imported_model, parity = tflite_file.load(file)
    assert parity.max_rel < EXACT
    assert difference(model, imported_model) < 0.02
    assert "DEQUANTIZE" not in {operator.name for operator in file.imported.plain.graph.operators}  # type: ignore[union-attr]


def test_several_inputs_and_outputs(keras: Any, written: Written) -> None:
    layers = keras.layers
    one, two = keras.Input((6, 6, 3)), keras.Input((6, 6, 3))
    x = layers.Conv2D(4, 3)(layers.Add()([one, layers.ReLU()(two)]))
    model = networks.randomized(keras.Model([one, two], [x, layers.GlobalMaxPooling2D()(x)]))
    imported_model, parity = tflite_file.load(tflite_file.read(written(export.convert_float(model))))
    assert parity.max_rel < EXACT
    assert (len(imported_model.inputs), len(imported_model.outputs)) == (2, 2)


def test_a_float_file_is_rebuilt_and_compared_on_real_samples(keras: Any, written: Written) -> None:
    assert tflite_file.read(written(tiny.classifier())).imported is None
    file = tflite_file.read(written(tiny.classifier(int8=False)))
    assert file.problems == ()
    samples = np.random.default_rng(0).random((5, 4, 4, 1), np.float32)
    assert tflite_file.load(file, samples)[1].max_rel < EXACT


def test_everything_without_a_counterpart_is_listed_at_once(written: Written) -> None:
    floats = {name: Tensor((1, 4), "FLOAT32") for name in ("in", "a", "b", "out")}
    ops = [Op("ATAN2", ["in", "in"], ["a"]), Op("RELU", ["a"], ["b"]), Op("own", ["b"], ["out"], custom=True)]
    file = tflite_file.read(written(content(floats, ops, ["in"], ["out"])))
    assert file.problems == (
        Refused("operator 0, a", "ATAN2", "Keras has no layer for it"),
        Refused("operator 2, out", "own", "it is a custom operator"),
    )


def test_the_first_operator_that_differs_is_named(
    keras: Any, written: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = dict(tflite_rules.RULES) | {"RELU": tflite_rules.RULES["RELU6"]}
    monkeypatch.setattr(tflite_file, "RULES", wrong)
    floats = {name: Tensor((1, 4), "FLOAT32") for name in ("in", "a", "b", "out")}
    floats["nine"] = Tensor((4,), "FLOAT32", 9.0)
    ops = [Op("ADD", ["in", "nine"], ["a"]), Op("RELU", ["a"], ["b"]), Op("TANH", ["b"], ["out"])]
    saturated = tflite_file.read(written(content(floats, ops, ["in"], ["out"])))
    assert tflite_file.load(saturated)[1].max_rel < verification.TOLERANCE  # after tanh, both are nearly 1
    ops[2] = Op("ABS", ["b"], ["out"])
    file = tflite_file.read(written(content(floats, ops, ["in"], ["out"])))
    with pytest.raises(ModelError, match=r"differ by 0\.[3-6]\d? .*first at RELU \(operator 1, 'b'\)"):
        tflite_file.load(file)


@pytest.mark.parametrize(
    ("tensors", "ops", "ends", "message"),
    [
        ({"in": (1, 2**28 + 1), "out": (1, 2**28 + 1)}, [("RELU", ["in"], ["out"])], ["in"], "allowed: 268,435,456"),
        ({"in": (4,), "out": (4,)}, [("RELU", ["in"], ["out"])], ["in"], r"its input 'in' is FLOAT32 \[4\]"),
        ({"in": (1, 0), "out": (1, 0)}, [("RELU", ["in"], ["out"])], ["in"], r"its input 'in' is FLOAT32 \[1, 0\]"),
        ({"in": (1, 4), "a": (2, 4), "out": (1, 4)}, [("ADD", ["in", "a"], ["out"])], ["in", "a"], "batches of"),
        ({"in": (1, 4), "out": (1, 4)}, [("RELU", ["in"], ["in"])], ["in"], "does not depend on its inputs"),
    ],
)
def test_nonsense_is_refused_in_words(
    written: Written, tensors: dict[str, Any], ops: list[Any], ends: list[str], message: str
) -> None:
    typed_tensors = {name: Tensor(shape, "FLOAT32") for name, shape in tensors.items()}
    path = written(content(typed_tensors, [Op(*op) for op in ops], ends, ["out"]))
    with pytest.raises(ModelError, match=message):
        tflite_file.read(path)


@pytest.mark.parametrize("source", ["a", "out"])
def test_an_input_that_nothing_computes_is_refused(written: Written, source: str) -> None:
    floats = {name: Tensor((1, 4), "FLOAT32") for name in ("in", "a", "out")}
    (problem,) = tflite_file.read(written(content(floats, [Op("RELU", [source], ["out"])], ["in"], ["out"]))).problems
    assert problem == Refused("operator 0, out", "RELU", f"no operator before it computes its input 0, '{source}'")


def test_an_input_without_a_fixed_size_is_refused(written: Written) -> None:
    image = Tensor((1, 1, 1, 3), "FLOAT32", signature=(-1, -1, -1, 3))
    path = written(content({"in": image, "out": image}, [Op("RELU", ["in"], ["out"])], ["in"], ["out"]))
    with pytest.raises(ModelError, match="its input 'in' has a dynamic shape; convert"):
        tflite_file.read(path)


def test_a_quantized_file_in_float_has_the_rounding_of_the_file(written: Written) -> None:
    file = tflite_file.in_float(tflite_file.read(written(tiny.classifier((4, 4, 1), 3))))
    samples = np.random.default_rng(0).random((5, 4, 4, 1), np.float32)
    rounding = tflite_file.rounding(file, samples)
    assert (rounding.operators, 0.1 < rounding.largest_steps < 1) == (2, True)
    model, parity = tflite_file.load(file)
    assert parity.max_rel < EXACT
    assert np.asarray(model(samples)).shape == (5, 3)


def test_a_float_form_that_differs_is_refused_with_the_operator(
    written: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tiny.classifier((4, 4, 1), 3))
    real_values = dequantization.real_values
    monkeypatch.setattr(dequantization, "real_values", lambda tensor: real_values(tensor) * np.float32(1.2))
    file = tflite_file.in_float(tflite_file.read(path))
    with pytest.raises(ModelError, match=r"in float, (CONV_2D|FULLY_CONNECTED) .* steps of its output.*as by rounding"):
        tflite_file.rounding(file)


@pytest.mark.parametrize("dtype", ["UINT8", "INT32"])
def test_integers_that_the_model_casts_itself(dtype: str, written: Written) -> None:
    """The network takes the same numbers as floats; the comparison runs the file with its integers."""
    tensors = {
        "image": Tensor((1, 6), dtype, None, ()),
        "cast": Tensor((1, 6), "FLOAT32", None, ()),
        "w": Tensor((2, 6), "FLOAT32", np.arange(12).reshape(2, 6) / 100, ()),
        "y": Tensor((1, 2), "FLOAT32", None, ()),
    }
    operators = [Op("CAST", ["image"], ["cast"]), Op("FULLY_CONNECTED", ["cast", "w", ""], ["y"])]
    path = written(content(tensors, operators, ["image"], ["y"]))
    file = model_file.read(path)
    assert file.becomes == "keras"
    assert f"takes the same numbers as float32, not as {dtype}: the model casts them" in file.notes[0]
    imported = model_file.load(file)
    assert imported.model.inputs[0].name == "image"
    assert not imported.file_is_float_tflite  # every sample is float
    numbers = np.array([[0, 1, 2, 200, 254, 255]], np.float32)
    np.testing.assert_allclose(np.asarray(imported.model(numbers)), numbers @ tensors["w"].data.T, rtol=1e-5)


def test_a_float_file_is_compared_with_itself_not_with_its_plain_form(written: Written) -> None:
    file = tflite_file.read(written(content(*fully_connected())))
    assert file.plain is not None
    assert tflite_file._reference(file, file.plain) is file.graph


def fully_connected() -> Any:
    tensors = {
        "x": Tensor((1, 6), "FLOAT32", None, ()),
        "w": Tensor((2, 6), "FLOAT32", 0.5, ()),
        "y": Tensor((1, 2), "FLOAT32", None, ()),
    }
    return tensors, [Op("FULLY_CONNECTED", ["x", "w", ""], ["y"])], ["x"], ["y"]


def test_outputs_have_the_names_of_the_signature(written: Written) -> None:
    """The converter numbers the tensors in another order than the signature's outputs."""
    from ai_edge_litert import schema_py_generated as schema

    names = [f"PartitionedCall:{number}" for number in range(3)]
    tensors = {name: Tensor((1, 4), "FLOAT32", None, ()) for name in ("x", *names)}
    kinds = ("RELU", "TANH", "LOGISTIC")
    operators = [Op(kind, ["x"], [name]) for kind, name in zip(kinds, names, strict=True)]
    parsed = graph.parse(content(tensors, operators, ["x"], [names[2], names[0], names[1]]))
    signature = schema.SignatureDefT()
    signature.signatureKey, signature.inputs, signature.outputs = b"serving_default", [], []
    for name, index in (("output_1", 1), ("output_10", 2), ("output_2", 3)):
        entry = schema.TensorMapT()
        entry.name, entry.tensorIndex = name.encode(), index
        signature.outputs.append(entry)
    parsed.source.signatureDefs = [signature]
    path = written(graph.serialize(parsed))
    expected = ["output_2", "output_1", "output_10"]
    assert [tensor.name for tensor in LoadedModel(path, reproducible=True).output_tensors] == expected
    imported = model_file.load(model_file.read(path)).model
    assert imported.output_names == expected
    x = np.array([[-2, -1, 0, 1]], np.float32)
    np.testing.assert_allclose(np.asarray(imported(x)[2]), np.tanh(x), atol=1e-6)


def test_an_output_with_a_fused_activation_has_its_name(written: Written) -> None:
    tensors = fully_connected()[0]
    operators = [Op("FULLY_CONNECTED", ["x", "w", ""], ["y"], 1, {"fusedActivationFunction": 1})]
    imported = model_file.load(model_file.read(written(content(tensors, operators, ["x"], ["y"])))).model
    assert [layer.name for layer in imported.layers] == ["x", "y_linear", "y"]
