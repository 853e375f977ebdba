"""Knowledge distillation: losses are compared with the papers' formulas, and students by their accuracy."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from blobs import Blobs, context

from compress.core.errors import ModelError, StageError, UntrustedError
from compress.data.types import Split
from compress.learning.distillation import features, losses, teachers
from compress.learning.distillation.settings import DistillationSettings, Features, Pair
from compress.learning.distillation.teachers import Teacher
from compress.learning.training import loop
from compress.learning.training.batches import Augment
from compress.learning.training.loop import Batch, TrainingSettings
from compress.tasks.classification import ClassificationHead

pytestmark = pytest.mark.tensorflow

ALONE = DistillationSettings(temperature=2.0, weight=1.0)
SETTINGS = TrainingSettings(epochs=8, batch_size=16, learning_rate=0.02)


@dataclass
class Mislabelled(Blobs):
    """Blobs whose training labels are all 0."""

    def labels(self, split: Split) -> np.ndarray:
        right = super().labels(split)
        return np.zeros_like(right) if split == "train" else right

    def inputs(self, split: Split) -> np.ndarray:
        return Blobs().inputs(split)


def network(keras: Any, filters: int = 4, stride: int = 1, softmax: bool = True, shape: Any = (8, 8, 1)) -> Any:
    image = keras.Input(shape)
    x = keras.layers.Conv2D(filters, 3, stride, padding="same", activation="relu", name="map")(image)
    scores = keras.layers.Dense(2, "softmax" if softmax else None)(keras.layers.Flatten()(x))
    return keras.Model(image, scores, name=f"net{filters}")


@pytest.fixture(scope="module")
def trained(keras: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A teacher that was trained on the blobs."""
    keras.utils.set_random_seed(0)
    model = network(keras, 6)
    loop.fit(
        model,
        loop.label_loss(ClassificationHead("softmax")),
        SETTINGS,
        context(Blobs(), tmp_path_factory.mktemp("teacher")),
    )
    return model


def answering(*logits: Any) -> list[Teacher]:
    """Return teachers that give these logits for every input."""
    return [Teacher(str(number), lambda inputs, said=said: (said, ()), model=0) for number, said in enumerate(logits)]


def softmax(logits: np.ndarray) -> np.ndarray:
    exponentials = np.exp(logits - logits.max(axis=1, keepdims=True))
    return np.asarray(exponentials / exponentials.sum(axis=1, keepdims=True))


def computed(loss: Any, outputs: Any, labels: Any = None, inputs: Any = None) -> np.ndarray:
    return np.asarray(loss.of(Batch(inputs, labels), outputs))


EVERY_STEP = TrainingSettings(epochs=1, augment=Augment(flip=True))
"""Settings with which teachers run in every training step, as the tests of single losses need."""


# --- scores -----------------------------------------------------------------------------


@pytest.mark.parametrize("weight", [0.0, 0.3, 1.0])
def test_softened_scores_and_labels_are_weighed_as_hinton_has_it(keras: Any, tmp_path: Path, weight: float) -> None:
    random, temperature = np.random.default_rng(0), 3.0
    taught, scores = random.normal(size=(2, 5, 4)).astype(np.float32) * 3
    labels = np.array([0, 1, 2, 3, 1])
    expected, actual = softmax(taught / temperature), softmax(scores / temperature)
    soft = (expected * np.log(expected / actual)).sum(axis=1)  # differs from the cross-entropy by a constant
    hard = -np.log(softmax(scores))[np.arange(5), labels]
    expected_loss = weight * temperature**2 * soft + (1 - weight) * hard
    teaching = DistillationSettings(temperature=temperature, weight=weight)
    loss = losses.loss_of(
        ClassificationHead("logits"), answering(taught), teaching, EVERY_STEP, context(Blobs(), tmp_path)
    )
    np.testing.assert_allclose(computed(loss, keras.ops.array(scores), labels), expected_loss, rtol=1e-5)


def test_several_teachers_are_the_average_of_their_probabilities(keras: Any) -> None:
    logits = np.random.default_rng(1).normal(size=(3, 5, 4)).astype(np.float32) * 4
    targets = np.exp(np.asarray(ClassificationHead("logits").soft_targets(list(logits), [1.0, 2.0, 5.0], 2.5)))
    probabilities = [softmax(said / 2.5) for said in logits]
    np.testing.assert_allclose(targets, (probabilities[0] + 2 * probabilities[1] + 5 * probabilities[2]) / 8, rtol=1e-5)
    np.testing.assert_allclose(targets.sum(axis=1), 1, rtol=1e-5)


def test_a_student_that_says_what_its_teacher_says_is_at_the_minimum(keras: Any, trained: Any, tmp_path: Path) -> None:
    inputs = Blobs().inputs("validation")
    teacher = teachers.of_model(trained, Blobs(), "teacher")
    head = ClassificationHead("logits")
    loss = losses.loss_of(head, [teacher], ALONE, EVERY_STEP, context(Blobs(), tmp_path))
    said = teacher.predict(inputs)[0]
    moved = said + np.array([[0.5, -0.5]], np.float32)
    assert (computed(loss, moved, inputs=inputs) > computed(loss, said, inputs=inputs)).all()


# --- when teachers run ------------------------------------------------------------------


def test_answers_given_once_are_the_same_loss_as_answers_in_every_step(
    keras: Any, trained: Any, tmp_path: Path
) -> None:
    teacher, head, stage_context = (
        teachers.of_model(trained, Blobs(), "teacher"),
        ClassificationHead("softmax"),
        context(Blobs(), tmp_path),
    )
    teaching = DistillationSettings(weight=0.7)
    once = losses.loss_of(head, [teacher], teaching, SETTINGS, stage_context)
    online = losses.loss_of(head, [teacher], teaching, EVERY_STEP, stage_context)
    assert {split: values.shape for split, values in once.soft_targets.items()} == {
        "train": (96, 2),
        "validation": (32, 2),
    }
    assert online.soft_targets == {}
    assert stage_context.progress.seen == [(96, 128, {}), (128, 128, {})]  # type: ignore[attr-defined]
    student = network(keras)
    for split in ("train", "validation"):
        batch = Batch(Blobs().inputs(split), Blobs().labels(split), once.soft_targets[split])
        outputs = student(batch.inputs)
        expected = np.asarray(online.of(replace(batch, soft_targets=None), outputs))
        np.testing.assert_allclose(np.asarray(once.of(batch, outputs)), expected, rtol=1e-5)


@pytest.mark.parametrize("augment", [Augment(), Augment(flip=True)], ids=["once", "in every step"])
def test_a_student_learns_from_its_teacher_alone(keras: Any, trained: Any, tmp_path: Path, augment: Augment) -> None:
    keras.utils.set_random_seed(0)
    teacher, before = teachers.of_model(trained, Blobs(), "teacher"), [w.copy() for w in trained.get_weights()]
    settings = SETTINGS.model_copy(update={"augment": augment})
    stage_context = context(Mislabelled(), tmp_path)
    student = network(keras)
    loss = losses.loss_of(ClassificationHead("softmax"), [teacher], ALONE, settings, stage_context)
    facts = loop.fit(student, loss, settings, stage_context)
    assert facts["history"][-1]["val_accuracy"] == 1.0
    for a, b in zip(before, trained.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


def test_with_weight_1_the_labels_change_no_weight(keras: Any, trained: Any, tmp_path: Path) -> None:
    teacher, trained_weights = teachers.of_model(trained, Blobs(), "teacher"), []
    for data in (Blobs(), Mislabelled()):
        keras.utils.set_random_seed(0)
        student, stage_context = network(keras), context(data, tmp_path)
        loss = losses.loss_of(ClassificationHead("softmax"), [teacher], ALONE, SETTINGS, stage_context)
        loop.fit(student, loss, SETTINGS.model_copy(update={"epochs": 1}), stage_context)
        trained_weights.append(student.get_weights())
    for a, b in zip(*trained_weights, strict=True):
        np.testing.assert_array_equal(a, b)


def test_what_needs_labels_is_refused_where_none_are_used() -> None:
    training = TrainingSettings(epochs=1, class_weights="balanced")
    with pytest.raises(ValueError, match="class_weights: balanced needs the labels"):
        DistillationSettings(weight=1.0).check_training(training)
    DistillationSettings(weight=0.9).check_training(training)


# --- teachers from files ----------------------------------------------------------------


def test_a_float_file_teaches_what_its_model_does(keras: Any, trained: Any, tmp_path: Path) -> None:
    from compress.learning.quantization import export

    trained.save(tmp_path / "model.keras")
    (tmp_path / "model.tflite").write_bytes(export.convert_float(trained))
    inputs = Blobs().inputs("validation")
    expected = np.asarray(teachers.of_model(trained, Blobs(), "teacher").predict(inputs)[0])
    trained.export(tmp_path / "folder", verbose=False)
    for name in ("model.keras", "model.tflite", "folder"):
        teacher = teachers.read(tmp_path / name, context(Blobs(), tmp_path))
        assert teacher.name == name
        assert teacher.model is not None
        np.testing.assert_allclose(np.asarray(teacher.predict(inputs)[0]), expected, atol=1e-4)


@dataclass
class Small(Blobs):
    """Blobs in the input shape and with the classes of `tiny.classifier`."""

    class_names: tuple[str, ...] = ("a", "b", "c")
    input_shape: tuple[int, ...] = (4, 4, 1)

    def inputs(self, split: Split) -> np.ndarray:
        return super().inputs(split)[:, ::2, ::2]


def test_a_quantized_file_answers_once_and_not_in_training_steps(keras: Any, tmp_path: Path) -> None:
    from compress.model.tflite.interpreter import LoadedModel

    path, stage_context = tmp_path / "tiny.tflite", context(Small(), tmp_path)
    path.write_bytes(tiny.classifier())
    teacher = teachers.read(path, stage_context)
    assert teacher.model is None
    loss = losses.loss_of(
        ClassificationHead("logits"), [teacher], DistillationSettings(temperature=3.0), SETTINGS, stage_context
    )
    expected = softmax(LoadedModel(path, reproducible=True).scores(Small().inputs("train")) / 3)
    np.testing.assert_allclose(np.exp(loss.soft_targets["train"]), expected, rtol=1e-5)
    with pytest.raises(StageError, match=r"teacher tiny.tflite runs in the TFLite runtime.*remove augment"):
        losses.loss_of(ClassificationHead("logits"), [teacher], ALONE, EVERY_STEP, stage_context)


def test_a_probability_of_0_in_8_bits_is_half_a_step(keras: Any, trained: Any, tmp_path: Path) -> None:
    from compress.learning.quantization import export, float_tflite

    path, inputs = tmp_path / "int8.tflite", Blobs().inputs("train")
    path.write_bytes(float_tflite.convert(export.convert_float(trained), inputs, "int8"))
    teacher = teachers.read(path, context(Blobs(), tmp_path))
    actual = np.asarray(teacher.predict(inputs)[0])
    expected = np.asarray(teachers.of_model(trained, Blobs(), "teacher").predict(inputs)[0])
    assert actual.min() >= np.log(1 / 512) - 1e-6
    np.testing.assert_allclose(softmax(actual), softmax(expected), atol=0.03)


def test_a_teacher_that_does_not_fit_is_refused_in_words(keras: Any, tmp_path: Path) -> None:
    stage_context = context(Blobs(), tmp_path)
    network(keras, shape=(6, 6, 1)).save(tmp_path / "side.keras")
    with pytest.raises(ModelError, match=r"teacher side.keras: the model takes \[6, 6, 1\], but data.preprocess gives"):
        teachers.read(tmp_path / "side.keras", stage_context)
    (tmp_path / "three.tflite").write_bytes(tiny.classifier((8, 8, 1), classes=3))
    with pytest.raises(ModelError, match=r"teacher three.tflite: .* shape \[3\], but the data has 2 classes"):
        teachers.read(tmp_path / "three.tflite", stage_context)
    (tmp_path / "side.tflite").write_bytes(tiny.classifier((4, 4, 1), classes=2))
    with pytest.raises(ModelError, match=r"teacher side.tflite: takes \[1, 4, 4, 1\]"):
        teachers.read(tmp_path / "side.tflite", stage_context)
    (tmp_path / "text.keras").write_text("no model")
    with pytest.raises(ModelError, match="is neither a zip archive nor an HDF5 file"):
        teachers.read(tmp_path / "text.keras", stage_context)
    image = keras.Input((8, 8, 1))
    scores = keras.layers.Dense(2)(keras.layers.Flatten()(keras.layers.Lambda(lambda x: x * 2)(image)))
    keras.Model(image, scores).save(tmp_path / "code.keras")
    with pytest.raises(UntrustedError, match="Lambda"):
        teachers.read(tmp_path / "code.keras", stage_context)
    assert teachers.read(tmp_path / "code.keras", replace(stage_context, trust=True)).model is not None


# --- features ---------------------------------------------------------------------------


def watched(keras: Any, student: Any, teacher: Any, how: Features) -> features.FeatureDistillation:
    return features.set_up(student, teachers.of_model(teacher, Blobs(), "teacher"), how, Blobs())


@pytest.mark.parametrize(("filters", "stride"), [(3, 1), (6, 1), (3, 2), (6, 3)])
def test_values_are_pooled_projected_and_compared_relative_to_their_spread(
    keras: Any, trained: Any, filters: int, stride: int
) -> None:
    student = network(keras, filters, stride)
    hints = watched(keras, student, trained, Features(weight=2.0))
    assert hints.pairs == (("map", "map"),)
    side, inputs = -(-8 // stride), Blobs().inputs("train")
    scores, projected = hints.model(inputs)
    (target,) = hints.teacher.predict(inputs)[1]
    assert projected.shape == target.shape == (96, side, side, 6)
    np.testing.assert_allclose(scores, student(inputs), rtol=1e-5)
    full_map = np.asarray(keras.Model(trained.inputs[0], trained.get_layer("map").output)(inputs))
    if 8 % side == 0:
        step = 8 // side
        np.testing.assert_allclose(target, full_map.reshape(96, side, step, side, step, 6).mean(axis=(2, 4)), atol=1e-6)
    error = np.square(np.asarray(projected) - np.asarray(target)).mean(axis=(1, 2, 3))
    spread = np.asarray(target).reshape(-1, 6).var(axis=0).mean()
    np.testing.assert_allclose(hints.loss([target], [projected]), 2 * error / spread, rtol=1e-4)
    mean = keras.ops.broadcast_to(np.asarray(target).mean(axis=(0, 1, 2)), target.shape)
    assert np.mean(hints.loss([target], [mean])) == pytest.approx(2.0, rel=1e-4)


def test_the_projection_is_trained_and_gone(keras: Any, trained: Any, tmp_path: Path) -> None:
    keras.utils.set_random_seed(0)
    student, stage_context = network(keras, 3), context(Blobs(), tmp_path)
    names, size = [layer.name for layer in student.layers], student.count_params()
    hints = watched(keras, student, trained, Features())
    (projection,) = [layer for layer in hints.model.layers if layer.name not in names]
    start = projection.get_weights()[0]
    inputs = Blobs().inputs("validation")

    def distance() -> float:
        return float(np.mean(hints.loss(hints.teacher.predict(inputs)[1], hints.model(inputs)[1:])))

    teacher, before, known = [w.copy() for w in trained.get_weights()], distance(), ClassificationHead("softmax")
    loss = losses.loss_of(known, [hints.teacher], DistillationSettings(), SETTINGS, stage_context, hints)
    facts = loop.fit(hints.model, loss, SETTINGS, stage_context)
    assert facts["history"][-1]["val_accuracy"] == 1.0
    assert distance() < 0.5 * before
    assert not np.allclose(projection.get_weights()[0], start, atol=0.01)
    assert [layer.name for layer in hints.student.layers] == names
    assert hints.student.count_params() == size
    np.testing.assert_allclose(hints.student(inputs), hints.model(inputs)[0], atol=1e-6)
    assert not np.allclose(hints.student.get_weights()[0], student.get_weights()[0], atol=0.01)  # student is unchanged
    for a, b in zip(teacher, trained.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


def test_hints_are_the_same_whether_scores_came_before_or_not(keras: Any, trained: Any, tmp_path: Path) -> None:
    stage_context, inputs, labels = context(Blobs(), tmp_path), Blobs().inputs("train"), Blobs().labels("train")
    hints = watched(keras, network(keras, 3), trained, Features(weight=0.5))
    once, online = (
        losses.loss_of(
            ClassificationHead("softmax"), [hints.teacher], DistillationSettings(), settings, stage_context, hints
        )
        for settings in (SETTINGS, EVERY_STEP)
    )
    outputs = hints.model(inputs)
    actual = np.asarray(once.of(Batch(inputs, labels, once.soft_targets["train"]), outputs))
    np.testing.assert_allclose(actual, computed(online, outputs, labels, inputs), rtol=1e-5)
    plain = losses.loss_of(
        ClassificationHead("softmax"), [hints.teacher], DistillationSettings(), EVERY_STEP, stage_context
    )
    hint = np.asarray(hints.loss(hints.teacher.predict(inputs)[1], outputs[1:]))
    np.testing.assert_allclose(actual - computed(plain, outputs[0], labels, inputs), hint, atol=1e-5)


def test_attention_needs_no_projection_and_sees_where_maps_are_large(keras: Any, trained: Any) -> None:
    hints = watched(keras, network(keras, 3), trained, Features(match="attention"))
    assert len(hints.model.layers) == len(hints.student.layers)
    random = np.random.default_rng(0)
    student_maps, other = random.random((5, 8, 8, 3)), random.random((5, 8, 8, 6))

    def unit(maps: np.ndarray) -> np.ndarray:
        energy = np.square(maps).sum(axis=-1).reshape(5, 64)
        return np.asarray(energy / np.linalg.norm(energy, axis=1, keepdims=True))

    actual = hints.loss([keras.ops.array(other, "float32")], [keras.ops.array(student_maps, "float32")])
    np.testing.assert_allclose(actual, np.square(unit(student_maps) - unit(other)).sum(axis=1), rtol=1e-4)
    scaled = keras.ops.array(other * 7, "float32")
    np.testing.assert_allclose(hints.loss([scaled], [keras.ops.array(other, "float32")]), 0, atol=1e-6)


def test_attention_of_silent_maps_is_none_and_has_a_gradient(keras: Any) -> None:
    import tensorflow

    maps = tensorflow.Variable(np.zeros((2, 4, 4, 3), np.float32))
    with tensorflow.GradientTape() as tape:
        error = keras.ops.sum(keras.ops.square(features.attention(maps) - 0.25))
    assert float(error) == pytest.approx(2 * 16 * 0.25**2)
    assert np.isfinite(tape.gradient(error, maps).numpy()).all()


def deep(keras: Any) -> Any:
    """A model with maps of 8x8, 4x4 and 2x2, the last of them gated, and a vector before the scores."""
    image, layers = keras.Input((8, 8, 1)), keras.layers
    x = layers.Conv2D(4, 3, padding="same", name="eight")(image)
    x = layers.Conv2D(4, 3, 2, padding="same", name="four")(x)
    x = layers.Conv2D(4, 3, 2, padding="same", name="two")(x)
    gate = layers.GlobalAveragePooling2D(keepdims=True, name="squeezed")(x)
    x = layers.Multiply(name="gated")([x, layers.Conv2D(4, 1, activation="sigmoid", name="gate")(gate)])
    x = layers.Dense(5, name="vector")(layers.Flatten()(x))
    return keras.Model(image, layers.Dense(2)(x), name="deep")


def test_the_last_maps_of_one_size_are_found_and_others_by_name(keras: Any, trained: Any) -> None:
    assert watched(keras, deep(keras), deep(keras), Features()).pairs == (("gated", "gated"),)
    assert watched(keras, network(keras, 3, 2), deep(keras), Features()).pairs == (("map", "four"),)
    assert watched(keras, network(keras, 3, 3), deep(keras), Features()).pairs == (("map", "gated"),)
    pairs = (Pair(student="four", teacher="map"), Pair(student="vector", teacher="dense_of"))
    teacher = keras.Sequential(
        [trained.get_layer("map"), keras.layers.Flatten(), keras.layers.Dense(7, name="dense_of")]
    )
    teacher = keras.Sequential([keras.Input((8, 8, 1)), *teacher.layers, keras.layers.Dense(2)])
    hints = watched(keras, deep(keras), teacher, Features(pairs=pairs))
    assert [tuple(output.shape[1:]) for output in hints.model.outputs] == [(2,), (4, 4, 6), (7,)]


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (
            Features(pairs=(Pair(student="fore", teacher="map"),)),
            r"student 'deep' has no layer 'fore'; allowed: .*four",
        ),
        (Features(pairs=(Pair(student="four", teacher="mop"),)), "teacher 'net6' has no layer 'mop'.*did you mean"),
        (
            Features(pairs=(Pair(student="vector", teacher="map"),)),
            r"'vector' has the shape \[5\], 'map' has \[8, 8, 6\]",
        ),
        (
            Features(pairs=(Pair(student="vector", teacher="dense"),), match="attention"),
            "same number of dimensions, 2 to 3",
        ),
    ],
)
def test_layers_that_cannot_be_compared_are_refused(keras: Any, trained: Any, how: Features, message: str) -> None:
    teacher = keras.Model(trained.inputs[0], trained.outputs[0], name="net6")
    how = how.model_copy(
        update={
            "pairs": tuple(
                pair.model_copy(update={"teacher": trained.layers[-1].name}) if pair.teacher == "dense" else pair
                for pair in how.pairs
            )
        }
    )
    with pytest.raises(ModelError, match=message):
        watched(keras, deep(keras), teacher, how)


def test_features_that_say_nothing_are_refused(keras: Any) -> None:
    dead = network(keras, 4)
    dead.get_layer("map").set_weights([np.zeros((3, 3, 1, 4)), np.full(4, -1.0)])
    with pytest.raises(ModelError, match="layer 'map' is the same for every sample"):
        watched(keras, network(keras), dead, Features())
    flat = keras.Sequential([keras.Input((8, 8, 1)), keras.layers.Flatten(), keras.layers.Dense(2)], name="flat")
    with pytest.raises(ModelError, match=r"the student has no feature maps \[height, width, channels\]"):
        watched(keras, flat, network(keras), Features())
    with pytest.raises(ModelError, match="teacher x: runs in the TFLite runtime, and has no Keras layers"):
        features.set_up(flat, Teacher("x", lambda inputs: (inputs, ())), Features(), Blobs())


def test_answers_are_kept_for_the_next_try(keras: Any, tmp_path: Path) -> None:
    batch_sizes: list[int] = []

    def answers(inputs: Any) -> Any:
        batch_sizes.append(len(inputs))
        return np.stack([np.arange(len(inputs)), np.ones(len(inputs))], axis=1).astype(np.float32), ()

    stage_context = replace(context(Blobs(), tmp_path), unfinished=tmp_path / "unfinished")
    teacher = Teacher("t", answers)
    first = losses.precompute(ClassificationHead("logits"), [teacher], 2.0, stage_context)
    assert sum(batch_sizes) == 96 + 32
    again = losses.precompute(ClassificationHead("logits"), [teacher], 2.0, stage_context)
    assert sum(batch_sizes) == 96 + 32
    for split, values in first.items():
        np.testing.assert_array_equal(values, again[split])
