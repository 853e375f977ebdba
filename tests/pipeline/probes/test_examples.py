"""Examples: the choice of samples, and the files with their pictures."""

from __future__ import annotations

import hashlib
import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from compress.pipeline.probes.examples import LARGEST_BYTES, SIDE, choose, examples
from compress.tasks.base import AnswerDifference, Drawn


def test_the_largest_differences_and_those_near_the_median() -> None:
    sizes = [0.0, 0.1, 3.0, 0.1, 7.0, 0.1, 3.0, 2.0, 0.1, 0.1]
    assert choose(sizes, lambda sample: sample in (1, 5)) == [
        *((sample, "different") for sample in (4, 2, 6, 7)),
        *((sample, "typical") for sample in (3, 8)),  # 1 and 5 have nothing to draw
    ]


def test_equal_answers_are_no_difference() -> None:
    assert choose([0.0] * 5, lambda sample: sample < 3) == [(3, "typical"), (4, "typical")]
    assert choose([0.0] * 5, lambda sample: True) == [(0, "typical"), (1, "typical")]
    assert choose([0.5], lambda sample: True) == [(0, "different")]
    assert choose([0.0, 0.5, 0.0], lambda sample: sample == 0) == [(1, "different"), (2, "typical"), (0, "typical")]


class Stripes:
    """An illustrator that sets the first five rows of images to 0; its texts have the number of the sample."""

    note = "Stripes."

    def __init__(self, count: int, labelled: bool = True) -> None:
        self.count = count
        self.labelled = labelled

    def differences(self) -> list[AnswerDifference]:
        return [AnswerDifference(float(sample), f"it is {sample}") for sample in range(self.count)]

    def is_empty(self, sample: int) -> bool:
        return False

    def label(self, image: Any, sample: int) -> Drawn | None:
        image[:5] = 0
        return Drawn(image, f"label {sample}") if self.labelled else None

    def answers(self, image: Any, sample: int) -> list[Drawn]:
        return [Drawn(image.copy(), f"{name} {sample}") for name in ("before", "after")]


def data(samples: Any) -> Any:
    return SimpleNamespace(
        inputs=lambda split: samples,
        preprocessing=[{"scale": {"from": [0, 255]}}],
        describe=lambda split, index: f"{split}/{index}.png",
    )


@pytest.mark.parametrize(
    ("shape", "shown"),
    [
        ((96, 64, 3), (288, 192)),
        ((640, 480, 3), (320, 240)),
        ((224, 112, 3), (320, 160)),
        ((8, 8, 1), (320, 320)),
        ((1, 3000, 1), (1, 320)),
    ],
)
def test_pictures_are_files_that_the_record_names(shape: Any, shown: Any, tmp_path: Path) -> None:
    samples = np.random.default_rng(0).random((9, *shape), np.float32)
    facts = examples(Stripes(9), data(samples), "test", tmp_path)
    assert facts is not None
    assert facts["samples"] == 9
    assert [example["sample"] for example in facts["examples"]] == [8, 7, 6, 5, 4, 3]
    assert [example["kind"] for example in facts["examples"]] == ["different"] * 4 + ["typical"] * 2
    first = facts["examples"][0]
    assert (first["name"], first["difference"]) == ("test/8.png", "it is 8")
    assert [picture["text"] for picture in first["pictures"]] == ["label 8", "before 8", "after 8"]
    named = [picture for example in facts["examples"] for picture in example["pictures"]]
    assert sorted(picture["file"] for picture in named) == sorted(path.name for path in tmp_path.iterdir())
    for picture in named:
        content = (tmp_path / picture["file"]).read_bytes()
        assert hashlib.sha256(content).hexdigest() == picture["sha256"]
        assert len(content) <= LARGEST_BYTES  # noise is the worst case
        with Image.open(io.BytesIO(content)) as image:
            assert max(image.size) <= SIDE
            assert image.size[::-1] in (shown, tuple(-(-side // 2) for side in shown))
    again = tmp_path / "again"
    again.mkdir()
    assert examples(Stripes(9), data(samples), "test", again) == facts


def test_the_picture_is_the_sample(tmp_path: Path) -> None:
    samples = np.zeros((1, 32, 32, 3), np.float32)
    samples[0, 16:, :, 0] = 1
    facts = examples(Stripes(1, labelled=False), data(samples), "test", tmp_path)
    assert facts is not None
    assert [picture["shows"] for picture in facts["examples"][0]["pictures"]] == ["original", "result"]
    with Image.open(tmp_path / "1-result.jpg") as image:
        pixels = np.asarray(image).astype(int)
    assert np.abs(pixels[300, 100] - [255, 0, 0]).max() < 8
    assert pixels[50, 100].max() < 8


def test_names_do_not_show_folders_of_this_machine(tmp_path: Path) -> None:
    samples = np.zeros((1, 8, 8, 1), np.float32)
    stored = data(samples)
    stored.describe = lambda split, index: f"/home/me/data.npz, sample {index}"
    facts = examples(Stripes(1), stored, "test", tmp_path)
    assert facts is not None
    assert facts["examples"][0]["name"] == "data.npz, sample 0"


def test_no_pictures_of_what_is_no_image(tmp_path: Path) -> None:
    assert examples(Stripes(2), data(np.zeros((2, 50), np.float32)), "test", tmp_path) is None
    assert examples(None, data(np.zeros((2, 8, 8, 3), np.float32)), "test", tmp_path) is None
    assert not list(tmp_path.iterdir())
