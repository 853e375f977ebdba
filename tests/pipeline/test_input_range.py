"""The values that a quantized input expects: recognized where its scale says it, asked for otherwise."""

from __future__ import annotations

from pathlib import Path

import data_files
import numpy as np
import one_op
import pytest
from one_op import Op, Tensor
from PIL import Image

from compress.core.errors import DataError
from compress.model.importers import model_file
from compress.model.tflite import graph
from compress.pipeline import data_section


def inputs(folder: Path, image: Tensor, *, with_float_ends: bool = False) -> data_section.ModelInputs:
    """Return the inputs of a model of one operator."""
    tensors = {"image": image, "out": Tensor(image.shape, image.dtype, None, image.scales, image.zero_point)}
    operators, start, end = [Op("RELU", ["image"], ["out"])], "image", "out"
    if with_float_ends:
        start, end = "real", "result"
        tensors |= {name: Tensor(image.shape, "FLOAT32", scales=()) for name in (start, end)}
        operators = [Op("QUANTIZE", [start], ["image"]), *operators, Op("DEQUANTIZE", ["out"], [end])]
    (folder / "m.tflite").write_bytes(graph.serialize(one_op.read(tensors, operators, [start], [end])))
    return data_section.inputs_of(model_file.read(folder / "m.tflite"), trust=False)


def photos(folder: Path) -> Path:
    (folder / "photos").mkdir(exist_ok=True)
    Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(folder / "photos" / "black.png")
    return folder / "photos"


def scaled_to(found: data_section.ModelInputs, folder: Path) -> list[float]:
    steps = data_section.data_for(found, photos(folder))["preprocess"]
    return next((step["scale"]["to"] for step in steps if "scale" in step), [0, 255])


@pytest.mark.parametrize(
    ("dtype", "scale", "zero_point", "expected"),
    [
        ("INT8", 1 / 255, -128, [0, 1]),
        ("UINT8", 1 / 255, 0, [0, 1]),
        ("INT8", 0.0039, -128, [0, 1]),  # calibrated with photos that are not quite white
        ("INT8", 1 / 256, -128, [0, 1]),
        ("INT8", 2 / 255, -1, [-1, 1]),
        ("INT8", 1 / 127.5, 0, [-1, 1]),
        ("UINT8", 1 / 127.5, 128, [-1, 1]),
        ("UINT8", 1 / 128, 127, [-1, 1]),
        ("INT8", 0.0077, 0, [-1, 1]),
        ("INT8", 1.0, -128, [0, 255]),
        ("UINT8", 1.0, 0, [0, 255]),
        ("INT8", 1.0, 0, [-128, 127]),
    ],
)
@pytest.mark.parametrize("with_float_ends", [False, True])
def test_the_usual_scales(
    dtype: str, scale: float, zero_point: int, expected: list[float], with_float_ends: bool, tmp_path: Path
) -> None:
    image = Tensor((1, 8, 8, 3), dtype, scales=(scale,), zero_point=zero_point)
    assert scaled_to(inputs(tmp_path, image, with_float_ends=with_float_ends), tmp_path) == expected


@pytest.mark.parametrize(
    ("scale", "zero_point", "held"),
    [
        (4.76 / 255, -14, "0 1, -1 1"),  # the mean and the standard deviation of ImageNet
        (0.6 / 255, -128, "none"),
        (0.2, -128, "0 1"),
        (3.0, 0, "0 1, -1 1, 0 255, -128 127"),
    ],
)
def test_a_scale_that_fits_no_usual_range_is_a_question(
    scale: float, zero_point: int, held: str, tmp_path: Path
) -> None:
    found = inputs(tmp_path, Tensor((1, 8, 8, 3), "INT8", scales=(scale,), zero_point=zero_point))
    with pytest.raises(DataError, match=rf"no usual range of photos.*holds without a cut: {held};.*--range"):
        scaled_to(found, tmp_path)
    assert scaled_to(data_section.with_range(found, (0.0, 1.0)), tmp_path) == [0, 1]


def test_random_samples_fill_the_range_of_the_file(tmp_path: Path) -> None:
    """Random samples show nothing of the training: no usual range is guessed for them."""
    found = inputs(tmp_path, Tensor((1, 8, 8, 3), "INT8", scales=(4.0 / 255,), zero_point=0))
    source = data_section.data_for(found, None)["source"]["random"]
    assert (source["low"], source["high"]) == pytest.approx((-128 * 4 / 255, 127 * 4 / 255))


@pytest.mark.parametrize("limits", [(1.0, 0.0), (0.0, 0.0), (float("nan"), 1.0)])
def test_a_range_that_is_none(limits: tuple[float, float], tmp_path: Path) -> None:
    found = inputs(tmp_path, Tensor((1, 8, 8, 3), "INT8", scales=(1 / 255,), zero_point=-128))
    with pytest.raises(DataError, match="two numbers, the lower one first"):
        data_section.with_range(found, limits)


def test_recordings_for_an_input_of_16_bit_samples(tmp_path: Path) -> None:
    (tmp_path / "sounds").mkdir()
    (tmp_path / "sounds" / "a.wav").write_bytes(data_files.sound(np.zeros(800)))
    found = inputs(tmp_path, Tensor((1, 800), "INT8", scales=(256.0,), zero_point=0))
    with pytest.raises(DataError, match=r"recordings have values from -1 to 1.*--range -32768 32767"):
        data_section.data_for(found, tmp_path / "sounds")
    chosen = data_section.with_range(found, (-32768.0, 32767.0))
    steps = data_section.data_for(chosen, tmp_path / "sounds")["preprocess"]
    assert {"scale": {"from": [-1, 1], "to": [-32768.0, 32767.0]}} in steps
