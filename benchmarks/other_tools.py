"""Coralline and other tools on the same models, samples and machine: `make bench-others`.

    python benchmarks/other_tools.py [--models NAME,…] [--tools NAME,…] [--force] [--timeout SECONDS]
    python benchmarks/other_tools.py --list | --print

Every tool runs in its own process and its own Python environment, which is made in build/others when it is needed: the
versions are in benchmarks/others/requirements. A worker (benchmarks/others/workers.py) gets a model and
calibration samples, and writes a .tflite file. All files are judged by one program in one runtime
(benchmarks/others/judge.py). A tool that cannot read a model, fails, crashes or takes too long is a result with its
reason, and so is an environment that cannot be made.

Results are written after each pair of a model and a tool, and finished pairs are kept: an interrupted run continues.
`--force` runs them again, which is necessary after a change of the code, a version or a model.

Writes benchmarks/results/other_tools.json, or `--results FILE`, and prints its tables; `--print` prints the tables of
finished pairs. Seconds are CPU time of the whole process, with the start of Python and all imports: the machine may do
other work.

Needs the shared files (CORALLINE_SHARED, or ../shared next to the project) and, once, a network.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import repository

import environments
import tool_tables
from paths import ROOT, SHARED
from subjects import SUBJECTS, Subject
from tool_runs import FAILED, LOG, MADE, Outcome, last_line, run
from tools import OURS, TOOLS, UNSUITABLE, Tool

from deploy.contract.durable_files import write_atomically

OTHERS = repository.FOLDER / "others"

RESULTS = repository.RESULTS / "other_tools.json"
WORK = ROOT / "build" / "others"
TIMEOUT = 2700
"""Seconds by the clock for one model and tool, on a machine that may do other work."""
MODEL, FLOAT = "model.tflite", "float.tflite"
JUDGE = OTHERS / "judge.py"


class Comparison:
    """The runs of all pairs, and their results.

    Args:
        work: the folder for environments, models and files.
        timeout: seconds for one pair.
        path: the file of the results.
    """

    def __init__(self, work: Path, timeout: float, path: Path = RESULTS) -> None:
        self.work, self.timeout, self.path = work.resolve(), timeout, path
        self.results: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        for name in ("environments", "versions", "subjects", "pairs"):
            self.results.setdefault(name, {})
        self.failed_environments: dict[str, str] = {}
        self.prepared_now: set[str] = set()

    def pair_folder(self, subject: str, tool: str) -> Path:
        """Return the folder of one pair."""
        return self.work / "pairs" / subject / tool.replace(", ", "_").replace(" ", "_")

    def unfinished(self, subject: Subject, tools: Sequence[Tool], *, force: bool) -> list[Tool]:
        """Return the tools to run, with the finished ones whose files are gone: other tools read these files."""
        if not force and all(self._pair(subject, tool) for tool in tools):
            return []
        return [tool for tool in tools if force or not self._is_there(subject, tool)]

    def _is_there(self, subject: Subject, tool: Tool) -> bool:
        pair = self._pair(subject, tool)
        return bool(pair) and (pair["status"] != MADE or (self.pair_folder(subject.name, tool.name) / MODEL).exists())

    def _pair(self, subject: Subject, tool: Tool) -> dict[str, Any]:
        pair: dict[str, Any] = self.results["pairs"].get(tool_tables.pair_name(subject.name, tool.name), {})
        return pair

    def prepared(self, subject: Subject) -> Path:
        """Return the folder of a model and its samples, which are prepared once in a run."""
        folder = self.work / "subjects" / subject.name
        if subject.name not in self.prepared_now:
            note(f"{subject.name}: the model and its samples are prepared")
            folder.mkdir(parents=True, exist_ok=True)
            with (folder / LOG).open("wb") as log:
                command = [sys.executable, str(OTHERS / "subjects.py"), subject.name, str(folder)]
                done = subprocess.run(command, stdout=log, stderr=log, env=project_environment())
            if done.returncode:
                raise SystemExit(f"{subject.name} cannot be prepared: {last_line(folder / LOG)}")
            self.prepared_now.add(subject.name)
        about = json.loads((folder / "subject.json").read_text())
        self.results["subjects"][subject.name] = {name: about[name] for name in ("what", "format", "samples")}
        return folder

    def python_of(self, tool: Tool) -> str:
        """Return the interpreter of a tool.

        Raises:
            UnavailableError: its environment cannot be made; it is tried once in a run.
        """
        if not tool.environment:
            self.results["versions"][tool.name] = importlib.metadata.version("coralline")
            return sys.executable
        self.results["versions"][tool.name] = tool.version
        if tool.environment in self.failed_environments:
            raise environments.UnavailableError(self.failed_environments[tool.environment])
        try:
            python = environments.made(environments.ENVIRONMENTS[tool.environment], self.work / "environments")
        except environments.UnavailableError as error:
            self.failed_environments[tool.environment] = str(error)
            raise
        return str(python)

    def run_pair(self, subject: Subject, tool: Tool) -> None:
        """Run one tool on one model, judge its file, and write the results."""
        source = self.prepared(subject)
        folder = self.pair_folder(subject.name, tool.name)
        shutil.rmtree(folder, ignore_errors=True)  # our runs would continue where the last one ended
        folder.mkdir(parents=True)
        float_files = [str(self.pair_folder(subject.name, name) / FLOAT) for name in tool.float_files_of]
        job = {"subject": str(source), "variant": tool.variant, "float_files": float_files}
        (folder / "job.json").write_text(json.dumps(job))
        try:
            python = self.python_of(tool)
        except environments.UnavailableError as error:
            outcome = Outcome(FAILED, f"its environment cannot be made: {error}")
        else:
            command = [python, str(OTHERS / "workers.py"), tool.worker, str(folder)]
            environment = tool_environment(python) if tool.environment else project_environment()
            outcome = run(command, folder, self.timeout, environment)
        pair = outcome.to_json()
        if outcome.status == MADE:
            pair |= self._judged(source, folder)
        self.results["pairs"][tool_tables.pair_name(subject.name, tool.name)] = pair
        self.write()
        note(f"{subject.name}, {tool.name}: {pair['status']} {pair['error'][:200]}".rstrip())

    def _judged(self, source: Path, folder: Path) -> dict[str, Any]:
        """Return the judgement of a file; one that cannot be judged has failed."""
        out = folder / "judgement.json"
        out.unlink(missing_ok=True)
        command = [sys.executable, str(JUDGE), str(source), str(folder / MODEL), str(out)]
        command += ["--photos", str(self.work / "photos")]
        with (folder / "judge.txt").open("wb") as log:
            done = subprocess.run(command, stdout=log, stderr=log, env=project_environment())
        if done.returncode or not out.exists():
            return {"status": FAILED, "error": f"its file cannot be judged: {last_line(folder / 'judge.txt')}"}
        return {"judgement": json.loads(out.read_text())}

    def measure_times(self, subject: Subject) -> None:
        """Measure the time on the CPU of all files of a model in turns, relative to ours."""
        paths = {name: self.pair_folder(subject.name, name) / MODEL for name in TOOLS}
        made_paths = {
            name: path for name, path in paths.items() if self._pair(subject, TOOLS[name]).get("status") == MADE
        }
        out = self.work / "pairs" / subject.name / "times.json"
        command = [sys.executable, str(JUDGE), str(self.work / "subjects" / subject.name), "--latency", str(out)]
        command += [f"{name}={path}" for name, path in made_paths.items() if path.exists()]
        out.unlink(missing_ok=True)
        subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=project_environment())
        times = json.loads(out.read_text()) if out.exists() else {}
        if OURS not in times:
            return
        for name, value in times.items():
            self._pair(subject, TOOLS[name])["cpu_ratio"] = round(value / times[OURS], 3)
        self.write()

    def write(self) -> None:
        """Write the results, in the order of the models and tools."""
        order = [
            tool_tables.pair_name(name, tool.name)
            for name, subject in SUBJECTS.items()
            for tool in applicable(subject, TOOLS)
        ]
        pairs, subjects = self.results["pairs"], self.results["subjects"]
        self.results["pairs"] = {name: pairs[name] for name in order if name in pairs}
        self.results["subjects"] = {name: subjects[name] for name in SUBJECTS if name in subjects}
        self.results["environments"] = {
            name: {"python": environment.python, "error": self.failed_environments.get(name, "")}
            for name, environment in environments.ENVIRONMENTS.items()
        }
        write_atomically(self.path, (json.dumps(self.results, indent=1) + "\n").encode())


def applicable(subject: Subject, tools: Iterable[str]) -> list[Tool]:
    """Return the tools that run on a model."""
    candidates = [TOOLS[name] for name in tools]
    return [tool for tool in candidates if subject.network or not tool.labelled_only]


def project_environment() -> dict[str, str]:
    """Return the environment variables of our own processes."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(repository.FOLDER)]),
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }


def tool_environment(python: str) -> dict[str, str]:
    """Return the variables of an activated environment; other tools must not see our packages."""
    hidden = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    shown = {name: value for name, value in os.environ.items() if name not in hidden}
    return {**shown, "PATH": os.pathsep.join([str(Path(python).parent), os.environ.get("PATH", "")])}


def note(text: str) -> None:
    """Report progress."""
    print(text, file=sys.stderr, flush=True)


def chosen(parser: argparse.ArgumentParser, text: str, allowed: Iterable[str]) -> list[str]:
    """Return the names in a list with semicolons or commas; all if it is empty."""
    known = list(allowed)
    names = [name.strip() for name in text.split(";" if ";" in text else ",") if name.strip()]
    for name in names:
        if name not in known:
            parser.error(f"{name!r} is not known; allowed: {'; '.join(known)}")
    return [name for name in known if name in names] if names else known


def main() -> int:
    """Run the pairs that are not finished, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="", help="some models, separated by commas or semicolons")
    parser.add_argument("--tools", default="", help="some tools, separated by semicolons")
    parser.add_argument("--force", action="store_true", help="run finished pairs again")
    parser.add_argument("--timeout", type=float, default=TIMEOUT, help=f"seconds for one pair ({TIMEOUT})")
    parser.add_argument("--work", type=Path, default=WORK, help=f"folder for environments and files ({WORK})")
    parser.add_argument("--results", type=Path, default=RESULTS, help=f"file of the results ({RESULTS})")
    parser.add_argument("--list", action="store_true", help="list the pairs, and whether they are finished")
    parser.add_argument("--print", action="store_true", help="print the tables of the results")
    options = parser.parse_args()
    models = [SUBJECTS[name] for name in chosen(parser, options.models, SUBJECTS)]
    names = chosen(parser, options.tools, TOOLS)
    comparison = Comparison(options.work, options.timeout, options.results.resolve())
    if options.print:
        print(tool_tables.tables(comparison.results, [*TOOLS], UNSUITABLE))
        return 0
    if repository.is_missing(SHARED):
        return 0
    for subject in models:
        tools = applicable(subject, names)
        waiting = comparison.unfinished(subject, tools, force=options.force)
        if options.list:
            for tool in tools:
                print(f"{subject.name:16} {tool.name:32} {'to do' if tool in waiting else 'finished'}")
            continue
        for tool in waiting:
            comparison.run_pair(subject, tool)
        if waiting:
            comparison.measure_times(subject)
    if not options.list:
        print(tool_tables.tables(comparison.results, [*TOOLS], UNSUITABLE))
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell ignores it
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        note("interrupted; the same command continues")
        sys.exit(130)
