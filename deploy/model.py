"""The API for applications: a bundle as a function from images or sounds to answers::

    from deploy import Model

    model = Model("shelf.coralline")
    answer = model(image)            # a decoded image: array [height, width, channels]
    print(answer.label, answer.score, answer.top(3))

The answer of a detector is `detection.Detections`::

    for detected in model(image).above(0.5).top():
        print(detected.label, detected.score, detected.box)
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
    """The answer of a classifier for one sample.

    Attributes:
        scores: float32 [outputs], in the order of `labels`.
        labels: the class names.
    """

    __slots__ = ("labels", "scores")

    def __init__(self, scores: Array, labels: List[str]) -> None:
        self.scores = scores
        self.labels = labels

    @property
    def index(self) -> int:
        """The index of the class with the highest score."""
        return int(self.scores.argmax())

    @property
    def label(self) -> str:
        """The name of the class with the highest score; its index if the bundle has no name for it."""
        return self._name(self.index)

    @property
    def score(self) -> float:
        """The highest score."""
        return float(self.scores.max())

    def top(self, count: int = 5) -> List[Tuple[str, float]]:
        """Return the names and scores of the best classes, the best first; equal ones in the order of `labels`."""
        order = np.argsort(-self.scores, kind="mergesort")[:count]
        return [(self._name(int(index)), float(self.scores[index])) for index in order]

    def rows(self, count: int = 5) -> List[Dict[str, Any]]:
        """Return the same as plain maps of `label` and `score`; a score that is NaN or infinite is None."""
        return [{"label": label, "score": finite(score)} for label, score in self.top(count)]

    def _name(self, index: int) -> str:
        return self.labels[index] if index < len(self.labels) else str(index)

    def __repr__(self) -> str:
        return "Answer(label=%r, score=%.6g)" % (self.label, self.score)


class Model:
    """A verified bundle, with one of its models loaded. Any number of threads may share one object: they preprocess
    in parallel, and run the model one after another.

    If the bundle has a compiled model and this host has an Edge TPU, the compiled model is used. Otherwise the int8
    model runs on the CPU, and `remark` gives the reason. An Edge TPU that is connected but unusable is an error: the
    model does not silently run on the CPU. A child process tries the Edge TPU first, because it may crash or hang.

    Args:
        path: the .coralline file, or a verified `bundle.Bundle`.
        role: `original`, `int8` or `compiled`: the model to use.
        device: `cpu`, or the Edge TPU to use: `usb`, `pci`, `usb:0`, `pci:1`; empty: any Edge TPU.
        threads: threads of the runtime on the CPU.
        kernels: `default` (the fastest), `reproducible` or `reference`: see `runtime.RESOLVERS`.
        library: libedgetpu, by name or path.

    Attributes:
        bundle: the verified bundle.
        role: the model in use.
        content: its .tflite file.
        session: this model in the runtime.
        trial: the result of the child process; None on the CPU.
        remark: why the model runs on the CPU although the bundle has a compiled model; otherwise empty.

    Raises:
        BundleError: the file is not a bundle, was changed, or is not signed with a trusted key.
        ArgumentError: the bundle has no such model, or the device name is invalid.
        RuntimeLibraryError: no TFLite runtime is installed.
        LoadError: the runtime refuses the model, or the model differs from its description in the manifest.
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
        self.role, options, self.remark = _select(self.bundle, role, options)
        entry = self.bundle.manifest["models"][self.role]
        self.content = self.bundle.members[entry["file"]]
        self.trial = None if options.device == "cpu" else probe.check(self.content, options)
        self.session = _load(self.content, options)
        _check_tensors(self.session, entry, self.bundle.detector)
        self.labels: List[str] = list(self.bundle.labels)
        self._lock = threading.Lock()
        self._input_scale = _scale(self.session.input)
        self._to_scores = [_to_scores(detail) for detail in self.session.outputs]
        self._outputs = [int(detail["index"]) for detail in self.session.outputs]
        self._shape = tuple(int(length) for length in self.session.input["shape"])
        self._dtype = np.dtype(self.session.input["dtype"])

    def __call__(self, image: Array) -> Any:
        """Return the answer for one decoded sample: an `Answer`, or `Detections` if the model is a detector.

        Args:
            image: an image [height, width, channels], or [height, width] for one channel, in the form that the
                bundle's preprocessing takes; or a sound [samples], float32 from -1 to 1 or int16.

        Raises:
            ImageError: the sample has the wrong shape or type.
        """
        return self.answer(self.prepare(image))

    def batch(self, images: Iterable[Array]) -> List[Any]:
        """Return the answers for several samples, in their order."""
        return [self(image) for image in images]

    def stream(self, images: Iterable[Array]) -> Iterator[Any]:
        """Yield the answer for each sample of an iterator, such as a camera."""
        return (self(image) for image in images)

    def prepare(self, image: Array) -> Array:
        """Return a decoded sample as the model's input tensor: preprocessed, and quantized if the model is quantized.

        Raises:
            ImageError: the sample has the wrong shape or type.
        """
        try:
            values = self.bundle.preprocessing(np.asarray(image))
        except PreprocessingError as error:
            what = "the sample cannot be preprocessed: %s" % error
            raise ImageError(what, "pass an image [height, width, channels], or a sound [samples]")
        if (1,) + values.shape != self._shape:
            shapes = (list(values.shape), list(self._shape[1:]))
            what = "the sample has the shape %r after preprocessing, and the model takes %r" % shapes
            raise ImageError(what, "pass samples of this shape, or package the model with a resize or length step")
        values = values[np.newaxis]
        if self._input_scale is None:
            return values.astype(self._dtype)
        return quantize(values, *self._input_scale, self._dtype)

    def answer(self, tensor: Array) -> Any:
        """Return the answer for an input tensor from `prepare`.

        Raises:
            ImageError: the tensor has another shape or type.
        """
        session = self.session
        with self._lock:
            interpreter = session.interpreter
            try:
                interpreter.set_tensor(session.input_index, tensor)
                interpreter.invoke()
                outputs = self._read_outputs(interpreter)
            except (AttributeError, RuntimeError, ValueError) as error:
                raise self._error(error)
        return self._decode(outputs)

    def filled(self, fill: Callable[[Array], None]) -> Any:
        """Return the answer for an input that the caller writes into the memory of the runtime, without a copy.

        Args:
            fill: a function that is called with the memory of the input tensor, in the dtype of the model (see
                `session.input`), and writes all of it. It must not keep a reference: the runtime would refuse to run.

        Raises:
            ImageError: `fill` kept a reference to the memory.
        """
        session = self.session
        with self._lock:
            if session.interpreter is None:
                raise self._error(AttributeError())
            fill(session.view())
            try:
                session.interpreter.invoke()
            except RuntimeError as error:
                raise self._error(error)
            outputs = self._read_outputs(session.interpreter)
        return self._decode(outputs)

    def _read_outputs(self, interpreter: Any) -> List[Array]:
        """Return copies of the output tensors, in the dtype of the model."""
        return [interpreter.get_tensor(index) for index in self._outputs]

    def _decode(self, outputs: List[Array]) -> Any:
        if self.bundle.detector is None:
            return Answer(self._to_scores[0](outputs[0]), self.labels)
        boxes, scores = (decode(output).reshape(output.shape[1:]) for decode, output in zip(self._to_scores, outputs))
        return self.bundle.detector(boxes, scores, self.labels)

    def _error(self, error: Exception) -> Exception:
        """Return the named error for an exception of the runtime."""
        text = runtime.first_line(error)
        if self.session.interpreter is None:
            return ArgumentError("the model is closed", "create a new Model")
        if isinstance(error, ValueError):
            return ImageError("the input tensor has the wrong shape or type: %s" % text, "create it with prepare()")
        if "reference to internal data" in str(error):
            what = "the function that fills the input tensor kept a reference to it"
            return ImageError(what, "write to the tensor, and keep no reference")
        return EdgeTpuError("the model did not run: %s" % text, "python3 runner.pyz doctor", "refused")

    def describe(self) -> Dict[str, Any]:
        """Return role, device, kernels and runtime as a plain map."""
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
        """Release the Edge TPU, for other processes, after the inference that is running."""
        with self._lock:
            self.session.close()

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def load_safely(opened: bundle.Bundle, role: Optional[str], options: RuntimeOptions) -> Model:
    """Return the same `Model`, after a child process has tried it on the CPU too: a crash then gives an error message.

    An application that embeds `Model` does not need this at each start: `runner.pyz verify` does it once.

    Raises:
        LoadError, RuntimeLibraryError: the runtime refuses the model, or crashes or hangs.
        ArgumentError, EdgeTpuError: see `Model`.
    """
    selected, selected_options, _ = _select(opened, role, options)
    if selected_options.device == "cpu":
        probe.check(opened.members[opened.manifest["models"][selected]["file"]], selected_options)
    return Model(opened, role, options.device, options.threads, options.kernels, options.library)


def _select(opened: bundle.Bundle, role: Optional[str], options: RuntimeOptions) -> Tuple[str, RuntimeOptions, str]:
    """Return the model to use, its options, and the reason if it runs on the CPU instead of a compiled model."""
    models = opened.manifest["models"]
    if role is not None and role not in models:
        raise ArgumentError("the bundle has no model %r" % role, "use one of: %s" % ", ".join(sorted(models)))
    tpu_requested = options.device not in ("", "cpu")
    if role in ("original", "int8") and tpu_requested:
        raise ArgumentError("%s models run on the CPU, not on %s" % (role, options.device), "leave out --device")
    if role is None and "compiled" not in models and tpu_requested:
        raise ArgumentError("the bundle has no compiled model for %s" % options.device, "leave out --device")
    remark = ""
    if role is None and "compiled" in models and options.device != "cpu":
        if tpu_requested or host.edge_tpus():
            role = "compiled"
        else:
            remark = "no Edge TPU is on USB or PCIe: the int8 model runs on the CPU"
    if role == "compiled":
        probe.check(opened.members[models["compiled"]["file"]], options)
        return role, options, ""
    default = "int8" if "int8" in models else "original"
    return role or default, dataclasses.replace(options, device="cpu"), remark


def _load(content: bytes, options: RuntimeOptions) -> InferenceSession:
    library = runtime.find()
    try:
        return InferenceSession(library, content, options)
    except (OSError, ValueError) as error:  # the child process could open the Edge TPU a moment before
        raise EdgeTpuError("another process opened the Edge TPU: %s" % runtime.first_line(error), "try again", "busy")


def _scale(detail: Dict[str, Any]) -> Optional[Tuple[float, int]]:
    """Return scale and zero point of a quantized tensor; None for float."""
    if not np.issubdtype(detail["dtype"], np.integer):
        return None
    scale, zero_point = detail["quantization"]
    return float(scale), int(zero_point)


def _to_scores(detail: Dict[str, Any]) -> Callable[[Array], Array]:
    """Return the function from an output tensor to float32 scores. For 8 bits it looks them up in a table: faster."""
    scale = _scale(detail)
    dtype = np.dtype(detail["dtype"])
    shape = [int(length) for length in detail["shape"]]
    if scale is None:
        return lambda output: output.ravel().astype(np.float32)
    if dtype.itemsize > 1:
        return lambda output: dequantize(output.ravel(), *scale)
    table = dequantize(np.arange(256, dtype=np.uint8).view(dtype), *scale)
    take = table.take  # a negative int8 indexes from the end of the table, where its value is
    if len(shape) == 2 and shape[0] == 1:
        return lambda output: take(output[0])
    return lambda output: take(output.ravel())


def _check_tensors(session: InferenceSession, entry: Dict[str, Any], detector: Optional[Detector]) -> None:
    """Check that shapes, types and scales of the model are those of the manifest."""
    tensors = {"input": session.input, "output": session.output}
    if len(session.outputs) != (1 if detector is None else 2):
        raise LoadError("the model has %d outputs" % len(session.outputs), "package the model again")
    if detector is not None:
        tensors["boxes"] = session.outputs[0]
        counts = (int(session.output["shape"][1]), len(detector.anchors))
        if counts[0] != counts[1]:
            raise LoadError("the model has %d anchors, and the manifest %d" % counts, "package the model again")
    for name, detail in tensors.items():
        scale, zero_point = detail["quantization"]
        actual = {
            "shape": [int(length) for length in detail["shape"]],
            "dtype": np.dtype(detail["dtype"]).name,
            "scale": float(scale) or None,
            "zero_point": int(zero_point),
        }
        if any(entry[name][key] != value for key, value in actual.items()):
            raise LoadError("the model's %s differs from the manifest" % name, "package the model again")
        if np.issubdtype(detail["dtype"], np.integer) and not scale:
            raise LoadError("the model's %s is quantized without one scale" % name, "package another model")
