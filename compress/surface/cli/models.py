"""Commands for one model: import, check, estimate, legalize, inspect, verify-compiled, relink, debug, split."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from compress.core.errors import EXIT_PARTLY, EXIT_REFUSED, PipelineError
from compress.surface.cli.output import show, write, write_file
from compress.surface.cli.parser import add_command

SIZES = tuple(range(160, 641, 32))
"""The sizes of `check --sizes`: multiples of 32, as detectors with strides up to 32 need."""
LARGEST_SIZE = 4096
"""Chosen, to refuse typing errors."""

if TYPE_CHECKING:
    from compress.surface.cli.parser import Parser, Subparsers
    from compress.targets.base import PlacementSummary
    from compress.targets.edgetpu.inspection import InspectionResult
    from darwinn.explanation import Explanation


def add_parsers(subparsers: Subparsers) -> None:
    """Add the commands."""
    _add_import(subparsers)
    _add_check(subparsers)
    _add_estimate(subparsers)
    _add_legalize(subparsers)
    _add_inspect(subparsers)
    _add_verify_compiled(subparsers)
    _add_relink(subparsers)
    _add_debug(subparsers)
    _add_split(subparsers)


def _add_import(subparsers: Subparsers) -> None:
    summary = "Convert a model file to a Keras model, and compare the two"
    parser = add_command(subparsers, "import", summary, import_model)
    parser.add_argument("model", type=Path, metavar="MODEL", help="a model file, or the folder of a SavedModel")
    out = "file for the Keras model (default: it is not written)"
    parser.add_argument("-o", "--out", type=Path, metavar="OUT.keras", help=out)
    add_reading_options(parser)
    inputs = "samples for the comparison, in addition to random ones"
    parser.add_argument("--inputs", type=Path, metavar="FILE.npy", help=inputs)
    parser.add_argument("--layers", action="store_true", help="list the layers, with the shapes of their outputs")
    parser.add_json()


def add_reading_options(parser: Parser) -> None:
    """Add the options of commands that read a model file of any format."""
    parser.add_argument("--trust", action="store_true", help="allow the model to run code that it contains")
    parser.add_argument("--signature", metavar="NAME", help="the signature of a SavedModel that has several")
    parser.add_argument(
        "--shape",
        type=_shape,
        action="append",
        default=[],
        metavar="NAME=1,3,320,320",
        help="the shape of an input that is dynamic in an .onnx file; once for each such input",
    )


def add_range(parser: Parser) -> None:
    """Add the option for the values that the input of a model expects."""
    parser.add_argument(
        "--range",
        type=float,
        nargs=2,
        metavar=("LOW", "HIGH"),
        help="the values of a black and of a white pixel in the input of the model, such as 0 1, -1 1 or 0 255; for "
        "recordings those of the lowest and the highest sample (default: found, if the model says it)",
    )


def _shape(text: str) -> tuple[str, list[int]]:
    """Read the name of an input and its shape, [int, ...]."""
    name, _, dimensions = text.rpartition("=")
    parts = dimensions.split(",")
    if not name or not all(part.isdecimal() and int(part) for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not an input with its shape, such as images=1,3,320,320")
    return name, [int(part) for part in parts]


def import_model(options: argparse.Namespace) -> int:
    """`python -m compress import`."""
    from compress.surface.cli import import_model
    from compress.surface.cli.console import without_messages

    with without_messages():
        report = import_model.run(
            options.model,
            options.out,
            trust=options.trust,
            signature=options.signature,
            inputs=options.inputs,
            shapes=dict(options.shape),
            layers=options.layers,
        )
    show(report, import_model.describe(report), as_json=options.json)
    return 0


def _add_target(parser: Parser) -> None:
    parser.add_argument("--target", metavar="NAME", help="edgetpu (default) or cpu")


def _add_clock(parser: Parser) -> None:
    parser.add_argument("--clock", help="clock of the Edge TPU: max (default), or std, which is half of it")


def _add_compiler(parser: Parser) -> None:
    versions = "version of the compiler: 16.0 (default), 15.0, 2.1 or 1.0"
    parser.add_argument("--compiler", metavar="VERSION", help=versions)


def _add_check(subparsers: Subparsers) -> None:
    summary = "Predict which operators the Edge TPU compiler maps, and why"
    parser = add_command(subparsers, "check", summary, check)
    parser.add_argument("model", type=Path, help="a full-integer .tflite file; with --sizes any model file")
    parser.add_json()
    _add_target(parser)
    _add_compiler(parser)
    parser.add_argument(
        "--sizes",
        nargs="?",
        const=SIZES,
        type=_sizes,
        metavar="FROM:TO:STEP",
        help="check a model of images that is not quantized yet at several sizes of its input (160:640:32)",
    )
    parser.add_argument("--node-data", type=Path, metavar="OUT.json", help="write the placement for Model Explorer")
    parser.add_argument("--detector", default="auto", metavar="FAMILY", help="with --sizes: the family of a detector")
    parser.add_argument("--trust", action="store_true", help="with --sizes: allow the model to run its own code")
    parser.add_argument(
        "--all-subgraphs",
        action="store_true",
        help="also check operators after one that runs on the CPU, as the compiler does with -a",
    )


def check(options: argparse.Namespace) -> int:
    """`python -m compress check`."""
    from compress.surface import api

    if options.sizes is not None:
        if options.node_data is not None:
            raise PipelineError("--node-data is for one file, not for --sizes")
        return _check_sizes(options)
    result = api.check(
        options.model, target=options.target, compiler=options.compiler, all_subgraphs=options.all_subgraphs
    )
    if options.node_data is not None:
        from compress.model.tflite import graph
        from compress.report.placement import node_data
        from compress.results.placement import PlacementRecord

        content = node_data(graph.read(options.model), PlacementRecord.from_facts(result.to_json()))
        write_file(options.node_data, content, "the placement cannot be written")
    show(result.to_json(), result.describe(), as_json=options.json)
    return _placement_exit_code(result)


def _sizes(text: str) -> tuple[int, ...]:
    """Read the sizes `from:to:step`, or one size."""
    parts = text.split(":")
    if not 1 <= len(parts) <= 3 or not all(part.isdecimal() and 0 < int(part) <= LARGEST_SIZE for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not FROM:TO:STEP, such as 160:640:32")
    numbers = [int(part) for part in parts]
    step = numbers[2] if len(numbers) == 3 else 32
    sizes = tuple(range(numbers[0], numbers[min(len(numbers) - 1, 1)] + 1, step))
    if not sizes:
        raise argparse.ArgumentTypeError(f"{text!r} is not FROM:TO:STEP with TO of at least FROM")
    return sizes


def _check_sizes(options: argparse.Namespace) -> int:
    """Check a model at several sizes, and show each result at once."""
    from compress.surface.api import input_sizes
    from compress.surface.cli.console import without_messages

    checks = input_sizes.check_sizes(
        options.model,
        options.sizes,
        target=options.target,
        compiler=options.compiler,
        detector=options.detector,
        trust=options.trust,
    )
    results = []
    for _ in options.sizes:
        with without_messages():
            results.append(next(checks))
        if not options.json:
            write(input_sizes.describe(results[-1]))
    largest = max((result.size for result in results if result.is_whole), default=None)
    sizes = [result.to_json() for result in results]
    text = f"largest size that is mapped as a whole: {largest or 'none of these'}"
    show({"schema_version": 1, "sizes": sizes, "largest": largest}, text, as_json=options.json)
    return 0 if largest is not None else EXIT_PARTLY


def _placement_exit_code(placement: PlacementSummary) -> int:
    """Return 0 if all operators are mapped, `EXIT_PARTLY` if some are, `EXIT_REFUSED` if the compiler would fail."""
    if placement.failure is not None:
        return EXIT_REFUSED
    return 0 if placement.complete else EXIT_PARTLY


def _add_estimate(subparsers: Subparsers) -> None:
    summary = "Predict the latency of a model on the Edge TPU"
    parser = add_command(subparsers, "estimate", summary, estimate)
    parser.add_argument("model", type=Path, help="a full-integer .tflite file, not compiled")
    _add_target(parser)
    parser.add_argument("--host", required=True, help="usb3, usb2, pcie, devboard, pi4-usb3, pi5-usb3 or pi5-pcie")
    _add_clock(parser)
    parser.add_argument("--compiled", type=Path, metavar="FILE", help="the compiled model, for exact sizes")
    parser.add_json()


def estimate(options: argparse.Namespace) -> int:
    """`python -m compress estimate`."""
    from compress.surface import api

    prediction = api.estimate(
        options.model, options.host, target=options.target, clock=options.clock, compiled=options.compiled
    )
    show(prediction.to_json(), prediction.describe(), as_json=options.json)
    return 0


def _add_legalize(subparsers: Subparsers) -> None:
    summary = "Rewrite a model so that the compiler maps more of it"
    parser = add_command(subparsers, "legalize", summary, legalize)
    parser.add_argument("model", type=Path, metavar="IN", help="a full-integer .tflite file")
    parser.add_argument("out", type=Path, metavar="OUT", help="file for the result")
    inputs = ".npy, or .npz by input name: samples that each rewrite is verified on"
    parser.add_argument("--inputs", type=Path, metavar="FILE", help=inputs)
    parser.add_argument("--io", choices=("int8", "uint8"), help="type of inputs and outputs (the internal type)")
    _add_target(parser)
    _add_compiler(parser)
    parser.add_json()


def legalize(options: argparse.Namespace) -> int:
    """`python -m compress legalize`."""
    from compress.surface import api

    result = api.legalize(
        options.model,
        options.out,
        target=options.target,
        inputs=options.inputs,
        io=options.io,
        compiler=options.compiler,
    )
    show(result.to_json(), result.describe(), as_json=options.json)
    return _placement_exit_code(result.after)


def _add_inspect(subparsers: Subparsers) -> None:
    parser = add_command(subparsers, "inspect", "Show the contents of a compiled model", inspect)
    parser.add_argument("model", type=Path, help="a file written by edgetpu_compiler")
    against = "the .tflite file that it was compiled from, to compare"
    parser.add_argument("--against", type=Path, metavar="MODEL", help=against)
    parser.add_argument(
        "--explain",
        action="store_true",
        help="recover the operators, the memory over time and the transfers from the compiled file",
    )
    parser.add_argument(
        "-o", "--out", type=Path, metavar="PAGE.html", help="with --explain: write a page with a picture of them"
    )
    parser.add_json()


def inspect(options: argparse.Namespace) -> int:
    """`python -m compress inspect`."""
    if options.out is not None and not options.explain:
        raise PipelineError("-o is for the page of --explain", hint="add --explain")
    if options.against is not None and options.explain:
        raise PipelineError("--explain reads the compiled file alone", hint="remove --against")
    shown = _explain(options) if options.explain else _inspect(options)
    show(shown.to_json(), shown.describe(), as_json=options.json)
    return 0


def _inspect(options: argparse.Namespace) -> InspectionResult:
    from compress import targets
    from compress.model.tflite import graph
    from compress.targets.edgetpu import inspection

    inspected = inspection.inspect(options.model)
    if options.against is None:
        return inspection.InspectionResult(inspected, None)
    edgetpu = targets.load("edgetpu")
    rows = inspection.compare_with_prediction(inspected, graph.read(options.against), edgetpu)
    return inspection.InspectionResult(inspected, rows)


def _explain(options: argparse.Namespace) -> Explanation:
    from darwinn import compiled_file, explainer

    explanation = explainer.explain(compiled_file.read(options.model), options.model.name)
    if options.out is not None:
        from compress.surface import explanation_page

        write_file(options.out, explanation_page.page(explanation), "the page cannot be written")
    return explanation


def _add_verify_compiled(subparsers: Subparsers) -> None:
    summary = "Report whether a compiled file holds a model: every weight, bias and scale that can be found"
    parser = add_command(subparsers, "verify-compiled", summary, verify_compiled)
    parser.add_argument("model", type=Path, metavar="MODEL.tflite", help="the model, not compiled")
    parser.add_argument("compiled", type=Path, metavar="COMPILED.tflite", help="a file written by edgetpu_compiler")
    parser.add_json()


def verify_compiled(options: argparse.Namespace) -> int:
    """`python -m compress verify-compiled`."""
    from compress.model.tflite import graph
    from darwinn import compiled_file, verification

    result = verification.verify(compiled_file.read(options.compiled), graph.read(options.model))
    show(result.to_json(), result.describe(), as_json=options.json)
    if result.holds is None:
        return EXIT_PARTLY
    return 0 if result.holds else EXIT_REFUSED


def _add_relink(subparsers: Subparsers) -> None:
    summary = "Put a retrained model into the program of a compiled one, without the compiler"
    parser = add_command(subparsers, "relink", summary, relink)
    parser.add_argument("model", type=Path, metavar="NEW.tflite", help="the retrained model, not compiled")
    parser.add_argument(
        "--template",
        type=Path,
        nargs=2,
        required=True,
        metavar=("OLD.tflite", "OLD_COMPILED.tflite"),
        help="a model with the same layers, and what edgetpu_compiler made of it",
    )
    output = parser.add_mutually_exclusive_group(required=True)
    output.add_argument("-o", "--out", type=Path, metavar="NEW_COMPILED.tflite", help="file for the result")
    output.add_argument("--check", action="store_true", help="only report whether it is possible, and write nothing")
    parser.add_argument("--keep-names", action="store_true", help="keep the template's names of inputs and outputs")
    parser.add_json()


def relink(options: argparse.Namespace) -> int:
    """`python -m compress relink`."""
    from darwinn.relink import relink_files

    old, template = options.template
    result = relink_files(options.model, old, template, keep_names=options.keep_names)
    if result.content is not None and options.out is not None:
        write_file(options.out, result.content, "the compiled model cannot be written")
    show(result.to_json(), result.describe(), as_json=options.json)
    return EXIT_REFUSED if result.content is None else 0


def _add_debug(subparsers: Subparsers) -> None:
    parser = add_command(subparsers, "debug", "Rank the tensors of a run by their quantization error", debug)
    parser.add_argument("folder", type=Path, help="the folder of a run (runs/NAME), with its report.json")
    parser.add_json()


def debug(options: argparse.Namespace) -> int:
    """`python -m compress debug`."""
    from compress.pipeline import record

    rows = record.quantized_layers(options.folder)
    from compress.learning.quantization.debug import describe

    show({"schema_version": 1, "layers": rows}, describe(rows), as_json=options.json)
    return 0


def _add_split(subparsers: Subparsers) -> None:
    summary = "Split a model into segments for several Edge TPUs, and compare them with copies of the whole model"
    parser = add_command(subparsers, "split", summary, split)
    parser.add_argument("model", type=Path, metavar="MODEL", help="a full-integer .tflite file, not compiled")
    parser.add_argument("--tpus", type=int, required=True, metavar="N", help="the number of Edge TPUs, 2 to 16")
    parser.add_argument("--host", help="as of `estimate` (default: usb3)")
    _add_clock(parser)
    out = "folder for the segments, which must not exist (default: NAME_N_segments)"
    parser.add_argument("-o", "--out", type=Path, metavar="FOLDER", help=out)
    parser.add_argument(
        "--compare", action="store_true", help="compare with segments of equal parameter bytes, as the compiler makes"
    )
    parser.add_json()


def split(options: argparse.Namespace) -> int:
    """`python -m compress split`."""
    from compress import targets
    from compress.core.files import explain, publish_folder
    from compress.model.tflite import graph
    from compress.targets.edgetpu.several import split as splitting

    out = options.out or Path(f"{options.model.stem}_{options.tpus}_segments")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise PipelineError(
            f"{out} exists", allowed="a new or empty folder", hint="remove it, or choose another with -o"
        )
    edgetpu = targets.load("edgetpu")
    host, clock = edgetpu.cost.host(options.host), edgetpu.cost.clock(options.clock)
    result = splitting.split(graph.read(options.model), edgetpu, options.tpus, host, clock, compare=options.compare)
    try:
        publish_folder(out, result.all_files())
    except OSError as error:
        raise explain(error, "the segments cannot be written") from error
    text = f"{result.describe()}\nwritten to {out}; run them with: python3 runner.pyz pipeline {out}"
    show({**result.to_json(), "folder": str(out)}, text, as_json=options.json)
    return 0
