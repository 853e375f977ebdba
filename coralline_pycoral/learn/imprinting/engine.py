"""Imprinting: the weights of a new class are the mean direction of the embeddings of a few images.

Source: Qi, Brown and Lowe, Low-Shot Learning with Imprinted Weights, CVPR 2018.
"""

from __future__ import annotations

import struct
from typing import Any, List, NamedTuple, Tuple

import numpy as np

from coralline_pycoral.learn.head_file import (
    CONV_2D,
    FULLY_CONNECTED,
    L2_NORMALIZATION,
    MUL,
    SOFTMAX,
    HeadFile,
    LastLayer,
    with_layer,
)
from deploy.contract.embedding import unit
from deploy.contract.preprocessing import Array


class ImprintedClass(NamedTuple):
    """A class.

    Attributes:
        total: the sum of the embeddings of its images; of a class of the file, its weights.
        is_trainable: whether the class was imprinted, so that images can be added.
    """

    total: Array
    is_trainable: bool


class ImprintingEngine:
    """The classes of a .tflite file whose embedding is normalized to length 1.

    Args:
        model_path: the file. Its last operators are L2_NORMALIZATION, the dense layer of the classes, a factor of the
            logits, and SOFTMAX; or it was written by `serialize_model`.
        keep_classes: whether the classes of the file stay.

    Raises:
        ValueError: the file cannot be read, or has another architecture.
    """

    def __init__(self, model_path: str, keep_classes: bool = False) -> None:
        try:
            with open(model_path, "rb") as stream:
                content = stream.read()
        except OSError:
            raise ValueError("Failed to open file: %s" % model_path)
        try:
            self._file = HeadFile(content)
            if L2_NORMALIZATION not in self._file.kinds:
                raise ValueError("Unsupported model architecture. Input model must have an L2Norm layer.")
            normalized = self._file.kinds.index(L2_NORMALIZATION)
            weights, self._sharpness = self._last_layer(normalized)
        except (struct.error, IndexError) as error:
            raise ValueError("%s is damaged: %s" % (model_path, error))
        self._extractor = self._file.cut(normalized)
        self._values = weights.shape[1]
        self._classes = self._kept(weights) if keep_classes else []

    @property
    def embedding_dim(self) -> int:
        """The length of an embedding."""
        return int(self._values)

    @property
    def num_classes(self) -> int:
        """The number of classes."""
        return len(self._classes)

    def serialize_extractor_model(self) -> bytes:
        """Return the .tflite file that computes embeddings."""
        return self._extractor

    def serialize_model(self) -> bytes:
        """Return the .tflite file of the classifier. Its description has what later training needs.

        Raises:
            RuntimeError: there is no class.
        """
        if not self._classes:
            raise RuntimeError("Model is not trained.")
        trainable = [(index, row) for index, row in enumerate(self._classes) if row.is_trainable]
        lengths = ["%d %r\n" % (index, float(np.linalg.norm(row.total))) for index, row in trainable]
        directions = unit(np.stack([row.total for row in self._classes]))
        layer = LastLayer(directions, np.zeros(len(directions)), (-1.0, 1.0), self._sharpness)
        return with_layer(self._extractor, layer, "".join(lengths))

    def train(self, embedding: Any, class_id: int) -> None:
        """Add an image to a class.

        Args:
            embedding: the output of the extractor, as real numbers [values].
            class_id: an imprinted class, or the number of classes: a new one.

        Raises:
            RuntimeError: the embedding has another length, or the class cannot be trained.
        """
        values = np.asarray(embedding, np.float32).reshape(-1)
        if len(values) != self._values or not np.isfinite(values).all():
            raise RuntimeError("an embedding has %d finite values, not %d" % (self._values, len(values)))
        if not 0 <= class_id <= len(self._classes):
            raise RuntimeError("the class is %d; allowed: 0 to %d, a new class" % (class_id, len(self._classes)))
        if class_id == len(self._classes):
            self._classes.append(ImprintedClass(np.zeros(self._values, np.float32), True))
        known = self._classes[class_id]
        if not known.is_trainable:
            raise RuntimeError("the class %d is one of the original model, and cannot be trained" % class_id)
        self._classes[class_id] = known._replace(total=known.total + values)

    def _last_layer(self, normalized: int) -> Tuple[Array, float]:
        """Return the weights [classes, values] of the file, and the factor of its logits."""
        kinds = self._file.kinds
        dense = [index for index in range(normalized, len(kinds)) if kinds[index] in (CONV_2D, FULLY_CONNECTED)]
        if len(dense) != 1 or kinds[-1] != SOFTMAX:
            raise ValueError("Unsupported model architecture. L2Norm must be followed by one dense layer and Softmax.")
        weights = self._file.tensor(self._file.ends(dense[0], 1)[1]).values
        sharpness = self._file.sharpness(len(kinds) - 1)
        for index in range(dense[0], len(kinds)):
            if kinds[index] == MUL:
                sharpness *= float(self._file.tensor(self._file.ends(index, 1)[1]).values.reshape(-1)[0])
        return weights.reshape(len(weights), -1), sharpness

    def _kept(self, weights: Array) -> List[ImprintedClass]:
        """Return the classes of the file; the description has the lengths of the sums of imprinted ones."""
        fields = self._file.description.split()
        try:
            lengths = {int(index): float(length) for index, length in zip(fields[::2], fields[1::2])}
        except ValueError:  # the description of another program
            lengths = {}
        return [
            ImprintedClass(row * np.float32(lengths.get(index, 1.0)), index in lengths)
            for index, row in enumerate(weights)
        ]
