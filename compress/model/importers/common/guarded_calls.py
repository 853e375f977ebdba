"""Calls of native libraries, TensorFlow and Keras on untrusted files: with limits, and with one error message.

A file is read once in a child process (`check_readable`) before this process reads it.
"""

from __future__ import annotations

import logging
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

from compress.core import sandbox
from compress.core.errors import ModelError, cause_of
from compress.model.ir import tensorflow

MOST_WEIGHTS = 2**29
"""Elements of all weights of a model: a file of 2 GiB, the limit of a .tflite file."""
MOST_ELEMENTS = 2**26
"""Elements in one sample of a tensor: an image of 1,024 x 1,024 with 64 channels."""
TIMEOUT_S = 120
"""A library that reads a damaged file may never end."""
READ_ERRORS = (
    *(zipfile.BadZipFile, zlib.error, OSError, EOFError, RuntimeError, ValueError, LookupError, TypeError),
    *(SystemError, OverflowError),  # of h5py, for some damaged files
)


def first_line(error: BaseException) -> str:
    """Return the cause of an exception that a file makes a library raise."""
    return "its structure is damaged" if isinstance(error, (SystemError, OverflowError)) else cause_of(error)


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress the log output and the warnings of the libraries; restore their settings afterwards."""
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
def explained(path: Path, what: str, hint: str) -> Iterator[None]:
    """Turn every exception of the libraries into a ModelError; `what` is the action that failed."""
    import tensorflow as tf

    library_errors = (ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, MemoryError, NameError)
    try:
        yield
    except (*library_errors, *READ_ERRORS, tf.errors.OpError) as error:
        raise ModelError(f"{what}: {type(error).__name__}: {first_line(error)}", where=str(path), hint=hint) from error


@contextmanager
def located(path: Path) -> Iterator[None]:
    """Name the file in every ModelError that does not say where the error is."""
    try:
        yield
    except ModelError as error:
        error.where = error.where or str(path)
        raise


@contextmanager
def bounded() -> Iterator[None]:
    """Limit the total size of new variables to MOST_WEIGHTS elements.

    Raises:
        ValueError: a configuration asks for more; the variable is not created.
    """
    import tensorflow as tf

    total, scratch = 0, tf.Graph()

    def create(following: Any, **arguments: Any) -> Any:
        nonlocal total
        shape = arguments.get("shape")
        shape = _shape(arguments["initial_value"], scratch) if shape is None else tf.TensorShape(shape)
        total += prod(size or 1 for size in shape) if shape.rank is not None else 1
        if total > MOST_WEIGHTS:
            raise ValueError(f"its weights are more than {MOST_WEIGHTS:,} values")
        return following(**arguments)

    with tf.variable_creator_scope(create):
        yield


def _shape(value: Any, scratch: Any) -> Any:
    """Return the shape that a variable will have.

    Keras 3 hands TensorFlow a function without arguments, which makes the initial value of the variable in its closure.
    """
    import tensorflow as tf

    if not callable(value):
        return tf.TensorShape(getattr(value, "shape", ()))
    kind = tensorflow.keras().Variable
    known = [cell.cell_contents for cell in getattr(value, "__closure__", None) or ()]
    for cell_value in known:
        if isinstance(cell_value, kind):
            return tf.TensorShape(cell_value.shape)
    with scratch.as_default():
        return tf.TensorShape(value().shape)


def elements(tensor: Any) -> int:
    """Return the number of elements in one sample of a tensor; an open dimension counts as 1."""
    return prod(size or 1 for size in (getattr(tensor, "shape", None) or ())[1:])


def check_tensors(model: Any) -> None:
    """Check that no tensor in a Keras 3 model is larger than MOST_ELEMENTS.

    Raises:
        ValueError: a tensor is larger; the message names its layer.
    """
    functional = getattr(model, "_functional", None) or model
    for nodes in getattr(functional, "_nodes_by_depth", {}).values():
        for node in nodes:
            largest = max(map(elements, node.output_tensors), default=0)
            if largest > MOST_ELEMENTS:
                what = f"layer {node.operation.name!r} makes {largest:,} values of one sample"
                raise ValueError(f"{what}, more than {MOST_ELEMENTS:,}")
            if isinstance(node.operation, tensorflow.keras().Model):
                check_tensors(node.operation)


def check_readable(
    path: Path, library: str, function: Callable[..., None], arguments: Sequence[str], *, memory_bytes: int
) -> None:
    """Check that a native library reads a file within the limits.

    Args:
        path: the file, for the message.
        library: the native library that reads it, for the message.
        function: a module-level function that reads all of the file. It returns normally for a file that it refuses:
            this process reads the file again, and reports the refusal.
        arguments: its arguments.
        memory_bytes: limit of the data segment of the child process.

    Raises:
        ModelError: the child process crashed, or exceeded a limit.
    """
    try:
        ended = sandbox.run(function, arguments, timeout_s=TIMEOUT_S, memory_bytes=memory_bytes)
    except sandbox.SandboxTimeoutError as error:
        raise ModelError(f"{library} did not finish reading it in {TIMEOUT_S} s", where=str(path)) from error
    hint = "check that it was copied completely"
    if ended.status and sandbox.is_out_of_memory(ended.last_line):
        limit = f"{memory_bytes >> 20:,} MiB"
        raise ModelError(f"{library} needs more than {limit} of memory to read it", where=str(path), hint=hint)
    if ended.status:
        raise ModelError(f"{library} crashes when it reads it ({ended.reason})", where=str(path), hint=hint)
