"""Batches of the training split, from memory or from a file that is larger than memory.

The order of the samples and their augmentation depend only on the seed and the epoch. So a training that continues
after an interruption gets the same batches as without the interruption.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from compress.core.settings import Settings
from compress.data import rows
from compress.learning.training import augmentation
from compress.learning.training.augmentation import Augment
from compress.tasks.base import Change, Draws

VALIDATION_BATCH = 32
"""Batch size of Keras' validation on arrays."""
READ_AHEAD = 8
"""Number of batches that are prepared ahead: on busy cores a thread may have to wait."""
THREADS = os.cpu_count() or 1
"""Number of threads that prepare batches."""


class EpochSettings(Settings):
    """Settings of every training."""

    epochs: Annotated[int, Field(ge=1, le=10_000)]
    """Number of passes over the training split."""
    batch_size: Annotated[int, Field(ge=1, le=65_536)] = 64
    """Number of samples in one batch."""
    learning_rate: Annotated[float, Field(gt=0, le=10)] = 0.003
    """Initial learning rate of Adam."""
    augment: Augment = Augment()
    """Random changes of the training images."""

    def batches_per_epoch(self, samples: int) -> int:
        """Return the number of batches in one epoch; the last one may be smaller."""
        return -(-samples // self.batch_size)


def batches(
    inputs: NDArray[np.float32],
    targets: Any,
    settings: EpochSettings,
    seed: int,
    first: int = 0,
    task_change: Change | None = None,
) -> Any:
    """Return all batches of a training from epoch `first` on, as a tf.data.Dataset.

    Args:
        inputs: all training samples [n, ...]. Of a memory map, only the samples of the next batches are read.
        targets: an array [n, ...] with one row for each sample, or a map of such arrays.
        settings: number of epochs, batch size, augmentation.
        seed: the seed of the run.
        first: number of completed epochs.
        task_change: augmentation that also changes the targets; by default only images are changed.

    Raises:
        StageError: the settings have augmentation, but the samples are not images.
    """
    import tensorflow as tf

    samples_at = _from_file(inputs, targets) if rows.mapped(inputs) else _from_memory(inputs, targets)
    augment = settings.augment
    changes = augmentation.changes(augment, inputs, task_change)

    def augmented(indices: Any, seeds: Any) -> Any:
        samples, batch_targets = samples_at(indices)
        for number, change in changes.items():
            samples, batch_targets = change(samples, batch_targets, Draws(seeds + number, tf.size(indices)))
        return samples, batch_targets

    per_epoch = settings.batches_per_epoch(len(inputs))

    @lru_cache(maxsize=2)  # batches of two epochs can be in preparation
    def epoch(number: int) -> list[tuple[NDArray[np.int64], NDArray[np.int32]]]:
        return list(_order(len(inputs), settings, seed, number))

    def batch_at(number: Any) -> Any:
        def order(number: int) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
            return epoch(number // per_epoch)[number % per_epoch]

        indices, seeds = tf.numpy_function(order, [number], [tf.int64, tf.int32], stateful=False)
        return tf.ensure_shape(indices, [None]), tf.ensure_shape(seeds, [2])

    # A range, not a generator: with a generator the training waited 30 ms for finished batches (2 busy cores).
    numbers = tf.data.Dataset.range(first * per_epoch, settings.epochs * per_epoch)
    return _prepared(numbers.map(batch_at), augmented)


def held_out(inputs: NDArray[np.float32], targets: Any, *, in_batches: bool = False) -> Any:
    """Return the validation samples for `fit`: arrays unchanged, or in batches; a memory map is always in batches."""
    if not rows.mapped(inputs) and not in_batches:
        return inputs, targets
    import tensorflow as tf

    samples_at = _from_file(inputs, targets) if rows.mapped(inputs) else _from_memory(inputs, targets)
    count = len(inputs)
    starts = tf.data.Dataset.range(0, count, VALIDATION_BATCH)
    dataset = starts.map(lambda start: tf.range(start, tf.minimum(start + VALIDATION_BATCH, count)))
    return _prepared(dataset, samples_at)


def _prepared(dataset: Any, prepare: Callable[..., Any]) -> Any:
    """Return a data set whose elements are prepared in several threads, ahead of their use.

    TensorFlow's automatic tuning of both is off: its thread sleeps for as long as the training has taken, up to a
    minute, and the data set is only deleted when it wakes up. A training took up to twice as long.
    """
    import tensorflow as tf

    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.map(prepare, num_parallel_calls=THREADS).prefetch(READ_AHEAD).with_options(options)


def _from_memory(inputs: NDArray[np.float32], targets: Any) -> Callable[[Any], Any]:
    """Return a function: indices -> samples and targets, from tensors in memory."""
    import tensorflow as tf

    stored = tf.nest.map_structure(tf.constant, (inputs, targets))
    return lambda indices: tf.nest.map_structure(lambda array: tf.gather(array, indices), stored)


def _from_file(inputs: NDArray[np.float32], targets: Any) -> Callable[[Any], Any]:
    """Return a function: indices -> samples and targets, from a file."""
    import tensorflow as tf

    arrays = [inputs, *map(np.asarray, tf.nest.flatten(targets))]
    kinds = [tf.as_dtype(array.dtype) for array in arrays]

    def read(indices: Any) -> Any:
        tensors = tf.numpy_function(
            lambda positions: [rows.rows(array, positions) for array in arrays], [indices], kinds, stateful=False
        )
        for tensor, array in zip(tensors, arrays, strict=True):
            tensor.set_shape((None, *array.shape[1:]))
        return tensors[0], tf.nest.pack_sequence_as(targets, tensors[1:])

    return read


def _order(
    samples: int, settings: EpochSettings, seed: int, epoch: int
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int32]]]:
    """Yield the indices of the samples and the seeds of the augmentation, for each batch of an epoch."""
    random = np.random.default_rng([seed, epoch])
    order = random.permutation(samples)
    for start in range(0, samples, settings.batch_size):
        yield order[start : start + settings.batch_size], random.integers(2**31, size=2, dtype=np.int32)
