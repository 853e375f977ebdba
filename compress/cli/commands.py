"""Commands that print what a module found, each with its arguments; what they do is in modules of their own."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Command:
    """A command of `python -m compress`.

    Attributes:
        help: one line.
        arguments: adds its arguments to the parser.
        run: does it: what is printed, and the exit code.
    """

    help: str
    arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], tuple[str, int]]


def _doctor_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--to", metavar="ssh://[USER@]HOST[:PORT][/FOLDER]", help="another host, over OpenSSH")
    parser.add_argument("--python", default="python3", metavar="PROGRAM", help="the interpreter there (python3)")
    parser.add_argument("--json", action="store_true", help="as JSON")


def _doctor(options: argparse.Namespace) -> tuple[str, int]:
    from compress.fleet import doctor

    return doctor.examine(options.to, options.python, as_json=options.json)


def _frigate_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=Path, metavar="MODEL", help="a .tflite file, compiled or not, or a bundle")
    parser.add_argument("-o", "--out", type=Path, required=True, metavar="FOLDER", help="where the files go")
    parser.add_argument("--labels", type=Path, metavar="FILE", help="class names, one a line; a bundle has its own")
    parser.add_argument("--json", action="store_true", help="as JSON")


def _frigate(options: argparse.Namespace) -> tuple[str, int]:
    from compress.export import frigate

    found = frigate.export(options.model, options.out, options.labels)
    return json.dumps(found.to_json(), indent=1) if options.json else frigate.describe(found), 0


def _header_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", type=Path, help="a .coralline file")
    parser.add_argument("-o", "--out", type=Path, required=True, metavar="FILE", help="the header, for example model.h")
    parser.add_argument("--role", choices=("compiled", "int8"), help="which model (the compiled one, if there is one)")


def _header(options: argparse.Namespace) -> tuple[str, int]:
    from compress.export import cpp_header

    role = cpp_header.export(options.bundle, options.out, options.role)
    return f"{options.out}: the {role} model of {options.bundle.name}; not tested on hardware", 0


def _estimate_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=Path, help="a full-integer .tflite file, not compiled")
    parser.add_argument("--host", required=True, help="usb3, usb2, pcie or devboard")
    parser.add_argument("--clock", default="max", help="max (default), or std: half of it")
    parser.add_argument("--compiled", type=Path, metavar="FILE", help="what edgetpu_compiler made of it: real bytes")
    parser.add_argument("--json", action="store_true", help="as JSON")


def _estimate(options: argparse.Namespace) -> tuple[str, int]:
    from compress.targets import base
    from compress.targets.edgetpu import inspection
    from compress.targets.edgetpu.estimate import describe, estimate
    from compress.tflite import graph

    edgetpu, model, compiled = base.load("edgetpu"), graph.read(options.model), None
    if options.compiled:
        compiled = inspection.inspect(options.compiled)
        inspection.refuse_another(compiled, model, edgetpu, str(options.compiled))
    found = estimate(model, edgetpu, options.host, options.clock, compiled)
    if options.json:
        return json.dumps(found.to_json(), indent=1), 0
    return describe(found, edgetpu.tables["latency"]["hosts"][options.host]["summary"]), 0


def _import_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=Path, metavar="MODEL", help="a model file, or the folder of a SavedModel")
    parser.add_argument("-o", "--out", type=Path, metavar="OUT.keras", help="where the Keras model goes (nowhere)")
    parser.add_argument("--trust", action="store_true", help="run the code that comes with the model, if there is any")
    parser.add_argument("--signature", metavar="NAME", help="which function of a SavedModel, where it offers several")
    parser.add_argument(
        "--inputs", type=Path, metavar="FILE.npy", help="real samples to compare on, beside random ones"
    )
    parser.add_argument(
        "--shape",
        type=_shape,
        action="append",
        default=[],
        metavar="NAME=1,3,320,320",
        help="the sides of an input that an .onnx file leaves open; once for each such input",
    )
    parser.add_argument("--json", action="store_true", help="as JSON")


def _shape(text: str) -> tuple[str, list[int]]:
    """An input's name and its sides."""
    name, _, told = text.rpartition("=")
    sides = told.split(",")
    if not name or not all(side.isdecimal() and int(side) for side in sides):
        raise argparse.ArgumentTypeError(f"{text!r} is no input with its sides, as images=1,3,320,320 is")
    return name, [int(side) for side in sides]


def _import(options: argparse.Namespace) -> tuple[str, int]:
    from compress.cli import import_model
    from compress.cli.console import quiet

    with open(os.devnull, "wb") as nowhere, quiet(nowhere.fileno()):  # what TensorFlow says of missing GPUs
        found = import_model.run(
            options.model,
            options.out,
            trust=options.trust,
            signature=options.signature,
            inputs=options.inputs,
            shapes=dict(options.shape),
        )
    return json.dumps(found, indent=1) if options.json else import_model.describe(found), 0


def _sensitivity_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("pipeline", type=Path, help="a pipeline file: its steps before `prune` are run")
    parser.add_argument("--samples", type=int, default=512, metavar="N", help="training samples to measure with (512)")
    parser.add_argument("--out", type=Path, default=Path("runs"), metavar="DIR", help="where results go (runs)")
    parser.add_argument("--json", action="store_true", help="as JSON")


def _sensitivity(options: argparse.Namespace) -> tuple[str, int]:
    from compress.cli import sensitivity

    found, report = sensitivity.measure(options.pipeline, options.samples, options.out)
    return json.dumps(found, indent=1) if options.json else sensitivity.describe(found, report), 0


def _data_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("pipeline", type=Path, help="a pipeline file: its data set is read, and nothing is run")
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.add_argument(
        "--write-manifest", type=Path, metavar="FILE", help="writes the checksums of all files, for `manifest: FILE`"
    )


class _Told:
    """Progress as a line on stderr now and then."""

    def __init__(self) -> None:
        self.told = time.monotonic()

    def update(self, done: int, total: int, **metrics: float) -> None:
        del metrics
        if time.monotonic() - self.told >= 5:
            self.told = time.monotonic()
            self.note(f"{done:,} of {total:,} samples are read")

    def note(self, text: str) -> None:
        print(text, file=sys.stderr)


def _data(options: argparse.Namespace) -> tuple[str, int]:
    from compress.data import examine
    from compress.data.summary import describe
    from compress.errors import DataError
    from compress.pipeline.schema import load

    data, lines = load(options.pipeline).data, []
    if options.write_manifest:
        count = examine.write_manifest(data, options.write_manifest)
        lines = [] if options.json else [f"{options.write_manifest}: checksums of {count:,} files"]
    found, refused = examine.examine(data, _Told())
    text = json.dumps(found, indent=1) if options.json else "\n".join([*lines, describe(found)])
    return text, DataError.exit_code if refused else 0


COMMANDS = {
    "import": Command("One model file as a Keras model, compared with where it came from.", _import_arguments, _import),
    "data": Command(
        "What a pipeline's data is: counts, shapes, ranges, files that cannot be read.", _data_arguments, _data
    ),
    "sensitivity": Command(
        "What removing channels would do to a model, layer by layer.", _sensitivity_arguments, _sensitivity
    ),
    "estimate": Command("How long a model will take on the Edge TPU, without one.", _estimate_arguments, _estimate),
    "doctor": Command("What is wrong with a host, and the command that mends it.", _doctor_arguments, _doctor),
    "frigate": Command("Files for Frigate's edgetpu detector.", _frigate_arguments, _frigate),
    "header": Command("A C++ header for coralmicro, not tested on hardware.", _header_arguments, _header),
}
