"""The expected cost of a training: its phases, and the memory that it takes.

A unit of the cost of a phase is one sample that goes through the model. A training step goes through it about three
times: forward, and backward for the activations and for the weights. The memory counts what grows with the settings.
TensorFlow itself takes about half a gigabyte more.
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
from compress.core.progress import Phase
from compress.data.rows import mapped
from compress.data.types import Data
from compress.learning.training.batches import EpochSettings
from compress.model.ir.tensorflow import keras

BACKWARD = 3.0
"""Cost of a sample in a training step."""
BUILD = 2_000.0
"""Cost of building, tracing or converting a model once, measured with MobileNetV2 0.35@96; small models cost more."""
VALIDATION = Phase("validation", unit="sample")


def training_cost(data: Data, epochs: int) -> float:
    """Return the cost of a training."""
    train, validation = (len(data.labels(split)) for split in ("train", "validation"))
    return BUILD + epochs * (BACKWARD * train + validation)


def validation_cost(data: Data) -> float:
    """Return the cost of running a model on the validation split."""
    return float(len(data.labels("validation")))


def training(data: Data, settings: EpochSettings | None, name: str = "training") -> Phase:
    """Return the phase of a training with these settings, validation included; without settings it costs nothing."""
    if settings is None:
        return Phase(name, 0.0)
    return Phase(name, training_cost(data, settings.epochs) + 2 * validation_cost(data))


FLOAT_BYTES = 4
"""Of a float32 value."""
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


def memory_estimate(model: Any, inputs: NDArray[np.float32]) -> TrainingMemory:
    """Return the memory that the training of a Keras model takes; training samples in a file take no memory."""
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
