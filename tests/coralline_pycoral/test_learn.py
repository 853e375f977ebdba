"""Last layers that are learnt on the device: the files run, and answer as numpy does."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import devices
import numpy as np
import one_op
import pytest
from interpreters import executable, interpreters

from coralline_pycoral.adapters import classify, common
from coralline_pycoral.learn.backprop.softmax_regression import SoftmaxRegression
from coralline_pycoral.learn.head_file import HeadFile
from coralline_pycoral.learn.imprinting.engine import ImprintingEngine
from coralline_pycoral.utils.edgetpu import make_interpreter

VALUES, CLASSES, SHARPNESS = 8, 3, 12.0
FORMS = {"UINT8": (1 / 64, 128), "INT8": (1 / 64, 0), "FLOAT32": (0.0, 0)}


def tensor(shape: tuple[int, ...], dtype: str, scale: float, zero_point: int, values: object = None) -> one_op.Tensor:
    if dtype == "FLOAT32":
        return one_op.Tensor(shape, dtype, values, ())
    return one_op.Tensor(shape, dtype, values, (scale,), zero_point)


def extractor(dtype: str) -> bytes:
    """Return a model that copies its input [1, 8]."""
    scale, zero_point = FORMS[dtype]
    tensors = {name: tensor((1, VALUES), dtype, scale, zero_point) for name in ("image", "embedding")}
    tensors["shape"] = one_op.integers(1, VALUES)
    return one_op.content(tensors, [one_op.Op("RESHAPE", ["image", "shape"], ["embedding"])], ["image"], ["embedding"])


def normalized(dtype: str) -> bytes:
    """Return a model with the vendor's last operators: L2_NORMALIZATION, CONV_2D, MUL, RESHAPE and SOFTMAX."""
    scale, zero_point = FORMS[dtype]
    random = np.random.default_rng(1)
    kernel = random.normal(size=(CLASSES, 1, 1, VALUES))
    kernel /= np.linalg.norm(kernel, axis=3, keepdims=True)
    middle = 128 if dtype == "UINT8" else 0
    stored = kernel if dtype == "FLOAT32" else np.round(kernel * 127) + middle
    factor = SHARPNESS if dtype == "FLOAT32" else 120 + 0 * middle
    tensors = {
        "image": tensor((1, 1, 1, VALUES), dtype, scale, zero_point),
        "unit": tensor((1, 1, 1, VALUES), dtype, 1 / 128, middle),
        "kernel": tensor(kernel.shape, dtype, 1 / 127, middle, stored),
        "bias": tensor((CLASSES,), "FLOAT32" if dtype == "FLOAT32" else "INT32", 1 / 128 / 127, 0, np.zeros(CLASSES)),
        "cosines": tensor((1, 1, 1, CLASSES), dtype, 1 / 128, middle),
        "factor": tensor((1,), dtype, SHARPNESS / 120, 0, np.array([factor])),
        "logits": tensor((1, 1, 1, CLASSES), dtype, SHARPNESS / 128, middle),
        "row": tensor((1, CLASSES), dtype, SHARPNESS / 128, middle),
        "shape": one_op.integers(1, CLASSES),
        "scores": tensor((1, CLASSES), dtype, 1 / 256, 0 if dtype == "UINT8" else -128),
    }
    operators = [
        one_op.Op("L2_NORMALIZATION", ["image"], ["unit"]),
        one_op.Op("CONV_2D", ["unit", "kernel", "bias"], ["cosines"], 1, {"strideH": 1, "strideW": 1}),
        one_op.Op("MUL", ["cosines", "factor"], ["logits"]),
        one_op.Op("RESHAPE", ["logits", "shape"], ["row"]),
        one_op.Op("SOFTMAX", ["row"], ["scores"], 1, {"beta": 1.0}),
    ]
    return one_op.content(tensors, operators, ["image"], ["scores"])


def answers(content: bytes, rows: np.ndarray, dtype: str) -> np.ndarray:
    """Return the real outputs of a model for real inputs [n, 8]."""
    interpreter = make_interpreter(content)
    detail = interpreter.get_input_details()[0]
    scale, zero_point = FORMS[dtype]
    results = []
    for row in rows:
        stored = row if dtype == "FLOAT32" else np.round(row / scale) + zero_point
        interpreter.set_tensor(detail["index"], stored.reshape(detail["shape"]).astype(detail["dtype"]))
        interpreter.invoke()
        results.append(classify.get_scores(interpreter).copy())
    assert common.input_details(interpreter, "dtype") == np.dtype(dtype.lower()).type
    return np.stack(results)


def softmax(logits: np.ndarray) -> np.ndarray:
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=1, keepdims=True))


def groups(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return embeddings of three classes, between -1.5 and 1.5, and their classes."""
    random = np.random.default_rng(seed)
    centres = np.random.default_rng(0).uniform(-1, 1, (CLASSES, VALUES))
    labels = random.integers(0, CLASSES, count)
    return (centres[labels] + random.normal(0, 0.15, (count, VALUES))).clip(-1.5, 1.5), labels


@pytest.mark.parametrize("dtype", FORMS)
def test_softmax_regression(dtype: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "e.tflite").write_bytes(extractor(dtype))
    features, labels = groups(200, 1)
    more, their_labels = groups(60, 2)
    data = {"data_train": features, "labels_train": labels, "data_val": more, "labels_val": their_labels}
    model = SoftmaxRegression(VALUES, CLASSES, reg=1e-3)
    model.train_with_sgd(data, 300, 0.5, 50, print_every=100)
    assert len(capsys.readouterr().out.splitlines()) == 3
    assert model.get_accuracy(more, their_labels) > 0.95
    scores = answers(model.serialize_model(str(tmp_path / "e.tflite")), more, dtype)
    expected = softmax(more @ model._weights.T + model._biases)
    np.testing.assert_allclose(scores, expected, atol=1e-5 if dtype == "FLOAT32" else 0.05)
    assert (scores.argmax(axis=1) == expected.argmax(axis=1)).mean() > 0.95


def test_weight_decay_makes_weights_smaller() -> None:
    features, labels = groups(200, 1)
    data = {"data_train": features, "labels_train": labels, "data_val": features, "labels_val": labels}
    norms = []
    for reg in (0.0, 0.1):
        model = SoftmaxRegression(VALUES, CLASSES, reg=reg)
        model.train_with_sgd(data, 200, 0.5, print_every=0)
        norms.append(np.linalg.norm(model._weights))
    assert norms[1] < norms[0] / 2


def test_what_softmax_regression_refuses(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        SoftmaxRegression(0, 3)
    with pytest.raises(ValueError, match=r"missing\.tflite"):
        SoftmaxRegression(5, 3).serialize_model(str(tmp_path / "missing.tflite"))
    (tmp_path / "e.tflite").write_bytes(extractor("UINT8"))
    with pytest.raises(ValueError, match="the weights take 5 values"):
        SoftmaxRegression(5, 3).serialize_model(str(tmp_path / "e.tflite"))


@pytest.mark.parametrize("dtype", FORMS)
@pytest.mark.parametrize("keep_classes", [False, True])
def test_imprinting(dtype: str, keep_classes: bool, tmp_path: Path) -> None:
    path = tmp_path / "n.tflite"
    path.write_bytes(normalized(dtype))
    engine = ImprintingEngine(str(path), keep_classes)
    first = CLASSES * keep_classes
    assert (engine.embedding_dim, engine.num_classes) == (VALUES, first)
    features, labels = groups(30, 3)
    embeddings = answers(engine.serialize_extractor_model(), features, dtype)
    np.testing.assert_allclose(np.linalg.norm(embeddings, axis=1), 1, atol=0.03)
    for label in range(CLASSES):
        for embedding in embeddings[labels == label]:
            engine.train(embedding, first + label)
    assert engine.num_classes == first + CLASSES
    content = engine.serialize_model()
    scores = answers(content, features, dtype)
    means = np.stack([embeddings[labels == label].sum(axis=0) for label in range(CLASSES)])
    weights = means / np.linalg.norm(means, axis=1, keepdims=True)
    if keep_classes:
        old = HeadFile(path.read_bytes())
        weights = np.concatenate([old.tensor(old.ends(1, 1)[1]).values.reshape(CLASSES, VALUES), weights])
    expected = softmax(SHARPNESS * embeddings @ weights.T)
    np.testing.assert_allclose(scores, expected, atol=1e-4 if dtype == "FLOAT32" else 0.06)
    if not keep_classes:
        assert (scores.argmax(axis=1) == labels).all()
    # The file can be trained further: one class more, and more images of a class.
    path.write_bytes(content)
    again = ImprintingEngine(str(path), keep_classes=True)
    again.train(embeddings[0], first + CLASSES)
    again.train(embeddings[labels == 0][0], first)
    assert (again.num_classes, again._sharpness) == (first + CLASSES + 1, pytest.approx(SHARPNESS))
    np.testing.assert_allclose(again._classes[first].total, means[0] + embeddings[labels == 0][0], atol=0.2)
    assert answers(again.serialize_model(), features, dtype).shape == (30, first + CLASSES + 1)
    if keep_classes:
        with pytest.raises(RuntimeError, match="original model"):
            again.train(embeddings[0], 0)


def test_what_imprinting_refuses(tmp_path: Path) -> None:
    path = tmp_path / "n.tflite"
    path.write_bytes(normalized("UINT8"))
    engine = ImprintingEngine(str(path))
    with pytest.raises(RuntimeError, match="not trained"):
        engine.serialize_model()
    with pytest.raises(RuntimeError, match="8 finite values, not 5"):
        engine.train(np.zeros(5), 0)
    with pytest.raises(RuntimeError, match="allowed: 0 to 0"):
        engine.train(np.ones(VALUES), 1)
    path.write_bytes(extractor("UINT8"))
    with pytest.raises(ValueError, match="must have an L2Norm layer"):
        ImprintingEngine(str(path))
    with pytest.raises(ValueError, match=r"Failed to open file: missing\.tflite"):
        ImprintingEngine("missing.tflite")


@pytest.mark.parametrize("end", [0, 3, 40, 400, -200])
def test_damaged_files_are_refused(end: int, tmp_path: Path) -> None:
    path = tmp_path / "n.tflite"
    path.write_bytes(normalized("UINT8")[:end])
    with pytest.raises(ValueError, match=r"damaged|architecture|table"):
        ImprintingEngine(str(path))


PROGRAM = """
import hashlib, json, sys
import numpy as np
from coralline_pycoral.learn.imprinting.engine import ImprintingEngine
engine = ImprintingEngine("n.tflite", keep_classes=True)
engine.train(np.arange(8, dtype=np.float32) / 12, 3)
print(json.dumps(hashlib.sha256(engine.serialize_model()).hexdigest()))
"""


def test_every_python_writes_the_same(tmp_path: Path) -> None:
    (tmp_path / "n.tflite").write_bytes(normalized("INT8"))
    written = set()
    for version in interpreters():
        command = [executable(version), "-W", "error", "-c", PROGRAM]
        done = subprocess.run(command, cwd=tmp_path, env=devices.environment(), capture_output=True, check=True)
        written.add(json.loads(done.stdout))
    assert len(written) == 1
