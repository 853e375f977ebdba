"""Small things to test with: .tflite models, data, pipelines, and stages that need no TensorFlow.

`python tests/support/tiny.py ARGUMENTS` is `python -m compress ARGUMENTS` with these stages in addition to the shipped
ones.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from paths import ROOT
from pydantic import Field

from compress.core.artifact import MODEL_TFLITE, Artifact, Facts, Kind
from compress.core.errors import StageError
from compress.core.progress import Progress, RunStep, SilentProgress
from compress.learning.context import Context, Need
from compress.model.tflite import graph
from compress.pipeline.stage import Stage
from compress.pipeline.stages import STAGES as SHIPPED

# --- models -----------------------------------------------------------------------------


def classifier(
    inputs: tuple[int, int, int] = (4, 4, 1),
    classes: int = 3,
    *,
    int8: bool = True,
    filters: int = 4,
    seed: int = 0,
    favourite: int | None = None,
    gain: float = 1.0,
) -> bytes:
    """Return a .tflite file: CONV_2D 3x3 with ReLU, then FULLY_CONNECTED.

    The same seed gives the same weights in float and int8. The int8 one takes [0, 1] as -128 to 127.

    Args:
        inputs: height, width, channels of its input.
        classes: the number of its scores.
        int8: full integer (convolution per channel, dense per tensor), or float32.
        filters: channels of the convolution.
        seed: the seed of the weights.
        favourite: class whose bias is so large that it always has the highest score.
        gain: factor on the weights of the dense layer; with 0 the scores are its biases.
    """
    height, width, channels = inputs
    random = np.random.default_rng(seed)
    kernel = random.uniform(-1, 1, (filters, 3, 3, channels))
    dense = random.uniform(-1, 1, (classes, height * width * filters))
    dense -= dense.mean(axis=1, keepdims=True)  # otherwise one class wins whatever the input
    dense *= gain
    biases = random.uniform(-0.1, 0.1, filters), random.uniform(-0.1, 0.1, classes)
    high = float(np.abs(kernel).sum(axis=(1, 2, 3)).max())  # no activation is larger, for inputs up to 1
    if favourite is not None:
        biases[1][favourite] += 1000 * high
    model = TfliteBuilder(int8=int8)
    x = model.activation("image", [1, height, width, channels], (0.0, 1.0))
    hidden = model.activation("hidden", [1, height, width, filters], (0.0, high))
    scores = model.activation("scores", [1, classes], (-high * 8, high * 8))
    model.convolution(x, kernel, biases[0], hidden)
    model.dense(hidden, dense, biases[1], scores)
    return model.finish([x], [scores])


def macs(inputs: tuple[int, int, int] = (4, 4, 1), classes: int = 3, filters: int = 4) -> int:
    """Return the multiply-accumulates of `classifier`, counted by hand."""
    height, width, channels = inputs
    return height * width * filters * 9 * channels + height * width * filters * classes


class TfliteBuilder:
    def __init__(self, *, int8: bool) -> None:
        from ai_edge_litert import schema_py_generated as schema

        self.schema, self.int8 = schema, int8
        self.buffers = [schema.BufferT()]
        self.tensors: list[Any] = []
        self.codes: list[Any] = []
        self.operators: list[Any] = []
        self.scales: list[float] = []

    def tensor(
        self, name: str, shape: Sequence[int], kind: str, data: Any = None, scale: Any = None, zero: int = 0
    ) -> int:
        tensor = self.schema.TensorT()
        tensor.name, tensor.shape, tensor.type = name.encode(), list(shape), getattr(self.schema.TensorType, kind)
        tensor.buffer = 0
        if data is not None:
            buffer = self.schema.BufferT()
            buffer.data = np.frombuffer(np.ascontiguousarray(data).tobytes(), np.uint8)
            tensor.buffer = len(self.buffers)
            self.buffers.append(buffer)
        if scale is not None:
            scales = np.atleast_1d(scale).astype(np.float32)
            tensor.quantization = self.schema.QuantizationParametersT()
            tensor.quantization.scale = scales.tolist()
            tensor.quantization.zeroPoint = [zero] * len(scales)
        self.tensors.append(tensor)
        self.scales.append(float(np.max(scale)) if scale is not None else 1.0)
        return len(self.tensors) - 1

    def activation(self, name: str, shape: Sequence[int], span: tuple[float, float]) -> int:
        if not self.int8:
            return self.tensor(name, shape, "FLOAT32")
        scale = (span[1] - span[0]) / 255
        return self.tensor(name, shape, "INT8", scale=scale, zero=round(-128 - span[0] / scale))

    def weights(self, name: str, values: Any, bias: Any, input_index: int, *, per_channel: bool) -> tuple[int, int]:
        if not self.int8:
            kernel = self.tensor(name, values.shape, "FLOAT32", values.astype(np.float32))
            return kernel, self.tensor(f"{name}_bias", bias.shape, "FLOAT32", bias.astype(np.float32))
        axes = tuple(range(1, values.ndim)) if per_channel else None
        scale = np.abs(values).max(axis=axes, keepdims=per_channel) / 127
        kernel = self.tensor(name, values.shape, "INT8", np.rint(values / scale).astype(np.int8), scale.reshape(-1))
        step = scale.reshape(-1) * self.scales[input_index]
        return kernel, self.tensor(f"{name}_bias", bias.shape, "INT32", np.rint(bias / step).astype(np.int32), step)

    def convolution(self, input_index: int, values: Any, bias: Any, output_index: int) -> None:
        options = self.schema.Conv2DOptionsT()
        options.padding, options.strideH, options.strideW = self.schema.Padding.SAME, 1, 1
        options.fusedActivationFunction = self.schema.ActivationFunctionType.RELU
        inputs = [input_index, *self.weights("kernel", values, bias, input_index, per_channel=True)]
        self.operator("CONV_2D", inputs, output_index, options)

    def dense(self, input_index: int, values: Any, bias: Any, output_index: int) -> None:
        inputs = [input_index, *self.weights("dense", values, bias, input_index, per_channel=False)]
        self.operator("FULLY_CONNECTED", inputs, output_index, self.schema.FullyConnectedOptionsT())

    def operator(self, name: str, inputs: list[int], output_index: int, options: Any = None) -> None:
        code = self.schema.OperatorCodeT()
        code.builtinCode = code.deprecatedBuiltinCode = getattr(self.schema.BuiltinOperator, name)
        code.version = 3 if self.int8 else 1
        operator = self.schema.OperatorT()
        operator.opcodeIndex, operator.inputs, operator.outputs = len(self.codes), inputs, [output_index]
        if options is not None:
            kind = type(options).__name__.removesuffix("T")
            operator.builtinOptionsType, operator.builtinOptions = getattr(self.schema.BuiltinOptions, kind), options
        self.codes.append(code)
        self.operators.append(operator)

    def finish(self, inputs: list[int], outputs: list[int]) -> bytes:
        main = self.schema.SubGraphT()
        main.name, main.tensors, main.operators = b"main", self.tensors, self.operators
        main.inputs, main.outputs = inputs, outputs
        model = self.schema.ModelT()
        model.version, model.description = 3, b"tiny"
        model.operatorCodes, model.subgraphs, model.buffers = self.codes, [main], self.buffers
        return graph.serialize(SimpleNamespace(source=model))  # type: ignore[arg-type]


# --- data and pipelines -----------------------------------------------------------------


def data(path: Path, inputs: tuple[int, int, int] = (4, 4, 1), classes: int = 3) -> Path:
    """Write a .npz file: x float32 in [0, 1], y class indices, the same number of each class."""
    x = np.random.default_rng(1).random((90, *inputs), np.float32)
    np.savez(path, x=x, y=np.arange(90) % classes)
    return path


def project(folder: Path, stages: Sequence[Any] = ("compile", "package"), **keys: Any) -> Path:
    """Write a folder with model.tflite, data.npz and pipeline.yaml, which runs the model through `stages`.

    Args:
        folder: the folder; created if it does not exist.
        stages: the list of stages, as plain values.
        keys: other keys of the pipeline file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "model.tflite").exists():
        (folder / "model.tflite").write_bytes(classifier())
        data(folder / "data.npz")
    content = {
        "schema_version": 1,
        "name": "tiny",
        "model": {"file": "model.tflite"},
        "data": {"source": {"npz": {"file": "data.npz"}}},
        "stages": list(stages),
        "measure": {"latency": {"runs": 5}},
    } | keys
    path = folder / "pipeline.yaml"
    path.write_text(json.dumps(content, indent=1))  # JSON is YAML
    return path


# --- stages -----------------------------------------------------------------------------


class _Light(Stage):
    """A stage that takes a .tflite model and returns one."""

    consumes: ClassVar[frozenset[Kind]] = frozenset({Kind.TFLITE})
    produces: ClassVar[Kind] = Kind.TFLITE

    def pass_on(self, artifact: Artifact, context: Context) -> Facts:
        (context.folder / MODEL_TFLITE).write_bytes(artifact.file(MODEL_TFLITE).read_bytes())
        return {"bytes": artifact.file(MODEL_TFLITE).stat().st_size}


class Stamp(_Light):
    """Write a text into the model's description. No other setting changes the output."""

    name: ClassVar[str] = "stamp"
    text: str = ""
    """The text."""
    remark: str = ""
    """A setting that changes nothing in the output."""
    file: str = ""
    """A file to read the text from. Its content is not part of the key, so that runs with the same key can differ."""

    def run(self, artifact: Artifact, context: Context) -> Facts:
        text = Path(self.file).read_text() if self.file else self.text
        parsed = graph.read(artifact.file(MODEL_TFLITE))
        parsed.source.description = text.encode()
        (context.folder / MODEL_TFLITE).write_bytes(graph.serialize(parsed))
        return {"text": text}


class Seeded(_Light):
    """A stage whose result depends on the seed, the data and the original."""

    name: ClassVar[str] = "seeded"
    needs: ClassVar[frozenset[Need]] = frozenset({"seed", "data", "original"})

    def run(self, artifact: Artifact, context: Context) -> Facts:
        return {
            **self.pass_on(artifact, context),
            "original": context.original.digest,
            "samples": len(context.data.labels("train")),
        }


class Pause(_Light):
    """Create the file `started`, then wait until the file `go` is there, or until some seconds have passed."""

    name: ClassVar[str] = "pause"
    started: str
    """The file that shows that this stage runs."""
    go: str = ""
    """The file that ends the wait."""
    seconds: float = 60.0
    """The longest wait, in seconds."""

    def run(self, artifact: Artifact, context: Context) -> Facts:
        (context.folder / "half.tmp").write_bytes(b"half")
        Path(self.started).touch()
        end = time.monotonic() + self.seconds
        while time.monotonic() < end and not (self.go and Path(self.go).exists()):
            context.progress.update(1, 2, loss=0.5)
            time.sleep(0.01)
        (context.folder / "half.tmp").unlink()
        return self.pass_on(artifact, context)


class Fail(_Light):
    """Fail in the way `how` as long as the file `unless` is not there."""

    name: ClassVar[str] = "fail"
    how: str = "stage"
    """One of stage, library, interrupt, disk, memory, swallow and noise."""
    unless: str = "/nonexistent"
    """The file that lets the stage succeed."""

    def run(self, artifact: Artifact, context: Context) -> Facts:
        (context.folder / "half.tflite").write_bytes(b"half")
        print("noise from Python")
        os.write(1, b"noise from C on 1\n")
        os.write(2, b"noise from C on 2\n")
        if self.how == "swallow":
            _swallow_interruption()
        if not Path(self.unless).exists() and self.how != "noise":
            raise {
                "stage": StageError("there is nothing to do it with", allowed="something", hint="get something"),
                "library": ValueError("the first line\nthe second line"),
                "interrupt": KeyboardInterrupt(),
                "memory": MemoryError("Unable to allocate 9.00 TiB"),
                "disk": OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/somewhere"),
            }[self.how]
        (context.folder / "half.tflite").unlink()
        return self.pass_on(artifact, context)


def _swallow_interruption() -> None:
    """Turn Ctrl-C into an ImportError, as pybind11 does while it initializes a module."""
    try:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)
    except KeyboardInterrupt as error:
        raise ImportError("initialization failed") from error


class Exchange(_Light):
    """Replace the model by that of a file."""

    name: ClassVar[str] = "exchange"
    file: str
    """The .tflite file; its content is not part of the key."""

    def run(self, artifact: Artifact, context: Context) -> Facts:
        (context.folder / MODEL_TFLITE).write_bytes(Path(self.file).read_bytes())
        return {}


class Remade(_Light):
    """Replace the model by another `classifier`, with settings that a search can vary."""

    name: ClassVar[str] = "remade"
    filters: Annotated[int, Field(ge=1, le=64)] = 4
    gain: Annotated[float, Field(ge=0, le=4)] = 1.0
    weights: int = 0
    """The seed of the weights."""
    trouble: Literal["none", "error", "crash", "kill"] = "none"
    """The failure that replaces the result."""
    log: str = ""
    """A file that gets a line for each time that this stage runs; not part of the key."""

    def identity(self) -> dict[str, Any]:
        return {name: value for name, value in super().identity().items() if name != "log"}

    def run(self, artifact: Artifact, context: Context) -> Facts:
        if self.log:
            with Path(self.log).open("a") as stream:
                stream.write(f"{self.filters} {self.gain} {self.weights}\n")
        if self.trouble == "error":
            raise StageError("this cannot work")
        if self.trouble == "crash":
            os._exit(3)
        if self.trouble == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        content = classifier(filters=self.filters, gain=self.gain, seed=self.weights)
        (context.folder / MODEL_TFLITE).write_bytes(content)
        return {}


LIGHT: dict[str, type[Stage]] = {stage.name: stage for stage in (Stamp, Seeded, Pause, Fail, Exchange, Remade)}
STAGES: dict[str, type[Stage]] = {**SHIPPED, **LIGHT}


# --- runs -------------------------------------------------------------------------------


Coralline = Callable[..., subprocess.CompletedProcess[str]]
"""The fixture `coralline`: runs the command line in tmp_path."""


WORKER = "search-worker"
"""The argument of the process that runs the trials of a search."""


def command(*arguments: object) -> list[str]:
    """Return the command line with the light stages. Warnings are errors in it, too."""
    return [sys.executable, "-W", "error", __file__, *map(str, arguments)]


def environment() -> dict[str, str]:
    """Return the environment for a subprocess, with an empty PATH: it has no compiler of the vendor."""
    return {**os.environ, "PATH": "", "PYTHONPATH": str(ROOT)}


class Notes(SilentProgress):
    """A `compress.pipeline.execution.Monitor` and a `Progress` that store what they receive."""

    def __init__(self) -> None:
        self.statuses: dict[str, str] = {}
        self.worked: list[str] = []
        self.jobs: list[RunStep] = []
        self.noted: list[str] = []
        self.logged: list[str] = []

    @contextmanager
    def working(self, job: RunStep) -> Iterator[Progress]:
        self.worked.append(job.title)
        self.jobs.append(job)
        yield self

    def done(self, title: str, status: str, seconds: float | None, remark: str = "") -> None:
        self.statuses[title] = status

    def log(self, text: str) -> None:
        self.logged.append(text)

    def update(self, done: int, total: int, **metrics: float) -> None:
        assert 0 <= done <= total

    def note(self, text: str) -> None:
        self.noted.append(text)


def statuses(record: Mapping[str, Any]) -> dict[str, str]:
    return {row["id"]: row["status"] for row in record["stages"]}


def unsound(store: Path) -> list[str]:
    """Return what a store must not contain: incomplete artifacts, invalid keys, and files of unfinished work."""
    problems = []
    for folder in (store / "artifacts").iterdir():
        try:
            content = json.loads((folder / "artifact.json").read_bytes())
            sums = {path.name: _sha256(path.read_bytes()) for path in folder.iterdir() if path.name != "artifact.json"}
            named = {name: content[name] for name in ("kind", "files", "facts")}
            text = json.dumps(named, sort_keys=True, separators=(",", ":"))
            complete = content["files"] == sums and _sha256(text.encode()) == folder.name
        except (OSError, ValueError, KeyError):
            complete = False
        problems += [] if complete else [str(folder)]
    for key in (store / "keys").iterdir():
        line = key.read_text()
        problems += [] if len(line) == 65 and (store / "artifacts" / line.strip()).is_dir() else [str(key)]
    return problems + [str(path) for path in (store / "scratch").iterdir()]


def fill(folder: Path) -> None:
    """Fill the disk that a folder is on, with a file `filler`. Only for small disks."""
    with (folder / "filler").open("wb", buffering=0) as stream, suppress(OSError):
        while True:
            stream.write(bytes(4096))


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def kill_after(events: int, folder: str) -> None:
    """Kill this process (SIGKILL) right before its n-th operation on files in a folder."""
    left = [events]

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.chmod", "shutil.copyfile"):
            left[0] -= any(str(argument).startswith(folder) for argument in arguments)
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


if __name__ == "__main__":
    from compress.pipeline import stages
    from compress.pipeline.search import study
    from compress.pipeline.search.worker import serve
    from compress.surface.cli import search, search_worker
    from compress.surface.cli.main import main

    stages.STAGES.update(LIGHT)
    search.WORKER, search.PROGRAM = command(WORKER), command()
    study.HEARTBEAT_S, study.GRACE_S = 1, 4
    if "TINY_KILL_AFTER" in os.environ:
        kill_after(int(os.environ["TINY_KILL_AFTER"]), os.environ["TINY_KILL_FOLDER"])
    if sys.argv[1:2] == [WORKER]:
        serve(search_worker.display, *sys.argv[2:])
        sys.exit()
    sys.exit(main())
