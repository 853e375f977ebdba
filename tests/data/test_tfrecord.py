"""TFRecord files as TensorFlow writes them, and files that are refused."""

from __future__ import annotations

import io
import resource
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_files import example, field, record, varint
from datasets import dataset
from PIL import Image
from pydantic import ValidationError

from compress.core.errors import DataError
from compress.data.class_names import Classes
from compress.data.sources import TfRecord
from compress.data.sources.tfrecord import MAX_RECORD, TensorFeature, masked_crc


def png(value: int, side: int = 4) -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (side, side), (value, 0, 0)).save(stream, "PNG")
    return stream.getvalue()


def write(path: Path, count: int = 20, **more: Any) -> Path:
    rows = [record(example(image=png(index), label=index % 2, **more)) for index in range(count)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(rows))
    return path


def source(path: Path, **settings: Any) -> TfRecord:
    return TfRecord(path=str(path), **{"image": "image", "label": "label"} | settings)


def test_images(tmp_path: Path) -> None:
    samples = source(write(tmp_path / "data.tfrecord")).load()
    assert samples.class_names == ("0", "1")
    assert samples.labels.tolist() == [0, 1] * 10
    assert samples.read(7).shape == (4, 4, 3)
    assert samples.read(7)[0, 0, 0] == 7
    assert "data.tfrecord, record at byte " in samples.describe(7)
    assert source(tmp_path / "data.tfrecord", channels=1).load().read(7).shape == (4, 4, 1)


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (np.arange(6, dtype="<f4") / 4, "float32"),
        (np.arange(6) - 3, "float32"),
        ((np.arange(6) - 3).astype("<i2").tobytes(), "int16"),
        ((np.arange(6) * 1.5).astype("<f8").tobytes(), "float64"),
        (np.arange(6, dtype=np.uint8).tobytes(), "uint8"),
    ],
)
def test_tensors(tmp_path: Path, value: Any, dtype: str) -> None:
    path = tmp_path / "data.tfrecord"
    path.write_bytes(record(example(x=value, kind=b"walk")) + record(example(x=value, kind=b"run")))
    samples = source(
        path, image=None, tensor=TensorFeature(feature="x", shape=(3, 2), dtype=dtype), label="kind"
    ).load()
    assert samples.class_names == ("run", "walk")
    expected = np.frombuffer(value, np.dtype(dtype).newbyteorder("<")) if isinstance(value, bytes) else value
    np.testing.assert_array_equal(samples.read(0), np.reshape(expected, (3, 2)))


def test_numbers_that_are_not_packed(tmp_path: Path) -> None:
    unpacked = field(3, b"\x08\x05\x08" + varint((1 << 64) - 2))
    numbers = field(1, field(1, b"n") + field(2, unpacked))
    label = field(1, field(1, b"label") + field(2, field(3, b"\x08\x00")))
    (tmp_path / "data.tfrecord").write_bytes(record(field(1, numbers + label)))
    samples = source(tmp_path / "data.tfrecord", image=None, tensor=TensorFeature(feature="n", shape=(2,))).load()
    assert samples.read(0).tolist() == [5, -2]


def test_files_of_another_suffix(tmp_path: Path) -> None:
    write(tmp_path / "a.tfrecord", 6)
    write(tmp_path / "b.tfrec", 6)
    (tmp_path / "readme.md").write_text("two files")
    samples = source(tmp_path).load()
    assert (len(samples.labels), samples.notes) == (12, ("1 files were ignored: 1 .md",))


def test_splits_and_classes(tmp_path: Path) -> None:
    for name in ("train-00000-of-00002", "train-00001-of-00002", "validation-00000-of-00001", "test-00000-of-00001"):
        write(tmp_path / f"flowers-{name.partition('-')[0]}.tfrecord-{name.partition('-')[2]}", 6)
    (tmp_path / "names.txt").write_text("daisy\nrose\n")
    data = dataset(source(tmp_path, classes=Classes(file="names.txt")))
    assert [len(data.labels(split)) for split in ("train", "validation", "test")] == [12, 6, 6]
    assert data.class_names == ("daisy", "rose")
    write(tmp_path / "more.tfrecord")
    with pytest.raises(DataError, match=r"'more\.tfrecord' is of no split, other files are"):
        source(tmp_path).load()


@pytest.mark.tensorflow
def test_as_tensorflow_writes_them(tmp_path: Path) -> None:
    import tensorflow

    train = tensorflow.train
    with tensorflow.io.TFRecordWriter(str(tmp_path / "t.tfrecord")) as writer:
        for index in range(6):
            feature_map = {
                "image": train.Feature(bytes_list=train.BytesList(value=[png(index, 40)])),
                "x": train.Feature(float_list=train.FloatList(value=[index, 0.5])),
                "n": train.Feature(int64_list=train.Int64List(value=[-index, 1 << 40])),
                "label": train.Feature(bytes_list=train.BytesList(value=[b"even" if index % 2 == 0 else b"odd"])),
            }
            writer.write(train.Example(features=train.Features(feature=feature_map)).SerializeToString())
    samples = source(tmp_path / "t.tfrecord").load()
    assert samples.class_names == ("even", "odd")
    assert [samples.read(index)[0, 0, 0] for index in range(6)] == list(range(6))
    for name, last in (("x", [5, 0.5]), ("n", [-5, 1 << 40])):
        tensor_samples = source(
            tmp_path / "t.tfrecord", image=None, tensor=TensorFeature(feature=name, shape=(2,))
        ).load()
        np.testing.assert_array_equal(tensor_samples.read(5), last)


def test_either_image_or_tensor() -> None:
    for more in ({}, {"image": "a", "tensor": {"feature": "x", "shape": [2]}}):
        with pytest.raises(ValidationError, match="needs either the key 'image' or the key 'tensor'"):
            TfRecord.model_validate_json(__import__("json").dumps({"path": "p", "label": "l", **more}))


def two(**values: list[bytes]) -> bytes:
    """Return a serialized tf.train.Example with any number of byte strings in each feature."""
    encoded = {name: field(1, b"".join(field(1, content) for content in several)) for name, several in values.items()}
    return field(1, b"".join(field(1, field(1, name.encode()) + field(2, value)) for name, value in encoded.items()))


GOOD = record(example(image=png(0), label=0))
BAD: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "contains no records"),
    "text": (b"this is no record at all", "is not a TFRecord: the checksum of its length is wrong"),
    "gzip": (b"\x1f\x8b" + GOOD, "is not a TFRecord.*one that is compressed must be unpacked"),
    "short header": (GOOD + GOOD[:11], "record at byte 118: is cut short|record at byte .*: is cut short"),
    "cut short": (GOOD + GOOD[:-1], "is cut short, or too large"),
    "giant": (
        struct.pack("<Q", 1 << 60) + struct.pack("<I", masked_crc(struct.pack("<Q", 1 << 60))) + GOOD,
        "is cut short, or too large: 1,152,921,504,606,846,976 bytes",
    ),
    "no example": (record(b"\xff" * 99), "is not a tf.train.Example"),
    "wrong kind of field": (record(b"\x0f\x0c"), "is not a tf.train.Example"),
    "field cut short": (record(b"\x0a\x7f"), "is not a tf.train.Example"),
    "no label": (record(example(image=png(0))), "has no label in 'label'"),
    "two labels": (record(example(image=png(0), label=[1, 2])), "has no label in 'label'"),
    "negative label": (record(example(image=png(0), label=-1)), "has no label in 'label'"),
    "no image": (record(example(label=0)), "has no image in 'image'"),
    "numbers as image": (record(example(image=[1, 2], label=0)), "has no image in 'image'"),
    "bad image": (record(example(image=b"no image", label=0)), "is not a readable image"),
    "names and numbers as labels": (
        GOOD + record(example(image=png(0), label=b"zero")),
        "record at byte 118: its label is 'zero', a name, and others are numbers; allowed: numbers alone, or",
    ),
    "two names as labels": (record(two(label=[b"a", b"b"], image=[png(0)])), "has 2 values of bytes in 'label'; allow"),
    "two images": (record(two(label=[b"a"], image=[png(0), png(1)])), "has 2 values of bytes in 'image'; allowed: one"),
    "a changed byte": (GOOD.replace(b"IHDR", b"IHDX"), "its checksum is wrong"),
}


@pytest.mark.parametrize(("content", "message"), BAD.values(), ids=BAD)
def test_bad_files(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "bad.tfrecord").write_bytes(content)
    with pytest.raises(DataError, match=message):
        source(tmp_path / "bad.tfrecord").load().read(0)


def test_a_record_of_empty_features_takes_bounded_memory(tmp_path: Path) -> None:
    (tmp_path / "bad.tfrecord").write_bytes(record(field(1, b"\x0a\x00" * (1 << 20))))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(DataError, match="has no label in 'label'"):
        source(tmp_path / "bad.tfrecord").load()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 150_000  # KB
    (tmp_path / "bad.tfrecord").write_bytes(record(bytes(MAX_RECORD + 1)))
    with pytest.raises(DataError, match="is cut short, or too large: 33,554,433 bytes"):
        source(tmp_path / "bad.tfrecord").load()


def test_bytes_that_are_too_many_for_a_tensor(tmp_path: Path) -> None:
    path = tmp_path / "data.tfrecord"
    path.write_bytes(record(example(x=bytes(24) + b"zz", label=0)))
    samples = source(path, image=None, tensor=TensorFeature(feature="x", shape=(3, 2))).load()
    with pytest.raises(DataError, match=r"has 26 bytes in 'x'; allowed: 24 for \[3, 2\] of float32"):
        samples.read(0)


def test_bad_records_are_left_out_when_asked(tmp_path: Path) -> None:
    path = write(tmp_path / "data.tfrecord", 30)
    content = path.read_bytes()
    place = content.index(b"IHDR", 500)
    path.write_bytes(content[:place] + b"X" + content[place + 1 : -20])
    with pytest.raises(DataError):
        source(path).load()
    data = dataset(source(path, corrupt="skip"))
    assert sum(len(data.labels(split)) for split in ("train", "validation", "test")) == 28
    assert len(data.corrupt) == 2
    assert "checksum is wrong" in data.corrupt[1]
