"""Shapes in images: boxes with their labels, keypoints, masks. The device and the report of a run draw with them.

The shapes need numpy only; texts need Pillow or OpenCV, as decoding does.
"""

from __future__ import annotations

from typing import Any, List, NamedTuple, Sequence, Tuple

import numpy as np

from deploy.contract.detection import Detections
from deploy.contract.errors import ImageError
from deploy.contract.image_geometry import IDENTITY, AffineMap
from deploy.contract.preprocessing import Array

COLOURS = (
    (230, 60, 60),
    (60, 140, 230),
    (70, 180, 75),
    (240, 160, 40),
    (160, 80, 200),
    (50, 190, 190),
    (220, 90, 170),
    (150, 150, 40),
)
"""The colours of classes, RGB, by number."""
OPACITY = 0.5
"""Of masks."""


class TextLine(NamedTuple):
    """A line of text.

    Attributes:
        x, y: the position of its lower left corner, in pixels.
        text: the text.
        colour: of its background.
    """

    x: int
    y: int
    text: str
    colour: Tuple[int, int, int]


def colour_of(number: int) -> Tuple[int, int, int]:
    """Return the colour of a class."""
    return COLOURS[number % len(COLOURS)]


def line_width(canvas: Array) -> int:
    """Return the width of lines in an image, in pixels."""
    width: float = min(canvas.shape[:2]) / 200
    return max(round(width), 1)


def draw_objects(canvas: Array, found: Detections, line: int) -> List[TextLine]:
    """Draw boxes and keypoints, the best on top, and return their labels.

    Args:
        canvas: uint8 [height, width, 3], changed.
        found: the objects, the best first.
        line: the width of lines.
    """
    texts = []
    for index in range(len(found) - 1, -1, -1):
        label = int(found.classes[index])
        colour = colour_of(label)
        top, left, bottom, right = _pixels(found.boxes[index], canvas)
        _rectangle(canvas, (top, left, bottom, right), colour, line)
        if found.keypoints is not None:
            draw_points(canvas, found.keypoints[index], colour, line)
        name = found.labels[label] if label < len(found.labels) else str(label)
        texts.append(TextLine(left, top, "%s %.2f" % (name, found.scores[index]), colour))
    return texts


def _pixels(box: Array, canvas: Array) -> Tuple[int, int, int, int]:
    """Return a box of fractions as rows and columns of pixels."""
    height, width = canvas.shape[:2]
    places = np.clip(np.asarray(box, np.float64) * [height, width, height, width], 0, [height, width, height, width])
    top, left, bottom, right = (round(value) for value in places.tolist())
    return top, left, bottom, right


def _rectangle(canvas: Array, box: Tuple[int, int, int, int], colour: Sequence[int], line: int) -> None:
    top, left, bottom, right = box
    canvas[top : top + line, left:right] = colour
    canvas[max(bottom - line, 0) : bottom, left:right] = colour
    canvas[top:bottom, left : left + line] = colour
    canvas[top:bottom, max(right - line, 0) : right] = colour


def draw_points(canvas: Array, points: Array, colour: Sequence[int], line: int) -> None:
    """Draw keypoints (y, x), or (y, x, probability that it is visible), as squares; fractions of the image."""
    height, width = canvas.shape[:2]
    for point in points:
        if len(point) > 2 and point[2] < 0.5:
            continue
        row, column = round(float(point[0]) * height), round(float(point[1]) * width)
        rows, columns = (slice(max(place - line, 0), max(place + line + 1, 0)) for place in (row, column))
        canvas[rows, columns] = 255 - np.array(colour)
        rows, columns = (slice(max(place - line + 1, 0), max(place + line, 0)) for place in (row, column))
        canvas[rows, columns] = colour


def class_at(scores: Array) -> Array:
    """Return the class of each pixel: int64 [height, width]; of one channel: 1 where the score is above one half.

    Args:
        scores: [height, width, classes], or [height, width].
    """
    scores = scores if scores.ndim == 3 else scores[..., np.newaxis]
    several = scores.shape[2] > 1
    return np.asarray(scores.argmax(axis=2) if several else (scores[..., 0] > 0.5).astype(np.int64))


def blend_classes(canvas: Array, classes: Array, placed: AffineMap = IDENTITY) -> None:
    """Colour the pixels of each class but the first.

    Args:
        canvas: uint8 [height, width, 3], changed.
        classes: the class at each position of the model's input: int [rows, columns].
        placed: from the image to the model's input.
    """
    height, width = canvas.shape[:2]
    places = []
    for axis, count in enumerate((height, width)):
        fractions = (np.arange(count) + 0.5) / count * placed.scale[axis] + placed.shift[axis]
        places.append(np.clip((fractions * classes.shape[axis]).astype(np.int64), 0, classes.shape[axis] - 1))
    of_pixels = classes[np.ix_(*places)]
    table = np.array([(0, 0, 0), *(colour_of(number - 1) for number in range(1, max(int(classes.max()), 1) + 1))])
    mixed = canvas * (1 - OPACITY) + table[of_pixels] * OPACITY
    canvas[of_pixels > 0] = mixed[of_pixels > 0].astype(np.uint8)


def with_texts(canvas: Array, texts: Sequence[TextLine]) -> Array:
    """Return the image with texts; the image itself if there are none.

    Raises:
        ImageError: neither Pillow nor OpenCV is installed.
    """
    if not texts:
        return canvas
    try:
        from PIL import Image, ImageDraw
    except ImportError:
        return _with_opencv(canvas, texts)
    picture = Image.fromarray(canvas)
    draw = ImageDraw.Draw(picture)
    for text in texts:
        content = text.text.encode("latin-1", "replace").decode("latin-1")  # what the built-in font has
        width, height = 6 * len(content) + 4, 12
        left, top = max(min(text.x, canvas.shape[1] - width), 0), max(text.y - height, 0)
        draw.rectangle([left, top, left + width, top + height], fill=text.colour)
        draw.text((left + 2, top), content, fill=(255, 255, 255))
    return np.asarray(picture)


def _with_opencv(canvas: Array, texts: Sequence[TextLine]) -> Array:
    cv2 = opencv()
    for text in texts:
        content = text.text.encode("ascii", "replace").decode("ascii")
        (width, height), _ = cv2.getTextSize(content, cv2.FONT_HERSHEY_SIMPLEX, 0.4, 1)
        left, top = max(min(text.x, canvas.shape[1] - width), 0), max(text.y - height - 4, 0)
        cv2.rectangle(canvas, (left, top), (left + width, top + height + 4), text.colour, -1)
        cv2.putText(canvas, content, (left, top + height + 1), cv2.FONT_HERSHEY_SIMPLEX, 0.4, (255, 255, 255))
    return canvas


def opencv() -> Any:
    """Return OpenCV.

    Raises:
        ImageError: it is not installed, and neither is Pillow, which is preferred.
    """
    try:
        import cv2
    except ImportError:
        raise ImageError("neither Pillow nor OpenCV is installed to write images", "python3 -m pip install pillow")
    return cv2
