"""Pruning for the Edge TPU: `python benchmarks/pruning.py [--networks A,B] [--seeds N] [--cache FOLDER]`.

Each network is trained for each seed, cut to half of its predicted compute time in several ways, and trained again:
every way for the same passes over the same data, with the network as it was as its teacher, batch norms recalibrated
before. These networks are so small that most of their latency is fixed: compute time is what can be halved.

- ours: `prune: {objective: compute, keep: 0.5}`, which chooses on validation;
- ours, on labels: the same without a teacher; what is better on validation is compared with the others;
- uniform: every width times the same factor, the channels of each layer with the smallest L1 norms out;
- L1-global: the channels of all layers with the smallest L1 norms out, norms over their layer's mean;
- scratch: the network that ours found, from random weights, on labels, for as many passes as ours took;
- scratch, longer: the same for as many as the original and ours took together.

fsdd_large is a network of 12 MB, cut until its parameters stay on the chip (`objective: cache`). Accuracy is on test
data, paired by sample and averaged over seeds, with intervals over samples; nothing is chosen on test. Needs the shared
files (CORALLINE_SHARED, or ../shared beside the project). Prints a table with the bounds, and writes
benchmarks/results/pruning.json. Networks, and what each way gave with each seed, are kept in the folder --cache: a run
that was ended goes on where no change of the project is uncommitted.
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
from distillation import interval, right, subfolder
from numpy.typing import NDArray
from quantization import commit, kept, quiet

from compress.artifact import MODEL_KERAS, MODEL_TFLITE, Artifact, Kind
from compress.distillation.settings import Teaching
from compress.importers.keras import keras_file
from compress.ir import keras_graph
from compress.ir.tensorflow import keras
from compress.pruning import allocation
from compress.pruning.allocation import STEP, Cut
from compress.pruning.cost import Counts
from compress.pruning.objective import Objective
from compress.stage import Context
from compress.stages import working_model
from compress.stages.prune import Prune
from compress.targets.base import load
from compress.training import healing, loop
from compress.training.bn_recalibration import recalibrate_batch_norms

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")


RESULTS = repository.RESULTS / "pruning.json"
EDGETPU = load("edgetpu")
HOST = "usb3"
ON_LABELS = "ours, on labels"
OURS = ("ours", ON_LABELS)
KEEP, LOST = 0.5, 0.02
"""The share of the compute time that may stay, and the accuracy that may be lost."""


def large(library: Any, shape: tuple[int, int, int], classes: int) -> Any:
    """12 MB of weights, nearly all of them in two dense layers, as in the networks of its time (VGG, AlexNet)."""
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


def again(name: str) -> int:
    """Passes after pruning: as many as the original was trained for."""
    return int(SUBJECTS[name].settings.epochs)


def settings(name: str) -> Prune:
    """How ours is asked for; the others are trained by the same settings."""
    given = {"objective": "cache"} if name == LARGE else {"objective": "compute", "keep": KEEP}
    return Prune(
        **given,
        epochs=again(name),
        augment=SUBJECTS[name].settings.augment,
        distill=Teaching(),
    )


def ours(taught: bool, subject: subjects.Subject, context: Context, given: Artifact) -> dict[str, Any]:
    """By the stage itself."""
    asked = settings(subject.name)
    (step,) = asked.model_copy(update={} if taught else {"distill": None}).run(given, context)["steps"]
    return {"allocation": step["allocation"], "tried": step.get("tried", {})}


def baseline(
    counts_of: Callable[[Cut, Callable[[Counts], float], float], Counts],
    subject: subjects.Subject,
    context: Context,
    given: Artifact,
) -> dict[str, Any]:
    """Other counts, then trained as ours."""
    del given
    cut = allocation.prepare(keras_graph.read(subject.model), EDGETPU, "l1", None)
    goal, asked = Objective("compute", KEEP), settings(subject.name)
    cost = goal.cost(cut)
    limit = goal.limit(cut, cost(cut.costs.everything))
    counts = filled(counts_of(cut, cost, limit), cut, cost, limit)
    model = keras_graph.build(allocation.without(cut, allocation.plan(cut, counts)))
    recalibrate_batch_norms(model, context)
    loss = asked.loss(model, context)
    assert loss is not None  # which it is without training only
    healing.heal(model, loss, asked, context)
    working_model.write(model, context.folder)
    return {}


def uniform(cut: Cut, cost: Callable[[Counts], float], limit: float) -> Counts:
    """The largest factor on all widths that keeps the limit; widths are rounded to the hardware's step."""

    def scaled(factor: float) -> Counts:
        return tuple(
            min(max(round(factor * len(each) / STEP) * STEP, least), len(each))
            for each, least in zip(cut.sets, cut.least, strict=True)
        )

    return max((scaled(step / 1000) for step in range(1001) if cost(scaled(step / 1000)) <= limit), key=sum)


def filled(counts: Counts, cut: Cut, cost: Callable[[Counts], float], limit: float) -> Counts:
    """What still fits: of each layer by turns so many channels as the hardware takes at once."""
    while True:
        more = [
            (*counts[:index], min(count + STEP - count % STEP, len(members)), *counts[index + 1 :])
            for index, (count, members) in enumerate(zip(counts, cut.sets, strict=True))
        ]
        fitting = [each for each in more if each != counts and cost(each) <= limit]
        if not fitting:
            return counts
        counts = max(fitting, key=lambda each: min(a / len(b) for a, b in zip(each, cut.sets, strict=True)))


def l1_global(cut: Cut, cost: Callable[[Counts], float], limit: float) -> Counts:
    """All channels above one threshold, at least four of each layer."""

    def above(threshold: float) -> Counts:
        return tuple(
            max(int((cut.score[each] > threshold).sum()), least)
            for each, least in zip(cut.sets, cut.least, strict=True)
        )

    scores = np.unique(np.concatenate([cut.score[each] for each in cut.sets]))
    return next(above(float(score)) for score in scores if cost(above(float(score))) <= limit)


def scratch(earlier: int, cache: Path, subject: subjects.Subject, context: Context, given: Artifact) -> dict[str, Any]:
    """What ours found, from random weights, for the passes that it took and those before."""
    del given
    name = subject.name
    found = kept_of(name, "ours", cache, subject.seed)
    model = keras_graph.build(keras_graph.read(keras_file.load(Path(found["file"]))))
    fresh = keras(context.seed).models.clone_model(model)
    passes = earlier + again(name) + len(set(found["tried"]))
    recipe = SUBJECTS[name].settings.model_copy(update={"epochs": passes})
    loop.fit(fresh, loop.label_loss(loop.head_of(fresh, subject.data)), recipe, context)
    working_model.write(fresh, context.folder)
    return {"passes": passes}


def ways(name: str, cache: Path) -> dict[str, Callable[..., dict[str, Any]]]:
    """What is compared on a network."""
    found: dict[str, Callable[..., dict[str, Any]]] = {"ours": partial(ours, True)}
    if name != LARGE:
        found |= {ON_LABELS: partial(ours, False)}
        found |= {"uniform": partial(baseline, uniform), "L1-global": partial(baseline, l1_global)}
        found |= {"scratch": partial(scratch, 0, cache)}
        found |= {"scratch, longer": partial(scratch, SUBJECTS[name].settings.epochs, cache)}
    return found


def one(name: str, way: str, cache: Path, seed: int) -> dict[str, Any]:
    """What a network knows that was cut in one way, by test sample, and what it costs."""
    subject, started = SUBJECTS[name](cache, seed), time.perf_counter()
    before = subject.model
    with tempfile.TemporaryDirectory() as folder, quiet():
        made, original = (subfolder(folder, each) for each in ("made", "original"))
        working_model.write(before, original)
        given = Artifact("", Kind.KERAS, original, dict.fromkeys((MODEL_KERAS, MODEL_TFLITE), ""), {}, 0)
        keras(seed)
        notes = ways(name, cache)[way](
            subject, replace(subjects.context(subject.data, made, seed), original=given), given
        )
        model = keras_file.load(made / MODEL_KERAS)
        file = cache / f"pruned-{name}-{_in_file(way)}-{seed}-{commit()}.keras"
        file.write_bytes((made / MODEL_KERAS).read_bytes())
    costs = {which: figures(each) for which, each in (("before", before), ("after", model))}
    seconds = round(time.perf_counter() - started, 1)
    found = {**notes, "file": str(file), "costs": costs, "seconds": seconds}
    found |= {"validation": float(right(model, subject.data, "validation").mean())}
    found |= {"hits": right(model, subject.data, "test"), "float": right(before, subject.data, "test")}
    share = costs["after"]["compute_ms"] / costs["before"]["compute_ms"]
    text = f"{name} {seed}, {way}: {share:.3f} of the compute, test {found['float'].mean():.4f} -> "
    print(f"{text}{found['hits'].mean():.4f}, {seconds:.0f} s", file=sys.stderr, flush=True)
    return found


def figures(model: Any) -> dict[str, Any]:
    """What a network costs as it is."""
    cut = allocation.prepare(keras_graph.read(model), EDGETPU, "l1", None)
    return cut.costs.to_json(cut.costs.everything, HOST)


def _in_file(way: str) -> str:
    return way.replace(", ", "-")


def kept_of(name: str, way: str, cache: Path, seed: int) -> dict[str, Any]:
    """One way with one seed, measured now or earlier."""
    return kept(cache / f"pruning-{name}-{_in_file(way)}-{seed}-{commit()}.json", partial(one, name, way, cache, seed))


def summary(runs: Mapping[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """One network over its seeds, as plain values."""
    chosen = max((way for way in runs if way in OURS), key=lambda way: sum(run["validation"] for run in runs[way]))
    own = np.stack([run["hits"] for run in runs[chosen]]).astype(int)
    found: dict[str, Any] = {"test_samples": own.shape[1], "chosen": chosen, "ways": {}}
    found["float"] = [float(run["float"].mean()) for run in runs["ours"]]
    for way, rows in runs.items():
        hits = np.stack([run["hits"] for run in rows]).astype(int)
        lost = (np.stack([run["float"] for run in rows]).astype(int) - hits).mean(axis=0)
        ahead: NDArray[np.float64] = (own - hits).mean(axis=0)
        found["ways"][way] = {
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
    return found


def table(cases: Mapping[str, Any]) -> str:
    """Every way beside the original and ours."""
    head = ["network", "way", "compute", "latency on USB 3", "streamed", "test", "lost (95%)", "ours ahead by (95%)"]
    lines = [head, ["---"] * len(head)]
    for name, case in cases.items():
        text = f"{name} ({len(case['float'])} seeds)"
        lines.append([text, "as it was", "", "", "", f"{statistics.fmean(case['float']):.4f}", "", ""])
        for way, row in case["ways"].items():
            lost, ahead = (_range(row, key) for key in ("lost", "ours_ahead"))
            share = statistics.fmean(
                each["after"]["compute_ms"] / each["before"]["compute_ms"] for each in row["costs"]
            )
            ms, sent = (_both(row, key, unit) for key, unit in (("latency_ms", 1), ("streamed_bytes", 1e6)))
            mean = f"{statistics.fmean(row['test']):.4f}"
            lines.append(
                [name, way, f"{share:.3f}", f"{ms} ms", f"{sent} MB", mean, lost, ahead if way not in OURS else ""]
            )
    text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return "\n".join([text, "", *(f"{name}: {_verdict(name, case)}" for name, case in cases.items())])


def _verdict(name: str, case: Mapping[str, Any]) -> str:
    """The bounds of one network."""
    found = {way: row for way, row in case["ways"].items() if way not in OURS}
    ours = case["ways"][case.get("chosen", "ours")]
    if name == LARGE:
        shares = [each["after"]["latency_ms"] / each["before"]["latency_ms"] for each in ours["costs"]]
        streamed = max(each["after"]["streamed_bytes"] for each in ours["costs"])
        met = streamed == 0 and max(shares) <= 0.5 and ours["lost"] <= 0.01
        return f"nothing streamed, latency at least halved, at most a point lost: {'met' if met else '**not met**'}"
    ahead = [way for way, row in found.items() if row["ours_ahead"] > 0]
    sure = [way for way in ahead if found[way]["ours_ahead_interval"][0] > 0]
    lost = "met" if ours["lost"] <= LOST else "**not met**"
    others = [way for way in found if way not in ahead]
    behind = f", **not** of {', '.join(others)}" if others else ""
    return (
        f"{case['chosen']}, as chosen on validation: at most {LOST:g} lost: {lost}; ahead of {', '.join(ahead)}"
        f"{behind}, with certainty of {', '.join(sure)}; intervals are over samples, not over seeds"
    )


def _range(row: Mapping[str, Any], key: str) -> str:
    low, high = row[f"{key}_interval"]
    return f"{row[key]:+.4f} ({low:+.4f} to {high:+.4f})"


def _both(row: Mapping[str, Any], key: str, unit: float) -> str:
    return " -> ".join(
        f"{statistics.fmean(each[when][key] for each in row['costs']) / unit:.2f}" for when in ("before", "after")
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
        cases[name] = {"commit": commit(), "epochs": SUBJECTS[name].settings.epochs, "again": again(name)} | summary(
            runs
        )
        cases = {known: cases[known] for known in SUBJECTS if known in cases}
        RESULTS.write_text(json.dumps({"cases": cases}, indent=1) + "\n")
    print(table(cases))


if __name__ == "__main__":
    main()
