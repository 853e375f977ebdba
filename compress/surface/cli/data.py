"""Commands that read the data of a pipeline: data, sensitivity."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING

from compress.core.progress import SilentProgress
from compress.surface.cli.output import note, write, write_json
from compress.surface.cli.parser import add_command

if TYPE_CHECKING:
    from compress.surface.cli.parser import Subparsers

NOTE_INTERVAL_S = 5


def add_parsers(subparsers: Subparsers) -> None:
    """Add the commands."""
    _add_data(subparsers)
    _add_sensitivity(subparsers)


def _add_data(subparsers: Subparsers) -> None:
    summary = "Summarize a pipeline's data: counts, shapes, unreadable files"
    parser = add_command(subparsers, "data", summary, data)
    parser.add_argument("pipeline", type=Path, help="a pipeline file; its data set is read, no stage is run")
    parser.add_json()
    manifest = "write the checksums of all files, for `manifest: FILE`"
    parser.add_argument("--write-manifest", type=Path, metavar="FILE", help=manifest)


class _NotedProgress(SilentProgress):
    """Progress as a line on stderr every few seconds."""

    def __init__(self) -> None:
        self.last_note = time.monotonic()

    def update(self, done: int, total: int, **metrics: float) -> None:
        del metrics
        if time.monotonic() - self.last_note >= NOTE_INTERVAL_S:
            self.last_note = time.monotonic()
            self.note(f"{done:,} of {total:,} samples are read")

    def note(self, text: str) -> None:
        note(text)


def data(options: argparse.Namespace) -> int:
    """`python -m compress data`."""
    from compress.core.errors import DataError
    from compress.data import examine
    from compress.data.summary import describe
    from compress.pipeline.schema import load

    dataset = load(options.pipeline).data
    lines = []
    if options.write_manifest:
        count = examine.write_manifest(dataset, options.write_manifest)
        lines.append(f"{options.write_manifest}: checksums of {count:,} files")
    summary, refused = examine.examine(dataset, _NotedProgress())
    if options.json:
        write_json(summary)
    else:
        write("\n".join([*lines, describe(summary)]))
    return DataError.exit_code if refused else 0


def _add_sensitivity(subparsers: Subparsers) -> None:
    summary = "Measure what removing channels costs, layer by layer"
    parser = add_command(subparsers, "sensitivity", summary, sensitivity)
    parser.add_argument("pipeline", type=Path, help="a pipeline file; its stages before `prune` are run")
    parser.add_argument(
        "--samples",
        type=int,
        default=512,
        metavar="N",
        help="number of training samples (default: 512)",
    )
    parser.add_out()
    parser.add_store()
    parser.add_json()


def sensitivity(options: argparse.Namespace) -> int:
    """`python -m compress sensitivity`."""
    from compress.surface.cli import sensitivity

    curves, report = sensitivity.measure(options.pipeline, options.samples, options.out, options.store)
    if options.json:
        write_json(curves)
    else:
        write(sensitivity.describe(curves, report))
    return 0
