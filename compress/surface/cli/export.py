"""Commands that begin with a model file or with data, without a pipeline file: init, export, frigate."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compress.core.errors import PipelineError
from compress.report.wording import number
from compress.surface.cli.models import add_range, add_reading_options
from compress.surface.cli.output import show, write_file
from compress.surface.cli.parser import PROGRAM, add_command

if TYPE_CHECKING:
    from compress.surface.cli.parser import Subparsers


DEFAULT = Path("pipeline.yaml")


def add_parsers(subparsers: Subparsers) -> None:
    """Add the commands."""
    _add_init(subparsers)
    _add_export(subparsers)
    _add_frigate(subparsers)


def _add_init(subparsers: Subparsers) -> None:
    summary = "Look at data, and at a trained model, and write a first pipeline file"
    parser = add_command(subparsers, "init", summary, init)
    parser.add_argument("data", type=Path, metavar="DATA", help="a folder or file of samples")
    parser.add_argument("--model", type=Path, metavar="FILE", help="a trained model of any format, also quantized")
    parser.add_argument("--label", metavar="COLUMN", help="the column with the labels, of a table with several")
    parser.add_argument("--learn", action="store_true", help="let the device learn new classes from a few photos")
    add_range(parser)
    parser.add_argument("-o", "--out", type=Path, default=DEFAULT, metavar="FILE", help=f"the new file ({DEFAULT})")
    parser.add_argument("--trust", action="store_true", help="allow the model to run code that it contains")
    parser.add_json()


def _add_export(subparsers: Subparsers) -> None:
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


def _add_frigate(subparsers: Subparsers) -> None:
    parser = add_command(subparsers, "frigate", "Write a detector for Frigate's edgetpu detector", frigate)
    parser.add_argument("model", type=Path, metavar="MODEL", help="a .tflite file, compiled or not, or a bundle")
    parser.add_argument("-o", "--out", type=Path, required=True, metavar="FOLDER", help="folder for the files")
    labels = "the names of the classes: text, .csv, .yaml or .pbtxt; a bundle contains its own"
    parser.add_argument("--labels", type=Path, metavar="FILE", help=labels)
    types = "how Frigate reads the outputs (default: the fastest that the model has)"
    parser.add_argument("--model-type", choices=("ssd", "yolo-generic"), help=types)
    parser.add_json()


def init(options: argparse.Namespace) -> int:
    """Write the pipeline file, and list its steps as `--dry-run` does.

    Raises:
        PipelineError: the file exists already, or its name is not that of a YAML file.
        DataError: the data is not recognized.
        ModelError: the model cannot be read.
    """
    from compress.pipeline.resolution import preview
    from compress.pipeline.schema import load
    from compress.pipeline.starter import starter
    from compress.surface.api.exports import run_name
    from compress.surface.cli.console import without_messages

    out: Path = options.out
    if out.suffix not in (".yaml", ".yml"):
        raise PipelineError(f"OUT is {out.name}", where="-o", allowed="a name that ends in .yaml")
    if out.exists():
        raise PipelineError("the file exists already", where=str(out), hint="choose another name with -o, or delete it")
    data = options.data if options.data.suffix else options.data.resolve()
    name = run_name(data if out.name == DEFAULT.name else out)
    with without_messages():
        first = starter(
            options.data,
            options.model,
            out.parent,
            name,
            label=options.label,
            learns=options.learn,
            chosen_range=options.range,
            trust=options.trust,
        )
    write_file(out, first.text, "the pipeline file cannot be written")
    steps = [(step.id, status) for step, status in preview(load(out), Path("runs"))]
    facts = {"schema_version": 1, "out": str(out), "messages": list(first.messages)}
    facts["steps"] = [{"id": step, "status": status} for step, status in steps]
    rows = [f"{step:<20} {status}" for step, status in steps]
    lines = [*first.messages, f"written: {out}", *rows, f"next: {PROGRAM} {out}"]
    show(facts, "\n".join(lines), as_json=options.json)
    return 0


def export(options: argparse.Namespace) -> int:
    """`python -m compress export`."""
    from compress.pipeline.acceptance import result_error
    from compress.pipeline.execution import LOG
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
    show(dict(result.facts), _summary(result.facts, folder), as_json=options.json)
    if (error := result_error(result.run.record)) is not None:
        raise error
    return 0


def _summary(facts: Any, folder: Path) -> str:
    """Return the summary of an export as text."""
    lines = []
    if facts["preprocess"]:
        steps = ", ".join(f"{name} {json.dumps(step[name])}" for step in facts["preprocess"] for name in step)
        lines.append(f"preprocessing: {steps} (guessed; data.preprocess in the pipeline file changes it)")
    if "box_format" in facts:
        lines.append(f"a detector: its bundle answers with boxes: {facts['box_format']}")
    if facts.get("found"):
        found = facts["found"]
        lines.append(
            f"average precision {found['ap']['value']:.3f}, with the {found['objects']:,} objects that the original "
            "finds in the test samples as labels"
        )
    for output in facts["outputs"]:
        same = "" if output["agreement"] is None else f", equal decisions {output['agreement']:.3f}"
        error = f"largest difference {output['max_abs_error']:.3g}"
        lines.append(f"output {output['name']} {output['shape']}: {output['sqnr_db']:.1f} dB SQNR, {error}{same}")
    if facts["placement"] is not None:
        lines.append(facts["placement"]["summary"])
    for host, latency in facts["latency_ms"].items():
        value, low, high = (number(latency[key], "ms") for key in ("value", "low", "high"))
        lines.append(f"{host}: {value} predicted ({low} to {high})")
    lines.append(f"verdict: {facts['verdict']}")
    lines += [f"- {warning}" for warning in facts["warnings"]]
    lines.append(f"report: {facts['files']['report.html']}")
    lines.append(f"next: edit {folder / 'pipeline.yaml'} and run it again: {PROGRAM} {folder / 'pipeline.yaml'}")
    return "\n".join(lines)


def frigate(options: argparse.Namespace) -> int:
    """`python -m compress frigate`."""
    from compress.bundling import frigate

    result = frigate.export(options.model, options.out, options.labels, options.model_type)
    show(result.to_json(), frigate.describe(result), as_json=options.json)
    return 0
