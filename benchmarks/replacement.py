"""Gain of `squeeze_and_excite: remove`: `python benchmarks/replacement.py [--seeds N] [--cache FOLDER] [--show]`.

Latency is predicted for MobileNetV3Small and EfficientNetB0 of Keras with random weights (224 pixels): with ReLUs
instead of their activations, with and without gates. Accuracy is measured on a small MobileNetV3 (5x5 depthwise
kernels, hard SiLU and gates in each of four blocks) that is trained on photos of groceries (48 pixels, 43 classes):
`replace_activations` with its default training, with and without gates. Needs the shared files (CORALLINE_SHARED, or
../shared next to the project). Writes benchmarks/results/replacement.json.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, get_args

import repository

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import quantization_networks as networks
import quantization_subjects as subjects
from distillation import interval, right, subfolder
from quantization import commit, kept, quiet

from compress.core.artifact import MODEL_KERAS, MODEL_TFLITE, Artifact, Kind
from compress.learning.replacement import squeeze_excite
from compress.learning.replacement.activations import replace_by_relu
from compress.learning.training import loop
from compress.model.ir import keras_graph
from compress.model.ir.keras_graph import Network
from compress.model.ir.layer_specs.functions import Activation
from compress.model.ir.tensorflow import keras
from compress.pipeline.stages import working_model
from compress.pipeline.stages.replace_activations import ReplaceActivations
from compress.pipeline.stages.trial_conversion import TrialConverter
from compress.targets import load

RESULTS = repository.RESULTS / "replacement.json"
EDGETPU = load("edgetpu")
HOSTS = ("usb3", "pcie", "devboard")
APPLICATIONS = ("MobileNetV3Small", "EfficientNetB0")
SIDE, CLASSES, EPOCHS = 48, 43, 25
VARIANTS = ("original", "ReLU", "ReLU, no gates")


def latencies(network: Network, samples: Any) -> dict[str, float]:
    """Return the predicted latency of a network by host, in milliseconds."""
    conversion = TrialConverter(samples, EDGETPU)(network, keras_graph.build(network))
    assert conversion.graph is not None, conversion.missing
    cost = EDGETPU.cost.of_file(conversion.graph)
    return {host: round(cost.latency_ms(host, EDGETPU.cost.clock(None)), 3) for host in HOSTS}


def predicted() -> dict[str, dict[str, dict[str, float]]]:
    """Return the latencies of both applications by variant."""
    samples = np.random.default_rng(0).random((16, 224, 224, 3), np.float32)
    result = {}
    for name in APPLICATIONS:
        network = keras_graph.read(getattr(keras(0).applications, name)(weights=None))
        gates, _ = squeeze_excite.find(network)
        ungated, _ = squeeze_excite.remove_gates(network, squeeze_excite.measure(network, gates, samples))
        variants = (
            network,
            *(replace_by_relu(variant, get_args(Activation), "relu")[0] for variant in (network, ungated)),
        )
        result[name] = {label: latencies(variant, samples) for label, variant in zip(VARIANTS, variants, strict=True)}
    return result


def measured(seed: int) -> dict[str, Any]:
    """Train the network with one seed; return the correct test samples and the latency of each variant."""
    data = subjects.Arrays(subjects.photos(SIDE), CLASSES)
    models = {}
    with tempfile.TemporaryDirectory() as folder, quiet():
        model = networks.gated(keras(seed), (SIDE, SIDE, 3), CLASSES)
        context = subjects.context(data, subfolder(folder, "original"), seed)
        settings = loop.TrainingSettings(epochs=EPOCHS, augment=subjects.FLIPPED)
        loop.fit(model, loop.label_loss(loop.head_of(model, data)), settings, context)
        working_model.write(model, context.folder)
        original = Artifact("", Kind.KERAS, context.folder, dict.fromkeys((MODEL_KERAS, MODEL_TFLITE), ""), {}, 0)
        models[VARIANTS[0]] = model
        for label, gates in ((VARIANTS[1], "keep"), (VARIANTS[2], "remove")):
            stage_context = replace(context, folder=subfolder(folder, gates))
            ReplaceActivations(squeeze_and_excite=gates, augment=subjects.FLIPPED).run(original, stage_context)  # type: ignore[arg-type]
            models[label] = working_model.read(replace(original, folder=stage_context.folder), stage_context)
    samples = data.inputs("train")[:16]
    return {
        label: {"hits": right(variant, data, "test"), "latency_ms": latencies(keras_graph.read(variant), samples)}
        for label, variant in models.items()
    }


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the result over all seeds; the effect of removing gates is paired by sample."""
    hits = {label: np.stack([run[label]["hits"] for run in runs]).astype(int) for label in VARIANTS}
    change = (hits[VARIANTS[2]] - hits[VARIANTS[1]]).mean(axis=0)
    return {
        "commit": commit(),
        "seeds": len(runs),
        "test": {label: [float(row.mean()) for row in rows] for label, rows in hits.items()},
        "latency_ms": {label: runs[0][label]["latency_ms"] for label in VARIANTS},
        "change": float(change.mean()),
        "change_interval": interval(change),
    }


def table(result: dict[str, Any]) -> str:
    """Return both results as a table."""
    lines = [f"| network | variant | {' | '.join(HOSTS)} | test |", "|---|---|---|---|---|---|"]
    for name, variants in {**result["predicted"], "small MobileNetV3": result["measured"]["latency_ms"]}.items():
        for label, latency in variants.items():
            accuracy = "" if name in APPLICATIONS else f"{fmean(result['measured']['test'][label]):.4f}"
            lines.append(f"| {name} | {label} | {' | '.join(f'{latency[host]:.2f}' for host in HOSTS)} | {accuracy} |")
    low, high = result["measured"]["change_interval"]
    lines.append(f"\nremoving gates: {result['measured']['change']:+.4f} ({low:+.4f} to {high:+.4f}) of test accuracy")
    return "\n".join(lines)


def main() -> None:
    """Measure, or show what was measured."""
    options = subjects.asked(argparse.ArgumentParser(description=__doc__))
    if options is None:
        return
    if not options.show:
        options.cache.mkdir(parents=True, exist_ok=True)
        files = [Path(options.cache) / f"replacement-{seed}-{commit()}.json" for seed in range(options.seeds)]
        runs = [kept(file, partial(measured, seed)) for seed, file in enumerate(files)]
        result = {"predicted": predicted(), "measured": summary(runs)}
        RESULTS.write_text(json.dumps(result, indent=1) + "\n")
    print(table(json.loads(RESULTS.read_text())))


if __name__ == "__main__":
    main()
