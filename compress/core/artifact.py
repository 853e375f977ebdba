"""Artifacts: the results of stages, and the names of their files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

Facts = dict[str, Any]


class Kind(StrEnum):
    """The type of an artifact, which determines the stages that can use it."""

    UNTRAINED = "untrained keras model"
    KERAS = "keras model"
    FLOAT_TFLITE = "float tflite model"
    TFLITE = "quantized tflite model"
    COMPILED = "checked tflite model"
    BUNDLE = "bundle"
    FINDINGS = "findings of a probe"


#: The files in an artifact. Every kind from KERAS to COMPILED has a MODEL_TFLITE, so that
#: every probe works on every one of them, without TensorFlow.
MODEL_KERAS = "model.keras"
MODEL_TFLITE = "model.tflite"
MODEL_COMPILED = "model_edgetpu.tflite"
MODEL_SEGMENT = "model_segment_{}_of_{}.tflite"
"""A part of a model for one of several Edge TPUs."""
SEGMENT_COMPILED = "model_segment_{}_of_{}_edgetpu.tflite"
SEGMENTS = SEGMENT_COMPILED.format("*", "*")
"""A model compiled in segments for several Edge TPUs. It has no MODEL_COMPILED."""
BUNDLE_FILE = "bundle.coralline"
PLAN_FILE = "quantization.json"
"""The quantization plan of the model; `quantize: {plan: …}` applies it, edited or not."""
RUNNER_FILE = "runner.pyz"


@dataclass(frozen=True)
class Artifact:
    """A complete and immutable result of a stage or probe.

    Attributes:
        digest: SHA-256 over kind, files and facts.
        kind: what it is.
        folder: where its files are.
        files: SHA-256 of each file, by name.
        facts: what the maker says of it (plain JSON values).
        seconds: how long making it took.
    """

    digest: str
    kind: Kind
    folder: Path
    files: Mapping[str, str]
    facts: Facts
    seconds: float

    @property
    def is_trained(self) -> bool:
        """Whether later training may be judged by the model's result on validation."""
        return self.kind is not Kind.UNTRAINED

    def file(self, name: str) -> Path:
        """Return the path of one of its files."""
        if name not in self.files:
            raise KeyError(f"a {self.kind} has no {name}; it has {', '.join(self.files)}")
        return self.folder / name
