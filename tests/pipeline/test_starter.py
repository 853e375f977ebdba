"""`init`: first pipelines for folders, tables, boxes, sounds and arrays, with and without a model; all are valid."""

from __future__ import annotations

import json
import re
import zipfile
from pathlib import Path
from typing import Any

import data_files
import numpy as np
import pytest
import tiny
from one_op import Op, Tensor, content, integers
from PIL import Image

from compress.core.errors import DataError
from compress.pipeline.schema import Pipeline, load
from compress.pipeline.starter import recognized, starter
from compress.surface.cli.main import main


def photos(folder: Path, names: dict[str, int], side: int = 48) -> Path:
    """Write random photos; `names` has the folders, and the number of photos in each."""
    draw = np.random.default_rng(0)
    for name, count in names.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        for index in range(count):
            pixels = draw.integers(0, 256, (side, side + 8, 3), np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{index}.png")
    return folder


def written(tmp_path: Path, data: Path, model: Path | None = None, **options: Any) -> tuple[Pipeline, str]:
    """Return the suggested pipeline, loaded, and its text."""
    first = starter(data, model, tmp_path, "first", **options)
    path = tmp_path / "first.yaml"
    path.write_text(first.text)
    return load(path), first.text


def settings(pipeline: Pipeline, stage: str) -> dict[str, Any]:
    return next(entry[stage] for entry in pipeline.settings["stages"] if stage in entry)


def test_class_folders_get_a_small_network_of_their_size(tmp_path: Path) -> None:
    pipeline, text = written(tmp_path, photos(tmp_path / "shop", {"apple": 20, "pear": 20}))
    assert pipeline.settings["model"]["builder"] == "fused_bottleneck"
    assert pipeline.settings["data"]["source"] == {"folder": {"path": "shop"}}  # relative to the file
    assert pipeline.settings["data"]["preprocess"][0] == {"resize": {"size": [64, 64], "filter": "bilinear"}}
    assert pipeline.settings["data"]["preprocess"][1] == {"scale": {"from": [0, 255], "to": [-1, 1]}}
    train = settings(pipeline, "train")
    assert (train["epochs"], train["batch_size"]) == (150, 32)  # few samples: the largest number of epochs
    assert train["augment"]["mixup"] == 0.2
    assert "init --model FILE" in text


def test_all_unusable_files_are_listed_and_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = photos(tmp_path / "shop", {"apple": 80, "pear": 80})
    bad = [f"shop/{name}/{index}.png" for name in ("apple", "pear") for index in range(0, 80, 7)]
    for name in bad:
        content = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(content[: len(content) // 2])
    (data / "pear" / "apple.png").write_bytes((data / "apple" / "1.png").read_bytes())
    out = tmp_path / "first.yaml"
    assert main(["init", str(data), "-o", str(out)]) == 0
    said = capsys.readouterr().out
    assert "24 samples cannot be read, and `corrupt: skip` leaves them out" in said
    assert [name for name in bad if f"{name}: is not a readable image" not in said] == []
    assert re.search(
        r"equal samples are in two classes: \S+apple/1\.png \(apple\) and \S+pear/apple\.png \(pear\)", said
    )
    assert load(out).settings["data"]["source"] == {"folder": {"path": "shop", "corrupt": "skip"}}
    assert (
        "# 24 samples cannot be read, and `corrupt: skip` leaves them out; without it, a run refuses" in out.read_text()
    )


def test_unusable_samples_of_a_source_that_leaves_none_out(tmp_path: Path) -> None:
    x = np.zeros((200, 20, 3), np.float32)
    x[::20] = np.nan
    np.savez(tmp_path / "motion.npz", x=x, y=np.arange(200) % 4)
    message = r"10 samples cannot be used: .*sample 0: has values.*sample 180: has values.*; remove or repair them$"
    with pytest.raises(DataError, match=message):
        starter(tmp_path / "motion.npz", None, tmp_path, "first")


def test_more_samples_need_fewer_epochs(tmp_path: Path) -> None:
    arrays = {"x": np.zeros((5000, 20, 3), np.float32), "y": np.arange(5000) % 4}
    np.savez(tmp_path / "motion.npz", **arrays)
    pipeline, _ = written(tmp_path, tmp_path / "motion.npz")
    assert pipeline.settings["model"]["builder"] == "conv_1d"
    assert "augment" not in settings(pipeline, "train")
    assert settings(pipeline, "train")["epochs"] == round(4000 * 32 / 3600)


def test_arrays_with_other_names_are_found(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", samples=np.ones((40, 9, 2), np.float32), kind=np.arange(40) % 2)
    assert recognized(tmp_path / "a.npz", tmp_path) == {"npz": {"file": "a.npz", "x": "samples", "y": "kind"}}


@pytest.mark.parametrize("damage", ["text", "empty", "cut", "members", "flipped"])
def test_damaged_arrays(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "a.npz"
    np.savez_compressed(path, x=np.ones((40, 9, 2), np.float32), y=np.arange(40) % 2)
    content = path.read_bytes()
    start = content.index(b"\x93NUMPY") if b"\x93NUMPY" in content else 60
    damaged = {
        "text": b"no archive",
        "empty": b"",
        "cut": content[: len(content) // 2],
        "flipped": content[:start] + bytes(20) + content[start + 20 :],
    }
    path.write_bytes(damaged.get(damage, content))
    if damage == "members":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("x.npy", b"\x93NUMPY\x01\x00\x10\x00{'descr': [[[[\n\n")
    with pytest.raises(DataError, match=r"a\.npz: .*cannot be read|a\.npz: is not a usable"):
        recognized(path, tmp_path)


def test_a_table_with_several_columns_of_labels_needs_the_name_of_one(tmp_path: Path) -> None:
    folder = photos(tmp_path / "shop", {"images": 40})
    rows = [f"images/{index}.png,{index % 2},kind{index % 4}" for index in range(40)]
    (folder / "labels.csv").write_text("\n".join(["file,coarse,fine", *rows]))
    with pytest.raises(DataError, match=r"several columns may be the label: coarse, fine.*--label COLUMN"):
        written(tmp_path, folder)
    pipeline, _ = written(tmp_path, folder, label="fine")
    assert pipeline.settings["data"]["source"]["folder"]["labels"] == {
        "table": "labels.csv",
        "file": "file",
        "label": "fine",
    }
    assert len(pipeline.data.class_names) == 4
    with pytest.raises(DataError, match=r"no column of labels 'fin'.*did you mean 'fine'"):
        written(tmp_path, folder, label="fin")


def test_photos_without_labels_need_a_model(tmp_path: Path) -> None:
    folder = photos(tmp_path / "photos", {".": 12}, side=4)
    with pytest.raises(DataError, match=r"nothing to train.*--model FILE"):
        written(tmp_path, folder)


def test_a_class_that_is_empty_is_not_taken_for_photos_without_labels(tmp_path: Path) -> None:
    folder = photos(tmp_path / "photos", {"a": 12, "b": 0})
    with pytest.raises(DataError, match=r"'b'.*contains no samples"):
        written(tmp_path, folder)


def test_boxes_get_a_detector(tmp_path: Path) -> None:
    folder = photos(tmp_path / "cards", {".": 10}, side=64)
    box = "<bndbox><xmin>2</xmin><ymin>3</ymin><xmax>30</xmax><ymax>40</ymax></bndbox>"
    for index in range(10):
        size = "<size><width>72</width><height>64</height><depth>3</depth></size>"
        element = f"<object><name>ace</name>{box}</object>"
        text = f"<annotation><filename>{index}.png</filename>{size}{element}</annotation>"
        (folder / f"{index}.xml").write_text(text)
    pipeline, _ = written(tmp_path, folder)
    assert pipeline.settings["model"]["builder"] == "anchor_free"
    assert pipeline.data.task == "detection"
    assert "mixup" not in settings(pipeline, "train")["augment"]


def test_recordings_get_features_of_their_rate(tmp_path: Path) -> None:
    for name in ("yes", "no"):
        (tmp_path / "words" / name).mkdir(parents=True)
        for index in range(12):
            (tmp_path / "words" / name / f"{index}.wav").write_bytes(data_files.sound(np.zeros(4000)))
    pipeline, _ = written(tmp_path, tmp_path / "words")
    assert pipeline.settings["data"]["source"] == {"wav": {"path": "words", "rate": 8000, "seconds": 0.5}}
    steps = pipeline.settings["data"]["preprocess"]
    assert steps[1] == {"log_mel": {"rate": 8000, "frame": 256, "step": 128, "bins": 40}}


@pytest.mark.parametrize("name", ["missing", "empty"])
def test_what_is_not_recognized_is_refused_with_what_is(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="does not exist" if name == "missing" else "class folders of photos"):
        recognized(tmp_path / name, tmp_path)


@pytest.mark.tensorflow
def test_a_model_of_other_classes_gets_a_new_head(keras: Any, tmp_path: Path) -> None:
    layers = keras.layers
    image = keras.Input((96, 96, 3))
    x = layers.GlobalAveragePooling2D()(layers.Conv2D(8, 3, 4)(image))
    keras.Model(image, layers.Dense(5, "softmax")(x)).save(tmp_path / "five.keras")
    data = photos(tmp_path / "shop", {"apple": 20, "pear": 20})
    pipeline, text = written(tmp_path, data, tmp_path / "five.keras")
    assert pipeline.settings["model"] == {"file": "five.keras", "head": "new"}
    assert pipeline.settings["data"]["preprocess"][0]["resize"]["size"] == [96, 96]
    assert settings(pipeline, "train")["backbone_rate"] == 0.5
    assert "5 outputs, and the data has 2 classes" in text
    others = photos(tmp_path / "more", {f"class{index}": 10 for index in range(5)})
    pipeline, text = written(tmp_path, others, tmp_path / "five.keras")
    assert pipeline.settings["model"] == {"file": "five.keras", "head": "new"}
    assert "has as many outputs as the data has classes, but recognizes 0." in text
    assert "guessing: 0.20" in text


def brightness(keras: Any, path: Path, classes: int, largest: float = 1.0) -> None:
    """Save a model of photos 16x16 that tells apart how bright they are, with values from 0 to `largest`."""
    image = keras.Input((16, 16, 3))
    dense = keras.layers.Dense(classes)
    model = keras.Model(image, dense(keras.layers.GlobalAveragePooling2D()(image)))
    centres = (np.arange(classes) + 0.5) / classes * largest
    dense.set_weights([np.repeat(centres[np.newaxis], 3, axis=0) / 3, -(centres**2) / 2])  # the nearest centre wins
    model.save(path)


def bright_photos(folder: Path, classes: int, order: list[int] | None = None) -> Path:
    """Write photos of a brightness for each class; `order` has the brightness of each class."""
    for name, level in enumerate(order or range(classes)):
        (folder / f"class{name}").mkdir(parents=True)
        for index in range(20):
            pixels = np.full((16, 16, 3), int((level + 0.5) / classes * 255) + index % 3, np.uint8)
            Image.fromarray(pixels).save(folder / f"class{name}" / f"{index}.png")
    return folder


@pytest.mark.tensorflow
@pytest.mark.parametrize(
    ("largest", "order", "said"),
    [
        (1.0, None, "recognizes 1.00 of 56 samples (0.94 to 1.00; guessing: 0.25); it is not trained further"),
        (255.0, None, "it is not trained further"),
        (1.0, [3, 0, 1, 2], "the order of the classes does not fit the model"),
    ],
)
def test_a_model_is_tried_on_the_data(
    keras: Any, tmp_path: Path, largest: float, order: list[int] | None, said: str
) -> None:
    brightness(keras, tmp_path / "model.keras", 4, largest)
    data = bright_photos(tmp_path / "photos", 4, order)
    first = starter(data, tmp_path / "model.keras", tmp_path, "first")
    (message,) = (message for message in first.messages if message.startswith("model: "))
    assert said in message
    pipeline, _ = written(tmp_path, data, tmp_path / "model.keras")
    assert pipeline.settings["model"] == {"file": "model.keras"}
    assert [*pipeline.settings["stages"][0]] == ["quantize"]
    if largest == 255.0:
        steps = pipeline.settings["data"]["preprocess"]
        assert all("scale" not in step or step["scale"]["to"] == [0, 255] for step in steps[-1:])


@pytest.mark.tensorflow
def test_a_quantized_model_that_fits_is_compiled_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "model.tflite").write_bytes(tiny.classifier((8, 8, 1), 2))
    data = photos(tmp_path / "shop", {"apple": 20, "pear": 20}, side=8)
    pipeline, _ = written(tmp_path, data, tmp_path / "model.tflite")
    assert [*map(list, pipeline.settings["stages"])] == [["compile"], ["package"]]
    assert pipeline.settings["data"]["source"]["folder"]["channels"] == 1


def test_a_quantized_model_without_layers_is_still_compiled(tmp_path: Path) -> None:
    tensors = {
        "image": Tensor((1, 4, 4, 3), scales=(1 / 255,), zero_point=-128),
        "size": integers(8, 8),
        "large": Tensor((1, 8, 8, 3), scales=(1 / 255,), zero_point=-128),
        "axes": integers(1, 2),
        "scores": Tensor((1, 3), scales=(1 / 255,), zero_point=-128),
    }
    ops = [
        Op("RESIZE_BILINEAR", ["image", "size"], ["large"], 2, {"alignCorners": True}),  # Keras has no such layer
        Op("MEAN", ["large", "axes"], ["scores"], 2),
    ]
    (tmp_path / "model.tflite").write_bytes(content(tensors, ops, ["image"], ["scores"]))
    data = photos(tmp_path / "shop", {"apple": 10, "pear": 10, "plum": 10}, side=4)
    pipeline, _ = written(tmp_path, data, tmp_path / "model.tflite")
    assert [*map(list, pipeline.settings["stages"])] == [["compile"], ["package"]]


@pytest.mark.tensorflow
@pytest.mark.parametrize(("scale", "zero", "expected"), [(1 / 128, 0, [-1, 1]), (1.0, -128, None)])
def test_the_range_of_a_quantized_input_is_that_of_the_photos(
    tmp_path: Path, scale: float, zero: int, expected: list[int] | None
) -> None:
    draw = np.random.default_rng(0)
    tensors = {
        "image": Tensor((1, 4, 4, 3), scales=(scale,), zero_point=zero),
        "dense": Tensor((2, 48), "INT8", draw.integers(-100, 100, (2, 48)), (0.01,)),
        "bias": Tensor((2,), "INT32", 0, (scale * 0.01,)),
        "scores": Tensor((1, 2), scales=(1.0,)),
    }
    ops = [Op("FULLY_CONNECTED", ["image", "dense", "bias"], ["scores"], 4)]
    (tmp_path / "model.tflite").write_bytes(content(tensors, ops, ["image"], ["scores"]))
    data = photos(tmp_path / "shop", {"apple": 10, "pear": 10}, side=4)
    pipeline, _ = written(tmp_path, data, tmp_path / "model.tflite")
    steps = pipeline.settings["data"]["preprocess"][1:]
    assert steps == ([{"scale": {"from": [0, 255], "to": expected}}] if expected else [])


@pytest.mark.tensorflow
def test_sounds_for_a_model_of_another_shape_are_refused(tmp_path: Path) -> None:
    (tmp_path / "model.tflite").write_bytes(tiny.classifier((8, 8, 2), 2))
    np.savez(tmp_path / "sound.npz", x=np.zeros((40, 100, 2), np.float32), y=np.arange(40) % 2)
    with pytest.raises(DataError, match=r"the samples have the shape \[100, 2\], and the model takes \[8, 8, 2\]"):
        written(tmp_path, tmp_path / "sound.npz", tmp_path / "model.tflite")


def test_a_device_that_learns_gets_an_embedding(tmp_path: Path) -> None:
    data = photos(tmp_path / "my shop", {"apple": 20, "pear": 20})
    pipeline, text = written(tmp_path, data, learns=True)
    assert [next(iter(entry)) for entry in pipeline.settings["stages"]] == [
        "train",
        "quantize",
        "expose_embedding",
        "compile",
        "package",
    ]
    assert f"# Written by `python -m compress init '{data}' --learn`." in text


def test_only_classifiers_learn_on_the_device(tmp_path: Path) -> None:
    (tmp_path / "boxes").mkdir()
    photos(tmp_path / "boxes", {"images": 4})
    annotation = "<annotation><object><name>cup</name><bndbox><xmin>1</xmin><ymin>1</ymin><xmax>9</xmax><ymax>9</ymax>"
    for index in range(4):
        text = f"{annotation}</bndbox></object></annotation>"
        (tmp_path / "boxes" / "images" / f"{index}.xml").write_text(text)
    with pytest.raises(DataError, match=r"cannot learn new classes: a detector has no embedding.*leave out --learn"):
        written(tmp_path, tmp_path / "boxes", learns=True)


@pytest.mark.essential
def test_the_command_writes_once_and_lists_the_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, out = photos(tmp_path / "shop", {"apple": 20, "pear": 20}), tmp_path / "new.yaml"
    assert main(["init", str(data), "-o", str(out), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [step["id"] for step in report["steps"]] == ["model", "train", "quantize", "compile", "package"]
    assert "2 classes; samples: 28 for train, 4 for validation, 8 for test" in report["messages"][0]
    assert load(out).settings["name"] == "new"
    assert main(["init", str(data), "-o", str(out)]) == 2
    assert "exists already" in capsys.readouterr().err
    assert main(["init", str(data), "-o", str(tmp_path / "new.txt")]) == 2


def reviews(path: Path, rows: list[str], header: str = "id,review,sentiment,part") -> Path:
    path.write_text("\n".join([header, *rows]) + "\n")
    return path


def test_a_table_of_texts(tmp_path: Path) -> None:
    words = ["a fine, lovely film", "really a poor plot, and a bad one"]
    rows = [f'{index},"{words[index % 2]}",{("good", "bad")[index % 2]},' for index in range(60)]
    pipeline, text = written(tmp_path, reviews(tmp_path / "reviews.csv", rows))
    source = {"file": "reviews.csv", "text": "review", "label": "sentiment", "max_bytes": 128}
    assert pipeline.settings["data"]["source"] == {"text": source}
    assert pipeline.settings["model"] == {"builder": "text_cnn", "arguments": {"tokens": 16384}}
    assert pipeline.settings["data"]["preprocess"] == [{"tokens": {"length": 8, "buckets": 16384}}]
    assert settings(pipeline, "train")["epochs"] == 40
    assert "which the CPU looks up" in text


def test_texts_without_blanks_and_a_column_of_splits(tmp_path: Path) -> None:
    parts = ("train", "train", "val", "test")
    rows = [f"{index};{'一二三四五六七八九'[index % 5 :]};{index % 2};{parts[index // 2 % 4]}" for index in range(64)]
    path = reviews(tmp_path / "names.csv", rows, "id;name;class;part")
    pipeline, _ = written(tmp_path, path)
    columns = pipeline.settings["data"]["source"]["text"]
    assert (columns["text"], columns["label"], columns["split"]) == ("name", "class", "part")
    assert pipeline.settings["data"]["preprocess"] == [
        {"tokens": {"length": 16, "buckets": 16384, "unit": "character"}}
    ]


def test_a_table_that_is_sorted_by_class(tmp_path: Path) -> None:
    rows = [f"{index},the words of text {index},{('bad', 'good')[index >= 1500]}" for index in range(3000)]
    source = recognized(reviews(tmp_path / "reviews.csv", rows, "id,review,sentiment"), tmp_path)
    assert source["text"]["label"] == "sentiment"


@pytest.mark.parametrize(
    ("header", "rows", "label", "message"),
    [
        (
            "text,a,b",
            ["one text,x,y", "two texts,x,y", "three texts,z,w"],
            None,
            "several columns may be the label: a, b",
        ),
        ("text,a,b", ["one text,x,y", "two texts,x,y"], "c", "no column of labels 'c'"),
        ("text,number", ["one text,1", "two texts,2"], None, "has no column of labels"),
        ("x,label", ["1.5,a", "2.5,b"], None, "has no texts"),
        ("file,label", ["a/1.jpg,a", "b/2.jpg,b"], None, "'file' has names of files, not texts.*give the folder"),
        ("text,label", [], None, "has no rows"),
        ("text,text", ["a,b"], None, "has two columns 'text'"),
    ],
)
def test_tables_that_are_not_recognized(
    tmp_path: Path, header: str, rows: list[str], label: str | None, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        recognized(reviews(tmp_path / "table.csv", rows, header), tmp_path, label)
