"""Keypoints: the positions of a fixed set of points in each sample, as numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from compress.core.errors import DataError, ModelError
from compress.core.measurement import Measurement, Metric, missing
from compress.data.types import Data, Split
from compress.model.ir.tensorflow import keras
from compress.tasks.base import Location, ModelOutputs, Refusal, Rows, Shapes, Specification, Use, first_output
from compress.tasks.illustrations import PointsIllustrator
from compress.tasks.measured import MeasuredTask, ValuesHead, refuse_moving, refuse_shape
from compress.tasks.regression import WITHOUT_CLASSES, mean_with_interval

NEAR = 0.1
"""A point is found if its distance is at most this fraction of the extent of all points of the sample."""


@dataclass(frozen=True)
class KeypointsHead(ValuesHead):
    """A first output of the coordinates x and y of each point: [n, 2 * points] or [n, points, 2]."""

    shown_values: ClassVar[tuple[str, ...]] = ("distance",)

    def constant_outputs(self, targets: NDArray[Any], shapes: Shapes) -> list[NDArray[np.float32]] | None:
        """Return the mean position of each point."""
        return [_mean_positions(targets).reshape(1, *shapes[0]).astype(np.float32)]

    def training_values(self, targets: Any, outputs: Any) -> Mapping[str, Any]:
        """Return the mean distance of visible points in the unit of the coordinates."""
        ops = keras().ops
        targets = ops.cast(targets, "float32")
        actual = ops.reshape(ops.cast(first_output(outputs), "float32"), (-1, targets.shape[1], 2))
        visible = ops.cast(targets[..., 2] > 0, "float32")
        distances = ops.sqrt(ops.sum(ops.square(actual - targets[..., :2]), axis=-1)) * visible
        return {"distance": ops.sum(distances, axis=-1) / ops.maximum(ops.sum(visible, axis=-1), 1)}

    def loss(self, targets: Any, outputs: Any) -> Any:
        """Return the mean squared error over the coordinates of visible points [n]; targets: [n, points, 3]."""
        ops = keras().ops
        targets = ops.cast(targets, "float32")
        actual = ops.reshape(ops.cast(first_output(outputs), "float32"), (-1, targets.shape[1], 2))
        scale = np.array(self.scale, np.float32).reshape(targets.shape[1], 2)
        visible = ops.cast(targets[..., 2:] > 0, "float32")
        errors = ops.square((actual - targets[..., :2]) / scale) * visible
        return ops.sum(errors, axis=(1, 2)) / ops.maximum(2 * ops.sum(visible, axis=(1, 2)), 1)


class Keypoints(MeasuredTask):
    """Positions of points; the metrics are the share of points that are found and the mean distance."""

    name: ClassVar[str] = "keypoints"
    instead_of: ClassVar[frozenset[str]] = frozenset({"classification", "regression"})
    models: ClassVar[str] = "keypoint models"
    score_name: ClassVar[str] = "validation_pck"
    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("pck", f"Points within {NEAR:g} of the extent", "fraction", "pck_drop", limited=True),
        Metric("distance", "Mean distance, of the extent", "fraction", "distance_increase"),
    )
    refused: ClassVar[Mapping[Use, Refusal]] = {
        **WITHOUT_CLASSES,
        "augmentation": Refusal("augment changes images, but not their points", "no augment", "leave it out"),
    }
    agreement_note: ClassVar[str] = "coordinates that differ by at most 0.1 of their standard deviation"

    def head(self, model: Any, data: Data, specification: Specification = None) -> KeypointsHead:
        """Return the head of a model with two coordinates for each point.

        Raises:
            DataError: the data has no points.
        """
        points = _points(data, "train")
        count = points.shape[1]
        expected = [count, 2] if len(model.outputs[0].shape) == 3 else [2 * count]
        refuse_shape(model, data, expected, "x and y of each point")
        deviation = _marked(points).std(axis=0).filled(0).ravel()
        return KeypointsHead(tuple(np.where(deviation > 0, deviation, 1.0).tolist()))  # 1 for constant coordinates

    def refused_settings(self, settings: Mapping[str, Any]) -> list[tuple[Location, Refusal]]:
        """Return also preprocessing that would move images away from points in arrays, which stay as they are."""
        return [*super().refused_settings(settings), *refuse_moving(settings, "the points", ("coco", "yolo"))]

    def targets(self, data: Data, split: Split) -> NDArray[Any]:
        """Return x, y and visibility (0: not marked) of each point: float32 [n, points, 3]."""
        return _points(data, split)

    def constant(self, data: Data) -> Rows:
        """Return the mean position of each point."""
        return _mean_positions(_points(data, "train")).reshape(1, -1)

    def kept(self, rows: Rows, targets: NDArray[Any], specification: Specification) -> NDArray[Any]:
        """Return the distance of each point, relative to the extent of its sample; NaN where it is not marked."""
        count = targets.shape[1]
        if rows.shape[1] != 2 * count:
            what = f"gives {rows.shape[1]} values, but the data has {count} points"
            raise ModelError(what, allowed="x and y of each point", hint="check data.source and the model's last layer")
        visible = targets[..., 2] > 0
        expected = np.where(visible[..., np.newaxis], targets[..., :2], np.nan).astype(np.float64)
        marked = visible.any(axis=1)
        extent = np.full(len(rows), np.nan)
        extent[marked] = (np.nanmax(expected[marked], axis=1) - np.nanmin(expected[marked], axis=1)).max(axis=1)
        extent = np.where(extent > 0, extent, np.nan)
        distance = np.sqrt(((np.asarray(rows, np.float64).reshape(-1, count, 2) - expected) ** 2).sum(axis=2))
        return np.asarray(distance / extent[:, np.newaxis])

    def measured(self, kept: NDArray[Any], targets: NDArray[Any], note: str) -> dict[str, Measurement]:
        """Return the share of marked points that are near, and their mean distance."""
        distances = kept[~np.isnan(kept)]
        if not distances.size:
            reason = "no point of the split is marked in a sample with two or more"
            return {name: missing("fraction", reason) for name in ("pck", "distance")}
        near = (distances <= NEAR).astype(np.float64)
        return {
            "pck": mean_with_interval(near, "fraction", f"{note}, {len(near)} points"),
            "distance": mean_with_interval(distances, "fraction", note),
        }

    def illustrator(
        self, models: Mapping[str, ModelOutputs], data: Data, split: Split, labels: Sequence[str] = ()
    ) -> PointsIllustrator | None:
        """Return how points are drawn; None if their positions in the image are not known."""
        rows = [model.rows for model in models.values()]
        return PointsIllustrator.of(rows, self.targets(data, split), data.input_shape[:2])


def _mean_positions(points: NDArray[Any]) -> NDArray[np.float64]:
    """Return the mean of x and y of each point over the samples in which it is marked: [points, 2]."""
    return np.asarray(_marked(points).mean(axis=0).filled(0))


def _marked(points: NDArray[Any]) -> Any:
    """Return x and y of each point, masked in the samples in which it is not marked: [n, points, 2]."""
    positions = np.asarray(points[..., :2], np.float64)
    return np.ma.masked_array(positions, np.broadcast_to(points[..., 2:] <= 0, positions.shape))


def _points(data: Data, split: Split) -> NDArray[np.float32]:
    """Return x, y and visibility of each point; points without visibility are visible.

    Raises:
        DataError: the targets do not have the shape of points.
    """
    points = np.asarray(data.targets(split), np.float32)
    if points.ndim != 3 or points.shape[2] not in (2, 3):
        raise DataError(
            f"the points are {list(points.shape)}", where="data.source", allowed="[n, points, 2] or [n, points, 3]"
        )
    if points.shape[2] == 2:
        points = np.concatenate([points, np.ones((*points.shape[:2], 1), np.float32)], axis=2)
    return points
