"""Quantization-aware training for benchmarks/quantization.py --qat: both engines of the `quantize` stage.

tfmot's has its traps repaired (`compress.quantization.tfmot`): both start from the same calibrated ranges and
round at the same points. Ours trains with batch norm folded, tfmot's with batch norm.
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

from compress.errors import StageError
from compress.quantization import conversion, fake, points, tfmot, training
from compress.quantization.ranges import METHODS
from compress.quantization.search import Search
from compress.training import folding, network
from compress.training import tfmot as weights
from compress.training.fit import TrainingSettings

OURS, TFMOT = "coralline QAT", "tfmot QAT"
SETTINGS = TrainingSettings(epochs=6, learning_rate=0.0005)
"""The defaults of the `quantize` stage, for both."""


def both(subject: subjects.Subject, calibration: tools.Floats, held_back: tools.Floats) -> Iterator[tuple[str, Any]]:
    """What both engines make of a network; a text where one refuses."""
    yield OURS, ours(subject, calibration, held_back)
    try:
        yield TFMOT, by_tfmot(subject, calibration, held_back)
    except StageError as error:
        yield TFMOT, error.what


def ours(subject: subjects.Subject, calibration: tools.Floats, held_back: tools.Floats) -> tools.Made:
    """Our engine from the best ranges after training; notes: agreement of what it computed with the file."""
    started = time.perf_counter()
    canonical = folding.canonical(network.read(subject.model))
    search = Search(canonical, calibration, held_back, "int8", tools.scores)
    search.ranges([*METHODS])
    with tempfile.TemporaryDirectory() as folder:
        found, plan, _ = training.train(
            canonical, search.plan, SETTINGS, subjects.context(subject.data, Path(folder), subject.seed)
        )
    content = conversion.convert(found, plan)
    seconds = time.perf_counter() - started
    model = network.build(fake.with_rounded_weights(fake.insert(found, points.find(found), plan)))
    return tools.Made(content, seconds, {"training_agrees_with_file": _agreement(model, content, subject)})


def by_tfmot(subject: subjects.Subject, calibration: tools.Floats, held_back: tools.Floats) -> tools.Made:
    """The engine of tfmot as the `quantize` stage has it, from the same ranges; notes: the same."""
    started = time.perf_counter()
    read = network.read(subject.model)
    search = Search(folding.canonical(read), calibration, held_back, "int8", tools.scores)
    search.ranges([*METHODS])
    prepared = tfmot.prepare(read, search.plan, subject.seed)
    with tempfile.TemporaryDirectory() as folder:
        context = subjects.context(subject.data, Path(folder), subject.seed)
        weights.train(prepared.legacy.model, prepared.network, SETTINGS, context)
    content = conversion.convert(*prepared.learnt("trained"))
    seconds = time.perf_counter() - started
    return tools.Made(
        content, seconds, {"training_agrees_with_file": _agreement(prepared.legacy.model, content, subject)}
    )


def _agreement(model: Any, content: bytes, subject: subjects.Subject) -> float:
    """How often what was trained and the file answer the same on the test data."""
    inputs = subject.data.inputs("test")
    wanted = np.asarray(model.predict(inputs, verbose=0)).argmax(axis=1)
    return float((tools.scores(content, inputs).argmax(axis=1) == wanted).mean())
