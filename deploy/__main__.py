"""The runner: `python3 runner.pyz VERB BUNDLE …`, the same as `python3 -m deploy VERB BUNDLE …`.

Results on stdout, everything else on stderr. Exit codes: see `deploy.contract.errors`.
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
    ImageError,
)

Arguments = argparse.Namespace
Result = Dict[str, Any]


class Verb(NamedTuple):
    """One thing that the runner does.

    Attributes:
        help: one line.
        options: adds its arguments to the parser.
        run: does it: arguments in; what goes out as JSON, and the same for people.
        bundle: whether it takes a bundle.
    """

    help: str
    options: Callable[[argparse.ArgumentParser], None]
    run: Callable[[Arguments], Tuple[Result, str]]
    bundle: bool = True


def _model_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--role", choices=("original", "int8", "compiled"), help="this model and no other")
    _device_options(parser)


def _device_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="", help="cpu, usb, pci, usb:0, pci:1; any Edge TPU if not given")
    parser.add_argument("--threads", type=int, default=1, help="threads on the CPU")
    parser.add_argument("--library", default="libedgetpu.so.1", help="libedgetpu, by name or path")


def _run_options(parser: argparse.ArgumentParser) -> None:
    _model_options(parser)
    parser.add_argument(
        "images", nargs="*", metavar="IMAGE", help=".npy arrays, images or .wav files; the golden inputs if none"
    )
    parser.add_argument("--top", type=int, default=3, help="how many classes, or objects, to tell")


def _run(arguments: Arguments) -> Tuple[Result, str]:
    if arguments.top < 1:
        raise ArgumentError("--top %d tells nothing" % arguments.top, "use --top 1 or more")
    with _model(arguments) as model:
        named = [(path, _sample(path, model.bundle.decoding)) for path in arguments.images]
        if not named:
            named = [(name, model.bundle.array(name)) for name in model.bundle.manifest["golden"]["inputs"]]
        rows = []
        for name, image in named:
            rows.append({"image": name, "top": model(image).rows(arguments.top)})
        result = {"bundle": _identity(model.bundle), "model": model.describe(), "answers": rows}
    lines = ["%s: %s" % (row["image"], ", ".join(map(_told, row["top"]))) for row in rows]
    return result, "\n".join(lines)


def _told(row: Result) -> str:
    """One class and its score; of an object its box too."""
    text = "%s %s" % (row["label"], "not a number" if row["score"] is None else "%.4g" % row["score"])
    return text + (" at [%.3f, %.3f, %.3f, %.3f]" % tuple(row["box"]) if "box" in row else "")


def _bench_options(parser: argparse.ArgumentParser) -> None:
    _model_options(parser)
    parser.add_argument("--runs", type=int, default=200, help="timed inferences")
    parser.add_argument("--seconds", type=float, help="measure this long instead")
    parser.add_argument("--warmup", type=int, default=20, help="inferences before, not counted")
    parser.add_argument(
        "--soak", type=float, default=0.0, metavar="SECONDS", help="a long run after it: drift and heat"
    )
    parser.add_argument("--meter", metavar="FILE", help="a power meter's lines of time,watts")
    parser.add_argument("--no-cold", action="store_true", help="leave out the cold start")
    parser.add_argument("--samples", type=int, help="evaluation samples for the accuracy, at most; 0: none")


def _bench(arguments: Arguments) -> Tuple[Result, str]:
    from deploy import accuracy, benchmark
    from deploy.runtime import RuntimeOptions

    settings = benchmark.BenchmarkSettings(
        arguments.runs, arguments.seconds, arguments.warmup, arguments.soak, arguments.meter, not arguments.no_cold
    )
    with _model(arguments) as model:
        result = {"bundle": _identity(model.bundle), "benchmark": benchmark.bench(model, settings, _progress)}
    lines = [benchmark.text(result["benchmark"])]
    if arguments.samples != 0:
        options = RuntimeOptions(arguments.device, arguments.threads, library=arguments.library)
        result["golden"] = accuracy.verify(model.bundle, options)["golden"]
        result["accuracy"] = accuracy.compare(model.bundle, options, arguments.samples, _progress)
        lines += [accuracy.golden_text(result), accuracy.text(result["accuracy"])]
    return result, "\n".join(lines)


def _verify(arguments: Arguments) -> Tuple[Result, str]:
    from deploy import accuracy
    from deploy.runtime import RuntimeOptions, find

    opened = _opened(arguments)
    found = accuracy.verify(opened, RuntimeOptions(arguments.device, arguments.threads, library=arguments.library))
    result = dict(found, bundle=_identity(opened), runtime=find().describe())
    return result, "%s: every byte is what was packed\n%s" % (arguments.bundle, accuracy.golden_text(found))


def _serve_options(parser: argparse.ArgumentParser) -> None:
    _model_options(parser)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; others than localhost need a token")
    parser.add_argument("--port", type=int, help="TCP port (8080; none with --unix alone); 0: any")
    parser.add_argument("--unix", metavar="PATH", help="a Unix socket, mode 0660")
    parser.add_argument("--token-file", metavar="FILE", help="clients must send what is in it, as a bearer token")
    parser.add_argument("--queue", type=int, default=64, help="images that wait at most")
    parser.add_argument("--print-unit", action="store_true", help="print a systemd unit for this command, and end")


def _serve(arguments: Arguments) -> Tuple[Result, str]:
    from deploy import service

    return service.verb(arguments)


def _doctor_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--library", default="libedgetpu.so.1", help="libedgetpu, by name or path")


def _doctor(arguments: Arguments) -> Tuple[Result, str]:
    from deploy import doctor

    found = doctor.findings(doctor.look(arguments.library))
    rows = [dict(each._asdict()) for each in found]
    return {"findings": rows, "sound": all(each.severity != "error" for each in found)}, doctor.describe(found)


VERBS = {
    "run": Verb("answers for images", _run_options, _run),
    "bench": Verb("latency, energy and accuracy, measured here", _bench_options, _bench),
    "verify": Verb("the bundle is whole, and its models answer as they did on the host", _device_options, _verify),
    "serve": Verb("answers over HTTP/JSON, on TCP or a Unix socket", _serve_options, _serve),
    "doctor": Verb("what is wrong with this host, and the command that mends it", _doctor_options, _doctor, False),
}


def _identity(opened: Any) -> Result:
    """Which bundle it was."""
    manifest = opened.manifest
    models = {row["name"]: row["sha256"] for row in manifest["members"]}
    return {
        "name": manifest["name"],
        "coralline": manifest["coralline"],
        "models": {role: models[entry["file"]] for role, entry in manifest["models"].items()},
    }


def _sample(path: str, decoding: Any) -> Any:
    """A decoded sample: a .npy array, a .wav file, or an image file where Pillow or OpenCV is there to decode it.

    Raises:
        ImageError: it cannot be decoded.
        OSError: it cannot be read.
    """
    import numpy as np

    from deploy import images

    if path.endswith(".npy"):
        try:
            return np.load(path, allow_pickle=False)
        except (ValueError, EOFError) as error:
            raise ImageError("%s is not an array: %s" % (path, error), "write it with numpy.save")
    with open(path, "rb") as stream:
        content = stream.read()
    try:
        return images.of_file(content, decoding)
    except ImageError as error:
        raise ImageError("%s: %s" % (path, error.what), error.todo)


def _opened(arguments: Arguments) -> Any:
    """The verified bundle."""
    from deploy.contract import bundle, signature

    return bundle.read(arguments.bundle, signature.trusted(arguments.key))


def _model(arguments: Arguments) -> Any:
    """The model that the arguments ask for; on stderr why it is not on an Edge TPU, if that is so."""
    from deploy.model import tried
    from deploy.runtime import RuntimeOptions

    options = RuntimeOptions(arguments.device, arguments.threads, library=arguments.library)
    made = tried(_opened(arguments), arguments.role, options)
    if made.remark:
        print("runner: %s" % made.remark, file=sys.stderr)
    return made


def _progress(text: str) -> None:
    print("runner: %s" % text, file=sys.stderr)


def _written(path: str, content: str) -> None:
    """Writes a file so that it is there whole or not at all."""
    folder = os.path.dirname(os.path.abspath(path))
    number, name = tempfile.mkstemp(dir=folder, prefix=".results-")
    try:
        with os.fdopen(number, "w", encoding="utf-8") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="runner", description="Runs, measures and verifies bundles on a device.")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB")
    verbs.required = True
    for name, verb in VERBS.items():
        added = verbs.add_parser(name, help=verb.help, description=verb.help)
        if verb.bundle:
            added.add_argument("bundle", metavar="BUNDLE", help="a .coralline file")
            key = "the .pem it must be signed with"
            added.add_argument("--key", action="append", default=[], metavar="FILE", help=key)
        verb.options(added)
        added.add_argument("--json", action="store_true", help="the result as JSON on stdout")
        added.add_argument("--out", metavar="FILE", help="the result as JSON into a file, written whole or not at all")
    return parser


def main(given: Optional[List[str]] = None) -> int:
    """Runs one verb; returns its exit code."""
    arguments = _parser().parse_args(given)
    try:
        return _done(arguments)
    except KeyboardInterrupt:
        print("runner: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except OSError as error:
        return _failed(arguments, {"kind": "file", "what": str(error), "todo": "", "exit_code": EXIT_FILES}, str(error))
    except ValueError as error:  # BundleError, for one; others without a code are our own fault
        code = getattr(error, "exit_code", None)
        if code is None:
            raise
        kind = getattr(error, "kind", "changed" if code == 8 else "arguments")
        return _failed(arguments, {"kind": kind, "what": str(error), "todo": "", "exit_code": code}, str(error))
    except DeviceError as error:
        return _failed(arguments, error.to_json(), str(error))


def _done(arguments: Arguments) -> int:
    result, text = VERBS[arguments.verb].run(arguments)
    content = (
        json.dumps(dict(result, schema_version=1, verb=arguments.verb), indent=1, sort_keys=True, allow_nan=False)
        + "\n"
    )
    if arguments.out:
        _written(arguments.out, content)
    print(content if arguments.json else text, end="" if arguments.json else "\n", flush=True)
    error: Optional[DeviceError] = None
    if result.get("blocked"):
        error = EdgeTpuError(*(result["blocked"][key] for key in ("what", "todo", "kind")))
    if result.get("ok") is False:
        error = DifferentError("the models do not answer as they did on the host", "package again, or compare runtimes")
    if error is None:
        return EXIT_UNSOUND if result.get("sound") is False else 0
    print("runner: %s" % error, file=sys.stderr)
    return error.exit_code


def _failed(arguments: Arguments, error: Result, text: str) -> int:
    print("runner: %s" % text, file=sys.stderr)
    if arguments.json:
        print(json.dumps({"schema_version": 1, "verb": arguments.verb, "error": error}, indent=1, sort_keys=True))
    return int(error["exit_code"])


if __name__ == "__main__":
    sys.exit(main())
