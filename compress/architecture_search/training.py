"""Training of all sub-networks at once: the sandwich rule, with distillation from the largest network.

In each step the largest network learns from the labels; the smallest and some random sub-networks learn from its
outputs in the same step. So every sub-network is trained between a lower and an upper bound.

Source: Yu et al., BigNAS: Scaling Up Neural Architecture Search with Big Single-Stage Models, ECCV 2020.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from compress.architecture_search.elastic import ElasticNetwork, SubNetwork
from compress.architecture_search.network import ChoiceTensors, SharedNetwork
from compress.artifact import Facts
from compress.ir.tensorflow import keras
from compress.stage import Context
from compress.tasks.base import Head
from compress.training import loop
from compress.training.loop import Batch, Loss, TrainingSettings


@dataclass(frozen=True)
class OutputTerms:
    """The distillation from the largest network: its outputs as they are (`compress.tasks.base.DistillationTerms`)."""

    temperature: float = 1.0
    decoupled: None = None


def train(shared: SharedNetwork, random: int, settings: TrainingSettings, context: Context) -> Facts:
    """Train a shared network in place; return the facts of `fit`.

    Args:
        shared: the network.
        random: the number of random sub-networks in each step, in addition to the largest and the smallest.
        settings: the training settings. Early stopping follows the largest network.
        context: data, seed, progress. XLA, which needs fixed numbers of channels, does not compile the step.

    Raises:
        StageError: the loss is not finite.
        ModelError: the model does not fit the data.
    """
    head = loop.head_of(shared.model, context.data, context.specification)
    drawn = DrawnChoices(shared, random, context.seed)
    return loop.fit(
        shared.model,
        sandwich_loss(shared, drawn, head),
        settings,
        replace(context, execution=context.execution.model_copy(update={"jit_compile": False})),
        callbacks=[lambda model: drawn.callback()],
    )


def step_networks(elastic: ElasticNetwork, random: int, seed: int, epoch: int, batch: int) -> list[SubNetwork]:
    """Return the sub-networks of one training step without the largest: the smallest, and random ones.

    They depend only on the seed and the step, so that an interrupted training continues with the same ones.
    """
    generator = np.random.default_rng([seed, epoch, batch])
    return [elastic.smallest, *(elastic.random(generator) for _ in range(random))]


class DrawnChoices:
    """The sub-networks of the current training step, as TensorFlow variables that the traced step reads.

    Args:
        shared: the network.
        random: the number of random sub-networks.
        seed: the seed of the run.
    """

    def __init__(self, shared: SharedNetwork, random: int, seed: int) -> None:
        import tensorflow

        self._shared = shared
        self._random = random
        self._seed = seed
        first = self._draw(0, 0)
        self.choices = [
            ChoiceTensors(*(tensorflow.Variable(array, trainable=False) for array in choice)) for choice in first
        ]

    def callback(self) -> Any:
        """Return the Keras callback that draws them before each step."""
        drawn = self

        class Draw(keras().callbacks.Callback):  # type: ignore[misc]
            def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
                self.epoch = epoch

            def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
                for variables, arrays in zip(drawn.choices, drawn._draw(self.epoch, batch), strict=True):
                    for variable, array in zip(variables, arrays, strict=True):
                        variable.assign(array)

        return Draw()

    def _draw(self, epoch: int, batch: int) -> list[ChoiceTensors]:
        networks = step_networks(self._shared.elastic, self._random, self._seed, epoch, batch)
        return [self._shared.choice(network) for network in networks]


def sandwich_loss(shared: SharedNetwork, drawn: DrawnChoices, head: Head) -> Loss:
    """Return the mean of the losses of the largest network on the labels, and of sub-networks on its outputs.

    Validation has the loss of the largest network alone.
    """
    import tensorflow

    terms = OutputTerms()

    def loss(batch: Batch, outputs: Any) -> Any:
        total = head.loss(batch.labels, outputs)
        if not batch.training:
            return total
        largest = keras().tree.map_structure(tensorflow.stop_gradient, outputs)
        targets = head.soft_targets([head.logits(largest)], [1.0], terms.temperature)
        for choice in drawn.choices:
            logits = head.logits(shared.run(batch.inputs, choice, training=True))
            total += head.distillation_loss(logits, targets, batch.labels, terms)
        return total / (1 + len(drawn.choices))

    return Loss(loss, name=f"mean of {head.loss_name} of the largest network, and divergence of sub-networks from it")
