"""Quantization against other tools: `python benchmarks/quantization.py [--models A,B] [--qat] [--seeds N]`.

Every tool gets the same models and calibration samples. All files run in the same runtime on the same test data, which
is not used for calibration. Needs the shared files (CORALLINE_SHARED, or ../shared next to the project) and
`pip install -e '.[bench]'`. Prints Markdown tables, and writes benchmarks/results/quantization.json.
Networks are trained once for each seed. They and the results of each seed are kept in the folder --cache: an
interrupted run continues. A new run of a model replaces its results; the results of other models stay.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import repository

import numpy as np
import quantization_cases as cases
import quantization_qat as qat
import quantization_subjects as subjects
import quantization_tools as tools
from common import commit, interval, kept, markdown, quiet
from numpy.typing import NDArray
from quantization_tools import OURS, QuantizerInputs

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")


RESULTS = repository.RESULTS / "quantization.json"
AS_IT_IS, HARD = "as it is", f"imbalance x{max(cases.IMBALANCES)}"
Hits = NDArray[np.bool_]


def inputs_by_case(subject: subjects.Subject) -> dict[str, Callable[[], QuantizerInputs]]:
    """Return the inputs of the tools by case, as functions that make them."""
    model, seed = subject.model, subject.seed
    calibration, held_out = tools.drawn(subject)

    def injected(times: int) -> Callable[[], QuantizerInputs]:
        return lambda: QuantizerInputs(cases.imbalanced(model, times, seed, held_out)[0], calibration, held_out, seed)

    def corrupted(change: Callable[[Any, int], Any]) -> Callable[[], QuantizerInputs]:
        return lambda: QuantizerInputs(model, change(calibration, seed), held_out, seed)

    return {
        AS_IT_IS: lambda: QuantizerInputs(model, calibration, held_out, seed),
        **{f"imbalance x{times}": injected(times) for times in cases.IMBALANCES if cases.scalable(model)},
        **{name: corrupted(change) for name, change in cases.CORRUPTIONS.items()},
    }


def hits(subject: subjects.Subject, answers: NDArray[Any], expected: NDArray[Any]) -> Hits:
    """Return for each test sample whether the class is correct; without labels, whether it is the float model's."""
    predicted = answers.argmax(axis=1)
    return np.asarray(predicted == (subject.data.labels("test") if subject.labelled else expected.argmax(axis=1)))


def one_seed(subject: subjects.Subject, *, train: bool) -> dict[str, Any]:
    """Run every tool in every case; return hits, agreement with the float model, seconds and notes."""
    inputs = subject.data.inputs("test")
    expected = np.asarray(subject.model.predict(inputs, verbose=0))
    results: dict[str, Any] = {"float": hits(subject, expected, expected), "cases": {}}
    for case, make in inputs_by_case(subject).items():
        tool_inputs, row = make(), {}
        for name, tool in tools.TOOLS.items():
            with quiet():
                quantized = tool(tool_inputs)
                answers = tools.scores(quantized.content, inputs)
            agreement = float((answers.argmax(axis=1) == expected.argmax(axis=1)).mean())
            row[name] = {
                "hits": hits(subject, answers, expected),
                "agreement": agreement,
                "seconds": quantized.seconds,
                "notes": quantized.notes,
            }
            text = f"{subject.name} {subject.seed}, {case}, {name}: {row[name]['hits'].mean():.4f}"
            print(f"{text}, agreement {agreement:.4f}, {quantized.seconds:.1f} s", file=sys.stderr, flush=True)
        results["cases"][case] = row
    results["trained"] = trained(subject) if train and subject.labelled else {}
    return results


def trained(subject: subjects.Subject) -> dict[str, dict[str, Any]]:
    """Return the result of each engine, or why it refuses the network; for the plain case and the largest imbalance."""
    inputs, results = subject.data.inputs("test"), dict[str, dict[str, Any]]()
    for case, make in inputs_by_case(subject).items():
        if case not in (AS_IT_IS, HARD):
            continue
        results[case] = {}
        with quiet():
            engines = dict(qat.engines(subject, make()))
        for name, file in engines.items():
            if isinstance(file, str):
                results[case][name] = file
                continue
            answers = tools.scores(file.content, inputs)
            results[case][name] = {"hits": hits(subject, answers, answers), "seconds": file.seconds} | file.notes
            share = results[case][name]["hits"].mean()
            print(f"{subject.name} {subject.seed}, {case}, {name}: {share:.4f}", file=sys.stderr, flush=True)
    return results


def summary(subject: subjects.Subject, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the results of one model over all seeds as plain values."""
    results: dict[str, Any] = {
        "metric": "accuracy" if subject.labelled else "agreement with the float model",
        "test_samples": len(runs[0]["float"]),
        "float": [float(run["float"].mean()) for run in runs],
        "cases": {},
    }
    for case in runs[0]["cases"]:
        rows = [run["cases"][case] for run in runs]
        pooled = {name: np.concatenate([row[name]["hits"] for row in rows]).astype(int) for name in rows[0]}
        best = max((name for name in pooled if name != OURS), key=lambda name: pooled[name].mean())
        difference = pooled[OURS] - pooled[best]
        results["cases"][case] = {
            "tools": {name: _tool([row[name] for row in rows]) for name in rows[0]},
            "best_other": best,
            "ours_minus_best_other": float(difference.mean()),
            "interval": interval(difference),
        }
    results["trained"] = {case: _trained(runs, case) for case in runs[0]["trained"]}
    return results


def _trained(runs: list[dict[str, Any]], case: str) -> dict[str, Any]:
    """Compare the engines that train with our PTQ and with TFLiteConverter in the same case."""
    results: dict[str, Any] = {}
    calibrated = {
        tool: np.concatenate([run["cases"][case][tool]["hits"] for run in runs]).astype(int)
        for tool in (OURS, tools.CONVERTER)
    }
    for name in runs[0]["trained"][case]:
        rows = [run["trained"][case][name] for run in runs]
        refused = next((row for row in rows if isinstance(row, str)), None)
        if refused is not None:
            results[name] = {"refused": refused}
            continue
        pooled = np.concatenate([row["hits"] for row in rows]).astype(int)
        results[name] = {
            "value": [float(row["hits"].mean()) for row in rows],
            "seconds": [round(row["seconds"], 2) for row in rows],
            "training_agrees_with_file": [row.get("training_agrees_with_file") for row in rows],
            "minus": {
                tool: {"mean": float((pooled - tool_hits).mean()), "interval": interval(pooled - tool_hits)}
                for tool, tool_hits in calibrated.items()
            },
        }
    return results


def _tool(rows: list[dict[str, Any]]) -> dict[str, Any]:
    figures: dict[str, Any] = {
        "value": [float(row["hits"].mean()) for row in rows],
        "agreement": [row["agreement"] for row in rows],
        "seconds": [round(row["seconds"], 2) for row in rows],
    }
    return figures | ({"notes": [row["notes"] for row in rows]} if rows[0]["notes"] else {})


def table(models: Mapping[str, Any]) -> str:
    """Return the Markdown tables: our results next to those of the other tools, for all models and cases."""
    others = [name for name in tools.TOOLS if name != OURS]
    head = ["model", "case", "float", OURS, *others, f"{OURS} - best other (95%)"]
    lines: list[list[str]] = []
    for name, model in models.items():
        for case, row in model["cases"].items():
            values = [f"{statistics.fmean(row['tools'][tool]['value']):.4f}" for tool in (OURS, *others)]
            low, high = row["interval"]
            lines.append(
                [
                    f"{name} ({len(model['float'])} seeds)" if len(model["float"]) > 1 else name,
                    case,
                    f"{statistics.fmean(model['float']):.4f}",
                    *values,
                    f"{row['ours_minus_best_other']:+.4f} ({low:+.4f} to {high:+.4f})",
                ]
            )
    return f"{markdown(head, lines)}\n\n{_trainings(models)}"


def _trainings(models: Mapping[str, Any]) -> str:
    """Return the table of the engines that train; empty if none was run."""
    head = ["model", "case", "engine", "float", f"{OURS} PTQ", tools.CONVERTER, "trained"]
    head += [f"- {OURS} PTQ (95%)", f"- {tools.CONVERTER} (95%)", "training and file agree (≥ 0.983)"]
    lines: list[list[str]] = []
    for name, model in models.items():
        for case, engines in model.get("trained", {}).items():
            ptq = [statistics.fmean(model["cases"][case]["tools"][tool]["value"]) for tool in (OURS, tools.CONVERTER)]
            for engine, row in engines.items():
                start = [
                    name,
                    case,
                    engine,
                    f"{statistics.fmean(model['float']):.4f}",
                    *(f"{value:.4f}" for value in ptq),
                ]
                if "refused" in row:
                    lines.append([*start, f"refused: {row['refused'][:60]}", "", "", ""])
                    continue
                differences = [
                    "{:+.4f} ({:+.4f} to {:+.4f})".format(difference["mean"], *difference["interval"])
                    for difference in row["minus"].values()
                ]
                agreements = [share for share in row["training_agrees_with_file"] if share is not None]
                agreement = f"{min(agreements):.4f}" if agreements else ""
                lines.append([*start, f"{statistics.fmean(row['value']):.4f}", *differences, agreement])
    return markdown(head, lines) if lines else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--qat", action="store_true", help="what trains too: both engines, and AdaRound")
    parser.add_argument("--models", default=",".join(subjects.SUBJECTS), help="some of them, with commas")
    options = subjects.asked(parser)
    if options is None:
        return
    models = json.loads(RESULTS.read_text())["models"] if RESULTS.exists() else {}
    for name in [] if options.show else options.models.split(","):
        seeds = range(options.seeds if name in subjects.TRAINED else 1)
        started = time.perf_counter()
        runs = []
        for seed in seeds:
            subject = subjects.SUBJECTS[name](options.cache, seed)
            path = options.cache / f"{name}-{seed}-{commit()}{'-qat' * options.qat}.json"
            runs.append(kept(path, partial(one_seed, subject, train=options.qat)))
        models[name] = {"commit": commit()} | summary(subject, runs)
        models = {known: models[known] for known in subjects.SUBJECTS if known in models}
        RESULTS.write_text(json.dumps({"models": models}, indent=1) + "\n")
        print(f"{name}: {time.perf_counter() - started:.0f} s", file=sys.stderr)
    print(table(models))


if __name__ == "__main__":
    main()
