"""The judge of benchmarks/other_tools.py finds the faults of a file."""

from __future__ import annotations

from pathlib import Path

import file_judgement
import numpy as np
import pytest
import tiny

SAMPLES = np.random.default_rng(0).uniform(0, 1, (40, 4, 4, 1)).astype(np.float32)


@pytest.fixture
def float_file(tmp_path: Path) -> Path:
    path = tmp_path / "float.tflite"
    path.write_bytes(tiny.classifier(int8=False))
    return path


@pytest.fixture
def int8_file(tmp_path: Path) -> Path:
    path = tmp_path / "int8.tflite"
    path.write_bytes(tiny.classifier())
    return path


def test_a_good_file(float_file: Path, int8_file: Path) -> None:
    expected = file_judgement.outputs_of(float_file, SAMPLES)
    labels = expected[0].argmax(axis=1)
    labels[:10] = (labels[:10] + 1) % 3
    judgement = file_judgement.judged(int8_file, SAMPLES, expected, labels)
    assert (judgement["full_integer"], judgement["io"], judgement["other_types"]) == (True, ["INT8"], [])
    assert (judgement["mapped"], judgement["operators"], judgement["rejected"]) == (2, 2, None)
    assert judgement["size_bytes"] == int8_file.stat().st_size
    low, middle, high = judgement["latency_ms"][1], judgement["latency_ms"][0], judgement["latency_ms"][2]
    assert 0 < low <= middle <= high
    assert judgement["agreement"] >= 0.9
    assert judgement["float_accuracy"] == 0.75
    assert judgement["sqnr_db"] == [judgement["mean_sqnr_db"]]
    assert 20 < judgement["mean_sqnr_db"] < 60


def test_a_file_of_other_weights_is_worse(tmp_path: Path, float_file: Path) -> None:
    path = tmp_path / "other.tflite"
    path.write_bytes(tiny.classifier(seed=1))
    judgement = file_judgement.judged(path, SAMPLES, file_judgement.outputs_of(float_file, SAMPLES), None)
    assert judgement["mean_sqnr_db"] < 10
    assert "accuracy" not in judgement


def test_a_float_file_is_not_full_integer(float_file: Path) -> None:
    types = file_judgement.types(float_file)
    assert (types["full_integer"], types["io"], types["other_types"]) == (False, ["FLOAT32"], ["FLOAT32"])


@pytest.mark.parametrize(
    ("inputs", "classes", "error"),
    [
        ((4, 4, 1), 4, "the outputs of the file have the shapes [4], those of the model [3]"),
        ((5, 5, 1), 3, "the input of the file has the shape [5, 5, 1], the samples have [4, 4, 1]"),
    ],
)
def test_other_shapes_are_an_error(tmp_path: Path, inputs: tuple[int, int, int], classes: int, error: str) -> None:
    path = tmp_path / "other.tflite"
    path.write_bytes(tiny.classifier(inputs, classes))
    judgement = file_judgement.judged(path, SAMPLES, [np.zeros((40, 3), np.float32)], None)
    assert judgement["error"] == error
    assert judgement["operators"] == 2


@pytest.mark.parametrize("shape", [(4, 5, 3), (3, 4, 5)])
def test_samples_with_another_order_of_the_axes_fit(tmp_path: Path, shape: tuple[int, int, int]) -> None:
    """The second file has inputs that are taken as channels first: only the order of the axes matters here."""
    path = tmp_path / "colour.tflite"
    path.write_bytes(tiny.classifier(shape))
    samples = np.random.default_rng(0).uniform(0, 1, (6, *shape)).astype(np.float32)
    order = (0, 3, 1, 2) if shape[2] == 3 else (0, 2, 3, 1)
    moved = np.ascontiguousarray(samples.transpose(order))
    np.testing.assert_array_equal(
        file_judgement.outputs_of(path, moved)[0], file_judgement.outputs_of(path, samples)[0]
    )


def test_outputs_in_another_order_and_with_other_axes() -> None:
    random = np.random.default_rng(0)
    boxes, scores, other = (random.normal(size=shape).astype(np.float32) for shape in ((8, 5, 4), (8, 5, 2), (8, 5, 2)))
    actual = [other[..., None], boxes.transpose(0, 2, 1), scores]
    outputs = file_judgement.matched([boxes, scores, other], actual)
    for one, expected in zip(outputs, (boxes, scores, other), strict=True):
        np.testing.assert_array_equal(one, expected)


def test_a_missing_output() -> None:
    values = np.zeros((8, 5), np.float32)
    with pytest.raises(file_judgement.NotComparableError, match=r"shapes \[5\], those of the model \[5\], \[5\]"):
        file_judgement.matched([values, values], [values])


@pytest.mark.parametrize(
    ("actual", "ratio"), [([1.0, 1.0], 120.0), ([1.1, 1.0], 23.01), ([0.0, 0.0], 0.0), ([np.nan, 1.0], -120.0)]
)
def test_the_ratio(actual: list[float], ratio: float) -> None:
    sqnr_db = file_judgement.sqnr_db(np.ones((1, 2), np.float32), np.array([actual], np.float32))
    assert sqnr_db == pytest.approx(ratio, abs=0.01)


def test_times_are_of_every_file(float_file: Path, int8_file: Path) -> None:
    milliseconds = file_judgement.cpu_milliseconds({"float": float_file, "int8": int8_file}, SAMPLES[0], runs=3)
    assert set(milliseconds) == {"float", "int8"}
    assert all(0 < value < 1000 for value in milliseconds.values())
