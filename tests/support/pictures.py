"""Small image files to test with, and folders of them."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

from PIL import Image


def encoded(picture: Image.Image, form: str, **options: Any) -> bytes:
    """Return a picture as the content of a file."""
    stream = io.BytesIO()
    picture.save(stream, form, **options)
    return stream.getvalue()


def image(path: Path, size: tuple[int, int] = (6, 4), value: int = 100) -> Path:
    """Write an image of width and height `size` in one colour; return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (value, value // 2, 0)).save(path)
    return path


def turned(orientation: int) -> Image.Exif:
    """Return EXIF data with an orientation."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


def flat(root: Path, images_per_class: int = 10) -> Path:
    for number, kind in enumerate(("cat", "dog")):
        for index in range(images_per_class):
            image(root / kind / f"{index}.png", value=100 * number + index)
    return root


def divided(root: Path, names: tuple[str, ...] = ("train", "val", "test")) -> Path:
    for split in names:
        flat(root / split, 4)
    return root


def pipeline(folder: Path, source: dict[str, Any], model: str = "{builder: digits_cnn}", more: str = "") -> Path:
    """Write a pipeline file with this data source; `more` are other keys of `data`, each on a line with two blanks."""
    path = folder / "pipeline.yaml"
    head = f"schema_version: 1\nname: t\nmodel: {model}\nstages: [{{train: {{epochs: 1}}}}, quantize]\n"
    path.write_text(f"{head}data:\n  source: {json.dumps(source)}\n{more}")
    return path
