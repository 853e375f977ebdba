"""Outputs that join quantities of different scale become outputs of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import compress
from compress.model.ir.tensorflow import run
from compress.tasks.split_outputs import split_outputs

SAMPLES = np.random.default_rng(0).random((16, 6, 5, 3), np.float32)


def detector(keras: Any, form: str = "last", scale: float = 640.0) -> Any:
    """Return a model that joins boxes and scores in one output.

    Args:
        keras: the library.
        form: "last": the concatenation is the last layer. "moved": layers that move values follow. "levels": two such
            outputs are joined along the positions. "one layer": one layer computes boxes and scores.
        scale: the size of the boxes.
    """
    layers = keras.layers
    keras.utils.set_random_seed(1)
    image = keras.Input((6, 5, 3), name="image")

    def level() -> Any:
        boxes = layers.Rescaling(scale)(layers.Conv2D(4, 1, activation="sigmoid")(image))
        scores = layers.Conv2D(7, 1, activation="sigmoid")(image)
        return layers.Concatenate()([boxes, scores])

    joined = level()
    if form == "moved":
        joined = layers.Permute((2, 1))(layers.Reshape((30, 11))(joined))
    if form == "levels":
        joined = layers.Concatenate(axis=1)([layers.Reshape((30, 11))(tensor) for tensor in (joined, level())])
    if form == "one layer":
        factors = layers.Conv2D(11, 1, use_bias=False)
        joined = factors(layers.Conv2D(11, 1, activation="sigmoid")(image))
        factors.set_weights([np.diag([scale] * 4 + [1.0] * 7)[np.newaxis, np.newaxis]])
    return keras.Model(image, joined)


@pytest.mark.parametrize(("form", "axis"), [("last", 3), ("moved", 1), ("levels", 2)])
def test_the_parts_have_the_values_of_the_whole(keras: Any, form: str, axis: int) -> None:
    model = detector(keras, form)
    expected = np.asarray(run(model, SAMPLES))
    split, notes = split_outputs(model, SAMPLES)
    boxes, scores = (np.asarray(part) for part in run(split, SAMPLES))
    assert (boxes.shape[axis], scores.shape[axis]) == (4, 7)
    np.testing.assert_allclose(np.concatenate([boxes, scores], axis=axis), expected, rtol=1e-6)
    assert len(notes) == 1
    assert "joins values of different size" in notes[0]
    again, _ = split_outputs(model, SAMPLES)
    assert again.output_names == split.output_names


def test_outputs_of_one_scale_stay(keras: Any) -> None:
    for model in (detector(keras, scale=1.0), detector(keras, "one layer")):
        assert split_outputs(model, SAMPLES) == (model, [])


@pytest.mark.parametrize("form", ["moved", "one layer"])
def test_an_export_splits_the_output_or_says_what_it_costs(keras: Any, tmp_path: Path, form: str) -> None:
    detector(keras, form).save(tmp_path / "model.keras")
    np.savez(tmp_path / "x.npz", x=np.random.default_rng(0).random((80, 6, 5, 3), np.float32))
    result = compress.export(tmp_path / "model.keras", calibrate=tmp_path / "x.npz", out=tmp_path / "out")
    outputs = result.facts["outputs"]
    if form == "moved":
        assert [output["shape"] for output in outputs] == [[4, 30], [7, 30]]
        assert min(output["sqnr_db"] for output in outputs) > 25
        assert result.facts["verdict"] == "usable with warnings"
        return
    assert outputs[0]["sqnr_db"] > 35
    assert result.facts["verdict"] == "not usable"
    assert result.run.status == "not usable"
    reason = " ".join(result.facts["warnings"])
    assert " of 11 channels of the output" in reason
    assert "on axis 3) are constant in the result" in reason
    assert "end the model in front of the operator that joins them" in reason
