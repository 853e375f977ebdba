"""The runner: `python3 runner.pyz COMMAND BUNDLE …`, the same as `python3 -m deploy COMMAND BUNDLE …`.

Results go to stdout, everything else to stderr. `deploy.contract.errors` lists the exit codes.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple

from deploy.contract import printable
from deploy.contract.errors import (
    EXIT_INTERRUPTED,
    EXIT_PIPE,
    EXIT_UNSOUND,
    INSTALL,
    DeviceError,
    DifferentError,
    EdgeTpuError,
    ImageError,
    RuntimeLibraryError,
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


def _trust_option(parser: argparse.ArgumentParser) -> None:
    folder = "what this device trusts (default: /etc/coralline/trust, or ~/.config/coralline/trust)"
    parser.add_argument("--trust-folder", default="", metavar="FOLDER", help=folder)


def _run_options(parser: argparse.ArgumentParser) -> None:
    _model_options(parser)
    samples = (
        "images, folders of images, .npy arrays, .wav files, .npz for several inputs; - for the frames of a video from "
        "stdin, JPEG images one after the other; for a model that takes texts: files of one text each, folders of .txt "
        "files, - for the lines of stdin (default: the golden inputs of the bundle)"
    )
    parser.add_argument("images", nargs="*", metavar="SAMPLE", help=samples)
    parser.add_argument("--top", type=int, default=3, help="number of classes, objects or values to print (default: 3)")
    draw = "draw the answers into copies of the images: a file for one image, a folder for several"
    parser.add_argument("--draw", metavar="FILE", help=draw)
    least = "objects with a lower score are not drawn (default: 0.4)"
    parser.add_argument("--least-score", type=float, metavar="SCORE", help=least)
    raw = "the frames from stdin are raw RGB pixels of this size"
    parser.add_argument("--frame-size", metavar="WIDTHxHEIGHT", help=raw)
    tiles = "find small objects: run the detector on overlapping tiles, and on the whole image"
    parser.add_argument("--tiles", metavar="ROWSxCOLUMNS", help=tiles)
    overlap = "the part of a tile that its neighbour has too (default: 0.2)"
    parser.add_argument("--tile-overlap", type=float, metavar="FRACTION", help=overlap)
    _learnt_options(parser)


def _learnt_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of commands that use learnt classes."""
    _learnt_file_option(parser)
    parser.add_argument("--no-learnt", action="store_true", help="do not use the file with learnt classes")
    confidence = 'answer with calibrated confidences and "unknown"; the default if there are learnt classes'
    parser.add_argument("--confidence", action="store_true", help=confidence)


def _learnt_file_option(parser: argparse.ArgumentParser) -> None:
    learnt = "the file with learnt classes (default: next to the bundle, with the suffix .learnt)"
    parser.add_argument("--learnt", metavar="FILE", help=learnt)


def _run(arguments: Arguments) -> Tuple[Result, str]:
    from deploy.learn import command as learn_command
    from deploy.runner import predictions

    settings = predictions.parsed(arguments)
    with _model(arguments) as model:
        learn_command.use(model, arguments, _progress)
        answers = predictions.run(model, settings, lambda line: print(printable.line(line), flush=True))
        result = dict(answers, bundle=_identity(model.bundle), model=model.describe())
    if not settings.is_stream:
        return result, ""
    unit = "frame" if model.bundle.decoding.text_bytes is None else "line"
    return result, "%d %s" % (result["frames"], unit + "s" * (result["frames"] != 1))


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
    from deploy.runner import accuracy, benchmark, golden

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
    from deploy.runner import golden
    from deploy.runner.runtime import find

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
    host_name = "another name of this host in URLs; by default localhost and IP addresses. May be repeated"
    parser.add_argument("--allow-host", action="append", default=[], metavar="NAME", help=host_name)
    origin = "a web page that may use the service from its own site, such as https://shop.example. May be repeated"
    parser.add_argument("--allow-origin", action="append", default=[], metavar="ORIGIN", help=origin)
    rate = "requests per second of each client address; more get 429 (default: no limit)"
    parser.add_argument("--rate", type=float, default=0.0, metavar="NUMBER", help=rate)
    parser.add_argument("--queue", type=int, default=64, help="largest number of waiting samples (default: 64)")
    parser.add_argument("--print-unit", action="store_true", help="print a systemd unit for this command, and exit")
    _learnt_options(parser)


def _serve(arguments: Arguments) -> Tuple[Result, str]:
    from deploy.service import serve

    return serve.serve(arguments)


def _learn_options(parser: argparse.ArgumentParser) -> None:
    _model_options(parser)
    parser.add_argument("images", nargs="*", metavar="PHOTO", help="photos of the class, or folders of photos")
    parser.add_argument("--name", help="the name of the class: learn it from the photos, or add photos to it")
    parser.add_argument("--undo", action="store_true", help="undo the last change")
    parser.add_argument("--list", action="store_true", help="list the learnt classes, and all changes")
    parser.add_argument("--export", metavar="FILE", help="write the learnt classes to a file, for another device")
    parser.add_argument("--import", dest="import_file", metavar="FILE", help="add the classes of an exported file")
    _learnt_file_option(parser)


def _learn(arguments: Arguments) -> Tuple[Result, str]:
    from deploy.learn import command as learn_command

    with _model(arguments) as model:
        result, text = learn_command.run(model, arguments)
        return dict(result, bundle=_identity(model.bundle)), text


def _doctor(arguments: Arguments) -> Tuple[Result, str]:
    from deploy.doctor import command as doctor

    findings = doctor.findings(doctor.look(arguments.library))
    rows = [dict(finding._asdict()) for finding in findings]
    sound = all(finding.severity != "error" for finding in findings)
    return {"findings": rows, "sound": sound}, doctor.describe(findings)


def _update_options(parser: argparse.ArgumentParser) -> None:
    source = "a folder or memory card with the repository of `python -m compress trust`"
    parser.add_argument("source", metavar="SOURCE", help=source)
    first = "first contact: the fingerprint of the root that this device will trust"
    parser.add_argument("--first-root", default="", metavar="SHA256", help=first)
    parser.add_argument("--install", metavar="NAME", help="the listed bundle to install (default: only the metadata)")
    to = "the folder of the releases, as for `deploy` (required with --install)"
    parser.add_argument("--to", metavar="FOLDER", help=to)
    _trust_option(parser)


def _update(arguments: Arguments) -> Tuple[Result, str]:
    from deploy.runner import update

    return update.update(arguments)


def _pipeline_options(parser: argparse.ArgumentParser) -> None:
    segments = "the folder of `python -m compress split`, or the .tflite files of the segments in their order"
    parser.add_argument("segments", nargs="+", metavar="SEGMENT", help=segments)
    device = (
        "the device of a segment: usb:0, pci:1, cpu, …; once for each segment in their order, or once for all. With "
        "twice or more as many devices, as many copies take turns (default: the Edge TPUs :0, :1, … for compiled "
        "segments, else cpu)"
    )
    parser.add_argument("--device", action="append", default=[], metavar="DEVICE", help=device)
    parser.add_argument("--threads", type=int, default=1, help="number of CPU threads of each segment (default: 1)")
    _library_option(parser)
    parser.add_argument("--queue", type=int, default=2, help="waiting samples of each segment (default: 2)")
    samples = "samples as arrays [n, …]: .npy for one input, .npz by the names of inputs (default: random values)"
    parser.add_argument("--inputs", metavar="FILE", help=samples)
    parser.add_argument("--runs", type=int, default=200, help="number of samples; --inputs repeat (default: 200)")
    parser.add_argument(
        "--warmup", type=int, default=20, help="number of samples before the measured ones (default: 20)"
    )
    parser.add_argument("--save", metavar="FILE.npz", help="write the outputs for --inputs, each once, by name")


def _pipeline(arguments: Arguments) -> Tuple[Result, str]:
    from deploy.runner import pipeline

    return pipeline.run(arguments)


COMMANDS = {
    "run": Command("run the model on samples, and print its answers", _run_options, _run),
    "bench": Command("measure latency, energy and accuracy on this device", _bench_options, _bench),
    "verify": Command("check the bundle, and compare its models with the golden outputs", _device_options, _verify),
    "serve": Command("serve predictions over HTTP/JSON, on TCP or a Unix socket", _serve_options, _serve),
    "learn": Command("learn new classes from photos, without compiling", _learn_options, _learn),
    "pipeline": Command(
        "run the segments of a model on several devices at once, and measure them", _pipeline_options, _pipeline, False
    ),
    "update": Command(
        "accept signed metadata from a folder or card, and install a bundle", _update_options, _update, False
    ),
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
    from deploy.contract import bundle, trust

    return bundle.read(arguments.bundle, trust.find(arguments.trust_folder))


def _runtime_options(arguments: Arguments) -> Any:
    from deploy.runner.runtime import RuntimeOptions

    return RuntimeOptions(arguments.device, arguments.threads, library=arguments.library)


def _model(arguments: Arguments) -> Any:
    """Load the model that the arguments select; print to stderr why it does not run on an Edge TPU."""
    from deploy.runner.model import load_safely

    model = load_safely(_opened(arguments), arguments.role, _runtime_options(arguments))
    if model.remark:
        _progress(model.remark)
    return model


def _progress(text: str) -> None:
    print("runner: %s" % printable.lines(text), file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="runner", description="Run, measure and verify bundles on a device.")
    commands = parser.add_subparsers(dest="verb", metavar="COMMAND")
    commands.required = True
    for name, command in COMMANDS.items():
        subparser = commands.add_parser(name, help=command.help, description=command.help)
        if command.bundle:
            subparser.add_argument("bundle", metavar="BUNDLE", help="a .coralline file")
            _trust_option(subparser)
        command.options(subparser)
        subparser.add_argument("--json", action="store_true", help="print the result as JSON")
        subparser.add_argument("--out", metavar="FILE", help="write the result as JSON to a file, atomically")
    return parser


def _arguments(argv: Optional[List[str]]) -> Arguments:
    """Parse the command line. Samples may be in front of options and after them, which argparse does not support."""
    parser = _parser()
    arguments, others = parser.parse_known_args(argv)
    has_samples = hasattr(arguments, "images")
    if others and (not has_samples or any(other.startswith("-") and other != "-" for other in others)):
        parser.error("unrecognized arguments: %s" % " ".join(others))
    if has_samples:
        arguments.images += others
    return arguments


def main(argv: Optional[List[str]] = None) -> int:
    """Run one command; return its exit code."""
    arguments = _arguments(argv)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # names of files and labels may have characters that the terminal has not
            stream.reconfigure(errors="backslashreplace")
    try:
        return _execute(arguments)
    except KeyboardInterrupt:
        _progress("interrupted")
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Python would report the closed pipe again at its end.
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
        return EXIT_PIPE
    except OSError as error:
        from deploy.contract.errors import file_error

        explained = file_error(error)
        return _fail(arguments, explained.to_json(), str(explained))
    except ImportError as error:
        if "numpy" not in str(error):
            raise
        reason = (str(error).strip().splitlines() or [""])[0]
        without = RuntimeLibraryError("numpy cannot be imported: %s" % reason, INSTALL, "no_numpy")
        return _fail(arguments, without.to_json(), str(without))
    except ValueError as error:  # a BundleError has an exit code; any other is a bug
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
        from deploy.contract.durable_files import write_atomically

        write_atomically(arguments.out, content.encode("utf-8") + b"\n")
    if arguments.json and result.get("is_stream"):  # one line, as for each frame
        content = json.dumps(result, sort_keys=True, allow_nan=False)
    shown = content if arguments.json else text
    if shown:
        print(printable.lines(shown), flush=True)
    error: Optional[DeviceError] = None
    if result.get("blocked"):
        error = EdgeTpuError(*(result["blocked"][key] for key in ("what", "hint", "kind")))
    if result.get("ok") is False:
        what = "the outputs of the models differ from the golden outputs of the host"
        error = DifferentError(what, "package the bundle again, or install another TFLite runtime")
    if result.get("failed"):
        error = ImageError(result["failed"]["what"], result["failed"]["hint"])
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
