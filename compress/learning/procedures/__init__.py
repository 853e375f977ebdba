"""Procedures: train, prune, distill, replace_activations and quantize a Keras model, load or build one for data.

Each combines methods of learning. Stages and the Python interface call the same functions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy.contract.durable_files import write_atomically


@dataclass(frozen=True)
class ModelResult:
    """A Keras model that a procedure left.

    Attributes:
        model: a `keras.Model`. The annotation is `Any` because Keras is imported when it is first used.
        facts: what the procedure reports, as in report.json: plain JSON values.
    """

    model: Any
    facts: Mapping[str, Any]


@dataclass(frozen=True)
class QuantizedModel:
    """A full-integer model.

    Attributes:
        content: the .tflite file.
        facts: what the procedure reports, as in report.json: plain JSON values.
        plan: the quantization plan as JSON; None if the converter chose the ranges.
    """

    content: bytes
    facts: Mapping[str, Any]
    plan: str | None = None

    def save(self, path: str | Path) -> None:
        """Write the .tflite file; it is complete or not there at all.

        Raises:
            OSError: the file cannot be written.
        """
        write_atomically(Path(path), self.content)
