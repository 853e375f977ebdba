"""Checkpoints of a training: its complete state between epochs, so that an interrupted training can continue."""

from __future__ import annotations

import io
import json
import time
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from compress.model.ir.tensorflow import keras
from deploy.contract.durable_files import write_atomically

FILE = "training.npz"
EVERY_S = 20.0
"""Minimum time between two checkpoints: an interruption loses this time and one epoch at most."""


@dataclass
class Checkpoint:
    """The state of a training: weights, optimizer, random generators of layers, early stopping, history.

    Attributes:
        folder: the folder of the file.
        variables: Keras variables, in the same order for every start of the same training.
        stopping: the callback of early stopping, or None.
        rows: the history so far, one map for each epoch.
        stopping_state: state of early stopping in the checkpoint.
        saved: number of epochs in the file.
    """

    folder: Path
    variables: Sequence[Any]
    stopping: Any = None
    rows: list[dict[str, Any]] = field(default_factory=list)
    stopping_state: dict[str, Any] = field(default_factory=dict)
    saved: int = 0

    def content(self) -> bytes:
        """Return the content of the file; b"" if it does not exist."""
        try:
            return (self.folder / FILE).read_bytes()
        except OSError:
            return b""

    def restore(self, file: bytes) -> int:
        """Restore the content of a file, and return the number of completed epochs; 0 if it does not fit."""
        try:
            with np.load(io.BytesIO(file), allow_pickle=False) as content:
                arrays = [content[f"v{index}"] for index in range(len(self.variables))]
                best = [content[name] for name in sorted(content.files) if name.startswith("best")]
                state = json.loads(str(content["state"]))
                rows = list(state["rows"])
                stopping = dict(state["stopping"])
        except (OSError, EOFError, ValueError, KeyError, TypeError, RuntimeError, zipfile.BadZipFile, zlib.error):
            return 0  # zipfile raises RuntimeError and its child NotImplementedError for damaged members
        pairs = list(zip(self.variables, arrays, strict=True))
        if any(array.shape != tuple(variable.shape) for variable, array in pairs):
            return 0
        for variable, array in pairs:
            variable.assign(array)
        self.rows = rows
        self.stopping_state = {**stopping, "best_weights": best or None} if stopping else {}
        self.saved = len(self.rows)
        return self.saved

    def write(self) -> None:
        """Write a checkpoint: complete, or not at all."""
        arrays: dict[str, Any] = {f"v{index}": np.asarray(variable) for index, variable in enumerate(self.variables)}
        state: dict[str, Any] = {"rows": self.rows, "stopping": {}}
        if self.stopping is not None:
            best = self.stopping.best_weights or []
            arrays |= {f"best{index:05}": weights for index, weights in enumerate(best)}
            state["stopping"] = {name: getattr(self.stopping, name) for name in ("wait", "best_epoch")}
            state["stopping"]["best"] = None if self.stopping.best is None else float(self.stopping.best)
        content = io.BytesIO()
        np.savez(content, state=np.array(json.dumps(state)), **arrays)
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomically(self.folder / FILE, content.getvalue())
        self.saved = len(self.rows)

    def callback(self) -> Any:
        """Return the callback that writes checkpoints.

        It writes at the begin of an epoch and is the last callback, so that moving averages are swapped back before.
        """
        library = keras()
        checkpoint = self

        class WriteCheckpoint(library.callbacks.Callback):  # type: ignore[misc, name-defined]
            def on_train_begin(self, logs: Any = None) -> None:
                if checkpoint.stopping is not None:  # Keras resets it at the begin of a training
                    vars(checkpoint.stopping).update(checkpoint.stopping_state)
                self.written = time.monotonic()

            def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
                if time.monotonic() - self.written > EVERY_S:
                    checkpoint.write()
                    self.written = time.monotonic()

            def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
                checkpoint.rows.append({name: float(value) for name, value in (logs or {}).items()})

        return WriteCheckpoint()
