"""The state of an interrupted pruning: its finished steps, and the model after the last one."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from pydantic import TypeAdapter, ValidationError

from compress.core.errors import ModelError, reason_of
from compress.learning.context import Context
from compress.model.importers.keras import keras_file
from compress.results.pruning import PruningStep
from deploy.contract.durable_files import write_atomically

STATE = "state.json"


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
        """Return the saved state and its model; an empty state and the model passed in where nothing can be read.

        Args:
            model: the model before pruning.
            steps: the number of steps in all, for the message.
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
