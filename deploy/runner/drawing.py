"""Answers drawn into photos: boxes with their labels, keypoints, masks, and the names of classes.

`deploy.contract.shapes` draws; text and image files need Pillow, as decoding does. No image replaces a sample.
"""

from __future__ import annotations

import errno
import io
import os
from typing import Any, List, Sequence, Set, Tuple

import numpy as np

from deploy.contract.bundle import ARRAYS_IN_IMAGE, Bundle
from deploy.contract.detection import Detections
from deploy.contract.errors import ArgumentError, ImageError
from deploy.contract.image_geometry import AffineMap, input_map
from deploy.contract.pictures import pillow
from deploy.contract.preprocessing import Array, PreprocessingError
from deploy.contract.shapes import (
    COLOURS,
    Caption,
    blend_classes,
    class_at,
    draw_objects,
    draw_points,
    line_height,
    line_width,
    title,
    write_captions,
)
from deploy.runner.answers import Answer, ChosenLabels

LEAST_SCORE = 0.4
"""Objects with a lower score are not drawn."""
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp")
"""The formats in which images are written."""
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
    write_captions(canvas, texts)
    return canvas


def encoded(image: Array, suffix: str) -> bytes:
    """Return an image, uint8 [height, width, 3], as the content of a file with one of `IMAGE_SUFFIXES`.

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
    height = line_height(canvas) + 2
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


# --- the files of --draw --------------------------------------------------------------


class DrawnFiles:
    """The paths of the images of `--draw`. All are checked before the first one is written.

    Args:
        target: a file, or a folder, which is created.
        sources: the files of the samples; none for the frames of a video and for the golden inputs of a bundle, whose
            names are all different.
        is_single: whether there is one sample, so that `target` may be a file.

    Raises:
        ArgumentError: `target` is not suitable, or an image would replace a sample.
        OSError: the folder does not exist, or cannot be created.
    """

    def __init__(self, target: str, sources: Sequence[str], is_single: bool) -> None:
        self._folder = target
        if is_single and not os.path.isdir(target) and not target.endswith(os.sep):
            _check_file(target)
            self._planned = [target]
        else:
            _check_folder(target)
            self._planned = _different([os.path.join(target, _image_name(source)) for source in sources])
        _refuse_samples(self._planned, sources)

    def path(self, index: int, name: str) -> str:
        """Return the path of the image of a sample."""
        return self._planned[index] if self._planned else os.path.join(self._folder, _image_name(name))

    def create_folder(self) -> None:
        """Create the folder if there is none."""
        folder = self._folder if not self._planned else os.path.dirname(self._planned[0])
        os.makedirs(folder or os.curdir, exist_ok=True)


def _check_file(target: str) -> None:
    suffix = os.path.splitext(target)[1].lower()
    if suffix not in IMAGE_SUFFIXES:
        what = "--draw %s does not end like an image" % (target or "''")
        raise ArgumentError(what, "use one of %s, or %s for a folder" % (", ".join(IMAGE_SUFFIXES), target + os.sep))
    folder = os.path.dirname(os.path.abspath(target))
    if not os.path.isdir(folder):
        raise FileNotFoundError(errno.ENOENT, "--draw: the folder does not exist", folder)


def _check_folder(target: str) -> None:
    if os.path.exists(target) and not os.path.isdir(target):
        raise ArgumentError("there are several samples, and --draw %s is a file" % target, "name a folder")
    if not os.path.exists(target) and os.path.splitext(target)[1].lower() in IMAGE_SUFFIXES:
        what = "there are several samples, and --draw %s ends like one image" % target
        raise ArgumentError(what, "name a folder, or one sample")


def _image_name(source: str) -> str:
    """Return the file name of a sample, as an image."""
    stem, suffix = os.path.splitext(os.path.basename(source))
    return stem + (suffix if suffix.lower() in IMAGE_SUFFIXES else ".jpg")


def _different(paths: Sequence[str]) -> List[str]:
    """Return different paths: repeated ones get -2, -3 and so on. File systems may ignore the case of names."""
    taken: Set[str] = set()
    result = []
    for path in paths:
        stem, suffix = os.path.splitext(path)
        number = 1
        while path.casefold() in taken:
            number += 1
            path = "%s-%d%s" % (stem, number, suffix)
        taken.add(path.casefold())
        result.append(path)
    return result


def _refuse_samples(paths: Sequence[str], sources: Sequence[str]) -> None:
    """Refuse paths that are the files of samples, under this name or another one."""
    samples = {_identity(source): source for source in sources if os.path.exists(source)}
    for path in paths:
        sample = samples.get(_identity(path)) if os.path.exists(path) else None
        if sample is not None:
            raise ArgumentError("--draw would overwrite the sample %s" % sample, "name another file or folder")


def _identity(path: str) -> Tuple[int, int]:
    status = os.stat(path)
    return status.st_dev, status.st_ino
