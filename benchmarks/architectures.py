"""Architectures from a search against architectures made by hand: `python benchmarks/architectures.py [--seeds N]`.

Runs the search of `models/groceries_search.yaml` over builders and their arguments, whose limit is a predicted latency.
The architecture of the search is the one on the front with the highest accuracy on the validation split. Networks made
by hand are trained like a trial. Of the networks made by hand that meet the limit, the network whose int8 file has the
highest accuracy on the test split is kept, which favours the networks made by hand. Then both architectures are trained
longer (`--epochs`) for each seed and quantized. The figures are the accuracies of the int8 files on the test split, and
the predicted latencies.

Needs the shared files (CORALLINE_SHARED, or ../shared next to the project), and torch for the sampler of the search.
Results of finished runs are kept in the folder --work. Writes benchmarks/results/architectures.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import repository

from common import commit
from paths import ROOT, SHARED

from compress.pipeline.search.space import BUILDER, BUILDER_KEY, edited
from compress.pipeline.yaml_file import Location, read

RECIPE = ROOT / "models" / "groceries_search.yaml"
RESULTS = repository.RESULTS / "architectures.json"
HAND_MADE: tuple[tuple[str, Mapping[str, Any], int], ...] = (
    ("mobilenet_v1", {"width": 0.5}, 48),
    ("mobilenet_v1", {"width": 0.5}, 64),
    ("mobilenet_v1", {"width": 1.0}, 64),
    ("mobilenet_v1", {"width": 1.0, "depth": 5}, 64),
    ("mobilenet_v2", {"width": 0.5, "stages": 4, "last": 128}, 64),
    ("fused_bottleneck", {"width": 0.5}, 48),
    ("fused_bottleneck", {"width": 0.5}, 64),
    ("fused_bottleneck", {"width": 1.0}, 64),
    ("mobilenet_v1", {"width": 1.0, "depth": 3}, 48),
)
"""Builders, arguments chosen by hand, and the side of the photos. EfficientNet-Lite and all stages of MobileNetV2 have
more layers than the limit of the recipe allows. The last one was the best of nine builders in an earlier benchmark."""
SIZE: Location = ("data", "preprocess", 0, "resize", "size")
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}
Edits = Mapping[Location, Any]


def architecture(builder: str, arguments: Mapping[str, Any], side: int) -> dict[Location, Any]:
    """Return the edits of the recipe for an architecture and a size of the photos."""
    return {("model", "arguments"): dict(arguments), BUILDER: builder, SIZE: [side, side]}


def coralline(work: Path, *arguments: str) -> None:
    """Run the command line in a folder; the result of a short training may be "not usable" (exit code 7)."""
    command = [sys.executable, "-m", "compress", *arguments]
    done = subprocess.run(command, cwd=work, env=ENVIRONMENT, stdout=subprocess.DEVNULL)
    if done.returncode not in (0, 7):
        raise SystemExit(f"{' '.join(command)} failed")


def searched(work: Path) -> tuple[str, dict[Location, Any]]:
    """Run the search, or continue it; return the sampler, and the edits of the most accurate trial of the front."""
    coralline(work, "search", RECIPE.name)
    found = json.loads((work / "runs" / RECIPE.stem / "search" / "search.json").read_text())
    if not found["front"]:
        raise SystemExit("no trial meets the constraints of the search")
    best = found["front"][0]["number"]  # recommended would be null for a result that is not usable yet
    settings = next(trial["settings"] for trial in found["trials"] if trial["number"] == best)
    print(f"search: trial {best}, {settings}", file=sys.stderr)
    names = [name for name in settings if name.startswith("model.") and name != BUILDER_KEY]
    arguments = {name.removeprefix("model."): settings[name] for name in names}
    side = settings["data.preprocess.resize.size"][0]
    return found["sampler"], architecture(settings[BUILDER_KEY], arguments, side)


def trained(work: Path, name: str, edits: Edits, seed: int = 0, epochs: int | None = None) -> dict[str, float]:
    """Train and quantize an architecture; return the accuracy of its int8 file, and its predicted latency."""
    longer: Edits = {} if epochs is None else {("stages", 0, "train", "epochs"): epochs}
    content = edited(read(RECIPE), {**edits, **longer}, {}) | {"name": name, "seed": seed}
    del content["search"]
    path = work / f"{name}.yaml"
    path.write_text(json.dumps(content, indent=1))
    coralline(work, path.name)
    report = json.loads((work / "runs" / name / "report.json").read_text())
    measured = report["models"]["result"]["measurements"]
    result = {"accuracy": measured["accuracy"]["value"], "latency_ms": report["latency"]["measurement"]["value"]}
    print(f"{name}: {result}", file=sys.stderr)
    return result


def main() -> int:
    """Run everything that is missing, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=40, help="of the last trainings (default: %(default)s)")
    parser.add_argument("--work", type=Path, default=Path("runs") / "architectures")
    options = parser.parse_args()
    if repository.is_missing(SHARED):
        return 0
    work = options.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    if not (work / "data" / "groceries").exists():
        script, photos = ROOT / "calibration_data" / "groceries" / "prepare.py", SHARED / "data" / "grocery96.tar"
        command = [sys.executable, str(script), str(photos), "data/groceries"]
        subprocess.run(command, cwd=work, check=True, stdout=sys.stderr)
    (work / RECIPE.name).write_bytes(RECIPE.read_bytes())
    limit = read(RECIPE).value["search"]["constraints"]["latency_ms"]
    sampler, found = searched(work)
    networks = []
    for index, (builder, arguments, side) in enumerate(HAND_MADE):
        measured = trained(work, f"hand_made_{index}", architecture(builder, arguments, side))
        networks.append({"builder": builder, **arguments, "side": side, **measured})
    within = [index for index, network in enumerate(networks) if network["latency_ms"] <= limit]
    best = max(within, key=lambda index: networks[index]["accuracy"])
    result: dict[str, Any] = {"commit": commit(), "sampler": sampler, "epochs": options.epochs, "limit_ms": limit}
    result["made_by_hand"] = networks
    for row, edits in {"found": found, "best_by_hand": architecture(*HAND_MADE[best])}.items():
        runs = [trained(work, f"{row}_{seed}", edits, seed, options.epochs) for seed in range(options.seeds)]
        mean = statistics.mean(run["accuracy"] for run in runs)
        network = {"builder": edits[BUILDER], **edits["model", "arguments"], "side": edits[SIZE][0]}
        result[row] = {"architecture": network, "accuracy": round(mean, 4), "runs": runs}
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
