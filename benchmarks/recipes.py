"""The recipes in models/*.yaml, run as a user runs them: `make bench-recipes`.

    python benchmarks/recipes.py [--only NAME] [--force] [--work FOLDER]
    python benchmarks/recipes.py --list | --write | --check | --dry-run

For each recipe, its script in calibration_data/ prepares the data, and `python -m compress` runs the file in a separate
folder and process. Some recipes have variants: another split, or another series. `--only` selects a row,
or rows by the start of their names. Rows that are finished are kept until their recipe changes; `--force` runs them
again.

Writes benchmarks/results/recipes.json, and from it the tables in docs/recipes/*.md, and the line
"Result" of each recipe. `--write` writes the pages again without a run; `--check` fails if they differ. `--dry-run`
prepares the data of every row, and checks its recipe with `python -m compress --dry-run`.

Peak memory is the maximum resident set of the process (`ru_maxrss`). CPU minutes are those of all its threads; minutes
are by the clock, on a machine that may do other work.

Needs the shared files (CORALLINE_SHARED, or ../shared next to the project).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import repository

import recipe_pages
from paths import ROOT, SHARED
from recipe_rows import PACKAGES, ROWS, Row

RESULTS = repository.RESULTS / "recipes.json"
WORK = ROOT / "runs" / "recipes"
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
USABLE = (0, 7)
"""Exit codes of a complete run; 7: over the budget, or not usable. The record has the reasons."""


def text_of(row: Row) -> str:
    """Return the recipe's text with the changes of the row.

    Raises:
        ValueError: a change does not fit the recipe.
    """
    text = (ROOT / "models" / f"{row.recipe}.yaml").read_text()
    for old, new in row.changes:
        if text.count(old) != 1:
            raise ValueError(f"{row.recipe}.yaml has {old!r} {text.count(old)} times, and should have it once")
        text = text.replace(old, new)
    return text


def digest(row: Row) -> str:
    """Return a digest of what is run: the recipe without its comments, and how its data is prepared."""
    lines = [
        line.partition(" #")[0].rstrip() for line in text_of(row).splitlines() if not line.lstrip().startswith("#")
    ]
    return hashlib.sha256(json.dumps([lines, row.prepare], default=str).encode()).hexdigest()[:16]


def prepare(row: Row, folder: Path) -> Path:
    """Write the recipe, its data and links to its models into a folder; return the recipe's path."""
    if folder.exists():
        shutil.rmtree(folder)
    (folder / "model").mkdir(parents=True)
    (folder / "data").mkdir()
    for name, source in row.models:
        (folder / "model" / name).symlink_to(SHARED / source)
    if row.packages:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder / PACKAGES)]
        subprocess.run([*command, *row.packages], check=True, stdout=sys.stderr)
    for script, source, target, *options in row.prepare:
        origin = folder / PACKAGES if source == PACKAGES else SHARED / source
        script_call = [ROOT / "calibration_data" / script, origin, folder / target, *options]
        subprocess.run([sys.executable, *map(str, script_call)], check=True, stdout=sys.stderr)
    path = folder / f"{row.recipe}.yaml"
    path.write_text(text_of(row))
    return path


def measured_run(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Run a recipe in a separate process; return its report and what the process took."""
    command = [sys.executable, "-m", "compress", path.name, "--json"]
    started = time.perf_counter()
    with (path.parent / "report.json").open("w") as stream:
        process = subprocess.Popen(command, cwd=path.parent, env=ENVIRONMENT, stdout=stream)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode not in USABLE:
        raise SystemExit(f"{path}: exit code {process.returncode}")
    cost = {
        "minutes": round((time.perf_counter() - started) / 60, 2),
        "cpu_minutes": round((usage.ru_utime + usage.ru_stime) / 60, 2),
        "peak_memory_mb": round(usage.ru_maxrss / 1024),
    }
    return json.loads((path.parent / "report.json").read_text()), cost


def checked(row: Row, work: Path) -> None:
    """Prepare a row, and check its recipe without a run."""
    path = prepare(row, work / row.name)
    command = [sys.executable, "-m", "compress", path.name, "--dry-run"]
    subprocess.run(command, cwd=path.parent, env=ENVIRONMENT, check=True, stdout=sys.stderr)


def differences(results: dict[str, Any]) -> list[str]:
    """Return the pages and recipes that do not show the results, and rows that were run with another recipe."""
    texts = recipe_pages.written(results).items()
    problems = [f"{path}: does not show the results" for path, text in texts if path.read_text() != text]
    changed = [row.name for row in ROWS if row.name in results and results[row.name]["digest"] != digest(row)]
    return problems + [f"{name}: was run with another recipe" for name in changed]


def alarms(folder: Path) -> dict[str, Any]:
    """Return the alarms of an autoencoder, as calibration_data/temperature/alarms.py counts them."""
    script = ROOT / "calibration_data" / "temperature" / "alarms.py"
    bundle = next((folder / "runs").glob("*/*.coralline"))
    command = [sys.executable, str(script), str(next((folder / "data").glob("*.npz"))), str(bundle), "--json"]
    done = subprocess.run(command, env=ENVIRONMENT, check=True, stdout=subprocess.PIPE, text=True)
    counts: dict[str, Any] = json.loads(done.stdout)
    return counts


def summary(row: Row, report: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a report that the tables show."""
    before, after = (report["models"][role]["measurements"] for role in ("original", "result"))
    changes, placement = report["comparison"]["measurements"], report["placement"]
    kept = ("value", "low", "high")
    names = [metric["name"] for metric in report["metrics"]]
    return {
        "metrics": {
            name: {
                "float": {key: before[name][key] for key in kept},
                "int8": {key: after[name][key] for key in kept},
                "note": after[name]["note"].partition(" split,")[0],
            }
            for name in names
        },
        "drop": {key: changes[f"{row.metric}_drop"][key] for key in (*kept, "note")}
        if f"{row.metric}_drop" in changes
        else None,
        "agreement": {key: changes["agreement"][key] for key in (*kept, "note")} if "agreement" in changes else None,
        "outputs": report["comparison"]["outputs"],
        "size_bytes": after["size_bytes"]["value"],
        "macs": after["macs"]["value"],
        "cpu_ms": [before["latency_ms"]["value"], after["latency_ms"]["value"]],
        "latency_ms": {
            host: [expected[key] for key in ("latency_ms", "low_ms", "high_ms")]
            for host, expected in placement["expected_latency"].items()
        },
        "placement": placement["summary"],
        "status": report["status"],
        "verdict": report["verdict"]["level"],
    }


def run(row: Row, work: Path) -> dict[str, Any]:
    """Return the result of a row."""
    folder = work / row.name
    path = prepare(row, folder)
    report, cost = measured_run(path)
    result = {"digest": digest(row), "split": row.split, **summary(row, report), **cost}
    if row.metric == "auc":
        result["alarms"] = alarms(folder)
    return result


def run_all(rows: Sequence[Row], results: dict[str, Any], options: argparse.Namespace) -> None:
    """Run the rows that are not finished, and write the results after each."""
    for row in rows:
        if not options.force and results.get(row.name, {}).get("digest") == digest(row):
            print(f"{row.name}: kept", file=sys.stderr)
            continue
        print(f"{row.name}: runs", file=sys.stderr, flush=True)
        result = run(row, options.work.resolve())
        results.update(read_results())  # another process may have run other rows
        results[row.name] = result
        in_order = {recipe.name: results[recipe.name] for recipe in ROWS if recipe.name in results}
        RESULTS.write_text(json.dumps(in_order, indent=1) + "\n")
        recipe_pages.write(results)


def read_results() -> dict[str, Any]:
    """Return the results of earlier runs by row."""
    results: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    return results


def main() -> int:
    """Run the recipes, and write the results and the pages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="NAME", help="the row of this name, or rows that begin with it")
    parser.add_argument("--force", action="store_true", help="run finished rows again")
    parser.add_argument("--work", type=Path, default=WORK, help=f"the folder of the runs; by default {WORK}")
    for name, about in (
        ("list", "list the rows"),
        ("write", "write the pages only"),
        ("check", "check that the pages show the results"),
        ("dry-run", "prepare the data and check the recipes"),
    ):
        parser.add_argument(f"--{name}", action="store_true", help=about)
    options = parser.parse_args()
    results = read_results()
    rows = [row for row in ROWS if row.name == options.only] or [
        row for row in ROWS if row.name.startswith(options.only)
    ]
    if not rows:
        parser.error(f"no row begins with {options.only!r}: --list lists them")
    if options.list:
        for row in rows:
            is_finished = results.get(row.name, {}).get("digest") == digest(row)
            print(f"{row.name:32} {'finished' if is_finished else 'to do'}")
        return 0
    if options.check:
        wrong = differences(results)
        print("\n".join(wrong), file=sys.stderr, end="\n" if wrong else "")
        return 1 if wrong else 0
    if options.write:
        recipe_pages.write(results)
        return 0
    if repository.is_missing(SHARED):
        return 0
    if options.dry_run:
        for row in rows:
            checked(row, options.work.resolve())
        return 0
    run_all(rows, results, options)
    print(recipe_pages.table(read_results()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
