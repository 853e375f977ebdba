"""The record of the steps of a pruning, and the state of an interrupted pruning: its steps, and its model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any

from pydantic import TypeAdapter, ValidationError

from compress.core.artifact import Facts
from compress.core.errors import ModelError, reason_of
from compress.core.files import write_atomically
from compress.learning.context import Context
from compress.learning.pruning.allocation import AllocationMethod
from compress.learning.pruning.importance import ImportanceMethod
from compress.learning.pruning.objective import CostChange
from compress.learning.pruning.sensitivity import SensitivityCurve
from compress.model.importers.keras import keras_file

STATE = "state.json"


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


@dataclass(frozen=True)
class PruningState:
    """The progress of a pruning.

    Attributes:
        steps: the finished steps.
        untrained: the step whose channels are removed and whose training is not finished, or None.
    """

    steps: tuple[PruningStep, ...] = ()
    untrained: PruningStep | None = None

    @property
    def finished(self) -> bool:
        """Whether no step is left."""
        return bool(self.steps) and self.steps[-1].done


@dataclass(frozen=True)
class _SavedState:
    """The content of the state file; `model` is the name of the model's file next to it."""

    model: str
    state: PruningState


class PruningCheckpoint:
    """The files in `context.unfinished` from which an interrupted pruning continues."""

    def __init__(self, context: Context) -> None:
        assert context.unfinished is not None
        self._context = context
        self._folder = context.unfinished

    def save(self, model: Any, state: PruningState) -> None:
        """Write the model, then the state that names it."""
        name = f"pruned-{len(state.steps)}-{'untrained' if state.untrained else 'trained'}.keras"
        partial = self._folder / f"partial-{name}"
        model.save(partial)
        partial.replace(self._folder / name)
        write_atomically(self._folder / STATE, _adapter().dump_json(_SavedState(name, state)))

    def load(self, model: Any, steps: int) -> tuple[PruningState, Any]:
        """Return the saved state and its model; an empty state and the model before pruning where nothing can be read.

        `steps` is the number of steps in all, for the message.
        """
        path = self._folder / STATE
        if not path.exists():
            return PruningState(), model
        try:
            saved = _adapter().validate_json(path.read_bytes())
            model = keras_file.load(self._folder / saved.model, trust=self._context.trust)
        except (OSError, ValidationError, ModelError) as error:
            self._context.progress.note(
                f"restart: the files of the interrupted run cannot be read ({reason_of(error)})"
            )
            return PruningState(), model
        self._context.progress.note(f"continue after step {len(saved.state.steps)} of {steps}")
        return saved.state, model


@cache
def _adapter() -> TypeAdapter[_SavedState]:
    return TypeAdapter(_SavedState)
