"""The record of one pruning step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from compress.core.artifact import Facts
from compress.learning.pruning.allocation import AllocationMethod
from compress.learning.pruning.importance import ImportanceMethod
from compress.learning.pruning.objective import CostChange
from compress.learning.pruning.sensitivity import SensitivityCurve


@dataclass(frozen=True)
class LayerWidths:
    """The number of channels of a layer before and after a step."""

    before: int
    after: int


@dataclass(frozen=True)
class PruningStep:
    """One step of pruning.

    Attributes:
        importance: the method that importance was measured with.
        allocation: the method that chose the widths.
        cost: the costs before and after the step.
        layers: the layers that have fewer channels.
        unsupported: layers that kept all channels because their use of them is not known.
        done: whether no further step is needed.
        trials: by allocation method the validation accuracy after one epoch of training, where methods were compared.
        sensitivity: the curves that the `sensitivity` allocation measured.
        warnings: sentences about what may be wrong with the model or the result.
        recalibration: the facts of batch norm recalibration before the training.
        training: the facts of the training.
    """

    importance: ImportanceMethod
    allocation: AllocationMethod
    cost: CostChange
    layers: Mapping[str, LayerWidths]
    unsupported: tuple[str, ...]
    done: bool
    trials: Mapping[AllocationMethod, float] = field(default_factory=dict)
    sensitivity: tuple[SensitivityCurve, ...] = ()
    warnings: tuple[str, ...] = ()
    recalibration: Facts = field(default_factory=dict)
    training: Facts = field(default_factory=dict)

    def to_json(self) -> Facts:
        """Return the step as plain values, for the artifact's facts; what was not done is left out."""
        facts: Facts = {
            "importance": self.importance,
            "allocation": self.allocation,
            "cost": {"before": self.cost.before, "after": self.cost.after},
            "figures": {
                "before": self.cost.figures_before.to_json(),
                "after": self.cost.figures_after.to_json(),
            },
            "layers": {name: asdict(widths) for name, widths in self.layers.items()},
            "unsupported": list(self.unsupported),
            "done": self.done,
            "warnings": list(self.warnings),
        }
        if self.trials:
            facts["trials"] = dict(self.trials)
        if self.sensitivity:
            facts["sensitivity"] = [curve.to_json() for curve in self.sensitivity]
        return {**facts, **self.recalibration, **self.training}
