"""Classes from a few photos: a new head in addition to the head of the network, in numpy.

The network keeps its own logits of the old classes. A new class gets a logit that is linear in the direction of the
embedding. Two methods find this direction:

- "imprint": the mean direction of the photos. Source: Qi, Brown and Lowe, Low-Shot Learning with Imprinted Weights,
  CVPR 2018.
- "softmax": softmax regression on the photos against the reference embeddings of the bundle.

The scale and the bias of the new logit are then chosen on the validation embeddings in the bundle, which no training
has used: at most a share `loss` of them goes from the right old class to the new one.
examples/retail/README.md compares both methods.
"""

from __future__ import annotations

from typing import Dict, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from deploy.contract.confidence import log_softmax
from deploy.contract.embedding import Head, References, imprinted, unit
from deploy.contract.errors import ArgumentError
from deploy.contract.preprocessing import Array

METHODS = ("softmax", "imprint")
SPREAD = 1.75
"""The spread of a new logit over the validation embeddings, relative to that of the largest old logit."""
FEATURE_LENGTH = 10.0
"""The length of features in the softmax regression: it sets the strength of the regularization."""
PHOTO_WEIGHT = 0.05
"""The weight of all photos of a class in the softmax regression, relative to all reference embeddings."""
BIAS_PENALTY = 0.01
"""The L2 penalty of the biases in the softmax regression; that of the weights is 1."""
STEPS = 300
"""Steps of the softmax regression."""
MAX_REFERENCES = 1000
"""The largest number of reference embeddings that the softmax regression uses: its time grows with the cube."""
ROUNDING = 1e-4
"""A new logit must exceed the old one by this share of its spread, so that rounding does not decide."""


class LearnSettings(NamedTuple):
    """The settings of learning.

    Attributes:
        method: one of METHODS.
        loss: the largest share of the validation embeddings that each new class may take from the old ones.
    """

    method: str = "softmax"
    loss: float = 0.01


class LearntHead(NamedTuple):
    """The logits of new classes.

    Attributes:
        centre: the mean that is subtracted from embeddings: float32 [values].
        weights: float32 [classes, values].
        biases: float32 [classes].
    """

    centre: Array
    weights: Array
    biases: Array

    def logits(self, embeddings: Array) -> Array:
        """Return the logits [n, classes] of embeddings [n, values]."""
        return unit(embeddings - self.centre) @ self.weights.T + self.biases


def check(settings: LearnSettings) -> None:
    """Raise an ArgumentError if a setting is out of range."""
    if settings.method not in METHODS:
        raise ArgumentError("the method %r is unknown" % settings.method, "use one of: %s" % ", ".join(METHODS))
    if not 0 <= settings.loss <= 1:  # also for NaN
        raise ArgumentError("the loss is %r; allowed: 0 to 1" % settings.loss, "use 0.01")


def new_head(
    photos: Sequence[Array], old: Optional[Head], references: Dict[str, References], settings: LearnSettings
) -> LearntHead:
    """Return the logits of new classes.

    `photos` has the embeddings of each new class, float32 [photos, values]; `old` is the head of the old classes, if
    there are any. Without references, new classes are imprinted, whatever the method.
    """
    everything = np.concatenate(list(photos))
    labels = np.repeat(np.arange(len(photos)), [len(embeddings) for embeddings in photos])
    known = references.get("training") or references.get("validation")
    centre = np.zeros(everything.shape[1], np.float32) if known is None else known.embeddings.mean(axis=0)
    if settings.method == "imprint" or known is None:
        weights = imprinted(everything, labels, len(photos), centre).directions
        biases = np.zeros(len(photos), np.float32)
    else:
        sampled = known.embeddings[:: -(-len(known.labels) // MAX_REFERENCES)]
        directions = unit(np.concatenate([sampled, everything]) - centre)
        classes = np.concatenate([np.zeros(len(sampled), np.int64), labels + 1])
        weights, biases = _softmax_regression(directions, classes)
    head = LearntHead(centre.astype(np.float32), weights, biases)
    held_out = references.get("validation") or known
    return head if old is None or held_out is None else _placed(head, old, held_out, settings.loss)


def losses(head: LearntHead, old: Head, references: References) -> int:
    """Return how many reference embeddings go from the right old class to a new one."""
    logits = old.logits(references.embeddings)
    right = logits.argmax(axis=1) == references.labels
    return int((right & (head.logits(references.embeddings).max(axis=1) > logits.max(axis=1))).sum())


def _placed(head: LearntHead, old: Head, references: References, loss: float) -> LearntHead:
    """Return the head with the scale and the bias of each class that the old logits need.

    A logit has `SPREAD` times the spread of the largest old logit. Its bias is as large as possible: it takes at most
    a share `loss` of the references from the right old class.
    """
    logits = old.logits(references.embeddings)
    largest = logits.max(axis=1)
    right = logits.argmax(axis=1) == references.labels
    values = head.logits(references.embeddings)
    spread = SPREAD * largest.std()
    scales = spread / np.maximum(values.std(axis=0), 1e-9)
    margins = values * scales - largest[:, np.newaxis]
    if right.any():
        margins = margins[right]
    ordered = -np.sort(-margins, axis=0)
    allowed = min(int(loss * len(references.labels)), len(ordered) - 1)
    weights = head.weights * scales[:, np.newaxis]
    biases = head.biases * scales - ordered[allowed] - ROUNDING * spread
    return LearntHead(head.centre, _float32(weights), _float32(biases))


def _softmax_regression(directions: Array, classes: Array) -> Tuple[Array, Array]:
    """Return weights [new classes, values] and biases of the new classes, relative to the class 0.

    The weighted cross entropy with an L2 penalty is minimized in the space of the samples: the weights are sums of
    their features. Each step is a Newton step with an upper bound of the curvature (Boehning, Multinomial logistic
    regression algorithm, 1992), with Nesterov's momentum, which restarts if it leads upwards (O'Donoghue and Candes,
    2015).

    Args:
        directions: vectors of length 1: float32 [n, values].
        classes: 0 for the references, from 1 on for the photos of the new classes: int64 [n].
    """
    counts = np.bincount(classes)
    shares = np.concatenate([[1.0], np.full(len(counts) - 1, PHOTO_WEIGHT)]) * counts[0]
    importance = (shares / counts)[classes][:, np.newaxis]
    expected = np.eye(len(counts))[classes]
    features = directions.astype(np.float64) * FEATURE_LENGTH
    products = features @ features.T + 1 / BIAS_PENALTY
    inverse = np.linalg.inv(np.eye(len(classes)) + 0.5 * importance * products)
    factors = np.zeros((len(classes), len(counts)))
    ahead = factors
    age = 1.0
    for _ in range(STEPS):
        likely = np.exp(log_softmax(products @ ahead))
        gradient = importance * (likely - expected) + ahead
        following = ahead - inverse @ gradient
        if (gradient * (products @ (following - factors))).sum() > 0:
            age = 1.0
        older = age
        age = 0.5 + np.sqrt(0.25 + older**2)
        ahead = following + (older - 1) / age * (following - factors)
        factors = following
    relative = factors[:, 1:] - factors[:, :1]
    return _float32(relative.T @ features * FEATURE_LENGTH), _float32(relative.sum(axis=0) / BIAS_PENALTY)


def _float32(values: Array) -> Array:
    return np.asarray(values, np.float32)
