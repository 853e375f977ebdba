"""Checksum manifests: writing, verification, and the differences that they find."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from datasets import dataset
from pictures import flat

from compress.core.errors import DataError, StoreError
from compress.data import manifest
from compress.data.sources import ImageFolder, Npy, Npz


def written(path: Path, source: ImageFolder | Npy | Npz) -> Path:
    manifest.write_for(source, path)
    return path


def test_a_folder(tmp_path: Path) -> None:
    root = flat(tmp_path / "images", 3)
    path = written(tmp_path / "manifest.toml", ImageFolder(path=str(root)))
    assert '"images/cat/0.png" = "' in path.read_text()
    source = ImageFolder(path="images", manifest="manifest.toml").with_paths_from(tmp_path)
    assert source.fingerprint() == ImageFolder(path=str(root)).fingerprint()
    (tmp_path / "images" / "cat" / "new.png").write_bytes((root / "cat" / "0.png").read_bytes())
    with pytest.raises(DataError, match=r"1 not listed: images/cat/new\.png; get the data again, or write the man"):
        source.fingerprint()
    (root / "cat" / "new.png").rename(root / "cat" / "0.png")
    source.fingerprint()  # the content is the same
    (root / "dog" / "1.png").unlink()
    (root / "dog" / "2.png").write_bytes((root / "cat" / "0.png").read_bytes())
    with pytest.raises(DataError, match=r"1 changed: images/dog/2\.png; 1 listed, but not there: images/dog/1\.png"):
        source.fingerprint()


def test_nothing_is_loaded_that_the_manifest_does_not_list(tmp_path: Path) -> None:
    np.savez(tmp_path / "d.npz", x=np.zeros((9, 2, 2)), y=np.arange(9) % 3)
    path = written(tmp_path / "m.toml", Npz(file=str(tmp_path / "d.npz")))
    source = Npz(file=str(tmp_path / "d.npz"), manifest=str(path))
    assert len(dataset(source).labels("train")) > 0
    np.savez(tmp_path / "d.npz", x=np.ones((9, 2, 2)), y=np.arange(9) % 3)
    with pytest.raises(DataError, match=r"1 changed: d\.npz"):
        dataset(source).labels("train")


@pytest.mark.parametrize("content", [b"", b"[sha256", b"sha256 = 5", b"[sha256]\na = 5", b"\xff", b"[other]"])
def test_what_is_no_manifest(tmp_path: Path, content: bytes) -> None:
    root = flat(tmp_path / "images", 3)
    (tmp_path / "m.toml").write_bytes(content)
    with pytest.raises(DataError, match="is not a manifest"):
        ImageFolder(path=str(root), manifest=str(tmp_path / "m.toml")).fingerprint()


def test_a_manifest_that_cannot_be_read_or_written(tmp_path: Path) -> None:
    root = flat(tmp_path / "images", 3)
    with pytest.raises(DataError, match=r"absent\.toml: cannot be read"):
        ImageFolder(path=str(root), manifest=str(tmp_path / "absent.toml")).fingerprint()
    with pytest.raises(StoreError, match="the manifest cannot be written"):
        manifest.write(tmp_path / "absent" / "m.toml", {})


def test_names_of_every_kind(tmp_path: Path) -> None:
    names = ['quo"te', "back\\slash", "tab\t", "Ünïcode", "new\nline", "a = b"]
    (tmp_path / "one").mkdir()
    for name in names:
        (tmp_path / "one" / f"{name}.png").write_bytes(name.encode())
    written(tmp_path / "m.toml", ImageFolder(path=str(tmp_path)))
    ImageFolder(path=str(tmp_path), manifest=str(tmp_path / "m.toml")).fingerprint()


def test_a_name_that_is_not_utf8(tmp_path: Path) -> None:
    root = flat(tmp_path / "images", 3)
    (root / "cat" / "0.png").rename(os.fsdecode(os.fsencode(root / "cat") + b"/caf\xe9.png"))
    with pytest.raises(DataError, match=r"images/cat/caf\\xe9.png: its name is not UTF-8, and a manifest is; rename"):
        written(tmp_path / "m.toml", ImageFolder(path=str(root)))
    assert not (tmp_path / "m.toml").exists()
    (tmp_path / "m.toml").write_text("[sha256]\n")
    with pytest.raises(DataError, match="its name is not UTF-8"):
        ImageFolder(path=str(root), manifest=str(tmp_path / "m.toml")).fingerprint()
