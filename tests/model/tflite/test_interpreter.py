"""Running models with float inputs and outputs, whatever the model's own types; and models that cannot be run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import one_op
import pytest
import tiny
from one_op import Op, Tensor

from compress.core.errors import ModelError
from compress.model.tflite.interpreter import LoadedModel


def loaded(folder: Path, content: bytes) -> LoadedModel:
    (folder / "m.tflite").write_bytes(content)
    return LoadedModel(folder / "m.tflite", reproducible=True)


def test_scores_of_float_and_int8_agree(tmp_path: Path) -> None:
    samples = np.random.default_rng(0).random((20, 4, 4, 1), np.float32)
    scores = {}
    for int8 in (False, True):
        model = loaded(tmp_path, tiny.classifier(int8=int8))
        scores[int8] = model.scores(samples)
        assert scores[int8].shape == (20, 3)
        assert scores[int8].dtype == np.float32
        np.testing.assert_array_equal(model.scores(samples), scores[int8])
        assert model.raw(model.feed(samples[0])).dtype == (np.int8 if int8 else np.float32)
    step = LoadedModel(tmp_path / "m.tflite", reproducible=True).outputs[0]["quantization"][0]
    assert np.abs(scores[True] - scores[False]).max() < 2 * step
    assert scores[False].std() > step


def test_feed_quantizes(tmp_path: Path) -> None:
    model = loaded(tmp_path, tiny.classifier())
    sample = np.linspace(-1, 2, 16, dtype=np.float32).reshape(4, 4, 1)
    (stored,) = model.feed(sample)
    assert stored.shape == (1, 4, 4, 1)
    assert stored.dtype == np.int8
    np.testing.assert_array_equal(stored.flatten()[[0, 5, 10, 15]], [-128, -128, 127, 127])
    assert abs(int(stored.flatten()[7]) - (-128 + 255 * 0.4)) <= 1


@pytest.mark.parametrize(
    ("shape", "hint"),
    [
        ((4, 4, 3), "add `colour: {to: grey}` to data.preprocess"),
        ((5, 4, 1), "add `resize: {size: \\[4, 4\\]}` to data.preprocess"),
        ((9, 9, 2), "choose another model, or change data.source"),
        ((9, 9, 3), "add `colour: {to: grey}` and `resize: {size: \\[4, 4\\]}`"),
        ((4, 4), "add `reshape: {shape: \\[4, 4, 1\\]}`"),
        ((1, 4, 4, 1), "add `reshape"),
        ((4, 4, 1, 1), "add `squeeze: {axis: -1}`"),
        ((16,), "choose a model"),
    ],
)
def test_a_sample_that_does_not_fit(tmp_path: Path, shape: tuple[int, ...], hint: str) -> None:
    model = loaded(tmp_path, tiny.classifier())
    with pytest.raises(ModelError, match=rf"takes \[1, 4, 4, 1\], but the data gives .*; {hint}"):
        model.feed(np.zeros(shape, np.float32))


def test_describe(tmp_path: Path) -> None:
    model = loaded(tmp_path, tiny.classifier())
    assert model.input_tensors[0].to_json() == {
        "name": "image",
        "tensor": "image",
        "shape": [1, 4, 4, 1],
        "dtype": "int8",
        "scale": pytest.approx(1 / 255),
        "zero_point": -128,
    }
    floats = loaded(tmp_path, tiny.classifier(int8=False))
    assert floats.output_tensors[0].to_json() == {
        "name": "scores",
        "tensor": "scores",
        "shape": [1, 3],
        "dtype": "float32",
        "scale": None,
        "zero_point": 0,
    }


@pytest.mark.parametrize("content", [b"", b"no model", tiny.classifier()[:500], b"\x1c\0\0\0TFL3" + bytes(64)])
def test_what_the_runtime_refuses(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(ModelError, match=r"m\.tflite: the TFLite runtime refuses it: .") as caught:
        loaded(tmp_path, content)
    assert "\n" not in str(caught.value)


def test_an_operator_without_kernel(tmp_path: Path) -> None:
    tensors = {"x": Tensor((1, 2)), "y": Tensor((1, 2))}
    with pytest.raises(ModelError, match=r"this host lacks its custom operators: MyOp; .*; if it is compiled"):
        loaded(tmp_path, one_op.content(tensors, [Op("MyOp", "x", "y", custom=True)], "x", "y"))


def test_several_inputs(tmp_path: Path) -> None:
    tensors = {name: Tensor((1, 2)) for name in "abc"}
    model = loaded(tmp_path, one_op.content(tensors, [Op("ADD", "ab", "c", 2)], "ab", "c"))
    rows = np.array([[1, 2, 10, 20], [3, 4, 30, 40]], np.float32)
    np.testing.assert_array_equal(model.scores(rows), [[11, 22], [33, 44]])
    with pytest.raises(
        ModelError, match=r"has 2 inputs \(\[2\], \[2\]\), but the data gives \[3\]; allowed: one row of 4"
    ):
        model.feed(np.zeros(3, np.float32))


def test_outputs_of_different_types_and_scales(tmp_path: Path) -> None:
    plain = Tensor((1, 2), "FLOAT32", scales=())
    tensors = {"x": plain, "a": Tensor((1, 2)), "b": plain}
    ops = [Op("QUANTIZE", "x", "a"), Op("ADD", "xx", "b", 2)]
    model = loaded(tmp_path, one_op.content(tensors, ops, "x", "ab"))
    assert not model.floating
    assert model.output_layout.sizes == (2, 2)
    np.testing.assert_array_equal(model.scores(np.array([[1, 2.25]], np.float32)), np.float32([[1, 2.5, 2, 4.5]]))


@pytest.mark.parametrize("end", ["input", "output"])
def test_a_scale_for_each_channel_is_refused(tmp_path: Path, end: str) -> None:
    many, one = Tensor((2, 1), scales=(0.5, 0.25)), Tensor((2, 1), "FLOAT32", scales=())
    tensors = {"x": many, "y": one} if end == "input" else {"x": one, "y": many}
    with pytest.raises(ModelError, match=f"its {end} is int8 with a scale for each channel; allowed: float, integers"):
        loaded(tmp_path, one_op.content(tensors, [Op("CAST", "x", "y")], "x", "y"))


@pytest.mark.parametrize(
    ("dtypes", "stored", "expected"),
    [(("UINT8", "FLOAT32"), [7.6, -3, 300], [8, 0, 255]), (("INT32", "INT64"), [7, -3, 0], [7, -3, 0])],
    ids=["pixels as bytes", "plain integers"],
)
def test_integers_without_scales_are_numbers(
    tmp_path: Path, dtypes: tuple[str, str], stored: list[float], expected: list[int]
) -> None:
    tensors = {name: Tensor((1, 3), dtype, scales=()) for name, dtype in zip("xy", dtypes, strict=True)}
    model = loaded(tmp_path, one_op.content(tensors, [Op("CAST", "x", "y")], "x", "y"))
    np.testing.assert_array_equal(model.scores(np.array([stored], np.float32)), [expected])
