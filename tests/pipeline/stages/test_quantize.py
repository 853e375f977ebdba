"""`quantize` as a stage: warnings, errors, and plans that are edited by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from blobs import Blobs, context
from numpy.typing import NDArray
from pydantic import ValidationError

from compress.core.artifact import MODEL_KERAS, MODEL_TFLITE, PLAN_FILE, Artifact, Facts, Kind
from compress.core.errors import CorallineError, ModelError, StageError
from compress.data.types import Split
from compress.learning.distillation.settings import DistillationSettings
from compress.learning.procedures.importing import output_facts
from compress.learning.procedures.settings import QatSettings
from compress.learning.quantization import export
from compress.learning.quantization.calibration import calibrate, divided
from compress.learning.quantization.export import float_operators, refuse_mismatch
from compress.learning.quantization.plan import read
from compress.learning.training.augmentation import Augment
from compress.model.ir.keras_graph import Network
from compress.model.ir.keras_graph import read as read_network
from compress.model.ir.passes.fold import canonical
from compress.model.tflite import graph, structure
from compress.model.tflite.interpreter import LoadedModel
from compress.pipeline.stages import working_model
from compress.pipeline.stages.quantize import Quantize
from compress.targets import load
from compress.targets.edgetpu.placement import place

pytestmark = pytest.mark.tensorflow

PLAIN = Quantize(ranges="minmax", equalize="off", correct_bias="off")
Images = NDArray[np.float32]


class Changed(Blobs):
    """Blobs with other inputs."""

    def __init__(self, change: Callable[[Images], Images], count: int = 90) -> None:
        self.change, self.count = change, count

    def inputs(self, split: Split) -> Images:
        return self.change(super().inputs(split)[: self.count].copy())

    def labels(self, split: Split) -> NDArray[np.int64]:
        return super().labels(split)[: self.count]


def test_a_teacher_alone_needs_no_labels_for_changed_samples() -> None:
    for weight, needs_labels in ((1.0, False), (0.9, True)):
        distill = DistillationSettings(weight=weight, temperature=1)
        trained = Quantize(method="qat", augment=Augment(flip=True), qat=QatSettings(distill=distill))
        assert ("augmentation" in trained.uses()) == needs_labels


def network(keras: Any, edit: Callable[[Any], Any] = lambda model: None, relu: str = "relu") -> Any:
    keras.utils.set_random_seed(0)
    layers = keras.layers
    stack = [
        keras.Input((8, 8, 1), name="image"),
        layers.Conv2D(4, 3, name="conv"),
        layers.BatchNormalization(name="norm"),
    ]
    stack += [layers.ReLU(name=relu), layers.Flatten(), layers.Dense(2, "softmax", name="scores")]
    model = keras.Sequential(stack)
    edit(model)
    return model


def scaled(name: str, times: float) -> Callable[[Any], None]:
    def edit(model: Any) -> None:
        layer = model.get_layer(name)
        layer.set_weights([layer.get_weights()[0] * np.float32(times), *layer.get_weights()[1:]])

    return edit


def all_minus_infinity(model: Any) -> None:
    """Set weights with which a ReLU gives 0 everywhere."""
    layer = model.get_layer("conv")
    layer.set_weights([np.full_like(layer.get_weights()[0], -np.inf), *layer.get_weights()[1:]])


def quantized(
    model: Any,
    data: Blobs,
    folder: Path,
    stage: Quantize = PLAIN,
    target: str = "cpu",
    notes: tiny.Notes | None = None,
) -> Facts:
    """Run the stage, which writes its model to folder/made; return its facts."""
    before, output_folder = folder / "before", folder / "made"
    for directory in (before, output_folder):
        directory.mkdir(parents=True, exist_ok=True)
    working_model.write(model, before)
    artifact = Artifact("", Kind.KERAS, before, {MODEL_KERAS: "", MODEL_TFLITE: ""}, {}, 0.0)
    return stage.run(
        artifact, replace(context(data, output_folder), progress=notes or tiny.Notes(), target=load(target))
    )


def same(images: Images) -> Images:
    return images


def with_nan(images: Images) -> Images:
    images[:, 2, 3] = np.nan
    return images


@pytest.mark.parametrize(
    ("change", "count", "edit", "warning"),
    [
        (same, 9, same, "6 calibration samples are few"),
        (lambda images: images * 0 + 0.5, 90, same, "all calibration samples are the same"),
        (lambda images: images * 0 + 0.5, 90, same, "the float model has the same output for every sample"),
        (lambda images: images * 255, 90, same, "does not fit the model: at its first batch norm"),
        (same, 90, scaled("conv", 0), "all weights are 0 in conv"),
        (same, 90, scaled("conv", 1e12), "the activations of relu reach"),
        (same, 90, scaled("conv", 1e36), "the activations of relu reach"),
    ],
)
def test_what_is_strange_is_told(keras: Any, tmp_path: Path, change: Any, count: int, edit: Any, warning: str) -> None:
    with np.errstate(over="ignore"):
        facts = quantized(network(keras, edit), Changed(change, count), tmp_path)
    assert any(warning in text for text in facts["warnings"]), facts["warnings"]


def test_an_ordinary_model_has_no_warnings_and_says_how_far_it_agrees(keras: Any, tmp_path: Path) -> None:
    facts = quantized(network(keras), Blobs(), tmp_path)
    assert facts["warnings"] == []
    assert facts["agreement"] > 0.9


@pytest.mark.parametrize(
    ("change", "edit", "message"),
    [
        (with_nan, same, "the input is not finite for calibration sample 0"),
        (same, scaled("scores", np.nan), "the weights of layer 'scores' are not finite"),
        (same, scaled("conv", np.inf), "the weights of layer 'conv' are not finite"),
        (same, all_minus_infinity, "the weights of layer 'conv' are not finite"),
    ],
)
def test_numbers_that_are_not_finite_are_refused(
    keras: Any, tmp_path: Path, change: Any, edit: Any, message: str
) -> None:
    with pytest.raises(StageError, match=message), np.errstate(invalid="ignore"):
        quantized(network(keras, edit), Changed(change), tmp_path)


@pytest.mark.parametrize(
    ("point", "limits", "agrees", "warning"),
    [
        ("relu", [0, 4000], False, "the file and the float model disagree on"),  # thousands of times too wide
        # Most of the range of the scores is clipped, but the predicted class is the same.
        ("scores", [-0.1, 0.1], True, "the outputs differ much from those of the float model"),
    ],
)
def test_a_file_that_answers_otherwise_is_told(
    keras: Any, tmp_path: Path, point: str, limits: list[float], agrees: bool, warning: str
) -> None:
    model = network(keras)
    model.compile(keras.optimizers.Adam(0.02), "sparse_categorical_crossentropy")
    model.fit(Blobs().inputs("train"), Blobs().labels("train"), epochs=5, verbose=0)
    plan = plan_of(model, tmp_path)
    plan["ranges"][point] = limits
    facts = quantized(model, Blobs(), tmp_path, stage_with_plan(plan, tmp_path))
    assert (facts["agreement"] > 0.9) is agrees
    assert any(warning in text for text in facts["warnings"])


def test_what_only_the_converter_can_calibrate_is_rewritten_until_nothing_is_float(keras: Any, tmp_path: Path) -> None:
    """The converter leaves a NEG float for an attention layer with a normalization before it."""
    keras.utils.set_random_seed(0)
    layers, image = keras.layers, keras.Input((8, 8, 1))
    x = layers.LayerNormalization()(layers.Dense(16)(layers.Reshape((8, 8))(image)))
    x = layers.GlobalAveragePooling1D()(layers.MultiHeadAttention(2, 8)(x, x))
    facts = quantized(keras.Model(image, layers.Dense(2, "softmax")(x)), Blobs(), tmp_path, target="edgetpu")
    assert facts["ranges"].startswith("chosen by the converter, because")
    assert not float_operators((tmp_path / "made" / MODEL_TFLITE).read_bytes())
    assert not any("compress debug" in warning for warning in facts["warnings"])  # `debug` knows only tensors of a plan


# --- plans ------------------------------------------------------------------------------


def plan_of(model: Any, folder: Path) -> Any:
    quantized(model, Blobs(), folder)
    return json.loads((folder / "made" / PLAN_FILE).read_text())


def stage_with_plan(plan: Any, folder: Path) -> Quantize:
    (folder / "by_hand.json").write_text(plan if isinstance(plan, str) else json.dumps(plan))
    return Quantize(plan=Path("by_hand.json")).with_paths_from(folder)


def test_a_plan_gives_the_same_file_again_and_an_edit_another_one(keras: Any, tmp_path: Path) -> None:
    model = network(keras)
    plan = plan_of(model, tmp_path)
    first = (tmp_path / "made" / MODEL_TFLITE).read_bytes()
    facts = quantized(model, Blobs(), tmp_path, stage_with_plan(plan, tmp_path))
    assert (tmp_path / "made" / MODEL_TFLITE).read_bytes() == first
    assert [(trial["step"], trial["kept"]) for trial in facts["tried"]] == [("plan", True)]
    plan["ranges"]["relu"][1] *= 2
    plan["method"] = "wider by hand"
    facts = quantized(model, Blobs(), tmp_path, stage_with_plan(plan, tmp_path))
    assert facts["ranges"] == "wider by hand"
    assert (tmp_path / "made" / MODEL_TFLITE).read_bytes() != first


def test_a_plan_for_other_weights_is_told(keras: Any, tmp_path: Path) -> None:
    model = network(keras)
    plan = plan_of(model, tmp_path)
    plan["ranges"]["relu"][1] *= 2
    assert quantized(model, Blobs(), tmp_path, stage_with_plan(plan, tmp_path))["warnings"] == []
    again = json.loads((tmp_path / "made" / PLAN_FILE).read_text())
    assert again["weights_digest"] == plan["weights_digest"]
    other = network(keras, scaled("conv", 1.5))
    (warning,) = quantized(other, Blobs(), tmp_path, stage_with_plan(plan, tmp_path))["warnings"]
    assert warning.startswith("the plan was made for other weights than those of this model")
    for key in ("weights_digest", "trained_with_rounding"):  # as in plans of older versions
        del plan[key]
    assert quantized(other, Blobs(), tmp_path, stage_with_plan(plan, tmp_path))["warnings"] == []


def test_a_plan_of_training_with_rounding_says_whose_it_is(
    keras: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores = iter([0.0, 1.0])
    monkeypatch.setattr("compress.tasks.classification.Classification.score", lambda *_: next(scores))
    model, stage = network(keras), PLAIN.model_copy(update={"method": "qat", "epochs": 1, "batch_size": 16})
    assert quantized(model, Blobs(), tmp_path, stage)["kept"] == "qat"
    plan = json.loads((tmp_path / "made" / PLAN_FILE).read_text())
    assert plan["trained_with_rounding"]
    (warning, *_) = quantized(model, Blobs(), tmp_path, stage_with_plan(plan, tmp_path))["warnings"]
    assert warning.startswith("the plan belongs to weights of quantization-aware training, which are only in the .tfl")
    assert not json.loads((tmp_path / "made" / PLAN_FILE).read_text())["trained_with_rounding"]


def test_the_content_of_a_plan_is_part_of_the_key(tmp_path: Path) -> None:
    keys = [stage_with_plan({"n": number}, tmp_path).identity()["plan"] for number in (1, 1, 2)]
    assert keys[0] == keys[1] != keys[2]
    with pytest.raises(ModelError, match="cannot be read: No such file"):
        Quantize(plan=Path("nowhere.json")).with_paths_from(tmp_path).identity()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda plan: plan["ranges"].pop("relu"), "no range for relu"),
        (lambda plan: plan["ranges"].update(x=[0, 1]), "a range for x, which is not rounded"),
        (
            lambda plan: plan["ranges"].update(relu=[1, 2]),
            "the range of relu is 1 to 2; allowed: a range that contains 0",
        ),
        (lambda plan: plan["ranges"].update(relu=[0, 1e31]), "the range of relu is 0 to 1e+31; allowed: "),
        (lambda plan: plan["ranges"].update(scores_activation=[0, 4]), "0 to 4 for scores_activation; allowed: 0 to 0"),
        (lambda plan: plan["ranges"].update(relu=[0]), "is not a plan: ranges.relu"),
        (lambda plan: plan.update(schema_version=1), "is not a plan: schema_version"),
        (lambda plan: plan["factors"].update(x=[1.0]), "factors for a layer x"),
        (lambda plan: plan["factors"].update(conv=[1.0]), "the plan has 1 factors for a layer 'conv'"),
        (lambda plan: plan["factors"].update(conv=[1.0] * 3 + [0.0]), "0 is one of the factors of conv; allowed: "),
        (lambda plan: plan["factors"].update(conv=[1e300] * 4), "1e+300 is one of the factors of conv; allowed: "),
        (lambda plan: plan["factors"].update(scores=[5.0, 1.0]), "a layer 'scores' that would have no effect"),
        (lambda plan: plan["factors"].update(conv=[2.0] * 4, relu=[3.0] * 4), "a layer 'conv' that would have no effe"),
        (lambda plan: plan["bias_shifts"].update(conv=[1e31] * 4), "1e+31 is one of the bias_shifts of conv"),
        (lambda plan: plan["bias_shifts"].update(conv=[1.0]), "1 bias shifts for a layer conv"),
        (lambda plan: plan["rounding"].update(conv="AA=="), "rounding for a layer conv"),
        (lambda plan: plan["rounding"].update(relu="AA=="), "rounding for a layer relu"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(
    fitting: tuple[Network, str], tmp_path: Path, change: Any, message: str
) -> None:
    net, text = fitting
    plan = json.loads(text)
    change(plan)
    with pytest.raises(CorallineError) as error:  # a file that is not a plan cannot be read
        refuse_mismatch(net, read(stage_with_plan(plan, tmp_path).plan or tmp_path))
    assert message in str(error.value)


@pytest.fixture(scope="module")
def fitting(keras: Any) -> tuple[Network, str]:
    """A network in canonical form, and a plan for it."""
    net = canonical(read_network(network(keras)))
    return net, calibrate(net, Blobs().inputs("train")).to_json()


@pytest.mark.parametrize("setting", ["ranges", "equalize", "separate_gates", "correct_bias", "rounding"])
def test_a_plan_goes_without_what_is_searched(setting: str) -> None:
    default = Quantize.model_fields[setting].default
    with pytest.raises(ValidationError, match=f"{setting}: a `plan` replaces the search; remove one"):
        Quantize.model_validate({"plan": Path("quantization.json"), setting: default})


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "\x00", '{"ranges": NaN}', "1e999"])
def test_a_plan_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(StageError, match="is not a plan"):
        read(stage_with_plan(text, tmp_path).plan or tmp_path)


def test_the_stage_refuses_a_plan_of_another_model(keras: Any, tmp_path: Path) -> None:
    stage = stage_with_plan(plan_of(network(keras), tmp_path), tmp_path)
    with pytest.raises(StageError, match="the plan is for another model: it has no range for other, a range for relu"):
        quantized(network(keras, relu="other"), Blobs(), tmp_path, stage)


# --- the choice of samples --------------------------------------------------------------


def test_calibration_samples_are_the_same_number_of_each_class(keras: Any, tmp_path: Path) -> None:
    facts = quantized(network(keras), Blobs(), tmp_path, PLAIN.model_copy(update={"calibration_samples": 16}))
    assert facts["calibration_samples"] == 16
    labels = Blobs().labels("train")
    chosen, rest = divided(labels, 16, 0)
    assert sorted([*chosen, *rest]) == list(range(96))
    assert np.bincount(labels[chosen]).tolist() == [8, 8]
    assert np.bincount(labels[rest[:20]]).tolist() == [10, 10]  # classes still alternate


def test_never_more_than_two_thirds_are_calibrated_with() -> None:
    chosen, rest = divided(Blobs().labels("train"), 1000, 0)
    assert (len(chosen), len(rest)) == (64, 32)


def test_only_training_and_plans_need_layers() -> None:
    assert Kind.FLOAT_TFLITE in Quantize().accepted_kinds()
    for stage in (Quantize(method="qat"), Quantize(plan=Path("p.json")), Quantize(scales_from=Path("old.tflite"))):
        assert Kind.FLOAT_TFLITE not in stage.accepted_kinds()


def as_numbers(images: Images) -> Images:
    """Return the brightness of each pixel as a number from 0 to 7."""
    return np.minimum(np.floor(images.reshape(len(images), 64) * 8), 7).astype(np.float32)


def test_the_lookup_of_an_embedding_is_cut_off(keras: Any, tmp_path: Path) -> None:
    """The file takes vectors and has the table in its metadata. Its caller still passes indices."""
    keras.utils.set_random_seed(0)
    layers = keras.layers
    constant = keras.initializers.Constant
    vectors = layers.Embedding(8, 4, embeddings_initializer=keras.initializers.RandomUniform(-2, 2))
    # The statistics of the batch norm do not match these samples. No other preprocessing may be suggested for that.
    norm = layers.BatchNormalization(moving_variance_initializer=constant(400.0), gamma_initializer=constant(20.0))
    stack = [keras.Input((64,)), vectors, layers.Dropout(0.1), layers.Conv1D(4, 3, activation="relu"), norm]
    model = keras.Sequential([*stack, layers.Flatten(), layers.Dense(2, "softmax")])
    data = Changed(as_numbers)
    facts = quantized(model, data, tmp_path, target="edgetpu")
    assert facts["agreement"] > 0.9
    assert facts["warnings"] == []
    file = tmp_path / "made" / MODEL_TFLITE
    parsed = graph.read(file)
    (tensor,) = (parsed.tensors[index] for index in parsed.inputs)
    assert (tensor.shape, tensor.dtype) == ((1, 64, 4), "INT8")
    assert float_operators(file.read_bytes()) == {}
    loaded = LoadedModel(file, reproducible=True)
    assert loaded.lookup is not None
    assert loaded.lookup.table.shape == (8, 4)
    numbers = data.inputs("test")[:20]
    np.testing.assert_allclose(loaded.scores(numbers), np.asarray(model(numbers)), atol=0.05)
    with pytest.raises(StageError, match="not possible with an embedding, whose lookup is cut off"):
        quantized(model, data, tmp_path, Quantize(method="qat"))


@pytest.mark.parametrize(("factor", "expected"), [(2, "from 0 to 14"), (-1, "from -7 to 0")])
def test_numbers_without_a_row_in_the_embedding_are_refused(keras: Any, factor: float, expected: str) -> None:
    stack = [keras.Input((64,)), keras.layers.Embedding(8, 4), keras.layers.Flatten()]
    model = keras.Sequential([*stack, keras.layers.Dense(2, "softmax")])
    data = Changed(as_numbers)
    data.input_shape = (64,)
    output_facts(model, data, None)
    data.change = lambda images: as_numbers(images) * np.float32(factor)
    with pytest.raises(ModelError, match=f"has 8 rows, and the samples have values {expected}; allowed: 0 to 7;"):
        output_facts(model, data, None)


# --- layers of several steps ------------------------------------------------------------


def test_layers_of_several_steps_train_with_rounding(keras: Any, tmp_path: Path) -> None:
    keras.utils.set_random_seed(0)
    layers = keras.layers
    image = keras.Input((8, 8, 1))
    x = layers.Conv2D(6, 3)(layers.Rescaling(2.0, -1.0)(image))
    x = layers.Activation("hard_silu")(layers.BatchNormalization()(x))
    x = layers.LayerNormalization()(layers.Conv2D(6, 3, activation="hard_sigmoid")(x))
    model = keras.Model(image, layers.Dense(2)(layers.Flatten()(x)))
    how = QatSettings(ranges="learned", batch_norm="trained", freeze=0.5, distill=DistillationSettings(weight=0.1))
    stage = Quantize(
        method="qat", epochs=6, learning_rate=0.01, batch_size=16, ranges="minmax", correct_bias="off", qat=how
    )
    facts = quantized(model, Blobs(), tmp_path, stage, "edgetpu")
    assert facts["kept"] == "qat"
    assert facts["validation_accuracy"]["qat"] == 1.0 > facts["validation_accuracy"]["ptq"]
    assert facts["training_agrees"] >= 0.98
    assert {trial["step"] for trial in facts["tried"]} == {"ranges", "equalization"}
    parsed = graph.read(tmp_path / "made" / MODEL_TFLITE)
    assert not export.float_operators((tmp_path / "made" / MODEL_TFLITE).read_bytes())
    assert [op.op for op in place(parsed, load("edgetpu")).ops if op.placement == "cpu"] == []


def test_a_model_that_cannot_train_with_rounding_is_calibrated_and_says_why(keras: Any, tmp_path: Path) -> None:
    keras.utils.set_random_seed(0)
    image = keras.Input((8, 8, 1))
    x = keras.layers.ReLU(4.0, 0.1, 0.2, name="jump")(keras.layers.Conv2D(4, 3)(image))
    model = keras.Model(image, keras.layers.Dense(2)(keras.layers.Flatten()(x)))
    notes = tiny.Notes()
    facts = quantized(model, Blobs(), tmp_path, Quantize(method="qat", epochs=1), "edgetpu", notes)
    assert "ReLU 'jump'" in facts["ranges"]
    assert any("no quantization-aware training" in warning and "'jump'" in warning for warning in facts["warnings"])
    assert set(facts["warnings"]) <= {note.removeprefix("quantize: ") for note in notes.noted}
    assert np.prod(graph.read(tmp_path / "made" / MODEL_TFLITE).tensors[0].shape) > 0


# --- the scales of another file ---------------------------------------------------------


def with_shortcut(keras: Any, seed: int, filters: int = 4) -> Any:
    """A network with a shortcut and a concatenation; another seed stands for another training."""
    keras.utils.set_random_seed(seed)
    layers = keras.layers
    image = keras.Input((8, 8, 1), name="image")
    first = layers.ReLU()(layers.BatchNormalization()(layers.Conv2D(filters, 3, padding="same", name="first")(image)))
    second = layers.Conv2D(filters, 3, padding="same", name="second")(first)
    joined = layers.Concatenate()([layers.Add()([first, second]), layers.DepthwiseConv2D(3, padding="same")(first)])
    scores = layers.Dense(2, "softmax", name="scores")(layers.GlobalAveragePooling2D()(joined))
    return keras.Model(image, scores)


@pytest.mark.parametrize("io", ["int8", "uint8"])
def test_every_activation_has_the_old_scale_and_zero_point(keras: Any, tmp_path: Path, io: str) -> None:
    stage = PLAIN.model_copy(update={"io": io})
    quantized(with_shortcut(keras, 0), Blobs(), tmp_path / "old", stage, "edgetpu")
    old_file = tmp_path / "old" / "made" / MODEL_TFLITE
    facts = quantized(
        with_shortcut(keras, 1),
        Blobs(),
        tmp_path / "new",
        stage.model_copy(update={"scales_from": old_file}),
        "edgetpu",
    )
    old, new = graph.read(old_file), graph.read(tmp_path / "new" / "made" / MODEL_TFLITE)
    pairs = structure.matching_tensors(old, new)
    activations = [(a, b) for a, b in pairs.items() if not new.tensors[b].is_constant]
    assert len(activations) > 6
    for first, second in activations:
        assert old.tensors[first].quantization == new.tensors[second].quantization
    dense = next(operator for operator in new.operators if operator.name == "FULLY_CONNECTED")
    twin = old.operators[dense.index]
    assert new.tensors[dense.inputs[1]].quantization == old.tensors[twin.inputs[1]].quantization
    assert facts["scales_from"]["agreement"] > 0.5
    assert facts["scales_from"]["agreement_own_scales"] > 0.9


def test_training_keeps_the_old_scales(keras: Any, tmp_path: Path) -> None:
    quantized(with_shortcut(keras, 0), Blobs(), tmp_path / "old", PLAIN, "edgetpu")
    old_file = tmp_path / "old" / "made" / MODEL_TFLITE
    settings = {"ranges": "minmax", "equalize": "off", "correct_bias": "off", "method": "qat", "epochs": 1}
    stage = Quantize.model_validate({**settings, "qat": {"ranges": "fixed"}, "scales_from": old_file})
    facts = quantized(with_shortcut(keras, 1), Blobs(), tmp_path / "new", stage, "edgetpu")
    old, new = graph.read(old_file), graph.read(tmp_path / "new" / "made" / MODEL_TFLITE)
    for first, second in structure.matching_tensors(old, new).items():
        if not new.tensors[second].is_constant:
            assert old.tensors[first].quantization == new.tensors[second].quantization
    assert facts["kept"] in ("ptq", "qat")
    assert "scales_from" in facts


def test_another_architecture_is_refused(keras: Any, tmp_path: Path) -> None:
    quantized(with_shortcut(keras, 0), Blobs(), tmp_path / "old", PLAIN, "edgetpu")
    stage = PLAIN.model_copy(update={"scales_from": tmp_path / "old" / "made" / MODEL_TFLITE})
    with pytest.raises(StageError, match="the file of `scales_from` has another structure"):
        quantized(with_shortcut(keras, 1, filters=8), Blobs(), tmp_path / "new", stage, "edgetpu")


def test_what_changes_ranges_is_refused_with_scales_from() -> None:
    with pytest.raises(ValidationError, match=r"qat: \{ranges: fixed\}"):
        Quantize(scales_from=Path("old.tflite"), method="qat")
    with pytest.raises(ValidationError, match="a `plan` has ranges already"):
        Quantize(scales_from=Path("old.tflite"), plan=Path("plan.json"))
