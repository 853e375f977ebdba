"""Answers drawn into the images that they are for, and how far the answers of two models to one image are apart."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compress.data.types import Objects
from compress.tasks.base import AnswerDifference, Drawn, Illustrator, Image, Rows
from deploy.contract import shapes
from deploy.contract.detection import Detections, Detector
from deploy.contract.image_geometry import NO_CLASS
from deploy.contract.shapes import Caption
from deploy.contract.suppression import overlaps

BLOCK = 64
"""Samples whose outputs are worked on at once."""
SCORES = (0.5, 0.3, 0.1)
"""Smallest scores of objects that are drawn: the first score at which the original finds objects in ENOUGH samples."""
ENOUGH = 0.25
"""Share of the samples, see SCORES."""
SAME_PLACE = 0.5
"""Overlap at which boxes of two models are one object."""
FEWER = 0.5
"""Fraction of the smallest score from which an object of the other model counts as the same object."""
NAMED = 8
"""Objects or classes that are named below an image."""
SMALLEST_NAMED = 0.002
"""The share of an image above which the name of a class is drawn into it."""


class ObjectsIllustrator(Illustrator):
    """The objects of detectors.

    Args:
        detectors: the detectors of the original and of the result.
        names: the class names; a class without a name has its number.
        labels: the objects of each sample; None without labels.
    """

    def __init__(
        self,
        detectors: Sequence[Detector],
        rows: Sequence[Rows],
        names: Sequence[str],
        labels: Sequence[Objects] | None,
    ) -> None:
        classes = detectors[0].classes_of(rows[0].shape[1])
        self._names = tuple(name_of(names, label) for label in range(max(classes, len(names))))
        self._labels = labels
        detections = [list(_detected(*pair, self._names)) for pair in zip(detectors, rows, strict=True)]
        self._detections = list(zip(*detections, strict=True))
        self._least = _smallest_score([original for original, _ in self._detections])
        self.note = (
            f"Boxes are drawn with the class and the score, if the score is {self._least:g} or more, or if the other "
            f"model finds the same object with such a score. The same object: the same class, and the boxes overlap by "
            f"{SAME_PLACE:g} or more."
        )

    def differences(self) -> list[AnswerDifference]:
        """Return the number of objects that only one of the models finds, then how far the others moved."""
        return [self._difference(*pair) for pair in self._detections]

    def _difference(self, original: Detections, result: Detections) -> AnswerDifference:
        before, after = self._shown(original, result)
        table = _overlap(before, after)
        pairs = list(_pairs(table))
        single = len(before) + len(after) - 2 * len(pairs)
        overlap = np.mean([table[pair] for pair in pairs]) if pairs else 1.0
        scores = np.mean([abs(before.scores[one] - after.scores[other]) for one, other in pairs]) if pairs else 0.0
        if single:
            text = f"{single} of {single + len(pairs)} objects found by one model alone"
        elif pairs:
            text = f"the same objects, {len(pairs)}: scores differ by {scores:.2f} on average, "
            text += f"boxes overlap by {overlap:.2f}"
        else:
            text = "neither model finds an object"
        return AnswerDifference(single + float(1 - overlap + scores) / 2, text)

    def is_empty(self, sample: int) -> bool:
        """Whether no model finds an object, and none is labelled."""
        labelled = self._labels is not None and len(self._labels[sample].classes)
        return not labelled and not any(len(detections) for detections in self._shown(*self._detections[sample]))

    def label(self, image: Image, sample: int) -> Drawn | None:
        """Return the image with the labelled objects."""
        if self._labels is None:
            return None
        boxes, classes = self._labels[sample]
        objects = Detections(boxes, classes, np.ones(len(classes), np.float32), self._names)
        texts = []
        for caption in reversed(shapes.draw_objects(image, objects)):  # labels have no score
            text = caption.text.rpartition(" ")[0]
            texts.append(caption._replace(text=text, ascii_text=caption.ascii_text.rpartition(" ")[0]))
        counts = Counter(text.text for text in texts).most_common()
        shapes.write_captions(image, texts)
        return Drawn(image, _listed([f"{count} {name}" for name, count in counts], "no object"))

    def answers(self, image: Image, sample: int) -> list[Drawn]:
        """Return the images with the objects that the models find."""
        return [self._drawn(image.copy(), detections) for detections in self._shown(*self._detections[sample])]

    def _drawn(self, image: Image, detections: Detections) -> Drawn:
        texts = shapes.draw_objects(image, detections)
        shapes.write_captions(image, texts)
        return Drawn(image, _listed([text.text for text in texts[::-1]], "no object"))

    def _shown(self, *pair: Detections) -> list[Detections]:
        """Return the objects of both models that are drawn: those of which one of the models is sure."""
        return [self._sure(*ordered) for ordered in (pair, pair[::-1])]

    def _sure(self, one: Detections, other: Detections) -> Detections:
        likely = one.above(FEWER * self._least)
        kept = likely.scores >= self._least
        for _, index in _pairs(_overlap(other.above(self._least), likely)):
            kept[index] = True
        return likely.taken(kept)


def _detected(detector: Detector, rows: Rows, names: tuple[str, ...]) -> Iterator[Detections]:
    """Yield the objects of each sample, with finite values."""
    for start in range(0, len(rows), BLOCK):
        outputs = detector.split(np.asarray(rows[start : start + BLOCK], np.float32))
        for sample in range(len(outputs[0])):
            detections = detector([output[sample] for output in outputs], names)
            sound = np.isfinite(detections.boxes).all(axis=1)
            if detections.keypoints is not None:
                sound &= np.isfinite(detections.keypoints).all(axis=(1, 2))
            yield detections.taken(sound & (detections.scores >= FEWER * SCORES[-1]))


def _smallest_score(detections: Sequence[Detections]) -> float:
    for score in SCORES[:-1]:
        if sum(bool(len(image_detections.above(score))) for image_detections in detections) >= ENOUGH * len(detections):
            return score
    return SCORES[-1]


def _overlap(one: Detections, other: Detections) -> NDArray[np.float64]:
    """Return the overlap of the boxes of equal classes [k, l], 0 for others."""
    return np.asarray(overlaps(one.boxes, other.boxes) * (one.classes[:, None] == other.classes[None, :]))


def _pairs(table: NDArray[np.float64]) -> Iterator[tuple[int, int]]:
    """Yield the pairs of equal objects of two models, the likeliest first; each object counts once."""
    free = table.copy()
    for row in range(len(free)):
        best = int(free[row].argmax()) if free.shape[1] else 0
        if free.shape[1] and free[row, best] >= SAME_PLACE:
            free[:, best] = 0
            yield row, best


class MasksIllustrator(Illustrator):
    """The classes of pixels, of the original, of the result and of the labels [n, height, width]."""

    def __init__(self, rows: Sequence[Rows], names: Sequence[str], labels: NDArray[Any]) -> None:
        self._rows = rows
        self._names = tuple(names)
        self._labels = labels
        first = f"{names[0]!r}" if names else "the first class"
        self.note = (
            f"The class of each pixel is drawn as a colour, with the share of the pixels next to its name; {first} and "
            "pixels that do not count stay as they are."
        )

    def differences(self) -> list[AnswerDifference]:
        """Return the share of the pixels to which the models give different classes."""
        shares: list[float] = []
        for start in range(0, len(self._labels), BLOCK):
            before, after = (self._classes(rows[start : start + BLOCK]) for rows in self._rows)
            shares += (before != after).mean(axis=(1, 2)).tolist()
        return [AnswerDifference(share, f"{share:.3f} of the pixels have different classes") for share in shares]

    def is_empty(self, sample: int) -> bool:
        """Whether both models and the labels give every pixel the first class."""
        answers = [self._classes(rows[sample : sample + 1]) for rows in self._rows]
        masks = [*answers, self._labels[sample : sample + 1]]
        return all(((mask == 0) | (mask == NO_CLASS)).all() for mask in masks)

    def label(self, image: Image, sample: int) -> Drawn:
        """Return the image with its mask."""
        return self._drawn(image, np.asarray(self._labels[sample], np.int64))

    def answers(self, image: Image, sample: int) -> list[Drawn]:
        """Return the images with the classes that the models give."""
        return [self._drawn(image.copy(), self._classes(rows[sample : sample + 1])[0]) for rows in self._rows]

    def _classes(self, rows: Rows) -> NDArray[np.int64]:
        grid = self._labels.shape[1:]
        return np.asarray(np.asarray(rows).reshape(len(rows), *grid, -1).argmax(axis=-1), np.int64)

    def _drawn(self, image: Image, mask: NDArray[np.int64]) -> Drawn:
        counted = mask != NO_CLASS
        mask = np.where(counted, mask, 0)
        shapes.blend_classes(image, mask)
        shares = {int(label): float(((mask == label) & counted).mean()) for label in np.unique(mask[counted])}
        ordered = sorted(shares, key=lambda label: (-shares[label], label))
        texts = [self._name(image, mask, label, shares[label]) for label in ordered if label]
        labels = filter(None, ordered)
        shapes.write_captions(
            image, [t for t, label in zip(texts, labels, strict=True) if shares[label] > SMALLEST_NAMED]
        )
        return Drawn(image, _listed([text.text for text in texts], "no class but the first"))

    def _name(self, image: Image, mask: NDArray[np.int64], label: int, share: float) -> Caption:
        """Return the name of a class, at the middle of its pixels in their middle row."""
        rows, columns = np.nonzero(mask == label)
        row = rows[len(rows) // 2]
        inside = columns[rows == row]
        y = int((row + 0.5) * image.shape[0] / mask.shape[0])
        x = int((inside[len(inside) // 2] + 0.5) * image.shape[1] / mask.shape[1])
        title = shapes.title(name_of(self._names, label), label, share, x, y)
        return title._replace(colour=shapes.colour_of(label - 1))


@dataclass(frozen=True)
class PointsIllustrator(Illustrator):
    """The positions of points.

    Attributes:
        points: the points of the original and of the result: y and x as fractions of the image [n, points, 2].
        labels: y, x and visibility [n, points, 3].
    """

    points: tuple[NDArray[np.float64], NDArray[np.float64]]
    labels: NDArray[np.float64]
    note: str = "Each point has its own colour; labels are drawn where a point is marked."

    @classmethod
    def of(cls, rows: Sequence[Rows], labels: NDArray[np.float32], size: Sequence[int]) -> PointsIllustrator | None:
        """Return the illustrator of the outputs x and y of the original and of the result.

        None if they are neither fractions nor pixels of an image of the height and width `size`. The labels are x, y
        and visibility of each point [n, points, 3].
        """
        marked = labels[..., :2][labels[..., 2] > 0]
        largest = np.abs(marked).max(axis=0) if len(marked) else np.zeros(2)
        unit = np.ones(2) if (largest <= 1.5).all() else np.array([size[1], size[0]], np.float64)
        if (largest > 1.5 * unit).any() or (len(marked) and marked.min() < -0.5 * unit.max()):
            return None
        limit = 2.0  # points far outside of the image, and NaN
        truth = np.concatenate([labels[..., 1::-1] / unit[::-1], labels[..., 2:]], axis=2)
        positions = []
        for outputs in rows:
            fractions = np.asarray(outputs, np.float64).reshape(len(outputs), -1, 2) / unit
            positions.append(np.clip(np.nan_to_num(fractions, nan=limit), -1, limit)[..., ::-1])
        return cls((positions[0], positions[1]), truth)

    def differences(self) -> list[AnswerDifference]:
        """Return the mean distance of the points of both models."""
        distances = np.sqrt(((self.points[0] - self.points[1]) ** 2).sum(axis=2)).mean(axis=1)
        text = "the points of both models are {:.3f} of the image apart on average"
        return [AnswerDifference(float(distance), text.format(distance)) for distance in distances]

    def is_empty(self, sample: int) -> bool:
        """Return False: there are always points."""
        return False

    def label(self, image: Image, sample: int) -> Drawn:
        """Return the image with the marked points."""
        marked = self.labels[sample, :, 2] > 0
        _draw_points(image, self.labels[sample, :, :2], marked)
        return Drawn(image, f"{int(marked.sum())} of {len(marked)} points are marked")

    def answers(self, image: Image, sample: int) -> list[Drawn]:
        """Return the images with the points of the models, and their mean distance from the marked ones."""
        drawn = []
        marked = self.labels[sample, :, 2] > 0
        for points in self.points:
            canvas = image.copy()
            _draw_points(canvas, points[sample], np.ones(len(marked), np.bool_))
            distance = np.sqrt(((points[sample] - self.labels[sample, :, :2]) ** 2).sum(axis=1))[marked]
            text = f"{distance.mean():.3f} of the image from the labels on average" if marked.any() else "no labels"
            drawn.append(Drawn(canvas, text))
        return drawn


def _draw_points(image: Image, points: NDArray[np.float64], drawn: NDArray[np.bool_]) -> None:
    for number in np.flatnonzero(drawn):
        shapes.draw_points(
            image, points[number : number + 1], shapes.colour_of(int(number)), shapes.line_width(image) + 2
        )


def name_of(names: Sequence[str], label: int) -> str:
    """Return the name of a class, or its number if it has none."""
    return names[label] if label < len(names) else f"class {label}"


def _listed(texts: Sequence[str], nothing: str) -> str:
    """Return texts in one line; a long list ends with the number of texts that are left out."""
    more = [f"and {len(texts) - NAMED} more"] if len(texts) > NAMED else []
    return ", ".join([*texts[:NAMED], *more]) or nothing
