"""How near the answers of a quantized model are to those of the float model: by class, or by the objects found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from deploy.contract.detection import Detector, agreement

BEST_DB = 60.0
"""Signal-to-noise ratios above this are not told apart."""
LIKELY = 100
"""Anchors of a sample, those with the highest scores, whose boxes are compared: nobody looks at the others."""
SURE = 0.5
"""Objects that are found with this score are compared."""
Rows = NDArray[Any]
"""Outputs of some samples, flattened, several of them side by side: [n, outputs]."""


class Judge(Protocol):
    """Compares outputs sample by sample."""

    def snr_db(self, wanted: Rows, found: Rows) -> NDArray[np.float64]:
        """The signal-to-noise ratio of each sample in dB."""

    def same(self, wanted: Rows, found: Rows) -> NDArray[np.float64]:
        """From 0 to 1, how far each sample is answered the same."""


@dataclass(frozen=True)
class ByClass:
    """For classifiers: all scores, and which is the largest."""

    def snr_db(self, wanted: Rows, found: Rows) -> NDArray[np.float64]:
        """Of all scores."""
        return snr_db(wanted, found)

    def same(self, wanted: Rows, found: Rows) -> NDArray[np.float64]:
        """1 where the largest output is the same, otherwise 0."""
        return np.asarray(wanted.argmax(axis=1) == found.argmax(axis=1), np.float64)


@dataclass(frozen=True)
class ByObjects:
    """For detectors: the scores, the boxes of likely anchors, and which objects are found.

    Attributes:
        detector: reads the outputs.
    """

    detector: Detector

    def snr_db(self, wanted: Rows, found: Rows) -> NDArray[np.float64]:
        """The mean of that of the scores and that of the boxes that matter."""
        (boxes, scores), (other_boxes, other_scores) = self._parts(wanted), self._parts(found)
        likely = np.argsort(-scores.max(axis=2), axis=1, kind="stable")[:, :LIKELY, np.newaxis]
        pairs = ((np.take_along_axis(each, likely, axis=1) for each in (boxes, other_boxes)), (scores, other_scores))
        ratios = [snr_db(*(each.reshape(len(wanted), -1) for each in pair)) for pair in pairs]
        return np.asarray((ratios[0] + ratios[1]) / 2)

    def same(self, wanted: Rows, found: Rows) -> NDArray[np.float64]:
        """The share of the objects that both find; 1 where neither finds any."""
        answers = [[self.detector(*pair) for pair in zip(*self._parts(rows), strict=True)] for rows in (wanted, found)]
        return np.array([agreement([one], [other], SURE)[0] for one, other in zip(*answers, strict=True)])

    def _parts(self, rows: Rows) -> tuple[Rows, Rows]:
        """Boxes [n, anchors, 4] and scores [n, anchors, classes]."""
        anchors = len(self.detector.anchors)
        boxes, scores = np.split(rows, [4 * anchors], axis=1)
        return boxes.reshape(len(rows), anchors, 4), scores.reshape(len(rows), anchors, -1)


def judge(specification: Mapping[str, Any] | None, *, logits: bool = False) -> Judge:
    """The one for a model.

    Args:
        specification: how a detector's outputs are read; None for classifiers.
        logits: whether its scores are those before a sigmoid at the end, whatever the specification says.
    """
    if specification is None:
        return ByClass()
    # What is less likely than half of SURE is compared with nothing, and suppresses nothing more likely.
    faster = {**specification, "least_score": max(specification.get("least_score", 0.0), SURE / 2)}
    return ByObjects(Detector({**faster, "scores": "logits"} if logits else faster))


def side_by_side(outputs: Any) -> Rows:
    """A Keras model's output, or its outputs, as rows."""
    parts = outputs if isinstance(outputs, list | tuple) else [outputs]
    return np.concatenate([np.asarray(part).reshape(len(part), -1) for part in parts], axis=1)


def snr_db(wanted: Rows, found: Rows) -> NDArray[np.float64]:
    """Signal-to-noise ratio of each row in dB; a constant signal counts as one of its own size."""
    wanted, found = wanted.astype(np.float64), found.astype(np.float64)
    signal, noise = (wanted**2).sum(axis=1), ((wanted - found) ** 2).sum(axis=1)
    signal = np.maximum(signal, 1e-200)  # a row of zeros
    ratio = signal / np.maximum(noise, 1e-12 * signal)
    return np.asarray(np.clip(10 * np.log10(ratio), -BEST_DB, BEST_DB))
