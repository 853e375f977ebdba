"""A number that says how it was obtained, or why it is missing."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

How = Literal["measured", "predicted", "missing"]


@dataclass(frozen=True)
class Measurement:
    """One value with its unit and its origin.

    Attributes:
        value: the number, in `unit`; None when `how` is "missing".
        unit: "fraction", "bytes", "ms", "MACs", "parameters", "samples", ...
        how: measured here, predicted from a model of the hardware, or missing.
        low: lower end of the 95% interval, if one is known.
        high: its upper end.
        note: the conditions it holds under; for a missing value the reason, which is required.
    """

    value: float | None
    unit: str
    how: How
    low: float | None = None
    high: float | None = None
    note: str = ""

    def __post_init__(self) -> None:
        if (self.value is None) != (self.how == "missing"):
            raise ValueError(f"a value of {self.value!r} cannot be {self.how!r}")
        if self.how == "missing" and not self.note:
            raise ValueError("a missing measurement must say why")

    def to_json(self) -> dict[str, Any]:
        """As a plain map, for report.json."""
        return asdict(self)


def missing(unit: str, reason: str) -> Measurement:
    """A measurement that could not be made, and the reason."""
    return Measurement(None, unit, "missing", note=reason)
