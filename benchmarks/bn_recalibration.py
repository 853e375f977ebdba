"""Batch norm recalibration: `python benchmarks/bn_recalibration.py [--seeds N] [--cache FOLDER] [--show]`.

A ResNet-8 with Keras' own momentum of 0.99 learns photos of groceries (32 pixels, 43 classes), is pruned to 0.6 of its
multiply-accumulates and distilled, with the default settings of `prune` and `distill` except for the augmentation.
This is done twice from the same trained weights: with recalibration and the check of each training, and without both.
Accuracy is on test data, paired by sample and averaged over seeds, with intervals over samples; nothing is chosen on
test. Needs the shared files (CORALLINE_SHARED, or ../shared next to the project). Writes
benchmarks/results/bn_recalibration.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import quantization_networks as networks
import quantization_subjects as subjects
from distillation import interval, right, subfolder
from quantization import commit, kept, quiet

from compress.core.artifact import MODEL_KERAS, MODEL_TFLITE, Artifact, Kind
from compress.learning.context import Context
from compress.learning.training import bn_recalibration, healing, loop
from compress.model.ir.tensorflow import keras
from compress.pipeline.stages import working_model
from compress.pipeline.stages.distill import Distill
from compress.pipeline.stages.prune import Prune

RESULTS = Path(__file__).parent / "results" / "bn_recalibration.json"
CLASSES, SIDE, MOMENTUM, EPOCHS = 43, 32, 0.99, 15
STAGES = ("trained", "pruned", "distilled")
WAYS = ("without", "with")
Run = dict[str, Any]


def resnet8(library: Any) -> Any:
    """Return the ResNet-8 of the other benchmarks with Keras' momentum instead of 0.9."""
    model = networks.residual(library, (SIDE, SIDE, 3), CLASSES)
    for layer in model.layers:
        if isinstance(layer, library.layers.BatchNormalization):
            layer.momentum = MOMENTUM
    return model


@contextmanager
def without_recalibration() -> Iterator[None]:
    """Run stages without recalibration, and without the check that can reject a training."""
    with (
        mock.patch.object(bn_recalibration, "recalibrate_batch_norms", return_value={}),
        mock.patch.object(loop, "recalibrate_batch_norms", return_value={}),
        mock.patch.object(healing, "heal", loop.fit),
    ):
        yield


def one(seed: int) -> Run:
    """Run both ways with one seed; return for each stage the correct test samples and its facts."""
    data = subjects.Arrays(subjects.photos(SIDE), CLASSES)
    results: Run = {}
    with tempfile.TemporaryDirectory() as folder, quiet():
        with without_recalibration():
            model = resnet8(keras(seed))
            context = subjects.context(data, subfolder(folder, "original"), seed)
            settings = loop.TrainingSettings(epochs=EPOCHS, augment=subjects.FLIPPED)
            loop.fit(model, loop.label_loss(loop.head_of(model, data)), settings, context)
            results["without"] = {"trained": measured(model, data)}
            working_model.write(model, context.folder)
            results["without"] |= compressed(context, data, subfolder(folder, "without"))
        facts = bn_recalibration.recalibrate_batch_norms(model, context)
        results["with"] = {"trained": {**measured(model, data), "facts": facts}}
        working_model.write(model, context.folder)
        results["with"] |= compressed(context, data, subfolder(folder, "with"))
    for way in WAYS:
        hits = [f"{stage} {results[way][stage]['hits'].mean():.4f}" for stage in STAGES]
        print(f"seed {seed}, {way} recalibration: {', '.join(hits)}", file=sys.stderr, flush=True)
    return results


def compressed(context: Context, data: subjects.Arrays, folder: Path) -> Run:
    """Return the results of the trained model after `prune`, and after `distill` as the next stage."""
    current_artifact = artifact(context.folder)
    context = replace(context, original=current_artifact)
    results = {}
    for name, stage in (
        ("pruned", Prune(keep_macs=0.6, augment=subjects.FLIPPED)),
        ("distilled", Distill(augment=subjects.FLIPPED)),
    ):
        stage_context = replace(context, folder=folder / name)
        stage_context.folder.mkdir()
        started = time.perf_counter()
        facts = stage.run(current_artifact, stage_context)
        (facts,) = facts.get("steps", [facts])
        current_artifact = artifact(stage_context.folder)
        results[name] = measured(working_model.read(current_artifact, stage_context), data)
        results[name]["facts"] = {key: facts[key] for key in ("batch_norms", "healing") if key in facts}
        results[name]["seconds"] = round(time.perf_counter() - started, 1)
    return results


def artifact(folder: Path) -> Artifact:
    """Return the working model in a folder."""
    return Artifact("", Kind.KERAS, folder, dict.fromkeys((MODEL_KERAS, MODEL_TFLITE), ""), {}, 0)


def measured(model: Any, data: subjects.Arrays) -> Run:
    """Return the correct test samples of a model, and its validation accuracy."""
    validation = float(right(model, data, "validation").mean())
    return {"hits": right(model, data, "test"), "validation": validation}


def summary(runs: list[Run]) -> Run:
    """Return the results over all seeds as plain values."""
    stages = {}
    for stage in STAGES:
        hits = {way: np.stack([run[way][stage]["hits"] for run in runs]).astype(int) for way in WAYS}
        gained = (hits["with"] - hits["without"]).mean(axis=0)
        stages[stage] = {
            "test": {way: [float(row.mean()) for row in hits[way]] for way in WAYS},
            "validation": {way: [run[way][stage]["validation"] for run in runs] for way in WAYS},
            "gained": float(gained.mean()),
            "gained_interval": interval(gained),
            "facts": [run["with"][stage]["facts"] for run in runs],
        }
    return {"commit": commit(), "epochs": EPOCHS, "momentum": MOMENTUM, "seeds": len(runs), "stages": stages}


def table(results: Mapping[str, Any]) -> str:
    """Return a table of the test accuracy without and with recalibration."""
    lines = ["| | without | with | gained (95%) | by seed |", "|---|---|---|---|---|"]
    for stage, row in results["stages"].items():
        without, recalibrated = (row["test"][way] for way in WAYS)
        low, high = row["gained_interval"]
        seeds = "; ".join(f"{old:.3f} -> {new:.3f}" for old, new in zip(without, recalibrated, strict=True))
        lines.append(
            f"| {stage} | {statistics.fmean(without):.4f} | {statistics.fmean(recalibrated):.4f} "
            f"| {row['gained']:+.4f} ({low:+.4f} to {high:+.4f}) | {seeds} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure, or show what was measured."""
    options = subjects.asked(argparse.ArgumentParser(description=__doc__))
    if options is None:
        return
    if not options.show:
        options.cache.mkdir(parents=True, exist_ok=True)
        runs = [
            kept(options.cache / f"bn_recalibration-{seed}-{commit()}.json", partial(one, seed))
            for seed in range(options.seeds)
        ]
        RESULTS.write_text(json.dumps(summary(runs), indent=1) + "\n")
    print(table(json.loads(RESULTS.read_text())))


if __name__ == "__main__":
    main()
