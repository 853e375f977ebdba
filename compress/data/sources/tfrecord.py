"""TFRecord files of tf.train.Example, read without TensorFlow.

The framing of records is tensorflow.org/tutorials/load_data/tfrecord: the length, the masked CRC-32C of the length, the
content, the masked CRC-32C of the content. `tf.data.TFRecordDataset` is not used: it has no access by index, does not
read from archives, and a record that claims 2**60 bytes ends the whole process (TensorFlow 2.21).
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, BinaryIO, ClassVar, Literal, Self

import google_crc32c
import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from compress.core.errors import DataError
from compress.core.settings import Settings
from compress.data import class_names, files, labels
from compress.data.class_names import Classes, ClassList
from compress.data.file_listing import InFiles, passed_over
from compress.data.file_tree import Tree, inside
from compress.data.labels import SPLIT_WORDS
from compress.data.source import Samples, several
from compress.data.sources.images import DecodedImages
from compress.data.types import Split

MAX_RECORD = 32 << 20
"""protobuf takes up to 30 times the bytes of a message of empty features (measured: 605 MB for 20 MB). An Edge TPU has
8 MB of memory, so no sample for it comes near."""
MAX_RECORDS = 50_000_000
"""Chosen: a `Record` with its label takes about 150 bytes of memory."""
_NAME = re.compile(r"\.(tfrecords?|tfrec|records?)(-\d+-of-\d+)?$", re.IGNORECASE)
_KINDS = {False: "number", True: "name"}
Features = dict[str, Any]
"""Values by feature name: bytes, a list of integers, or float32 [n]."""
_EXAMPLE = """
name: "example" package: "coralline" syntax: "proto3"
message_type { name: "Bytes" field { name: "value" number: 1 type: TYPE_BYTES label: LABEL_REPEATED } }
message_type { name: "Floats" field { name: "value" number: 1 type: TYPE_FLOAT label: LABEL_REPEATED } }
message_type { name: "Integers" field { name: "value" number: 1 type: TYPE_INT64 label: LABEL_REPEATED } }
message_type {
  name: "Feature" oneof_decl { name: "kind" }
  field { name: "bytes" number: 1 type_name: "Bytes" type: TYPE_MESSAGE oneof_index: 0 }
  field { name: "floats" number: 2 type_name: "Floats" type: TYPE_MESSAGE oneof_index: 0 }
  field { name: "integers" number: 3 type_name: "Integers" type: TYPE_MESSAGE oneof_index: 0 }
}
message_type {
  name: "Entry"
  field { name: "key" number: 1 type: TYPE_STRING }
  field { name: "value" number: 2 type_name: "Feature" type: TYPE_MESSAGE }
}
message_type {
  name: "Features" field { name: "entry" number: 1 type_name: "Entry" type: TYPE_MESSAGE label: LABEL_REPEATED }
}
message_type { name: "Example" field { name: "features" number: 1 type_name: "Features" type: TYPE_MESSAGE } }
"""
"""The messages of example.proto and feature.proto in tensorflow/core/example; a map is stored as its entries. The
classes of TensorFlow are not used, because TensorFlow takes 10 s to import."""


class TensorFeature(Settings):
    """A feature that contains numbers."""

    feature: str
    """Name of the feature: a list of numbers, or their bytes (little-endian)."""
    shape: Annotated[tuple[Annotated[int, Field(ge=1, le=1 << 24)], ...], Field(min_length=1, max_length=3)]
    """Shape of a sample."""
    dtype: Literal["uint8", "int8", "uint16", "int16", "int32", "float32", "float64"] = "float32"
    """Type of the numbers, if they are stored as bytes."""


class TfRecord(DecodedImages, InFiles):
    """TFRecord files of tf.train.Example: one file, a folder of them, or a tar archive. Checksums are verified.

    The splits are given by the folders train/, val/ and test/, or by words in the file names (mnist-train.tfrecord).
    """

    name: ClassVar[str] = "tfrecord"
    single: ClassVar[bool] = True
    paths: ClassVar[tuple[str, ...]] = ("path", "classes", "manifest")

    image: str | None = None
    """Name of the feature with an encoded image (PNG, JPEG, BMP, WebP)."""
    tensor: TensorFeature | None = None
    """The feature that has the numbers of a sample, for samples that are not images."""
    label: str
    """Name of the feature with the label: an integer from 0, or a class name."""
    classes: Classes | ClassList | None = None
    """The class names in the order of the model's outputs: a list; or the path of a labels file, relative to the
    pipeline file; or a file in the folder. By default the labels are the names."""

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.image is None) == (self.tensor is None):
            raise ValueError("needs either the key 'image' or the key 'tensor'")
        return self

    def used(self, tree: Tree) -> tuple[str, ...]:
        """Return the record files, and the file with class names."""
        is_file = len(tree.names) == 1 and not tree.folders  # whatever the name of the file is
        records = tuple(name for name in tree.names if is_file or _NAME.search(name))
        if not records:
            raise DataError(
                "contains no TFRecord files", where=tree.where, allowed="*.tfrecord, *.tfrec, *.tfrecord-00000-of-00010"
            )
        return (*records, *([inside(self.classes.file, tree.where)] if isinstance(self.classes, Classes) else []))

    def files(self) -> dict[str, Path]:
        """Return the record files, or the archive that contains them, and the labels file."""
        return super().files() | class_names.files_of(self.classes)

    @property
    def decoding(self) -> dict[str, Any]:
        """How the device decodes images."""
        return super().decoding if self.image else {}

    def load(self) -> Samples:
        """Find all records and their labels. Samples are decoded, and checksums verified, when they are used."""
        tree = self.tree()
        names = self.used(tree)[: -1 if isinstance(self.classes, Classes) else None]
        records, problems = self._records(tree, names)
        if problems and self.corrupt == "refuse":
            raise several(problems)
        if not records:
            raise DataError("contains no records", where=tree.where)
        other = next((record for record in records if record.named != records[0].named), None)
        if other is not None:
            what = f"its label is {other.label!r}, a {_KINDS[other.named]}, and others are {_KINDS[not other.named]}s"
            where = f"{tree.describe(names[other.file])}, record at byte {other.start}"
            raise DataError(what, where=where, allowed="numbers alone, or names alone")
        known = class_names.of_tree(tree, self.classes, "data.source.tfrecord")
        splits = _splits(names, tree.where)

        def read(index: int) -> NDArray[Any]:
            with tree.open(names[records[index].file]) as stream:
                return self._decoded(stream, records[index], describe(index))

        def describe(index: int) -> str:
            return f"{tree.describe(names[records[index].file])}, record at byte {records[index].start}"

        label, classes = labels.read(
            [record.label for record in records], known, describe, class_names.origin(self.classes)
        )
        return Samples(
            label,
            classes,
            read,
            labels.splits(splits[record.file] for record in records),
            describe,
            skip=self.corrupt == "skip",
            corrupt=tuple(map(str, problems)),
            notes=(*class_names.note(self.classes), *passed_over(tree.names, self.used(tree))),
        )

    def _records(self, tree: Tree, names: tuple[str, ...]) -> tuple[list[Record], list[DataError]]:
        """Return every record with its label, and the errors of the other records."""
        records: list[Record] = []
        problems: list[DataError] = []
        for number, name in enumerate(names):
            where = tree.describe(name)
            with tree.open(name) as stream:
                try:
                    for start, content in _contents(stream, where):
                        try:
                            label = self._label(content, f"{where}, record at byte {start}")
                            records.append(Record(number, start, *label))
                        except DataError as error:
                            problems.append(error)
                        if len(records) > MAX_RECORDS:
                            raise DataError("has too many records", where=where, allowed=f"{MAX_RECORDS:,}")
                except DataError as error:  # nothing behind this can be found
                    problems.append(error)
        return records, problems

    def _label(self, content: bytes, where: str) -> tuple[str, bool]:
        """Return the label, and if it is a name."""
        features = _checked_features(content, where, {self.label})
        value = features.get(self.label)
        if isinstance(value, bytes):
            text = value.decode("utf-8", "replace")
            labels.check(text, where)
            return text, True
        if not isinstance(value, list) or len(value) != 1 or value[0] < 0:
            raise DataError(f"has no label in {self.label!r}", where=where, allowed="one integer, or a name")
        return str(value[0]), False

    def _decoded(self, stream: BinaryIO, record: Record, where: str) -> NDArray[Any]:
        stream.seek(record.start)
        content = _content(stream, where, files.size_of(stream))
        (expected,) = struct.unpack("<I", stream.read(4))
        if masked_crc(content) != expected:
            raise DataError("its checksum is wrong", where=where, hint="write the file again")
        feature = self.image or (self.tensor and self.tensor.feature) or ""
        value = _checked_features(content, where, {feature}).get(feature)
        if self.tensor is not None:
            return _numbers(value, self.tensor, where)
        if not isinstance(value, bytes):
            raise DataError(f"has no image in {feature!r}", where=where, allowed="the bytes of an encoded image")
        return self.decoded(value, where)


@dataclass(frozen=True, slots=True)
class Record:
    """Offset and file of a record, its label, and if the label is a name."""

    file: int
    start: int
    label: str
    named: bool


def _splits(names: tuple[str, ...], where: str) -> list[Split | None]:
    """Return the split of each file, from the words in its name."""
    splits: list[Split | None] = []
    for name in names:
        meant = {SPLIT_WORDS[word] for word in re.split(r"[^a-z]+", name.lower()) if word in SPLIT_WORDS}
        splits.append(meant.pop() if len(meant) == 1 else None)
    labels.refuse_parts(names, splits, where)
    return splits


def _contents(stream: BinaryIO, where: str) -> Iterator[tuple[int, bytes]]:
    """Yield every record of a file with its offset; the checksums of the contents are verified later."""
    total = files.size_of(stream)
    while (start := stream.tell()) < total:
        yield start, _content(stream, f"{where}, record at byte {start}", total)
        stream.seek(4, 1)


def _content(stream: BinaryIO, where: str, total: int) -> bytes:
    """Return the record at the stream's position, without its checksum."""
    hint = "write the file again; one that is compressed must be unpacked"
    head = stream.read(12)
    if len(head) < 12:
        raise DataError("is cut short", where=where, hint=hint)
    size, check = struct.unpack("<QI", head)
    if masked_crc(head[:8]) != check:
        raise DataError("is not a TFRecord: the checksum of its length is wrong", where=where, hint=hint)
    if size > min(MAX_RECORD, total - stream.tell() - 4):
        there = total - stream.tell()
        raise DataError(f"is cut short, or too large: {size:,} bytes of {there:,}", where=where, hint=hint)
    return stream.read(size)


def masked_crc(content: bytes) -> int:
    """Return the CRC-32C of some bytes, masked as in TFRecord files."""
    value: int = google_crc32c.value(content)
    return ((value >> 15 | value << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _checked_features(content: bytes, where: str, names: set[str]) -> Features:
    """Return some features of a serialized tf.train.Example."""
    from google.protobuf.message import DecodeError

    try:
        entries = _example_class().FromString(content).features.entry
    except DecodeError as error:
        raise DataError("is not a tf.train.Example", where=where, hint="write the file again") from error
    values: Features = {}
    for entry in entries:
        if entry.key not in names:
            continue
        kind = entry.value.WhichOneof("kind")
        stored = getattr(entry.value, kind).value if kind else []
        if kind == "bytes" and len(stored) > 1:
            raise DataError(f"has {len(stored)} values of bytes in {entry.key!r}", where=where, allowed="one")
        if kind == "floats":
            values[entry.key] = np.asarray(stored, np.float32)
        else:
            values[entry.key] = list(stored) if kind == "integers" else b"".join(stored)
    return values


@cache
def _example_class() -> Any:
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format

    pool = descriptor_pool.DescriptorPool()
    pool.Add(text_format.Parse(_EXAMPLE, descriptor_pb2.FileDescriptorProto()))
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("coralline.Example"))


def _numbers(value: Any, tensor: TensorFeature, where: str) -> NDArray[Any]:
    if isinstance(value, bytes):
        dtype = np.dtype(tensor.dtype).newbyteorder("<")
        if len(value) % dtype.itemsize:
            allowed = f"{math.prod(tensor.shape) * dtype.itemsize:,} for {list(tensor.shape)} of {tensor.dtype}"
            raise DataError(f"has {len(value):,} bytes in {tensor.feature!r}", where=where, allowed=allowed)
        values = np.frombuffer(value, dtype)
    else:
        values = np.asarray([] if value is None else value)
    if values.size != math.prod(tensor.shape):
        allowed = f"{math.prod(tensor.shape):,} for {list(tensor.shape)}"
        raise DataError(f"has {values.size:,} values in {tensor.feature!r}", where=where, allowed=allowed)
    return values.reshape(tensor.shape)
