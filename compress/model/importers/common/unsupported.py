"""Operators and layers that cannot be imported, with the reason; the same wording for every format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from compress.core.errors import ModelError

Error = TypeVar("Error", bound=ModelError)
NO_LAYER = "Keras has no layer for it"
"""Reason for an operator without a rule."""
MOST_LISTED = 8
"""Kinds of refused operators that a message lists."""
LONGEST_REASON = 240
"""Characters of a reason in a message."""


@dataclass(frozen=True)
class Refused:
    """An operator or a layer without a counterpart in Keras.

    Attributes:
        operator: type of the operator or layer: Loop, MatMul, Lambda.
        lacks_code: whether the file only names the code that it needs, so that no permission to run code helps.
    """

    node: str
    operator: str
    reason: str
    lacks_code: bool = field(default=False, compare=False)

    def __str__(self) -> str:
        node = self.node if len(self.node) <= 80 else f"{self.node[:77]}..."
        return f"{self.operator} {node!r}: {self.reason}"


def carrying(error: Error, refused: Sequence[Refused]) -> Error:
    """Return the error with the refused operators as facts for programs."""
    error.facts["refused"] = [
        {"node": refusal.node, "operator": refusal.operator, "reason": refusal.reason} for refusal in refused
    ]
    return error


def listed(refused: Sequence[Refused]) -> str:
    """Return the refused operators as one line of limited length; those of one kind and reason together."""
    names: dict[tuple[str, str], list[str]] = {}
    for refusal in refused:
        names.setdefault((refusal.operator, refusal.reason), []).append(refusal.node)
    parts = []
    more = len(refused)
    for (operator, reason), nodes in list(names.items())[:MOST_LISTED]:
        reason = reason if len(reason) <= LONGEST_REASON else f"{reason[: LONGEST_REASON - 3]}..."
        first = str(Refused(nodes[0], operator, reason))
        parts.append(first if len(nodes) == 1 else f"{first} (and {len(nodes) - 1} more of this kind)")
        more -= len(nodes)
    return "; ".join([*parts, f"and {more} more"] if more else parts)


def unsupported(refused: Sequence[Refused], where: str) -> ModelError:
    """Return the error for operators without a Keras layer; its facts hold all of them."""
    count = f"{len(refused)} operator{'s' if len(refused) != 1 else ''}"
    return carrying(ModelError(f"{count} cannot be converted to Keras layers: {listed(refused)}", where=where), refused)
