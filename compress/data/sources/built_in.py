"""Sources that need no files of the user: the digits of calibration_data/digits, and random samples."""

from __future__ import annotations

import tomllib
from typing import Annotated, Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, PositiveInt, model_validator

from compress.core.errors import DataError
from compress.core.resources import shipped
from compress.data import files
from compress.data.source import Samples, Source
from compress.data.splits import at_random, stratified

MAX_VALUES = 1 << 28
"""Largest number of values of one sample."""
NOTE = (
    "the samples are random numbers: activation ranges from them and every comparison of models hold for random "
    "numbers only; real samples give other ranges"
)


class Digits(Source):
    """The 1,797 handwritten digits that Coralline ships, 8x8 values from 0 to 16: no download.

    The split is fixed and stratified: 629 test, 169 validation, 999 training samples.
    """

    name: ClassVar[str] = "digits"

    def fingerprint(self) -> dict[str, Any]:
        """Return the digest of digits.npz, checked against the manifest in its folder, and the division."""
        folder = shipped("calibration_data") / "digits"
        manifest = tomllib.loads((folder / "manifest.toml").read_text())
        digest, expected = files.digest(folder / "digits.npz"), manifest["sha256"]
        if digest != expected:
            what = f"{folder / 'digits.npz'} has SHA-256 {digest}"
            raise DataError(what, allowed=expected, hint="install coralline again")
        return {"sha256": digest, "split": manifest["split"]}

    def load(self) -> Samples:
        """Return the digits with their fixed splits."""
        split = self.fingerprint()["split"]
        with np.load(shipped("calibration_data") / "digits" / "digits.npz", allow_pickle=False) as archive:
            images: NDArray[np.float32] = archive["images"].astype(np.float32)
            labels: NDArray[np.int64] = archive["labels"].astype(np.int64)
        rest, test = stratified(labels, np.arange(len(labels)), split["test"], split["seed"])
        train, validation = stratified(labels, rest, split["validation"], split["seed"])
        return Samples(
            labels,
            tuple("0123456789"),
            lambda index: images[index],
            {"train": train, "validation": validation, "test": test},
        )


class RandomSamples(Source):
    """Random samples of some shape, without labels. They show whether a model can be converted, and where its
    operators run. The activation ranges from them are poor."""

    name: ClassVar[str] = "random"
    task: ClassVar[str] = "outputs"

    shape: Annotated[tuple[PositiveInt, ...], Field(min_length=1)] | None = None
    """Shape of one sample, without the batch."""
    shapes: Annotated[tuple[tuple[PositiveInt, ...], ...], Field(min_length=1)] | None = None
    """Shapes of the inputs, for a model with several."""
    count: Annotated[int, Field(ge=4, le=100_000)] = 128
    """Number of samples."""
    low: float = 0.0
    """Lowest value."""
    high: float = 1.0
    """Highest value."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Seed of the random numbers."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.shape is None) == (self.shapes is None):
            raise ValueError("needs either the key 'shape' or the key 'shapes'")
        if self.low >= self.high:
            raise ValueError(f"low is {self.low:g} and high is {self.high:g}: high must be larger")
        if sum(int(np.prod(shape, dtype=object)) for shape in self._shapes) > MAX_VALUES:
            raise ValueError(f"a sample has more than {MAX_VALUES:,} values")
        return self

    @property
    def _shapes(self) -> tuple[tuple[int, ...], ...]:
        return self.shapes or (self.shape or (),)

    def fingerprint(self) -> dict[str, Any]:
        """Return the settings."""
        return self.model_dump(mode="json")

    def load(self) -> Samples:
        """Return samples that are drawn when they are used: uniform, and each second one smoothed along its axes.

        Smooth samples have sums and activations of the size that photos and signals have; noise alone averages out.
        """
        return Samples(
            np.zeros(self.count, np.int64),
            (),
            self._sample,
            divide=at_random,
            notes=(NOTE,),
            has_labels=False,
        )

    def _sample(self, index: int) -> NDArray[Any]:
        generator = np.random.default_rng((self.seed, index))
        values = [_smooth_noise(generator, shape) if index % 2 else generator.random(shape) for shape in self._shapes]
        tensors = [(self.low + (self.high - self.low) * tensor).astype(np.float32) for tensor in values]
        return tensors[0] if len(tensors) == 1 else np.concatenate([tensor.ravel() for tensor in tensors])


def _smooth_noise(generator: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.float64]:
    """Return values from 0 to 1 that change slowly along all axes but the last of three or more."""
    coarse_shape = tuple(min(side, 4) for side in shape)
    values = generator.random(coarse_shape)
    for axis, side in enumerate(shape):
        positions = np.linspace(0, values.shape[axis] - 1, side)
        below = np.floor(positions).astype(int)
        above = np.minimum(below + 1, values.shape[axis] - 1)
        share = (positions - below).reshape([-1 if other == axis else 1 for other in range(len(shape))])
        values = np.take(values, below, axis) * (1 - share) + np.take(values, above, axis) * share
    return values
