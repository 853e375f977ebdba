"""New classes from five photos on the device: their accuracy, the loss on old ones, the file, undo and import."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from pathlib import Path
from typing import Any

import devices
import numpy as np
import pytest
import small_shop

from deploy import Model, Recognition, Recognizer
from deploy.contract import bundle
from deploy.contract.errors import ArgumentError
from deploy.learn import learning, learnt_file
from deploy.learn.learning import LearnSettings
from deploy.learn.learnt_file import LearntFileError

pytestmark = pytest.mark.usefixtures("nowhere")


@pytest.fixture
def path(tmp_path: Path) -> str:
    """Write a bundle that can learn classes; return its path."""
    return written(tmp_path / "shop.coralline")


def written(path: Path, **settings: Any) -> str:
    path.write_bytes(small_shop.packed(**settings))
    return str(path)


def accuracy(recognizer: Recognizer) -> float:
    """The accuracy on the test split of the known digits."""
    data = small_shop.dataset()
    labels = data.labels("test")
    answers = recognizer.stream(data.raw("test", np.arange(len(labels))))
    return float(np.mean([answer.index == label for answer, label in zip(answers, labels, strict=True)]))


def share(recognizer: Recognizer, images: list[Any], name: str) -> float:
    return float(np.mean([recognizer(image).label == name for image in images]))


@pytest.mark.parametrize("task", ["classification", "embeddings"])
@pytest.mark.parametrize("method", learning.METHODS)
def test_five_photos(tmp_path: Path, method: str, task: str) -> None:
    """Seven is learnt by both methods, from the embedding of a classifier and from a model of embeddings.

    examples/retail/README.md has the accuracy on photos.
    """
    model = Model(small_shop.opened(task=task), "int8", device="cpu")
    with Recognizer(model, "", LearnSettings(method)) as recognizer:
        before = accuracy(recognizer)
        photos, others = small_shop.photos(7)
        report = recognizer.learn("seven", photos)
        assert recognizer.labels == [*small_shop.NAMES, "seven"]
        assert share(recognizer, others, "seven") >= (0.7 if method == "imprint" else 0.5)
        assert before - accuracy(recognizer) <= 0.035
        assert (report.photos, report.total) == (5, 5)
        assert report.recognized >= 4
        assert "seven" not in dict(report.before)
        assert report.lost is not None
        assert report.lost <= 0.01 * report.validation


def test_more_photos_help(path: str) -> None:
    photos, others = small_shop.photos(3, 40)
    with Recognizer(path) as recognizer:
        recognizer.learn("three", photos[:5])
        few = share(recognizer, others, "three")
        report = recognizer.learn("THREE ", photos[5:])
        assert (report.name, report.total) == ("three", 40)
        assert recognizer.learnt == [("three", 40)]
        assert share(recognizer, others, "three") > few


def test_answers_are_calibrated_and_unknown(path: str) -> None:
    with Recognizer(path) as recognizer:
        unknown = [recognizer(image).is_unknown for image in small_shop.photos(3, 100)[0]]
        known = [recognizer(image).is_unknown for image in small_shop.photos(0, 100)[0]]
        assert np.mean(unknown) > 0.2 > 0.06 > np.mean(known)
        answer = recognizer(small_shop.photos(0)[0][0])
        assert isinstance(answer, Recognition)
        assert answer.is_calibrated
        assert float(answer.scores.sum()) == pytest.approx(1, abs=1e-5)
        assert answer.confidence == answer.score == answer.top(1)[0][1]


@pytest.mark.parametrize("softmax", [True, False])
def test_without_embedding_there_is_confidence_alone(tmp_path: Path, softmax: bool) -> None:
    path = written(tmp_path / "plain.coralline", expose=False, softmax=softmax)
    with Recognizer(path) as recognizer, Model(path) as model:
        image = small_shop.photos(0)[0][0]
        assert recognizer(image).label == model(image).label == "zero"
        assert not recognizer(image).is_unknown
        assert not recognizer.learns
        with pytest.raises(ArgumentError, match=r"no embedding.*expose_embedding"):
            recognizer.learn("seven", [image])
        with pytest.raises(ArgumentError, match="no embedding"):
            recognizer.exported()


def test_older_bundles_answer_without_calibration(tmp_path: Path) -> None:
    with Recognizer(Model(bundle.Bundle(devices.packed()), "int8", device="cpu"), "") as recognizer:
        answer = recognizer(devices.images(1)[0])
        assert not answer.is_calibrated
        assert not answer.is_unknown
        assert answer.label in devices.LABELS


def test_only_learnt_classes(tmp_path: Path) -> None:
    """A model of embeddings without data knows no class: all are learnt."""
    opened = small_shop.opened(task="embeddings")
    manifest = {key: value for key, value in opened.manifest.items() if key not in ("members", "schema_version")}
    plain = bundle.pack({**manifest, "embedding": None, "confidence": None, "labels": []}, opened.members)
    with Recognizer(Model(bundle.Bundle(plain), "int8", device="cpu"), "") as recognizer:
        with pytest.raises(ArgumentError, match="learn a class first"):
            recognizer(small_shop.photos(0)[0][0])
        rest = {}
        for name, digit in (("zero", 0), ("seven", 7)):
            photos, rest[name] = small_shop.photos(digit)
            recognizer.learn(name, photos)
        for name, images in rest.items():
            assert share(recognizer, images, name) > 0.9
        assert not recognizer(rest["zero"][0]).is_calibrated


def test_the_file_is_used_again_and_undone(path: str) -> None:
    photos, others = small_shop.photos(7)
    file = Path(learnt_file.beside(path))
    with Recognizer(path) as recognizer:
        recognizer.learn("seven", photos)
        recognizer.learn("three", small_shop.photos(3)[0])
        expected = [recognizer(image).scores for image in others[:20]]
    assert file.stat().st_size < 20_000
    assert b"pickle" not in file.read_bytes()
    with Recognizer(path) as recognizer:
        assert recognizer.learnt == [("seven", 5), ("three", 5)]
        for image, scores in zip(others, expected, strict=False):
            np.testing.assert_array_equal(recognizer(image).scores, scores)
        assert recognizer.undo().classes[0].name == "three"
        assert recognizer.undo().classes[0].name == "seven"
        assert recognizer.labels == small_shop.NAMES
        with pytest.raises(ArgumentError, match="no change to undo"):
            recognizer.undo()
        assert [event["action"] for event in recognizer.history] == ["learn", "learn", "undo", "undo"]
    names = {"shop.coralline", "shop.learnt", "shop.learnt.lock"}
    assert {entry.name for entry in file.parent.iterdir()} == names


def test_export_and_import_are_one_change(path: str, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other = written(tmp_path / "other" / "shop.coralline")
    with Recognizer(path) as first, Recognizer(other) as second:
        with pytest.raises(ArgumentError, match="no learnt classes"):
            second.imported(first.exported())
        first.learn("seven", small_shop.photos(7)[0])
        first.learn("three", small_shop.photos(3)[0])
        image = small_shop.photos(7)[1][0]
        change = second.imported(first.exported())
        assert (change.photos, len(change.classes)) == (10, 2)
        np.testing.assert_array_equal(second(image).scores, first(image).scores)
        second.undo()
        assert second.learnt == []


def test_the_answer_of_the_model_changes_too(path: str) -> None:
    """`run` and `serve` use the model; threads may read answers while a class is learnt."""
    with Model(path) as model:
        recognizer = Recognizer(model, "")
        images = small_shop.photos(7)[1][:30]
        failures: list[Any] = []

        def ask() -> None:
            for image in images * 4:
                scores = model(image).scores
                if len(scores) not in (8, 9) or abs(float(scores.sum()) - 1) > 1e-4:
                    failures.append(scores)

        threads = [threading.Thread(target=ask) for _ in range(2)]
        for thread in threads:
            thread.start()
        recognizer.learn("seven", small_shop.photos(7)[0])
        for thread in threads:
            thread.join()
        assert not failures
        assert len(model(images[0]).scores) == 9


def test_two_processes_do_not_lose_a_change(path: str) -> None:
    """Two recognizers that have read the same file: the second one adds to what the first one wrote."""
    with Recognizer(path) as first, Recognizer(path) as second:
        first.learn("seven", small_shop.photos(7)[0])
        second.learn("three", small_shop.photos(3)[0])
        assert second.learnt == [("seven", 5), ("three", 5)]


def test_a_full_disk_changes_nothing(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with Recognizer(path) as recognizer:
        recognizer.learn("seven", small_shop.photos(7)[0])
        content = Path(recognizer.path).read_bytes()

        def full(*arguments: Any) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space"):
            recognizer.learn("three", small_shop.photos(3)[0])
        assert recognizer.learnt == [("seven", 5)]
        assert Path(recognizer.path).read_bytes() == content
        assert not [name for name in os.listdir(Path(path).parent) if name.startswith(".")]


@pytest.mark.parametrize(
    "name", ["", " ", "x" * 81, "a\x00b", "a\u202eb", "ZERO", "zero ", "\ud800"], ids=lambda name: repr(name)[:12]
)
def test_names_are_checked(path: str, name: str) -> None:
    with Recognizer(path) as recognizer, pytest.raises(ArgumentError):
        recognizer.learn(name, small_shop.photos(7)[0])


def test_names_are_normal() -> None:
    assert learnt_file.checked_name("  Cafe\u0301  noir ", []) == "Caf\u00e9 noir"
    assert learnt_file.checked_name("牛乳", []) == "牛乳"
    assert learnt_file.checked_name("<b>&\"'", []) == "<b>&\"'"


def test_other_bundles_refuse_the_file(path: str, tmp_path: Path) -> None:
    with Recognizer(path) as recognizer:
        recognizer.learn("seven", small_shop.photos(7)[0])
    for settings in ({"softmax": False}, {"expose": False}):
        other = written(tmp_path / "other.coralline", **settings)
        with pytest.raises(LearntFileError, match="learnt with another bundle"):
            Recognizer(other, learnt_file.beside(path))


def test_damage_is_found(path: str) -> None:
    with Recognizer(path) as recognizer:
        recognizer.learn("seven", small_shop.photos(7)[0])
    file = Path(learnt_file.beside(path))
    content = file.read_bytes()
    places = range(0, len(content), 37)
    changed = [content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :] for place in places]
    for damaged in (*changed, b"", content[:100], content[:-1], content + b"x"):
        file.write_bytes(damaged)
        with pytest.raises(LearntFileError, match="damaged"):
            Recognizer(path)


def _sealed(manifest: Any, rows: Any) -> bytes:
    """Return a file with a correct checksum and any content."""
    members = {bundle.MANIFEST: json.dumps(manifest).encode(), "embeddings.npy": bundle.array_bytes(rows)}
    archive = bundle.archive_of(members)
    return learnt_file.MAGIC + hashlib.sha256(archive).hexdigest().encode() + b"\n" + archive


@pytest.mark.parametrize(
    "changes",
    [
        [{"time": "t", "action": "learn", "classes": [{"name": "a", "photos": 9}]}],
        [{"time": "t", "action": "learn", "classes": [{"name": "a", "photos": -1}, {"name": "b", "photos": 3}]}],
        [{"time": "t", "action": "learn", "classes": [{"name": "a", "photos": 1}]}],
        [{"time": "t", "action": "delete", "classes": [{"name": "a", "photos": 2}]}],
        [{"time": 3, "action": "learn", "classes": [{"name": "a", "photos": 2}]}],
        [{"time": "t", "action": "learn", "classes": [{"name": "a", "photos": True}, {"name": "b", "photos": 1}]}],
        [{"time": "t", "action": "learn"}],
        {"a": 1},
        None,
    ],
)
def test_hostile_content_with_a_correct_checksum(changes: Any) -> None:
    manifest = {"schema_version": 1, "bundle": "d", "changes": changes, "history": []}
    with pytest.raises((LearntFileError, ArgumentError)):
        learnt_file.parsed(_sealed(manifest, np.zeros((2, 4), np.float32)), "file", "d", 4)


def test_hostile_embeddings() -> None:
    change = {"time": "t", "action": "learn", "classes": [{"name": "a", "photos": 2}]}
    manifest = {"schema_version": 1, "bundle": "d", "changes": [change], "history": []}
    assert learnt_file.parsed(_sealed(manifest, np.zeros((2, 4), np.float32)), "file", "d", 4).classes()
    for rows in (np.zeros((2, 5), np.float32), np.full((2, 4), np.nan, np.float32), np.zeros((2, 4)), np.zeros(8)):
        with pytest.raises(LearntFileError, match="damaged"):
            learnt_file.parsed(_sealed(manifest, rows), "file", "d", 4)
    with pytest.raises(LearntFileError, match="another version"):
        learnt_file.parsed(_sealed({**manifest, "schema_version": 2}, np.zeros((2, 4), np.float32)), "file", "d", 4)


def test_limits(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learnt_file, "MAX_PHOTOS", 7)
    with Recognizer(path) as recognizer:
        recognizer.learn("seven", small_shop.photos(7)[0])
        with pytest.raises(ArgumentError, match=r"10 photos were learnt.*at most 1000 classes and 7"):
            recognizer.learn("three", small_shop.photos(3)[0])
        with pytest.raises(ArgumentError, match="no photos"):
            recognizer.learn("three", [])
        assert recognizer.learnt == [("seven", 5)]


def test_roles_and_tasks(path: str) -> None:
    for arguments, message in (
        ((Model(path, "original"), ""), "the original model has no embedding"),
        ((Model(path),), "pass path"),
        ((path, "", LearnSettings("other")), "method"),
        ((path, "", LearnSettings(loss=float("nan"))), "loss"),
    ):
        with pytest.raises(ArgumentError, match=message):
            Recognizer(*arguments)


def test_softmax_regression_is_that_of_scikit_learn() -> None:
    """Another program solves the same objective: differences of logits between new class and references are equal."""
    from sklearn.linear_model import LogisticRegression

    random = np.random.default_rng(0)
    directions = random.normal(size=(60, 12)).astype(np.float32)
    directions[40:50, 0] += 3
    directions[50:, 1] += 3
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    classes = np.repeat([0, 1, 2], [40, 10, 10])
    weights, biases = learning._softmax_regression(directions, classes)
    importance = np.where(classes == 0, 1.0, learning.PHOTO_WEIGHT * 40 / 10)
    features = np.concatenate([directions * learning.FEATURE_LENGTH, np.full((60, 1), 10.0)], axis=1)
    fitted = LogisticRegression(C=1.0, fit_intercept=False, tol=1e-8, max_iter=2000)
    fitted.fit(features, classes, importance)  # a feature of 10 has a hundredth of the penalty of one of 1
    expected = features @ (fitted.coef_[1:] - fitted.coef_[:1]).T
    np.testing.assert_allclose(directions @ weights.T + biases, expected, atol=1e-3)
