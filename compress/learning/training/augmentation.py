"""Augmentation: random changes of the training samples.

The images are preprocessed: their values have any range. So the strength of a change is a fraction of the range of the
training samples, and results are limited to that range.
"""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from compress.core.errors import StageError
from compress.core.settings import Settings
from compress.data import rows
from compress.tasks import moved_images
from compress.tasks.base import Change, Draws

LOOKED_AT = 256
"""Number of training samples from which the range of the values is taken."""
SIDES = (0.5, 2.0)
"""Ratio of height and width of an erased rectangle."""


class Augment(Settings):
    """Settings of the augmentation: random changes of the training samples."""

    shift: Annotated[float, Field(ge=0, le=0.5)] = 0.0
    """Largest shift in each direction, as a fraction of the image's size."""
    rotate: Annotated[float, Field(ge=0, le=180)] = 0.0
    """Largest rotation, in degrees."""
    zoom: Annotated[float, Field(ge=0, le=0.5)] = 0.0
    """Largest change of scale, as a fraction."""
    flip: bool = False
    """Flip images horizontally at random."""
    brightness: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Largest value that is added to an image, as a fraction of the range of the training samples."""
    contrast: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Largest change of the contrast, as a fraction: differences from the mean of the image are multiplied by 1 - c to
    1 + c."""
    saturation: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Largest change of the saturation of colour images, as a fraction: differences from grey are multiplied by 1 - s
    to 1 + s."""
    erase: Annotated[float, Field(ge=0, le=0.5)] = 0.0
    """Largest part of the image that a rectangle covers with the mean of the image, as a fraction of its area. Source:
    Zhong et al., Random Erasing Data Augmentation, 2017."""
    mixup: Annotated[float, Field(ge=0, le=10)] = 0.0
    """Mix pairs of samples and their losses in random shares, from the distribution Beta(mixup, mixup); 0.2 is usual.
    Source: Zhang et al., mixup: Beyond Empirical Risk Minimization, 2018."""

    @property
    def moves_pixels(self) -> bool:
        """Whether it moves parts of an image to another position."""
        return bool(self.shift or self.rotate or self.zoom or self.flip)

    @property
    def changes_values(self) -> bool:
        """Whether it changes the values of pixels in their place."""
        return bool(self.brightness or self.contrast or self.saturation or self.erase)


def changes(augment: Augment, inputs: NDArray[np.float32], task_change: Change | None) -> dict[int, Change]:
    """Return the changes of the training samples, by a number that selects their random numbers.

    `task_change` is the change of the task, if the task moves its targets with the images.

    Raises:
        StageError: the settings change images, and the samples are not images.
    """
    if (augment.moves_pixels or augment.changes_values) and inputs.ndim != 4:
        raise StageError(
            f"augment changes images, and the samples are {list(inputs.shape[1:])}",
            allowed="[height, width, channels]; mixup for any samples",
            hint="remove augment",
        )
    chosen: dict[int, Change] = {}
    if task_change is not None:
        chosen[0] = task_change
    elif augment.moves_pixels:
        chosen[0] = lambda images, targets, draws: (
            moved_images.moved(images, moved_images.drawn(augment, draws)),
            targets,
        )
    if augment.changes_values:
        chosen[1] = value_changes(augment, value_range(inputs))
    if augment.mixup:
        chosen[2] = mixup(augment.mixup)
    return chosen


def value_range(inputs: NDArray[np.float32]) -> tuple[float, float]:
    """Return the lowest and the highest value of samples [n, ...] that are spread over the whole split."""
    indices = np.linspace(0, len(inputs) - 1, min(len(inputs), LOOKED_AT)).astype(np.int64)
    samples = rows.rows(inputs, np.unique(indices))
    return float(samples.min()), float(samples.max())


def value_changes(augment: Augment, limits: tuple[float, float]) -> Change:
    """Return a function: (images [n, height, width, channels], targets, random numbers) -> changed images, targets."""
    import tensorflow as tf

    low, high = limits

    def factors(draws: Draws, number: int, strength: float) -> Any:
        seeds = tf.random.experimental.stateless_fold_in(draws.seeds, number)
        return (2 * tf.random.stateless_uniform((draws.size, 1, 1, 1), seeds) - 1) * strength

    def changed(images: Any, targets: Any, draws: Draws) -> tuple[Any, Any]:
        if augment.saturation and images.shape[-1] == 3:
            grey = tf.reduce_mean(images, axis=-1, keepdims=True)
            images = grey + (images - grey) * (1 + factors(draws, 0, augment.saturation))
        if augment.contrast:
            mean = tf.reduce_mean(images, axis=(1, 2, 3), keepdims=True)
            images = mean + (images - mean) * (1 + factors(draws, 1, augment.contrast))
        if augment.brightness:
            images += factors(draws, 2, augment.brightness) * (high - low)
        if augment.erase:
            images = _erased(images, draws, augment.erase)
        return tf.clip_by_value(images, low, high), targets

    return changed


def _erased(images: Any, draws: Draws, largest: float) -> Any:
    """Return images with a random rectangle of up to this part of the area replaced by the mean of the image."""
    import tensorflow as tf

    height, width = images.shape[1:3]
    seeds = tf.random.experimental.stateless_fold_in(draws.seeds, 3)
    values = tf.random.stateless_uniform((4, draws.size), seeds)
    ratio = tf.exp(np.log(SIDES[0]) + values[1] * (np.log(SIDES[1]) - np.log(SIDES[0])))
    area = values[0] * largest
    sides = tf.sqrt(area * ratio), tf.sqrt(area / ratio)

    def inside(size: int, side: Any, draw: Any) -> Any:
        """Return which positions along one axis are inside of the rectangle: [n, size]."""
        positions = (tf.range(size, dtype=tf.float32) + 0.5) / size
        start = draw * (1 - side)
        return (positions >= start[:, None]) & (positions < (start + side)[:, None])

    rows_inside, columns_inside = inside(height, sides[0], values[2]), inside(width, sides[1], values[3])
    covered = (rows_inside[:, :, None] & columns_inside[:, None, :])[..., None]
    return tf.where(covered, tf.reduce_mean(images, axis=(1, 2), keepdims=True), images)


PARTNER = "partner_labels"
"""Key of the targets of the second sample."""
SHARE = "share"
"""Key of the share of the first sample: [n], 0.5 to 1."""


def mixup(concentration: float) -> Change:
    """Return a function: (samples, targets, random numbers) -> mixed samples, targets with `PARTNER` and `SHARE`.

    Mixup trains on mixtures of two samples, with the loss of both in the same shares, which are drawn from the
    distribution Beta(concentration, concentration). Source: Zhang et al., mixup: Beyond Empirical Risk Minimization,
    2018.

    The partner of a sample is the one before it in the batch, whose order is random; that of the first is the last.
    """
    import tensorflow as tf

    def changed(samples: Any, targets: Any, draws: Draws) -> tuple[Any, Any]:
        seeds = tf.random.experimental.stateless_fold_in(draws.seeds, 7)
        gammas = tf.random.stateless_gamma((2, draws.size), seeds, concentration)
        # With a small concentration both can be 0 in float32: such samples stay as they are.
        share = tf.math.divide_no_nan(gammas[0], gammas[0] + gammas[1])
        share = tf.maximum(share, 1 - share)
        weights = tf.reshape(share, (-1, *[1] * (len(samples.shape) - 1)))
        mixed = weights * samples + (1 - weights) * tf.roll(samples, 1, axis=0)
        return mixed, {**targets, PARTNER: tf.roll(targets["labels"], 1, axis=0), SHARE: share}

    return changed
