"""The training split in batches, from memory, or from a file that is larger. Which sample comes when, and how it is
changed, follows from seed and epoch alone, so that a training that goes on after an interruption sees what it would
have seen without."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from compress.data import rows
from compress.errors import StageError
from compress.ir.tensorflow import keras
from compress.settings import Settings
from compress.tasks.base import Change

VALIDATION_BATCH = 32
"""What Keras takes of arrays."""
READ_AHEAD = 8
"""Batches from a file that lie ready."""


class Augment(Settings):
    """Random changes of the training images. Fractions are of the image's side."""

    shift: Annotated[float, Field(ge=0, le=0.5)] = 0.0
    """Largest shift in each direction, as a fraction of the image's size."""
    rotate: Annotated[float, Field(ge=0, le=180)] = 0.0
    """Largest rotation, in degrees."""
    zoom: Annotated[float, Field(ge=0, le=0.5)] = 0.0
    """Largest change of scale, as a fraction."""
    flip: bool = False
    """Flip images horizontally at random."""


class Passes(Settings):
    """The settings that every training has."""

    epochs: Annotated[int, Field(ge=1, le=10_000)]
    """Number of passes over the training split."""
    batch_size: Annotated[int, Field(ge=1, le=65_536)] = 64
    """Number of samples in one batch."""
    learning_rate: Annotated[float, Field(gt=0, le=10)] = 0.003
    """Initial learning rate of Adam."""
    augment: Augment = Augment()
    """Random changes of the training images."""

    def batches_per_epoch(self, samples: int) -> int:
        """Batches in one epoch; the last one may be smaller."""
        return -(-samples // self.batch_size)


def batches(
    inputs: NDArray[np.float32],
    targets: Any,
    settings: Passes,
    seed: int,
    first: int = 0,
    own_change: Change | None = None,
) -> Any:
    """All batches of a training from epoch `first` on, as a tf.data set of `batches_per_epoch` batches for each epoch.

    Args:
        inputs: all training samples: [n, ...]; of a memory map no more is read than batches need.
        targets: what belongs to each sample: an array [n, ...], or a map of them.
        settings: how many epochs, how large the batches, what is changed.
        seed: the run's.
        first: epochs that are over already.
        own_change: the augmentation of the task, which changes targets as well; by default that of images alone.

    Raises:
        StageError: images are to be changed, and the samples are none.
    """
    import tensorflow as tf

    drawn_of = _read(inputs, targets) if rows.mapped(inputs) else _held(inputs, targets)
    shape = inputs.shape[1:]
    change = own_change or _augmentation(settings.augment, shape)

    def drawn(indices: Any, seeds: Any) -> Any:
        images, beside = drawn_of(indices)
        return change(images, beside, seeds)

    each = settings.batches_per_epoch(len(inputs))

    @lru_cache(maxsize=2)  # batches of two epochs may be on their way
    def epoch(number: int) -> list[tuple[NDArray[np.int64], NDArray[np.int32]]]:
        return list(_order(len(inputs), settings, seed, number))

    def numbered(place: Any) -> Any:
        kinds = [tf.int64, tf.int32]
        indices, seeds = tf.numpy_function(lambda at: epoch(int(at) // each)[int(at) % each], [place], kinds, False)
        return tf.ensure_shape(indices, [None]), tf.ensure_shape(seeds, [2])

    # Of numbers, not of a generator: beside that the training waited 30 ms for batches that lay ready (2 busy cores).
    made = tf.data.Dataset.range(first * each, settings.epochs * each).map(numbered)
    # On busy cores a thread that reads may have to wait for its turn: some batches lie ready for that time.
    ahead = READ_AHEAD if rows.mapped(inputs) else tf.data.AUTOTUNE
    return made.map(drawn, num_parallel_calls=tf.data.AUTOTUNE).prefetch(ahead)


def held_out(inputs: NDArray[np.float32], targets: Any) -> Any:
    """Samples as `fit` takes them for validation: arrays as they are, a memory map in batches as Keras would make."""
    if not rows.mapped(inputs):
        return inputs, targets
    import tensorflow as tf

    made = tf.data.Dataset.range(len(inputs)).batch(VALIDATION_BATCH)
    return made.map(_read(inputs, targets), num_parallel_calls=tf.data.AUTOTUNE).prefetch(tf.data.AUTOTUNE)


def _held(inputs: NDArray[np.float32], targets: Any) -> Callable[[Any], Any]:
    """Indices -> samples and what belongs to them, out of tensors."""
    import tensorflow as tf

    stored = tf.nest.map_structure(tf.constant, (inputs, targets))
    return lambda indices: tf.nest.map_structure(lambda each: tf.gather(each, indices), stored)


def _read(inputs: NDArray[np.float32], targets: Any) -> Callable[[Any], Any]:
    """The same out of a file."""
    import tensorflow as tf

    arrays = [inputs, *map(np.asarray, tf.nest.flatten(targets))]
    kinds = [tf.as_dtype(array.dtype) for array in arrays]

    def drawn(indices: Any) -> Any:
        found = tf.numpy_function(
            lambda places: [rows.rows(array, places) for array in arrays], [indices], kinds, stateful=False
        )
        for tensor, array in zip(found, arrays, strict=True):
            tensor.set_shape((None, *array.shape[1:]))
        return found[0], tf.nest.pack_sequence_as(targets, found[1:])

    return drawn


def _order(
    samples: int, settings: Passes, seed: int, epoch: int
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int32]]]:
    """Of each batch of an epoch the indices of its samples, and the seeds of its changes."""
    random = np.random.default_rng([seed, epoch])
    order = random.permutation(samples)
    for at in range(0, samples, settings.batch_size):
        yield order[at : at + settings.batch_size], random.integers(2**31, size=2, dtype=np.int32)


def _augmentation(augment: Augment, shape: tuple[int, ...]) -> Callable[[Any, Any, Any], tuple[Any, Any]]:
    """(images, what belongs to them, two seeds) -> images with Keras' random changes, the rest as it was."""
    layers = keras().layers
    made = []
    if augment.flip:
        made.append(layers.RandomFlip("horizontal"))
    if augment.shift:
        made.append(layers.RandomTranslation(augment.shift, augment.shift, fill_mode="nearest"))
    if augment.rotate:
        made.append(layers.RandomRotation(augment.rotate / 360, fill_mode="nearest"))
    if augment.zoom:
        made.append(layers.RandomZoom((-augment.zoom, augment.zoom), fill_mode="nearest"))

    if made and len(shape) != 3:
        raise StageError(
            f"augment changes images, and the samples are {list(shape)}",
            allowed="[height, width, channels]",
            todo="leave out augment",
        )

    def change(images: Any, beside: Any, seeds: Any) -> tuple[Any, Any]:
        generator = _given(seeds)
        for layer in made:
            images = layer.transform_images(images, layer.get_random_transformation(images, seed=generator))
        return images, beside

    return change


def _given(seeds: Any) -> Any:
    """A generator of seeds as Keras takes them which starts from given ones, and leaves nothing behind."""
    import tensorflow as tf

    class Given(keras().random.SeedGenerator):  # type: ignore[misc]
        def __init__(self) -> None:  # not the parent's, which makes a variable to count in
            self.count = 0

        def next(self, ordered: bool = True) -> Any:
            self.count += 1
            return tf.random.experimental.stateless_fold_in(seeds, self.count)

    return Given()
