"""The samples of `runner.pyz run`."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy.contract.errors import ArgumentError
from deploy.runner import samples


def test_a_folder_stands_for_the_samples_in_it_and_in_its_subfolders(tmp_path: Path) -> None:
    names = ("b.JPG", "a.png", "pear/2.jpg", "apple/1.jpg", "apple/more/3.npy")
    for name in (*names, "notes.txt", ".hidden.jpg", ".cache/4.jpg", "apple/.5.jpg"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    paths = samples.listed(["first.jpg", str(tmp_path)])
    assert paths == [
        "first.jpg",
        *(str(tmp_path / name) for name in ("a.png", "b.JPG", "apple/1.jpg", "apple/more/3.npy", "pear/2.jpg")),
    ]


def test_a_folder_without_samples_is_refused(tmp_path: Path) -> None:
    (tmp_path / "photos" / "notes").mkdir(parents=True)
    (tmp_path / "photos" / "notes" / "read.txt").touch()
    with pytest.raises(ArgumentError, match="has no samples"):
        samples.listed([str(tmp_path / "photos")])
