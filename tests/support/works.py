"""All stages and probes of the product, and the context that the runner gives them."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator
from typing import Any

from compress.learning.context import Context
from compress.pipeline import probes as evaluation
from compress.pipeline import stages
from compress.pipeline.stage import Probe, Stage, Work

for _package in (stages, evaluation):
    for _module in pkgutil.iter_modules(_package.__path__):
        importlib.import_module(f"{_package.__name__}.{_module.name}")


def _subclasses(kind: type[Work]) -> Iterator[type[Work]]:
    for subclass in kind.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)


_all = {*_subclasses(Stage), *_subclasses(Probe)}
KINDS = sorted((kind for kind in _all if kind.__module__.startswith("compress.")), key=lambda kind: kind.__name__)
"""The classes of stages and probes in compress/, with their common bases."""


def with_declared_context(run: Callable[..., Any]) -> Callable[..., Any]:
    """Return `run` with a context that has only what the stage or probe declares in `needs`."""

    def run_with_declared_context(self: Any, inputs: Any, context: Context) -> Any:
        return run(self, inputs, context.only(self.needs) if isinstance(context, Context) else context)

    return run_with_declared_context
