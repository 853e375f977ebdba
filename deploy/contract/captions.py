"""Text in images, as lines with a coloured background. It needs Pillow for the shapes of the letters."""

from __future__ import annotations

import functools
import unicodedata
from typing import Any, NamedTuple, Sequence, Tuple

import numpy as np

from deploy.contract.pictures import pillow
from deploy.contract.preprocessing import Array

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
        text: the text.
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


def write(canvas: Array, captions: Sequence[Caption]) -> None:
    """Write captions into an image.

    Args:
        canvas: uint8 [height, width, 3], which is changed.
        captions: the captions; later ones cover earlier ones.

    Raises:
        ImageError: Pillow is not installed.
    """
    pillow()
    height = line_height(canvas)
    for caption in captions:
        text = caption.text if is_printable(caption.text) else caption.ascii_text or caption.text
        letters = np.pad(_letters(printable(text), height), ((0, 0), (MARGIN, MARGIN)), "constant")
        _stamp(canvas, letters, caption)


def printable(text: str) -> str:
    """Return a text without accents, and with ? for other characters: the built-in fonts have ASCII only."""
    return _without_accents(text).encode("ascii", "replace").decode("ascii")


def is_printable(text: str) -> bool:
    """Return whether the fonts have all characters of a text, apart from accents."""
    return printable(text) == _without_accents(text)


def _without_accents(text: str) -> str:
    return "".join(
        character for character in unicodedata.normalize("NFKD", text) if not unicodedata.combining(character)
    )


def _stamp(canvas: Array, letters: Array, caption: Caption) -> None:
    """Draw the letters, [height, width] from 0 to 255, on the colour of a caption."""
    top = max(min(caption.y, canvas.shape[0]) - letters.shape[0], 0)
    left = max(min(caption.x, canvas.shape[1] - letters.shape[1]), 0)
    part = canvas[top : top + letters.shape[0], left : left + letters.shape[1]]
    ink = letters[: part.shape[0], : part.shape[1], np.newaxis] / np.float32(255)
    brightness = np.dot(caption.colour, (0.299, 0.587, 0.114))
    part[...] = np.rint(np.multiply(caption.colour, 1 - ink) + (0 if brightness > 150 else 255) * ink)


def _letters(text: str, height: int) -> Array:
    """Return a text as uint8 [about height, width]: 255 where ink is."""
    from PIL import Image, ImageDraw

    font = _font(height)
    if font is None:
        return _with_bitmap(text, height)
    ascent, descent = font.getmetrics()
    image = Image.new("L", (max(int(font.getbbox(text)[2]), 1), ascent + descent))
    ImageDraw.Draw(image).text((0, 0), text, fill=255, font=font)
    return np.asarray(image)


@functools.lru_cache(maxsize=8)
def _font(height: int) -> Any:
    """Return Pillow's font with lines of about this height; None for versions that only have a bitmap font."""
    from PIL import ImageFont

    try:
        return ImageFont.load_default(round(height * 0.8))  # the rest is the space between lines
    except (TypeError, ImportError, OSError):  # before Pillow 10.1, or built without FreeType
        return None


def _with_bitmap(text: str, height: int) -> Array:
    """Return a text in the font of older versions of Pillow, enlarged by an integer factor."""
    from PIL import Image, ImageDraw

    image = Image.new("L", (6 * len(text) or 1, _BITMAP_HEIGHT))
    ImageDraw.Draw(image).text((0, 0), text, fill=255)
    factor = max(round(height / _BITMAP_HEIGHT), 1)
    return np.asarray(image).repeat(factor, axis=0).repeat(factor, axis=1)
