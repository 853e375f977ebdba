"""Small models as artifacts, and contexts for probes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tiny

from compress.core.artifact import MODEL_TFLITE, Artifact, Kind
from compress.learning.context import Context
from compress.targets import load


@pytest.fixture
def artifact(tmp_path: Path) -> Callable[..., Artifact]:
    """Return a function that makes an artifact of a model of tests/support/tiny.py, or of given bytes."""

    def make(content: bytes | None = None, **options: Any) -> Artifact:
        content = tiny.classifier(**options) if content is None else content
        digest = hashlib.sha256(content).hexdigest()
        folder = tmp_path / digest
        folder.mkdir(exist_ok=True)
        (folder / MODEL_TFLITE).write_bytes(content)
        return Artifact(digest, Kind.TFLITE, folder, {MODEL_TFLITE: digest}, {}, 0.0)

    return make


@pytest.fixture
def context(tmp_path: Path, artifact: Callable[..., Artifact]) -> Callable[..., Context]:
    """Return a function that makes a context with given samples and labels."""

    def make(samples: Any = None, labels: Any = None, classes: tuple[str, ...] = ("a", "b", "c")) -> Context:
        samples = np.random.default_rng(0).random((12, 4, 4, 1), np.float32) if samples is None else samples
        labels = np.arange(len(samples)) % len(classes) if labels is None else labels
        data = SimpleNamespace(
            task="classification",
            class_names=classes,
            inputs=lambda split: samples,
            labels=lambda split: labels,
            input_shape=samples.shape[1:],
            preprocessing=[{"scale": {"from": [0, 2]}}],
        )
        return Context("tiny", tmp_path, data, artifact(), load("edgetpu"), 0, False, tiny.Notes())  # type: ignore[arg-type]

    return make
