"""`export`: a model file to a bundle for the target, without a pipeline file."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compress.report.wording import number
from compress.surface.cli.models import add_range, add_reading_options
from compress.surface.cli.output import write, write_json
from compress.surface.cli.parser import PROGRAM, add_command

if TYPE_CHECKING:
    from compress.surface.cli.parser import Subparsers


def add_parsers(subparsers: Subparsers) -> None:
    """Add the command."""
    summary = "Quantize a model file, check it, compare it with the original, and pack a bundle"
    parser = add_command(subparsers, "export", summary, export)
    parser.add_argument("model", type=Path, metavar="MODEL", help="a model file, or the folder of a SavedModel")
    parser.add_argument(
        "--calibrate",
        type=Path,
        metavar="DATA",
        help="samples without labels: a folder of photos or WAV files, .npz or .npy (default: random samples)",
    )
    parser.add_argument(
        "-o", "--out", type=Path, metavar="FOLDER", help="folder for the results (default: MODEL-export)"
    )
    parser.add_argument("--target", metavar="NAME", help="edgetpu (default) or cpu")
    parser.add_argument(
        "--detector",
        metavar="FAMILY",
        help="the family of a detector whose file does not decode its boxes, such as yolov5 (default: recognized)",
    )
    parser.add_argument(
        "--labels",
        type=Path,
        metavar="FILE",
        help="the names of the classes: text, .csv, .yaml or .pbtxt (default: a fitting file next to the model)",
    )
    add_range(parser)
    add_reading_options(parser)
    parser.add_json()


def export(options: argparse.Namespace) -> int:
    """`python -m compress export`."""
    from compress.pipeline.acceptance import result_error
    from compress.pipeline.runner import LOG
    from compress.surface import api
    from compress.surface.api.exports import export_folder, run_name
    from compress.surface.cli.console import Console

    folder = export_folder(options.model, options.out)
    with Console(folder / run_name(options.model) / LOG) as console:
        console.line(f"coralline: {options.model} -> {folder}")
        result = api.export(
            options.model,
            calibrate=options.calibrate,
            out=folder,
            target=options.target,
            signature=options.signature,
            shapes=dict(options.shape),
            detector=options.detector,
            value_range=options.range,
            labels=options.labels,
            trust=options.trust,
            monitor=console,
        )
    if options.json:
        write_json(dict(result.facts))
    else:
        _print(result.facts, folder)
    if (error := result_error(result.run.record)) is not None:
        raise error
    return 0


def _print(facts: Any, folder: Path) -> None:
    """Print the summary."""
    if facts["preprocess"]:
        steps = ", ".join(f"{name} {json.dumps(step[name])}" for step in facts["preprocess"] for name in step)
        write(f"preprocessing: {steps} (guessed; data.preprocess in the pipeline file changes it)")
    if "box_format" in facts:
        write(f"a detector: its bundle answers with boxes: {facts['box_format']}")
    for output in facts["outputs"]:
        same = "" if output["agreement"] is None else f", equal decisions {output['agreement']:.3f}"
        error = f"largest difference {output['max_abs_error']:.3g}"
        write(f"output {output['name']} {output['shape']}: {output['sqnr_db']:.1f} dB SQNR, {error}{same}")
    if facts["placement"] is not None:
        write(facts["placement"]["summary"])
    for host, latency in facts["latency_ms"].items():
        value, low, high = (number(latency[key], "ms") for key in ("value", "low", "high"))
        write(f"{host}: {value} predicted ({low} to {high})")
    write(f"verdict: {facts['verdict']}")
    for warning in facts["warnings"]:
        write(f"- {warning}")
    write(f"report: {facts['files']['report.html']}")
    write(f"next: edit {folder / 'pipeline.yaml'} and run it again: {PROGRAM} {folder / 'pipeline.yaml'}")
