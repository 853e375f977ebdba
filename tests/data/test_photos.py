"""Photos as phones and programs write them: formats that are not decoded and unusual images, both named in messages."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from pictures import flat, image, pipeline
from PIL import Image

from compress.core.errors import DataError
from compress.data.sources import Coco, ImageFolder
from compress.surface.cli.main import main
from deploy.contract.errors import ImageError
from deploy.runner import images


def boxed(brand: bytes, *compatible: bytes) -> bytes:
    """Return the beginning of a file that consists of boxes, as phones write it."""
    content = brand + bytes(4) + b"".join(compatible)
    return struct.pack(">I", len(content) + 8) + b"ftyp" + content + bytes(100)


HEIC = boxed(b"heic", b"mif1", b"heic")


@pytest.mark.parametrize(
    ("content", "name"),
    [(HEIC, "HEIC"), (boxed(b"mif1", b"heic"), "HEIC"), (boxed(b"avif"), "AVIF"), (boxed(b"mif1", b"avif"), "AVIF")],
)
@pytest.mark.parametrize("suffix", ["jpg", "png"])
def test_a_file_of_a_phone_under_another_suffix(tmp_path: Path, content: bytes, name: str, suffix: str) -> None:
    flat(tmp_path)
    (tmp_path / "cat" / f"IMG_1.{suffix}").write_bytes(content)
    samples = ImageFolder(path=str(tmp_path)).load()
    index = next(i for i in range(21) if "IMG_1" in samples.describe(i))
    with pytest.raises(DataError, match=rf"cat/IMG_1\.{suffix}: is a {name} file, .*heif-convert.*mogrify"):
        samples.read(index)
    for decode in (images.decode_body, images.decode_file):
        with pytest.raises(ImageError, match=f"the image is a {name} file, which cannot be decoded; .*heif-convert"):
            decode(content)


def test_other_files_with_boxes_are_unknown() -> None:
    with pytest.raises(ImageError, match="its format is unknown"):
        images.decode_file(boxed(b"isom", b"mp41"))


@pytest.mark.parametrize("labels", [None, "none"])
@pytest.mark.parametrize("folder", ["", "cat"])
def test_a_folder_of_heic_files(tmp_path: Path, folder: str, labels: None) -> None:
    (tmp_path / folder).mkdir(exist_ok=True)
    for index in range(3):
        (tmp_path / folder / f"{index}.HEIC").write_bytes(HEIC)
    (tmp_path / folder / "a.avif").write_bytes(boxed(b"avif"))
    message = (
        r"contains only 1 \.avif files, 3 \.heic files, which cannot be decoded; .*; convert them, .*`heif-convert`"
    )
    with pytest.raises(DataError, match=message):
        ImageFolder(path=str(tmp_path), labels=labels).load()


def test_a_heic_file_with_boxes(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(HEIC)
    content = {"images": [{"id": 1, "file_name": "a.jpg"}], "annotations": [], "categories": [{"id": 1, "name": "x"}]}
    (tmp_path / "all.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match=r"a\.jpg: is a HEIC file, which cannot be decoded"):
        Coco(file=str(tmp_path / "all.json")).load()


def saved(path: Path, picture: Image.Image | None = None, suffix: str = ".png", **options: object) -> None:
    """Save a picture, by default a black one of 6 x 4 pixels."""
    (picture or Image.new("RGB", (6, 4))).save(path.with_suffix(suffix), **options)


def animated(path: Path, suffix: str = ".png") -> None:
    frames = [Image.new("RGB", (6, 4), (value, 0, 0)) for value in (50, 200)]
    saved(path, frames[0], suffix, save_all=True, append_images=frames[1:])


UNUSUAL: dict[str, tuple[Callable[[Path], object], str]] = {
    "animated webp": (lambda path: animated(path, ".webp"), "1 images are animated; the first frame is used"),
    "palette": (
        lambda path: saved(path, Image.new("P", (6, 4)), transparency=0),
        "1 images have transparency, which is removed",
    ),
    "jpeg as png": (
        lambda path: saved(path, format="JPEG"),
        "1 images have a suffix of another format; they are decoded by their content",
    ),
    "single": (lambda path: image(path, (1, 1)), "1 images have a single pixel"),
    "narrow": (lambda path: image(path, (121, 6)), "1 images have one side more than 20 times the other"),
}


@pytest.mark.parametrize(("write", "note"), UNUSUAL.values(), ids=UNUSUAL)
def test_unusual_images_are_named(
    tmp_path: Path, write: Callable[[Path], object], note: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flat(tmp_path / "photos")
    path = pipeline(tmp_path, {"folder": {"path": "photos"}}, more="  preprocess: [{resize: {size: [4, 6]}}]\n")
    assert main(["data", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["notes"] == []
    write(tmp_path / "photos" / "cat" / "odd.png")
    assert main(["data", str(path), "--json"]) == 0
    notes = json.loads(capsys.readouterr().out)["notes"]
    assert len(notes) == 1
    assert notes[0].startswith(note)
    assert "cat/odd." in notes[0]


def test_the_first_frame_of_an_animation(tmp_path: Path) -> None:
    flat(tmp_path)
    animated(tmp_path / "cat" / "odd.png")
    samples = ImageFolder(path=str(tmp_path)).load()
    index = next(i for i in range(21) if "odd" in samples.describe(i))
    assert samples.read(index)[0, 0].tolist() == [50, 0, 0]
    content = (tmp_path / "cat" / "odd.png").read_bytes()
    np.testing.assert_array_equal(images.decode_file(content), samples.read(index))
