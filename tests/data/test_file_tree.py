"""Tar archives that are read without unpacking, and archives that are refused."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import dataset
from paths import ROOT
from pictures import flat

from compress.core.errors import DataError
from compress.data import file_tree as trees
from compress.data import files
from compress.data.class_names import Classes
from compress.data.label_tables import Labels
from compress.data.sources import ImageFolder

PACKERS: dict[str, Callable[[bytes], bytes]] = {
    ".tar": bytes,
    ".tar.gz": gzip.compress,
    ".tgz": gzip.compress,
    ".tar.bz2": bz2.compress,
    ".tar.xz": lzma.compress,
}


def packed(folder: Path, **settings: Any) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", **settings) as archive:
        archive.add(folder, arcname=".")
    return stream.getvalue()


def member(name: str, content: bytes = b"", **fields: Any) -> bytes:
    """Return an archive of one member with the given header fields."""
    info = tarfile.TarInfo(name)
    info.size = len(content)
    for key, value in fields.items():
        setattr(info, key, value)
    return info.tobuf() + content + bytes(-len(content) % 512) + bytes(1024)


@pytest.mark.parametrize("suffix", PACKERS)
@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
def test_an_archive_is_as_its_folder(tmp_path: Path, suffix: str, form: int) -> None:
    root = flat(tmp_path / "images")
    deep = root / "cat" / ("long" * 30) / ("name" * 30)
    deep.mkdir(parents=True)
    (root / "cat" / "1.png").rename(deep / "1.png")
    path = tmp_path / f"images{suffix}"
    path.write_bytes(PACKERS[suffix](packed(root, format=form)))
    folder, archive = (dataset(ImageFolder(path=str(source_path))) for source_path in (root, path))
    assert archive.class_names == ("cat", "dog")
    for split in ("train", "validation", "test"):
        np.testing.assert_array_equal(archive.inputs(split), folder.inputs(split))
        np.testing.assert_array_equal(archive.labels(split), folder.labels(split))
    assert "images" in archive._samples.describe(0)
    assert archive.digest != folder.digest


def test_the_digest_is_that_of_the_archive(tmp_path: Path) -> None:
    path = tmp_path / "images.tar"
    path.write_bytes(packed(flat(tmp_path / "images")))
    assert ImageFolder(path=str(path)).files() == {"path": path}
    path.rename(tmp_path / "other.tar")
    before = ImageFolder(path=str(tmp_path / "other.tar")).fingerprint()
    path.write_bytes((tmp_path / "other.tar").read_bytes())
    assert ImageFolder(path=str(path)).fingerprint() == before
    path.write_bytes(path.read_bytes().replace(b"cat", b"cow"))
    with pytest.raises(DataError):  # the checksum of a header is wrong
        ImageFolder(path=str(path)).fingerprint()


SPARSE = member("s", bytes(512), type=tarfile.GNUTYPE_SPARSE)
BAD: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is not a readable tar archive"),
    "leads out": (member("../a.png", b"x"), r"names the file '\.\./a\.png'; allowed: files inside"),
    "leads out below": (member("a/../../b.png", b"x"), r"names the file 'a/\.\./\.\./b\.png'"),
    "absolute": (member("/etc/a.png", b"x"), "names the file '/etc/a.png'"),
    "symbolic link": (member("a", type=tarfile.SYMTYPE, linkname="/etc/passwd"), "its member 'a' is a link"),
    "device": (member("a", type=tarfile.CHRTYPE), "its member 'a' is a device"),
    "sparse": (SPARSE, "its member 's' is a sparse file"),
    "cut short": (member("a.png", bytes(5000))[:2000], "is cut short"),
    "without an end": (member("a.png", bytes(512))[:1024], "is damaged or cut short at byte 1024"),
    "damaged behind a member": (member("a.png", bytes(512))[:1024] + b"x" * 1024, "is damaged or cut short"),
    "twice": (member("a.png", b"x")[:1024] + member("a.png", b"y"), "has two members 'a.png'"),
    "file and folder": (member("a", b"x")[:1024] + member("a/b", b"y"), "has 'a' as a file and as a folder"),
    "huge extended header": (
        tarfile.TarInfo._create_header(
            {**tarfile.TarInfo("x").get_info(), "size": 1 << 32, "type": tarfile.XHDTYPE},
            tarfile.USTAR_FORMAT,
            "ascii",
            "strict",
        )
        + bytes(1024),
        "a header of 42949672",
    ),
}


@pytest.mark.parametrize(("content", "message"), BAD.values(), ids=BAD)
def test_bad_archives(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "bad.tar"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        ImageFolder(path=str(path)).load()


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress])
def test_bombs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pack: Callable[[bytes], bytes]) -> None:
    monkeypatch.setattr(files, "ROOM", 1 << 20)
    path = tmp_path / "bomb.tar.gz"
    path.write_bytes(pack(bytes(64 << 20)))
    started = time.monotonic()
    with pytest.raises(DataError, match=r"unpacks to more than [\d,]+ bytes"):
        ImageFolder(path=str(path)).load()
    assert time.monotonic() - started < 10


@pytest.mark.parametrize("suffix", [".tar.gz", ".tar.bz2", ".tar.xz"])
def test_damaged_compressed_archives(tmp_path: Path, suffix: str) -> None:
    content = PACKERS[suffix](packed(flat(tmp_path / "images", 2)))
    path = tmp_path / f"a{suffix}"
    for cut in (7, len(content) // 2, len(content) - 3):
        path.write_bytes(content[:cut])
        with pytest.raises(DataError, match="cannot be unpacked"):
            ImageFolder(path=str(path)).load()
    path.write_bytes(b"\x28\xb5\x2f\xfd" + content)
    with pytest.raises(DataError, match="is compressed with zstd"):
        ImageFolder(path=str(path)).load()


def test_several_compressed_streams(tmp_path: Path) -> None:
    content = packed(flat(tmp_path / "images", 3))
    for suffix in (".tar.gz", ".tar.bz2", ".tar.xz"):
        path = tmp_path / f"a{suffix}"
        path.write_bytes(PACKERS[suffix](content[:700]) + PACKERS[suffix](content[700:]))
        assert len(ImageFolder(path=str(path)).load().labels) == 6


def test_folders_of_links(tmp_path: Path) -> None:
    flat(tmp_path / "real")
    (tmp_path / "data").mkdir()
    for kind in ("cat", "dog"):
        (tmp_path / "data" / kind).symlink_to(tmp_path / "real" / kind)
    (tmp_path / "real" / "cat" / "circle").symlink_to(tmp_path / "real")
    assert np.bincount(ImageFolder(path=str(tmp_path / "data")).load().labels).tolist()[1] == 10


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name, kind in (("pipe", "a named pipe"), (".", "a folder")):
        with pytest.raises(DataError, match=f"cannot be read: it is {kind}"):
            files.digest(tmp_path / name)
    with pytest.raises(DataError, match="it is a device"):
        files.digest(Path("/dev/zero"))
    (tmp_path / "pipe").rename(tmp_path / "pipe.tar")
    with pytest.raises(DataError, match="a named pipe"):
        ImageFolder(path=str(tmp_path / "pipe.tar")).load()


def test_too_large_to_read(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(100))
    with pytest.raises(DataError, match="has 100 bytes; allowed: 99 bytes"):
        trees.tree(tmp_path).read("a", 99)
    assert trees.tree(tmp_path).read("a", 100) == bytes(100)


def test_grocery_in_its_archive() -> None:
    """5,421 photos, with labels, splits and classes in tables, are read without unpacking the archive."""
    path = Path(os.environ.get("CORALLINE_SHARED", ROOT.parent / "shared")) / "data" / "grocery96.tar"
    if not path.exists():
        pytest.skip(f"{path} is not there; CORALLINE_SHARED names the folder of shared files")
    classes = Classes(file="classes.csv", index="Coarse Class ID (int)", name="Coarse Class Name (str)")
    source = ImageFolder(path=str(path), labels=Labels(table="labels.csv", label="coarse_id"), classes=classes)
    samples = source.load()
    assert {split: len(of) for split, of in samples.splits.items()} == {"train": 2640, "validation": 296, "test": 2485}
    assert (len(samples.class_names), samples.class_names[0], samples.class_names[42]) == (43, "Apple", "Zucchini")
    assert samples.read(5420).shape == (96, 96, 3)
