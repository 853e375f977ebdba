"""Quantization-aware training for benchmarks/quantization.py --qat: ours, and tfmot's with its traps repaired.

Only for networks that are built here (tfmot needs them in tf-keras) and that tfmot accepts, as they are.
Repaired: ranges start from calibration instead of +-6, and dense layers are quantized with one scale.
The other known trap, reordered inputs of Concatenate, does not occur in these networks.
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
from numpy.typing import NDArray

from compress.quantization import conversion, fake, points, training
from compress.quantization.ranges import METHODS
from compress.quantization.search import Search
from compress.training import folding, network
from compress.training.fit import TrainingSettings

OURS, TFMOT = "coralline QAT", "tfmot QAT"
SETTINGS = TrainingSettings(epochs=6, learning_rate=0.0005)
"""The defaults of the `quantize` stage, for both."""


def both(subject: subjects.Subject, calibration: tools.Floats, held_back: tools.Floats) -> Iterator[tuple[str, Any]]:
    """What both engines make of a network; a text where one refuses."""
    yield OURS, ours(subject, calibration, held_back)
    try:
        yield TFMOT, tfmot(subject, calibration)
    except (RuntimeError, ValueError) as error:
        yield TFMOT, str(error).splitlines()[0]


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


def tfmot(subject: subjects.Subject, calibration: tools.Floats) -> tools.Made:
    """The default 8-bit scheme of tfmot."""
    import tensorflow_model_optimization
    import tf_keras

    started = time.perf_counter()
    assert subject.builder is not None
    plain = subject.builder(tf_keras)
    plain.set_weights(subject.model.get_weights())
    wanted, found = (np.asarray(each(calibration)) for each in (subject.model, plain))
    assert np.abs(wanted - found).max() < 1e-4, "tf-keras computes something else"
    tf_keras.utils.set_random_seed(subject.seed)
    model = tensorflow_model_optimization.quantization.keras.quantize_model(plain)
    _calibrated(tf_keras, plain, model, calibration)
    inputs, labels = subject.data.inputs("train"), subject.data.labels("train")
    steps = -(-len(inputs) // SETTINGS.batch_size) * SETTINGS.epochs
    schedule = tf_keras.optimizers.schedules.CosineDecay(SETTINGS.learning_rate, steps)
    model.compile(tf_keras.optimizers.Adam(schedule), "sparse_categorical_crossentropy")
    model.fit(inputs, labels, SETTINGS.batch_size, SETTINGS.epochs, verbose=0)
    content = tools.converted(model, None, dense_per_tensor=True)
    seconds = time.perf_counter() - started
    return tools.Made(content, seconds, {"training_agrees_with_file": _agreement(model, content, subject)})


def _calibrated(library: Any, plain: Any, model: Any, samples: NDArray[np.float32]) -> None:
    """Writes the ranges of the float layers' outputs into the variables of the quantized ones."""
    made = {layer.name: layer.output for layer in plain.layers}
    values = library.Model(plain.input, made).predict(samples, verbose=0)
    limits = {name: (float(each.min()), float(each.max())) for name, each in values.items()}
    first = (float(samples.min()), float(samples.max()))
    for layer in model.layers:
        low, high = limits.get(layer.name.removeprefix("quant_"), first)
        for weight in layer.weights:
            name = weight.name.split("/")[-1].split(":")[0]
            if name.endswith("min") and "kernel" not in name:
                weight.assign(min(low, 0.0))
            elif name.endswith("max") and "kernel" not in name:
                weight.assign(max(high, 1e-6))


def _agreement(model: Any, content: bytes, subject: subjects.Subject) -> float:
    """How often what was trained and the file answer the same on the test data."""
    inputs = subject.data.inputs("test")
    wanted = np.asarray(model.predict(inputs, verbose=0)).argmax(axis=1)
    return float((tools.scores(content, inputs).argmax(axis=1) == wanted).mean())
