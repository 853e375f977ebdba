"""Targets: the hardware that a model is made for, and predictions for it.

Every package in this folder is a target; its attribute `TARGET` is the class that implements it.
"""

from __future__ import annotations

import hashlib
import pkgutil
import sys
import tomllib
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from pathlib import Path

from compress.core.errors import PipelineError
from compress.targets.base import Target

DEFAULT = "edgetpu"
"""The target of a pipeline or a command if none is given."""


def names() -> list[str]:
    """Return the names of all targets."""
    return sorted(_specifications())


def load(name: str) -> Target:
    """Return a target with the constants of its TOML file.

    Raises:
        PipelineError: unknown target.
    """
    specification = _specifications().get(name)
    if specification is None:
        raise PipelineError(f"unknown target {name!r}", allowed=", ".join(names()))
    assert specification.origin is not None  # a package with an __init__.py
    content = (Path(specification.origin).parent / f"{name}.toml").read_bytes()
    return _implementation(specification)(name, hashlib.sha256(content).hexdigest(), tomllib.loads(content.decode()))


def _specifications() -> dict[str, ModuleSpec]:
    """Return the import specification of each target's package, by name."""
    specifications = {}
    for module in pkgutil.iter_modules(__path__):
        specification = module.module_finder.find_spec(f"{__name__}.{module.name}", None)
        if module.ispkg and specification is not None:
            specifications[module.name] = specification
    return specifications


def _implementation(specification: ModuleSpec) -> type[Target]:
    """Return the class in a target's package; the first call imports it."""
    if specification.name not in sys.modules:
        assert specification.loader is not None  # a package with an __init__.py
        module = module_from_spec(specification)
        sys.modules[specification.name] = module
        try:
            specification.loader.exec_module(module)
        except BaseException:
            del sys.modules[specification.name]
            raise
        setattr(sys.modules[__name__], specification.name.rpartition(".")[2], module)
    implementation: type[Target] = sys.modules[specification.name].TARGET
    return implementation
