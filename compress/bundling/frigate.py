"""Export of a detector for Frigate's `edgetpu` detector: model, label map, and a part of the configuration.

Frigate writes unprocessed pixels [1, height, width, 3] into the only input, as uint8, or minus 128 as int8. With the
model type `ssd` it reads the outputs by position: boxes, classes, scores, count, as TFLite_Detection_PostProcess writes
them. With `yolo-generic`, from 0.17 on, it decodes two int8 tensors itself (`detection_outputs.as_yolo`). The detectors
in bundles of this program get these outputs; the operators for them run on the CPU.
Source: docs.frigate.video, "Object Detectors" and "Configuring", Frigate 0.12 to 0.17;
blakeblackshear/frigate, frigate/detectors/plugins/edgetpu_tfl.py and frigate/util/builtin.py (labels).
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from compress.bundling import detection_outputs
from compress.core.errors import ModelError
from compress.core.files import explain
from compress.data import label_files
from compress.model.tflite import dequantization, detection_postprocess, graph
from compress.model.tflite.detection_postprocess import NAME as POSTPROCESS
from compress.model.tflite.detection_postprocess import OUTPUTS
from compress.model.tflite.edit import Edit
from compress.model.tflite.graph import Graph, Operator, Quantization
from darwinn.package import OPERATOR
from deploy.contract import bundle
from deploy.contract.bundle import Bundle
from deploy.contract.detection import Detector
from deploy.contract.detector_specification import DetectionError
from deploy.contract.durable_files import write_atomically
from deploy.contract.preprocessing import PreprocessingError

ModelType = Literal["ssd", "yolo-generic"]
PixelFormat = Literal["rgb", "bgr"]
FOLDER = "/config/model_cache"
"""The folder of the files in Frigate's container; /config is its volume."""
MOST_CUT = 0.5
"""How far the values of pixels may leave the range of the input, as a fraction of the range. Calibrated ranges are a
little too small; pixels without preprocessing in front of an input from 0 to 1 leave it by 254 times its range."""
_UINT8 = "python -m compress legalize IN.tflite OUT.tflite --io uint8, then compile again"


@dataclass(frozen=True)
class Export:
    """The written files.

    Attributes:
        compiled: whether the model is compiled for the Edge TPU.
        width, height: the size of its input.
        labels: class names by number.
        classes: the number of classes, if the model contains it.
        model_type: how Frigate reads the outputs.
        pixel_format: the order of the colours.
    """

    folder: str
    model: str
    compiled: bool
    width: int
    height: int
    labels: dict[int, str]
    classes: int | None
    model_type: ModelType = "ssd"
    pixel_format: PixelFormat = "rgb"

    def to_json(self) -> dict[str, Any]:
        """Return the export as a plain map."""
        return {"schema_version": 1, **asdict(self)}


def export(path: Path, folder: Path, labels: Path | None = None, model_type: ModelType | None = None) -> Export:
    """Write the files.

    Args:
        path: a .tflite file that ends as SSD models do, or a bundle (its compiled model if there is one, otherwise the
            int8 model).
        folder: the folder for the files; it is created if necessary.
        labels: a label file (`compress.data.label_files`); a bundle contains its own.
        model_type: how Frigate reads the outputs; None for the fastest way that the model has.

    Raises:
        ModelError: the model is not suitable for Frigate's detector.
        DataError: the labels cannot be read, or do not fit.
        StoreError: the folder cannot be written.
    """
    content, names, opened = _opened(path)
    label_file = None if labels is None else label_files.read(labels)
    if not names and label_file is None:
        raise ModelError("the class names are missing", where=str(path), hint="give them with --labels FILE")
    model = graph.parse(content, str(path))
    chosen: ModelType = "ssd"
    pixel_format: PixelFormat = "rgb"
    named_classes: int | None = None
    if opened is not None and opened.detector is not None:
        named_classes = _detector_classes(model, opened.detector, str(path))
        model, chosen, pixel_format = _of_detector(model, opened, model_type, str(path))
        content = graph.serialize(model)
    elif model_type == "yolo-generic":
        what = "says nothing about its outputs"
        raise ModelError(what, where=str(path), allowed="for yolo-generic a bundle of a detector")
    last = _postprocess(model, str(path)) if chosen == "ssd" else None
    height, width = _input(model, chosen, str(path))
    classes = _classes(model, last, str(path))
    if label_file is not None:
        names = dict(label_file.names(named_classes or classes))
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", path.stem).strip(".-") or "model"
    compiled = bool(model.custom_operators(OPERATOR))
    exported = Export(str(folder), f"{name}.tflite", compiled, width, height, names, classes, chosen, pixel_format)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / exported.model, content)
        write_atomically(folder / "labelmap.txt", label_files.label_map(names).encode())
        write_atomically(folder / "frigate.yml", configuration(exported).encode())
    except OSError as error:
        raise explain(error, f"{folder} cannot be written") from error
    return exported


def configuration(exported: Export) -> str:
    """Return the part of Frigate's config.yml for the model."""
    device = "" if exported.compiled else "# NOT COMPILED: the Edge TPU cannot run this model; compile it first\n"
    versions = "0.12 to 0.17" if exported.model_type == "ssd" else "0.17"
    return (
        f"# for config.yml of Frigate {versions}; the files go to {FOLDER}\n{device}"
        "detectors:\n  coral:\n    type: edgetpu\n    device: usb  # or pci\n"
        f"model:\n  path: {FOLDER}/{exported.model}\n  labelmap_path: {FOLDER}/labelmap.txt\n"
        f"  width: {exported.width}\n  height: {exported.height}\n"
        f"  input_tensor: nhwc\n  input_pixel_format: {exported.pixel_format}\n  model_type: {exported.model_type}\n"
    )


def describe(exported: Export) -> str:
    """Return the export as text for a person."""
    lines = [f"{exported.folder}: {exported.model}, labelmap.txt, frigate.yml"]
    lines.append(f"copy the first two to {FOLDER}, and frigate.yml into config.yml")
    if not exported.compiled:
        lines.append("the model is not compiled: compile it with edgetpu_compiler, and export the result")
    return "\n".join(lines)


def _opened(path: Path) -> tuple[bytes, dict[int, str], Bundle | None]:
    """Return the model's bytes, and a bundle with its class names."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ModelError(f"cannot be read: {error.strerror}", where=str(path)) from error
    if content[4:8] == graph.IDENTIFIER:
        return content, {}, None
    try:
        opened = Bundle(content)
    except bundle.BundleError as error:
        raise ModelError(f"is neither a .tflite file nor a bundle: {error}", where=str(path)) from error
    models = opened.manifest["models"]
    role = next((role for role in ("compiled", "int8") if role in models), None)
    if role is None:
        raise ModelError("the bundle has no int8 model", where=str(path))
    return opened.members[models[role]["file"]], dict(enumerate(opened.labels)), opened


def _of_detector(
    model: Graph, opened: Bundle, model_type: ModelType | None, where: str
) -> tuple[Graph, ModelType, PixelFormat]:
    """Return the model of a bundle with Frigate's input and outputs, its type, and the order of the colours."""
    detector = opened.detector
    assert detector is not None
    shape = model.tensors[model.inputs[0]].shape
    size = (shape[1], shape[2]) if len(shape) == 4 else (0, 0)
    misfit = detection_outputs.yolo_misfit(detector, size)
    if model_type == "yolo-generic" and misfit is not None:
        raise ModelError(f"has no form as yolo-generic: {misfit}", where=where, hint="use the model type ssd")
    pixel_format, slope, offset = _pixels(opened, shape[1:], where)
    if model_type == "ssd" or misfit is not None:
        model = _with_pixels(model, "UINT8", slope, offset, where)  # int8 is for 0.17 only
        return detection_outputs.with_postprocess(model, detector, where), "ssd", pixel_format
    dtype = "INT8" if model.tensors[model.inputs[0]].dtype == "INT8" else "UINT8"
    model = _with_pixels(model, dtype, slope, offset, where)
    return detection_outputs.as_yolo(model, detector, where), "yolo-generic", pixel_format


def _detector_classes(model: Graph, detector: Detector, where: str) -> int:
    """Return the number of classes of a bundle's detector, without a background."""
    try:
        columns = detector.classes_of(sum(model.tensors[index].elements for index in model.outputs))
    except DetectionError as error:
        raise ModelError(f"its outputs are not those of its detector: {error}", where=where) from error
    return columns - (detector.specification["background"] is not None)


def _pixels(opened: Bundle, shape: tuple[int, ...], where: str) -> tuple[PixelFormat, float, float]:
    """Return the order of the colours, and slope and offset of the input's values along the pixels."""
    image = np.random.default_rng(0).integers(0, 256, shape).astype(np.uint8)
    image[0, 0] = (0, 128, 255)
    try:
        values = np.asarray(opened.preprocessing(image), np.float64)
    except PreprocessingError as error:
        raise ModelError(f"its preprocessing does not take an image: {error}", where=where) from error
    formats: tuple[PixelFormat, ...] = ("rgb", "bgr")
    for pixel_format in formats:
        pixels = (image if pixel_format == "rgb" else image[..., ::-1]).astype(np.float64)
        if values.shape != pixels.shape:
            break
        slope, offset = np.polyfit(pixels.ravel(), values.ravel(), 1)
        if slope > 0 and np.abs(slope * pixels + offset - values).max() < slope / 100:
            return pixel_format, float(slope), float(offset)
    raise ModelError(
        "its preprocessing changes more than the scale of the pixels, and Frigate does not preprocess",
        where=where,
        allowed="resize, colour, and the same scale for all colours",
        hint="train with `scale` instead of `normalize`",
    )


def _with_pixels(model: Graph, dtype: str, slope: float, offset: float, where: str) -> Graph:
    """Return a model with an 8-bit input as a model whose input takes pixels, minus 128 for int8.

    The value of the model's own input is slope * pixel + offset.
    """
    tensor = model.tensors[model.inputs[0]]
    if tensor.dtype not in ("INT8", "UINT8") or tensor.quantization is None:
        raise ModelError(f"has an input of {tensor.dtype.lower()}", where=where, allowed="int8, uint8")
    low, high = dequantization.value_range(tensor)
    if offset < low - MOST_CUT * (high - low) or 255 * slope + offset > high + MOST_CUT * (high - low):
        black, white = round(offset, 6) + 0.0, 255 * slope + offset  # no -0
        raise ModelError(
            f"its preprocessing makes values from {black:g} to {white:.4g} of pixels, and its input holds {low:.4g} to "
            f"{high:.4g}",
            where=where,
            hint="set data.preprocess to that of the training: `export` with --calibrate PHOTOS does so",
        )
    lowest = {"INT8": -128, "UINT8": 0}
    zero_point = round(lowest[dtype] - offset / slope)
    if not lowest[dtype] <= zero_point <= lowest[dtype] + 255:
        raise ModelError("its preprocessing moves all pixels to one side of 0", where=where, hint="scale from 0")
    pixels = np.arange(256)
    start = lowest[tensor.dtype]
    codes = np.round((slope * pixels + offset) / tensor.quantization.scale[0]) + tensor.quantization.zero_point[0]
    if tensor.dtype == dtype and np.array_equal(codes.clip(start, start + 255) - start, pixels):
        return model
    edit = Edit(model)
    pixel_quantization = Quantization((float(np.float32(slope)),), (zero_point,), 0)
    pixel_input = edit.tensor(f"{tensor.name}/pixels", tensor.shape, dtype, pixel_quantization)
    edit.add("QUANTIZE", [pixel_input], [tensor.index], edit.options("QuantizeOptions"))
    edit.inputs = [pixel_input]
    return edit.graph()


def _input(model: Graph, model_type: ModelType, where: str) -> tuple[int, int]:
    """Return height and width of the input."""
    if len(model.inputs) != 1:
        raise ModelError(f"has {len(model.inputs)} inputs; Frigate supports one", where=where)
    tensor = model.tensors[model.inputs[0]]
    if tensor.dtype == "FLOAT32":
        hint = "quantize it, with uint8 input"
        raise ModelError("has a float32 input; Frigate needs uint8", where=where, hint=hint)
    if tensor.dtype != "UINT8" and model_type == "ssd":
        raise ModelError(f"has an input of {tensor.dtype.lower()}; Frigate needs uint8", where=where, hint=_UINT8)
    shape = tensor.shape
    if len(shape) != 4 or shape[0] != 1 or shape[3] != 3 or tensor.dynamic:
        raise ModelError(f"has the input shape {list(shape)}; Frigate needs [1, height, width, 3]", where=where)
    return shape[1], shape[2]


def _postprocess(model: Graph, where: str) -> Operator:
    """Return the operator that writes the outputs."""
    operators = model.custom_operators(POSTPROCESS)
    if len(operators) != 1:
        what = f"has {len(operators) or 'no'} {POSTPROCESS}: it writes the boxes that Frigate reads"
        raise ModelError(what, where=where, hint="export the detector with it, as TensorFlow's SSD models are")
    if model.outputs != operators[0].outputs or len(model.outputs) != len(OUTPUTS):
        output_names = ", ".join(model.tensors[index].name for index in model.outputs)
        what = f"has the outputs {output_names}; Frigate needs {', '.join(OUTPUTS)} of {POSTPROCESS}, in this order"
        raise ModelError(what, where=where)
    wrong = [index for index in model.outputs if model.tensors[index].dtype != "FLOAT32"]
    if wrong:
        raise ModelError(f"its output {model.tensors[wrong[0]].name} is not float32", where=where)
    return operators[0]


def _classes(model: Graph, operator: Operator | None, where: str) -> int | None:
    """Return the number of classes: the columns of yolo-generic's scores, or an option of the operator."""
    if operator is None:
        return model.tensors[model.outputs[1]].shape[2]
    classes = detection_postprocess.options_of(model, operator, where).get("num_classes")
    return None if classes is None else int(classes)
