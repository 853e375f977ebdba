"""The loss of a training on a scale that a person understands: what it is, and what guessing would give."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class LossScale:
    """A loss in words, and values to compare it with.

    Attributes:
        name: the loss with its unit, for people; empty if it is not known.
        references: the loss of guessing, and other values that training shows, by name. A guess is the best output that
            does not depend on the input: for a classifier, the frequencies of the classes.
    """

    name: str = ""
    references: Mapping[str, float] = field(default_factory=dict)

    def with_accuracy(self, labels: NDArray[Any]) -> LossScale:
        """Return it with the accuracy of the answer that is right most often; labels are class indices [n]."""
        most = int(np.unique(labels, return_counts=True)[1].max(initial=0))
        return replace(self, references={**self.references, "accuracy": round(most / max(len(labels), 1), 6)})

    def __str__(self) -> str:
        name = f"the loss is the {self.name}" if self.name else ""
        guesses = ", ".join(f"{name} {value:.3g}" for name, value in self.references.items())
        return "; ".join(part for part in (name, f"guessing gives {guesses}" if guesses else "") if part)
