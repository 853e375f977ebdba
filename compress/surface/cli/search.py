"""`search`: find the settings of a pipeline with the best trade-offs."""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from compress.core.errors import PipelineError, ResultError
from compress.surface.cli.output import note, show
from compress.surface.cli.parser import add_command

if TYPE_CHECKING:
    from compress.pipeline.search.space import Space
    from compress.pipeline.search.worker import WorkerProcess
    from compress.surface.cli.parser import Subparsers

WORKER = [sys.executable, "-P", "-m", "compress.surface.cli.search_worker"]
"""The program of the process that runs trials."""
PROGRAM = [sys.executable, "-P", "-m", "compress"]
"""The program of the other processes of this machine that run trials."""
MAX_WORKERS = 64
"""Processes of one command: each takes 1 to 4 GB of memory."""
PATIENCE_S = 60.0
"""Time for a process that joins the search to end after it was interrupted."""


def add_parsers(subparsers: Subparsers) -> None:
    """Add the command."""
    summary = "Try the settings of a pipeline's `search`, and report the best trade-offs"
    parser = add_command(subparsers, "search", summary, search)
    parser.add_argument("pipeline", type=Path, help="a pipeline file with the key `search`")
    parser.add_argument("--dry-run", action="store_true", help="check the file, and show what would be varied")
    parser.add_argument(
        "--workers", type=int, default=1, metavar="N", help="processes that run trials here (default: %(default)s)"
    )
    parser.add_argument(
        "--storage", metavar="URL", help="a database for the trials of several machines (default: a SQLite file)"
    )
    parser.add_argument(
        "--join", action="store_true", help="only run trials, for a search on another machine with the same --storage"
    )
    parser.add_out()
    parser.add_store()
    parser.add_json()


def worker_process(store: str | None = None) -> WorkerProcess:
    """Return the process that runs trials, with the location of the shared store if there is one."""
    from compress.core import sandbox
    from compress.pipeline.search.worker import WorkerProcess

    return WorkerProcess([*WORKER, *([] if store is None else [store])], sandbox.environment())


def search(options: argparse.Namespace) -> int:
    """`python -m compress search`.

    Raises:
        PipelineError: the file, the database or the number of processes is invalid.
        ResultError: no trial meets all constraints and the budget, or the one that does cannot be used.
    """
    from compress.pipeline.search.run import SettingsSearch, read_plan
    from compress.pipeline.search.study import require_optuna, sampler_name
    from compress.pipeline.shared_store import store_in
    from compress.report import search_page
    from compress.report.wording import count

    if not 1 <= options.workers <= MAX_WORKERS:
        raise PipelineError(f"{options.workers} processes", where="--workers", allowed=f"1 to {MAX_WORKERS}")
    plan = read_plan(options.pipeline)
    require_optuna()
    if options.dry_run:
        return _dry_run(plan.space, as_json=options.json)
    store_in(options.out, options.store)  # an error of the shared store comes before the first trial
    study = plan.study(options.out, options.storage, joins=options.join)
    running = SettingsSearch(plan, options.out, study, worker_process(options.store), note, joins=options.join)
    with _joining(options, plan.folder(options.out)):
        if options.join:
            note(f"coralline: trials of {options.pipeline} for the search {study.name}, {sampler_name()}")
            ran = running.join()
            show({"schema_version": 1, "trials": ran}, f"{count(ran, 'trial')} run here", as_json=options.json)
            return 0
        note(f"coralline: {options.pipeline} -> {running.folder}, search {study.name}, {sampler_name()}")
        record = running.run()
    text = f"{search_page.text(record)}\nreport: {running.folder / 'search.html'}"
    show(record.to_json(), text, as_json=options.json)
    if record.recommended is None:
        raise ResultError(record.reason, where="search", hint=record.hint)
    return 0


@contextmanager
def _joining(options: argparse.Namespace, folder: Path) -> Iterator[None]:
    """Start the other processes of this machine; they end with the search, or are interrupted with it."""
    command = [*PROGRAM, "search", str(options.pipeline), "--join", "--out", str(options.out)]
    for name, value in (("--storage", options.storage), ("--store", options.store)):
        command += [] if value is None else [name, value]
    processes = []
    try:
        for number in range(1, options.workers):
            folder.mkdir(parents=True, exist_ok=True)
            with (folder / f"worker-{number}.log").open("a") as log:
                processes.append(subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL))
        yield
    finally:
        for process in processes:
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGINT)
        for process in processes:
            try:
                process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                process.kill()


def _dry_run(space: Space, *, as_json: bool) -> int:
    """Show what would be varied."""
    from compress.pipeline.search.run import varied

    settings = varied(space)
    text = "\n".join(f"{name:<28} {values}" for name, values in settings.items())
    show({"schema_version": 1, "settings": settings, "combinations": space.count}, text, as_json=as_json)
    return 0
