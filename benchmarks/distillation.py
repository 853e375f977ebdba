"""Distillation against the same training without it: `python benchmarks/distillation.py [--seeds N] [--cache FOLDER]`.

A small network is trained several times from the same initial weights, with the same epochs, data and augmentation: on
labels alone, and by each distillation method with a larger network of the same kind as its teacher. The distillation
method is chosen on validation data; the table shows test data. Differences are paired by test sample and averaged over
seeds; intervals are over samples. Needs the shared files (CORALLINE_SHARED, or ../shared next to the project). Prints a
Markdown table with the bound, and writes benchmarks/results/distillation.json. The folder --cache keeps the teachers
and the result of each method and seed: an interrupted run continues from there, if the project has no uncommitted
changes.
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
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import repository

import numpy as np
import quantization_networks as networks
import quantization_subjects as subjects
from numpy.typing import NDArray
from quantization import commit, kept, quiet

from compress.core.artifact import MODEL_KERAS, Artifact, Kind
from compress.learning.context import Context
from compress.learning.distillation.settings import Features
from compress.learning.training.batches import Augment
from compress.learning.training.loop import TrainingSettings
from compress.model.importers.keras import keras_file
from compress.model.ir.tensorflow import keras
from compress.pipeline.stage import Stage
from compress.pipeline.stages import working_model
from compress.pipeline.stages.distill import Distill
from compress.pipeline.stages.train import Train

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")


RESULTS = repository.RESULTS / "distillation.json"
DRAWS = 10_000
LEARNING_RATE = 0.003
LABELS = "labels"
WAYS: dict[str, Callable[..., Stage]] = {
    LABELS: Train,
    "logits": Distill,
    "logits and features": partial(Distill, features=Features()),
}


@dataclass(frozen=True)
class Case:
    """A data set, and the networks that learn it.

    Attributes:
        data: its splits.
        classes: how many there are.
        teacher: width of the teacher.
        student: width of the student.
        epochs: of both.
        augment: of both.
    """

    data: Callable[[], Any]
    classes: int
    teacher: float
    student: float
    epochs: int
    augment: Augment


CASES = {
    "fsdd": Case(subjects.spoken, 10, 1.0, 0.25, 20, Augment()),
    "grocery96": Case(partial(subjects.photos, 48), 43, 2.0, 0.5, 30, subjects.FLIPPED),
}


def taught(name: str, case: Case, cache: Path, seed: int) -> subjects.Subject:
    """Return the teacher and its data; train the teacher if it is not in the cache."""
    settings = TrainingSettings(epochs=case.epochs, learning_rate=LEARNING_RATE, augment=case.augment)
    network = partial(networks.separable, width=case.teacher)
    return subjects.Recipe(f"{name}_teacher_{case.epochs}", case.data, network, case.classes, settings)(cache, seed)


def one(name: str, case: Case, way: str, cache: Path, seed: int) -> dict[str, Any]:
    """Train a student in one way; return its correct test samples, its figures, and the accuracies of the teacher."""
    subject, started = taught(name, case, cache, seed), time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, quiet():
        start, teacher, output = (subfolder(folder, folder_name) for folder_name in ("start", "teacher", "made"))
        shape: Any = subject.data.input_shape
        student = networks.separable(keras(seed), shape, case.classes, case.student)
        untrained_student = Artifact("", Kind.UNTRAINED, start, {MODEL_KERAS: ""}, {}, 0)
        working_model.write_keras(student, start)
        working_model.write_keras(subject.model, teacher)
        context: Context = subjects.context(subject.data, output, seed)
        context = replace(context, original=replace(untrained_student, kind=Kind.KERAS, folder=teacher))
        stage = WAYS[way](epochs=case.epochs, learning_rate=LEARNING_RATE, augment=case.augment)
        stage.run(untrained_student, context)
        model = keras_file.load(output / MODEL_KERAS)
    hits = {split: right(model, subject.data, split) for split in ("validation", "test")}
    results: dict[str, Any] = {"validation": float(hits["validation"].mean()), "hits": hits["test"]}
    results |= {"parameters": model.count_params(), "seconds": round(time.perf_counter() - started, 1)}
    results["teacher"] = {"parameters": subject.model.count_params()}
    results["teacher"] |= {split: float(right(subject.model, subject.data, split).mean()) for split in hits}
    text = f"{name} {seed}, {way}: validation {results['validation']:.4f}, test {hits['test'].mean():.4f}"
    print(f"{text}, {results['seconds']:.0f} s", file=sys.stderr, flush=True)
    return results


def subfolder(folder: str, name: str) -> Path:
    """Create a folder in another folder, and return it."""
    path = Path(folder) / name
    path.mkdir()
    return path


def right(model: Any, data: subjects.Arrays, split: Any) -> NDArray[np.bool_]:
    """Return for each sample of a split whether the model's class is correct: bool [n]."""
    return np.asarray(model.predict(data.inputs(split), verbose=0).argmax(axis=1) == data.labels(split))


def summary(runs: Mapping[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Return the results of one data set over all seeds as plain values; `chosen` is the best method on validation."""
    labels = np.stack([run["hits"] for run in runs[LABELS]]).astype(int)
    ways: dict[str, Any] = {}
    for way, rows in runs.items():
        difference = (np.stack([run["hits"] for run in rows]).astype(int) - labels).mean(axis=0)
        ways[way] = {
            "validation": [run["validation"] for run in rows],
            "test": [float(run["hits"].mean()) for run in rows],
            "minus_labels": float(difference.mean()),
            "interval": interval(difference),
            "seconds": [run["seconds"] for run in rows],
        }
    first = runs[LABELS]
    return {
        "test_samples": labels.shape[1],
        "parameters": first[0]["parameters"],
        "teacher": {key: [run["teacher"][key] for run in first] for key in first[0]["teacher"]},
        "ways": ways,
        "chosen": max((way for way in ways if way != LABELS), key=lambda way: sum(ways[way]["validation"])),
    }


def interval(differences: NDArray[np.float64]) -> tuple[float, float]:
    """Return the 95% interval of the mean, by resampling the samples (bootstrap)."""
    values, counts = np.unique(differences, return_counts=True)
    total = counts.sum()
    means = np.random.default_rng(0).multinomial(total, counts / total, DRAWS) @ values / total
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)


def table(cases: Mapping[str, Any]) -> str:
    """Return a Markdown table that compares each method with training on labels alone, and whether the bound is met."""
    head = ["data", "learnt from", "validation", "test", f"- {LABELS} (95%)", "chosen"]
    lines = [head, ["---"] * len(head)]
    for name, case in cases.items():
        teacher = case["teacher"]
        row = [f"the teacher, {teacher['parameters'][0]:,} parameters", *_means(teacher), "", ""]
        lines.append([f"{name} ({len(teacher['test'])} seeds)", *row])
        for way, figures in case["ways"].items():
            low, high = figures["interval"]
            difference = "" if way == LABELS else f"{figures['minus_labels']:+.4f} ({low:+.4f} to {high:+.4f})"
            text = f"{way}, {case['parameters']:,} parameters"
            lines.append([name, text, *_means(figures), difference, "yes" if way == case["chosen"] else ""])
    text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    intervals = {name: case["ways"][case["chosen"]]["interval"] for name, case in cases.items()}
    ahead = [name for name, (low, _) in intervals.items() if low > 0]
    behind = [name for name, (_, high) in intervals.items() if high < 0]
    met = "met" if ahead and not behind else "**not met**"
    met = met if intervals.keys() == CASES.keys() else f"undecided, on {', '.join(intervals)} alone"
    comparison = f"ahead on {', '.join(ahead) or 'none'}, behind on {', '.join(behind) or 'none'}"
    return f"{text}\n\nBound (ahead on one, behind on neither, as chosen on validation): {met}: {comparison}"


def _means(row: Mapping[str, list[float]]) -> list[str]:
    return [f"{statistics.fmean(row[split]):.4f}" for split in ("validation", "test")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default=",".join(CASES), help="some of the data sets, with commas")
    parser.add_argument("--epochs", type=int, help="other than usual, to try it out: results are only printed")
    options = subjects.asked(parser)
    if options is None:
        return
    state = commit()
    before = json.loads(RESULTS.read_text())["cases"] if RESULTS.exists() and not options.epochs else {}
    for name in [] if options.show else options.data.split(","):
        case = replace(CASES[name], epochs=options.epochs or CASES[name].epochs)
        runs: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
        for seed in range(options.seeds):
            for way, rows in runs.items():
                file = f"distillation-{name}-{way.replace(' ', '_')}-{case.epochs}-{seed}-{state}.json"
                rows.append(kept(options.cache / file, partial(one, name, case, way, options.cache, seed)))
        before[name] = {"commit": state, "epochs": case.epochs} | summary(runs)
        if not options.epochs:
            cases = {known: before[known] for known in CASES if known in before}
            RESULTS.write_text(json.dumps({"cases": cases}, indent=1) + "\n")
    print(table({known: before[known] for known in CASES if known in before}))


if __name__ == "__main__":
    main()
