"""Answers drawn into photos: boxes with their labels, keypoints, masks, and the names of classes.

The drawing itself needs numpy only; text and image files need Pillow or OpenCV, as decoding does.
"""

from __future__ import annotations

import io
from typing import Any, List, NamedTuple, Sequence, Tuple

import numpy as np

from deploy.answers import NamedOutputs
from deploy.contract.bundle import Bundle
from deploy.contract.detection import Detections
from deploy.contract.errors import ImageError
from deploy.contract.image_geometry import AffineMap, input_map
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
LEAST_SCORE = 0.4
"""Objects with a lower score are not drawn."""
OPACITY = 0.5
"""Of masks."""
SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp")


class Text(NamedTuple):
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


def drawn(image: Array, answer: Any, opened: Bundle, least_score: float = LEAST_SCORE) -> Array:
    """Return a copy of an image with an answer drawn into it: uint8 [height, width, 3].

    Args:
        image: the decoded image, [height, width, 1 or 3], from 0 to 255.
        answer: of `Model` for this image.
        opened: the bundle of the model.
        least_score: objects with a lower score are left out.

    Raises:
        ImageError: the sample is not an image.
    """
    if getattr(image, "ndim", 0) != 3 or image.shape[2] not in (1, 3):
        raise ImageError("only images can be drawn into", "use --draw with image files")
    canvas = np.ascontiguousarray(
        np.broadcast_to(np.clip(image, 0, 255), (*image.shape[:2], 3)).astype(np.uint8)
    ).copy()
    line = max(round(min(canvas.shape[:2]) / 200), 1)
    texts: List[Text] = []
    if isinstance(answer, Detections):
        for index in np.flatnonzero(answer.scores >= least_score)[::-1]:  # the best one on top
            colour = _colour(int(answer.classes[index]))
            top, left, bottom, right = _pixels(answer.boxes[index], canvas)
            _rectangle(canvas, (top, left, bottom, right), colour, line)
            if answer.keypoints is not None:
                _points(canvas, answer.keypoints[index], colour, line)
            name = answer.labels[answer.classes[index]] if len(answer.labels) else str(answer.classes[index])
            texts.append(Text(left, top, "%s %.2f" % (name, answer.scores[index]), colour))
    elif not isinstance(answer, NamedOutputs):
        texts.append(Text(0, 0, "%s %.2f" % (answer.label, answer.score), COLOURS[0]))
    elif opened.task == "segmentation":
        _blend(canvas, answer.first, input_map(opened.preprocessing, *image.shape[:2]))
    elif opened.task == "keypoints":
        places = answer.first.reshape(-1, 2)[:, ::-1]
        _points(canvas, places, COLOURS[0], line)
    elif hasattr(answer, "chosen"):
        lines = ["%s %.2f" % pair for pair in answer.chosen()]
        texts += [Text(0, 0, ", ".join(lines), COLOURS[0])] if lines else []
    else:
        raise ImageError(
            "the answer of this model cannot be drawn", "it is no class, no object, no mask and no keypoint"
        )
    return _with_texts(canvas, texts)


def encoded(image: Array, suffix: str) -> bytes:
    """Return an image as the content of a file.

    Args:
        image: uint8 [height, width, 3].
        suffix: of the file, one of SUFFIXES.

    Raises:
        ImageError: neither Pillow nor OpenCV is installed, or there is no such format.
    """
    if suffix.lower() not in SUFFIXES:
        raise ImageError(
            "%s is not the suffix of an image" % (suffix or "nothing"), "use one of: " + ", ".join(SUFFIXES)
        )
    try:
        from PIL import Image
    except ImportError:
        cv2 = _opencv()
        return bytes(cv2.imencode(suffix, image[..., ::-1])[1].tobytes())
    content = io.BytesIO()
    options = {"quality": 92} if suffix.lower() in (".jpg", ".jpeg") else {}
    Image.fromarray(image).save(content, Image.registered_extensions()[suffix.lower()], **options)
    return content.getvalue()


def _colour(number: int) -> Tuple[int, int, int]:
    return COLOURS[number % len(COLOURS)]


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


def _points(canvas: Array, points: Array, colour: Sequence[int], line: int) -> None:
    """Draw keypoints (y, x), or (y, x, probability that it is visible), as squares."""
    height, width = canvas.shape[:2]
    for point in points:
        if len(point) > 2 and point[2] < 0.5:
            continue
        row, column = round(float(point[0]) * height), round(float(point[1]) * width)
        rows, columns = (slice(max(place - line, 0), max(place + line + 1, 0)) for place in (row, column))
        canvas[rows, columns] = 255 - np.array(colour)
        rows, columns = (slice(max(place - line + 1, 0), max(place + line, 0)) for place in (row, column))
        canvas[rows, columns] = colour


def _blend(canvas: Array, scores: Array, placed: AffineMap) -> None:
    """Colour the pixels of each class but the first; one channel: where the score is above one half."""
    scores = scores if scores.ndim == 3 else scores[..., np.newaxis]
    classes = scores.argmax(axis=2) if scores.shape[2] > 1 else (scores[..., 0] > 0.5).astype(np.int64)
    height, width = canvas.shape[:2]
    places = []
    for axis, count in enumerate((height, width)):
        fractions = (np.arange(count) + 0.5) / count * placed.scale[axis] + placed.shift[axis]
        places.append(np.clip((fractions * classes.shape[axis]).astype(np.int64), 0, classes.shape[axis] - 1))
    of_pixels = classes[np.ix_(*places)]
    table = np.array([(0, 0, 0), *(_colour(number - 1) for number in range(1, max(int(classes.max()), 1) + 1))])
    mixed = canvas * (1 - OPACITY) + table[of_pixels] * OPACITY
    canvas[of_pixels > 0] = mixed[of_pixels > 0].astype(np.uint8)


def _with_texts(canvas: Array, texts: Sequence[Text]) -> Array:
    """Return the image with texts; the image itself if there are none."""
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


def _with_opencv(canvas: Array, texts: Sequence[Text]) -> Array:
    cv2 = _opencv()
    for text in texts:
        content = text.text.encode("ascii", "replace").decode("ascii")
        (width, height), _ = cv2.getTextSize(content, cv2.FONT_HERSHEY_SIMPLEX, 0.4, 1)
        left, top = max(min(text.x, canvas.shape[1] - width), 0), max(text.y - height - 4, 0)
        cv2.rectangle(canvas, (left, top), (left + width, top + height + 4), text.colour, -1)
        cv2.putText(canvas, content, (left, top + height + 1), cv2.FONT_HERSHEY_SIMPLEX, 0.4, (255, 255, 255))
    return canvas


def _opencv() -> Any:
    try:
        import cv2
    except ImportError:
        raise ImageError("neither Pillow nor OpenCV is installed to write images", "python3 -m pip install pillow")
    return cv2
