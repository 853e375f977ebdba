"""The runner: `python3 runner.pyz COMMAND BUNDLE …`, the same as `python3 -m deploy COMMAND BUNDLE …`.

Results go to stdout, everything else to stderr. `deploy.contract.errors` lists the exit codes.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple

from deploy.contract.errors import (
    EXIT_FILES,
    EXIT_INTERRUPTED,
    EXIT_UNSOUND,
    ArgumentError,
    DeviceError,
    DifferentError,
    EdgeTpuError,
)

Arguments = argparse.Namespace
Result = Dict[str, Any]


class Command(NamedTuple):
    """A command of the runner.

    Attributes:
        help: one line for `--help`.
        options: adds its arguments to the parser.
        run: runs it; returns the result for JSON, and the same as text.
        bundle: whether it takes a bundle.
    """

    help: str
    options: Callable[[argparse.ArgumentParser], None]
    run: Callable[[Arguments], Tuple[Result, str]]
    bundle: bool = True


def _model_options(parser: argparse.ArgumentParser) -> None:
    roles = ("original", "int8", "compiled")
    parser.add_argument("--role", choices=roles, help="the model to use (default: compiled on an Edge TPU, else int8)")
    _device_options(parser)


def _device_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="", help="cpu, usb, pci, usb:0, pci:1, … (default: any Edge TPU)")
    parser.add_argument("--threads", type=int, default=1, help="number of CPU threads (default: 1)")
    _library_option(parser)


def _library_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--library", default="libedgetpu.so.1", help="name or path of libedgetpu (default: %(default)s)"
    )


def _run_options(parser: argparse.ArgumentParser) -> None:
    _model_options(parser)
    samples = (
        "images, folders of images, .npy arrays, .wav files, .npz for several inputs; - for the frames of a video from "
        "stdin, JPEG images one after the other (default: the golden inputs of the bundle)"
    )
    parser.add_argument("images", nargs="*", metavar="SAMPLE", help=samples)
    parser.add_argument("--top", type=int, default=3, help="number of classes, objects or values to print (default: 3)")
    draw = "draw the answer into the image; for several samples a folder"
    parser.add_argument("--draw", metavar="FILE", help=draw)
    least = "objects with a lower score are not drawn (default: 0.4)"
    parser.add_argument("--least-score", type=float, default=0.4, metavar="SCORE", help=least)
    raw = "the frames from stdin are raw RGB pixels of this size"
    parser.add_argument("--frame-size", metavar="WIDTHxHEIGHT", help=raw)


def _run(arguments: Arguments) -> Tuple[Result, str]:
    from deploy import samples
    from deploy.answers import to_json

    if arguments.top < 1:
        raise ArgumentError("--top is %d, and must be at least 1" % arguments.top, "use --top 1 or more")
    is_stream = samples.STDIN in arguments.images
    rows: List[Result] = []
    lines: List[str] = []
    count = 0
    with _model(arguments) as model:
        for name, sample in samples.named(arguments.images, model.bundle, arguments.frame_size):
            found = model(sample)
            answer = to_json(found, arguments.top)
            row = dict(answer, image=name)
            parts = [_row_text(each, arguments.top) for each in next(iter(answer.values()))]
            line = "%s: %s" % (name, ", ".join(parts) or "nothing")
            if arguments.draw:
                row["drawn"] = _draw(arguments, name, sample, found, model.bundle)
            count += 1
            if is_stream:  # it may have no end
                print(json.dumps(row, allow_nan=False) if arguments.json else line, flush=True)
            else:
                rows.append(row)
                lines.append(line)
        result = {"bundle": _identity(model.bundle), "model": model.describe(), "answers": rows}
    if is_stream:
        return dict(result, frames=count, is_stream=True), "%d frames" % count
    return result, "\n".join(lines)


def _draw(arguments: Arguments, name: str, sample: Any, answer: Any, opened: Any) -> str:
    """Draw an answer into its image; return the path of the new image."""
    from deploy import drawing

    path = arguments.draw
    stem, suffix = os.path.splitext(os.path.basename(name))
    is_single = len(arguments.images) == 1 and not os.path.isdir(arguments.images[0]) and arguments.images[0] != "-"
    if not is_single or os.path.isdir(path):
        os.makedirs(path, exist_ok=True)
        path = os.path.join(path, stem + (suffix if suffix.lower() in drawing.SUFFIXES else ".jpg"))
    if os.path.exists(path) and os.path.exists(name) and os.path.samefile(path, name):
        raise ArgumentError("--draw would overwrite the image %s" % name, "name another file or folder")
    image = drawing.drawn(sample, answer, opened, arguments.least_score)
    _write_atomically(path, drawing.encoded(image, os.path.splitext(path)[1]))
    return str(path)


def _row_text(row: Result, count: int) -> str:
    """Return a row of an answer as text: a class and its score, an object with its box, or an output."""
    if "values" in row:
        return "%s %r %s" % (row["name"], row["shape"], _values_text(row["values"], count))
    text = "%s %s" % (row["label"], "not a number" if row["score"] is None else "%.4g" % row["score"])
    return text + (" at [%.3f, %.3f, %.3f, %.3f]" % tuple(row["box"]) if "box" in row else "")


def _values_text(values: Any, count: int) -> str:
    """Return the first values of nested lists as text."""
    while isinstance(values, list) and values and isinstance(values[0], list):
        values = values[0]
    if not isinstance(values, list):
        values = [values]
    shown = ["not a number" if value is None else "%.4g" % value for value in values[:count]]
    return "[%s%s]" % (", ".join(shown), ", ..." if len(values) > count else "")


def _bench_options(parser: argparse.ArgumentParser) -> None:
    _model_options(parser)
    parser.add_argument("--runs", type=int, default=200, help="number of timed inferences (default: 200)")
    parser.add_argument("--seconds", type=float, help="measure for this time, instead of --runs")
    parser.add_argument(
        "--warmup", type=int, default=20, help="number of inferences before the timed ones (default: 20)"
    )
    soak = "after the measurement, run for this time and report drift and temperatures"
    parser.add_argument("--soak", type=float, default=0.0, metavar="SECONDS", help=soak)
    parser.add_argument("--meter", metavar="FILE", help="readings of a power meter, in lines of time,watts")
    parser.add_argument("--no-cold", action="store_true", help="do not measure the cold start")
    samples = "largest number of evaluation samples for the accuracy (default: all; 0: no accuracy)"
    parser.add_argument("--samples", type=int, help=samples)


def _bench(arguments: Arguments) -> Tuple[Result, str]:
    from deploy import accuracy, benchmark, golden

    settings = benchmark.BenchmarkSettings(
        arguments.runs, arguments.seconds, arguments.warmup, arguments.soak, arguments.meter, not arguments.no_cold
    )
    with _model(arguments) as model:
        result = {"bundle": _identity(model.bundle), "benchmark": benchmark.bench(model, settings, _progress)}
    lines = [benchmark.text(result["benchmark"])]
    if arguments.samples != 0:
        options = _runtime_options(arguments)
        result["golden"] = golden.verify(model.bundle, options)["golden"]
        result["accuracy"] = accuracy.compare(model.bundle, options, arguments.samples, _progress)
        lines += [golden.text(result), accuracy.text(result["accuracy"])]
    return result, "\n".join(lines)


def _verify(arguments: Arguments) -> Tuple[Result, str]:
    from deploy import golden
    from deploy.runtime import find

    opened = _opened(arguments)
    verified = golden.verify(opened, _runtime_options(arguments))
    result = dict(verified, bundle=_identity(opened), runtime=find().describe())
    return result, "%s: all checksums are correct\n%s" % (arguments.bundle, golden.text(verified))


def _serve_options(parser: argparse.ArgumentParser) -> None:
    _model_options(parser)
    host = "address to listen on; any but localhost needs --token-file (default: %(default)s)"
    parser.add_argument("--host", default="127.0.0.1", help=host)
    parser.add_argument("--port", type=int, help="TCP port; 0: any free port (default: 8080; with --unix: no TCP)")
    parser.add_argument("--unix", metavar="PATH", help="Unix socket to listen on, mode 0660")
    parser.add_argument("--token-file", metavar="FILE", help="file with the bearer token that clients must send")
    parser.add_argument("--queue", type=int, default=64, help="largest number of waiting samples (default: 64)")
    parser.add_argument("--print-unit", action="store_true", help="print a systemd unit for this command, and exit")


def _serve(arguments: Arguments) -> Tuple[Result, str]:
    from deploy import service

    return service.serve(arguments)


def _doctor(arguments: Arguments) -> Tuple[Result, str]:
    from deploy import doctor

    findings = doctor.findings(doctor.look(arguments.library))
    rows = [dict(finding._asdict()) for finding in findings]
    sound = all(finding.severity != "error" for finding in findings)
    return {"findings": rows, "sound": sound}, doctor.describe(findings)


COMMANDS = {
    "run": Command("run the model on samples, and print its answers", _run_options, _run),
    "bench": Command("measure latency, energy and accuracy on this device", _bench_options, _bench),
    "verify": Command("check the bundle, and compare its models with the golden outputs", _device_options, _verify),
    "serve": Command("serve predictions over HTTP/JSON, on TCP or a Unix socket", _serve_options, _serve),
    "doctor": Command("find problems of this host, with the command that fixes each", _library_option, _doctor, False),
}


def _identity(opened: Any) -> Result:
    """Return the name of a bundle, its Coralline version, and the SHA-256 of its models."""
    manifest = opened.manifest
    digests = {row["name"]: row["sha256"] for row in manifest["members"]}
    return {
        "name": manifest["name"],
        "coralline": manifest["coralline"],
        "models": {role: digests[entry["file"]] for role, entry in manifest["models"].items()},
    }


def _opened(arguments: Arguments) -> Any:
    """Open and verify the bundle."""
    from deploy.contract import bundle, signature

    return bundle.read(arguments.bundle, signature.trusted(arguments.key))


def _runtime_options(arguments: Arguments) -> Any:
    from deploy.runtime import RuntimeOptions

    return RuntimeOptions(arguments.device, arguments.threads, library=arguments.library)


def _model(arguments: Arguments) -> Any:
    """Load the model that the arguments select; print to stderr why it does not run on an Edge TPU."""
    from deploy.model import load_safely

    model = load_safely(_opened(arguments), arguments.role, _runtime_options(arguments))
    if model.remark:
        _progress(model.remark)
    return model


def _progress(text: str) -> None:
    print("runner: %s" % text, file=sys.stderr, flush=True)


def _write_atomically(path: str, content: bytes) -> None:
    folder = os.path.dirname(os.path.abspath(path))
    handle, name = tempfile.mkstemp(dir=folder, prefix=".results-")
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="runner", description="Run, measure and verify bundles on a device.")
    commands = parser.add_subparsers(dest="verb", metavar="COMMAND")
    commands.required = True
    for name, command in COMMANDS.items():
        subparser = commands.add_parser(name, help=command.help, description=command.help)
        if command.bundle:
            subparser.add_argument("bundle", metavar="BUNDLE", help="a .coralline file")
            key = "public key (.pem) that the bundle must be signed with; may be repeated"
            subparser.add_argument("--key", action="append", default=[], metavar="FILE", help=key)
        command.options(subparser)
        subparser.add_argument("--json", action="store_true", help="print the result as JSON")
        subparser.add_argument("--out", metavar="FILE", help="write the result as JSON to a file, atomically")
    return parser


def main(argv: Optional[List[str]] = None) -> int:
    """Run one command; return its exit code."""
    arguments = _parser().parse_args(argv)
    try:
        return _execute(arguments)
    except KeyboardInterrupt:
        _progress("interrupted")
        return EXIT_INTERRUPTED
    except OSError as error:
        return _fail(arguments, {"kind": "file", "what": str(error), "hint": "", "exit_code": EXIT_FILES}, str(error))
    except ValueError as error:  # a BundleError or KeyFileError has an exit code; any other is a bug
        code = getattr(error, "exit_code", None)
        if code is None:
            raise
        kind = getattr(error, "kind", "arguments")
        return _fail(arguments, {"kind": kind, "what": str(error), "hint": "", "exit_code": code}, str(error))
    except DeviceError as error:
        return _fail(arguments, error.to_json(), str(error))


def _execute(arguments: Arguments) -> int:
    result, text = COMMANDS[arguments.verb].run(arguments)
    result = dict(result, schema_version=1, verb=arguments.verb)
    content = json.dumps(result, indent=1, sort_keys=True, allow_nan=False)
    if arguments.out:
        _write_atomically(arguments.out, content.encode("utf-8") + b"\n")
    if arguments.json and result.get("is_stream"):  # one line, as for each frame
        content = json.dumps(result, sort_keys=True, allow_nan=False)
    print(content if arguments.json else text, flush=True)
    error: Optional[DeviceError] = None
    if result.get("blocked"):
        error = EdgeTpuError(*(result["blocked"][key] for key in ("what", "hint", "kind")))
    if result.get("ok") is False:
        what = "the outputs of the models differ from the golden outputs of the host"
        error = DifferentError(what, "package the bundle again, or install another TFLite runtime")
    if error is None:
        return EXIT_UNSOUND if result.get("sound") is False else 0
    _progress(str(error))
    return error.exit_code


def _fail(arguments: Arguments, error: Result, text: str) -> int:
    _progress(text)
    if arguments.json:
        print(json.dumps({"schema_version": 1, "verb": arguments.verb, "error": error}, indent=1, sort_keys=True))
    return int(error["exit_code"])


if __name__ == "__main__":
    sys.exit(main())
