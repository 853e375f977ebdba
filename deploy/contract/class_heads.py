"""From embeddings to logits of classes: the last dense layer of a network, and a head that is imprinted.

An embedding is the input of the last dense layer: samples of one class are near each other. An imprinted head has the
mean direction of the embeddings of each class as its weights, and the cosine with it as its logit. Source: Qi, Brown
and Lowe, Low-Shot Learning with Imprinted Weights, CVPR 2018. Here the mean of all reference embeddings is subtracted
first: outputs of ReLU have no negative values, so that all their cosines are large otherwise.
"""

from __future__ import annotations

from typing import NamedTuple, Union

import numpy as np

from deploy.contract.preprocessing import Array

ALIKE = 0.99
"""The smallest cosine of two embeddings that count as equal."""


class LinearHead(NamedTuple):
    """The last dense layer of a network.

    Attributes:
        weights: float32 [classes, values].
        biases: float32 [classes].
    """

    weights: Array
    biases: Array

    def logits(self, embeddings: Array) -> Array:
        """Return the logits [n, classes] of embeddings [n, values]."""
        return embeddings @ self.weights.T + self.biases


class CosineHead(NamedTuple):
    """An imprinted head.

    Attributes:
        centre: the mean that is subtracted from embeddings: float32 [values].
        directions: a vector of length 1 for each class: float32 [classes, values].
    """

    centre: Array
    directions: Array

    def logits(self, embeddings: Array) -> Array:
        """Return the cosines [n, classes] of embeddings [n, values]."""
        return unit(embeddings - self.centre) @ self.directions.T


Head = Union[LinearHead, CosineHead]


def unit(rows: Array) -> Array:
    """Return rows [n, values] at length 1, float32; a row of zeros stays one."""
    values = np.asarray(rows, np.float32)
    return values / np.maximum(np.sqrt((values**2).sum(axis=1, keepdims=True)), np.float32(1e-12))


def alike(first: Array, second: Array) -> Array:
    """Return for rows [n, values] of two models whether they have nearly the same direction: bool [n]."""
    return np.asarray((unit(first) * unit(second)).sum(axis=1) >= ALIKE)


def imprinted(embeddings: Array, labels: Array, classes: int, centre: Array) -> CosineHead:
    """Return the head whose directions are the mean directions of each class.

    Args:
        embeddings: float32 [n, values].
        labels: the class of each: int [n].
        classes: the number of classes. The direction of a class without embeddings is zero.
        centre: see `CosineHead`.
    """
    directions = unit(embeddings - centre)
    means = np.zeros((classes, embeddings.shape[1]), np.float32)
    np.add.at(means, labels, directions)
    return CosineHead(centre.astype(np.float32), unit(means))
