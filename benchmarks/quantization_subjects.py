"""Models that benchmarks/quantization.py quantizes, with their calibration and test data.

Networks are trained once for each seed and kept in a folder. The MLPerf Tiny and mini-Xception models are files. Their
own data sets are not available, so they run on photos of groceries, and the result is the agreement of the int8 model
with the float model.
"""

from __future__ import annotations

import argparse
import csv
import io
import logging
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import repository

import numpy as np
import quantization_networks as networks
from numpy.typing import NDArray
from paths import SHARED
from PIL import Image

from compress.core.artifact import Artifact, Kind
from compress.core.progress import SilentProgress
from compress.data.types import Objects, Split
from compress.learning.context import Context
from compress.learning.training.augmentation import Augment
from compress.learning.training.loop import TrainingSettings, fit, head_of, label_loss
from compress.model.importers.keras import keras_file
from compress.model.ir.tensorflow import keras
from compress.pipeline.stages import working_model
from compress.targets import load

Floats = NDArray[np.float32]
Labels = NDArray[np.int64]


@dataclass
class Arrays:
    """A data set in memory, with the interface that stages use."""

    splits: dict[str, tuple[Floats, Labels]]
    classes: int
    preprocessing: list[dict[str, Any]] = field(default_factory=list)
    task: str = "classification"
    has_targets: bool = False

    @property
    def class_names(self) -> tuple[str, ...]:
        """The names of the classes: their indices."""
        return tuple(map(str, range(self.classes)))

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one sample."""
        return self.splits["train"][0].shape[1:]

    def inputs(self, split: Split) -> Floats:
        """Return the samples of a split."""
        return self.splits[split][0]

    def describe(self, split: Split, index: int) -> str:
        """Return the name of a sample."""
        return f"{split} {index}"

    def labels(self, split: Split) -> Labels:
        """Return the labels of a split."""
        return self.splits[split][1]

    def targets(self, split: Split) -> NDArray[np.float32]:
        """Not available: these data have classes."""
        raise AssertionError(split)

    def objects(self, split: Split) -> list[Objects]:
        """Not available: these data have classes."""
        raise AssertionError(split)

    def raw(self, split: Split, indices: Labels) -> list[NDArray[Any]]:
        """Return the samples of these indices."""
        return list(self.splits[split][0][indices])

    @property
    def decoding(self) -> dict[str, Any]:
        """Empty: the samples were not decoded from files."""
        return {}

    def summary(self) -> dict[str, Any]:
        """Return an empty map: benchmarks do not use it."""
        return {}


class Quiet(SilentProgress):
    """Progress that shows only notes."""

    def note(self, text: str) -> None:
        """Print a note to stderr."""
        print(f"  note: {text}", file=sys.stderr)


def context(data: Any, folder: Path, seed: int) -> Context:
    """Return the context of a stage with these data, for the Edge TPU."""
    nothing = Artifact("", Kind.KERAS, folder, {}, {}, 0)
    return Context("benchmark", folder, data, nothing, load("edgetpu"), seed, False, Quiet())


@dataclass(frozen=True)
class Subject:
    """A model and its data.

    Attributes:
        name: of the row in the table.
        seed: of the training; 0 for files.
        model: the float model, Keras 3.
        data: its splits; those without labels have zeros there.
        labelled: whether accuracy can be measured.
    """

    name: str
    seed: int
    model: Any
    data: Arrays
    labelled: bool


def asked(parser: argparse.ArgumentParser) -> argparse.Namespace | None:
    """Return the options of all benchmarks on these data: seeds, cache and show; None, with a message, without data."""
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--cache", type=Path, default=Path("runs") / "benchmark_networks")
    parser.add_argument("--show", action="store_true", help="only print what was measured before")
    options = parser.parse_args()
    if not options.show and repository.is_missing(SHARED):
        return None
    for library in ("tensorflow", "absl"):
        logging.getLogger(library).setLevel(logging.ERROR)
    return options


@cache
def photos(side: int, *, colour: bool = True) -> dict[str, tuple[Floats, Labels]]:
    """Return grocery96 with coarse classes, values from 0 to 1, in random order; val is called validation."""
    path = SHARED / "data" / "grocery96.tar"
    splits: dict[str, tuple[list[Any], list[int]]] = {"train": ([], []), "val": ([], []), "test": ([], [])}
    with tarfile.open(path) as archive:
        members = {member.name: member for member in archive.getmembers()}

        def read(name: str) -> bytes:
            stream = archive.extractfile(members[name])
            assert stream is not None
            return stream.read()

        for row in csv.DictReader(read("labels.csv").decode().splitlines()):
            image = Image.open(io.BytesIO(read(row["file"]))).convert("RGB" if colour else "L")
            image = image if image.size == (side, side) else image.resize((side, side), Image.Resampling.BILINEAR)
            splits[row["split"]][0].append(np.asarray(image, np.uint8).reshape(side, side, -1))
            splits[row["split"]][1].append(int(row["coarse_id"]))
    arrays = {}
    for split, (images, labels) in splits.items():
        order = np.random.default_rng(0).permutation(len(images))
        name = "validation" if split == "val" else split
        arrays[name] = (np.stack(images)[order].astype(np.float32) / np.float32(255), np.array(labels, np.int64)[order])
    return arrays


def strokes() -> dict[str, tuple[Floats, Labels]]:
    """Return the strokes of the magic wand as 32x32 images; 500 train, 100 validation, the rest test, at random."""
    with np.load(SHARED / "data" / "magic_wand_digits.npz") as arrays:
        points, lengths, labels = arrays["x"], arrays["length"], arrays["y"].astype(np.int64)
    images = np.zeros((len(points), 32, 32, 1), np.float32)
    for image, path, length in zip(images, points, lengths, strict=True):
        path = path[:length]
        fine = np.linspace(0, length - 1, 8 * length)
        line = np.stack([np.interp(fine, np.arange(length), path[:, axis]) for axis in range(2)])
        line = (line - line.min(axis=1, keepdims=True)) / max(np.ptp(line, axis=1).max(), 1e-6)
        column, row = np.rint(2 + 27 * line).astype(int)
        for shift in ((0, 0), (0, 1), (1, 0), (1, 1)):  # a pen two pixels wide
            image[31 - row - shift[0], column + shift[1], 0] = 1.0
    order = np.random.default_rng(0).permutation(len(images))
    parts = {"train": order[:500], "validation": order[500:600], "test": order[600:]}
    return {name: (images[part], labels[part]) for name, part in parts.items()}


def log_mel(audio: NDArray[np.int16], frames: int = 64, bands: int = 32, rate: int = 8000) -> Floats:
    """Return the logarithm of the energy in mel bands, [frames, bands], of the first second."""
    size, hop = 256, 125
    needed = hop * (frames - 1) + size
    signal = np.zeros(needed)
    part = audio[:needed].astype(np.float64) / 32768
    signal[: len(part)] = part
    windows = np.lib.stride_tricks.sliding_window_view(signal, size)[::hop][:frames] * np.hanning(size)
    power = np.abs(np.fft.rfft(windows)) ** 2
    edges = 700 * (10 ** (np.linspace(0, 2595 * np.log10(1 + rate / 2 / 700), bands + 2) / 2595) - 1)
    frequency = np.arange(size // 2 + 1) * rate / size
    rising = (frequency - edges[:-2, None]) / (edges[1:-1] - edges[:-2])[:, None]
    falling = (edges[2:, None] - frequency) / (edges[2:] - edges[1:-1])[:, None]
    mel = power @ np.maximum(0, np.minimum(rising, falling)).T
    return np.log(mel + 1e-6).astype(np.float32)


@cache
def spoken() -> dict[str, tuple[Floats, Labels]]:
    """Return the spoken digits as log-mel images with mean 0 and deviation 1, with the official test split."""
    with np.load(SHARED / "data" / "fsdd_8k.npz") as arrays:
        audio, ends = arrays["audio"], arrays["offsets"]
        labels, test = arrays["y"].astype(np.int64), arrays["is_test"]
    pictures = np.stack([log_mel(audio[a:b]) for a, b in pairwise(ends)])[..., None]
    pictures = ((pictures - pictures[~test].mean()) / pictures[~test].std()).astype(np.float32)
    order = np.random.default_rng(0).permutation(np.flatnonzero(~test))
    parts = {"train": order[270:], "validation": order[:270], "test": np.flatnonzero(test)}
    return {name: (pictures[part], labels[part]) for name, part in parts.items()}


def _unlabelled(splits: dict[str, tuple[Floats, Labels]], change: Callable[[Floats], Floats]) -> Arrays:
    arrays = {name: (change(x), np.zeros(len(x), np.int64)) for name, (x, _) in splits.items()}
    return Arrays(arrays, 1)


def person(cache_folder: Path, seed: int) -> Subject:
    """Return MLPerf Tiny's person detection: 96x96 RGB from 0 to 1."""
    del cache_folder, seed
    model = keras_file.load(SHARED / "models" / "keras" / "vww_96.h5")
    return Subject("vww_96", 0, model, _unlabelled(photos(96), lambda x: x), labelled=False)


def emotions(cache_folder: Path, seed: int) -> Subject:
    """Return mini-Xception for faces: 64x64 grey from -1 to 1."""
    del cache_folder, seed
    model = keras_file.load(SHARED / "models" / "keras" / "fer2013_mini_XCEPTION.102-0.66.hdf5")
    data = _unlabelled(photos(64, colour=False), lambda x: (x - np.float32(0.5)) * np.float32(2))
    return Subject("mini_xception", 0, model, data, labelled=False)


@dataclass(frozen=True)
class Recipe:
    """A network with its data and its training settings."""

    name: str
    data: Callable[[], dict[str, tuple[Floats, Labels]]]
    network: Callable[[Any, Any, int], Any]
    classes: int
    settings: TrainingSettings

    def __call__(self, cache_folder: Path, seed: int) -> Subject:
        """Return the network; train it if it is not in the folder `cache_folder`."""
        data = Arrays(self.data(), self.classes)

        path = cache_folder / f"{self.name}-{seed}.keras"
        if path.exists():
            model = keras_file.load(path)
        else:
            started = time.perf_counter()
            model = self.network(keras(seed), data.input_shape, self.classes)
            with tempfile.TemporaryDirectory() as folder:
                fit(model, label_loss(head_of(model, data)), self.settings, context(data, Path(folder), seed))
                working_model.write_keras(model, Path(folder))
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes((Path(folder) / "model.keras").read_bytes())
            print(f"{path.stem} trained in {time.perf_counter() - started:.0f} s", file=sys.stderr)
        return Subject(self.name, seed, model, data, labelled=True)


def _recipe(name: str, data: Any, network: Any, classes: int, epochs: int, augment: Augment | None = None) -> Recipe:
    return Recipe(name, data, network, classes, TrainingSettings(epochs=epochs, augment=augment or Augment()))


FLIPPED = Augment(flip=True, shift=0.08)
SUBJECTS: dict[str, Callable[[Path, int], Subject]] = {
    "vww_96": person,
    "mini_xception": emotions,
    "magic_wand": _recipe("magic_wand", strokes, networks.small, 10, 60, Augment(shift=0.06, rotate=8, zoom=0.1)),
    "fsdd": _recipe("fsdd", spoken, networks.separable, 10, 12),
    "grocery_separable": _recipe("grocery_separable", lambda: photos(48), networks.separable, 43, 25, FLIPPED),
    "grocery_residual": _recipe("grocery_residual", lambda: photos(48), networks.residual, 43, 15, FLIPPED),
    "grocery_inverted": _recipe("grocery_inverted", lambda: photos(48), networks.inverted, 43, 20, FLIPPED),
    "grocery_gated": _recipe("grocery_gated", lambda: photos(48), networks.gated, 43, 20, FLIPPED),
}
TRAINED = tuple(name for name, subject in SUBJECTS.items() if isinstance(subject, Recipe))
