"""Pruning for the Edge TPU: `python benchmarks/pruning.py [--networks A,B] [--seeds N] [--cache FOLDER]`.

Each network is trained for each seed, pruned to half of its predicted compute time by several methods, and trained
again: with all methods for the same epochs on the same data, after a recalibration of the batch norms. The original is
the teacher, except where the list says otherwise. These networks are so small that most of their latency is fixed: only
compute time can be halved.

- ours: `prune: {objective: compute, keep: 0.5}`, which chooses on validation;
- ours, on labels: the same without a teacher; the better of the two on validation is compared with the others;
- uniform: every width times the same factor; the channels of each layer with the smallest L1 norms are removed;
- L1-global: the channels of all layers with the smallest L1 norms are removed, norms divided by their layer's mean;
- scratch: the network that ours found, from random weights, on labels, for as many epochs as ours took;
- scratch, longer: the same for as many epochs as the original and ours took together.

fsdd_large is a network of 12 MB, pruned until its parameters stay on the chip (`objective: cache`). Accuracy is on test
data, paired by sample and averaged over seeds, with intervals over samples; nothing is chosen on test. Needs the shared
files (CORALLINE_SHARED, or ../shared next to the project). Prints a table, and writes
benchmarks/results/pruning.json. Networks, and the result of each method with each seed, are kept in the folder --cache:
an interrupted run continues, if the project has no uncommitted changes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import repository

import numpy as np
import quantization_subjects as subjects
from common import commit, interval, kept, markdown, quiet
from numpy.typing import NDArray

from compress.core.artifact import MODEL_KERAS, MODEL_TFLITE, Artifact, Kind
from compress.data.types import Split
from compress.learning.context import Context
from compress.learning.distillation.settings import DistillationSettings
from compress.learning.procedures.training import retraining_of
from compress.learning.pruning.allocation import CostFunction
from compress.learning.pruning.layer_groups import Widths
from compress.learning.pruning.objective import Objective
from compress.learning.pruning.prunable import PrunableNetwork, prepare
from compress.learning.training import healing, loop
from compress.learning.training.bn_recalibration import recalibrate_batch_norms
from compress.model.importers.keras import keras_file
from compress.model.ir import keras_graph
from compress.model.ir.tensorflow import keras
from compress.pipeline.stages import working_model
from compress.pipeline.stages.prune import Prune
from compress.results.encoding import encode
from compress.targets import load

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")


RESULTS = repository.RESULTS / "pruning.json"
EDGETPU = load("edgetpu")
STEP = EDGETPU.cost.blocks.inputs
HOST = "usb3"
ON_LABELS = "ours, on labels"
OURS = ("ours", ON_LABELS)
KEEP = 0.5
"""The largest share of the compute time after pruning."""
Baseline = Callable[[PrunableNetwork, CostFunction, float], Widths]
"""(network, cost by width, limit of the cost) -> widths."""


def large(library: Any, shape: tuple[int, int, int], classes: int) -> Any:
    """Return a network with 12 MB of weights, nearly all of them in two dense layers, as in AlexNet and VGG."""
    layers = library.layers
    image = library.Input(shape)
    x = image
    for filters in (32, 64, 128):
        x = layers.Conv2D(filters, 3, 2, padding="same", use_bias=False)(x)
        x = layers.ReLU()(layers.BatchNormalization(momentum=0.9)(x))
    x = layers.Flatten()(x)
    for units in (2304, 1024):
        x = layers.ReLU()(layers.BatchNormalization(momentum=0.9)(layers.Dense(units, use_bias=False)(x)))
    return library.Model(image, layers.Softmax()(layers.Dense(classes)(x)), name="large")


LARGE = "fsdd_large"
SUBJECTS: dict[str, Any] = {
    **{name: subjects.SUBJECTS[name] for name in ("grocery_inverted", "grocery_separable", "grocery_residual", "fsdd")},
    LARGE: subjects.Recipe(LARGE, subjects.spoken, large, 10, loop.TrainingSettings(epochs=8)),
}


def retraining_epochs(name: str) -> int:
    """Return the epochs after pruning: as many as the original was trained for."""
    return int(SUBJECTS[name].settings.epochs)


def settings(name: str) -> Prune:
    """Return the settings of our method; the other methods train with the same settings."""
    limit = {"objective": "cache"} if name == LARGE else {"objective": "compute", "keep": KEEP}
    return Prune(
        **limit,
        epochs=retraining_epochs(name),
        augment=SUBJECTS[name].settings.augment,
        distill=DistillationSettings(),
    )


def ours(taught: bool, subject: subjects.Subject, context: Context, original: Artifact) -> dict[str, Any]:
    """Prune by the stage `prune`, with a teacher or on labels alone."""
    stage = settings(subject.name)
    (step,) = stage.model_copy(update={} if taught else {"distill": None}).run(original, context)["steps"]
    return {"allocation": step["allocation"], "trials": step.get("trials", {})}


def baseline(choose: Baseline, subject: subjects.Subject, context: Context, original: Artifact) -> dict[str, Any]:
    """Choose widths by another method, then train as our method does."""
    del original
    prunable = prepare(keras_graph.read(subject.model), EDGETPU, "l1", None)
    objective = Objective("compute", KEEP)
    cost = objective.cost_of(prunable.costs, prunable.minimum_widths)
    limit = objective.limits(prunable).final
    widths = filled(choose(prunable, cost, limit), prunable.full_widths, cost, limit)
    model = keras_graph.build(prunable.pruned(widths))
    recalibrate_batch_norms(model, context)
    original_model = working_model.read(context.original, context)
    retraining = retraining_of(model, settings(subject.name), context, original_model)
    assert retraining is not None  # the settings have epochs
    healing.heal(model, retraining.loss, retraining.settings, context)
    working_model.write(model, context.folder)
    return {}


def uniform(prunable: PrunableNetwork, cost: CostFunction, limit: float) -> Widths:
    """Return all widths times the largest factor that keeps the limit, rounded to the hardware's step."""

    def scaled(factor: float) -> Widths:
        return tuple(
            min(max(round(factor * size / STEP) * STEP, smallest), size)
            for size, smallest in zip(prunable.full_widths, prunable.minimum_widths, strict=True)
        )

    candidates = (scaled(step / 1000) for step in range(1001))
    return max((widths for widths in candidates if cost(widths) <= limit), key=sum)


def filled(widths: Widths, full: Widths, cost: CostFunction, limit: float) -> Widths:
    """Widen the layer groups in turn, one step of the hardware at a time, while the limit allows it."""
    while True:
        wider = [
            (*widths[:index], min(width + STEP - width % STEP, size), *widths[index + 1 :])
            for index, (width, size) in enumerate(zip(widths, full, strict=True))
        ]
        fitting = [candidate for candidate in wider if candidate != widths and cost(candidate) <= limit]
        if not fitting:
            return widths
        widths = max(fitting, key=lambda candidate: min(a / b for a, b in zip(candidate, full, strict=True)))


def l1_global(prunable: PrunableNetwork, cost: CostFunction, limit: float) -> Widths:
    """Return the number of channels above one threshold, at least four of each layer."""

    def above(threshold: float) -> Widths:
        return tuple(
            max(int((prunable.scores[group.members] > threshold).sum()), group.minimum) for group in prunable.groups
        )

    thresholds = np.unique(np.concatenate([prunable.scores[group.members] for group in prunable.groups]))
    return next(above(float(value)) for value in thresholds if cost(above(float(value))) <= limit)


def scratch(
    earlier: int, cache: Path, subject: subjects.Subject, context: Context, original: Artifact
) -> dict[str, Any]:
    """Train the network that ours found from random weights, for its epochs and `earlier` epochs more."""
    del original
    name = subject.name
    result = kept_of(name, "ours", cache, subject.seed)
    model = keras_graph.build(keras_graph.read(keras_file.load(Path(result["file"]))))
    fresh = keras(context.seed).models.clone_model(model)
    epochs = earlier + retraining_epochs(name) + len(set(result["trials"]))
    recipe = SUBJECTS[name].settings.model_copy(update={"epochs": epochs})
    loop.fit(fresh, loop.label_loss(loop.head_of(fresh, subject.data)), recipe, context)
    working_model.write(fresh, context.folder)
    return {"epochs": epochs}


def ways(name: str, cache: Path) -> dict[str, Callable[..., dict[str, Any]]]:
    """Return the methods that are compared on a network, by name."""
    methods: dict[str, Callable[..., dict[str, Any]]] = {"ours": partial(ours, True)}
    if name != LARGE:
        methods |= {ON_LABELS: partial(ours, False)}
        methods |= {"uniform": partial(baseline, uniform), "L1-global": partial(baseline, l1_global)}
        methods |= {"scratch": partial(scratch, 0, cache)}
        methods |= {"scratch, longer": partial(scratch, SUBJECTS[name].settings.epochs, cache)}
    return methods


def one(name: str, way: str, cache: Path, seed: int) -> dict[str, Any]:
    """Prune a network by one method; return its correct test samples, validation accuracy and costs."""
    subject, started = SUBJECTS[name](cache, seed), time.perf_counter()
    before = subject.model
    with tempfile.TemporaryDirectory() as folder, quiet():
        output, original = Path(folder, "made"), Path(folder, "original")
        output.mkdir()
        original.mkdir()
        working_model.write(before, original)
        artifact = Artifact("", Kind.KERAS, original, dict.fromkeys((MODEL_KERAS, MODEL_TFLITE), ""), {}, 0)
        keras(seed)
        notes = ways(name, cache)[way](
            subject, replace(subjects.context(subject.data, output, seed), original=artifact), artifact
        )
        model = keras_file.load(output / MODEL_KERAS)
        file = cache / f"pruned-{name}-{_in_file(way)}-{seed}-{commit()}.keras"
        file.write_bytes((output / MODEL_KERAS).read_bytes())
    costs = {which: figures(network) for which, network in (("before", before), ("after", model))}
    seconds = round(time.perf_counter() - started, 1)
    results = {**notes, "file": str(file), "costs": costs, "seconds": seconds}
    results |= {"validation": float(right(model, subject.data, "validation").mean())}
    results |= {"hits": right(model, subject.data, "test"), "float": right(before, subject.data, "test")}
    share = costs["after"]["compute_ms"] / costs["before"]["compute_ms"]
    text = f"{name} {seed}, {way}: {share:.3f} of the compute, test {results['float'].mean():.4f} -> "
    print(f"{text}{results['hits'].mean():.4f}, {seconds:.0f} s", file=sys.stderr, flush=True)
    return results


def right(model: Any, data: subjects.Arrays, split: Split) -> NDArray[np.bool_]:
    """Return for each sample of a split whether the model's class is correct: bool [n]."""
    return np.asarray(model.predict(data.inputs(split), verbose=0).argmax(axis=1) == data.labels(split))


def figures(model: Any) -> dict[str, Any]:
    """Return the cost figures of a network at its full widths."""
    prunable = prepare(keras_graph.read(model), EDGETPU, "l1", None)
    costs: dict[str, Any] = encode(prunable.costs.figures(prunable.full_widths, HOST))
    return costs


def _in_file(way: str) -> str:
    return way.replace(", ", "-")


def kept_of(name: str, way: str, cache: Path, seed: int) -> dict[str, Any]:
    """Return the result of one method with one seed; measure it if it is not in the cache."""
    return kept(cache / f"pruning-{name}-{_in_file(way)}-{seed}-{commit()}.json", partial(one, name, way, cache, seed))


def summary(runs: Mapping[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Return the results of one network over all seeds as plain values."""
    chosen = max((way for way in runs if way in OURS), key=lambda way: sum(run["validation"] for run in runs[way]))
    chosen_hits = np.stack([run["hits"] for run in runs[chosen]]).astype(int)
    results: dict[str, Any] = {"test_samples": chosen_hits.shape[1], "chosen": chosen, "ways": {}}
    results["float"] = [float(run["float"].mean()) for run in runs["ours"]]
    for way, rows in runs.items():
        hits = np.stack([run["hits"] for run in rows]).astype(int)
        lost = (np.stack([run["float"] for run in rows]).astype(int) - hits).mean(axis=0)
        ahead: NDArray[np.float64] = (chosen_hits - hits).mean(axis=0)
        results["ways"][way] = {
            "test": [float(run["hits"].mean()) for run in rows],
            "validation": [run["validation"] for run in rows],
            "lost": float(lost.mean()),
            "lost_interval": interval(lost),
            "ours_ahead": float(ahead.mean()),
            "ours_ahead_interval": interval(ahead),
            "costs": [run["costs"] for run in rows],
            "seconds": [run["seconds"] for run in rows],
            "allocation": [run.get("allocation") for run in rows],
        }
    return results


def table(cases: Mapping[str, Any]) -> str:
    """Return a Markdown table that compares each method with the original and with our method."""
    head = ["network", "way", "compute", "latency on USB 3", "streamed", "test", "lost (95%)", "ours ahead by (95%)"]
    lines: list[list[str]] = []
    for name, case in cases.items():
        text = f"{name} ({len(case['float'])} seeds)"
        lines.append([text, "as it was", "", "", "", f"{statistics.fmean(case['float']):.4f}", "", ""])
        for way, row in case["ways"].items():
            lost, ahead = (_range(row, key) for key in ("lost", "ours_ahead"))
            share = statistics.fmean(
                cost["after"]["compute_ms"] / cost["before"]["compute_ms"] for cost in row["costs"]
            )
            ms, sent = (_both(row, key, unit) for key, unit in (("latency_ms", 1), ("streamed_bytes", 1e6)))
            mean = f"{statistics.fmean(row['test']):.4f}"
            lines.append(
                [name, way, f"{share:.3f}", f"{ms} ms", f"{sent} MB", mean, lost, ahead if way not in OURS else ""]
            )
    return markdown(head, lines)


def _range(row: Mapping[str, Any], key: str) -> str:
    low, high = row[f"{key}_interval"]
    return f"{row[key]:+.4f} ({low:+.4f} to {high:+.4f})"


def _both(row: Mapping[str, Any], key: str, unit: float) -> str:
    return " -> ".join(
        f"{statistics.fmean(cost[when][key] for cost in row['costs']) / unit:.2f}" for when in ("before", "after")
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--networks", default=",".join(SUBJECTS), help="some of them, with commas")
    options = subjects.asked(parser)
    if options is None:
        return
    cases = json.loads(RESULTS.read_text())["cases"] if RESULTS.exists() else {}
    for name in [] if options.show else options.networks.split(","):
        runs = {
            way: [kept_of(name, way, options.cache, seed) for seed in range(options.seeds)]
            for way in ways(name, options.cache)
        }
        cases[name] = {
            "commit": commit(),
            "epochs": SUBJECTS[name].settings.epochs,
            "again": retraining_epochs(name),
        } | summary(runs)
        cases = {known: cases[known] for known in SUBJECTS if known in cases}
        RESULTS.write_text(json.dumps({"cases": cases}, indent=1) + "\n")
    print(table(cases))


if __name__ == "__main__":
    main()
