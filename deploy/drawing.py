"""Answers drawn into photos: boxes with their labels, keypoints, masks, and the names of classes.

`deploy.contract.shapes` draws. Text and image files need Pillow or OpenCV, as decoding does.
"""

from __future__ import annotations

import io
from typing import Any, List

import numpy as np

from deploy.answers import NamedOutputs
from deploy.contract.bundle import Bundle
from deploy.contract.detection import Detections
from deploy.contract.errors import ImageError
from deploy.contract.image_geometry import input_map
from deploy.contract.preprocessing import Array
from deploy.contract.shapes import (
    COLOURS,
    TextLine,
    blend_classes,
    class_at,
    draw_objects,
    draw_points,
    line_width,
    opencv,
    with_texts,
)

__all__ = ["COLOURS", "LEAST_SCORE", "SUFFIXES", "drawn", "encoded"]

LEAST_SCORE = 0.4
"""Objects with a lower score are not drawn."""
SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp")


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
    line = line_width(canvas)
    texts: List[TextLine] = []
    if isinstance(answer, Detections):
        texts += draw_objects(canvas, answer.above(least_score), line)
    elif not isinstance(answer, NamedOutputs):
        texts.append(TextLine(0, 0, "%s %.2f" % (answer.label, answer.score), COLOURS[0]))
    elif opened.task == "segmentation":
        blend_classes(canvas, class_at(answer.first), input_map(opened.preprocessing, *image.shape[:2]))
    elif opened.task == "keypoints":
        places = answer.first.reshape(-1, 2)[:, ::-1]
        draw_points(canvas, places, COLOURS[0], line)
    elif hasattr(answer, "chosen"):
        lines = ["%s %.2f" % pair for pair in answer.chosen()]
        texts += [TextLine(0, 0, ", ".join(lines), COLOURS[0])] if lines else []
    else:
        raise ImageError(
            "the answer of this model cannot be drawn", "it is no class, no object, no mask and no keypoint"
        )
    return with_texts(canvas, texts)


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
        cv2 = opencv()
        return bytes(cv2.imencode(suffix, image[..., ::-1])[1].tobytes())
    content = io.BytesIO()
    options = {"quality": 92} if suffix.lower() in (".jpg", ".jpeg") else {}
    Image.fromarray(image).save(content, Image.registered_extensions()[suffix.lower()], **options)
    return content.getvalue()
