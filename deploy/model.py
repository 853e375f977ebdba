"""A bundle as a function from images or sounds to answers, for applications::

    from deploy import Model

    model = Model("shelf.coralline")
    answer = model(image)            # a decoded image: numbers [height, width, channels]
    print(answer.label, answer.score, answer.top(3))

Of a model that finds objects the answer is `detection.Detections`::

    for found in model(image).above(0.5).top():
        print(found.label, found.score, found.box)

Runs on Python 3.7 with numpy and a TFLite runtime.
"""

from __future__ import annotations

import dataclasses
import threading
from typing import Any, Callable, Dict, Iterable, Iterator, List, Optional, Tuple

import numpy as np

from deploy import host, probe, runtime
from deploy.contract import bundle, signature
from deploy.contract.detection import Detector
from deploy.contract.errors import ArgumentError, EdgeTpuError, ImageError, LoadError
from deploy.contract.preprocessing import Array, PreprocessingError, dequantize, quantize
from deploy.measurement import finite
from deploy.runtime import InferenceSession, RuntimeOptions


class Answer:
    """What a model says of one image.

    Attributes:
        scores: float32 [outputs], in the order of `labels`.
        labels: the class names.
    """

    __slots__ = ("labels", "scores")

    def __init__(self, scores: Array, labels: List[str]) -> None:
        self.scores, self.labels = scores, labels

    @property
    def index(self) -> int:
        """The class with the highest score."""
        return int(self.scores.argmax())

    @property
    def label(self) -> str:
        """Its name; its number where the bundle has no name for it."""
        return self._name(self.index)

    @property
    def score(self) -> float:
        """Its score."""
        return float(self.scores.max())

    def top(self, count: int = 5) -> List[Tuple[str, float]]:
        """The names and scores of the best classes, the best first; of equal ones the first one first."""
        order = np.argsort(-self.scores, kind="mergesort")[:count]
        return [(self._name(int(index)), float(self.scores[index])) for index in order]

    def rows(self, count: int = 5) -> List[Dict[str, Any]]:
        """The same as plain maps of `label` and `score`, which is None where it is no number."""
        return [{"label": label, "score": finite(score)} for label, score in self.top(count)]

    def _name(self, index: int) -> str:
        return self.labels[index] if index < len(self.labels) else str(index)

    def __repr__(self) -> str:
        return "Answer(label=%r, score=%.6g)" % (self.label, self.score)


class Model:
    """A bundle, ready to answer. Any number of threads may use one at the same time: they wait for each other
    while the model runs, not while images are preprocessed.

    The bundle is verified first. Then the compiled model is taken where the bundle has one and an Edge TPU is
    on this host, otherwise the int8 model on the CPU; `remark` says why. An Edge TPU that is there and cannot
    be used is an error, not a silent detour. The Edge TPU is tried in a child process before, as it may crash or hang.

    Args:
        path: the .coralline file, or a verified `bundle.Bundle`.
        role: `original`, `int8` or `compiled`, to take no other one.
        device: `cpu`, or the Edge TPU to use: `usb`, `pci`, `usb:0`, `pci:1`; empty: any.
        threads: threads of the runtime on the CPU.
        kernels: `default` (the fastest), `reproducible` or `reference`: see `runtime.RESOLVERS`.
        library: libedgetpu, by name or path.

    Attributes:
        bundle: the verified bundle.
        role: the model that was taken.
        content: its .tflite file.
        session: that model in the runtime.
        trial: what the child process did before; None on the CPU, where only `tried` makes one.
        remark: why it runs on the CPU although the bundle has a compiled model; otherwise empty.

    Raises:
        BundleError: not a bundle, a changed one, or not signed with a key that this device trusts.
        ArgumentError: the bundle has no such model, or there is no such device.
        RuntimeLibraryError: there is no TFLite runtime.
        ModelError: the runtime refuses the model, or it is not the one that the manifest describes.
        EdgeTpuError: the Edge TPU cannot be used.
        OSError: the file cannot be read.
    """

    def __init__(
        self,
        path: Any,
        role: Optional[str] = None,
        device: str = "",
        threads: int = 1,
        kernels: str = "default",
        library: str = runtime.LIBRARY,
    ) -> None:
        self.bundle = path if isinstance(path, bundle.Bundle) else bundle.read(path, signature.trusted())
        options = RuntimeOptions(device, threads, kernels, library)
        self.role, options, self.remark = _choice(self.bundle, role, options)
        entry = self.bundle.manifest["models"][self.role]
        self.content = self.bundle.members[entry["file"]]
        self.trial = None if options.device == "cpu" else probe.check(self.content, options)
        self.session = _loaded(self.content, options)
        _check_tensors(self.session, entry, self.bundle.detector)
        self.labels: List[str] = list(self.bundle.labels)
        self._lock = threading.Lock()
        self._input_scale = _scale(self.session.input)
        self._scores = [_scores(detail) for detail in self.session.outputs]
        self._outputs = [int(detail["index"]) for detail in self.session.outputs]
        self._shape = tuple(int(side) for side in self.session.input["shape"])
        self._dtype = np.dtype(self.session.input["dtype"])

    def __call__(self, image: Array) -> Any:
        """The answer for one decoded image: an `Answer`, or `Detections` of a model that finds objects.

        Args:
            image: numbers [height, width, channels], or [height, width] for one channel, as the bundle's
                preprocessing takes them; or a sound [samples], float32 from -1 to 1 or int16.

        Raises:
            ImageError: it does not fit.
        """
        return self.answer(self.prepare(image))

    def batch(self, images: Iterable[Array]) -> List[Any]:
        """The answers for some images, in their order."""
        return [self(image) for image in images]

    def stream(self, images: Iterable[Array]) -> Iterator[Any]:
        """The answers for images that come one by one, each as soon as it is there."""
        return (self(image) for image in images)

    def prepare(self, image: Array) -> Array:
        """A decoded image as the model's input tensor: preprocessed, and quantized if the model is.

        Raises:
            ImageError: it does not fit.
        """
        try:
            values = self.bundle.preprocessing(np.asarray(image))
        except PreprocessingError as error:
            what = "the sample cannot be preprocessed: %s" % error
            raise ImageError(
                what, "give what the bundle's preprocessing takes: an image [height, width, channels], or a sound"
            )
        if (1,) + values.shape != self._shape:
            sizes = (list(values.shape), list(self._shape[1:]))
            what = "the sample has %r after preprocessing, and the model takes %r" % sizes
            raise ImageError(what, "give samples of that size, or package the model with a resize or length step")
        values = values[np.newaxis]
        if self._input_scale is None:
            return values.astype(self._dtype)
        return quantize(values, *self._input_scale, self._dtype)

    def answer(self, tensor: Array) -> Any:
        """The answer for an input tensor that `prepare` made.

        Raises:
            ImageError: the tensor has another shape or type.
        """
        session = self.session
        with self._lock:
            interpreter = session.interpreter
            try:
                interpreter.set_tensor(session.input_index, tensor)
                interpreter.invoke()
                stored = self._stored(interpreter)
            except (AttributeError, RuntimeError, ValueError) as error:
                raise self._refused(error)
        return self._answered(stored)

    def filled(self, fill: Callable[[Array], None]) -> Any:
        """The answer for an input tensor that the caller writes where the runtime reads it, without a copy.

        Args:
            fill: is given the input tensor's own memory, in the model's own type (see `session.input`), and writes
                all of it. It must not keep it: the runtime refuses to run while anyone has it.

        Raises:
            ImageError: `fill` kept the memory.
        """
        session = self.session
        with self._lock:
            if session.interpreter is None:
                raise self._refused(AttributeError())
            fill(session.view())
            try:
                session.interpreter.invoke()
            except RuntimeError as error:
                raise self._refused(error)
            stored = self._stored(session.interpreter)
        return self._answered(stored)

    def _stored(self, interpreter: Any) -> List[Array]:
        """Copies of the outputs, in the model's own types."""
        return [interpreter.get_tensor(index) for index in self._outputs]

    def _answered(self, stored: List[Array]) -> Any:
        if self.bundle.detector is None:
            return Answer(self._scores[0](stored[0]), self.labels)
        parts = [read(each).reshape(each.shape[1:]) for read, each in zip(self._scores, stored)]
        return self.bundle.detector(parts[0], parts[1], self.labels)

    def _refused(self, error: Exception) -> Exception:
        """What it means that the runtime did not take an input or did not run."""
        text = runtime.first_line(error)
        if self.session.interpreter is None:
            return ArgumentError("the model is closed", "make a new Model")
        if isinstance(error, ValueError):
            return ImageError("the input tensor does not fit: %s" % text, "make it with prepare()")
        if "reference to internal data" in str(error):
            return ImageError("the function that filled the input kept its memory", "let it write, and keep nothing")
        return EdgeTpuError("the model did not run: %s" % text, "python3 runner.pyz doctor", "refused")

    def describe(self) -> Dict[str, Any]:
        """Which model runs where and on what, as a plain map."""
        options = self.session.options
        return {
            "role": self.role,
            "device": "edge tpu %s" % (options.device or "(any)") if options.device != "cpu" else "cpu",
            "threads": options.threads,
            "kernels": options.kernels,
            "remark": self.remark,
            "runtime": self.session.runtime.describe(),
        }

    def close(self) -> None:
        """Gives the Edge TPU back, for other processes. Answers that are under way are finished first."""
        with self._lock:
            self.session.close()

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def tried(opened: bundle.Bundle, role: Optional[str], options: RuntimeOptions) -> Model:
    """The same `Model`, tried in a child process on the CPU too: a file that crashes the runtime is an error in words.

    An application that embeds `Model` need not pay for that at each start: `runner.pyz verify` does it once.

    Raises:
        ModelError, RuntimeLibraryError: the runtime refuses the model, or it crashes or hangs it.
        ArgumentError, EdgeTpuError: see `Model`.
    """
    chosen, place, _ = _choice(opened, role, options)
    if place.device == "cpu":
        probe.check(opened.members[opened.manifest["models"][chosen]["file"]], place)
    return Model(opened, role, options.device, options.threads, options.kernels, options.library)


def _choice(opened: bundle.Bundle, role: Optional[str], options: RuntimeOptions) -> Tuple[str, RuntimeOptions, str]:
    """The model to take, where to run it, and why on the CPU if the bundle has a compiled one."""
    models = opened.manifest["models"]
    if role is not None and role not in models:
        raise ArgumentError("the bundle has no model %r" % role, "use one of: %s" % ", ".join(sorted(models)))
    on_cpu = dataclasses.replace(options, device="cpu")
    if role in ("original", "int8"):
        if options.device not in ("", "cpu"):
            raise ArgumentError("%s models run on the CPU, not on %s" % (role, options.device), "leave out --device")
        return role, on_cpu, ""
    if role == "compiled":
        _try(opened, options)
        return role, options, ""
    remark = ""
    if "compiled" in models and options.device != "cpu":
        remark = _why_not(opened, options)
        if not remark:
            return "compiled", options, ""
    elif options.device not in ("", "cpu"):
        raise ArgumentError("the bundle has no compiled model for %s" % options.device, "leave out --device")
    return ("int8" if "int8" in models else "original"), on_cpu, remark


def _why_not(opened: bundle.Bundle, options: RuntimeOptions) -> str:
    """Empty if the compiled model can be used; the reason if there is no Edge TPU.

    Raises:
        EdgeTpuError: there is one, or one was asked for, and it cannot be used.
    """
    present = host.edge_tpus()
    if not present and not options.device:
        return "no Edge TPU is on USB or PCIe: the int8 model runs on the CPU"
    _try(opened, options)
    return ""


def _try(opened: bundle.Bundle, options: RuntimeOptions) -> None:
    entry = opened.manifest["models"]["compiled"]
    probe.check(opened.members[entry["file"]], options)


def _loaded(content: bytes, options: RuntimeOptions) -> InferenceSession:
    found = runtime.find()
    try:
        return InferenceSession(found, content, options)
    except (OSError, ValueError) as error:  # the probe could, and now it cannot be had any more
        raise EdgeTpuError("the Edge TPU was free a moment ago: %s" % runtime.first_line(error), "try again", "busy")


def _scale(detail: Dict[str, Any]) -> Optional[Tuple[float, int]]:
    """Scale and zero point of a quantized tensor; None for float."""
    if not np.issubdtype(detail["dtype"], np.integer):
        return None
    scale, zero_point = detail["quantization"]
    return float(scale), int(zero_point)


def _scores(detail: Dict[str, Any]) -> Callable[[Array], Array]:
    """What turns a stored output into float32 scores; for 8 bits by a table of all values, which is faster."""
    scale, dtype, shape = _scale(detail), np.dtype(detail["dtype"]), [int(side) for side in detail["shape"]]
    if scale is None:
        return lambda stored: stored.ravel().astype(np.float32)
    if dtype.itemsize > 1:
        return lambda stored: dequantize(stored.ravel(), *scale)
    table = dequantize(np.arange(256, dtype=np.uint8).view(dtype), *scale)
    take = table.take  # of an int8, negative numbers count from the end: that is where their values are
    if len(shape) == 2 and shape[0] == 1:
        return lambda stored: take(stored[0])
    return lambda stored: take(stored.ravel())


def _check_tensors(session: InferenceSession, entry: Dict[str, Any], detector: Optional[Detector]) -> None:
    """The model is the one that the manifest describes: shapes, types, scales."""
    ends = [("input", session.input), ("output", session.output)]
    if len(session.outputs) != (1 if detector is None else 2):
        raise LoadError("the model has %d outputs" % len(session.outputs), "package the model again")
    if detector is not None:
        ends.append(("boxes", session.outputs[0]))
        anchors, rows = len(detector.anchors), int(session.output["shape"][1])
        if rows != anchors:
            raise LoadError("the model has %d anchors, and the manifest %d" % (rows, anchors), "package it again")
    for end, detail in ends:
        wanted, (scale, zero_point) = entry[end], detail["quantization"]
        found = [[int(side) for side in detail["shape"]], np.dtype(detail["dtype"]).name, float(scale) or None]
        if found != [wanted["shape"], wanted["dtype"], wanted["scale"]] or int(zero_point) != wanted["zero_point"]:
            raise LoadError("the model's %s is not what the manifest says" % end, "package the model again")
        if np.issubdtype(detail["dtype"], np.integer) and not scale:
            raise LoadError("the model's %s is of integers without one scale" % end, "package another model")
