"""Agreement of a quantized model with the float model, sample by sample: of classes, or of detected objects."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from compress.tflite.interpreter import LoadedModel
from deploy.contract.detection import Detector, agreement

MAX_DB = 60.0
"""Larger signal-to-noise ratios count as this one."""
COMPARED_ANCHORS = 100
"""Anchors of a sample, those with the highest scores, whose boxes are compared: the others are never used."""
MIN_SCORE = 0.5
"""Objects that are found with this score are compared."""
Rows = NDArray[Any]
"""Outputs of some samples, flattened; several outputs of a model are concatenated: [n, outputs]."""


class Judge(Protocol):
    """Compares outputs sample by sample."""

    def snr_db(self, expected: Rows, actual: Rows) -> NDArray[np.float64]:
        """Return the signal-to-noise ratio of each sample in dB."""

    def same(self, expected: Rows, actual: Rows) -> NDArray[np.float64]:
        """Return the agreement on each sample, from 0 to 1."""


@dataclass(frozen=True)
class ByClass:
    """For classifiers: compares all scores, and the class with the largest score."""

    def snr_db(self, expected: Rows, actual: Rows) -> NDArray[np.float64]:
        """Return the signal-to-noise ratio of all scores."""
        return snr_db(expected, actual)

    def same(self, expected: Rows, actual: Rows) -> NDArray[np.float64]:
        """Return 1 if the class with the largest score is the same, else 0."""
        return np.asarray(expected.argmax(axis=1) == actual.argmax(axis=1), np.float64)


@dataclass(frozen=True)
class ByObjects:
    """For detectors: compares the scores, the boxes of likely anchors, and the objects that are found.

    Attributes:
        detector: reads the outputs.
    """

    detector: Detector

    def snr_db(self, expected: Rows, actual: Rows) -> NDArray[np.float64]:
        """Return the mean of the ratios of the scores and of the boxes of likely anchors."""
        boxes, scores = self._parts(expected)
        other_boxes, other_scores = self._parts(actual)
        likely = np.argsort(-scores.max(axis=2), axis=1, kind="stable")[:, :COMPARED_ANCHORS, np.newaxis]
        count = len(expected)
        of_boxes = snr_db(
            np.take_along_axis(boxes, likely, axis=1).reshape(count, -1),
            np.take_along_axis(other_boxes, likely, axis=1).reshape(count, -1),
        )
        of_scores = snr_db(scores.reshape(count, -1), other_scores.reshape(count, -1))
        return np.asarray((of_boxes + of_scores) / 2)

    def same(self, expected: Rows, actual: Rows) -> NDArray[np.float64]:
        """Return the share of the objects that both find; 1 if neither finds any."""
        pairs = zip(self._objects(expected), self._objects(actual), strict=True)
        return np.array([agreement([one], [other], MIN_SCORE)[0] for one, other in pairs])

    def _objects(self, outputs: Rows) -> list[Any]:
        return [self.detector(boxes, scores) for boxes, scores in zip(*self._parts(outputs), strict=True)]

    def _parts(self, outputs: Rows) -> tuple[Rows, Rows]:
        """Return boxes [n, anchors, 4] and scores [n, anchors, classes]."""
        anchors = len(self.detector.anchors)
        boxes, scores = np.split(outputs, [4 * anchors], axis=1)
        return boxes.reshape(len(outputs), anchors, 4), scores.reshape(len(outputs), anchors, -1)


def judge(specification: Mapping[str, Any] | None, *, logits: bool = False) -> Judge:
    """Return the comparison for a model.

    Args:
        specification: how a detector's outputs are read; None for classifiers.
        logits: whether its scores are those before a sigmoid at the end, whatever the specification says.
    """
    if specification is None:
        return ByClass()
    # Objects below half of MIN_SCORE are compared with nothing, and suppress nothing more likely.
    faster = {**specification, "least_score": max(specification.get("least_score", 0.0), MIN_SCORE / 2)}
    return ByObjects(Detector({**faster, "scores": "logits"} if logits else faster))


@dataclass(frozen=True)
class FileAgreement:
    """Outputs of a float file and of its quantized file for the same samples.

    Attributes:
        expected: outputs of the float file [n, outputs].
        same: by sample how far both answer the same, from 0 to 1.
        snr_db: by sample the signal-to-noise ratio of the quantized file.
    """

    expected: Rows
    same: NDArray[np.float64]
    snr_db: NDArray[np.float64]

    @property
    def agreement(self) -> float:
        """The mean of `same`, rounded."""
        return round(float(self.same.mean()), 4)


def compared(float_file: Path, quantized_file: Path, samples: NDArray[np.float32], judge: Judge) -> FileAgreement:
    """Run two .tflite files on the same samples."""
    expected = LoadedModel(float_file, reproducible=True).scores(samples)
    actual = LoadedModel(quantized_file, reproducible=True).scores(samples)
    return FileAgreement(expected, judge.same(expected, actual), judge.snr_db(expected, actual))


def flattened(outputs: Any) -> Rows:
    """Return the output of a Keras model, or its outputs one after the other, as rows."""
    parts = outputs if isinstance(outputs, list | tuple) else [outputs]
    return np.concatenate([np.asarray(part).reshape(len(part), -1) for part in parts], axis=1)


def snr_db(expected: Rows, actual: Rows) -> NDArray[np.float64]:
    """Return the signal-to-noise ratio of each row in dB, between -MAX_DB and MAX_DB."""
    expected = expected.astype(np.float64)
    signal = np.maximum((expected**2).sum(axis=1), 1e-200)  # a row of zeros
    noise = ((expected - actual.astype(np.float64)) ** 2).sum(axis=1)
    ratio = signal / np.maximum(noise, 1e-12 * signal)
    return np.asarray(np.clip(10 * np.log10(ratio), -MAX_DB, MAX_DB))
