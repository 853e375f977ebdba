from __future__ import annotations

import copy
import json
import logging
import struct
import subprocess
import sys
import warnings
import zipfile
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from compress.core.errors import ModelError, UntrustedError
from compress.model.importers.keras import keras_config, keras_file
from compress.model.importers.keras.keras_file import load, scan
from compress.model.ir import tensorflow

Config = dict[str, Any]
Save = Callable[[Any, str], Path]


def layer(kind: str, **config: Any) -> Config:
    return {
        "module": "keras.layers",
        "class_name": kind,
        "config": {"name": kind.lower(), **config},
        "registered_name": None,
    }


def sequential(*layers: Any, **extra: Any) -> Config:
    config = {"name": "net", "layers": list(layers)}
    return {"module": "keras", "class_name": "Sequential", "config": config, "registered_name": None, **extra}


PLAIN = sequential(layer("InputLayer", batch_shape=[None, 4]), layer("Dense", units=2, activation="relu"))


def weights() -> bytes:
    stream = BytesIO()
    with h5py.File(stream, "w") as file:
        file.create_group("vars")
        file["layers/dense/vars/0"] = np.zeros((4, 2), np.float32)
    return stream.getvalue()


def archive(path: Path, config: Any = PLAIN, version: str = "3.15.1", **others: bytes) -> Path:
    members = {
        "metadata.json": json.dumps({"keras_version": version}).encode(),
        "config.json": config if isinstance(config, bytes) else json.dumps(config).encode(),
        "model.weights.h5": weights(),
    }
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in {**members, **others}.items():
            if content != b"absent":
                file.writestr(name, content)
    return path


def hdf5(path: Path, config: Any = PLAIN, version: str | None = "2.4.0") -> Path:
    with h5py.File(path, "w") as file:
        file["model_weights/dense/kernel:0"] = np.zeros((4, 2), np.float32)
        file.attrs["model_config"] = config if isinstance(config, str | bytes | int) else json.dumps(config)
        if version is not None:
            file.attrs["keras_version"] = version
    return path


def message(path: Path) -> str:
    with pytest.raises(ModelError) as caught:
        scan(path)
    text = str(caught.value)
    assert text.startswith(f"{path}: ")
    assert "\n" not in text
    assert caught.value.hint
    return text


@pytest.fixture
def no_tensorflow(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(seed: int | None = None) -> Any:
        raise AssertionError("TensorFlow was asked for")

    monkeypatch.setattr(tensorflow, "keras", refuse)


def test_scan_of_an_archive(tmp_path: Path) -> None:
    scan_result = scan(archive(tmp_path / "m.keras"))
    assert scan_result == keras_file.Scan("keras", "3.15.1", PLAIN, (), ())
    assert not scan_result.from_keras2


@pytest.mark.parametrize(("version", "old"), [("2.4.0", True), ("1.2.2", True), (None, True), ("3.0.0", False)])
def test_scan_of_hdf5(tmp_path: Path, version: str | None, old: bool) -> None:
    scan_result = scan(hdf5(tmp_path / "m.h5", version=version))
    assert (scan_result.format, scan_result.keras_version) == ("h5", version or "")
    assert scan_result.config == PLAIN
    assert scan_result.from_keras2 is old


def test_scan_imports_no_tensorflow(tmp_path: Path) -> None:
    paths = [str(archive(tmp_path / "m.keras")), str(hdf5(tmp_path / "m.h5"))]
    code = (
        "import sys, pathlib; from compress.model.importers.keras import keras_file\n"
        "assert 'h5py' not in sys.modules\n"
        "for path in sys.argv[1:]: keras_file.scan(pathlib.Path(path))\n"
        "assert not {'tensorflow', 'keras', 'tf_keras'} & set(sys.modules)"
    )
    root = Path(keras_file.__file__).parents[3]
    subprocess.run([sys.executable, "-c", code, *paths], cwd=root, check=True, timeout=60)


FUNCTION = {"class_name": "function", "config": "relu", "module": "builtins", "registered_name": "relu"}
UNTRUSTED = {
    "lambda layer": (
        layer("Lambda", function=["4wEA", None, None]),
        "Lambda 'lambda': runs Python code: 3 bytes of bytecode, whose source is not in the file",
    ),
    "serialized lambda": (
        layer("Dense", activation={"class_name": "__lambda__", "config": {"value": "4wEA"}}),
        "__lambda__ 'dense': is Python code",
    ),
    "registered": (
        {**layer("Swish"), "module": "nets.blocks", "registered_name": "nets>Swish"},
        "nets>Swish 'swish': is of the custom class 'nets>Swish' from module 'nets.blocks'",
    ),
    "registered as a known one": ({**layer("Dense"), "registered_name": "nets>Dense"}, "class 'nets>Dense'"),
    "other module": ({**layer("Dense"), "module": "os"}, "class 'Dense' from module 'os'"),
    "module that begins alike": ({**layer("Dense"), "module": "keras_hub.layers"}, "from module 'keras_hub.layers'"),
    "unknown class": (
        {"class_name": "MyLayer", "config": {"name": "mine"}},
        "MyLayer 'mine': is of the custom class 'MyLayer'",
    ),
    "class from main": ({**layer("Dense2"), "module": None}, "class 'Dense2'"),
    "no class": ({"class_name": ["Dense"], "config": {}}, "has a class without a name"),
    "function": (layer("Dense", activation={**FUNCTION, "module": "nets"}), "function 'relu' of module 'nets'"),
    "python builtin": (layer("Dense", activation={**FUNCTION, "config": "exec"}), "function 'exec' of module"),
    "named activation": (layer("Dense", activation="nets>swish"), "function 'dense': calls the function 'nets>swish'"),
    "named initializer": (
        layer("Dense", kernel_initializer="nets>Ones"),
        "'dense': is of the custom class 'nets>Ones'",
    ),
    "initializer": (
        layer("Dense", kernel_initializer={"class_name": "nets>Ones", "config": {}}),
        "nets>Ones 'dense': is of the custom class",
    ),
    "wrapped": (layer("TimeDistributed", layer=layer("Lambda")), "Lambda 'lambda'"),
    "nested model": (sequential(sequential(layer("Lambda"))), "Lambda 'lambda'"),
    "type": (layer("Dense", x={"class_name": "__typespec__", "spec_name": "x", "module": "os"}), "__typespec__"),
    "saved model": (layer("TFSMLayer", filepath="/tmp/x"), "TFSMLayer 'tfsmlayer': runs a SavedModel"),
    "file": (layer("StringLookup", vocabulary="/etc/passwd"), "reads the file '/etc/passwd'"),
}


@pytest.mark.parametrize("case", UNTRUSTED)
@pytest.mark.parametrize("container", ["m.keras", "m.h5"])
@pytest.mark.usefixtures("no_tensorflow")
def test_untrusted_objects_are_named_and_refused(tmp_path: Path, case: str, container: str) -> None:
    entry, expected = UNTRUSTED[case]
    path = (archive if container == "m.keras" else hdf5)(tmp_path / container, sequential(entry))
    assert any(expected in str(refusal) for refusal in scan(path).untrusted), scan(path).untrusted
    with pytest.raises(UntrustedError) as caught:
        load(path)
    assert expected in str(caught.value)
    assert "set `trust: true` under `model:`" in caught.value.hint


def test_everything_untrusted_is_listed_once(tmp_path: Path) -> None:
    config = sequential(layer("Lambda"), layer("Lambda"), layer("Dense", activation="mine"))
    assert len(scan(archive(tmp_path / "m.keras", config)).untrusted) == 2


def test_what_keras_writes_is_trusted(tmp_path: Path) -> None:
    policy = {"module": "keras", "class_name": "DTypePolicy", "config": {"name": "float32"}, "registered_name": None}
    initializer = {"module": "keras.initializers", "class_name": "Zeros", "config": {}, "registered_name": None}
    constant = {**initializer, "module": "tensorflow.python.ops.init_ops_v2", "class_name": "Constant"}
    config = sequential(
        {**layer("Functional"), "module": "keras.src.models.functional", "registered_name": "Functional"},
        {**layer("GetItem"), "module": "keras.src.ops.numpy", "registered_name": "GetItem"},
        {**layer("Dense"), "module": "tf_keras.src.layers.core.dense"},
        layer("Conv2DTranspose", dtype=policy, bias_initializer=initializer, recurrent_activation="LeakyReLU"),
        layer("Conv3D", activation=FUNCTION, kernel_initializer=constant, vocabulary=["a"]),
        {"class_name": "Model", "config": {"build": {"class_name": "__tuple__", "items": [1]}}},
    )
    assert scan(archive(tmp_path / "m.keras", config)).untrusted == ()


def test_compilation_is_left_out_of_archives_and_judged_in_hdf5(tmp_path: Path) -> None:
    loss = {"class_name": "MyLoss", "config": {}, "module": "nets"}
    config = sequential(sequential(compile_config={"loss": loss}), compile_config={"loss": loss})
    scan_result = scan(archive(tmp_path / "m.keras", config))
    assert scan_result.untrusted == ()
    assert "compile_config" not in json.dumps(scan_result.config)
    assert scan(hdf5(tmp_path / "m.h5", config)).untrusted


def test_modules_of_older_releases_are_renamed(tmp_path: Path) -> None:
    entries = [
        {**layer("Functional"), "module": "keras.engine.functional"},
        {**layer("Dense"), "module": "keras_core.layers"},
        {**layer("Dense"), "module": "tensorflow.keras.layers"},
        {**layer("Dense"), "module": "keras.engineer"},
    ]
    scan_result = scan(archive(tmp_path / "m.keras", sequential(*entries)))
    modules = [entry["module"] for entry in scan_result.config["config"]["layers"]]
    assert modules == ["keras.src.engine.functional", "keras.layers", "keras.layers", "keras.engineer"]


@pytest.mark.usefixtures("no_tensorflow")
def test_every_layer_without_counterpart_is_listed_before_anything_is_loaded(tmp_path: Path) -> None:
    write = {"class_name": "TFOpLambda", "config": {"name": "tf.io.write_file", "function": "io.write_file"}}
    config = sequential(write, layer("LocallyConnected2D"), layer("Dense"), layer("SlicingOpLambda"))
    with pytest.raises(ModelError, match="no counterpart") as caught:
        load(hdf5(tmp_path / "m.h5", config), trust=True)
    assert not isinstance(caught.value, UntrustedError)
    for expected in ("TFOpLambda 'tf.io.write_file'", "LocallyConnected2D", "SlicingOpLambda"):
        assert expected in caught.value.what
    assert "Dense" not in caught.value.what


def test_names_from_the_file_cannot_write_to_the_terminal(tmp_path: Path) -> None:
    scan_result = scan(archive(tmp_path / "m.keras", sequential(layer("Lambda", name="\x1b[2J" + "a" * 500))))
    assert "\x1b" not in str(scan_result.untrusted[0])
    assert len(str(scan_result.untrusted[0])) < 200


def patched(path: Path, offset: int, layout: str, value: int) -> Path:
    """Change a field of the last entry in a zip archive's central directory."""
    content = bytearray(path.read_bytes())
    struct.pack_into(layout, content, content.rindex(b"PK\x01\x02") + offset, value)
    return written(path, content)


def written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def cut(path: Path) -> Path:
    return written(path, path.read_bytes()[: path.stat().st_size // 2])


def corrupted(path: Path) -> Path:
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("model.weights.h5", weights())
        file.writestr("config.json", json.dumps(PLAIN))
    return written(path, path.read_bytes().replace(b'"Dense"', b'"Dance"'))


def linked(path: Path) -> Path:
    archive(path)
    with zipfile.ZipFile(path, "a") as file:
        info = zipfile.ZipInfo("assets")
        info.external_attr = 0o120777 << 16
        file.writestr(info, "/etc/passwd")
    return path


def doubled(path: Path) -> Path:
    archive(path)
    with warnings.catch_warnings(), zipfile.ZipFile(path, "a") as file:
        warnings.simplefilter("ignore")
        file.writestr("config.json", json.dumps(sequential(layer("Lambda"))))
    return path


NESTED = b"[" * 100_000 + b"]" * 100_000
ARCHIVES: dict[str, tuple[Callable[[Path], Path], str]] = {
    "missing": (lambda path: path, "does not exist"),
    "folder": (lambda path: path.mkdir() or path, "is a folder"),
    "empty": (lambda path: written(path, b""), "is empty"),
    "text": (lambda path: written(path, b"hello"), "is neither a zip archive nor an HDF5 file"),
    "pickle": (lambda path: written(path, b"\x80\x04\x95junk"), "is a Python pickle"),
    "cut": (lambda path: cut(archive(path)), "is cut off"),
    "cut hdf5": (lambda path: cut(hdf5(path)), "cannot be read"),
    "two formats": (
        lambda path: written(path, hdf5(path).read_bytes() + archive(path).read_bytes()),
        "is a zip archive and an HDF5 file at once",
    ),
    "no config": (lambda path: archive(path, b"absent"), "has no config.json"),
    "pytorch": (lambda path: archive(path, b"absent", **{"net/data.pkl": b""}), "is a PyTorch file"),
    "no weights": (lambda path: archive(path, **{"model.weights.h5": b"absent"}), "has no model.weights.h5"),
    "weights are not hdf5": (lambda path: archive(path, **{"model.weights.h5": b"x" * 99}), "cannot be read"),
    "pickled member": (lambda path: archive(path, **{"assets/x.PKL": b""}), "has a Python pickle in it"),
    "not json": (lambda path: archive(path, b"{"), "config.json is not JSON"),
    "not text": (lambda path: archive(path, b"\xff\xfe\x00"), "config.json is not JSON"),
    "not an object": (lambda path: archive(path, b"[]"), "config.json is not a JSON object"),
    "not a model": (lambda path: archive(path, b"{}"), "does not describe a model"),
    "metadata": (lambda path: archive(path, **{"metadata.json": b"?"}), "metadata.json is not JSON"),
    "nested for the parser": (lambda path: archive(path, NESTED), "nested deeper than"),
    "nested": (lambda path: archive(path, sequential(json.loads("[" * 300 + "]" * 300))), "nested deeper than"),
    "parent": (lambda path: archive(path, **{"assets/../../x": b""}), "leads out of the archive: 'assets/../../x'"),
    "absolute": (lambda path: archive(path, **{"/etc/x": b""}), "leads out of the archive"),
    "windows": (lambda path: archive(path, **{"C:\\x": b""}), "leads out of the archive"),
    "backslash": (lambda path: archive(path, **{"assets\\..\\x": b""}), "leads out of the archive"),
    "link": (linked, "leads out of the archive: 'assets'"),
    "two configs": (doubled, "has two members called 'config.json'"),
    "config too large": (lambda path: archive(path, b" " * (2**26 + 1)), "its 'config.json' would unpack from"),
    "config too dense": (lambda path: archive(path, b" " * 2**21), "its 'config.json' would unpack from"),
    "bomb": (lambda path: patched(archive(path), 24, "<L", 2**28 + 1), "'model.weights.h5' would unpack from"),
    "too large": (lambda path: patched(archive(path), 24, "<L", 2**32 - 2), "would unpack from"),
    "encrypted": (lambda path: patched(archive(path), 8, "<H", 1), "is encrypted"),
    "unknown compression": (lambda path: patched(archive(path), 10, "<H", 77), "cannot be read"),
    "damaged": (corrupted, "cannot be read: Bad CRC-32"),
    "hdf5, not text": (lambda path: hdf5(path, 3), "model_config is not text"),
    "hdf5, not json": (lambda path: hdf5(path, "{"), "model_config is not JSON"),
    "hdf5, nested": (lambda path: hdf5(path, "[" * 30_000 + "]" * 30_000), "nested deeper than"),
    "hdf5, not an object": (lambda path: hdf5(path, "[]"), "not a JSON object"),
}


@pytest.mark.parametrize("case", ARCHIVES)
def test_broken_and_hostile_archives(tmp_path: Path, case: str) -> None:
    make, expected = ARCHIVES[case]
    assert expected in message(make(tmp_path / "m.keras"))


def test_hdf5_with_weights_only(tmp_path: Path) -> None:
    path = tmp_path / "m.weights.h5"
    assert "has weights only, no architecture" in message(written(path, weights()))
    with h5py.File(path, "w") as file:
        file.attrs["layer_names"] = ["dense"]
    assert "has weights only, no architecture" in message(path)
    with h5py.File(path, "w") as file:
        file["x"] = 1
    assert "not a Keras model" in message(path)


def test_hdf5_whose_weights_are_elsewhere(tmp_path: Path) -> None:
    def variant(change: Callable[[Any], Any]) -> str:
        with h5py.File(hdf5(tmp_path / "m.h5"), "a") as file:
            change(file["model_weights"])
        return message(tmp_path / "m.h5")

    def virtual(group: Any) -> None:
        layout = h5py.VirtualLayout((4,), "f4")
        layout[:] = h5py.VirtualSource(str(tmp_path / "other.h5"), "x", (4,))
        group.create_virtual_dataset("v", layout)

    raw = [(str(tmp_path / "raw"), 0, 16)]
    assert "has a link" in variant(lambda group: group.update({"x": h5py.ExternalLink("/etc/other.h5", "/")}))
    assert "has a link" in variant(lambda group: group.update({"x": h5py.SoftLink("/model_weights")}))
    assert "in another file" in variant(virtual)
    assert "in another file" in variant(lambda group: group.create_dataset("x", (4,), "f4", external=raw))
    huge = {"shape": (2**20, 2**10), "dtype": "f4", "chunks": True}
    assert "would unpack from 0 to 4,294,967,296 bytes" in variant(lambda group: group.create_dataset("x", **huge))


@pytest.mark.usefixtures("no_tensorflow")
def test_no_module_is_imported_without_trust(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    witness = tmp_path / "imported"
    (tmp_path / "evil_module.py").write_text(f"open({str(witness)!r}, 'w').close()")
    monkeypatch.syspath_prepend(str(tmp_path))
    config = sequential({**layer("Dense"), "module": "evil_module"})
    for path in (archive(tmp_path / "m.keras", config, "2.15.0"), hdf5(tmp_path / "m.h5", config)):
        with pytest.raises(UntrustedError):
            load(path)
    assert not witness.exists()


@pytest.mark.tensorflow
def test_every_public_class_is_known(keras: Any, tf_keras: Any) -> None:
    known = keras_config.KNOWN | set(keras_config.RUNS)
    for library in (keras, tf_keras):
        for kind in ("layers", "initializers", "regularizers", "constraints", "models"):
            things = [value for value in vars(getattr(library, kind)).values() if isinstance(value, type)]
            assert {thing.__name__ for thing in things} - known == set(), f"{library.__name__}.{kind}"
    for name in keras_config.ACTIVATIONS - {"relu6"}:
        assert hasattr(keras.activations, name)


def functional(library: Any) -> Any:
    """Two inputs, two outputs, a layer shared by two calls, and a nested model."""
    layers = library.layers
    inner_input = library.Input((6,), name="inner_input")
    inner = library.Model(inner_input, layers.Dense(3, name="inner_dense")(inner_input), name="inner")
    left, right = library.Input((6,), name="left"), library.Input((6,), name="right")
    shared = layers.Dense(6, activation="relu", name="shared")
    joined = layers.Add(name="joined")([shared(left), shared(right)])
    outputs = [inner(joined), layers.BatchNormalization(name="normal")(inner(left))]
    return library.Model([left, right], outputs, name="net")


def small(library: Any) -> Any:
    return library.Sequential([library.Input((4,)), library.layers.Dense(2, name="dense")], name="small")


def answers(model: Any) -> list[Any]:
    random = np.random.default_rng(3)
    shapes = [(3, *tensor.shape[1:]) for tensor in model.inputs]
    inputs = [random.standard_normal(shape).astype("float32") for shape in shapes]
    outputs = model(inputs if len(inputs) > 1 else inputs[0], training=False)
    return [np.asarray(output) for output in (outputs if isinstance(outputs, list | tuple) else [outputs])]


@pytest.mark.tensorflow
@pytest.mark.parametrize("library", ["keras", "tf_keras"])
@pytest.mark.parametrize("name", ["m.keras", "m.h5", "m.hdf5"])
@pytest.mark.parametrize("build", [small, functional])
@pytest.mark.essential
def test_load(
    request: pytest.FixtureRequest, keras: Any, saved: Save, library: str, name: str, build: Callable[[Any], Any]
) -> None:
    model = build(request.getfixturevalue(library))
    path = saved(model, name)
    loaded = load(path)
    assert isinstance(loaded, keras.Model)
    assert loaded.name == model.name
    assert not loaded.compiled
    kept = [layer.name for layer in model.layers if type(layer).__name__ != "InputLayer"]
    assert [layer.name for layer in loaded.layers if type(layer).__name__ != "InputLayer"] == kept
    for expected, actual in zip(answers(model), answers(loaded), strict=True):
        np.testing.assert_allclose(actual, expected, atol=1e-6)


@pytest.mark.tensorflow
@pytest.mark.parametrize("library", ["keras", "tf_keras"])
def test_load_under_another_name(request: pytest.FixtureRequest, saved: Save, library: str) -> None:
    model = small(request.getfixturevalue(library))
    for name, other in (("m.keras", "as.h5"), ("m.h5", "as.keras"), ("n.h5", "as_nothing")):
        path = saved(model, name).rename(saved(model, "x.keras").with_name(other))
        np.testing.assert_allclose(answers(load(path))[0], answers(model)[0], atol=1e-6)


def with_lambda(library: Any, witness: Path) -> Any:
    """Return a model with code that creates the file `witness` when it runs."""
    code = eval(f"lambda x: (open({str(witness)!r}, 'w').close(), x * 2)[1]")
    return library.Sequential([library.Input((4,)), library.layers.Lambda(code, name="code")])


@pytest.mark.tensorflow
@pytest.mark.parametrize("library", ["keras", "tf_keras"])
@pytest.mark.parametrize("name", ["m.keras", "m.h5"])
@pytest.mark.parametrize("nested", [False, True])
def test_code_in_a_file_runs_only_with_trust(
    request: pytest.FixtureRequest, tmp_path: Path, saved: Save, library: str, name: str, nested: bool
) -> None:
    keras, witness = request.getfixturevalue(library), tmp_path / "ran"
    model = with_lambda(keras, witness)
    if nested:
        inputs = keras.Input((4,))
        model = keras.Model(inputs, model(inputs))
    path = saved(model, name)
    expected = answers(model)[0]
    witness.unlink()
    with pytest.raises(UntrustedError, match=r"Lambda 'code': runs Python code: \d+ bytes of bytecode"):
        load(path)
    assert not witness.exists()
    np.testing.assert_allclose(answers(load(path, trust=True))[0], expected)
    assert witness.exists()


@pytest.mark.tensorflow
@pytest.mark.parametrize("name", ["m.keras", "m.h5"])
def test_custom_layers_need_trust_and_registration(keras: Any, saved: Save, name: str) -> None:
    class Twice(keras.layers.Layer):
        def call(self, inputs: Any) -> Any:
            return inputs * 2

    registered = keras.saving.register_keras_serializable("nets")(Twice)
    try:
        model = keras.Sequential([keras.Input((4,)), registered(name="twice")])
        path = saved(model, name)
        with pytest.raises(UntrustedError, match=r"Twice 'twice': is of the custom class '(nets>)?Twice'"):
            load(path)
        np.testing.assert_allclose(answers(load(path, trust=True))[0], answers(model)[0])
    finally:
        keras.saving.get_custom_objects().pop("nets>Twice", None)  # keeps the custom objects of Coralline
    with pytest.raises(ModelError, match="custom classes are not in the file: register them first"):
        load(path, trust=True)


@pytest.mark.tensorflow
@pytest.mark.parametrize("version", ["3.15.1", "2.15.0"])
def test_what_the_libraries_raise_becomes_one_message(tmp_path: Path, version: str) -> None:
    no_units = sequential(layer("InputLayer", batch_shape=[None, 4]), layer("Dense"))
    wrong = sequential(layer("InputLayer", batch_shape=[None, 4]), layer("Dense", units=5))
    unknown = sequential(layer("InputLayer", batch_shape=[None, 4]), layer("LayerNormalization", what=1))
    for config in (no_units, wrong, unknown, sequential(layer("Conv2D", filters=-1, kernel_size=1))):
        for make in (archive, hdf5):
            path = make(tmp_path / ("m.keras" if make is archive else "m.h5"), copy.deepcopy(config), version)
            with pytest.raises(ModelError) as caught:
                load(path)
            assert str(caught.value).startswith(f"{path}: ")
            assert "\n" not in str(caught.value)
            assert caught.value.hint


@pytest.mark.tensorflow
@pytest.mark.parametrize("version", ["3.15.1", "2.15.0"])
def test_models_without_inputs_are_refused(tmp_path: Path, version: str) -> None:
    with pytest.raises(ModelError, match="no defined inputs"):
        load(archive(tmp_path / "m.keras", sequential(layer("Dropout", rate=0.5)), version))


@pytest.mark.tensorflow
@pytest.mark.parametrize("library", ["keras", "tf_keras"])
def test_loading_is_quiet_and_leaves_no_trace(
    request: pytest.FixtureRequest, tmp_path: Path, saved: Save, capfd: pytest.CaptureFixture[str], library: str
) -> None:
    path = saved(small(request.getfixturevalue(library)), "m.h5")
    levels = {name: logging.getLogger(name).level for name in ("absl", "tensorflow")}
    filters = list(warnings.filters)
    capfd.readouterr()
    load(path)
    assert capfd.readouterr() == ("", "")
    assert levels == {name: logging.getLogger(name).level for name in levels}
    assert filters == list(warnings.filters)


@pytest.mark.tensorflow
def test_another_backend_is_refused(keras: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keras.config, "backend", lambda: "jax")
    with pytest.raises(ModelError, match=r"KERAS_BACKEND: Keras runs on jax; allowed: tensorflow"):
        load(archive(tmp_path / "m.keras"))


@pytest.mark.tensorflow
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16", "float16", "bfloat16"])
def test_models_of_16_bits_become_models_of_32(keras: Any, tmp_path: Path, policy: str) -> None:
    layers = keras.layers
    inputs = keras.Input((6, 4), dtype=policy.removeprefix("mixed_"))
    body = keras.Sequential([keras.Input((6, 4)), layers.Conv1D(3, 2, dtype=policy)])
    cell = layers.GRU(4, recurrent_initializer="glorot_uniform", unroll=True, dtype=policy)
    x = layers.Bidirectional(cell, dtype=policy)(body(inputs))
    model = keras.Model(inputs, layers.Dense(3, "softmax", dtype=policy)(layers.BatchNormalization(dtype=policy)(x)))
    model.save(tmp_path / "narrow.keras")
    loaded = keras_file.load(tmp_path / "narrow.keras")
    assert {weight.dtype for weight in loaded.weights} == {"float32"}
    samples = np.random.default_rng(0).normal(size=(5, 6, 4)).astype(np.float32)
    actual, expected = np.asarray(loaded(samples)), np.asarray(keras.ops.cast(model(samples), "float32"))
    assert actual.dtype == np.float32
    np.testing.assert_allclose(actual, expected, atol=0.02)


@pytest.mark.tensorflow
def test_names_operations_and_statistics_of_models_of_16_bits(keras: Any, tmp_path: Path) -> None:
    layers = keras.layers
    norm = layers.Normalization(dtype="float32")
    norm.adapt(np.random.default_rng(0).normal(50, 20, (64, 6)).astype(np.float32))
    inputs = keras.Input((6,))
    x = keras.ops.cast(layers.Dense(4, dtype="float32", name="bfloat16")(norm(inputs)), "float16") * 2.0
    model = keras.Model(inputs, layers.Dense(3, dtype="mixed_float16", name="float16")(x))
    model.save(tmp_path / "narrow.keras")
    loaded = keras_file.load(tmp_path / "narrow.keras")
    assert [layer.name for layer in loaded.layers if isinstance(layer, layers.Dense)] == ["bfloat16", "float16"]
    assert not [operation for operation in loaded.operations if "16" in str(operation.output.dtype)]
    samples = np.random.default_rng(1).normal(50, 20, (5, 6)).astype(np.float32)
    np.testing.assert_allclose(np.asarray(loaded(samples)), np.asarray(model(samples), np.float32), atol=0.02)


@pytest.mark.tensorflow
@pytest.mark.parametrize("sequential", [False, True])
def test_inputs_of_bytes_become_floats(keras: Any, tmp_path: Path, sequential: bool) -> None:
    layers = keras.layers
    image, stack = keras.Input((4, 4, 3), dtype="uint8"), [layers.Rescaling(1 / 255), layers.Flatten(), layers.Dense(2)]
    model = keras.Sequential([image, *stack])
    if not sequential:
        model = keras.Model(image, stack[2](stack[1](keras.ops.cast(image, "float32") / 255.0)))
    model.save(tmp_path / "bytes.keras")
    loaded = keras_file.load(tmp_path / "bytes.keras")
    assert [tensor.dtype for tensor in loaded.inputs] == ["float32"]
    samples = np.random.default_rng(1).integers(0, 256, (5, 4, 4, 3)).astype(np.uint8)
    np.testing.assert_allclose(np.asarray(loaded(samples.astype(np.float32))), np.asarray(model(samples)), atol=1e-5)


@pytest.mark.tensorflow
def test_weights_that_keras_has_quantized_are_refused(keras: Any, tmp_path: Path) -> None:
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3, name="small")])
    model.layers[0].quantize("int8")
    model.save(tmp_path / "int8.keras")
    with pytest.raises(ModelError, match=r"the weights of small are quantized by Keras; save the model from before"):
        keras_file.load(tmp_path / "int8.keras")


def test_channels_first_convolutions_are_refused_by_name(tmp_path: Path) -> None:
    first = layer("Conv2D", filters=2, kernel_size=[3, 3], data_format="channels_first")
    file = archive(tmp_path / "m.keras", sequential(layer("InputLayer", batch_shape=[None, 3, 8, 8]), first))
    with pytest.raises(ModelError, match=r"channels_first' on a CPU, and it has 1: 'conv2d'; allowed: channels_last"):
        load(file)


@pytest.mark.tensorflow
def test_an_archive_whose_weights_lie_where_hdf5_looks_for_a_file_is_read(keras: Any, tmp_path: Path) -> None:
    """HDF5 finds its signature at byte 2,048 of this zip archive, which is an ordinary one by chance."""
    keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]).save(tmp_path / "saved.keras")
    path = tmp_path / "model.keras"
    with zipfile.ZipFile(tmp_path / "saved.keras") as source, zipfile.ZipFile(path, "w") as target:
        member = zipfile.ZipInfo("model.weights.h5")
        header = 30 + len(member.filename) + 4
        member.extra = struct.pack("<HH", 0xFFFF, 2048 - header) + b"\0" * (2048 - header)
        target.writestr(member, source.read("model.weights.h5"))
        for name in ("metadata.json", "config.json"):
            target.writestr(name, source.read(name))
    assert h5py.is_hdf5(path)
    assert load(path).count_params() == 3
    with pytest.raises(ModelError, match="is a zip archive and an HDF5 file at once"):
        scan(path.rename(tmp_path / "model.h5"))
