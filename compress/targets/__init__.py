"""Targets: the hardware that a model is made for, and predictions for it."""

from __future__ import annotations

from compress.core.errors import PipelineError
from compress.targets import cpu, edgetpu
from compress.targets.base import Target

TARGETS: dict[str, Target] = {target.name: target for target in (cpu.TARGET, edgetpu.TARGET)}
"""Every target by its name in pipeline.yaml."""
DEFAULT = "edgetpu"
"""The target of a pipeline or a command if none is given."""


def load(name: str) -> Target:
    """Return a target.

    Raises:
        PipelineError: no target has the name.
    """
    if name not in TARGETS:
        raise PipelineError(f"unknown target {name!r}", allowed=", ".join(TARGETS))
    return TARGETS[name]
