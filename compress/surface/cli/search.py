"""`search`: find the settings of a pipeline with the best trade-offs."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from compress.core.errors import PipelineError, ResultError
from compress.surface.cli.output import note, write, write_json
from compress.surface.cli.parser import add_command

if TYPE_CHECKING:
    from compress.pipeline.search.space import Space
    from compress.pipeline.search.worker import WorkerProcess
    from compress.surface.cli.parser import Subparsers

WORKER = [sys.executable, "-P", "-m", "compress.surface.cli.search_worker"]
"""The program of the process that runs trials."""


def add_parsers(subparsers: Subparsers) -> None:
    """Add the command."""
    summary = "Try the settings of a pipeline's `search`, and report the best trade-offs"
    parser = add_command(subparsers, "search", summary, search)
    parser.add_argument("pipeline", type=Path, help="a pipeline file with the key `search`")
    parser.add_argument("--dry-run", action="store_true", help="check the file, and show what would be varied")
    parser.add_argument(
        "--storage", metavar="URL", help="a database for the trials, such as sqlite:///search.db (default: a journal)"
    )
    parser.add_argument(
        "--join", action="store_true", help="only run trials, for a search on another machine with the same --storage"
    )
    parser.add_out()
    parser.add_store()
    parser.add_json()

    summary = "Serve a database to the searches of many machines, through Optuna's gRPC proxy"
    parser = add_command(subparsers, "search-proxy", summary, proxy)
    parser.add_argument("storage", metavar="URL", help="the database, such as postgresql+psycopg://USER@HOST/DATABASE")
    parser.add_argument("--host", default="localhost", help="the address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=13000, help="the port (default: %(default)s)")


def worker_process(store: str | None = None) -> WorkerProcess:
    """Return the process that runs trials.

    Args:
        store: the location of the shared store, if there is one.
    """
    from compress.core import sandbox
    from compress.pipeline.search.worker import WorkerProcess

    return WorkerProcess([*WORKER, *([] if store is None else [store])], sandbox.environment())


def search(options: argparse.Namespace) -> int:
    """`python -m compress search`.

    Raises:
        ResultError: no trial meets all constraints and the budget, or the one that does cannot be used.
    """
    from compress.pipeline.search.run import SettingsSearch, read_plan
    from compress.pipeline.search.study import require_optuna
    from compress.pipeline.shared_store import connected
    from compress.report import search_page
    from compress.report.wording import count

    plan = read_plan(options.pipeline)
    require_optuna()
    if options.dry_run:
        return _dry_run(plan.space, as_json=options.json)
    connected(options.store)
    study = plan.study(options.out, options.storage, show=note)
    worker = worker_process(options.store)
    running = SettingsSearch(plan, options.out, study, worker, note, joins=options.join)
    if options.join:
        note(f"coralline: trials of {options.pipeline} for the search {study.name}")
        ran = running.join()
        write_json({"schema_version": 1, "trials": ran}) if options.json else write(f"{count(ran, 'trial')} run here")
        return 0
    note(f"coralline: {options.pipeline} -> {running.folder}, search {study.name}")
    record = running.run()
    if options.json:
        write_json(record.to_json())
    else:
        write(search_page.text(record).rstrip("\n"))
        write(f"report: {running.folder / 'search.html'}")
    if record.recommended is None:
        raise ResultError(record.reason, where="search", hint=record.hint)
    return 0


def proxy(options: argparse.Namespace) -> int:
    """`python -m compress search-proxy`.

    Raises:
        PipelineError: the database cannot be used, or the port is invalid or in use.
    """
    if not 1 <= options.port <= 65_535:
        raise PipelineError(f"{options.port} is not a port", where="--port", allowed="1 to 65535")
    from compress.pipeline.search.storage import opened, serve
    from compress.pipeline.search.study import require_optuna

    require_optuna()
    storage = opened(options.storage, note)
    serve(storage, options.host, options.port, note)
    return 0


def _dry_run(space: Space, *, as_json: bool) -> int:
    """Show what would be varied."""
    from compress.pipeline.search.run import varied

    settings = varied(space)
    if as_json:
        write_json({"schema_version": 1, "settings": settings, "combinations": space.count})
        return 0
    for name, values in settings.items():
        write(f"{name:<28} {values}")
    return 0
