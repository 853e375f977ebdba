"""pipeline.yaml: valid files, and one clear message with the right line for every invalid file."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
from pipeline_files import COMPLETE, KEYED, LINES, NO_NUMBERS, NUMBERS, SHIPPED, documented, stages

from compress.core import resources
from compress.core.artifact import Kind
from compress.core.errors import CorallineError, ModelError, PipelineError, UntrustedError
from compress.data.sources import SOURCES
from compress.model.tflite import graph
from compress.pipeline.schema import Pipeline, load
from compress.pipeline.stages.load import Build, ImportFile, LoadTflite

MODEL_KEYS = (
    "builder, arguments, weights, backbone, file, head, dequantize, signature, shape, detector, keep_classes, classes, "
    "trust"
)


def line_of(text: str) -> int:
    """Return the number (from 1) of the line of COMPLETE that contains a text."""
    (number,) = [number for number, line in enumerate(LINES, 1) if text in line]
    return number


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str) -> Path:
        path = tmp_path / "file.yaml"
        path.write_text(text)
        return path

    return write


@pytest.fixture
def refused(write: Callable[[str], Path]) -> Callable[..., str]:
    """Return a function that checks that a text is refused in a line, and returns the rest of the message."""

    def refused(text: str, line: int, kind: type[CorallineError] = PipelineError) -> str:
        path = write(text)
        with pytest.raises(kind) as caught:
            load(path)
        assert type(caught.value) is kind
        message = str(caught.value)
        assert len(message.splitlines()) == 1
        assert message.startswith(f"{path}:{line}: "), message
        return message.removeprefix(f"{path}:{line}: ")

    return refused


@pytest.fixture
def loaded(write: Callable[[str], Path]) -> Callable[..., Pipeline]:
    """Return a function that loads COMPLETE with one text replaced by another."""

    def loaded(old: str, new: str) -> Pipeline:
        assert old in COMPLETE
        return load(write(COMPLETE.replace(old, new, 1)))

    return loaded


# --- valid files ------------------------------------------------------------------------


def test_a_complete_file(write: Callable[[str], Path]) -> None:
    pipeline = load(write(COMPLETE))
    assert [step.id for step in pipeline.steps] == [
        *("model", "train", "prune", "distill", "quantize", "compile", "package")
    ]
    assert [step.input_kind for step in pipeline.steps] == [
        *(None, Kind.UNTRAINED, Kind.KERAS, Kind.KERAS, Kind.KERAS, Kind.TFLITE, Kind.COMPILED)
    ]
    assert (pipeline.head.name, pipeline.head.seed, pipeline.target.name) == ("digits", 0, "edgetpu")
    assert pipeline.head.measure.latency.runs == 10
    assert pipeline.head.budget.accuracy_drop == 0.02
    assert pipeline.steps[1].stage.model_dump()["augment"]["shift"] == 0.1
    assert pipeline.data.preprocessing[1] == {"scale": {"from": [0, 16], "to": [0, 1]}}


def test_what_may_be_left_out_has_its_default(write: Callable[[str], Path]) -> None:
    text = "schema_version: 1\nname: a\nmodel: {builder: digits_cnn}\ndata: {source: digits}\nstages: [train]\n"
    pipeline = load(write(text))
    assert (pipeline.head.seed, pipeline.target.name, pipeline.data.preprocessing) == (0, "edgetpu", [])
    assert pipeline.head.measure.latency.runs == 200
    assert pipeline.head.budget.model_dump(exclude_none=True) == {}


@pytest.mark.parametrize("stage", ["package", "package:", "package: {}", "{package: {}}"])
def test_a_stage_without_settings(write: Callable[[str], Path], stage: str) -> None:
    pipeline = load(write(stages("train", "quantize", stage)))
    assert pipeline.steps[-1].stage.model_dump()["golden"] == 4


@pytest.mark.parametrize("preprocess", ["preprocess:", "preprocess: []", ""])
def test_no_preprocessing(write: Callable[[str], Path], preprocess: str) -> None:
    before, _, rest = COMPLETE.partition("  preprocess:\n")
    pipeline = load(write(f"{before}  {preprocess}\n" + rest[rest.index("stages:") :]))
    assert pipeline.data.preprocessing == []


def test_the_shipped_file_loads() -> None:
    """Recipes need data and models; tests/models/test_recipes.py loads them."""
    assert len(load(SHIPPED[0]).steps) > 1


@pytest.mark.parametrize("block", [*documented()])
def test_every_documented_pipeline_loads(write: Callable[[str], Path], tmp_path: Path, block: str) -> None:
    for file in re.findall(r"file: *([\w./-]+\.(?:keras|h5|tflite))", block):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_bytes(tiny.classifier() if file.endswith(".tflite") else b"")
    assert load(write(block)).steps


# --- keys -------------------------------------------------------------------------------


def test_a_misspelt_key_is_told_with_its_line_and_the_nearest(refused: Callable[..., str]) -> None:
    for line, key in KEYED:
        text = LINES.copy()
        text[line - 1] = text[line - 1].replace(f"{key}:", f"{key}z:")
        message = refused("\n".join(text), line)
        assert re.search(rf"'{key}z'.*allowed: .*\b{key}\b.*did you mean '{key}'\?$", message), message


@pytest.mark.parametrize(
    ("key", "line", "message"),
    [
        ("schema_version: 1\n", 1, "schema_version: the key 'schema_version' is missing"),
        ("name: digits\n", 1, "name: the key 'name' is missing"),
        ("model:\n  builder: digits_cnn\n", 1, "the key 'model' is missing"),
        (
            "  builder: digits_cnn\n",
            5,
            f"model: must be a map, not null; allowed: {MODEL_KEYS}",
        ),
        ("  source:\n    digits: {}\n", 7, "data: the key 'source' is missing; allowed: " + ", ".join(SOURCES)),
        ("        size: [32, 32]\n", 13, "data.preprocess[0]: resize needs the key 'size'"),
    ],
)
def test_a_missing_key(refused: Callable[..., str], key: str, line: int, message: str) -> None:
    assert key in COMPLETE
    assert refused(COMPLETE.replace(key, ""), line) == message


def test_missing_data_and_stages(refused: Callable[..., str]) -> None:
    head = "schema_version: 1\nname: a\nmodel: {builder: digits_cnn}\n"
    missing = refused(head + "stages: []\n", 1)
    assert missing == (
        "the key 'data' is missing; allowed: a pipeline without data, if the model is a quantized .tflite file; "
        "data: {source: {folder: {path: photos, labels: none}}} are photos without labels"
    )
    assert refused(head + "data: {source: digits}\n", 1) == "the key 'stages' is missing"


def test_a_finished_file_needs_no_data(tmp_path: Path) -> None:
    (tmp_path / "model.tflite").write_bytes(tiny.classifier())
    (tmp_path / "p.yaml").write_text(
        "schema_version: 1\nname: a\nmodel: {file: model.tflite}\nstages: [compile: {}, package: {}]\n"
    )
    pipeline = load(tmp_path / "p.yaml")
    assert pipeline.data.task == "outputs"
    assert pipeline.settings["data"]["source"]["random"]["shape"] == [4, 4, 1]


def test_a_source_without_its_file(refused: Callable[..., str]) -> None:
    message = refused(COMPLETE.replace("digits: {}", "npz: {}"), line_of("digits: {}"))
    assert message == "data.source.npz.file: the key 'file' is missing"


def test_an_unknown_key_is_told_before_the_one_it_should_have_been(refused: Callable[..., str]) -> None:
    message = refused(COMPLETE.replace("digits: {}", "npz: {fil: x.npz}"), line_of("digits: {}"))
    assert message.startswith("data.source.npz.fil: unknown key 'fil'; allowed: manifest, ")
    assert message.endswith("; did you mean 'file'?")


@pytest.mark.parametrize("key", ["a]", "", "0", "__class__", "model_config", "x" * 500])
def test_strange_keys(refused: Callable[..., str], key: str) -> None:
    text = COMPLETE.replace("  builder:", f'  "{key}": 1\n  builder:')
    assert f"unknown key {key!r}; allowed: {MODEL_KEYS}" in refused(text, line_of("builder:"))


# --- values -----------------------------------------------------------------------------


@pytest.mark.parametrize("setting", NUMBERS)
def test_a_number_of_a_wrong_type_or_range(refused: Callable[..., str], setting: str) -> None:
    key = setting.partition(":")[0]
    for value in (*NUMBERS[setting], *NO_NUMBERS):
        message = refused(COMPLETE.replace(setting, f"{key}: {value}"), line_of(setting))
        assert re.match(rf"[\w.\[\]]*\b{key}: .+ should be ", message), message


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("schema_version: 1", "true", "schema_version: true should be 1"),
        ("name: digits", "3", "name: 3 should be a valid string"),
        ("name: digits", "../digits", "name: '../digits' should match pattern"),
        ("name: digits", ".store", "name: '.store' should match pattern"),
        ("name: digits", '""', "name: '' should match pattern"),
        ("name: digits", "x" * 65, "should match pattern"),
        ("target: edgetpu", "edgtpu", "target: unknown target 'edgtpu'; allowed: cpu, edgetpu; did you mean 'edge"),
        ("target: edgetpu", "../targets/cpu", "target: unknown target '../targets/cpu'; allowed: cpu, edgetpu"),
        ("method: ptq", "qta", "stages[3].quantize.method: 'qta' should be 'ptq' or 'qat'; did you mean 'qat'?"),
        ("method: ptq", "null", "stages[3].quantize.method: null should be 'ptq' or 'qat'"),
        ("builder: digits_cnn", "3", "model.builder: 3 should be a valid string"),
        ("builder: digits_cnn", "digits_cnn\n  trust: 1", None),
    ],
)
def test_words_of_a_wrong_type_or_range(
    refused: Callable[..., str], setting: str, value: str, message: str | None
) -> None:
    text = COMPLETE.replace(setting, f"{setting.partition(':')[0]}: {value}")
    if message is None:
        assert refused(text, line_of(setting) + 1) == "model.trust: 1 should be a valid boolean"
    else:
        assert message in refused(text, line_of(setting))


@pytest.mark.parametrize(
    ("old", "new", "line", "message"),
    [
        ("  latency:\n    runs: 10\n", "  latency: 10\n", 33, "measure.latency: 10 should be a map"),
        ("  latency:\n    runs: 10\n", "  host: usb4\n", 33, "measure.host: unknown host 'usb4'; allowed: pcie, usb3"),
        ("measure:\n  latency:\n    runs: 10\n", "measure: fast\n", 32, "measure: 'fast' should be a map"),
        ("  accuracy_drop: 0.02\n", "", 35, "budget: null should be a map"),
        ("      augment:\n        shift: 0.1\n", "      augment: 1\n", 22, "stages[0].train.augment: 1 should be"),
        ("  split:\n    test: 0.2\n", "  split: 0.2\n", 10, "data.split: must be a map, not 0.2; allowed: validation"),
        ("    digits: {}", "    - digits", 8, "data.source: a data source must be a map with one key; allowed: digits"),
        ("  - distill: {}\n", "  - 3\n", 26, "stages[2]: a stage must be a map with one key; allowed: train, prune"),
        ("  - distill: {}\n", "  - distill: {}\n    prune: {}\n", 26, "stages[2]: a stage must be a map with"),
        ("    - resize:\n", "    - 3\n    - resize:\n", 13, "data.preprocess[0]: a step must be a map with one key"),
        ("[32, 32]", "32", 13, "data.preprocess[0]: resize: size must be a list of 2 numbers, not 32"),
        ("[32, 32]", "[0, 32]", 13, "data.preprocess[0]: resize: size must be two whole numbers from 1 to 8192"),
        ("[0, 16]", "[5, 5]", 16, "data.preprocess[1]: scale: from must be two different numbers"),
    ],
)  # fmt: skip
def test_something_else_where_a_map_or_list_should_be(
    refused: Callable[..., str], old: str, new: str, line: int, message: str
) -> None:
    assert old in COMPLETE
    assert refused(COMPLETE.replace(old, new), line).startswith(message)


@pytest.mark.parametrize("value", ["0", "false", "{}", "''", "3", "resize"])
def test_preprocessing_that_is_no_list(refused: Callable[..., str], value: str) -> None:
    before, _, rest = COMPLETE.partition("  preprocess:\n")
    text = f"{before}  preprocess: {value}\n" + rest[rest.index("stages:") :]
    assert refused(text, 12).startswith("data.preprocess: preprocess must be a list of steps, not ")


@pytest.mark.parametrize("value", ["", " 3", " {train: {}}", " train"])
def test_stages_that_are_no_list(refused: Callable[..., str], value: str) -> None:
    before = COMPLETE.partition("stages:\n")[0]
    message = refused(f"{before}stages:{value}\n", line_of("stages:"))
    allowed = "train, prune, replace_activations, distill, sparsify, cluster, quantize"
    assert message.startswith(f"stages: must be a list of stages; allowed: {allowed}")


@pytest.mark.parametrize("text", ["- 1\n", "hello\n", "null\n", "3\n"])
def test_a_file_that_is_no_map(refused: Callable[..., str], text: str) -> None:
    assert refused(text, 1).startswith("must be a map; allowed: schema_version, name")


def test_data_that_is_no_map(refused: Callable[..., str]) -> None:
    before, _, rest = COMPLETE.partition("data:\n")
    text = f"{before}data: digits\n" + rest[rest.index("stages:") :]
    assert refused(text, 7) == "data: must be a map; allowed: source, task, preprocess, split"


# --- the order of stages ----------------------------------------------------------------


MOVE = "move it forward, or leave it out"


@pytest.mark.parametrize(
    ("names", "needs", "available", "hint"),
    [
        (["prune"], "a keras model", "an untrained keras model", "put train before it"),
        (["train", "compile"], "a quantized tflite model", "a keras model", "put quantize before it"),
        (
            ["train", "package"],
            "a checked tflite model or a quantized tflite model",
            "a keras model",
            "put quantize before it",
        ),
        (["train", "quantize", "quantize"], "a float tflite model or a keras model", "a quantized tflite model", MOVE),
        (["train", "quantize", "train"], "a keras model or an untrained keras model", "a quantized tflite model", MOVE),
        (["train", "quantize", "package", "compile"], "a quantized tflite model", "a bundle", MOVE),
        (["train", "quantize", "compile", "distill"], "a keras model", "a checked tflite model", MOVE),
    ],
)
def test_a_stage_out_of_order(
    refused: Callable[..., str], names: list[str], needs: str, available: str, hint: str
) -> None:
    number = len(names)
    message = refused(stages(*names), line_of("stages:") + number)
    sentence = f"stage {number} ({names[-1]}) needs {needs}, but would be given {available}"
    assert message == f"stages[{number - 1}]: {sentence}; {hint}"


def test_a_stage_out_of_order_after_a_file(refused: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "m.tflite").write_bytes(tiny.classifier())
    text = stages("compile", "prune").replace("builder: digits_cnn", "file: m.tflite")
    assert "stage 2 (prune) needs a keras model, but would be given a checked tflite model" in refused(text, 21)
    text = stages("train", "prune").replace("builder: digits_cnn", "file: m.tflite")
    assert "stage 2 (prune) needs a keras model, but would be given a quantized tflite model" in refused(text, 21)


def without_layers() -> bytes:
    """A float .tflite file that Keras has no layer for."""
    parsed = graph.parse(tiny.classifier(int8=False))
    parsed.source.operatorCodes[0].builtinCode = parsed.source.operatorCodes[0].deprecatedBuiltinCode = 32  # CUSTOM
    parsed.source.operatorCodes[0].customCode = b"own"
    return graph.serialize(parsed)


EITHER = "a float tflite model or a keras model"
QUANTIZED = "m.tflite is quantized already"
FLOAT = (
    "m.tflite can only be quantized as it is, since 1 operator cannot be converted to Keras layers: own 'operator 0, "
)


@pytest.mark.parametrize(
    ("content", "stage", "message"),
    [
        (tiny.classifier(), "quantize", f"{EITHER}, but would be given a quantized tflite model; {QUANTIZED}; {MOVE}"),
        (
            tiny.classifier(int8=False),
            "compile",
            "a quantized tflite model, but would be given a keras model; put quantize",
        ),
        (without_layers(), "prune", f"a keras model, but would be given a float tflite model; {FLOAT}"),
        (without_layers(), "quantize: {method: qat}", "a keras model, but would be given a float tflite model"),
    ],
)
def test_what_a_tflite_file_is_decides_what_can_be_done_with_it(
    refused: Callable[..., str], tmp_path: Path, content: bytes, stage: str, message: str
) -> None:
    (tmp_path / "m.tflite").write_bytes(content)
    text = stages(stage).replace("builder: digits_cnn", "file: m.tflite")
    assert f"stage 1 ({stage.partition(':')[0]}) needs {message}" in refused(text, 20)


@pytest.mark.parametrize(
    ("content", "kind"), [(tiny.classifier(int8=False), Kind.KERAS), (without_layers(), Kind.FLOAT_TFLITE)]
)
def test_a_float_tflite_file_is_quantized(
    write: Callable[[str], Path], tmp_path: Path, content: bytes, kind: Kind
) -> None:
    (tmp_path / "m.tflite").write_bytes(content)
    text = stages("train", "quantize", "compile").replace("builder: digits_cnn", "file: m.tflite")
    assert [step.makes for step in load(write(text)).steps] == [kind, kind, Kind.TFLITE, Kind.COMPILED]


def test_the_same_stage_twice(write: Callable[[str], Path]) -> None:
    text = stages("train", "prune", "prune", "prune: {id: last}", "prune")
    assert [step.id for step in load(write(text)).steps] == ["model", "train", "prune", "prune-2", "last", "prune-4"]


@pytest.mark.parametrize(
    ("names", "number", "name"),
    [
        (["train", "prune: {id: train}"], 2, "train"),
        (["train: {id: model}"], 1, "model"),
        (["train: {id: a}", "prune: {id: a}"], 2, "a"),
        (["train: {id: prune-2}", "prune", "prune"], 3, "prune-2"),
    ],
)
def test_an_id_twice(refused: Callable[..., str], names: list[str], number: int, name: str) -> None:
    message = refused(stages(*names), line_of("stages:") + number)
    assert message == f"stages[{number - 1}]: two stages have the id {name!r}; give one another id"


def test_training_is_skipped_for_a_model_from_a_file(write: Callable[[str], Path], tmp_path: Path) -> None:
    (tmp_path / "m.keras").touch()
    text = stages("train", "train", "prune", "train").replace("builder: digits_cnn", "file: m.keras")
    steps = load(write(text)).steps
    skipped = "the model came trained, from a file; `fine_tune: true` trains it further"
    assert [step.skip for step in steps] == [None, skipped, skipped, None, None]
    assert steps[-1].makes is Kind.KERAS


def test_compiling_is_skipped_without_an_accelerator(write: Callable[[str], Path]) -> None:
    text = stages("train", "quantize", "compile", "package").replace("target: edgetpu", "target: cpu")
    compile_, package = load(write(text)).steps[-2:]
    assert compile_.skip == "the target cpu needs no compiler"
    assert compile_.makes is package.input_kind is Kind.TFLITE


# --- the model --------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["  builder: digits_cnn\n  file: m.tflite\n", "  trust: true\n", "  builder:\n"])
def test_both_or_neither_of_builder_and_file(refused: Callable[..., str], model: str) -> None:
    text = COMPLETE.replace("  builder: digits_cnn\n", model)
    assert refused(text, 5) == "model: needs either the key 'builder' or the key 'file'"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("m.tflite", LoadTflite),
        ("m.keras", ImportFile),
        ("m.h5", ImportFile),
    ],
)
def test_a_model_file_is_found_beside_the_pipeline(
    write: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, kind: type[Any]
) -> None:
    (tmp_path / name).write_bytes(tiny.classifier() if kind is LoadTflite else b"")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    stage = load(write(stages().replace("stages:", "stages: []").replace("builder: digits_cnn", f"file: {name}"))).steps
    assert type(stage[0].stage) is kind


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("nothing.tflite", "model: the file {folder}/nothing.tflite does not exist; check the path"),
        (
            "folder.tflite",
            "model: {folder}/folder.tflite: has no saved_model.pb; allowed: a folder with saved_model.pb",
        ),
        ("file.yaml/m.tflite", "model: the file {folder}/file.yaml/m.tflite does not exist; check the path"),
        ("model.pth", "model: model.pth has an unsupported format; allowed: .keras, .h5, .hdf5, .onnx, .tflite"),
        ("/dev/zero", "model: the file /dev/zero does not exist; check the path"),
        ("''", "model: {folder}: has no saved_model.pb; allowed: a folder with saved_model.pb"),
        ("x" * 5000, "model: cannot be read: File name too long; check model"),
    ],
)
def test_a_model_file_that_cannot_be(refused: Callable[..., str], tmp_path: Path, file: str, message: str) -> None:
    (tmp_path / "folder.tflite").mkdir()
    (tmp_path / "model.pth").touch()
    actual = refused(COMPLETE.replace("builder: digits_cnn", f"file: {file}"), 5, ModelError)
    assert actual.startswith(message.format(folder=tmp_path))


def test_a_shipped_builder_is_not_shadowed(
    write: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "digits_cnn.py").write_text("raise SystemExit('this must not run')\n")
    (tmp_path / "digits_cnn.py").write_text("raise SystemExit('this must not run')\n")
    monkeypatch.chdir(tmp_path)
    stage = load(write(COMPLETE)).steps[0].stage
    assert isinstance(stage, Build)
    assert stage.path == resources.shipped("models") / "digits_cnn.py"


@pytest.mark.parametrize(
    "builder",
    ["own.py", "own.py:make", "./own.py", "../{name}/own.py", "{folder}/own.py", "{models}/digits_cnn.py", "link.py"],
)
def test_code_of_ones_own_needs_trust(
    refused: Callable[..., str], write: Callable[[str], Path], tmp_path: Path, builder: str
) -> None:
    (tmp_path / "own.py").write_text("raise SystemExit('this must not run')\n")
    (tmp_path / "link.py").symlink_to(resources.shipped("models") / "digits_cnn.py")
    builder = builder.format(name=tmp_path.name, folder=tmp_path, models=resources.shipped("models"))
    text = COMPLETE.replace("builder: digits_cnn", f'builder: "{builder}"')
    message = refused(text, 5, UntrustedError)
    assert re.fullmatch(
        r"model: loading would run the builder .*\.py, which is a program; set `trust: true` under model", message
    )
    assert UntrustedError.exit_code == ModelError.exit_code == 4
    stage = load(write(text.replace("model:\n", "model:\n  trust: true\n"))).steps[0].stage
    assert isinstance(stage, Build)
    assert stage.function == ("make" if builder.endswith(":make") else "build")
    assert stage.path.samefile(tmp_path / builder.partition(":")[0])


@pytest.mark.parametrize(
    ("builder", "message"),
    [
        ("digit_cnn", "model: unknown builder 'digit_cnn'; allowed: anchor_free, autoencoder, conv_1d, digits_cnn, "),
        ("''", "model: unknown builder ''; allowed: anchor_free"),
        ("digits_cnn:other", "model: unknown builder 'digits_cnn:other'; allowed: anchor_free"),
        ("gone.py", "model: the file {folder}/gone.py does not exist; check the path"),
        (".py", "model: the file {folder}/.py does not exist; check the path"),
    ],
)  # fmt: skip
def test_a_builder_that_is_not_there(refused: Callable[..., str], tmp_path: Path, builder: str, message: str) -> None:
    text = COMPLETE.replace("builder: digits_cnn", f"builder: {builder}\n  trust: true")
    assert refused(text, 5, ModelError).startswith(message.format(folder=tmp_path))


def test_the_data_is_looked_for_beside_the_pipeline_and_only_when_needed(
    write: Callable[[str], Path], tmp_path: Path
) -> None:
    pipeline = load(write(COMPLETE.replace("digits: {}", "npz: {file: gone.npz}")))
    with pytest.raises(CorallineError, match=re.escape(f"{tmp_path}/gone.npz: cannot be read: No such file")):
        _ = pipeline.data.digest
