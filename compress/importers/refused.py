"""What of a model could not be imported, and why: the same words for every format."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Refused:
    """An operator or a layer that has no counterpart.

    Attributes:
        node: which one, as its file calls it.
        operator: of what kind it is: Loop, MatMul, Lambda.
        reason: why, in a few words.
    """

    node: str
    operator: str
    reason: str

    def __str__(self) -> str:
        return f"{self.operator} {self.node!r}: {self.reason}"
