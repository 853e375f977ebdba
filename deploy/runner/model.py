"""The API for applications: a bundle as a function from images or sounds to answers::

    from deploy import Model

    model = Model("shelf.coralline")
    answer = model(image)            # a decoded image: array [height, width, channels]
    print(answer.label, answer.score, answer.top(3))

The answer of a detector is `detection.Detections`::

    for detected in model(image).above(0.5).top():
        print(detected.label, detected.score, detected.box)

The answer of other models is `answers.NamedOutputs`. Models with several inputs take them by name or in their order::

    mask = model(image)["mask"]
    outputs = model({"sound": frame, "state": state})
"""

from __future__ import annotations

import dataclasses
import threading
from typing import Any, Callable, Dict, Iterable, Iterator, List, Mapping, Optional, Sequence, Tuple

import numpy as np

from deploy.contract import bundle, text, trust
from deploy.contract.bundle import BundledModel
from deploy.contract.detection import Detections
from deploy.contract.errors import ArgumentError, EdgeTpuError, ImageError, LoadError
from deploy.contract.image_geometry import AffineMap, input_map, moves_positions
from deploy.contract.preprocessing import MOST_BYTES, Array, PreprocessingError
from deploy.runner import host, probe, runtime, tiles
from deploy.runner.answers import decoder, in_image
from deploy.runner.runtime import InferenceSession, RuntimeOptions


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
        content: the .tflite file of the model in use.
        session: the model in the runtime.
        trial: the result of the child process; None on the CPU.
        decode: the function from the output tensors of a sample, in their dtypes, to its answer. `Recognizer` replaces
            it.
        remark: why the model runs on the CPU although the bundle has a compiled model; otherwise empty.

    Raises:
        BundleError: the file is not a bundle, or was changed.
        TrustError: this device trusts a root, and the bundle is not in the signed metadata.
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
        self.bundle = path if isinstance(path, bundle.Bundle) else bundle.read(path, trust.find())
        options = RuntimeOptions(device, threads, kernels, library)
        self.role, options, self.remark = _select(self.bundle, role, options)
        entry = self.bundle.models[self.role]
        self.content = self.bundle.content(self.role)
        self.trial = None if options.device == "cpu" else probe.check(self.content, options)
        self.session = _load(self.content, options)
        self.session.arrange(entry.inputs, entry.outputs)
        _check_tensors(self.session, entry)
        self.session.outputs = list(entry.outputs)  # with their names for applications
        self.labels: List[str] = list(self.bundle.labels)
        self.decode = decoder(self.bundle, entry.outputs)
        self._moves = self.bundle.has_positions and moves_positions(self.bundle.preprocessing)
        self._lock = threading.Lock()
        self._input_layout = entry.input_layout
        self._lookup = entry.lookup

    def __call__(self, sample: Any) -> Any:
        """Return the answer for one decoded sample: an `Answer`, `Detections` of a detector, otherwise `NamedOutputs`.

        Boxes are fractions of the height and width of the sample, also if preprocessing crops or pads it. So are
        keypoints, if they are fractions.

        Args:
            sample: an image [height, width, channels], or [height, width] for one channel, in the form that the
                bundle's preprocessing takes; a sound [samples], float32 from -1 to 1 or int16; or a text, str or bytes
                in UTF-8. For a model with several inputs: the arrays by the names of the inputs, or in their order,
                without the batch.

        Raises:
            ImageError: the sample has the wrong shape or type.
        """
        tensors = self.prepare(sample)
        return self.answer(tensors, np.shape(self._joined(sample)) if self._moves else ())

    def tiled(self, image: Any, grid: tiles.Tiles) -> Detections:
        """Return the detections of a large photo with small objects: the detector runs on each tile.

        The answers of the tiles are merged by non-maximum suppression, as the bundle says: see `deploy.runner.tiles`.
        A grid is for example `Tiles(rows=2, columns=3)`.

        Raises:
            ArgumentError: the bundle is not a detector.
            ImageError: the image has the wrong shape or type.
        """
        tiles.refuse_others(self.bundle)
        photo = self._joined(image)
        specification = self.bundle.detector.specification  # type: ignore[union-attr]
        if not self._moves:
            return tiles.detect(self, photo, grid, specification)
        return tiles.detect(self, photo, grid, specification, lambda height, width: self._placed((height, width)))

    def batch(self, images: Iterable[Array]) -> List[Any]:
        """Return the answers for several samples, in their order."""
        return [self(image) for image in images]

    def stream(self, images: Iterable[Array]) -> Iterator[Any]:
        """Yield the answer for each sample of an iterator, such as a camera."""
        return (self(image) for image in images)

    def prepare(
        self, sample: Any, between: Callable[[], None] = lambda: None, most_bytes: int = MOST_BYTES
    ) -> List[Array]:
        """Return a decoded sample as the model's input tensors: preprocessed, and quantized if an input is quantized.

        Args:
            sample: see `__call__`; for a model with several inputs also a row [values] of all of them.
            between: a function that is called before each step; an exception that it raises ends the work.
            most_bytes: the most memory that a step may use. A sample that needs more is refused before any work.

        Raises:
            ImageError: the sample has the wrong shape or type, or is too large.
        """
        tensors = self.session.inputs
        layout = self._input_layout
        shape = layout.shapes[0] if len(tensors) == 1 else (layout.size,)
        preprocessing = self.bundle.preprocessing
        joined = self._joined(sample)
        try:
            result_shape = preprocessing.result_shape(joined.shape, most_bytes)
            if result_shape == shape:
                values = preprocessing(joined, between)
        except PreprocessingError as error:
            what = "the sample cannot be preprocessed: %s" % error
            hint = "pass an image [height, width, channels], or a sound [samples]"
            raise ImageError(what, hint if self.bundle.decoding.text_bytes is None else "pass a text")
        if result_shape != shape:
            what = "the sample has the shape %r after preprocessing, and the model takes %r"
            hint = "pass samples of this shape, or package the model with a resize or length step"
            raise ImageError(what % (list(result_shape), list(shape)), hint)
        if self._lookup is not None:
            try:
                return [self._lookup(values)]
            except ValueError as error:
                raise ImageError("the sample cannot be looked up: %s" % error, "package the model again")
        parts = layout.parts(values.reshape(1, -1))
        return [tensor.stored(part).reshape(tensor.shape) for tensor, part in zip(tensors, parts)]

    def _joined(self, sample: Any) -> Array:
        """Return a sample as one array: as it is for one input, as a row for several."""
        layout = self._input_layout
        if isinstance(sample, (str, bytes, bytearray)):
            if self.bundle.decoding.text_bytes is None:
                what = "the sample is %s, and the bundle takes no texts"
                raise ImageError(what % type(sample).__name__, "pass an array")
            return text.sample_of(sample, self.bundle.decoding.text_bytes)
        if isinstance(sample, Mapping):
            if set(sample) != set(layout.names):
                what = "the sample has the inputs %s" % (", ".join(sorted(map(str, sample))) or "(none)")
                raise ImageError(what, "pass %s" % ", ".join(layout.names))
            sample = [sample[name] for name in layout.names]
            if len(sample) == 1:
                return np.asarray(sample[0])
        if len(layout.names) == 1 or isinstance(sample, np.ndarray):
            return np.asarray(sample)
        if not isinstance(sample, (list, tuple)) or len(sample) != len(layout.names):
            what = "the model has %d inputs" % len(layout.names)
            raise ImageError(what, "pass a map or a list of arrays for %s" % ", ".join(layout.names))
        arrays = [np.asarray(array) for array in sample]
        for name, shape, array in zip(layout.names, layout.shapes, arrays):
            if array.shape != shape or array.dtype.kind not in "uifb":
                facts = (name, array.dtype, list(array.shape), list(shape))
                raise ImageError("the input %s is %s %r" % facts[:3], "pass an array of the shape %r" % (facts[3],))
        return np.concatenate([array.astype(np.float32).ravel() for array in arrays])

    def run(self, tensors: Sequence[Array]) -> List[Array]:
        """Return the output tensors for the input tensors from `prepare`, in the dtypes of the model.

        Raises:
            ImageError: a tensor has another shape or type.
        """
        if len(tensors) != len(self.session.inputs):
            what = "%d input tensors were passed, and the model has %d inputs"
            raise ImageError(what % (len(tensors), len(self.session.inputs)), "create them with prepare()")
        with self._lock:
            try:
                return self.session.run_tensors(tensors)
            except (AttributeError, RuntimeError, ValueError) as error:
                raise self._error(error)

    def answer(self, tensors: Sequence[Array], sample_shape: Sequence[int] = ()) -> Any:
        """Return the answer for the input tensors from `prepare`.

        Boxes and keypoints are fractions of the height and width in `sample_shape`, the shape of the decoded image;
        without a shape, they are fractions of the model's input.
        """
        answer = self.decode(self.run(tensors))
        return in_image(answer, self._placed(sample_shape)) if self._moves and len(sample_shape) else answer

    def _placed(self, sample_shape: Sequence[int]) -> AffineMap:
        return input_map(self.bundle.preprocessing, int(sample_shape[0]), int(sample_shape[1]))

    def filled(self, fill: Callable[..., None]) -> Any:
        """Return the answer for an input that the caller writes into the memory of the runtime, without a copy.

        Boxes are fractions of the model's input.

        Args:
            fill: a function that is called with the memory of each input tensor, in the dtype of the model (see
                `session.inputs`), and writes all of it. It must not keep a reference: the runtime would refuse to run.

        Raises:
            ImageError: `fill` kept a reference to the memory.
        """
        session = self.session
        with self._lock:
            if session.interpreter is None:
                raise self._error(AttributeError())
            fill(*[view() for view in session.views])
            try:
                outputs = session.run_tensors(())
            except RuntimeError as error:
                raise self._error(error)
        return self.decode(outputs)

    def _error(self, error: Exception) -> Exception:
        text = runtime.first_line(error)
        if self.session.interpreter is None:
            return ArgumentError("the model is closed", "create a new Model")
        if isinstance(error, ValueError):
            return ImageError("an input tensor has the wrong shape or type: %s" % text, "create it with prepare()")
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
        probe.check(opened.content(selected), selected_options)
    return Model(opened, role, options.device, options.threads, options.kernels, options.library)


def _select(opened: bundle.Bundle, role: Optional[str], options: RuntimeOptions) -> Tuple[str, RuntimeOptions, str]:
    """Return the model to use, its options, and the reason if it runs on the CPU instead of a compiled model."""
    models = opened.models
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
        probe.check(opened.content("compiled"), options)
        return role, options, ""
    default = next(name for name in ("int8", "original", "compiled") if name in models)
    return role or default, dataclasses.replace(options, device="cpu"), remark


def _load(content: bytes, options: RuntimeOptions) -> InferenceSession:
    library = runtime.find()
    try:
        return InferenceSession(library, content, options)
    except (OSError, ValueError) as error:  # the child process could open the Edge TPU a moment before
        raise EdgeTpuError("another process opened the Edge TPU: %s" % runtime.first_line(error), "try again", "busy")


def _check_tensors(session: InferenceSession, entry: BundledModel) -> None:
    """Check that shapes, dtypes and scales of the model are those of the manifest."""
    for end, actual, expected in (("input", session.inputs, entry.inputs), ("output", session.outputs, entry.outputs)):
        if len(actual) != len(expected):
            what = "the model has %d %ss, and the manifest %d" % (len(actual), end, len(expected))
            raise LoadError(what, "package the model again")
        for tensor, described in zip(actual, expected):
            if tensor.values != described.values:  # names may differ between runtimes
                what = "the model's %s %s differs from the manifest" % (end, described.name)
                raise LoadError(what, "package the model again")
