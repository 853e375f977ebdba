"""The embedding in a bundle: which output it is, the last dense layer, and reference embeddings.

With these the device adds classes without compiling: see `deploy.learn.recognizer`. The manifest's entry `embedding`::

    {"output": NAME, "head": {"weights": file, "biases": file} or null,
     "references": {"training": {"embeddings": file, "labels": file}, "validation": {...}}}

NAME is an output of the int8 and the compiled model. `head` is the last dense layer: float32 [labels, values] and
[labels]; it is null for models whose only output is the embedding. The reference embeddings are those of the int8 model
for some samples of both splits, in the dtype of the output: [n, values]; their labels are int64 [n].
"""

from __future__ import annotations

from typing import Any, Callable, Dict, List, NamedTuple, Optional

import numpy as np

from deploy.contract.class_heads import LinearHead
from deploy.contract.preprocessing import Array
from deploy.contract.tensors import TensorDescription

SPLITS = ("training", "validation")
Read = Callable[[str], Array]


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
    values = int(np.prod(tensor.shape, dtype=np.int64))
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
    values = int(np.prod(tensor.shape, dtype=np.int64))
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
