"""Answers drawn into photos: boxes with their labels, keypoints, masks, and the names of classes.

Shapes are drawn with numpy; text and image files need Pillow or OpenCV, as decoding does.
"""

from __future__ import annotations

import io
from typing import Any, List, Sequence, Tuple

import numpy as np

from deploy import captions
from deploy.answers import Answer, ChosenLabels
from deploy.captions import Caption
from deploy.contract.bundle import ARRAYS_IN_IMAGE, Bundle
from deploy.contract.detection import Detections
from deploy.contract.errors import ArgumentError, ImageError
from deploy.contract.image_geometry import AffineMap, input_map
from deploy.contract.preprocessing import Array, PreprocessingError
from deploy.output_files import IMAGE_SUFFIXES

Colour = Tuple[int, int, int]
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
VISIBLE = 0.5
"""Keypoints with a lower probability that they are visible are not drawn."""
LINE = 1 / 250
"""The width of lines, as a fraction of the shorter dimension of the image."""
LINE_OF_BOX = 1 / 8
"""The largest width of the lines of a small box, as a fraction of its shorter dimension."""
QUALITY = 92
"""Of JPEG files."""


def check(opened: Bundle) -> None:
    """Check that the answers of a bundle can be drawn on this host.

    Raises:
        ArgumentError: the bundle has another task.
        ImageError: neither Pillow nor OpenCV is installed.
    """
    if opened.answers == "arrays" and opened.task not in ARRAYS_IN_IMAGE:
        what = "the answers of the task %s cannot be drawn" % opened.task
        raise ArgumentError(what, "leave out --draw: only classes, objects, masks and keypoints can be drawn")
    captions.check_library()


def drawn(image: Any, answer: Any, opened: Any, least_score: float = LEAST_SCORE) -> Array:
    """Return a copy of an image with an answer drawn into it: uint8 [height, width, 3].

    Args:
        image: the decoded image, [height, width, 1 or 3] or [height, width], from 0 to 255.
        answer: the answer of `Model` for this image.
        opened: the bundle of the model: its task and its preprocessing.
        least_score: objects with a lower score are left out.

    Raises:
        ImageError: the sample is not an image, the answer cannot be drawn, or neither Pillow nor OpenCV is installed.
    """
    canvas = _canvas(image)
    texts: List[Caption] = []
    arrays = ARRAYS_IN_IMAGE.get(opened.task)
    if isinstance(answer, Detections):
        texts = _objects(canvas, answer, least_score)
    elif isinstance(answer, Answer):
        texts = [Caption(0, 0, _title(answer.label, answer.index, answer.score), COLOURS[0])]
    elif isinstance(answer, ChosenLabels):
        texts = _labels(canvas, answer)
    elif arrays == "mask":
        _blend(canvas, answer.first, _position(opened, canvas))
    elif arrays == "points":
        _points(canvas, answer.first.reshape(-1, 2)[:, ::-1], COLOURS[0], _line(canvas))
    else:
        hint = "only classes, objects, masks and keypoints can be drawn"
        raise ImageError("the answer of this model cannot be drawn", hint)
    captions.write(canvas, texts)
    return canvas


def encoded(image: Array, suffix: str) -> bytes:
    """Return an image as the content of a file.

    Args:
        image: uint8 [height, width, 3].
        suffix: the suffix of the file, one of `IMAGE_SUFFIXES`.

    Raises:
        ImageError: the format is unknown or cannot hold the image, or neither Pillow nor OpenCV is installed.
    """
    suffix = suffix.lower()
    if suffix not in IMAGE_SUFFIXES:
        raise ImageError("%r is not the suffix of an image" % suffix, "use one of %s" % ", ".join(IMAGE_SUFFIXES))
    options = {"quality": QUALITY} if suffix in (".jpg", ".jpeg") else {}
    try:
        from PIL import Image
    except ImportError:
        return bytes(captions.opencv().imencode(suffix, image[..., ::-1])[1].tobytes())
    content = io.BytesIO()
    try:
        Image.fromarray(image).save(content, Image.registered_extensions()[suffix], **options)
    except (OSError, ValueError) as error:  # JPEG has at most 65,500 pixels in a row
        raise ImageError("the drawn image cannot be written as %s: %s" % (suffix, error), "use --draw with .png")
    return content.getvalue()


def _canvas(image: Any) -> Array:
    """Return a copy of an image as RGB: uint8 [height, width, 3].

    Raises:
        ImageError: the sample is not an image.
    """
    shape = getattr(image, "shape", ())
    if len(shape) == 2:
        image = image[..., np.newaxis]
    if len(shape) not in (2, 3) or image.shape[2] not in (1, 3) or image.dtype.kind not in "uifb":
        raise ImageError("only images of 1 or 3 channels can be drawn into", "leave out --draw for this sample")
    if image.dtype != np.uint8:
        image = np.clip(np.nan_to_num(image.astype(np.float32)), 0, 255).astype(np.uint8)
    return np.array(np.broadcast_to(image, image.shape[:2] + (3,)))


def _line(canvas: Array) -> int:
    shorter: int = min(canvas.shape[:2])
    return max(round(shorter * LINE), 1)


def _colour(number: int) -> Colour:
    return COLOURS[number % len(COLOURS)]


def _title(label: str, number: int, score: float) -> str:
    """Return the label with its score; for a label that the fonts do not have, the number of the class."""
    return "%s %.2f" % (label if captions.is_printable(label) else "class %d" % number, score)


def _objects(canvas: Array, answer: Detections, least_score: float) -> List[Caption]:
    """Draw the boxes and keypoints of objects, the best on top; return their captions."""
    texts = []
    finite = np.isfinite(answer.boxes).all(axis=1)
    for index in np.flatnonzero((answer.scores >= least_score) & finite)[::-1]:
        number = int(answer.classes[index])
        top, left, bottom, right = _pixels(answer.boxes[index], canvas)
        line = min(_line(canvas), max(int(min(bottom - top, right - left) * LINE_OF_BOX), 1))
        _rectangle(canvas, (top, left, bottom, right), _colour(number), line)
        if answer.keypoints is not None:
            _points(canvas, answer.keypoints[index], _colour(number), line)
        title = _title(answer.label(number), number, float(answer.scores[index]))
        texts.append(Caption(left, _caption_end(top, bottom, captions.line_height(canvas)), title, _colour(number)))
    return texts


def _caption_end(top: int, bottom: int, height: int) -> int:
    """Return the lower end of the caption of a box: above it; at the top of the image in it, or below a small box."""
    if top >= height:
        return top
    return top + height if bottom - top > 3 * height else bottom + height


def _labels(canvas: Array, answer: ChosenLabels) -> List[Caption]:
    """Return the captions of the chosen labels, one below the other."""
    texts = []
    height = captions.line_height(canvas) + 2
    for row, (label, score) in enumerate(answer.chosen()):
        number = answer.labels.index(label) if label in answer.labels else int(label)
        texts.append(Caption(0, (row + 1) * height, _title(label, number, score), COLOURS[0]))
    return texts


def _pixels(box: Array, canvas: Array) -> Tuple[int, int, int, int]:
    """Return a box of fractions as rows and columns of pixels; it has at least one pixel."""
    height, width = canvas.shape[:2]
    sizes = np.array([height, width, height, width])
    top, left, bottom, right = (round(value) for value in np.clip(box * sizes, 0, sizes).tolist())
    top = min(top, height - 1)
    left = min(left, width - 1)
    return top, left, max(bottom, top + 1), max(right, left + 1)


def _rectangle(canvas: Array, box: Tuple[int, int, int, int], colour: Colour, line: int) -> None:
    top, left, bottom, right = box
    canvas[top : top + line, left:right] = colour
    canvas[max(bottom - line, top) : bottom, left:right] = colour
    canvas[top:bottom, left : left + line] = colour
    canvas[top:bottom, max(right - line, left) : right] = colour


def _points(canvas: Array, points: Array, colour: Colour, line: int) -> None:
    """Draw keypoints (y, x), or (y, x, probability that it is visible), as squares with a border."""
    border = tuple(255 - value for value in colour)
    for point in points[np.isfinite(points).all(axis=1)]:
        if len(point) > 2 and point[2] < VISIBLE:
            continue
        # Points far outside the image would be integers without limit.
        row, column = (round(value) for value in (np.clip(point[:2], -1, 2) * canvas.shape[:2]).tolist())
        _square(canvas, row, column, line + 1, border)
        _square(canvas, row, column, line, colour)


def _square(canvas: Array, row: int, column: int, radius: int, colour: Sequence[int]) -> None:
    rows, columns = (slice(max(middle - radius, 0), max(middle + radius, 0)) for middle in (row, column))
    canvas[rows, columns] = colour


def _position(opened: Any, canvas: Array) -> AffineMap:
    """Return the position of the image in the input of the model.

    Raises:
        ImageError: a step of preprocessing destroys positions.
    """
    try:
        return input_map(opened.preprocessing, *canvas.shape[:2])
    except PreprocessingError as error:
        raise ImageError("the mask cannot be drawn: %s" % error, "leave out --draw")


def _blend(canvas: Array, scores: Array, placed: AffineMap) -> None:
    """Mix the pixels of each class but the first with its colour. One channel: where the score is above one half.

    Args:
        canvas: the image, which is changed.
        scores: the output of the model, [rows, columns, classes] or [rows, columns].
        placed: the position of the image in the input of the model. Pixels that the model has not seen are kept.
    """
    scores = scores if scores.ndim == 3 else scores[..., np.newaxis]
    classes = scores.argmax(axis=2) if scores.shape[2] > 1 else (scores[..., 0] > 0.5).astype(np.int64)
    indices = []
    seen = []
    for axis, count in enumerate(canvas.shape[:2]):
        fractions = (np.arange(count) + 0.5) / count * placed.scale[axis] + placed.shift[axis]
        seen.append((fractions >= 0) & (fractions < 1))
        indices.append(np.clip((fractions * classes.shape[axis]).astype(np.int64), 0, classes.shape[axis] - 1))
    of_pixels = classes[np.ix_(*indices)]
    coloured = (of_pixels > 0) & seen[0][:, np.newaxis] & seen[1]
    table = np.array(COLOURS, np.uint16)[(of_pixels[coloured] - 1) % len(COLOURS)]
    canvas[coloured] = (canvas[coloured] + table) // 2
