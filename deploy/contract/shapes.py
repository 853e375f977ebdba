"""Shapes and captions in images: boxes, keypoints, masks. The device and the report of a run draw with them.

Captions are lines with a coloured background. They need Pillow for the shapes of the letters.
"""

from __future__ import annotations

import functools
import unicodedata
from typing import Any, List, NamedTuple, Sequence, Tuple

import numpy as np

from deploy.contract.detection import Detections
from deploy.contract.image_geometry import IDENTITY, AffineMap
from deploy.contract.pictures import pillow
from deploy.contract.preprocessing import Array

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
VISIBLE = 0.5
"""Keypoints with a lower probability that they are visible are not drawn."""
LINE = 1 / 250
"""The width of lines, as a fraction of the shorter dimension of the image."""
LINE_OF_BOX = 1 / 8
"""The largest width of the lines of a small box, as a fraction of its shorter dimension."""
LEAST_HEIGHT = 12
"""The smallest height of a line, in pixels."""
OF_IMAGE = 1 / 48
"""The height of a line in a large image, as a fraction of the shorter dimension of the image."""
MARGIN = 2
_BITMAP_HEIGHT = 11
"""The height of the font of older versions of Pillow, in pixels."""


class Caption(NamedTuple):
    """A line of text.

    Attributes:
        x: the position of its left end, in pixels.
        y: the position of its lower end, in pixels. A caption that would leave the image is moved into it.
        colour: its background, RGB.
        ascii_text: what is drawn if the fonts do not have all characters of the text.
    """

    x: int
    y: int
    text: str
    colour: Tuple[int, int, int]
    ascii_text: str = ""


def line_height(canvas: Array) -> int:
    """Return the height of a caption in an image [height, width, 3], in pixels, give or take two."""
    shorter: int = min(canvas.shape[:2])
    return max(round(shorter * OF_IMAGE), LEAST_HEIGHT)


def write_captions(canvas: Array, captions: Sequence[Caption]) -> None:
    """Write captions into an image; later ones cover earlier ones.

    Raises:
        ImageError: Pillow is not installed.
    """
    image = pillow().fromarray(canvas)
    for caption in captions:
        letters = _letters(ascii_of(caption), line_height(canvas))
        top = max(min(caption.y, image.height) - letters.height, 0)
        left = max(min(caption.x, image.width - letters.width - 2 * MARGIN), 0)
        image.paste(caption.colour, (left, top, left + letters.width + 2 * MARGIN, top + letters.height))
        brightness = np.dot(caption.colour, (0.299, 0.587, 0.114))
        image.paste((0, 0, 0) if brightness > 150 else (255, 255, 255), (left + MARGIN, top), letters)
    canvas[...] = np.asarray(image)


def ascii_of(caption: Caption) -> str:
    """Return the text of a caption without accents, because the built-in fonts have ASCII only.

    If the text has other characters, `ascii_text` takes its place, or a ? takes the place of each of them.
    """
    decomposed = unicodedata.normalize("NFKD", caption.text)
    text = "".join(character for character in decomposed if not unicodedata.combining(character))
    if not text.isascii() and caption.ascii_text:
        text = caption.ascii_text
    return text.encode("ascii", "replace").decode("ascii")


def _letters(text: str, height: int) -> Any:
    """Return a text as an image of Pillow of about this height: 255 where ink is."""
    from PIL import Image, ImageDraw

    font = _font(height)
    if font is not None:
        ascent, descent = font.getmetrics()
        image = Image.new("L", (max(int(font.getbbox(text)[2]), 1), ascent + descent))
        ImageDraw.Draw(image).text((0, 0), text, fill=255, font=font)
        return image
    image = Image.new("L", (6 * len(text) or 1, _BITMAP_HEIGHT))
    ImageDraw.Draw(image).text((0, 0), text, fill=255)
    factor = max(round(height / _BITMAP_HEIGHT), 1)
    return image.resize((image.width * factor, image.height * factor), 0)  # nearest; its name differs between versions


@functools.lru_cache(maxsize=8)
def _font(height: int) -> Any:
    """Return Pillow's font with lines of about this height; None for versions that only have a bitmap font."""
    from PIL import ImageFont

    try:
        return ImageFont.load_default(round(height * 0.8))  # the rest is the space between lines
    except (TypeError, ImportError, OSError):  # before Pillow 10.1, or built without FreeType
        return None


def colour_of(number: int) -> Colour:
    """Return the colour of a class."""
    return COLOURS[number % len(COLOURS)]


def line_width(canvas: Array) -> int:
    """Return the width of lines in an image, in pixels."""
    shorter: int = min(canvas.shape[:2])
    return max(round(shorter * LINE), 1)


def title(label: str, number: int, score: float, x: int = 0, y: int = 0) -> Caption:
    """Return the caption of a class with its score: its left end is at `x`, its lower end at `y`, in pixels.

    The number of the class chooses the colour, and takes the place of a label that the fonts do not have.
    """
    return Caption(x, y, "%s %.2f" % (label, score), colour_of(number), "class %d %.2f" % (number, score))


def draw_objects(canvas: Array, detections: Detections) -> List[Caption]:
    """Draw the boxes and keypoints of objects, the best on top, and return their captions in this order.

    Args:
        canvas: uint8 [height, width, 3], which is changed.
        detections: the objects, the best first; boxes that are not finite are left out.
    """
    texts = []
    for index in np.flatnonzero(np.isfinite(detections.boxes).all(axis=1))[::-1]:
        number = int(detections.classes[index])
        top, left, bottom, right = _pixels(detections.boxes[index], canvas)
        line = min(line_width(canvas), max(int(min(bottom - top, right - left) * LINE_OF_BOX), 1))
        _rectangle(canvas, (top, left, bottom, right), colour_of(number), line)
        if detections.keypoints is not None:
            draw_points(canvas, detections.keypoints[index], colour_of(number), line)
        lower = top  # the caption is above the box
        if top < line_height(canvas):  # at the top of the image in the box, or below a small one
            lower = line_height(canvas) + (top if bottom - top > 3 * line_height(canvas) else bottom)
        texts.append(title(detections.label(number), number, float(detections.scores[index]), left, lower))
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


def draw_points(canvas: Array, points: Array, colour: Colour, line: int) -> None:
    """Draw keypoints as squares with a border.

    Args:
        canvas: uint8 [height, width, 3], which is changed.
        points: y and x as fractions of the image, optionally with the probability that the point is visible: [n, 2 or
            3]; points that are not finite are left out.
        colour: of the squares, RGB.
        line: half the width of a square, in pixels.
    """
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


def class_at(scores: Array) -> Array:
    """Return the class at each position: int64 [height, width]; of one channel: 1 where the score is above one half.

    Args:
        scores: [height, width, classes], or [height, width].
    """
    scores = scores if scores.ndim == 3 else scores[..., np.newaxis]
    several = scores.shape[2] > 1
    return np.asarray(scores.argmax(axis=2) if several else (scores[..., 0] > 0.5).astype(np.int64))


def blend_classes(canvas: Array, classes: Array, placed: AffineMap = IDENTITY) -> None:
    """Mix the pixels of each class but the first with its colour.

    Args:
        canvas: uint8 [height, width, 3], which is changed.
        classes: the class at each position of the model's input: int [rows, columns].
        placed: the position of the image in the input. Pixels that the model has not seen are kept.
    """
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
