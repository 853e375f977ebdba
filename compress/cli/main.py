"""The command line: arguments, progress, exit status; nothing else.

Usage: `python -m compress pipeline.yaml`, or one of COMMANDS; `--help` lists them all.

Results go to stdout, everything else to stderr.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from compress.errors import EXIT_INTERRUPTED, EXIT_PARTLY, EXIT_REFUSED, BudgetError, CorallineError, PipelineError

EPILOG = """
other commands:
  python -m compress import MODEL -o OUT.keras  reads a model; how exactly it was rebuilt, or what is refused
  python -m compress check MODEL.tflite       what the Edge TPU compiler will do, without it
  python -m compress estimate MODEL.tflite --host usb3  how long it will take there; --compiled FILE: with real bytes
  python -m compress data pipeline.yaml       what the data is: counts, shapes, ranges, files that cannot be read
  python -m compress sensitivity pipeline.yaml  what removing channels would do, layer by layer, in a report of its own
  python -m compress legalize IN.tflite OUT.tflite  the same function in operators that the compiler maps
  python -m compress inspect COMPILED.tflite  what a compiled model really holds; --against MODEL.tflite compares
  python -m compress debug runs/NAME          where quantization lost, tensor by tensor, the worst first
  python -m compress keygen NAME              a key pair: NAME.key signs here, NAME.pem goes to the devices
  python -m compress sign BUNDLE --key NAME.key  signs a bundle
  python -m compress doctor [--to ssh://HOST]   what is wrong with a host, and the command that mends it
  python -m compress frigate MODEL -o FOLDER    an SSD model (or bundle) for Frigate's edgetpu detector
  python -m compress header BUNDLE -o FILE      a C++ header for coralmicro
  python -m compress deploy BUNDLE --to ADDRESS  brings a bundle to devices; rollback --to ADDRESS goes back
  python -m compress results FILE             takes in what a device without network has measured
  python -m compress stages [--json]   every stage, its settings, defaults and meaning
  python -m compress schema            JSON schema of pipeline.yaml, for editors
  python -m compress operators         what runs on the Edge TPU, and the rules of `check`

exit codes:
  0 done   1 internal error   2 pipeline file or arguments   3 data   4 model   5 a stage failed
  6 disk or permission   7 over budget   8 a bundle cannot be signed   9 check: some operators stay on the CPU
  10 check: the compiler would refuse the model   14 doctor: errors were found
  15 a device was not reached, or keeps what it had   130 interrupted
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise PipelineError(message, todo="see --help")

    def _print_message(self, message: str, file: Any = None) -> None:
        _print(message.rstrip("\n"))


def _run_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = _Parser(
        prog="python -m compress",
        description="Takes a trained model to a Coral Edge TPU and proves what it lost and gained on the way.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("pipeline", type=Path, help="the pipeline file, or a command (below)")
    parser.add_argument("--dry-run", action="store_true", help="check the file and say what would be done")
    parser.add_argument("--out", type=Path, default=Path("runs"), metavar="DIR", help="where results go (runs)")
    parser.add_argument(
        "--force", action="append", default=[], metavar="STAGE", help="make this stage anew, by its id; repeatable"
    )
    parser.add_argument("--json", action="store_true", help="results as JSON on stdout")
    return parser.parse_args(arguments)


def _run(arguments: Sequence[str]) -> int:
    options = _run_arguments(arguments)
    from compress.pipeline.schema import load

    pipeline = load(options.pipeline)
    known = [step.id for step in pipeline.steps]
    for name in options.force:
        if name not in known:
            raise PipelineError(f"--force: there is no stage {name!r} in this pipeline", allowed=", ".join(known))
    if options.dry_run:
        return _dry_run(pipeline, options)
    from compress.cli.console import Console
    from compress.pipeline import runner as run

    with Console(options.out / pipeline.head.name / "run.log") as console:
        console.line(f"coralline: {options.pipeline} -> {options.out / pipeline.head.name}")
        record = run.run(pipeline, options.out, console, frozenset(options.force))
    _print_results(record, options.out / pipeline.head.name, as_json=options.json)
    broken = [row for row in record["budget"] if row["holds"] is False]
    if broken:
        over = "; ".join(
            f"{row['name']} is {row['measured']['value']:g} {row['unit']}, over the limit of {row['limit']:g} "
            f"by {row['measured']['value'] - row['limit']:g}"
            for row in broken
        )
        raise BudgetError(over, where="budget")
    return 0


def _dry_run(pipeline: Any, options: argparse.Namespace) -> int:
    from compress.pipeline.runner import preview

    steps = [
        {"id": step.id, "stage": step.stage.name, "status": status, "reason": step.skip}
        for step, status in preview(pipeline, options.out, frozenset(options.force))
    ]
    if options.json:
        _print(json.dumps({"schema_version": 1, "name": pipeline.head.name, "steps": steps}, indent=1))
        return 0
    for row in steps:
        _print(f"{row['id']:<20} {row['status']:<8} {row['reason'] or ''}".rstrip())
    return 0


def _print_results(record: dict[str, Any], folder: Path, *, as_json: bool) -> None:
    if as_json:
        _print(json.dumps(record, indent=1))
        return
    rows = ("accuracy", "ap", "ap50", "macs", "parameters", "size_bytes", "compressed_bytes", "latency_ms")
    models = record["models"]
    if models["original"] and models["result"]:
        _print(f"{'':<16} {'original':>12} {'result':>12}")
        for name in [name for name in rows if name in models["original"]["measurements"]]:
            values = [models[side]["measurements"][name]["value"] for side in ("original", "result")]
            shown = ["-" if v is None else f"{v:.4f}" if isinstance(v, float) else f"{v:,}" for v in values]
            _print(f"{name:<16} {shown[0]:>12} {shown[1]:>12}")
    if record["placement"]:
        _print(record["placement"]["reason"] or "compiled for the Edge TPU")
        _print(record["placement"]["summary"])
    _print(f"report: {folder / 'report.html'}")


def _stages(arguments: Sequence[str]) -> int:
    parser = _Parser(prog="python -m compress stages", description="Every stage with its settings.")
    parser.add_argument("--json", action="store_true", help="as JSON")
    options = parser.parse_args(arguments)
    from compress.cli import manual

    _print(json.dumps(manual.stages_json(), indent=1) if options.json else manual.stages().rstrip("\n"))
    return 0


def _schema(arguments: Sequence[str]) -> int:
    _Parser(prog="python -m compress schema", description="JSON schema of pipeline.yaml.").parse_args(arguments)
    from compress.cli import manual

    _print(json.dumps(manual.schema(), indent=1))
    return 0


def _operators(arguments: Sequence[str]) -> int:
    _Parser(prog="python -m compress operators", description="What runs on the Edge TPU.").parse_args(arguments)
    from compress.cli import manual

    _print(manual.operators().rstrip("\n"))
    return 0


def _check(arguments: Sequence[str]) -> int:
    parser = _Parser(prog="python -m compress check", description="What the Edge TPU compiler will do, without it.")
    parser.add_argument("model", type=Path, help="a full-integer .tflite file")
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.add_argument("--compiler", default="16.0", metavar="VERSION", help="16.0 (default), 15.0, 2.1 or 1.0")
    parser.add_argument("--all-subgraphs", action="store_true", help="as the compiler does with -a")
    options = parser.parse_args(arguments)
    from compress.targets import base
    from compress.targets.edgetpu import check
    from compress.tflite import graph

    edgetpu = base.load("edgetpu").compiled_by(options.compiler)
    found = check.check(graph.read(options.model), edgetpu, all_subgraphs=options.all_subgraphs)
    _print(json.dumps(found.to_json(), indent=1) if options.json else check.describe(found).rstrip("\n"))
    return _mapped(found.placement)


def _mapped(placement: Any) -> int:
    """The exit code that tells how much of a model is mapped."""
    if placement.failure is not None:
        return EXIT_REFUSED
    return EXIT_PARTLY if any(op.placement == "cpu" for op in placement.ops) else 0


def _legalize(arguments: Sequence[str]) -> int:
    parser = _Parser(prog="python -m compress legalize", description="Rewrites a model so that more of it is mapped.")
    parser.add_argument("model", type=Path, metavar="IN", help="a full-integer .tflite file")
    parser.add_argument("out", type=Path, metavar="OUT", help="where the result goes")
    parser.add_argument(
        "--inputs",
        type=Path,
        metavar="FILE",
        help=".npy, or .npz by input name: real inputs that rewrites are proved on",
    )
    parser.add_argument("--io", choices=("int8", "uint8"), help="type of inputs and outputs (as inside)")
    parser.add_argument("--compiler", default="16.0", metavar="VERSION", help="16.0 (default), 15.0, 2.1 or 1.0")
    parser.add_argument("--json", action="store_true", help="as JSON")
    options = parser.parse_args(arguments)
    from compress import files
    from compress.targets import base
    from compress.targets.edgetpu.legalize import describe, legalize
    from compress.tflite import comparison, graph

    model = graph.read(options.model)
    inputs = comparison.read_feeds(options.inputs, model) if options.inputs else []
    edgetpu = base.load("edgetpu").compiled_by(options.compiler)
    found = legalize(model, edgetpu, inputs, io=options.io and options.io.upper())
    files.write_atomically(options.out, graph.serialize(found.graph))
    _print(json.dumps(found.to_json(), indent=1) if options.json else describe(found).rstrip("\n"))
    return _mapped(found.after)


def _debug(arguments: Sequence[str]) -> int:
    parser = _Parser(prog="python -m compress debug", description="Where quantization lost, tensor by tensor.")
    parser.add_argument("folder", type=Path, help="the folder of a run (runs/NAME), with its report.json")
    parser.add_argument("--json", action="store_true", help="as JSON")
    options = parser.parse_args(arguments)
    from compress.pipeline import record

    rows = record.quantized_layers(options.folder)
    from compress.quantization.debug import describe

    _print(json.dumps({"schema_version": 1, "layers": rows}, indent=1) if options.json else describe(rows).rstrip("\n"))
    return 0


def _inspect(arguments: Sequence[str]) -> int:
    parser = _Parser(prog="python -m compress inspect", description="What a compiled model really holds.")
    parser.add_argument("model", type=Path, help="the file that edgetpu_compiler wrote")
    parser.add_argument("--against", type=Path, metavar="MODEL", help="the .tflite it was compiled from: to compare")
    parser.add_argument("--json", action="store_true", help="as JSON")
    options = parser.parse_args(arguments)
    from compress.targets.base import load
    from compress.targets.edgetpu import inspection

    found = inspection.inspect(options.model)
    result, text = found.to_json(), inspection.describe(found)
    if options.against is not None:
        rows = inspection.against(found, options.against, load("edgetpu"))
        result["against"] = rows
        text += "".join(
            f"{row['name']:<24} predicted {row['predicted']!s:>12}  real {row['real']!s:>12}\n" for row in rows
        )
    _print(json.dumps(result, indent=1) if options.json else text.rstrip("\n"))
    return 0


def _keygen(arguments: Sequence[str]) -> int:
    parser = _Parser(prog="python -m compress keygen", description="A key pair for signing bundles.")
    parser.add_argument("name", type=Path, metavar="NAME", help="NAME.key (private) and NAME.pem (public) are made")
    options = parser.parse_args(arguments)
    from compress.export import signing

    private, public = signing.generate(options.name)
    _print(f"{private}  signs bundles here; nobody else may have it")
    _print(f"{public}  goes to /etc/coralline/keys on the devices")
    return 0


def _sign(arguments: Sequence[str]) -> int:
    parser = _Parser(prog="python -m compress sign", description="Signs a bundle.")
    parser.add_argument("bundle", type=Path, help="a .coralline file")
    parser.add_argument("--key", type=Path, required=True, metavar="FILE", help="the private key, made by keygen")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where the signed bundle goes (the same file)")
    options = parser.parse_args(arguments)
    from compress.export import signing

    out = options.out or options.bundle
    _print(f"{out}: signed with {signing.sign(options.bundle, options.key, out)}")
    return 0


def _handed(name: str) -> Callable[[Sequence[str]], int]:
    """A command of `compress.cli.commands`."""

    def run(arguments: Sequence[str]) -> int:
        from compress.cli import commands

        command = commands.COMMANDS[name]
        parser = _Parser(prog=f"python -m compress {name}", description=command.help)
        command.arguments(parser)
        text, code = command.run(parser.parse_args(arguments))
        _print(text)
        return code

    return run


def _on_devices(name: str, arguments: Sequence[str]) -> int:
    """`deploy`, `rollback` and `results`."""
    from compress.fleet import arguments as known

    options = known.PARSERS[name](_Parser).parse_args(arguments)
    from compress.fleet import command

    result, text, code = command.COMMANDS[name](options, _progress)
    _print(json.dumps(result, indent=1) if options.json else text)
    return code


def _progress(text: str) -> None:
    with suppress(OSError):
        print(text, file=sys.stderr)


INTERRUPTED = "interrupted; run the same command to go on"
_signals: list[int] = []
"""The signals that came so far."""

COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "check": _check,
    "legalize": _legalize,
    "inspect": _inspect,
    "debug": _debug,
    "keygen": _keygen,
    "sign": _sign,
    **{name: _handed(name) for name in ("import", "data", "estimate", "sensitivity", "doctor", "frigate", "header")},
    "deploy": partial(_on_devices, "deploy"),
    "rollback": partial(_on_devices, "rollback"),
    "results": partial(_on_devices, "results"),
    "stages": _stages,
    "schema": _schema,
    "operators": _operators,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and gives its exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    _complete_streams()
    _signals.clear()
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _interrupt)
    as_json = "--json" in arguments
    try:
        if arguments and arguments[0] in COMMANDS:
            return COMMANDS[arguments[0]](arguments[1:])
        return _run(arguments)
    except CorallineError as error:
        if _signals:  # imports of C extensions turn an interruption into an error of their own
            return _fail(INTERRUPTED, EXIT_INTERRUPTED, as_json=as_json)
        as_json = as_json and not isinstance(error, BudgetError)
        return _fail(str(error), error.exit_code, as_json=as_json, facts=error.facts)
    except KeyboardInterrupt:
        return _fail(INTERRUPTED, EXIT_INTERRUPTED, as_json=as_json)


def _interrupt(number: int, frame: Any) -> NoReturn:
    _signals.append(number)
    raise KeyboardInterrupt


def _complete_streams() -> None:
    """Standard streams that were closed: without this, the next files opened would have their numbers."""
    while (handle := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(handle)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)


def _print(text: str) -> None:
    """Results, on stdout. That nobody reads them any more is no error.

    Raises:
        StoreError: stdout is a file, and the disk is full.
    """
    try:
        print(text, flush=True)
    except OSError as error:
        from compress.cli.console import to_nowhere
        from compress.files import explain

        to_nowhere(sys.stdout)
        if not isinstance(error, BrokenPipeError):
            raise explain(error, "the results cannot be written to stdout") from error


def _fail(message: str, exit_code: int, *, as_json: bool, facts: Mapping[str, Any] | None = None) -> int:
    with suppress(OSError):
        print(f"coralline: {message}", file=sys.stderr)
    if as_json:
        error = {"message": message, "exit_code": exit_code}
        with suppress(CorallineError):
            _print(json.dumps({"schema_version": 1, "status": "failed", "error": error, **(facts or {})}, indent=1))
    return exit_code
