"""The data section for a model file: samples without labels, in the form that the model takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from compress.core.errors import DataError, ModelError, reason_of
from compress.core.files import NUMPY_ERRORS, array_headers
from compress.data.preprocessed import RANGES, Range

if TYPE_CHECKING:
    from compress.model.importers.model_file import ModelFile
    from compress.model.tflite.detection_postprocess import PostProcess

IMAGES = (".png", ".jpg", ".jpeg", ".jpe", ".jfif", ".bmp", ".webp")
SOUNDS = (".wav", ".wave")
CHANNELS = (1, 3)
"""Channels of images."""
OPEN_SIDE = 224
"""Height or width of images for a Keras model whose input leaves it open."""
RANDOM_SAMPLES = 128
LOOKED_AT = 32
"""Number of samples by which the range of the inputs is chosen."""
SIGNED_PIXELS = (-128.0, 127.0)
"""Pixels minus 128, the int8 form of pixels: the scale is 1 and the zero point 0."""
NEAR = 0.1
"""Largest distance of an end of a quantized range from that of a usual range, as a fraction of the latter. Calibration
photos seldom reach both ends exactly, and symmetric scales reach 127/128 of an end; the usual ranges differ by more."""
LOUDEST = 2.0
"""Largest magnitude that the input of a model of recordings from -1 to 1 can usually hold; ranges for other units, such
as 16-bit samples, hold far more."""
OTHER_RANGES = ((-1.0, 1.0), (0.0, 1.0), (-3.0, 3.0), (-10.0, 10.0), (-30.0, 30.0), (-100.0, 100.0))
"""Ranges of random samples for models of other inputs, such as features of sound."""


@dataclass(frozen=True)
class ModelInputs:
    """The inputs of a model file.

    Attributes:
        names: their names.
        shapes: their shapes, without the batch.
        output_sizes: the number of values of each output for one sample.
        becomes: what the pipeline makes of the file (`compress.model.importers.model_file.Becomes`).
        model: the Keras model, if the file becomes one.
        limits: for a file with one quantized input, the lowest and highest value that the input can hold.
        chosen_range: the values of the darkest and the brightest pixel that the user gives; None to find them.
        postprocess: the TFLite_Detection_PostProcess of a file that becomes no Keras model.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    output_sizes: tuple[int, ...]
    becomes: str
    model: Any = None
    limits: tuple[float, float] | None = None
    postprocess: PostProcess | None = None
    chosen_range: Range | None = None

    @property
    def is_image(self) -> bool:
        """Whether the model takes one image."""
        return len(self.shapes) == 1 and len(self.shapes[0]) == 3 and self.shapes[0][-1] in CHANNELS


def inputs_of(file: ModelFile, *, trust: bool) -> ModelInputs:
    """Return the inputs of a model file.

    Raises:
        ModelError: the file cannot be imported, or an input has an open dimension.
    """
    from compress.model.importers import model_file
    from compress.model.tflite import dequantization

    if file.becomes == "keras":
        model = model_file.load(file, trust=trust).model
        names = tuple(tensor.name for tensor in model.inputs)
        shapes = []
        for tensor in model.inputs:
            shape = tuple(tensor.shape[1:])
            if len(shape) == 3 and shape[-1] in CHANNELS:  # an image
                shape = tuple(OPEN_SIDE if side is None else side for side in shape)
            shapes.append(shape)
        sizes = tuple(_size(tensor.shape) for tensor in model.outputs)
        both = file.content.dequantized if file.kind == "tflite" else None
        limits = None if both is None else dequantization.input_limits(both.original)
        inputs = ModelInputs(names, tuple(shapes), sizes, "keras", model, limits)
    else:
        inputs = _file_inputs(file)
    for name, shape in zip(inputs.names, inputs.shapes, strict=True):
        if None in shape:
            raise ModelError(
                f"its input {name!r} has the open shape {list(shape)}",
                where=str(file.path),
                allowed="fixed sizes: the Edge TPU compiles for one",
                hint="for an .onnx file, set --shape; save a Keras model with a fixed input size",
            )
    return inputs


def with_range(inputs: ModelInputs, chosen: Range | None) -> ModelInputs:
    """Return the inputs with the values of a black and of a white pixel that the user gives.

    Raises:
        DataError: they are not two numbers, the lower one first.
    """
    if chosen is None:
        return inputs
    low, high = chosen
    if not (np.isfinite([low, high]).all() and low < high):
        raise DataError(f"is {low:g} to {high:g}", where="--range", allowed="two numbers, the lower one first")
    return replace(inputs, chosen_range=(low, high))


def _file_inputs(file: ModelFile) -> ModelInputs:
    """Return the inputs of a .tflite file, or of a SavedModel that is converted to one."""
    from compress.model.importers import model_file
    from compress.model.tflite import dequantization, graph

    if file.kind == "saved_model":
        parsed = graph.parse(model_file.to_float_tflite(file).tflite)
    else:
        parsed = graph.read(file.path)
    tensors = [parsed.tensors[index] for index in parsed.inputs]
    limits = dequantization.input_limits(parsed)
    names = tuple(tensor.name for tensor in tensors)
    shapes = tuple(tuple(tensor.shape[1:]) for tensor in tensors)
    sizes = tuple(_size(parsed.tensors[index].shape) for index in parsed.outputs)
    postprocess = file.content.postprocess if file.kind == "tflite" else None
    return ModelInputs(names, shapes, sizes, file.becomes, limits=limits, postprocess=postprocess)


def _size(shape: Sequence[int | None]) -> int:
    """Return the number of values of one sample; 0 if it is open."""
    return prod(size or 0 for size in shape[1:])


def data_for(inputs: ModelInputs, calibrate: Path | None) -> dict[str, Any]:
    """Return the section `data` of the pipeline: the samples at a path, or random ones.

    Raises:
        DataError: no source fits the path or the model.
    """
    return _random(inputs) if calibrate is None else _samples(calibrate, inputs)


def _random(inputs: ModelInputs) -> dict[str, Any]:
    """Return random samples of the model's shapes, in the range that fits best."""
    settings: dict[str, Any] = {"count": RANDOM_SAMPLES}
    if len(inputs.shapes) > 1 or len(inputs.shapes[0]) > 3:  # preprocessing takes images and series only
        settings["shapes"] = [list(shape) for shape in inputs.shapes]
    else:
        settings["shape"] = list(inputs.shapes[0])
        samples = np.random.default_rng(0).random((LOOKED_AT, *inputs.shapes[0]), np.float32)
        settings["low"], settings["high"] = inputs.limits or value_range(inputs, samples)
    return {"source": {"random": settings}, **_unchanged(inputs)}


def _unchanged(inputs: ModelInputs) -> dict[str, Any]:
    """Return the preprocessing of samples that have the shape of the input: those of two axes get a third one."""
    return {"preprocess": [{"squeeze": {"axis": -1}}]} if [len(shape) for shape in inputs.shapes] == [2] else {}


def _samples(path: Path, inputs: ModelInputs) -> dict[str, Any]:
    """Return the data source and the preprocessing for a path with samples.

    Raises:
        DataError: no source fits it.
    """
    if path.suffix.lower() in (".npz", ".npy"):
        return {"source": _arrays(path, inputs), **_unchanged(inputs)}
    names = [file.name.lower() for file in sorted(path.rglob("*"))] if path.is_dir() else []
    if any(name.endswith(IMAGES) for name in names):
        return _photos(path, inputs)
    if any(name.endswith(SOUNDS) for name in names):
        return _sounds(path, inputs)
    raise DataError(
        "contains no samples that are recognized" if path.exists() else "does not exist",
        where=str(path),
        allowed="a folder of photos or of WAV files, .npz or .npy",
        hint="write a pipeline file for other data: `python -m compress stages`",
    )


def _photos(path: Path, inputs: ModelInputs) -> dict[str, Any]:
    """Return photos that are resized to the model's input and scaled to the range that fits it best."""
    if not inputs.is_image:
        raise DataError(
            "is a folder of photos",
            where=str(path),
            allowed=f"samples for inputs of the shapes {', '.join(str(list(shape)) for shape in inputs.shapes)}: .npz",
        )
    height, width, channels = inputs.shapes[0]
    source = {"folder": {"path": str(path.resolve()), "labels": "none", "channels": channels, "corrupt": "skip"}}
    steps: list[dict[str, Any]] = [{"resize": {"size": [height, width], "filter": "bilinear"}}]
    low, high = value_range(inputs, _some_photos(path, inputs))
    if (low, high) != (0.0, 255.0):
        steps.append({"scale": {"from": [0, 255], "to": [low, high]}})
    return {"source": source, "preprocess": steps}


def _some_photos(path: Path, inputs: ModelInputs) -> NDArray[np.float32]:
    """Return some photos, resized, with values from 0 to 1; those that cannot be read are left out."""
    from compress.data.sources.images import MAX_IMAGE_BYTES, ImageFolder
    from deploy.contract.preprocessing import Preprocessing

    height, width, channels = inputs.shapes[0]
    resize = Preprocessing([{"resize": {"size": [height, width], "filter": "bilinear"}}])
    files = [file for file in sorted(path.rglob("*")) if file.suffix.lower() in IMAGES and file.is_file()]
    reader = ImageFolder(path=str(path), channels=1 if channels == 1 else 3)
    samples = []
    for file in files[:: max(len(files) // LOOKED_AT, 1)][:LOOKED_AT]:
        if file.stat().st_size > MAX_IMAGE_BYTES:
            continue
        try:
            samples.append(resize(reader.decoded(file.read_bytes(), str(file))) / np.float32(255))
        except DataError:
            continue
    if not samples:
        raise DataError("contains no readable photo", where=str(path), hint="check the files")
    return np.stack(samples).astype(np.float32)


def value_range(inputs: ModelInputs, samples: NDArray[np.float32]) -> tuple[float, float]:
    """Return the range that samples from 0 to 1 must be scaled to.

    The range that the user gives; or by the scale of a quantized input; or by the model's first layers; otherwise the
    most frequent one.

    Raises:
        DataError: a quantized input holds none of the usual ranges, and the user gives none.
    """
    if inputs.chosen_range is not None:
        return inputs.chosen_range
    ranges = RANGES if inputs.is_image else OTHER_RANGES
    if inputs.limits is not None:
        return _usual_range(inputs.limits)
    if inputs.model is None:
        return ranges[0]
    from compress.learning.quantization import activation_statistics
    from compress.model.ir import keras_graph
    from compress.model.ir.layer_specs import EMBEDDING, spec_of

    network = keras_graph.read(inputs.model)
    counts = [layer.config["input_dim"] for layer in network.layers.values() if spec_of(layer) == EMBEDDING]
    if counts:  # samples are indices
        return 0.0, float(max(min(counts) - 1, 1))
    errors = {}
    for low, high in ranges:
        scaled = (low + (high - low) * samples).astype(np.float32)
        error = activation_statistics.preprocessing_error(network, scaled)
        if error is None:
            return ranges[0]
        errors[low, high] = error
    return min(errors, key=lambda limits: errors[limits])


def _usual_range(limits: Range) -> Range:
    """Return the usual range of pixels that a quantized input holds.

    Raises:
        DataError: it holds another one.
    """
    usual = (*RANGES, SIGNED_PIXELS)
    for low, high in usual:
        distances = abs(limits[0] - low), abs(limits[1] - high)
        if max(distances) <= NEAR * (high - low):
            return low, high
    tolerance = (limits[1] - limits[0]) / 255
    held = [
        f"{low:g} {high:g}" for low, high in usual if limits[0] - tolerance <= low and high <= limits[1] + tolerance
    ]
    raise DataError(
        f"the quantized input holds values from {limits[0]:.4g} to {limits[1]:.4g}: this is no usual range of photos, "
        "so the values that the model was trained with are not known",
        where="the model",
        allowed=f"usual ranges that the input holds without a cut: {', '.join(held) or 'none'}; "
        "the mean and the standard deviation of ImageNet make -2.12 to 2.64",
        hint="give the values of a black and of a white pixel, as the program does that the model comes from: "
        "--range 0 1 (the YOLO models of Ultralytics), --range -1 1, or --range 0 255; "
        "for other steps, give any range, and change data.preprocess in the pipeline file that is written",
    )


def _sounds(path: Path, inputs: ModelInputs) -> dict[str, Any]:
    """Return recordings of the length of the model's input."""
    from compress.data.sources import wav

    shape = inputs.shapes[0]
    if len(inputs.shapes) > 1 or int(np.prod(shape)) != max(shape):
        raise DataError(
            "is a folder of recordings",
            where=str(path),
            allowed=f"samples of the shape {list(shape)}",
            hint="the model takes features: write a pipeline file with log_mel or mfcc in data.preprocess, or .npz",
        )
    first = next(file for file in sorted(path.rglob("*")) if file.name.lower().endswith(SOUNDS))
    with first.open("rb") as stream:
        rate = wav.opened(stream, str(first)).rate
    length = int(np.prod(shape))
    source = {"path": str(path.resolve()), "labels": "none", "rate": rate, "seconds": length / rate, "resample": True}
    steps: list[dict[str, Any]] = [{"length": {"samples": length}}]
    if inputs.chosen_range is not None:
        steps.append({"scale": {"from": [-1, 1], "to": list(inputs.chosen_range)}})
    elif inputs.limits is not None and max(map(abs, inputs.limits)) > LOUDEST:
        raise DataError(
            f"the quantized input holds values from {inputs.limits[0]:.4g} to {inputs.limits[1]:.4g}, and recordings "
            "have values from -1 to 1",
            where="the model",
            hint="give the values of the lowest and the highest sample, as the program does that the model comes from: "
            "--range -32768 32767 for 16-bit samples, --range -1 1 if the input has more room than recordings use",
        )
    if len(shape) > 1:
        steps.append({"reshape": {"shape": list(shape)}})
    return {"source": {"wav": {**source, "corrupt": "skip"}}, "preprocess": steps}


def _arrays(path: Path, inputs: ModelInputs) -> dict[str, Any]:
    """Return the source of an .npy or .npz file: arrays by the names of the inputs, or by their shapes.

    Raises:
        DataError: no array fits an input.
    """
    if path.suffix.lower() == ".npy":
        return {"npy": {"x": str(path.resolve())}}
    shapes = _array_shapes(path)
    chosen = []
    for name, shape in zip(inputs.names, inputs.shapes, strict=True):
        if shapes.get(name, ())[1:] == shape:
            chosen.append(name)
            continue
        fitting = [key for key, array_shape in shapes.items() if array_shape[1:] == shape and key not in chosen]
        if not fitting:
            known = ", ".join(f"{key} {list(array_shape)}" for key, array_shape in shapes.items())
            allowed = f"[{', '.join(['n', *map(str, shape)])}]; it has {known}"
            raise DataError(f"has no array for the input {name!r}", where=str(path), allowed=allowed)
        chosen.append(fitting[0])
    return {"npz": {"file": str(path.resolve()), "x": chosen if len(chosen) > 1 else chosen[0], "y": None}}


def _array_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the arrays of an .npz file."""
    try:
        return {name: shape for name, (shape, _) in array_headers(path).items()}
    except (OSError, *NUMPY_ERRORS) as error:
        raise DataError(f"is not a usable .npz file: {reason_of(error)}", where=str(path)) from error
