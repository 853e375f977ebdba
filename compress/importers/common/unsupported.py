"""Operators and layers that cannot be imported, with the reason; the same wording for every format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TypeVar

from compress.errors import ModelError

Error = TypeVar("Error", bound=ModelError)
NO_LAYER = "Keras has no layer for it"
"""Reason for an operator without a rule."""


@dataclass(frozen=True)
class Refused:
    """An operator or a layer without a counterpart in Keras.

    Attributes:
        node: its name in the file.
        operator: its type: Loop, MatMul, Lambda.
        reason: the reason, in a few words.
    """

    node: str
    operator: str
    reason: str

    def __str__(self) -> str:
        node = self.node if len(self.node) <= 80 else f"{self.node[:77]}..."
        return f"{self.operator} {node!r}: {self.reason}"


def carrying(error: Error, refused: Sequence[Refused]) -> Error:
    """Return the error with the refused operators as facts for programs."""
    error.facts["refused"] = [asdict(each) for each in refused]
    return error


def unsupported(refused: Sequence[Refused], where: str) -> ModelError:
    """Return the error that lists every operator without a Keras layer."""
    count = f"{len(refused)} operator{'s' if len(refused) != 1 else ''}"
    what = f"{count} cannot become layers of Keras: {'; '.join(map(str, refused))}"
    return carrying(ModelError(what, where=where), refused)
