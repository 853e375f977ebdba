"""An estimate of the memory that a training takes, before it starts.

It counts what grows with the settings. TensorFlow itself takes about half a gigabyte more.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compress.core import memory
from compress.core.memory import Memory, size
from compress.data.rows import mapped
from compress.model.ir.tensorflow import keras

FLOAT_BYTES = 4
WEIGHT_COPIES = 4
"""The weights, their gradients, and two averages of Adam."""
ACTIVATION_COPIES = 2
"""The values of a forward pass, which the backward pass needs, and their gradients."""


@dataclass(frozen=True)
class TrainingMemory:
    """The memory of a training in bytes.

    Attributes:
        activations: of all layers, for one sample.
        weights: with gradients and optimizer.
        samples: the training samples, if they are in memory.
    """

    activations: int
    weights: int
    samples: int

    def total(self, batch_size: int) -> int:
        """Return the memory with a batch size."""
        return batch_size * self.activations + self.weights + self.samples

    def note(self, batch_size: int, system_memory: Memory | None) -> str | None:
        """Return what is missing, and the batch size that fits; None if the training fits, or nothing is known."""
        if system_memory is None or self.total(batch_size) <= system_memory.available:
            return None
        fitting = (system_memory.available - self.weights - self.samples) // max(self.activations, 1)
        advice = memory.advice(("batch_size",))
        if fitting >= 1:
            advice = f"set batch_size: {min(1 << (int(fitting).bit_length() - 1), batch_size // 2 or 1)}"
        return (
            f"training takes about {size(self.total(batch_size))} of memory (activations of a batch of {batch_size}: "
            f"{size(batch_size * self.activations)}, weights with optimizer: {size(self.weights)}, samples: "
            f"{size(self.samples)}), but {system_memory}; {advice}"
        )


def estimate(model: Any, inputs: NDArray[np.float32]) -> TrainingMemory:
    """Return the memory that the training of a model takes.

    Args:
        model: a Keras model.
        inputs: the training samples; those in a file take no memory.
    """
    activations = sum(prod(side or 1 for side in shape[1:]) for shape in _output_shapes(model))
    return TrainingMemory(
        activations=activations * FLOAT_BYTES * ACTIVATION_COPIES,
        weights=int(model.count_params()) * FLOAT_BYTES * WEIGHT_COPIES,
        samples=0 if mapped(inputs) else inputs.nbytes,
    )


def _output_shapes(model: Any) -> Iterator[tuple[int | None, ...]]:
    """Yield the shape of each tensor that a functional model computes, nested models included."""
    functional = getattr(model, "_functional", None) or model  # a sequential model has one inside
    for operation in functional.operations:
        if isinstance(operation, keras().Model):
            yield from _output_shapes(operation)
            continue
        for node in operation._inbound_nodes:
            for tensor in node.output_tensors:
                yield tuple(tensor.shape)
