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

from compress.core.artifact import Facts
from compress.core.errors import StageError
from compress.core.files import write_atomically
from compress.learning.context import Context
from compress.learning.training import subset
from compress.learning.training.subset import Indices, Subset
from compress.model.ir.tensorflow import input_tensors, keras, run, set_weights
from compress.tasks import task_of

if TYPE_CHECKING:
    from compress.tasks.base import Head

FILE = "subset.npz"
BATCH = 64
FEATURES = 256
"""Maximum number of features; more are projected, which keeps distances within some percent."""
Trained = Callable[[int], Any]
"""Return a copy of the model after a short training, by number."""


def errors(model: Any, head: Head, inputs: NDArray[np.float32], targets: NDArray[Any]) -> NDArray[np.float64]:
    """Return how far a model's outputs are from the training targets, by sample (`Head.sample_errors`): [n]."""
    parts = []
    for start in range(0, len(inputs), BATCH):
        batch = slice(start, start + BATCH)
        parts.append(np.asarray(head.sample_errors(targets[batch], run(model, inputs[batch])), np.float64))
    return np.concatenate(parts)


def features(model: Any, inputs: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the inputs of the last layer with weights: float32 [n, features]; feature maps are averaged."""
    library = keras()
    operation = model.outputs[0]._keras_history.operation
    while not getattr(operation, "weights", None):
        tensor = operation.input
        if not library.ops.is_tensor(tensor) and not isinstance(tensor, library.KerasTensor):
            break
        operation = tensor._keras_history.operation
    inner = library.Model(input_tensors(model), operation.input)
    rows = []
    for batch in _batches(inputs):
        values = np.asarray(run(inner, batch), np.float32)
        rows.append(values.mean(axis=(1, 2)) if values.ndim == 4 else values.reshape(len(values), -1))
    return _projected(np.concatenate(rows))


def _projected(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return fewer features with nearly the same distances (Johnson and Lindenstrauss, 1984)."""
    if values.shape[1] <= FEATURES:
        return values
    random = np.random.default_rng(0).standard_normal((values.shape[1], FEATURES)).astype(np.float32)
    return values @ random / np.float32(np.sqrt(FEATURES))


def chosen(settings: Subset, head: Head, model: Any, trained: Trained, context: Context) -> tuple[Indices, Facts]:
    """Return the selected samples of the training split, and facts about the selection and its cost.

    The selection is saved in `context.unfinished`, so that an interrupted stage does not repeat it.

    Args:
        settings: the method.
        head: the meaning of the model's output.
        model: the model before the training.
        trained: returns proxies.
        context: data, seed, progress.

    Raises:
        StageError: there are fewer samples than classes, or the outputs of a proxy are not finite.
    """
    labels = context.data.labels("train")
    count = settings.count(len(labels))
    if count < len(np.unique(labels)):
        what = f"leaves {count} samples of {len(labels)} for {len(np.unique(labels))} classes"
        raise StageError(f"subset.share: {settings.share} {what}", hint="make it larger")
    path = context.unfinished / FILE if context.unfinished else None
    saved = _read_selection(path, len(labels)) if path is not None else None
    if saved is not None:
        indices, seconds = saved
    else:
        began = time.monotonic()
        indices = _choose(settings, count, head, (model, trained), context)
        seconds = time.monotonic() - began
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            content = io.BytesIO()
            np.savez(content, indices=indices, seconds=seconds)
            write_atomically(path, content.getvalue())
    method = f"{settings.by}, {settings.keep}" if settings.by == "hardness" else settings.by
    facts = {"by": method, "samples": len(indices), "of": len(labels), "seconds": round(seconds, 1)}
    context.progress.note(f"subset: {summary(facts)}")
    return indices, {"subset": facts}


def _read_selection(path: Path, count: int) -> tuple[Indices, float] | None:
    """Return the saved indices and seconds of an interrupted stage; None if they do not fit the number of samples."""
    try:
        with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as content:
            indices = content["indices"]
            seconds = float(content["seconds"])
    except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError, zipfile.BadZipFile):
        return None
    if indices.ndim != 1 or indices.dtype != np.int64 or not len(indices):
        return None
    if indices.min() < 0 or indices.max() >= count:
        return None
    return indices, seconds


def summary(facts: Facts, purpose: str = "training") -> str:
    """Return the cost and the gain of a selection, as one line of text."""
    share = 1 - facts["samples"] / facts["of"]
    return (
        f"{facts['samples']:,} of {facts['of']:,} samples for {purpose}, by {facts['by']}: "
        f"{share:.0%} saved, selection took {facts['seconds']:.1f} s"
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
    models_to_score = [trained(number) for number in range(settings.seeds)] if settings.of == "proxy" else [model]
    targets = task_of(context.data).targets(context.data, "train")
    mean_errors = np.mean([errors(scored, head, inputs, targets) for scored in models_to_score], axis=0)
    if not np.isfinite(mean_errors).all():
        raise StageError("the outputs of a proxy are not finite", where="subset", hint="lower learning_rate")
    return subset.by_error(count, labels, mean_errors, settings.keep)


def fresh(model: Any, seed: int) -> Any:
    """Return a copy of a model with random weights; Normalization layers keep their statistics."""
    library = keras(seed)
    copy = library.models.clone_model(model)
    for old, new in zip(model._flatten_layers(), copy._flatten_layers(), strict=True):
        if isinstance(old, library.layers.Normalization):
            set_weights(new, old.get_weights())
    return copy


def _batches(inputs: NDArray[np.float32]) -> Iterator[NDArray[np.float32]]:
    return (inputs[start : start + BATCH] for start in range(0, len(inputs), BATCH))
