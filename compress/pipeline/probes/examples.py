"""Examples: some test samples with the answers of original and result drawn into them, as small image files."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path, PurePath

import numpy as np
from PIL import Image
from PIL.Image import Resampling

from compress.core.artifact import Facts
from compress.core.files import file_digest
from compress.data.preprocessed import displayed
from compress.data.types import Data, Split
from compress.results.evaluation import ExampleKind, ExampleRecord, ExamplesRecord, PictureRecord
from compress.tasks.base import Illustrator
from compress.tasks.base import Image as Pixels

DIFFERENT = 4
"""Number of samples with the largest difference between original and result."""
TYPICAL = 2
"""Number of samples whose difference is nearest to the median."""
LOOKED_AT = 200
"""Number of samples near the median among which those with something to draw come first."""
SIDE = 320
"""Longest side of a picture in pixels."""
LARGEST_BYTES = 24_000
"""Size of a picture. 18 of them in base64 are 576 kB."""
QUALITIES = (88, 75, 60, 45)
"""JPEG qualities, until a picture is small enough."""


def examples(illustrator: Illustrator | None, data: Data, split: Split, folder: Path) -> Facts | None:
    """Choose samples, and write pictures of the labels and of both models' answers.

    Args:
        illustrator: of the task; None: there are no examples.
        data: the data.
        split: the split.
        folder: for the pictures.

    Returns:
        `compress.results.evaluation.ExamplesRecord` as plain values; None without examples.
    """
    inputs = data.inputs(split)
    if illustrator is None or displayed(inputs[:1], data.preprocessing) is None:
        return None
    differences = illustrator.differences()
    chosen = choose([difference.size for difference in differences], illustrator.is_empty)
    samples = np.array([sample for sample, _ in chosen], np.int64)
    images = displayed(np.asarray(inputs[samples]), data.preprocessing)
    assert images is not None  # as the first one
    records = []
    for number, ((sample, kind), image) in enumerate(zip(chosen, images, strict=True), 1):
        canvas = _thumbnail(image)
        label = illustrator.label(canvas.copy(), sample)
        drawn = dict(zip(("original", "result"), illustrator.answers(canvas, sample), strict=True))
        pictures = {"label": label} | drawn if label is not None else drawn
        written = []
        for shows, picture in pictures.items():
            path = folder / f"{number}-{shows}.jpg"
            path.write_bytes(_jpeg(picture.image))
            written.append(PictureRecord(shows, path.name, file_digest(path), picture.text))
        name = data.describe(split, sample)
        if PurePath(name).is_absolute():  # outside of the data: the record has no folders of this machine
            name = PurePath(name).name
        records.append(ExampleRecord(sample, name, kind, differences[sample].text, tuple(written)))
    return asdict(ExamplesRecord(illustrator.note, len(differences), tuple(records)))


def choose(differences: Sequence[float], is_empty: Callable[[int], bool]) -> list[tuple[int, ExampleKind]]:
    """Return samples with the largest difference, the largest first, and then typical ones.

    Args:
        differences: of each sample; 0 for equal answers.
        is_empty: whether there is nothing to draw for a sample.
    """
    sizes = np.asarray(differences, np.float64)
    different = [int(sample) for sample in np.argsort(-sizes, kind="stable")[:DIFFERENT] if sizes[sample] > 0]
    near = np.argsort(np.abs(sizes - np.median(sizes)), kind="stable")
    rest = [int(sample) for sample in near[: LOOKED_AT + DIFFERENT] if int(sample) not in different]
    typical: list[int] = []
    for sample in rest:
        if len(typical) < TYPICAL and not is_empty(sample):
            typical.append(sample)
    typical += [sample for sample in rest if sample not in typical][: TYPICAL - len(typical)]
    return [*((sample, "different") for sample in different), *((sample, "typical") for sample in typical)]


def _thumbnail(image: Pixels) -> Pixels:
    """Return an image whose longest side is SIDE, or of a small one, a little less: its pixels stay squares."""
    height, width = image.shape[:2]
    longest = max(height, width)
    if 2 * longest <= SIDE:
        return np.ascontiguousarray(image.repeat(SIDE // longest, axis=0).repeat(SIDE // longest, axis=1))
    size = (max(round(width * SIDE / longest), 1), max(round(height * SIDE / longest), 1))
    return np.array(Image.fromarray(image).resize(size, Resampling.BILINEAR))


def _jpeg(image: Pixels) -> bytes:
    """Return the file of an image; of one that is too large in every quality, half of the pixels of each side."""
    for quality in QUALITIES:
        content = io.BytesIO()
        Image.fromarray(image).save(content, "JPEG", quality=quality, subsampling=0 if quality > 80 else 2)
        if content.tell() <= LARGEST_BYTES:
            break
    else:
        return _jpeg(np.ascontiguousarray(image[::2, ::2]))
    return content.getvalue()
