"""Errors and features of samples by a model, and the selection of a subset with its cost."""

from __future__ import annotations

import io
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from compress.artifact import Facts
from compress.errors import StageError
from compress.files import write_atomically
from compress.ir.tensorflow import keras, set_weights
from compress.stage import Context
from compress.training import subset
from compress.training.subset import Indices, Subset

if TYPE_CHECKING:
    from compress.tasks.base import Head

FILE = "subset.npz"
BATCH = 64
FEATURES = 256
"""Features are projected to so many at most: distances stay, within some percent."""
Trained = Callable[[int], Any]
"""A copy of the model that was trained for a while, by number."""


def errors(model: Any, head: Head, inputs: NDArray[np.float32], labels: Indices) -> NDArray[np.float64]:
    """Return the distance of a classifier from the labels: the norm of (probabilities - one-hot label), 0 to sqrt(2).

    Early in a training and averaged over some, this is EL2N. Source: Paul, Ganguli and Dziugaite, Deep Learning on a
    Data Diet, NeurIPS 2021.
    """
    found = [_probabilities(head, model(batch, training=False)) for batch in _batches(inputs)]
    return error_of(np.concatenate(found), labels)


def error_of(probabilities: NDArray[Any], labels: Indices) -> NDArray[np.float64]:
    """The same of probabilities [n, classes]."""
    wrong = np.asarray(probabilities, np.float64).copy()
    wrong[np.arange(len(labels)), labels] -= 1
    result: NDArray[np.float64] = np.sqrt(np.square(wrong).sum(axis=1))
    return result


def features(model: Any, inputs: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the inputs of the last layer with weights: float32 [n, features]; feature maps are averaged."""
    library = keras()
    operation = model.outputs[0]._keras_history.operation
    while not getattr(operation, "weights", None):
        given = operation.input
        if not library.ops.is_tensor(given) and not isinstance(given, library.KerasTensor):
            break
        operation = given._keras_history.operation
    inner = library.Model(model.inputs[0], operation.input)
    found = []
    for batch in _batches(inputs):
        values = np.asarray(inner(batch, training=False), np.float32)
        found.append(values.mean(axis=(1, 2)) if values.ndim == 4 else values.reshape(len(values), -1))
    return _projected(np.concatenate(found))


def _projected(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Fewer features with nearly the same distances (Johnson and Lindenstrauss, 1984)."""
    if values.shape[1] <= FEATURES:
        return values
    random = np.random.default_rng(0).standard_normal((values.shape[1], FEATURES)).astype(np.float32)
    return values @ random / np.float32(np.sqrt(FEATURES))


def chosen(settings: Subset, head: Head, model: Any, trained: Trained, context: Context) -> tuple[Indices, Facts]:
    """The part of the training split that is trained on, and what choosing it cost.

    An interrupted stage finds its choice again in `context.unfinished`.

    Args:
        settings: how to choose.
        head: what the model's output means.
        model: the model as it comes.
        trained: gives proxies.
        context: data, seed, progress.

    Raises:
        StageError: nothing would be left to choose, or a proxy's answers are no numbers.
    """
    labels = context.data.labels("train")
    count = settings.count(len(labels))
    if count < len(np.unique(labels)):
        what = f"leaves {count} samples of {len(labels)} for {len(np.unique(labels))} classes"
        raise StageError(f"subset.share {settings.share} {what}", todo="make it larger")
    path = context.unfinished / FILE if context.unfinished else None
    found = _left(path, len(labels)) if path is not None else None
    if found is None:
        began = time.monotonic()
        indices = _choose(settings, count, head, (model, trained), context)
        found = indices, time.monotonic() - began
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            content = io.BytesIO()
            np.savez(content, indices=indices, seconds=found[1])
            write_atomically(path, content.getvalue())
    indices, seconds = found
    how = f"{settings.by}, {settings.keep}" if settings.by == "hardness" else settings.by
    facts = {"by": how, "samples": len(indices), "of": len(labels), "seconds": round(seconds, 1)}
    context.progress.note(f"subset: {told(facts)}")
    return indices, {"subset": facts}


def _left(path: Path, count: int) -> tuple[Indices, float] | None:
    """What an interrupted try has chosen, in how many seconds; None if it has not, or not from so many samples."""
    try:
        with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as content:
            found, seconds = content["indices"], float(content["seconds"])
    except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError, zipfile.BadZipFile):
        return None
    good = found.ndim == 1 and found.dtype == np.int64 and len(found) and 0 <= found.min() <= found.max() < count
    return (found, seconds) if good else None


def told(facts: Facts, what: str = "training") -> str:
    """The cost and the gain, in one line."""
    share = 1 - facts["samples"] / facts["of"]
    return (
        f"{facts['samples']:,} of {facts['of']:,} samples for {what}, by {facts['by']}: "
        f"{share:.0%} saved, choosing took {facts['seconds']:.1f} s"
    )


def _choose(settings: Subset, count: int, head: Head, models: tuple[Any, Trained], context: Context) -> Indices:
    labels = context.data.labels("train")
    if settings.by == "random":
        return subset.at_random(count, labels, context.seed)
    if settings.by == "stratified":
        return subset.stratified(count, labels, context.seed)
    model, trained = models
    inputs = context.data.inputs("train")
    if settings.by == "coverage":
        return subset.covering(count, labels, features(trained(0) if settings.of == "proxy" else model, inputs))
    scored = [trained(number) for number in range(settings.seeds)] if settings.of == "proxy" else [model]
    found = np.mean([errors(each, head, inputs, labels) for each in scored], axis=0)
    if not np.isfinite(found).all():
        raise StageError("a proxy's answers are no numbers", where="subset", todo="lower learning_rate")
    return subset.by_error(count, labels, found, settings.keep)


def fresh(model: Any, seed: int) -> Any:
    """A classifier like this one, with weights as before any training; what normalizations know of the data stays."""
    library = keras(seed)
    classifier = library.Model(model.inputs[0], model.outputs[0])
    made = library.models.clone_model(classifier)
    for old, new in zip(classifier._flatten_layers(), made._flatten_layers(), strict=True):
        if isinstance(old, library.layers.Normalization):
            set_weights(new, old.get_weights())
    return made


def _probabilities(head: Head, outputs: Any) -> NDArray[Any]:
    scores = outputs[0] if isinstance(outputs, list | tuple) else outputs
    return np.asarray(keras().ops.softmax(head.logits(scores), axis=-1))


def _batches(inputs: NDArray[np.float32]) -> Iterator[NDArray[np.float32]]:
    return (inputs[place : place + BATCH] for place in range(0, len(inputs), BATCH))
