"""SavedModel folders: models that are rebuilt, models that are converted, and code that never runs."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compress import sandbox
from compress.errors import ModelError, UntrustedError
from compress.importers import model_file
from compress.importers.keras import keras2
from compress.importers.saved_model import conversion, saved_model_folder
from compress.importers.saved_model.operators import COMPUTE, FILES
from compress.stages.load import ConvertSavedModel, LoadKeras, stage_for
from compress.tflite import graph

pytestmark = [
    pytest.mark.tensorflow,
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),  # Keras, reading variables
]
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


def test_a_keras_2_model_is_rebuilt(tf_keras: Any, tmp_path: Path) -> None:
    model = kept(tf_keras, tmp_path / "saved")
    file = model_file.read(tmp_path / "saved")
    assert (file.format, file.becomes, file.refused) == ("SavedModel with a Keras model", "keras", ())
    assert file.producer.startswith(f"Keras {tf_keras.__version__}, TensorFlow 2.")
    imported = model_file.load(file)
    assert imported.parity is not None
    assert imported.parity.max_abs <= 1e-5
    assert keras2.difference(model, imported.model) <= keras2.TOLERANCE
    assert isinstance(stage_for(tmp_path / "saved"), LoadKeras)


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

    (restored,) = tf.raw_ops.RestoreV2(
        prefix="/tmp/other", tensor_names=["a"], shape_and_slices=[""], dtypes=[tf.float32]
    )
    return x + restored


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
    before = saved_model_folder.digest(path)
    (path / "assets" / "note").parent.mkdir(exist_ok=True)
    (path / "assets" / "note").write_text("a")
    with_note = saved_model_folder.digest(path)
    os.replace(path / "assets" / "note", path / "assets" / "other")
    assert len({before, with_note, saved_model_folder.digest(path)}) == 3
    assert stage_for(path).identity()["sha256"] == saved_model_folder.digest(path)


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
