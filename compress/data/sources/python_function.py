"""Samples from a Python function of the user."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from compress.core.errors import DataError
from compress.data import labels
from compress.data.source import Samples, Stored

FUNCTION = "load"
KEYS = ("x", "y", "split", "classes")
GIVES = "a map with x and y (split, classes), a pair (x, y), or pairs (sample, label), or triples with a split"


class PythonFunction(Stored):
    """Your own Python function, without arguments, that returns samples and labels.

    It returns a map with `x`, `y` and optionally `split` and `classes`, or a pair `(x, y)`, or an iterable of pairs
    `(sample, label)` or triples `(sample, label, split)`. `x` is an array, or any object with a length and indices; its
    samples are then read one at a time, by several threads. Labels are integers from 0, or class names.
    """

    name: ClassVar[str] = "function"
    paths: ClassVar[tuple[str, ...]] = ("file", "reads", "manifest")

    file: str
    """The file, or file.py:function; the default function is `load`."""
    trust: bool = False
    """Allow the file to be run. Without it, the source is refused."""
    reads: tuple[str, ...] = ()
    """The files that the function reads. If they change, the data is read again."""

    def _path_and_function(self) -> tuple[Path, str]:
        file, colon, function = self.file.rpartition(".py:")
        path = Path(f"{file}.py" if colon else self.file)
        if not self.trust:
            raise DataError(
                f"loading would run the function {function if colon else FUNCTION!r} of the program {path}",
                where="data.source.function",
                hint="if you know what it does, set `trust: true` under function",
            )
        return path, function if colon and function else FUNCTION

    def files(self) -> dict[str, Path]:
        """Return the program and the files that it reads."""
        path, _ = self._path_and_function()
        return {"file": path, **{f"reads {index}": Path(read) for index, read in enumerate(self.reads)}}

    def fingerprint(self) -> dict[str, Any]:
        """Return the digests of program and files, and the name of the function."""
        return {**super().fingerprint(), "function": self._path_and_function()[1]}

    def load(self) -> Samples:
        """Run the function and check its result; what it prints goes to stderr."""
        path, function = self._path_and_function()
        where = f"{path}:{function}"
        with contextlib.redirect_stdout(sys.stderr):
            result = _called(path, function)
            if isinstance(result, Mapping):
                return _mapped(result, where)
            if isinstance(result, tuple) and len(result) == 2:
                return _mapped(dict(zip(KEYS, result, strict=False)), where)
            if not isinstance(result, Iterable) or isinstance(result, str | bytes):
                raise DataError(f"returned {type(result).__name__}", where=where, allowed=GIVES)
            return _mapped(_gathered(result, where), where)


@contextlib.contextmanager
def _running(what: str, where: str) -> Iterator[None]:
    """Convert any exception of a program, also SystemExit, to a data error."""
    try:
        yield
    except DataError:
        raise
    except (Exception, SystemExit) as error:
        raise DataError(f"{what}failed: {type(error).__name__}: {error}", where=where) from error


def _called(path: Path, function: str) -> Any:
    """Call the function. An iterable is consumed here, so that its exceptions are reported in the same way."""
    spec = importlib.util.spec_from_file_location(f"coralline_data_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise DataError("is not a Python file", where=str(path), allowed="file.py, or file.py:function")
    module = importlib.util.module_from_spec(spec)
    with _running("", f"{path}:{function}"):
        spec.loader.exec_module(module)
        if not callable(getattr(module, function, None)):
            raise DataError(f"has no function {function!r}", where=str(path))
        result = getattr(module, function)()
        indexed = isinstance(result, Mapping | tuple | list)
        return list(result) if isinstance(result, Iterable) and not indexed and not isinstance(result, str) else result


def _gathered(rows: Iterable[Any], where: str) -> dict[str, Any]:
    entries = list(rows)
    for index, row in enumerate(entries):
        if not isinstance(row, tuple) or len(row) not in (2, 3) or len(row) != len(entries[0]):
            raise DataError(f"item {index} is {type(row).__name__}", where=where, allowed=GIVES)
    if not entries:
        raise DataError("returned no samples", where=where, allowed=GIVES)
    return dict(zip(KEYS, (list(column) for column in zip(*entries, strict=True)), strict=False))


def _mapped(result: Mapping[str, Any], where: str) -> Samples:
    """Check the result and return it as samples."""
    if not {"x", "y"} <= result.keys() <= set(KEYS):
        raise DataError(f"returned the keys {', '.join(map(str, result))}", where=where, allowed=GIVES)
    x = result["x"]
    if not (hasattr(x, "__len__") and hasattr(x, "__getitem__")):
        raise DataError(f"x is {type(x).__name__}", where=where, allowed="something with a length and indices")
    with _running("len(x) ", where):
        count = len(x)
    with _running("y as an array ", where):
        y = np.asarray(result["y"])
    if y.shape != (count,) or y.dtype.kind not in "uiU":
        allowed = f"an integer or a name for each of the {count} samples"
        raise DataError(f"y is {y.dtype} {list(y.shape)}", where=where, allowed=allowed)
    names = _words(result, "classes", where)
    indexed = labels.of_array(y, names, lambda index: f"{where}: y[{index}]")
    words = _words(result, "split", where)
    if words is not None and len(words) != count:
        raise DataError(f"split has {len(words)} words", where=where, allowed=f"one for each of the {count} samples")
    splits = labels.splits(labels.split_named(word, where) for word in words or ())

    def read(index: int) -> NDArray[Any]:
        with _running(f"x[{index}] ", where):
            return np.asarray(x[index])

    return Samples(*indexed, read, splits)


def _words(result: Mapping[str, Any], key: str, where: str) -> list[str] | None:
    """Return the names of classes or splits, if there are any."""
    value = result.get(key)
    if value is None:
        return None
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise DataError(f"{key} is {type(value).__name__}", where=where, allowed="a list of names")
    with _running(f"{key} as a list ", where):
        return [str(word) for word in value]
