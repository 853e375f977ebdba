"""Softmax regression as the last layer of a classifier, trained on embeddings."""

from __future__ import annotations

from typing import Any, Dict, Optional, Tuple

import numpy as np

from coralline_pycoral.learn.head_file import HeadFile, LastLayer, with_layer
from deploy.contract.confidence import log_softmax
from deploy.contract.preprocessing import Array


class SoftmaxRegression:
    """A dense layer and a softmax; the loss is the cross entropy, and half of `reg` times the squared weights.

    Args:
        weight_scale: the standard deviation of the first weights.
        reg: the strength of the weight decay.
    """

    def __init__(
        self,
        feature_dim: Optional[int] = None,
        num_classes: Optional[int] = None,
        weight_scale: float = 0.01,
        reg: float = 0.0,
    ) -> None:
        if not feature_dim or not num_classes or feature_dim < 1 or num_classes < 1:
            raise ValueError("feature_dim and num_classes must be at least 1")
        self._random = np.random.RandomState(0)
        self._weights = self._random.standard_normal((num_classes, feature_dim)) * weight_scale
        self._biases = np.zeros(num_classes)
        self._reg = reg
        self._logit_range: Optional[Tuple[float, float]] = None

    def train_with_sgd(
        self, data: Dict[str, Any], num_iter: int, learning_rate: float, batch_size: int = 100, print_every: int = 100
    ) -> None:
        """Train by stochastic gradient descent.

        Args:
            data: `data_train` and `data_val`, embeddings [n, values]; `labels_train` and `labels_val`, classes [n].
            num_iter: the number of steps.
            learning_rate: the length of a step, relative to the gradient.
            batch_size: the number of embeddings of a step.
            print_every: after so many steps, loss and accuracies are printed; 0: never.
        """
        features = np.asarray(data["data_train"], np.float64)
        labels = np.asarray(data["labels_train"], np.int64)
        for step in range(num_iter):
            chosen = self._random.randint(0, len(features), min(batch_size, len(features)))
            loss = self._step(features[chosen], labels[chosen], learning_rate)
            if print_every and step % print_every == 0:
                accuracies = tuple(
                    self.get_accuracy(data["data_" + name], data["labels_" + name]) for name in ("train", "val")
                )
                print(
                    "step %d of %d: loss %.4g, accuracy %.4g, validation %.4g" % ((step, num_iter, loss) + accuracies)
                )
        logits = self._logits(features)
        self._logit_range = (float(logits.min()), float(logits.max()))

    def get_accuracy(self, mat_x: Any, labels: Any) -> float:
        """Return the share of embeddings [n, values] whose class [n] is found."""
        predicted = self._logits(np.asarray(mat_x, np.float64)).argmax(axis=1)
        return float((predicted == np.asarray(labels)).mean())

    def serialize_model(self, in_model_path: str) -> bytes:
        """Return the .tflite file of an embedding extractor with this layer; the weights have 8 bits if the file has.

        Raises:
            ValueError: the file cannot be read, or its output is no embedding of this length.
        """
        try:
            with open(in_model_path, "rb") as stream:
                content = stream.read()
        except OSError as error:
            raise ValueError("Failed to open file: %s: %s" % (in_model_path, error.strerror))
        layer = LastLayer(self._weights, self._biases, self._logit_range or self._possible_logits(content))
        return with_layer(content, layer)

    def _step(self, features: Array, labels: Array, learning_rate: float) -> float:
        """Make a step; return the loss before it."""
        logarithms = log_softmax(self._logits(features))
        rows = np.arange(len(labels))
        loss = -logarithms[rows, labels].mean() + 0.5 * self._reg * (self._weights**2).sum()
        errors = np.exp(logarithms)
        errors[rows, labels] -= 1
        errors /= len(labels)
        self._weights -= learning_rate * (errors.T @ features + self._reg * self._weights)
        self._biases -= learning_rate * errors.sum(axis=0)
        return float(loss)

    def _logits(self, features: Array) -> Array:
        return features @ self._weights.T + self._biases

    def _possible_logits(self, extractor: bytes) -> Tuple[float, float]:
        """Return the range of the logits for any embedding, if nothing was trained."""
        file = HeadFile(extractor)
        embedding = file.tensor(file.output)
        largest = float(np.abs(embedding.scale * (np.array([-128, 255]) - embedding.zero_point)).max())
        limit = float((np.abs(self._weights).sum(axis=1) * largest + np.abs(self._biases)).max())
        return -limit, limit
