"""Training that can be interrupted: everything that changes in it, written at the ends of epochs, and read again."""

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

from compress.files import write_atomically
from compress.ir.tensorflow import keras

FILE = "training.npz"
EVERY_S = 20.0
"""An interruption costs at most so much of a training, and one epoch."""


@dataclass
class Checkpoint:
    """The state of a training: weights, optimizer, random generators of layers, early stopping, history.

    Attributes:
        folder: where it is kept.
        variables: Keras variables, in an order that is the same whenever the same training is set up.
        stopping: the callback of early stopping, or None.
        rows: the history so far, one map for each epoch.
        told: what early stopping knew when it was written.
    """

    folder: Path
    variables: Sequence[Any]
    stopping: Any = None
    rows: list[dict[str, Any]] = field(default_factory=list)
    told: dict[str, Any] = field(default_factory=dict)

    def read(self) -> int:
        """Restore a checkpoint, and return the number of completed epochs; 0 if none fits."""
        try:
            with np.load(io.BytesIO((self.folder / FILE).read_bytes()), allow_pickle=False) as found:
                arrays = [found[f"v{index}"] for index in range(len(self.variables))]
                best = [found[name] for name in sorted(found.files) if name.startswith("best")]
                told = json.loads(str(found["told"]))
                rows, stopping = list(told["rows"]), dict(told["stopping"])
        except (OSError, EOFError, ValueError, KeyError, TypeError, RuntimeError, zipfile.BadZipFile, zlib.error):
            return 0  # zipfile raises RuntimeError and its child NotImplementedError for damaged members
        if any(array.shape != tuple(each.shape) for array, each in zip(arrays, self.variables, strict=True)):
            return 0
        for array, each in zip(arrays, self.variables, strict=True):
            each.assign(array)
        self.rows = rows
        self.told = {**stopping, "best_weights": best or None} if stopping else {}
        return len(self.rows)

    def write(self) -> None:
        """Write a checkpoint: complete, or not at all."""
        arrays: dict[str, Any] = {f"v{index}": np.asarray(each) for index, each in enumerate(self.variables)}
        told: dict[str, Any] = {"rows": self.rows, "stopping": {}}
        if self.stopping is not None:
            arrays |= {f"best{index:05}": each for index, each in enumerate(self.stopping.best_weights or [])}
            told["stopping"] = {name: getattr(self.stopping, name) for name in ("wait", "best_epoch")}
            told["stopping"]["best"] = None if self.stopping.best is None else float(self.stopping.best)
        content = io.BytesIO()
        np.savez(content, told=np.array(json.dumps(told)), **arrays)
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomically(self.folder / FILE, content.getvalue())

    def callback(self) -> Any:
        """Writes when an epoch begins: the last of all callbacks, when moving averages are out of the way again."""
        library, kept = keras(), self

        class Keep(library.callbacks.Callback):  # type: ignore[misc, name-defined]
            def on_train_begin(self, logs: Any = None) -> None:
                if kept.stopping is not None:  # which forgets all when a training begins
                    vars(kept.stopping).update(kept.told)
                self.written = time.monotonic()

            def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
                if time.monotonic() - self.written > EVERY_S:
                    kept.write()
                    self.written = time.monotonic()

            def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
                kept.rows.append({name: float(value) for name, value in (logs or {}).items()})

        return Keep()
