"""Calls of TensorFlow and Keras on files from anywhere: quiet, bounded, with one message for all they raise."""

from __future__ import annotations

import logging
import re
import warnings
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

from compress.errors import ModelError
from compress.ir import tensorflow

MOST_WEIGHTS = 2**29
"""Numbers in all weights of a model: a file of 2 GiB, as large as a .tflite file can be."""
MOST_ELEMENTS = 2**26
"""Numbers in one sample of any tensor: an image of 1,024 x 1,024 with 64 channels."""
READ_ERRORS = (
    *(zipfile.BadZipFile, zlib.error, OSError, EOFError, RuntimeError, ValueError, LookupError, TypeError),
    SystemError,  # of h5py, for some damaged files
)


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's message that names a cause."""
    if isinstance(error, SystemError):
        return "its structure is damaged"
    text = re.sub(r"\x1b\[\d+m", "", str(error)).rsplit("Exception encountered: ", 1)[-1]
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [type(error).__name__]
    line = next((line for line in lines if not line.startswith("Exception encountered when")), lines[0])
    return line if len(line) <= 300 else f"{line[:300]}..."


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress the logs and warnings of the libraries."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tensorflow.keras()  # first: absl must make its own logger
        loggers = [logging.getLogger(name) for name in ("absl", "tensorflow")]
        levels = [logger.level for logger in loggers]
        try:
            for logger in loggers:
                logger.setLevel(logging.ERROR)
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


@contextmanager
def explained(path: Path, what: str, todo: str) -> Iterator[None]:
    """Turns whatever the libraries raise about a file into one message; `what` could not be done."""
    import tensorflow as tf

    own = (ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, MemoryError, NameError)
    try:
        yield
    except (*own, *READ_ERRORS, tf.errors.OpError) as error:
        raise ModelError(f"{what}: {type(error).__name__}: {first_line(error)}", where=str(path), todo=todo) from error


@contextmanager
def bounded() -> Iterator[None]:
    """No variables beyond MOST_WEIGHTS in all, whatever a configuration asks for.

    Raises:
        ValueError: more were to be made; nothing of that size was.
    """
    import tensorflow as tf

    total, scratch = 0, tf.Graph()

    def create(following: Any, **given: Any) -> Any:
        nonlocal total
        shape = given.get("shape")
        shape = _shape(given["initial_value"], scratch) if shape is None else tf.TensorShape(shape)
        total += prod(side or 1 for side in shape) if shape.rank is not None else 1
        if total > MOST_WEIGHTS:
            raise ValueError(f"its weights are more than {MOST_WEIGHTS:,} numbers")
        return following(**given)

    with tf.variable_creator_scope(create):
        yield


def _shape(value: Any, scratch: Any) -> Any:
    """The shape that a variable will have.

    Keras 3 hands TensorFlow a function without arguments, which makes the initial value of the variable in its closure.
    """
    import tensorflow as tf

    if not callable(value):
        return tf.TensorShape(getattr(value, "shape", ()))
    kind = tensorflow.keras().Variable
    known = [cell.cell_contents for cell in getattr(value, "__closure__", None) or ()]
    for each in known:
        if isinstance(each, kind):
            return tf.TensorShape(each.shape)
    with scratch.as_default():
        return tf.TensorShape(value().shape)


def elements(tensor: Any) -> int:
    """The numbers in one sample of a tensor; sides that are open count as 1."""
    return prod(side or 1 for side in (getattr(tensor, "shape", None) or ())[1:])


def check_tensors(model: Any) -> None:
    """Refuse a Keras 3 model with a tensor that is larger than in any real model.

    Raises:
        ValueError: one is; the layer is named.
    """
    functional = getattr(model, "_functional", None) or model
    for nodes in getattr(functional, "_nodes_by_depth", {}).values():
        for node in nodes:
            largest = max(map(elements, node.output_tensors), default=0)
            if largest > MOST_ELEMENTS:
                what = f"layer {node.operation.name!r} makes {largest:,} numbers of one sample"
                raise ValueError(f"{what}, more than {MOST_ELEMENTS:,}")
            if isinstance(node.operation, tensorflow.keras().Model):
                check_tensors(node.operation)
