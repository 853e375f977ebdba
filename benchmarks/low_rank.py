"""Fewer channels, lower ranks, or both: `python benchmarks/low_rank.py [--networks A,B] [--seeds N] [--cache FOLDER]`.

Networks whose parameters are nearly all in dense layers (fsdd_large, 12 MB) or in convolutions (strokes_conv) are
reduced to the same limit of a cost in three ways by the allocation of `prune`. Then their batch norms are recalibrated,
and they are trained for EPOCHS epochs on labels with the same settings:

- channels: fewer channels, no layer is factorized;
- ranks: layers are factorized with lower ranks, all channels are kept;
- both: the allocation chooses between them (`prune: {factorize: true}`).

Limits: the cache of the Edge TPU (`objective: cache`), and shares of the parameters. Test accuracy before and after the
training; nothing is chosen on test. Latency on USB 3 and the bytes sent at every inference are predicted. Needs the
shared files (CORALLINE_SHARED, or ../shared next to the project). Prints a table, and writes
benchmarks/results/low_rank.json. Networks are kept in the folder --cache.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import repository

import numpy as np
import quantization_subjects as subjects
from distillation import right
from pruning import LARGE, SUBJECTS
from quantization import commit, quiet

from compress.core.errors import StageError
from compress.learning.pruning import factorization
from compress.learning.pruning.allocation import importance_losses
from compress.learning.pruning.importance import ImportanceSamples
from compress.learning.pruning.objective import Objective
from compress.learning.pruning.prunable import PrunableNetwork, prepare
from compress.learning.training import healing, loop
from compress.learning.training.bn_recalibration import recalibrate_batch_norms
from compress.model.ir import keras_graph
from compress.model.ir.tensorflow import keras
from compress.targets import load

RESULTS = repository.RESULTS / "low_rank.json"
EDGETPU = load("edgetpu")
HOST = "usb3"
EPOCHS = 4
SAMPLES = 512
WAYS = ("channels", "ranks", "both")


def convolutions(library: Any, shape: tuple[int, int, int], classes: int) -> Any:
    """Return a network with four convolutions and two dense layers, and 0.74 million parameters."""
    layers = library.layers
    image = library.Input(shape)
    x = image
    for filters, stride in ((32, 2), (64, 1), (96, 2), (128, 2)):
        x = layers.Conv2D(filters, 3, stride, padding="same", use_bias=False)(x)
        x = layers.ReLU()(layers.BatchNormalization(momentum=0.9)(x))
    x = layers.Flatten()(x)
    for units in (256, 128):
        x = layers.Dense(units, activation="relu")(x)
    return library.Model(image, layers.Dense(classes, activation="softmax")(x), name="strokes_conv")


CONVOLUTIONS = "strokes_conv"
NETWORKS: dict[str, Any] = {
    LARGE: SUBJECTS[LARGE],
    CONVOLUTIONS: subjects.Recipe(
        CONVOLUTIONS, subjects.strokes, convolutions, 10, loop.TrainingSettings(epochs=12, batch_size=32)
    ),
}
LIMITS: dict[str, tuple[Objective, ...]] = {
    LARGE: (Objective("cache"), Objective("parameters", 0.1), Objective("parameters", 0.03)),
    CONVOLUTIONS: (Objective("parameters", 0.25), Objective("parameters", 0.08), Objective("macs", 0.15)),
}


def allowed(prunable: PrunableNetwork, way: str) -> PrunableNetwork:
    """Return the network in which only the dimensions of one way can be reduced."""
    if way == "channels":
        return prunable.with_whole_layers()
    if way == "both":
        return prunable
    groups = tuple(
        group if index in prunable.largest_ranks else replace(group, minimum=len(group.members))
        for index, group in enumerate(prunable.groups)
    )
    return replace(prunable, groups=groups)


def prepared(subject: subjects.Subject, seed: int) -> PrunableNetwork:
    """Return a network with the importance of its channels and ranks."""
    network = keras_graph.read(subject.model)
    inputs, labels = loop.chosen_inputs(subject.data, SAMPLES, seed)
    head = loop.head_of(subject.model, subject.data)
    samples = ImportanceSamples(inputs, labels, head)
    ranks = factorization.find(network, inputs)
    return prepare(network, EDGETPU, "taylor", samples, factorization=ranks)


def reduced(prunable: PrunableNetwork, objective: Objective, subject: subjects.Subject, folder: Path) -> dict[str, Any]:
    """Return the test accuracy and the costs of a network after the reductions that `prunable` allows."""
    try:
        widths = objective.allocate(prunable, importance_losses(prunable, "balanced"), objective.limits(prunable))
    except StageError as error:
        return {"refused": error.what}
    keras(subject.seed)
    context = subjects.context(subject.data, folder, subject.seed)
    model = keras_graph.build(prunable.pruned(widths))
    recalibrate_batch_norms(model, context)
    untrained = float(right(model, subject.data, "test").mean())
    settings = loop.TrainingSettings(epochs=EPOCHS, batch_size=32, learning_rate=0.002)
    healing.heal(model, loop.label_loss(loop.head_of(model, subject.data)), settings, context)
    return {
        "untrained": untrained,
        "test": float(right(model, subject.data, "test").mean()),
        "costs": prunable.costs.figures(widths, HOST).to_json(),
        "factorized": {layer: dict(sides) for layer, sides in prunable.factorized_layers(widths).items()},
        "narrower": {layer: list(sizes) for layer, sizes in prunable.pruned_layers(widths).items()},
    }


def one(name: str, cache: Path, seed: int) -> dict[str, Any]:
    """Return the results of one network and seed for all limits and ways."""
    subject = NETWORKS[name](cache, seed)
    prunable = prepared(subject, seed)
    results: dict[str, Any] = {
        "float": float(right(subject.model, subject.data, "test").mean()),
        "costs": prunable.costs.figures(prunable.full_widths, HOST).to_json(),
        "limits": {},
    }
    for objective in LIMITS[name]:
        limit = results["limits"].setdefault(shown(objective), {})
        for way in WAYS:
            with tempfile.TemporaryDirectory() as folder, quiet():
                limit[way] = reduced(allowed(prunable, way), objective, subject, Path(folder))
            print(f"{name} {seed}, {shown(objective)}, {way}: {limit[way]}", file=sys.stderr, flush=True)
    return results


def shown(objective: Objective) -> str:
    """Return a limit as text."""
    return objective.name if objective.keep is None else f"{objective.keep:g} of the {objective.name}"


def table(networks: Mapping[str, list[dict[str, Any]]]) -> str:
    """Return accuracy and costs of each limit and way, as means over seeds."""
    head = ["network", "limit", "way", "parameters", "sent", "latency", "test, not trained", "test"]
    lines = [head, ["---"] * len(head)]
    for name, runs in networks.items():
        first = runs[0]["costs"]
        start = f"{np.mean([run['float'] for run in runs]):.3f}"
        lines.append([f"{name} ({len(runs)} seeds)", "", "as it was", *_costs([first]), "", start])
        for limit in runs[0]["limits"]:
            for way in WAYS:
                rows = [run["limits"][limit][way] for run in runs]
                if any("refused" in row for row in rows):
                    lines.append([name, limit, way, "cannot be reached", "", "", "", ""])
                    continue
                means = [f"{np.mean([row[key] for row in rows]):.3f}" for key in ("untrained", "test")]
                lines.append([name, limit, way, *_costs([row["costs"] for row in rows]), *means])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _costs(costs: list[dict[str, Any]]) -> list[str]:
    parameters, sent, latency = (
        float(np.mean([cost[key] for cost in costs])) for key in ("parameters", "streamed_bytes", "latency_ms")
    )
    return [f"{parameters:,.0f}", f"{sent / 1e6:.2f} MB", f"{latency:.2f} ms"]


def main() -> None:
    """Run the benchmark, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", default=",".join(NETWORKS), help="some of them, with commas")
    options = subjects.asked(parser)
    if options is None:
        return
    networks = json.loads(RESULTS.read_text())["networks"] if RESULTS.exists() else {}
    for name in [] if options.show else options.networks.split(","):
        networks[name] = [one(name, options.cache, seed) for seed in range(options.seeds)]
        RESULTS.write_text(json.dumps({"commit": commit(), "networks": networks}, indent=1) + "\n")
    print(table(networks))


if __name__ == "__main__":
    main()
