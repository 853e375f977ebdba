"""Subsets of the data, selected in several ways: `python benchmarks/subset.py [--data NAME] [--seeds N] [--show]`.

Training: a small network is trained on all samples and on 10, 30 and 50% of spoken and of written digits, selected by
`train: {subset: …}` with its defaults, always for the same number of epochs. Proxies that several methods and shares
have in common are trained once; each method is charged with the proxies that it needs. Accuracy is measured on test
samples, which no method sees. Times depend on the load of the machine.

Calibration: activation ranges (minimum and maximum) of the network that was trained on all samples are calibrated on
16 and 64 samples, selected by `quantize: {calibration: {select: …}}` with its defaults. Agreement is the share of test
samples for which the int8 file gives the float model's class.

Needs the shared files (CORALLINE_SHARED, or ../shared next to the project). Prints Markdown tables, and writes
benchmarks/results/subset.json. The folder --cache keeps the result of each seed, and the next run continues from there.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import repository

import numpy as np
import quantization_networks as networks
import quantization_subjects as subjects
from quantization import commit, kept, quiet

from compress.data.dataset import Dataset
from compress.data.sources import Digits
from compress.data.types import SPLITS
from compress.learning.quantization import calibration, export
from compress.learning.training import loop, subset
from compress.learning.training.loop import TrainingSettings
from compress.learning.training.subset import Part, Subset
from compress.model.ir import keras_graph
from compress.model.ir.passes import fold
from compress.model.ir.tensorflow import keras
from compress.model.tflite.interpreter import LoadedModel
from deploy.contract.preprocessing import Preprocessing

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")


RESULTS = repository.RESULTS / "subset.json"
SHARES = (0.1, 0.3, 0.5)
SAMPLES = (16, 64)
EPOCHS, BATCH = 20, 32
ALL = "all"
WAYS = ("random", "stratified", "hardness, hardest", "hardness, middle", "coverage")
SELECTS = ("balanced", "random", "stratified", "hardness", "coverage")


def written() -> subjects.Arrays:
    """Return scikit-learn's digits at 16x16, with the split of calibration_data/digits."""
    steps = [{"resize": {"size": [16, 16]}}, {"scale": {"from": [0, 16]}}]
    data = Dataset(Digits(), Preprocessing(steps), None)
    return subjects.Arrays({split: (data.inputs(split), data.labels(split)) for split in SPLITS}, 10)


DATA = {"spoken digits": lambda: subjects.Arrays(subjects.spoken(), 10), "written digits": written}


def trained(data: Any, seed: int, epochs: int) -> tuple[Any, float]:
    """Return a trained network, and the seconds of its training."""
    model = networks.small(keras(seed), data.input_shape, len(data.class_names))
    with tempfile.TemporaryDirectory() as folder, quiet():
        began = time.monotonic()
        settings = TrainingSettings(epochs=epochs, batch_size=BATCH)
        loop.fit(
            model, loop.label_loss(loop.head_of(model, data)), settings, subjects.context(data, Path(folder), seed)
        )
        return model, time.monotonic() - began


def accuracy(model: Any, data: Any) -> float:
    """Return the accuracy of a model on the test samples."""
    answers = model.predict(data.inputs("test"), verbose=0).argmax(axis=1)
    return float((answers == data.labels("test")).mean())


def proxies(data: subjects.Arrays, seed: int) -> dict[str, Any]:
    """Return features and errors of proxies with default settings, and the seconds of the proxies by method."""
    part, inputs, labels = Subset(by="hardness", share=0.5), data.inputs("train"), data.labels("train")
    results: dict[str, Any] = {}
    errors, times = [], []
    for number in range(part.seeds):
        model, took = trained(data, seed + 1 + number, part.epochs)
        began = time.monotonic()
        if not number:
            results["features"] = subset.features(model, inputs)
            results["coverage"] = took + time.monotonic() - began
            began = time.monotonic()
        errors.append(subset.errors(model, loop.head_of(model, data), inputs, labels))
        times.append(took + time.monotonic() - began)
    return {**results, "errors": np.mean(errors, axis=0), "hardness": sum(times)}


def choices(data: subjects.Arrays, seed: int, share: float, said: Mapping[str, Any]) -> dict[str, tuple[Any, float]]:
    """Return the indices that each method selects, and the seconds of the selection with its proxies."""
    labels, selections = data.labels("train"), {}
    count = round(share * len(labels))
    ways: dict[str, Callable[[], Any]] = {
        "random": lambda: subset.at_random(count, labels, seed),
        "stratified": lambda: subset.stratified(count, labels, seed),
        "hardness, hardest": lambda: subset.by_error(count, labels, said["errors"]),
        "hardness, middle": lambda: subset.by_error(count, labels, said["errors"], "middle"),
        "coverage": lambda: subset.covering(count, labels, said["features"]),
    }
    for way in WAYS:
        began = time.monotonic()
        indices = ways[way]()
        selections[way] = indices, time.monotonic() - began + said.get(way.partition(",")[0], 0.0)
    return selections


def calibrated(model: Any, data: subjects.Arrays, seed: int) -> dict[str, float]:
    """Return the agreement of int8 files with the float model, by selection method and number of samples."""
    expected = model.predict(data.inputs("test"), verbose=0).argmax(axis=1)
    canonical, agreement = fold.canonical(keras_graph.read(model)), {}
    for select in SELECTS:
        for count in SAMPLES:
            chosen, _ = calibration.divided(select, count, model, data, seed)
            plan = calibration.calibrate(canonical, data.inputs("train")[chosen])
            with tempfile.TemporaryDirectory() as folder, quiet():
                path = Path(folder) / "model.tflite"
                path.write_bytes(export.convert(canonical, plan, "int8"))
                answers = LoadedModel(path, reproducible=True).scores(data.inputs("test")).argmax(axis=1)
            agreement[f"{select}, {count}"] = float((answers == expected).mean())
    return agreement


def one_seed(name: str, seed: int) -> dict[str, Any]:
    """Return the results of one data set and seed, by method and share."""
    data = DATA[name]()
    model, took = trained(data, seed, EPOCHS)
    full_row = {"accuracy": accuracy(model, data), "samples": len(data.labels("train")), "training_s": took}
    results: dict[str, Any] = {ALL: {**full_row, "choosing_s": 0.0, "agreement": calibrated(model, data, seed)}}
    said = proxies(data, seed)
    for share in SHARES:
        for way, (indices, choosing_s) in choices(data, seed, share, said).items():
            part = Part(data, indices)
            model, took = trained(part, seed, EPOCHS)
            row = {"accuracy": accuracy(model, part), "samples": len(indices)}
            results[f"{way}, {share:.0%}"] = {**row, "training_s": took, "choosing_s": choosing_s}
            print(f"{name} {seed} {way} {share}: {row['accuracy']:.3f}", file=sys.stderr, flush=True)
    return results


def runs(names: Sequence[str], seeds: int, cache: Path) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield data set, method with share, and result of every run."""
    for seed in range(seeds):
        for name in names:
            path = cache / f"subset-{name.replace(' ', '-')}-{seed}.json"
            for way, row in kept(path, partial(one_seed, name, seed)).items():
                yield name, way, row


def summary(results: list[tuple[str, str, dict[str, Any]]]) -> dict[str, Any]:
    """Return the means and ranges over seeds as plain values."""
    summaries: dict[str, Any] = {}
    for name in dict.fromkeys(data for data, _, _ in results):
        training, agreement = {}, {}
        for way in dict.fromkeys(way for data, way, _ in results if data == name):
            rows = [row for data, method, row in results if (data, method) == (name, way)]
            values = [row["accuracy"] for row in rows]
            spans = {"accuracy": statistics.mean(values), "lowest": min(values), "highest": max(values)}
            keys = ("samples", "choosing_s", "training_s")
            training[way] = spans | {key: round(statistics.mean(row[key] for row in rows), 2) for key in keys}
            for key in rows[0].get("agreement", {}):
                agreements = [row["agreement"][key] for row in rows]
                agreement[key] = {
                    "agreement": statistics.mean(agreements),
                    "lowest": min(agreements),
                    "highest": max(agreements),
                }
        seeds = sum((data, way) == (name, ALL) for data, way, _ in results)
        summaries[name] = {"training": training, "calibration": agreement, "seeds": seeds}
    return summaries


def tables(summaries: Mapping[str, Any]) -> str:
    """Return the results as Markdown tables."""
    lines = []
    for name, results in summaries.items():
        lines += [f"{name}: accuracy (lowest to highest of {results['seeds']} seeds); seconds to choose + to train", ""]
        lines += ["| chosen by | 10% | 30% | 50% |", "|---|---|---|---|"]
        for way in WAYS:
            cells = [_figures(results["training"][f"{way}, {share:.0%}"]) for share in SHARES]
            lines.append(f"| {way} | {' | '.join(cells)} |")
        lines += ["", f"All of them: {_figures(results['training'][ALL])}", ""]
        lines += ["| calibrated with, agreement | 16 samples | 64 samples |", "|---|---|---|"]
        for select in SELECTS:
            rows = [results["calibration"][f"{select}, {count}"] for count in SAMPLES]
            agreement_cells = [f"{row['agreement']:.4f} ({row['lowest']:.4f} to {row['highest']:.4f})" for row in rows]
            lines.append(f"| {select} | {' | '.join(agreement_cells)} |")
        lines.append("")
    return "\n".join(lines)


def _figures(row: Mapping[str, float]) -> str:
    span = f"{row['lowest']:.3f} to {row['highest']:.3f}"
    return f"{row['accuracy']:.3f} ({span}); {row['choosing_s']:.0f} + {row['training_s']:.0f} s"


def main() -> None:
    """Measure, or show earlier results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", choices=[*DATA], help="these alone; what was measured of the others stays")
    options = subjects.asked(parser)
    if options is None:
        return
    summaries = json.loads(RESULTS.read_text())["data"] if RESULTS.exists() else {}
    if not options.show:
        options.cache.mkdir(parents=True, exist_ok=True)
        names = [options.data] if options.data else [*DATA]
        summaries |= summary(list(runs(names, options.seeds, options.cache)))
        report = {"commit": commit(), "epochs": EPOCHS, "batch_size": BATCH, "data": summaries}
        RESULTS.write_text(json.dumps(report, indent=1) + "\n")
    print(tables(summaries))


if __name__ == "__main__":
    main()
