"""The positions of an image's points in the input of a model: the steps that resize, crop and pad move them.

Training moves boxes, points and masks into the input. The device moves detections back into the image. Positions are
fractions: of height and width of the image as it is decoded, or of the model's input.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple, Tuple

import numpy as np

from deploy.contract.preprocessing import Clip, Colour, Normalize, Preprocessing, Scale
from deploy.contract.resizing import Crop, Pad, Resize
from deploy.contract.step import Array, PreprocessingError

Pair = Tuple[float, float]
"""A value for y and a value for x."""
VISIBLE = 0.4
"""The fraction of an object that must be visible; otherwise it does not count as an object of the model's input."""
NO_CLASS = 255
"""The value of a mask at pixels that do not count, as in Pascal VOC."""
MOVING = (Resize, Crop, Pad)
"""The steps that change positions."""
KEEPING = (Colour, Scale, Normalize, Clip)
"""The steps that do not change positions. After all other steps, a sample is not an image."""
STEPS = ("resize", "crop", "pad", "colour", "scale", "normalize", "clip")
"""The steps after which positions are known, by their names in a specification."""


class AffineMap(NamedTuple):
    """The map from fractions of an image to fractions of the model's input: scale * fraction + shift, for y and x."""

    scale: Pair
    shift: Pair

    def to_input(self, points: Array) -> Array:
        """Return points [..., 2] (y, x) of the image as fractions of the input: float64."""
        return np.asarray(points, np.float64) * self.scale + self.shift

    def to_image(self, points: Array) -> Array:
        """Return points [..., 2] (y, x) of the input as fractions of the image: float64."""
        return (np.asarray(points, np.float64) - self.shift) / self.scale

    def boxes_to_input(self, boxes: Array) -> Tuple[Array, Array]:
        """Return boxes of the image as boxes of the input, and which of them are visible there.

        Args:
            boxes: [k, 4]: ymin, xmin, ymax, xmax.

        Returns:
            The boxes, cut off at the border of the input: float32 [k, 4]; and booleans [k], True if at least VISIBLE of
            a box is in the input.
        """
        moved = self.to_input(np.reshape(boxes, (-1, 2, 2)))
        visible = np.clip(moved, 0, 1)
        areas = [np.prod(corners[:, 1] - corners[:, 0], axis=1) for corners in (visible, moved)]
        return visible.reshape(-1, 4).astype(np.float32), areas[0] >= VISIBLE * areas[1]

    def boxes_to_image(self, boxes: Array) -> Array:
        """Return boxes [k, 4] of the input as boxes of the image, cut off at its border: float32 [k, 4].

        A box in the border that a step added becomes empty.
        """
        corners = self.to_image(np.reshape(boxes, (-1, 2, 2)))
        return np.clip(corners, 0, 1).reshape(-1, 4).astype(np.float32)


IDENTITY = AffineMap((1.0, 1.0), (0.0, 0.0))


def input_map(preprocessing: Preprocessing, height: int, width: int) -> AffineMap:
    """Return the map from an image of this height and width to the model's input.

    Raises:
        PreprocessingError: an image of this size is not suitable, or a step destroys positions.
    """
    total = IDENTITY
    for index, step in enumerate(preprocessing.steps):
        if isinstance(step, MOVING):
            try:
                placement = step.placement(height, width)
            except PreprocessingError as error:
                raise PreprocessingError(str(error), index)
            rows = _axis_map(height, placement.source[0::2], placement.target[0::2], placement.size[0])
            columns = _axis_map(width, placement.source[1::2], placement.target[1::2], placement.size[1])
            total = AffineMap(
                (total.scale[0] * rows[0], total.scale[1] * columns[0]),
                (total.shift[0] * rows[0] + rows[1], total.shift[1] * columns[0] + columns[1]),
            )
            height, width = placement.size
        elif not isinstance(step, KEEPING):
            raise _without_positions(step, index)
    return total


def moves_positions(preprocessing: Preprocessing) -> bool:
    """Return whether fractions of the image differ from fractions of the input, for some images."""
    return any(
        isinstance(step, MOVING) and not (isinstance(step, Resize) and step.fit == "stretch")
        for step in preprocessing.steps
    )


def mask_in_input(preprocessing: Preprocessing, mask: Array) -> Array:
    """Return the mask of an image, uint8 [height, width], as the mask of the model's input.

    Each pixel of the input gets the class of the nearest pixel, and borders get NO_CLASS.

    Returns:
        uint8 [height, width] of the input.

    Raises:
        PreprocessingError: an image of this size is not suitable, or a step destroys positions.
    """
    values = mask[..., np.newaxis]
    for index, step in enumerate(preprocessing.steps):
        if isinstance(step, MOVING):
            try:
                values = _for_masks(step)(values)
            except PreprocessingError as error:
                raise PreprocessingError(str(error), index)
        elif not isinstance(step, KEEPING):
            raise _without_positions(step, index)
    return np.ascontiguousarray(values[..., 0], dtype=np.uint8)


def _for_masks(step: Any) -> Any:
    """Return the step with the nearest filter, and NO_CLASS in its border."""
    if isinstance(step, Resize):
        return dataclasses.replace(step, filter="nearest", antialias=False, levels=False, fill=NO_CLASS)
    return dataclasses.replace(step, fill=NO_CLASS) if isinstance(step, Pad) else step


def _without_positions(step: Any, index: int) -> PreprocessingError:
    facts = (type(step).__name__.lower(), ", ".join(STEPS))
    return PreprocessingError("after %s, positions in the image are not known; allowed: %s" % facts, index)


def _axis_map(length: int, source: Tuple[int, ...], target: Tuple[int, ...], size: int) -> Pair:
    """Return scale and shift from fractions of a step's input to fractions of its result, along one axis.

    `source` and `target` are start and length in pixels.
    """
    ratio = target[1] / source[1]
    return length * ratio / size, (target[0] - source[0] * ratio) / size
