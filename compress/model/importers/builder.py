"""Builders: Python files with a function that makes an untrained Keras model."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from types import MappingProxyType
from typing import Any

from compress.core.errors import ModelError, UntrustedError, listing, nearest, reason_of
from compress.core.resources import manual, shipped

FUNCTION = "build"
OURS = frozenset({"compress", "darwinn", "deploy"})
PACKAGES = frozenset({"site-packages", "dist-packages"})
"""The names of the folders of installed packages."""
DETECTOR = "detector"
"""The function of a detector's builder that returns the positions of the anchors."""


def names() -> list[str]:
    """Return the names of the builders that come with Coralline."""
    return sorted(path.stem for path in shipped("models").glob("*.py"))


def find(builder: str, folder: Path, *, trust: bool) -> tuple[Path, str]:
    """Return the file and the function that a `builder:` setting names.

    The setting is the name of a shipped builder, or a path `file.py` or `file.py:function`, relative to `folder`.

    Raises:
        UntrustedError: the builder is a custom file, and `trust` is not set.
        ModelError: the builder is unknown.
    """
    if builder in names():
        return shipped("models") / f"{builder}.py", FUNCTION
    file, colon, function = builder.rpartition(".py:")
    file = f"{file}.py" if colon else builder
    if not file.endswith(".py"):
        raise ModelError(
            f"unknown builder {builder!r}",
            allowed=f"{listing(names())}, or a path to a Python file",
            hint=nearest(builder, names()),
        )
    path = folder / file
    try:
        exists = path.is_file()
    except OSError as error:  # a name that is too long, for example
        raise ModelError(f"the file {path} cannot be read: {error.strerror}", hint="check the path") from error
    if not exists:
        raise ModelError(f"the file {path} does not exist", hint="check the path")
    if not trust:
        raise UntrustedError(
            f"loading would run the builder {path}, which is a program", hint="set `trust: true` under model"
        )
    return path, function if colon and function else FUNCTION


def check_arguments(path: Path, function: str, arguments: Mapping[str, Any]) -> None:
    """Check that a builder's function has these arguments; the file is read, and not run.

    Raises:
        ModelError: an argument is unknown, or the file is not a Python program.
    """
    known = known_arguments(path, function) if arguments else None
    for name in arguments:
        if known is not None and name not in known:
            raise ModelError(
                f"unknown argument {name!r}",
                where=f"{path}:{function}",
                allowed=listing(known),
                hint=nearest(name, known),
            )


def known_arguments(path: Path, function: str) -> list[str] | None:
    """Return the arguments that a pipeline file can set for a builder's function.

    None if the function takes any argument, or the file does not define it with `def`.

    Raises:
        ModelError: the file is not a Python program.
    """
    known = None
    for node in _parsed(path).body:
        if isinstance(node, ast.FunctionDef) and node.name == function:  # the last definition counts
            arguments = (*node.args.args[2:], *node.args.kwonlyargs)
            known = None if node.args.kwarg else [name.arg for name in arguments if name.arg != "trained"]
    return known


def imported_files(path: Path) -> list[Path]:
    """Return the files that a builder imports, directly or not; of a package, all its files. Nothing is run.

    Installed packages and Coralline are left out: their versions are part of the key where they matter. Modules that
    `importlib` loads, and data files that a builder reads, are not seen: after a change of one, use `--force model`.

    Raises:
        ModelError: a file is not a Python program.
    """
    standard = {Path(sys.prefix), Path(sys.base_prefix)}
    folders = [entry for entry in sys.path if standard.isdisjoint((Path(entry), *Path(entry).parents))]
    folders = [entry for entry in folders if PACKAGES.isdisjoint(Path(entry).parts)]
    files: list[Path] = []
    waiting = [path]
    while waiting:
        for name in _imported_names(waiting.pop()) - OURS:
            spec = PathFinder.find_spec(name, folders)
            if spec is None:
                continue
            packages = [file for folder in spec.submodule_search_locations or () for file in Path(folder).rglob("*.py")]
            new = [file for file in packages or [Path(spec.origin or "")] if file.suffix == ".py" and file not in files]
            files += new
            waiting += new
    return sorted(files)


def _imported_names(path: Path) -> set[str]:
    """Return the names of the modules and packages that a file imports, without their submodules."""
    names: set[str] = set()
    for node in ast.walk(_parsed(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.partition(".")[0])
    return names


def _parsed(path: Path) -> ast.Module:
    try:
        return ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError, MemoryError, RecursionError) as error:  # the last two: deep expressions
        raise ModelError(f"cannot be read: {reason_of(error)}", where=str(path)) from error


def build(
    path: Path,
    function: str,
    input_shape: tuple[int, ...],
    classes: int,
    backbone: Any = None,
    arguments: Mapping[str, Any] = MappingProxyType({}),
) -> Any:
    """Run a builder.

    `input_shape` is the shape of a preprocessed sample. A builder of transfer learning takes a trained Keras model,
    `backbone`, as its third argument.

    Raises:
        ModelError: the file has no such function, fails, or gives no Keras model.
    """
    from compress.model.ir.tensorflow import keras

    library = keras()
    first = (input_shape, classes) if backbone is None else (input_shape, classes, backbone)
    model = _called(path, function, first, arguments)
    if not isinstance(model, library.Model):
        raise ModelError(f"returned a {type(model).__name__}", where=f"{path}:{function}", allowed="a Keras model")
    return model


def detector(path: Path, input_shape: tuple[int, ...]) -> Any:
    """Return the specification of a detector's anchors from its builder (`deploy.contract.detection`).

    Raises:
        ModelError: the file has no function `detector`, or it fails.
    """
    return _called(path, DETECTOR, (input_shape,))


def _called(
    path: Path, function: str, arguments: tuple[Any, ...], named: Mapping[str, Any] = MappingProxyType({})
) -> Any:
    where = f"{path}:{function}"
    spec = importlib.util.spec_from_file_location(f"coralline_builder_{path.stem}", path)
    assert spec is not None  # a path that ends in .py always has a loader
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        if not callable(getattr(module, function, None)):
            hint = f"data for detection needs one: see {manual('detection.md')}" if function == DETECTOR else ""
            raise ModelError(f"unknown function {function!r}", where=str(path), hint=hint)
        _refuse_other_parameters(getattr(module, function), where, arguments, named)
        return getattr(module, function)(*arguments, **named)
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(f"the builder failed: {type(error).__name__}: {error}", where=where) from error


def _refuse_other_parameters(
    function: Callable[..., Any], where: str, arguments: tuple[Any, ...], named: Mapping[str, Any]
) -> None:
    try:
        signature = inspect.signature(function)
    except ValueError:  # it is written in C
        return
    try:
        signature.bind(*arguments, **named)
    except TypeError as error:
        raise ModelError(
            f"the builder cannot be called: {error}",
            where=where,
            hint="set what it needs in addition to the shape and the number of classes: `arguments` under `model`",
        ) from error
