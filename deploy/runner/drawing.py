"""Answers drawn into photos: boxes with their labels, keypoints, masks, and the names of classes.

`deploy.contract.shapes` draws; text and image files need Pillow, as decoding does.
"""

from __future__ import annotations

import io
from typing import Any, List

import numpy as np

from deploy.contract import captions
from deploy.contract.bundle import ARRAYS_IN_IMAGE, Bundle
from deploy.contract.captions import Caption
from deploy.contract.detection import Detections
from deploy.contract.errors import ArgumentError, ImageError
from deploy.contract.image_geometry import AffineMap, input_map
from deploy.contract.pictures import pillow
from deploy.contract.preprocessing import Array, PreprocessingError
from deploy.contract.shapes import COLOURS, blend_classes, class_at, draw_objects, draw_points, line_width, title
from deploy.runner.answers import Answer, ChosenLabels
from deploy.runner.output_files import IMAGE_SUFFIXES

LEAST_SCORE = 0.4
"""Objects with a lower score are not drawn."""
QUALITY = 92
"""Of JPEG files."""


def check(opened: Bundle) -> None:
    """Check that the answers of a bundle can be drawn on this host.

    Raises:
        ArgumentError: the bundle has another task.
        ImageError: Pillow is not installed.
    """
    if opened.answers == "arrays" and opened.task not in ARRAYS_IN_IMAGE:
        what = "the answers of the task %s cannot be drawn" % opened.task
        raise ArgumentError(what, "leave out --draw: only classes, objects, masks and keypoints can be drawn")
    pillow()


def drawn(image: Any, answer: Any, opened: Any, least_score: float = LEAST_SCORE) -> Array:
    """Return a copy of an image with an answer drawn into it: uint8 [height, width, 3].

    The decoded image is [height, width, 1 or 3] or [height, width], from 0 to 255. Objects with a lower score than
    `least_score` are left out.

    Raises:
        ImageError: the sample is not an image, the answer cannot be drawn, or Pillow is not installed.
    """
    canvas = _canvas(image)
    texts: List[Caption] = []
    arrays = ARRAYS_IN_IMAGE.get(opened.task)
    if isinstance(answer, Detections):
        texts = draw_objects(canvas, answer.above(least_score))
    elif isinstance(answer, Answer):
        texts = [title(answer.label, answer.index, answer.score)._replace(colour=COLOURS[0])]
    elif isinstance(answer, ChosenLabels):
        texts = _labels(canvas, answer)
    elif arrays == "mask":
        blend_classes(canvas, class_at(answer.first), _position(opened, canvas))
    elif arrays == "points":
        draw_points(canvas, answer.first.reshape(-1, 2)[:, ::-1], COLOURS[0], line_width(canvas))
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
        ImageError: the format is unknown or cannot hold the image, or Pillow is not installed.
    """
    suffix = suffix.lower()
    if suffix not in IMAGE_SUFFIXES:
        raise ImageError("%r is not the suffix of an image" % suffix, "use one of %s" % ", ".join(IMAGE_SUFFIXES))
    options = {"quality": QUALITY} if suffix in (".jpg", ".jpeg") else {}
    module = pillow()
    content = io.BytesIO()
    try:
        module.fromarray(image).save(content, module.registered_extensions()[suffix], **options)
    except (OSError, ValueError) as error:  # JPEG has at most 65,500 pixels in a row
        raise ImageError("the drawn image cannot be written as %s: %s" % (suffix, error), "use --draw with .png")
    return content.getvalue()


def _canvas(image: Any) -> Array:
    """Return a copy of an image as RGB: uint8 [height, width, 3]."""
    shape = getattr(image, "shape", ())
    if len(shape) == 2:
        image = image[..., np.newaxis]
    if len(shape) not in (2, 3) or image.shape[2] not in (1, 3) or image.dtype.kind not in "uifb":
        raise ImageError("only images of 1 or 3 channels can be drawn into", "leave out --draw for this sample")
    if image.dtype != np.uint8:
        image = np.clip(np.nan_to_num(image.astype(np.float32)), 0, 255).astype(np.uint8)
    return np.array(np.broadcast_to(image, image.shape[:2] + (3,)))


def _labels(canvas: Array, answer: ChosenLabels) -> List[Caption]:
    """Return the captions of the chosen labels, one below the other."""
    texts = []
    height = captions.line_height(canvas) + 2
    for row, (label, score) in enumerate(answer.chosen()):
        number = answer.labels.index(label) if label in answer.labels else int(label)
        texts.append(title(label, number, score, 0, (row + 1) * height)._replace(colour=COLOURS[0]))
    return texts


def _position(opened: Any, canvas: Array) -> AffineMap:
    """Return the position of the image in the input of the model."""
    try:
        return input_map(opened.preprocessing, *canvas.shape[:2])
    except PreprocessingError as error:
        raise ImageError("the mask cannot be drawn: %s" % error, "leave out --draw")
