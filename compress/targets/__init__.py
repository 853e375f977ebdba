"""Targets: the hardware that a model is made for, and predictions for it.

Every package in this folder is a target; its attribute `TARGET` is the `Target`.
"""

from __future__ import annotations

import pkgutil
import sys
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec

from compress.core.errors import PipelineError
from compress.targets.base import Target

DEFAULT = "edgetpu"
"""The target of a pipeline or a command if none is given."""


def names() -> list[str]:
    """Return the names of all targets."""
    return sorted(_specifications())


def load(name: str) -> Target:
    """Return a target; the first call imports its package.

    Raises:
        PipelineError: no package in this folder has the name.
    """
    specification = _specifications().get(name)
    if specification is None:
        raise PipelineError(f"unknown target {name!r}", allowed=", ".join(names()))
    if specification.name not in sys.modules:
        _import(specification)
    target: Target = sys.modules[specification.name].TARGET
    return target


def _specifications() -> dict[str, ModuleSpec]:
    """Return the import specification of each target's package, by name."""
    specifications = {}
    for module in pkgutil.iter_modules(__path__):
        specification = module.module_finder.find_spec(f"{__name__}.{module.name}", None)
        if module.ispkg and specification is not None:
            specifications[module.name] = specification
    return specifications


def _import(specification: ModuleSpec) -> None:
    assert specification.loader is not None  # a package with an __init__.py
    module = module_from_spec(specification)
    sys.modules[specification.name] = module
    try:
        specification.loader.exec_module(module)
    except BaseException:
        del sys.modules[specification.name]
        raise
    setattr(sys.modules[__name__], specification.name.rpartition(".")[2], module)
