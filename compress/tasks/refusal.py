"""The methods that a task may refuse, and the reason of a refusal."""

from __future__ import annotations

from typing import Literal, NamedTuple

Use = Literal[
    "distillation",
    "qat teacher",
    "healing by distillation",
    "channel importance",
    "measured sensitivity",
    "class weights",
    "subset",
    "augmentation",
    "rotation",
    "mixup",
    "label smoothing",
    "labels",
    "selection by classes",
    "tfmot",
    "tfmot qat",
    "package",
    "embedding",
]
"""A method that not every task has, see `Stage.uses` and `compress.tasks.base.Task.refused`."""


class Refusal(NamedTuple):
    """The reason why a stage, or one of its settings, cannot be used with the data.

    Attributes:
        what: the reason.
        allowed: the alternatives.
        hint: what to do.
    """

    what: str
    allowed: str = ""
    hint: str = ""
