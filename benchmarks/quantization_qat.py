"""Quantization-aware training for benchmarks/quantization.py --qat: both engines of the `quantize` stage.

The engine of tfmot runs with its known problems repaired (`compress.learning.tfmot.adapter`). Both engines start from
calibrated ranges and round at the same points. Our engine folds batch norms before training, tfmot's trains with them.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import quantization_subjects as subjects
import quantization_tools as tools

from compress.core.errors import StageError
from compress.learning.quantization import export, qat
from compress.learning.quantization.ranges import METHODS
from compress.learning.quantization.search import Search
from compress.learning.tfmot import adapter as tfmot
from compress.learning.training.loop import TrainingSettings
from compress.model.ir import keras_graph
from compress.model.ir.passes import fold

OURS, TFMOT, ADAROUND = "coralline QAT", "tfmot QAT", "coralline, AdaRound"
SETTINGS = TrainingSettings(epochs=6, learning_rate=0.0005)
"""The defaults of the `quantize` stage, for both engines."""


def engines(subject: subjects.Subject, inputs: tools.QuantizerInputs) -> Iterator[tuple[str, Any]]:
    """Yield the name and the file of each method that trains; a text if it refuses the network."""
    yield ADAROUND, tools.ours(inputs, rounding="adaround")
    for name, engine in ((OURS, ours), (TFMOT, by_tfmot)):
        try:
            yield name, engine(subject, inputs)
        except StageError as error:
            yield name, error.what


def ours(subject: subjects.Subject, inputs: tools.QuantizerInputs) -> tools.QuantizedFile:
    """Train with our engine, from the best PTQ plan; notes: agreement of the trained model with the file."""
    started = time.perf_counter()
    search = Search(fold.canonical(keras_graph.read(inputs.model)), inputs.calibration, inputs.held_out)
    ranged = search.ranges([*METHODS])
    equalized = search.equalized(ranged)
    best = equalized if equalized.plan is ranged.plan else search.ranges([*METHODS], equalized)
    with tempfile.TemporaryDirectory() as folder:
        context = subjects.context(subject.data, Path(folder), subject.seed)
        network, plan, _ = qat.train(search.network, best.plan, SETTINGS, context)
    content = export.convert(network, plan)
    seconds = time.perf_counter() - started
    return tools.QuantizedFile(
        content, seconds, {"training_agrees_with_file": _agreement(qat.simulated(network, plan), content, subject)}
    )


def by_tfmot(subject: subjects.Subject, inputs: tools.QuantizerInputs) -> tools.QuantizedFile:
    """Train with the engine of tfmot, as the `quantize` stage does, from the best ranges; notes: as in `ours`."""
    started = time.perf_counter()
    read = keras_graph.read(inputs.model)
    search = Search(fold.canonical(read), inputs.calibration, inputs.held_out)
    prepared = tfmot.prepare(read, search.ranges([*METHODS]).plan, subject.seed)
    with tempfile.TemporaryDirectory() as folder:
        context = subjects.context(subject.data, Path(folder), subject.seed)
        tfmot.fit(prepared.legacy.model, prepared.network, SETTINGS, context)
    content = export.convert(*prepared.trained("trained"))
    seconds = time.perf_counter() - started
    return tools.QuantizedFile(
        content, seconds, {"training_agrees_with_file": _agreement(prepared.legacy.model, content, subject)}
    )


def _agreement(model: Any, content: bytes, subject: subjects.Subject) -> float:
    """Return the share of test samples for which the trained model and the file give the same class."""
    inputs = subject.data.inputs("test")
    expected = np.asarray(model.predict(inputs, verbose=0)).argmax(axis=1)
    return float((tools.scores(content, inputs).argmax(axis=1) == expected).mean())
