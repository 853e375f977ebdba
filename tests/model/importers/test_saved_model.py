"""SavedModel folders: models that are rebuilt, models that are converted, and code that never runs."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compress.core import sandbox
from compress.core.errors import ModelError, UntrustedError
from compress.core.files import content_digest
from compress.model.importers import model_file
from compress.model.importers.keras import keras2
from compress.model.importers.saved_model import conversion, saved_model_folder
from compress.model.importers.saved_model.saved_model_folder import COMPUTE, FILES
from compress.model.tflite import graph
from compress.model.tflite.comparison import Runner
from compress.pipeline.stages.load import ConvertSavedModel, ImportFile
from compress.pipeline.stages.origin import stage_for

pytestmark = pytest.mark.tensorflow
Make = Callable[..., Path]


@pytest.fixture
def written(tf_keras: Any, tmp_path: Path) -> Make:
    """Return a function that writes a SavedModel of TensorFlow functions, each as a signature."""

    def write(**functions: Callable[[Any, Any], Any]) -> Path:
        import tensorflow as tf

        module = tf.Module()
        module.weight = tf.Variable(np.linspace(-1, 1, 8, dtype=np.float32).reshape(4, 2))
        input_signature = [tf.TensorSpec([None, 4], tf.float32, name="x")]
        signatures = {
            name: tf.function(partial(answer, function, module), input_signature=input_signature)
            for name, function in functions.items()
        }
        for name, signature in signatures.items():
            setattr(module, name, signature)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tf.saved_model.save(module, tmp_path / "saved", signatures=signatures)
        return tmp_path / "saved"

    return write


def answer(function: Callable[[Any, Any], Any], module: Any, x: Any) -> dict[str, Any]:
    return {"y": function(module, x)}


def dense(module: Any, x: Any) -> Any:
    import tensorflow as tf

    return tf.nn.relu(x @ module.weight + 0.5)


def kept(tf_keras: Any, path: Path) -> Any:
    """Write a Keras 2 model with a nested model as a folder; return the model."""
    layers, image = tf_keras.layers, tf_keras.Input((8, 8, 3))
    inner = tf_keras.Sequential([tf_keras.Input((8, 8, 4)), layers.BatchNormalization(), layers.Conv2D(4, 3)])
    values = inner(layers.Conv2D(4, 1)(image) * 2.0)
    model = tf_keras.Model(image, layers.Dense(3)(layers.GlobalAveragePooling2D()(values)))
    for weight in model.weights:
        weight.assign(np.random.default_rng(0).uniform(0.1, 0.6, weight.shape))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save(path, save_format="tf")
    return model


@pytest.mark.essential
def test_a_keras_2_model_is_rebuilt(tf_keras: Any, tmp_path: Path) -> None:
    model = kept(tf_keras, tmp_path / "saved")
    file = model_file.read(tmp_path / "saved")
    assert (file.format, file.becomes, file.refused) == ("SavedModel with a Keras model", "keras", ())
    assert file.producer.startswith(f"Keras {tf_keras.__version__}, TensorFlow 2.")
    imported = model_file.load(file)
    assert imported.parity is not None
    assert imported.parity.max_abs <= 1e-5
    assert keras2.difference(model, imported.model) <= keras2.TOLERANCE
    assert isinstance(stage_for(tmp_path / "saved"), ImportFile)


def test_the_graph_of_a_keras_model_is_not_loaded(
    tf_keras: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import tensorflow as tf

    kept(tf_keras, tmp_path / "saved")
    monkeypatch.setattr(tf.saved_model, "load", None)
    monkeypatch.setattr(tf_keras.models, "load_model", None)
    assert model_file.load(model_file.read(tmp_path / "saved")).model.count_params() == 195


def test_a_lambda_layer_needs_trust(tf_keras: Any, tmp_path: Path) -> None:
    witness = tmp_path / "ran"
    inputs = tf_keras.Input((4,))
    function = eval(f"lambda x: (open({str(witness)!r}, 'w').close(), x * 2)[1]")
    model = tf_keras.Model(inputs, tf_keras.layers.Lambda(function, name="code")(inputs))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save(tmp_path / "saved", save_format="tf")
    witness.unlink()
    file = model_file.read(tmp_path / "saved")
    with pytest.raises(UntrustedError, match=r"Lambda 'code': runs Python code: \d+ bytes of bytecode") as caught:
        model_file.load(file)
    assert caught.value.facts["refused"][0]["node"] == "code"
    assert not witness.exists()


def test_a_graph_becomes_a_float_tflite_file(written: Make) -> None:
    path = written(serving_default=dense)
    stage = stage_for(path)
    assert isinstance(stage, ConvertSavedModel)
    assert "only a graph" in stage.kind_reason()
    converted = conversion.convert(saved_model_folder.read(path))
    parsed = graph.parse(converted.tflite)
    assert [operator.name for operator in parsed.operators] == ["FULLY_CONNECTED"]
    assert parsed.tensors[parsed.inputs[0]].shape == (1, 4)
    imported = model_file.load(model_file.read(path))
    assert imported.parity is not None
    assert imported.parity.against.startswith("tensorflow ")
    assert imported.parity.max_rel <= 1e-5
    assert [type(layer).__name__ for layer in imported.model.layers] == ["InputLayer", "Dense", "Activation"]


def test_one_of_several_signatures_is_asked_for(written: Make) -> None:
    path = written(first=dense, second=lambda module, x: x * module.weight[0, 0])
    with pytest.raises(ModelError, match="several signatures: first, second; set `signature:`"):
        model_file.read(path)
    with pytest.raises(ModelError, match="has no signature 'third'; allowed: first"):
        model_file.read(path, "third")
    assert model_file.read(path, "second").signature == "second"


def test_of_several_signatures_the_default_is_taken_with_a_note(written: Make) -> None:
    path = written(serving_default=dense, other=lambda module, x: x * module.weight[0, 0])
    file = model_file.read(path)
    assert file.signature == "serving_default"
    assert "its signature serving_default is taken, and not other" in file.notes
    named = model_file.read(path, "other")
    assert (named.signature, len(named.notes)) == ("other", len(file.notes) - 1)


def reading(module: Any, x: Any) -> Any:
    import tensorflow as tf

    return x + tf.strings.to_number(tf.io.read_file("/etc/hostname"))


def inside(module: Any, x: Any) -> Any:
    import tensorflow as tf

    return tf.cond(tf.reduce_sum(x) > 0, lambda: x, lambda: tf.numpy_function(lambda value: value, [x], tf.float32))


def printing(module: Any, x: Any) -> Any:
    import tensorflow as tf

    tf.print(x, output_stream="file:///tmp/coralline-was-here")
    return x


def restoring(module: Any, x: Any) -> Any:
    import tensorflow as tf

    return x + tf.raw_ops.RestoreV2(prefix="/x", tensor_names=["a"], shape_and_slices=[""], dtypes=[tf.float32])[0]


@pytest.mark.parametrize(
    ("function", "operator", "reason"),
    [
        (reading, "ReadFile", "reads files"),
        (inside, "PyFunc", "runs a Python function"),
        (printing, "PrintV2", "writes files or messages"),
        (restoring, "RestoreV2", "reads files"),
    ],
)
def test_graphs_that_reach_out_are_refused_before_they_are_loaded(
    written: Make, function: Any, operator: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(serving_default=function)
    monkeypatch.setattr(sandbox, "run", None)
    file = model_file.read(path)
    assert (operator, reason) in [(refusal.operator, refusal.reason) for refusal in file.refused]
    for use in (lambda: model_file.load(file), lambda: stage_for(path)):
        with pytest.raises(ModelError, match="has operators that are not run") as caught:
            use()
        assert operator in [refusal["operator"] for refusal in caught.value.facts["refused"]]


def test_tables_from_files_are_refused(tf_keras: Any, tmp_path: Path) -> None:
    import tensorflow as tf

    (tmp_path / "words").write_text("a\nb\n")
    module = tf.Module()
    from_file = tf.lookup.TextFileInitializer(
        str(tmp_path / "words"), tf.string, tf.lookup.TextFileIndex.WHOLE_LINE, tf.int64, -1
    )
    module.table = tf.lookup.StaticHashTable(from_file, 0)
    function = tf.function(lambda x: {"y": module.table.lookup(tf.as_string(x))}, [tf.TensorSpec([None, 4])])
    tf.saved_model.save(module, tmp_path / "saved", signatures=function)
    kinds = {refusal.operator for refusal in model_file.read(tmp_path / "saved").refused}
    assert "InitializeTableFromTextFileV2" in kinds


def test_no_operator_on_the_list_reaches_out() -> None:
    assert not COMPUTE & FILES
    for word in ("File", "Py", "Print", "Save", "Restore", "Rpc", "Dataset", "Iterator", "Reader", "Queue", "Debug"):
        assert not [name for name in COMPUTE if word in name], word


def test_the_digest_is_of_every_file(written: Make) -> None:
    path = written(serving_default=dense)
    before = content_digest(path)
    (path / "assets" / "note").parent.mkdir(exist_ok=True)
    (path / "assets" / "note").write_text("a")
    with_note = content_digest(path)
    os.replace(path / "assets" / "note", path / "assets" / "other")
    assert len({before, with_note, content_digest(path)}) == 3
    assert stage_for(path).identity()["path"] == content_digest(path)


def test_damaged_and_hostile_folders(written: Make, tmp_path: Path) -> None:
    path = written(serving_default=dense)
    content = (path / "saved_model.pb").read_bytes()
    for damaged in (b"", content[: len(content) // 2], b"\x12\xff\xff\xff\xff\x7f", b"\xff" * 100, b"PK\x03\x04"):
        (path / "saved_model.pb").write_bytes(damaged)
        with pytest.raises(ModelError, match="saved"):
            model_file.read(path)
    (path / "saved_model.pb").write_bytes(content)
    (path / "variables" / "link").symlink_to("/etc/passwd")
    with pytest.raises(ModelError, match="has a link or a device in it"):
        model_file.read(path)
    with pytest.raises(ModelError, match=r"has no saved_model\.pb"):
        model_file.read(tmp_path)


def saved(path: Path, function: Any, *specs: Any) -> Path:
    """Write a function of tensors with these shapes as the only signature of a SavedModel."""
    import tensorflow as tf

    module = tf.Module()
    traced = tf.function(function, input_signature=[tf.TensorSpec(shape, dtype, name) for name, shape, dtype in specs])
    module.run = traced
    tf.saved_model.save(module, path, signatures={"serving_default": traced})
    return path


def converted_by_name(path: Path, **inputs: Any) -> dict[str, Any]:
    """Return the outputs of the converted file by name, for inputs by name."""
    parsed = graph.parse(conversion.convert(saved_model_folder.read(path)).tflite)
    names = [parsed.tensors[index].name for index in parsed.inputs]
    outputs = Runner(parsed).run([inputs[name] for name in names])
    return dict(zip([parsed.tensors[index].name for index in parsed.outputs], outputs, strict=True))


def test_outputs_of_the_same_shape_keep_their_names(tf_keras: Any, tmp_path: Path) -> None:
    """The converter changes the order of several outputs, and sorts output_10 before output_2."""
    factors = {f"output_{index}": index + 2.0 for index in range(12)}
    path = saved(
        tmp_path / "saved",
        lambda x: {name: x * factor for name, factor in factors.items()},
        ("x", [None, 3], "float32"),
    )
    x = np.array([[1, 2, 3]], np.float32)
    for name, values in converted_by_name(path, x=x).items():
        np.testing.assert_allclose(values, x * factors[name], err_msg=name)
    imported = model_file.load(model_file.read(path)).model
    for factor, values in zip(factors.values(), imported(x), strict=True):
        np.testing.assert_allclose(np.asarray(values), x * factor)


def test_inputs_of_the_same_shape_keep_their_names(tf_keras: Any, tmp_path: Path) -> None:
    specs = [(name, [None, 3], "float32") for name in ("a", "b", "c10", "c2")]
    path = saved(tmp_path / "saved", lambda a, b, c10, c2: {"y": 8 * c10 + 4 * c2 + 2 * b + a}, *specs)
    inputs = {name: np.full((1, 3), value, np.float32) for name, value in zip("abcd", (1, 3, 5, 7), strict=True)}
    named = {"a": inputs["a"], "b": inputs["b"], "c10": inputs["c"], "c2": inputs["d"]}
    np.testing.assert_allclose(converted_by_name(path, **named)["y"], np.full((1, 3), 40 + 28 + 6 + 1))
    imported = model_file.load(model_file.read(path)).model
    assert [tensor.name for tensor in imported.inputs] == ["a", "b", "c2", "c10"]


def test_an_output_that_is_the_input_or_another_output_has_its_own_name(tf_keras: Any, tmp_path: Path) -> None:
    import tensorflow as tf

    def run(x: Any) -> Any:
        y = tf.nn.relu(x)
        return {"same": x, "y": y, "z": y}

    path = saved(tmp_path / "saved", run, ("x", [None, 3], "float32"))
    x = np.array([[-1, 0, 2]], np.float32)
    outputs = converted_by_name(path, x=x)
    assert {name: values.tolist() for name, values in outputs.items()} == {
        "same": [[-1, 0, 2]],
        "y": [[0, 0, 2]],
        "z": [[0, 0, 2]],
    }


def normalized(x: Any) -> dict[str, Any]:
    import tensorflow as tf

    return {"y": tf.nn.softmax(x, axis=0)}


@pytest.mark.parametrize("batch", [None, 4])
def test_a_first_axis_that_is_not_a_batch_is_refused(tf_keras: Any, tmp_path: Path, batch: int | None) -> None:
    """The comparison is that of Keras models (test_batches.py)."""
    path = saved(tmp_path / "saved", normalized, ("x", [batch, 3], "float32"))
    reason = (
        "fixed first dimension of 4, and it is not a batch"
        if batch
        else "its first dimension is open, and it is not a batch"
    )
    with pytest.raises(ModelError, match=f"{reason}.* for several different samples at once.*put a batch in front"):
        conversion.convert(saved_model_folder.read(path))


def test_one_row_is_not_a_batch(tf_keras: Any, tmp_path: Path) -> None:
    """With a fixed first dimension of 1 nothing is mixed: a softmax over one row is 1."""
    path = saved(tmp_path / "saved", normalized, ("x", [1, 3], "float32"))
    assert converted_by_name(path, x=np.array([[1, 2, 3]], np.float32))["y"].tolist() == [[1, 1, 1]]


def test_a_fixed_batch_becomes_one_sample(tf_keras: Any, tmp_path: Path) -> None:
    specs = [("x", [4, 3], "float32"), ("y", [4, 3], "float32")]
    path = saved(tmp_path / "saved", lambda x, y: {"a": x - 2 * y, "b": y * y}, *specs)
    outputs = converted_by_name(path, x=np.full((1, 3), 5, np.float32), y=np.full((1, 3), 2, np.float32))
    assert {name: values.tolist() for name, values in outputs.items()} == {"a": [[1] * 3], "b": [[4] * 3]}


def test_a_fixed_batch_in_the_graph_is_refused_with_its_input(tf_keras: Any, tmp_path: Path) -> None:
    import tensorflow as tf

    path = saved(tmp_path / "saved", lambda x: {"y": tf.reshape(x, [4, 6])}, ("x", [4, 2, 3], "float32"))
    with pytest.raises(ModelError, match="its input 'x' has a fixed first dimension of 4, which other operators need"):
        conversion.convert(saved_model_folder.read(path))
    two = saved(tmp_path / "two", lambda x, y: {"y": x @ y}, ("x", [None, 3], "float32"), ("y", [3, 2], "float32"))
    with pytest.raises(ModelError, match="not those of one batch: x has any, y has 3"):
        conversion.convert(saved_model_folder.read(two))


def test_the_converted_file_is_compared_with_the_folder(tf_keras: Any, written: Make) -> None:
    result = conversion.convert(saved_model_folder.read(written(serving_default=dense)))
    conversion._check_conversion(result, "saved")
    wrong = replace(result, outputs=[[output + 0.1 for output in outputs] for outputs in result.outputs])
    with pytest.raises(ModelError, match=r"saved: the outputs of the converted \.tflite file differ by 0\.\d+ of"):
        conversion._check_conversion(wrong, "saved")


def test_a_graph_with_a_loop_is_refused(keras: Any, tmp_path: Path) -> None:
    model = keras.Sequential([keras.Input((6, 3)), keras.layers.LSTM(3)])
    model.export(tmp_path / "saved", verbose=False)
    with pytest.raises(ModelError, match=r"cannot be converted: its graph has the while loop .*; save a recurrent"):
        model_file.load(model_file.read(tmp_path / "saved"))
