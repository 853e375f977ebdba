"""`check --sizes`: the input sizes at which all operators of a model are mapped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from compress.surface.cli.main import main


@pytest.mark.parametrize("text", ["", "0:64", "64:5000", "64:128:0", "a", "64:128:32:1", "-64", "640:160"])
def test_sizes_that_are_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "model.keras", f"--sizes={text}"]) != 0
    assert "is not FROM:TO:STEP" in capsys.readouterr().err


def test_an_unknown_family_is_refused_with_the_families(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "model.keras", "--sizes", "64", "--detector", "yolov0"]) != 0
    assert "'yolov0' is not a family of detectors; allowed: auto, yolov3" in capsys.readouterr().err


@pytest.mark.tensorflow
def test_each_size_is_checked_and_the_largest_is_named(
    keras: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    image = keras.Input((64, 64, 3))
    # Two layers whose cells do not match at sizes that are not multiples of 4.
    down = keras.layers.Conv2D(4, 3, 4, padding="same")(image)
    up = keras.layers.UpSampling2D(4, interpolation="nearest")(down)
    keras.Model(image, keras.layers.Add()([keras.layers.Conv2D(4, 1)(image), up])).save(tmp_path / "model.keras")
    assert main(["check", str(tmp_path / "model.keras"), "--sizes", "64:70:2", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["largest"] == 68
    rows = {row["size"]: row for row in result["sizes"]}
    assert list(rows) == [64, 66, 68, 70]
    assert rows[68]["mapped"] == rows[68]["operators"] > 0
    assert "the model does not work with this size" in rows[66]["summary"]
    assert rows[64]["latency_ms"]
