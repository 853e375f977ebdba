"""Answers drawn into photos, and the frames of a video from stdin."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import detector_files
import devices
import numpy as np
import pytest
from one_op import Tensor
from PIL import Image

from compress.tflite import graph
from deploy import __main__ as command
from deploy import drawing, frames
from deploy.answers import Answer, NamedOutputs
from deploy.contract.bundle import Bundle
from deploy.contract.detection import Detections
from deploy.contract.errors import ArgumentError, ImageError

SIDE = 64
STEPS = [
    {"resize": {"size": [SIDE, SIDE], "fit": "letterbox", "fill": 0}},
    {"scale": {"from": [0, 255], "to": [0, 1]}},
]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A detector of three classes."""
    described = detector_files.specification("ltrb", SIDE)
    given = Tensor((1, SIDE, SIDE, 3), "INT8", scales=(1 / 255,), zero_point=-128)
    content = graph.serialize(detector_files.from_image(described, 3, given))
    path = tmp_path_factory.mktemp("bundle") / "d.coralline"
    path.write_bytes(detector_files.bundle_of(content, described, STEPS, ["a", "b", "c"]))
    return path


def photo(seed: int, height: int = 120, width: int = 160) -> np.ndarray:
    random = np.random.default_rng(seed)
    return np.kron(random.integers(0, 256, (height // 20, width // 20, 3)), np.ones((20, 20, 1))).astype(np.uint8)


def stand_in(task: str) -> Any:
    from deploy.contract.preprocessing import Preprocessing

    return SimpleNamespace(task=task, preprocessing=Preprocessing(STEPS))


def test_a_box_is_drawn_where_it_is_and_nothing_else_changes() -> None:
    image = np.full((100, 200, 3), 128, np.uint8)
    found = Detections(
        np.array([[0.5, 0.25, 0.9, 0.75], [0.0, 0.0, 1.0, 1.0]], np.float32),
        np.array([1, 0]),
        np.array([0.9, 0.3], np.float32),
    )
    result = drawing.drawn(image, found, stand_in("detection"))
    assert (image == 128).all()
    changed = np.argwhere((result != 128).any(axis=2))
    assert changed[:, 1].min() == 50  # the one with the low score is left out
    assert changed[:, 1].max() == 149
    assert changed[:, 0].max() == 89
    assert tuple(result[70, 50]) == drawing.COLOURS[1]
    assert (result[60:80, 60:140] == 128).all()
    both = drawing.drawn(image, found, stand_in("detection"), 0.2)
    assert tuple(both[99, 100]) == drawing.COLOURS[0]


def test_keypoints_that_are_visible_are_drawn() -> None:
    image = np.zeros((100, 100, 3), np.uint8)
    points = np.array([[[0.2, 0.3, 0.9], [0.8, 0.8, 0.1]]], np.float32)
    found = Detections(
        np.array([[0.4, 0.4, 0.5, 0.5]], np.float32), np.array([0]), np.ones(1, np.float32), ["x"], points
    )
    result = drawing.drawn(image, found, stand_in("detection"))
    assert result[20, 30].any()
    assert not result[80, 80].any()


def test_a_mask_colours_the_part_of_the_photo_that_it_belongs_to() -> None:
    """The photo is twice as wide as high: a quarter of the input above and below it is border."""
    scores = np.zeros((8, 8, 2), np.float32)
    scores[..., 0] = 0.5
    scores[2:6, :4, 1] = 1.0  # the left half of the photo
    image = np.full((50, 100, 3), 200, np.uint8)
    result = drawing.drawn(image, NamedOutputs({"mask": scores}), stand_in("segmentation"))
    assert (result[:, 50:] == 200).all()
    assert (result[:, :50] == ((200 + np.array(drawing.COLOURS[0])) / 2).astype(np.uint8)).all()


def test_other_answers() -> None:
    image = np.zeros((40, 80, 1), np.uint8)
    named = drawing.drawn(image, Answer(np.array([0.2, 0.8], np.float32), ["cat", "dog"]), stand_in("classification"))
    assert named.shape == (40, 80, 3)
    assert named.any()
    points = NamedOutputs({"points": np.array([0.25, 0.5], np.float32)})
    assert drawing.drawn(image, points, stand_in("keypoints"))[20, 20].any()
    with pytest.raises(ImageError, match="cannot be drawn"):
        drawing.drawn(image, points, stand_in("regression"))
    with pytest.raises(ImageError, match="only images"):
        drawing.drawn(np.zeros(100, np.float32), points, stand_in("regression"))
    with pytest.raises(ImageError, match="not the suffix"):
        drawing.encoded(named, ".txt")


def test_one_photo_and_a_folder_of_photos(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "photos").mkdir()
    for number in range(2):
        Image.fromarray(photo(number)).save(tmp_path / "photos" / f"{number}.png")
    (tmp_path / "photos" / "notes.txt").write_text("no photo")
    one = tmp_path / "photos" / "0.png"
    assert command.main(["run", str(path), str(one), "--draw", str(tmp_path / "out.jpg"), "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["answers"]
    assert row["drawn"] == str(tmp_path / "out.jpg")
    assert Image.open(tmp_path / "out.jpg").size == (160, 120)
    drawn = tmp_path / "drawn"
    assert command.main(["run", str(path), str(tmp_path / "photos"), "--draw", str(drawn)]) == 0
    assert sorted(each.name for each in drawn.iterdir()) == ["0.png", "1.png"]
    assert (np.asarray(Image.open(drawn / "0.png")) != photo(0)).any()
    assert command.main(["run", str(path), str(one), "--draw", str(one)]) == errors_exit()
    assert (np.asarray(Image.open(one)) == photo(0)).all()


def errors_exit() -> int:
    return ArgumentError("", "").exit_code


def jpegs(count: int) -> list[bytes]:
    found = []
    for number in range(count):
        content = io.BytesIO()
        preview = io.BytesIO()
        Image.fromarray(photo(9)).save(preview, "JPEG")  # metadata may hold an image of its own
        Image.fromarray(photo(number)).save(
            content, "JPEG", progressive=number % 2, exif=b"Exif\0\0" + preview.getvalue()[:9000]
        )
        found.append(content.getvalue())
    return found


class Slow(io.BytesIO):
    """A pipe that gives a few bytes at a time."""

    def read1(self, size: int | None = -1) -> bytes:
        del size
        return super().read(77)


def test_frames_are_cut_out_of_a_stream() -> None:
    expected = jpegs(3)
    assert list(frames.jpegs(Slow(b"".join(expected)))) == expected
    assert list(frames.jpegs(io.BytesIO(b""))) == []
    images = np.random.default_rng(0).integers(0, 256, (2, 5, 7, 3)).astype(np.uint8)
    np.testing.assert_array_equal(list(frames.raw(Slow(images.tobytes()), 7, 5)), images)


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (b"GIF89a....", "no JPEG image"),
        (jpegs(1)[0][:-40], "ends in the middle"),
        (jpegs(1)[0] + b"x", "ends in the middle"),
        (b"\xff\xd8\xff\xe0\x00\x04ab12", "damaged"),
    ],
)
def test_streams_of_something_else(content: bytes, part: str) -> None:
    with pytest.raises(ImageError, match=part):
        list(frames.jpegs(Slow(content)))


def test_a_frame_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "MAX_BYTES", 200_000)
    endless = io.BytesIO(b"\xff\xd8\xff\xda\x00\x04ab" + bytes(1_000_000))
    with pytest.raises(ImageError, match="more than 200000 bytes"):
        list(frames.jpegs(endless))


@pytest.mark.parametrize("size", ["640", "0x4", "640x480x3", "-1x5", ""])
def test_sizes_of_frames(size: str) -> None:
    with pytest.raises(ArgumentError, match="not a size"):
        frames.size_of(size)


def test_a_video_from_stdin(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b"".join(jpegs(3)))))
    assert command.main(["run", str(path), "-", "--json", "--draw", str(tmp_path / "drawn")]) == 0
    *rows, last = map(json.loads, capsys.readouterr().out.splitlines())
    assert [row["image"] for row in rows] == ["frame-000001", "frame-000002", "frame-000003"]
    assert last["frames"] == 3
    assert len(list((tmp_path / "drawn").iterdir())) == 3
    pixels = photo(0).tobytes()
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(pixels)))
    assert command.main(["run", str(path), "-", "--frame-size", "160x120"]) == 0
    first, count = capsys.readouterr().out.splitlines()
    assert first.startswith("frame-000001: ")
    assert count == "1 frames"
    assert command.main(["run", str(path), "-", "x.png"]) == errors_exit()
    assert command.main(["run", str(path), "x.png", "--frame-size", "160x120"]) == errors_exit()


@pytest.mark.parametrize("python", devices.pythons())
def test_drawing_on_every_interpreter(path: Path, python: str, tmp_path: Path) -> None:
    """Without Pillow: what is missing is said."""
    np.save(tmp_path / "photo.npy", photo(0))
    done = devices.runner("run", path, tmp_path / "photo.npy", "--draw", tmp_path / "out.png", python=python)
    assert done.returncode == 0 or "neither Pillow nor OpenCV" in done.stderr, done.stderr
    assert (tmp_path / "out.png").exists() == (done.returncode == 0)


def test_the_bundle_is_one(path: Path) -> None:
    assert Bundle(path.read_bytes()).task == "detection"
