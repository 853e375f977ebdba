"""The search for trade-offs: `python benchmarks/search.py [--trials N] [--seeds N] [--epochs N] [--show]`.

Groceries (43 classes, photos of 48x48): a small network of models/fused_bottleneck.py is searched in its width, blocks,
expansion, fused stages and last layer, and in the learning rate and label smoothing of its training, for accuracy and
predicted latency. Three ways have the same number of trials: `search` as users run it, random values of the same
settings, and a uniform sweep of the width alone, in which equal networks are trained once. All share one store, so a
stage is trained once.

The figure is the hypervolume of the front: the share that it dominates of the rectangle between the reference (the
accuracy of the most frequent class, and the longest latency of any trial of the seed) and the ideal (accuracy 1, and
the shortest latency). It is calculated with the accuracies of the validation split, which decided, and with those of
the test split, which is used for nothing else.

`--samplers` compares what chooses the trials on two analytical problems like such a search, without any training:
random values, Optuna's TPE and NSGA-II, and ours. It takes some minutes.

A search takes an hour, so only a few can be run. `--surrogate` repeats searches and random values with other seeds on a
model of the networks that were trained so far: a Gaussian process of their accuracy by their settings, with the noise
that it finds, and one of their latency (a surrogate benchmark, after Zela et al., Surrogate NAS Benchmarks, ICLR 2022).
It gives the hypervolumes with that noise, and those of the same trials without it.

Needs the shared files (CORALLINE_SHARED, or ../shared next to the project). Prints Markdown tables, and writes
benchmarks/results/search.json after each search. The folder --work keeps the trials; the next run continues from there.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import repository

import numpy as np
import optuna
from compress.pipeline.search.sampler import FrontSampler
from paths import ROOT, SHARED
from scipy.stats import mannwhitneyu
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import ConstantKernel, Matern, WhiteKernel
from threadpoolctl import threadpool_limits

from compress.pipeline.search.run import SettingsSearch, read_plan
from compress.pipeline.search.space import Choices, Dimension, Range, Space, read_space
from compress.pipeline.search.study import SearchStudy
from compress.pipeline.yaml_file import Document
from compress.report.search_record import FrontPoint, SearchRecord, TrialRecord
from compress.surface.cli.search import worker_process

RESULTS = repository.RESULTS / "search.json"
WORK = ROOT / "runs" / "search_benchmark"
MAJORITY = 0.111
"""The share of the most frequent class of the test split."""
WIDTHS = (0.25, 2.0)
CHANNELS = (16, 32, 64)
LAST = 128
SETTINGS: Mapping[str, Any] = {
    "model.width": {"from": WIDTHS[0], "to": WIDTHS[1], "log": True},
    "model.blocks": [[1, 1, 1], [1, 1, 2], [1, 2, 2], [1, 2, 1]],
    "model.expansion": [2, 3, 4, 6],
    "model.fused": [0, 1, 2, 3],
    "model.last": {"from": 64, "to": 256, "step": 64},
    "train.learning_rate": {"from": 0.001, "to": 0.02, "log": True},
    "train.label_smoothing": [0.0, 0.1],
}
Point = tuple[float, float]
"""An accuracy and a latency in ms."""
Values = Mapping[str, Any]


class RandomStudy(SearchStudy):
    """A search whose trials are random."""

    def sampler(self, seed: int) -> optuna.samplers.BaseSampler:
        """Return a sampler of random values."""
        return optuna.samplers.RandomSampler(seed=seed)


def sweep(trials: int) -> Mapping[str, Any]:
    """Return the settings of a uniform sweep of the width: evenly spaced on a logarithmic scale.

    Of widths that give the same numbers of channels, multiples of 8, only the first one is trained.
    """
    networks: dict[tuple[int, ...], float] = {}
    for width in np.geomspace(*WIDTHS, trials):
        channels = tuple(max(8, 8 * round(count * width / 8)) for count in (*CHANNELS, LAST))
        networks.setdefault(channels, round(float(width), 4))
    return {"model.width": list(networks.values())}


Way = tuple[type[SearchStudy], Callable[[int], Mapping[str, Any]]]
WAYS: Mapping[str, Way] = {
    "search": (SearchStudy, lambda trials: SETTINGS),
    "random": (RandomStudy, lambda trials: SETTINGS),
    "width sweep": (SearchStudy, sweep),
}


def pipeline(name: str, seed: int, epochs: int, trials: int, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the pipeline file of a search."""
    labels = {"table": "labels.csv", "label": "coarse_id", "split": "split"}
    classes = {"file": "classes.csv", "index": "Coarse Class ID (int)", "name": "Coarse Class Name (str)"}
    arguments = {"channels": [*CHANNELS], "blocks": [1, 1, 2], "strides": [2, 2, 2], "expansion": 4, "fused": 2}
    return {
        "schema_version": 1,
        "name": name,
        "seed": seed,
        "model": {"builder": "fused_bottleneck", "arguments": arguments | {"last": LAST, "width": 1.0}},
        "data": {
            "source": {"folder": {"path": "groceries", "labels": labels, "classes": classes}},
            "preprocess": [{"resize": {"size": [48, 48]}}, {"scale": {"from": [0, 255], "to": [-1, 1]}}],
        },
        "stages": [
            {
                "train": {
                    "epochs": epochs,
                    "batch_size": 32,
                    "learning_rate": 0.004,
                    "warmup": 0.05,
                    "augment": {"flip": True, "shift": 0.12, "zoom": 0.2},
                }
            },
            {"quantize": {"ranges": "minmax", "held_out_samples": 64}},
            "compile",
        ],
        "search": {"trials": trials, "objectives": ["accuracy", "latency_ms"], "settings": dict(settings)},
    }


def hypervolume(points: Sequence[Point], reference: Point, shortest: float = 0.0) -> float:
    """Return the share that points dominate of the rectangle from the reference to the ideal."""
    area, worst = 0.0, reference[0]
    for accuracy, latency in sorted(points, key=lambda point: point[1]):
        if accuracy > worst and latency < reference[1]:
            area += (accuracy - worst) * (reference[1] - latency)
            worst = accuracy
    return area / ((1 - reference[0]) * (reference[1] - shortest))


def searched(way: str, seed: int, options: argparse.Namespace) -> SearchRecord:
    """Return the record of one search."""
    kind, settings = WAYS[way]
    path = options.work / f"{way.replace(' ', '_')}_{seed}.yaml"
    content = pipeline(path.stem, seed, options.epochs, options.trials, settings(options.trials))
    path.write_text(json.dumps(content, indent=1))  # JSON is YAML
    plan = read_plan(path)
    out = options.work / "runs"
    return SettingsSearch(plan, out, plan.study(out, kind=kind), worker_process(), _show).run()


def _show(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def points_of(trials: Sequence[TrialRecord], count: int) -> list[Point]:
    """Return the points of the first trials that count."""
    counted = [trial for trial in trials if trial.status in ("complete", "stopped", "failed")][:count]
    return [(trial.values["accuracy"], trial.values["latency_ms"]) for trial in counted if trial.is_feasible]


def points_on_test(record: SearchRecord, front: Sequence[FrontPoint]) -> list[Point]:
    """Return the front with the accuracies of the test split."""
    measured = [(point.test, record.trial(point.number).values["latency_ms"]) for point in front]
    return [(test.value, latency) for test, latency in measured if test is not None and test.value is not None]


def row(records: Mapping[str, SearchRecord], trials: int) -> dict[str, Any]:
    """Return the figures of one seed: for each way, the hypervolume after some trials and at the end."""
    every = [point for record in records.values() for point in points_of(record.trials, trials)]
    reference = (MAJORITY, max(latency for _, latency in every))
    shortest = min(latency for _, latency in every)
    counts = sorted({max(1, trials // 3), max(1, 2 * trials // 3), trials})
    return {
        "reference": reference,
        "shortest_ms": shortest,
        "ways": {
            way: {
                "after": {
                    str(n): round(hypervolume(points_of(record.trials, n), reference, shortest), 5) for n in counts
                },
                "test": round(hypervolume(points_on_test(record, record.front), reference, shortest), 5),
                "front": len(record.front),
                "best_accuracy": max(accuracy for accuracy, _ in points_of(record.trials, trials)),
                "stopped": sum(trial.status == "stopped" for trial in record.trials),
                "failed": sum(trial.status == "failed" for trial in record.trials),
                "minutes": round(record.seconds / 60, 2),
            }
            for way, record in records.items()
        },
    }


def table(rows: Mapping[str, Any]) -> str:
    """Return the hypervolumes as Markdown."""
    lines = ["| way | " + " | ".join(f"seed {seed}" for seed in rows) + " | mean | on test, mean |"]
    lines.append("|---" * (len(rows) + 3) + "|")
    for way in WAYS:
        ends = [list(seed_row["ways"][way]["after"].values())[-1] for seed_row in rows.values()]
        test = statistics.mean(seed_row["ways"][way]["test"] for seed_row in rows.values())
        lines.append(f"| {way} | {' | '.join(f'{v:.4f}' for v in ends)} | {statistics.mean(ends):.4f} | {test:.4f} |")
    return "\n".join(lines)


def trained(records: Sequence[SearchRecord]) -> list[Values]:
    """Return the settings, accuracies and latencies of the networks that searches have trained."""
    return [
        {**trial.settings, **{name: trial.values[name] for name in ("accuracy", "latency_ms")}}
        for record in records
        for trial in record.trials
        if trial.status == "complete"
    ]


# --- surrogate --------------------------------------------------------------------------


class Surrogate:
    """A model of trained networks.

    Args:
        networks: their settings, accuracies and latencies.

    Attributes:
        noise: the standard deviation of the accuracy of one training.
        reference: of the hypervolume, as in `row`.
        shortest: the shortest latency.
    """

    def __init__(self, networks: Sequence[Values]) -> None:
        accuracies, latencies = ([network[name] for network in networks] for name in ("accuracy", "latency_ms"))
        self.reference, self.shortest = (MAJORITY, max(latencies)), min(latencies)
        points = [self._encoded(network) for network in networks]
        self._accuracy = _fitted(points, accuracies, 0.1)
        self._latency = _fitted(points, latencies, 1e-4)
        self.noise = float(np.std(accuracies) * np.sqrt(self._accuracy.kernel_.k2.noise_level))

    def __call__(self, settings: Values) -> Point:
        """Return the mean accuracy of networks with these settings, and their latency in ms."""
        point = [self._encoded(settings)]
        latency = max(self.shortest, float(self._latency.predict(point)[0]))
        return float(self._accuracy.predict(point)[0]), latency

    @staticmethod
    def _encoded(settings: Values) -> list[float]:
        """Return settings as numbers from 0 to 1; words are one-hot."""
        encoded: list[float] = []
        for key, space in SETTINGS.items():
            if isinstance(space, dict):
                scale: Callable[[float], float] = np.log if space.get("log") else float
                low, high = scale(space["from"]), scale(space["to"])
                encoded.append((scale(settings[key]) - low) / (high - low))
            elif isinstance(space[0], list):
                encoded += [float(settings[key] == choice) for choice in space]
            else:
                encoded.append((settings[key] - space[0]) / (space[-1] - space[0]))
        return encoded


def _fitted(points: Sequence[Sequence[float]], values: Sequence[float], noise: float) -> GaussianProcessRegressor:
    scales = np.full(len(points[0]), 1.0)
    kernel = ConstantKernel(1.0, (0.01, 100)) * Matern(scales, (0.1, 50), nu=2.5) + WhiteKernel(noise, (1e-7, 1))
    process = GaussianProcessRegressor(kernel, normalize_y=True, n_restarts_optimizer=1, random_state=0)
    with threadpool_limits(1):
        return process.fit(points, values)


def repeat(networks: Sequence[Values], trials: int, seeds: int) -> dict[str, Any]:
    """Return the hypervolumes of searches and of random values on a model of trained networks."""
    quiet()
    surrogate = Surrogate(networks)
    content = pipeline("surrogate", 0, 1, trials, SETTINGS)
    space = read_space(Document(Path("surrogate"), content, {}), lambda edited: None)
    results: dict[str, Any] = {"networks": len(networks), "noise": round(surrogate.noise, 5), "trials": trials}
    for name in ("random", "ours"):
        rows = [_repeated(surrogate, space, name, seed, trials) for seed in range(seeds)]
        results[name] = {"noisy": [noisy for noisy, _ in rows], "mean": [mean for _, mean in rows]}
        _show(f"surrogate, {name}: {statistics.mean(results[name]['noisy']):.4f}")
    ours, others = results["ours"]["mean"], results["random"]["mean"]
    results["p"] = float(mannwhitneyu(ours, others, alternative="greater").pvalue)
    return results


def _repeated(surrogate: Surrogate, space: Space, name: str, seed: int, trials: int) -> Point:
    """Return the hypervolume of one search with the noise of the trainings, and without it."""
    noise = np.random.default_rng(seed)
    means: list[Point] = []

    def problem(settings: Values, _: np.random.Generator) -> tuple[float, float, bool]:
        accuracy, latency = surrogate(settings)
        means.append((accuracy, latency))
        return 1 - accuracy - noise.normal(0, surrogate.noise), latency, True

    noisy = simulated(problem, space, name, seed, trials)
    volumes = [hypervolume(points, surrogate.reference, surrogate.shortest) for points in (noisy, means)]
    return round(volumes[0], 5), round(volumes[1], 5)


def surrogate_table(results: Mapping[str, Any]) -> str:
    """Return the comparison on the model of trained networks as Markdown."""
    lines = ["| way | hypervolume | the same trials without noise |", "|---" * 3 + "|"]
    for name, shown in (("ours", "search"), ("random", "random")):
        cells = [f"{statistics.mean(v):.4f} (± {statistics.stdev(v):.4f})" for v in results[name].values()]
        lines.append(f"| {shown} | {' | '.join(cells)} |")
    about = (
        f"{results['networks']} networks, noise {results['noise']:.4f}, {len(results['ours']['mean'])} searches each"
    )
    return "\n".join([*lines, "", f"{about}; p = {results['p']:.1g} (Mann-Whitney, without noise)"])


# --- samplers ---------------------------------------------------------------------------


def few_settings(values: Values, noise: np.random.Generator) -> tuple[float, float, bool]:
    """Return error, latency and whether the latency is in its limit: five settings, like width, pruning, training."""
    width, keep, rate, kind = values["width"], values["keep"], values["rate"], values["kind"]
    latency = width**1.5 * keep * 4 + 0.5 + (0.3 if kind == "b" else 0)
    error = 0.05 + 0.35 * np.exp(-3 * width * keep) + 0.1 * (np.log10(rate) + 2.5) ** 2
    error += 0.004 * (values["temperature"] - 4) ** 2 + {"a": 0.03, "b": 0.0, "c": 0.08}[kind]
    return float(error + 0.1 * max(0.0, 0.5 - keep) ** 2 + noise.normal(0, 0.004)), float(latency), latency <= 5


def many_widths(values: Values, noise: np.random.Generator) -> tuple[float, float, bool]:
    """Return error, latency and True: the widths of four stages, the depths of two, and the learning rate."""
    widths = [values[f"width{i}"] for i in range(4)]
    first, second = values["depth0"], values["depth1"]
    cost = sum(width * width * weight for width, weight in zip(widths, (0.02, 0.015, 0.012, 0.01), strict=True))
    capacity = sum(share * np.log(width) for width, share in zip(widths, (0.2, 0.5, 0.9, 0.4), strict=True))
    capacity += 0.5 * first**0.5 + 0.3 * second**0.5
    error = 0.15 + 0.6 * np.exp(-0.7 * capacity) + 0.08 * (np.log10(values["rate"]) + 2.6) ** 2
    return float(error + noise.normal(0, 0.01)), float(0.4 + cost * (0.6 + 0.2 * first + 0.1 * second) / 3), True


def _space(*dimensions: Dimension) -> Space:
    return Space(Document(Path(), {"stages": []}, {}), dimensions)


Problem = Callable[[Values, np.random.Generator], tuple[float, float, bool]]
PROBLEMS: Mapping[str, tuple[Problem, Space]] = {
    "few settings": (
        few_settings,
        _space(
            Range("width", ("width",), 0.2, 1.5),
            Range("keep", ("keep",), 0.3, 0.9),
            Range("temperature", ("temperature",), 1.0, 8.0),
            Range("rate", ("rate",), 1e-4, 1e-1, log=True),
            Choices("kind", ("kind",), ("a", "b", "c")),
        ),
    ),
    "many widths": (
        many_widths,
        _space(
            *(Range(f"width{i}", (f"width{i}",), 1, 8, integer=True) for i in range(4)),
            *(Range(f"depth{i}", (f"depth{i}",), 1, 3, integer=True) for i in range(2)),
            Range("rate", ("rate",), 1e-3, 1e-2, log=True),
        ),
    ),
}
SAMPLERS: Mapping[str, Callable[[Space, int], optuna.samplers.BaseSampler]] = {
    "random": lambda space, seed: optuna.samplers.RandomSampler(seed=seed),
    "TPE": lambda space, seed: optuna.samplers.TPESampler(seed=seed, multivariate=False),
    "TPE, multivariate": lambda space, seed: optuna.samplers.TPESampler(seed=seed, multivariate=True, group=True),
    "NSGA-II, population 10": lambda space, seed: optuna.samplers.NSGAIISampler(population_size=10, seed=seed),
    "ours": FrontSampler,
}
LIMIT_MS = 8.0


def quiet() -> None:
    """Leave out the messages of Optuna and of fits."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.simplefilter("ignore")


def simulated(problem: Problem, space: Space, name: str, seed: int, trials: int) -> list[Point]:
    """Return the points of one simulated search that meet its constraint."""
    study = optuna.create_study(directions=["minimize", "minimize"])
    noise = np.random.default_rng(seed)
    points = []
    study.sampler = SAMPLERS[name](space, seed)
    for number in range(trials):
        if not name.startswith("NSGA"):  # NSGA-II needs its state
            study.sampler = SAMPLERS[name](space, (seed * 1_000_003 + number) % 2**32)
        trial = study.ask()
        error, latency, holds = problem(space.suggest(trial), noise)
        trial.set_constraint("latency", 0.0 if holds else 1.0)
        study.tell(trial, [error, latency])
        points += [(1 - error, latency)] if holds else []
    return points


def compare_samplers(trials: int, seeds: int) -> dict[str, Any]:
    """Return the hypervolumes of each sampler on each problem."""
    quiet()
    results: dict[str, Any] = {"trials": trials, "seeds": seeds, "problems": {}}
    for name, (problem, space) in PROBLEMS.items():
        rows: dict[str, Any] = {}
        results["problems"][name] = rows
        for sampler in SAMPLERS:
            began = time.process_time()
            searches = [simulated(problem, space, sampler, seed, trials) for seed in range(seeds)]
            values = [hypervolume(points, (0.0, LIMIT_MS)) for points in searches]
            baseline = rows["random"]["values"] if rows else values
            rows[sampler] = {
                "mean": round(statistics.mean(values), 5),
                "better_than_random": sum(a > b for a, b in zip(values, baseline, strict=True)),
                "seconds_per_trial": round((time.process_time() - began) / seeds / trials, 4),
                "values": [round(value, 5) for value in values],
            }
            _show(f"{name}: {sampler}: {rows[sampler]['mean']}")
    return results


def samplers_table(results: Mapping[str, Any]) -> str:
    """Return the comparison of samplers as Markdown."""
    lines = ["| sampler | " + " | ".join(results["problems"]) + " | CPU s per trial |", "|---" * 4 + "|"]
    for sampler in SAMPLERS:
        rows = [rows[sampler] for rows in results["problems"].values()]
        cells = [
            f"{figures['mean']:.4f}, better in {figures['better_than_random']} of {results['seeds']}"
            for figures in rows
        ]
        cells = [cell.partition(",")[0] for cell in cells] if sampler == "random" else cells
        lines.append(
            f"| {sampler} | {' | '.join(cells)} | {max(figures['seconds_per_trial'] for figures in rows):.3f} |"
        )
    return "\n".join(lines)


def write(results: Mapping[str, Any]) -> None:
    """Write the results."""
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")


def main() -> int:
    """Run the searches or the samplers, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=60)
    parser.add_argument("--seeds", type=int, help="3, or 12 for --samplers, or 16 for --surrogate")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--work", type=Path, default=WORK, help=f"the folder of the trials; by default {WORK}")
    parser.add_argument("--samplers", action="store_true", help="compare what chooses the trials, without training")
    parser.add_argument("--surrogate", action="store_true", help="repeat searches on a model of the trained networks")
    parser.add_argument("--show", action="store_true", help="print the tables of the results")
    options = parser.parse_args()
    results: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    if options.samplers:
        results["samplers"] = compare_samplers(options.trials, options.seeds or 12)
        write(results)
    elif options.surrogate:
        results["surrogate"] = repeat(results["trained"], options.trials, options.seeds or 16)
        write(results)
    elif not options.show:
        if not SHARED.exists():
            print(f"skipped: {SHARED} does not exist; CORALLINE_SHARED names the folder of shared files")
            return 0
        options.work.mkdir(parents=True, exist_ok=True)
        if not (options.work / "groceries").exists():
            script = ROOT / "calibration_data" / "groceries" / "prepare.py"
            source = SHARED / "data" / "grocery96.tar"
            subprocess.run([sys.executable, str(script), str(source), str(options.work / "groceries")], check=True)
        groceries: dict[str, Any] = {"trials": options.trials, "epochs": options.epochs, "seeds": {}}
        every: list[SearchRecord] = []
        for seed in range(options.seeds or 3):
            records = {way: searched(way, seed, options) for way in WAYS}
            every += [records["search"], records["random"]]
            results["trained"] = trained(every)
            groceries["seeds"][str(seed)] = row(records, options.trials)
            results["groceries"] = groceries
            write(results)
    if "samplers" in results:
        print(samplers_table(results["samplers"]))
    if "groceries" in results:
        print(f"\n{results['groceries']['trials']} trials of {results['groceries']['epochs']} epochs\n")
        print(table(results["groceries"]["seeds"]))
    if "surrogate" in results:
        print(f"\n{surrogate_table(results['surrogate'])}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
