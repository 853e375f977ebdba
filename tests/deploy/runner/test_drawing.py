"""Answers drawn into photos, and the files of `--draw`."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import detector_files
import devices
import numpy as np
import pytest
from detector_files import photo
from PIL import Image

from deploy import __main__ as command
from deploy.contract import shapes
from deploy.contract.bundle import Bundle
from deploy.contract.detection import Detections
from deploy.contract.errors import ArgumentError, ImageError
from deploy.contract.preprocessing import Preprocessing
from deploy.runner import drawing
from deploy.runner.answers import Answer, ChosenLabels, NamedOutputs

SIDE = 64
STEPS = [
    {"resize": {"size": [SIDE, SIDE], "fit": "letterbox", "fill": 0}},
    {"scale": {"from": [0, 255], "to": [0, 1]}},
]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A detector of three classes."""
    return detector_files.small_bundle(tmp_path_factory.mktemp("bundle"), SIDE, STEPS)


def stand_in(task: str) -> Any:
    return SimpleNamespace(task=task, preprocessing=Preprocessing(STEPS))


def detections(scores: list[float], boxes: list[list[float]], classes: list[int], labels: list[str]) -> Detections:
    table = np.array(boxes, np.float32).reshape(-1, 4)
    return Detections(table, np.array(classes, np.int64), np.array(scores, np.float32), labels)


def test_a_box_is_drawn_where_it_is_and_nothing_else_changes() -> None:
    image = np.full((100, 200, 3), 128, np.uint8)
    objects = detections([0.9, 0.3], [[0.5, 0.25, 0.9, 0.75], [0, 0, 1, 1]], [1, 0], [])
    result = drawing.drawn(image, objects, stand_in("detection"))
    assert (image == 128).all()
    changed = np.argwhere((result != 128).any(axis=2))
    assert changed[:, 1].min() == 50  # the one with the low score is left out
    assert changed[:, 1].max() == 149
    assert changed[:, 0].max() == 89
    assert tuple(result[70, 50]) == shapes.COLOURS[1]
    assert (result[60:80, 60:140] == 128).all()
    both = drawing.drawn(image, objects, stand_in("detection"), 0.2)
    assert tuple(both[99, 100]) == shapes.COLOURS[0]


def test_keypoints_that_are_visible_are_drawn() -> None:
    image = np.zeros((100, 100, 3), np.uint8)
    points = np.array([[[0.2, 0.3, 0.9], [0.8, 0.8, 0.1]]], np.float32)
    objects = Detections(
        np.array([[0.4, 0.4, 0.5, 0.5]], np.float32), np.array([0]), np.ones(1, np.float32), ["x"], points
    )
    result = drawing.drawn(image, objects, stand_in("detection"))
    assert result[20, 30].any()
    assert not result[80, 80].any()


def test_a_mask_colours_the_part_of_the_photo_that_it_belongs_to() -> None:
    """The photo is twice as wide as high, so that a quarter of the input above it and below it is border."""
    scores = np.zeros((8, 8, 2), np.float32)
    scores[..., 0] = 0.5
    scores[2:6, :4, 1] = 1.0  # the left half of the photo
    image = np.full((50, 100, 3), 200, np.uint8)
    result = drawing.drawn(image, NamedOutputs({"mask": scores}), stand_in("segmentation"))
    assert (result[:, 50:] == 200).all()
    assert (result[:, :50] == ((200 + np.array(shapes.COLOURS[0])) / 2).astype(np.uint8)).all()


def test_other_answers() -> None:
    image = np.zeros((40, 80, 1), np.uint8)
    named = drawing.drawn(image, Answer(np.array([0.2, 0.8], np.float32), ["cat", "dog"]), stand_in("classification"))
    assert named.shape == (40, 80, 3)
    assert named.any()
    points = NamedOutputs({"points": np.array([0.25, 0.5], np.float32)})
    assert drawing.drawn(image, points, stand_in("keypoints"))[20, 20].any()
    with pytest.raises(ImageError, match="cannot be drawn"):
        drawing.drawn(image, points, stand_in("regression"))


def test_odd_answers() -> None:
    """Scores and boxes with NaN, classes without a name, names in other scripts, no objects."""
    image = photo(0)
    nothing = drawing.drawn(image, detections([], [], [], []), stand_in("detection"))
    assert (nothing == image).all()
    box = [0.1, 0.1, 0.9, 0.9]
    odd = detections([float("nan"), 0.9], [box, [0.1, float("nan"), 0.5, 0.5]], [0, 0], ["a"])
    assert (drawing.drawn(image, odd, stand_in("detection")) == image).all()
    for labels in (["a"], ["\u732b"] * 9, ["caf\u00e9\n" * 50] * 9, [""] * 9, []):
        named = drawing.drawn(image, detections([0.9], [box], [7], labels), stand_in("detection"))
        assert (named != image).any()
    points = NamedOutputs({"points": np.array([np.nan, 0.5, np.inf, 0.5, 1e30, -1e30, 0.5, 0.5], np.float32)})
    changed = (drawing.drawn(image, points, stand_in("keypoints")) != image).any(axis=2)
    assert changed.sum() == 16  # only one point is drawn
    unsure = Answer(np.array([np.nan, 0.5], np.float32), ["x", "y"])
    assert (drawing.drawn(image, unsure, stand_in("classification")) != image).any()


def test_names_in_other_scripts() -> None:
    assert shapes.ascii_of(shapes.title("caf\u00e9 \u00fc", 3, 0.5)) == "cafe u 0.50"
    assert shapes.ascii_of(shapes.title("\u732b", 3, 0.5)) == "class 3 0.50"
    assert shapes.ascii_of(shapes.Caption(0, 0, "a \u732b", (1, 2, 3))) == "a ?"


@pytest.mark.parametrize("size", [(1, 1), (1, 50), (50, 1), (3, 4)])
@pytest.mark.parametrize("shape", [(), (1,), (3,)])
def test_images_of_a_few_pixels(size: tuple[int, int], shape: tuple[int, ...]) -> None:
    for box in ([0, 0, 1, 1], [0.5, 0.5, 0.5, 0.5], [1, 1, 1, 1]):
        objects = detections([0.9], [box], [0], ["a"])
        assert drawing.drawn(np.zeros(size + shape, np.uint8), objects, stand_in("detection")).shape == (*size, 3)


@pytest.mark.parametrize("dtype", [np.int8, np.bool_, np.uint16, np.float32, np.float64])
def test_arrays_of_other_types(dtype: Any) -> None:
    image = np.ones((30, 40, 3), dtype)
    if np.dtype(dtype).kind == "f":
        image[0, 0] = np.nan
        image[0, 1] = 300
    result = drawing.drawn(image, detections([], [], [], []), stand_in("detection"))
    assert (result[1:] == 1).all()


@pytest.mark.parametrize("wrong", [np.zeros((5, 5, 4), np.uint8), {"a": np.zeros(4)}, np.array([["x"]]), np.zeros(9)])
def test_what_is_no_image(wrong: Any) -> None:
    with pytest.raises(ImageError, match="only images of 1 or 3 channels"):
        drawing.drawn(wrong, detections([], [], [], []), stand_in("detection"))


def test_a_thin_line_for_a_small_box() -> None:
    image = np.full((2000, 3000, 3), 90, np.uint8)
    objects = detections([0.9, 0.9], [[0.5, 0.5, 0.51, 0.51], [0.6, 0.1, 0.9, 0.9]], [0, 1], ["", ""])
    result = drawing.drawn(image, objects, stand_in("detection"))
    middle = result[1010, 1500:1530, 0]
    assert (middle != 90).sum() == 4  # two lines of 2 pixels, and the object between them
    assert (result[1500, 300:310] != 90).any(axis=1).sum() == 8


def test_text_grows_with_the_image() -> None:
    heights = []
    for side in (100, 480, 3000):
        image = np.zeros((side, side, 3), np.uint8)
        changed = drawing.drawn(image, Answer(np.ones(1, np.float32), ["x"]), stand_in("classification")).any(axis=2)
        heights.append(int(changed.any(axis=1).sum()))
    assert heights[0] == heights[1]
    assert 8 <= heights[0] <= 16
    assert 50 <= heights[2] <= 80


def test_text_without_a_scalable_font(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shapes, "_font", lambda height: None)
    letters = np.asarray(shapes._letters("dog 0.5", 60))
    assert letters.shape == (55, 6 * 7 * 5)  # the letters of 11 pixels, five times as large
    assert (letters.reshape(11, 5, 42, 5) == letters.reshape(11, 5, 42, 5)[:, :1, :, :1]).all()
    test_text_grows_with_the_image()


def test_captions_stay_in_the_image_and_beside_small_boxes() -> None:
    image = np.full((200, 200, 3), 90, np.uint8)
    small = drawing.drawn(image, detections([0.9], [[0, 0.9, 0.05, 0.95]], [0], ["abc"]), stand_in("detection"))
    assert (small[3:8, 182:188] == 90).all()  # the object is not covered
    rows = np.flatnonzero((small != 90).any(axis=(1, 2)))
    assert rows.min() == 0
    assert 20 <= rows.max() <= 30
    large = drawing.drawn(image, detections([0.9], [[0, 0, 1, 1]], [0], ["abc"]), stand_in("detection"))
    assert (large[30:190, 10:190] == 90).all()


def test_a_mask_leaves_out_what_the_model_has_not_seen() -> None:
    opened = SimpleNamespace(task="segmentation", preprocessing=Preprocessing([{"crop": {"size": [50, 50]}}]))
    image = np.full((50, 100, 3), 200, np.uint8)
    result = drawing.drawn(image, NamedOutputs({"mask": np.ones((8, 8, 1), np.float32)}), opened)
    assert (result[:, 25:75] != 200).any(axis=2).all()
    assert (result[:, :25] == 200).all()
    assert (result[:, 75:] == 200).all()
    odd = SimpleNamespace(task="segmentation", preprocessing=Preprocessing([{"reshape": {"shape": [-1]}}]))
    with pytest.raises(ImageError, match="the mask cannot be drawn: after reshape"):
        drawing.drawn(image, NamedOutputs({"mask": np.ones((8, 8, 1), np.float32)}), odd)


def test_chosen_labels_are_lines() -> None:
    chosen = ChosenLabels({}, np.array([0.9, 0.2, 0.8], np.float32), ["a", "b"])
    result = drawing.drawn(np.zeros((100, 100, 3), np.uint8), chosen, stand_in("multi_label"))
    assert 2 * shapes.LEAST_HEIGHT - 4 <= result.any(axis=(1, 2)).sum() <= 2 * shapes.LEAST_HEIGHT + 6


def test_an_image_that_the_format_cannot_hold() -> None:
    with pytest.raises(ImageError, match=r"cannot be written as \.jpg"):
        drawing.encoded(np.zeros((1, 70000, 3), np.uint8), ".JPG")
    with pytest.raises(ImageError, match=r"'\.gif' is not the suffix of an image"):
        drawing.encoded(np.zeros((1, 7, 3), np.uint8), ".gif")


def pixels(path: Path) -> np.ndarray:
    with Image.open(path) as image:
        return np.asarray(image)


def test_one_photo_and_a_folder_of_photos(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "photos").mkdir()
    for number in range(2):
        Image.fromarray(photo(number)).save(tmp_path / "photos" / f"{number}.png")
    (tmp_path / "photos" / "notes.txt").write_text("no photo")
    (tmp_path / "photos" / "._0.png").write_text("a file of macOS")
    (tmp_path / "photos" / "folder.png").mkdir()
    one = tmp_path / "photos" / "0.png"
    assert command.main(["run", str(path), str(one), "--draw", str(tmp_path / "out.jpg"), "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["answers"]
    assert row["drawn"] == str(tmp_path / "out.jpg")
    assert pixels(tmp_path / "out.jpg").shape == (120, 160, 3)
    drawn = tmp_path / "drawn"
    assert command.main(["run", str(path), str(tmp_path / "photos"), "--draw", str(drawn)]) == 0
    assert [line.partition(": ")[0] for line in capsys.readouterr().out.splitlines()] == [
        str(tmp_path / "photos" / name) for name in ("0.png", "1.png")
    ]
    assert sorted(file.name for file in drawn.iterdir()) == ["0.png", "1.png"]
    assert (pixels(drawn / "0.png") != photo(0)).any()


@pytest.mark.parametrize(
    ("draw", "samples", "code", "part"),
    [
        ("photos/0.png", ["photos/0.png"], 2, "would overwrite the sample photos/0.png"),
        ("photos", ["photos"], 2, "would overwrite the sample photos/0.png"),
        ("photos", ["elsewhere/0.png", "photos/0.png"], 2, "would overwrite the sample photos/0.png"),
        ("link", ["photos"], 2, "would overwrite the sample photos/0.png"),
        ("missing/out.png", ["photos/0.png"], 6, "--draw: the folder does not exist"),
        ("out.txt", ["photos/0.png"], 2, "--draw out.txt does not end like an image"),
        ("out", ["photos/0.png"], 2, "use one of .jpg, .jpeg, .png, .bmp, or out/ for a folder"),
        ("", ["photos/0.png"], 2, "--draw '' does not end like an image"),
        ("out.png", ["photos"], 2, "--draw out.png ends like one image"),
        ("out.png", [], 2, "the bundle has no golden inputs"),
        ("photos/0.png", ["photos/0.png", "elsewhere/0.png"], 2, "--draw photos/0.png is a file"),
        ("file/drawn", ["photos"], 6, "a part of the path is a file"),
    ],
)
def test_files_that_must_not_be_drawn_into(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    draw: str, samples: list[str], code: int, part: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    for number, folder in enumerate(("photos", "elsewhere")):
        Path(folder).mkdir()
        Image.fromarray(photo(number)).save(f"{folder}/0.png")
    Path("link").symlink_to("photos")
    Path("file").write_text("no folder")
    before = set(tmp_path.rglob("*"))
    if not samples:
        draw = "drawn"
    assert command.main(["run", str(path), *samples, "--draw", draw]) == code
    shown = capsys.readouterr()
    assert part in shown.err
    assert shown.out == ""  # refused before the first inference
    assert set(tmp_path.rglob("*")) - {tmp_path / "drawn"} == before
    assert (pixels(Path("photos/0.png")) == photo(0)).all()


def test_samples_of_one_name_do_not_overwrite_each_other(path: Path, tmp_path: Path) -> None:
    for folder in ("a", "b", "c"):
        (tmp_path / folder).mkdir()
        Image.fromarray(photo(ord(folder))).save(tmp_path / folder / "1.jpg")
    np.save(tmp_path / "c" / "1.npy", photo(5))
    Image.fromarray(photo(6)).save(tmp_path / "c" / "1-2.jpg")
    samples = [str(tmp_path / folder) for folder in "abc"]
    assert command.main(["run", str(path), *samples, "--draw", f"{tmp_path}/new/drawn", "--out", f"{tmp_path}/o"]) == 0
    rows = json.loads((tmp_path / "o").read_text())["answers"]
    names = [(Path(row["image"]).name, Path(row["drawn"]).name) for row in rows]
    assert [source for source, _ in names] == ["1.jpg", "1.jpg", "1-2.jpg", "1.jpg", "1.npy"]
    assert [target for _, target in names] == ["1.jpg", "1-2.jpg", "1-2-2.jpg", "1-3.jpg", "1-4.jpg"]
    assert len(list((tmp_path / "new" / "drawn").iterdir())) == 5


def test_one_photo_into_a_folder_and_golden_inputs(tmp_path: Path) -> None:
    bundle_path = tmp_path / "tiny.coralline"
    bundle_path.write_bytes(devices.packed(samples=0))
    assert command.main(["run", str(bundle_path), "--role", "int8", "--draw", str(tmp_path / "golden")]) == 0
    assert sorted(file.name for file in (tmp_path / "golden").iterdir()) == [f"golden-input-{n}.jpg" for n in range(3)]
    np.save(tmp_path / "grey.npy", devices.images(1)[0][..., 0])
    one = ["run", str(bundle_path), "--role", "int8", str(tmp_path / "grey.npy"), "--draw"]
    for folder in ("golden", "other/"):
        assert command.main([*one, f"{tmp_path}/{folder}"]) == 0
        assert (tmp_path / folder / "grey.jpg").exists()


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (["--draw", "out.png", "--least-score", "1.5"], "--least-score is 1.5; allowed: 0 to 1"),
        (["--draw", "out.png", "--least-score", "nan"], "--least-score is nan"),
        (["--least-score", "0.5"], "--least-score belongs to --draw"),
        (["--tile-overlap", "0.5"], "--tile-overlap belongs to --tiles"),
        (["--tiles", "2"], "--tiles 2 is not a number of tiles"),
        (["--frame-size", "4x4"], "--frame-size belongs to frames from stdin"),
    ],
)
def test_options_out_of_range(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], part: str
) -> None:
    np.save(tmp_path / "photo.npy", photo(0))
    assert command.main(["run", str(path), str(tmp_path / "photo.npy"), *options]) == ArgumentError.exit_code
    assert part in capsys.readouterr().err


def test_answers_that_cannot_be_drawn_are_refused_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    opened = SimpleNamespace(answers="arrays", task="embeddings")
    with pytest.raises(ArgumentError, match="the answers of the task embeddings cannot be drawn"):
        drawing.check(cast("Bundle", opened))
    bundle_path = tmp_path / "tiny.coralline"
    bundle_path.write_bytes(devices.packed(samples=0))
    assert command.main(["run", str(bundle_path), "--role", "int8", "--tiles", "2x2"]) == ArgumentError.exit_code
    assert "the task of this bundle is classification; allowed: detection" in capsys.readouterr().err


def test_options_may_be_in_front_of_samples(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [str(tmp_path / f"{number}.npy") for number in range(3)]
    for number, file in enumerate(files):
        np.save(file, photo(number))
    assert command.main(["run", str(path), files[0], "--top", "1", files[1], "--device", "cpu", files[2]]) == 0
    assert [line.partition(": ")[0] for line in capsys.readouterr().out.splitlines()] == files
    for wrong in (["run", str(path), "--darw", files[0]], ["verify", str(path), files[0]]):
        with pytest.raises(SystemExit):
            command.main(wrong)
        assert "unrecognized arguments" in capsys.readouterr().err


@pytest.mark.parametrize("python", devices.pythons())
def test_drawing_on_every_interpreter(path: Path, python: str, tmp_path: Path) -> None:
    """Without Pillow: the error names the missing library."""
    np.save(tmp_path / "photo.npy", photo(0))
    done = devices.runner("run", path, tmp_path / "photo.npy", "--draw", tmp_path / "out.png", python=python)
    assert done.returncode == 0 or "Pillow is not installed" in done.stderr, done.stderr
    assert (tmp_path / "out.png").exists() == (done.returncode == 0)
