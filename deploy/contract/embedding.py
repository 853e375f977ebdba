"""Embeddings, and the heads that make logits of classes from them: a dense layer, or one that is imprinted.

An embedding is the input of the last dense layer: samples of one class are near each other. An imprinted head has the
mean direction of the embeddings of each class as its weights, and the cosine with it as its logit. Source: Qi, Brown
and Lowe, Low-Shot Learning with Imprinted Weights, CVPR 2018. Here the mean of all reference embeddings is subtracted
first: outputs of ReLU have no negative values, so that all their cosines are large otherwise.

A bundle says which output is the embedding, and has the last dense layer and reference embeddings. With these the
device adds classes without compiling: see `deploy.learn.recognizer`. The manifest's entry `embedding`::

    {"output": NAME, "head": {"weights": file, "biases": file} or null,
     "references": {"training": {"embeddings": file, "labels": file}, "validation": {...}}}

NAME is an output of the int8 and the compiled model. `head` is the last dense layer: float32 [labels, values] and
[labels]; it is null for models whose only output is the embedding. The reference embeddings are those of the int8 model
for some samples of both splits, in the dtype of the output: [n, values]; their labels are int64 [n].
"""

from __future__ import annotations

from typing import Any, Callable, Dict, List, NamedTuple, Optional, Union

import numpy as np

from deploy.contract.preprocessing import Array
from deploy.contract.step import count
from deploy.contract.tensors import TensorDescription

SPLITS = ("training", "validation")
Read = Callable[[str], Array]
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
    """Return the head whose directions are the mean directions of the embeddings, float32 [n, values], of each class.

    The direction of a class without embeddings is zero.
    """
    directions = unit(embeddings - centre)
    means = np.zeros((classes, embeddings.shape[1]), np.float32)
    np.add.at(means, labels, directions)
    return CosineHead(centre.astype(np.float32), unit(means))


class References(NamedTuple):
    """Embeddings of samples whose classes are known.

    Attributes:
        embeddings: float32 [n, values].
        labels: int64 [n].
    """

    embeddings: Array
    labels: Array


class BundledEmbedding(NamedTuple):
    """The embedding of a bundle.

    Attributes:
        output: the name of the output.
        head: the last dense layer; None: the model has none.
        references: by split, one of SPLITS; a split may be missing.
    """

    output: str
    head: Optional[LinearHead]
    references: Dict[str, References]


def files(entry: Any) -> List[Any]:
    """Return the names of the files that an entry refers to.

    Raises:
        KeyError, TypeError, AttributeError: the entry is incomplete.
    """
    head = entry["head"]
    names = [] if head is None else [head["weights"], head["biases"]]
    for references in entry["references"].values():
        names += [references["embeddings"], references["labels"]]
    return names


def parsed(entry: Any, read: Read, tensor: Optional[TensorDescription], classes: int) -> BundledEmbedding:
    """Return the embedding in a manifest.

    Args:
        entry: the manifest's `embedding`.
        read: the function from the name of a file to its array.
        tensor: the output that the entry names; None: there is no such output.
        classes: the number of labels in the manifest.

    Raises:
        ValueError: the entry or one of its arrays is invalid.
    """
    if tensor is None:
        raise ValueError("no model has the output %r" % (entry.get("output"),))
    values = count(tensor.shape)
    head = None
    if entry["head"] is not None:
        weights = read(entry["head"]["weights"])
        biases = read(entry["head"]["biases"])
        if weights.shape != (classes, values) or biases.shape != (classes,):
            raise ValueError("the head is not one of %d classes and %d values" % (classes, values))
        if not (_is_real(weights) and _is_real(biases)):
            raise ValueError("the head does not consist of finite float32 values")
        head = LinearHead(weights, biases)
    references = {}
    for split, names in entry["references"].items():
        if split not in SPLITS:
            raise ValueError("references of the split %r" % (split,))
        references[split] = _references(read(names["embeddings"]), read(names["labels"]), tensor, classes)
    return BundledEmbedding(tensor.name, head, references)


def _references(stored: Array, labels: Array, tensor: TensorDescription, classes: int) -> References:
    values = count(tensor.shape)
    if stored.ndim != 2 or stored.shape[1] != values or stored.dtype != np.dtype(tensor.dtype):
        raise ValueError("the reference embeddings are not rows of %d values of %s" % (values, tensor.dtype))
    if labels.shape != (len(stored),) or labels.dtype != np.int64 or ((labels < 0) | (labels >= classes)).any():
        raise ValueError("the reference embeddings do not have one label each")
    embeddings = tensor.real(stored)
    if not np.isfinite(embeddings).all():
        raise ValueError("a reference embedding is not finite")
    return References(embeddings, labels)


def _is_real(array: Array) -> bool:
    return array.dtype == np.float32 and bool(np.isfinite(array).all())
