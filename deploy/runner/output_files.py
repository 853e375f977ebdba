"""The images that the runner draws: never over a sample."""

from __future__ import annotations

import errno
import os
from typing import List, Sequence, Set, Tuple

from deploy.contract.errors import ArgumentError

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp")
"""The formats in which images are written."""


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
    """Return the paths with -2, -3 and so on at those that are there already, also on file systems without case."""
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
