"""Export of an SSD model for Frigate's `edgetpu` detector: model, label map, and a part of the configuration.

The detector writes unprocessed pixels (uint8, RGB, [1, height, width, 3]) into the only input, and reads the outputs by
position: boxes, classes, scores, count, as TFLite_Detection_PostProcess writes them.
Source: docs.frigate.video, "Object Detectors" and "Configuring", Frigate 0.12 to 0.17;
blakeblackshear/frigate, frigate/detectors/plugins/edgetpu_tfl.py and frigate/util/builtin.py (labels).
"""

from __future__ import annotations

import re
import struct
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from compress.errors import ModelError
from compress.files import explain, write_atomically
from compress.targets.edgetpu.darwinn_package import OPERATOR
from compress.tflite import graph
from compress.tflite.graph import Graph, Operator
from deploy.contract import bundle

POSTPROCESS = "TFLite_Detection_PostProcess"
OUTPUTS = ("boxes", "classes", "scores", "count")
FOLDER = "/config/model_cache"
"""The folder of the files in Frigate's container; /config is its volume."""
MAX_CLASSES = 100_000
_NUMBERED = re.compile(r"(\d+)[\s:]+(\S.*)\Z")
_UINT8 = "python -m compress legalize IN.tflite OUT.tflite --io uint8, then compile again"


@dataclass(frozen=True)
class Export:
    """The written files.

    Attributes:
        folder: the folder of the files.
        model: the name of the model's file.
        compiled: whether the model is compiled for the Edge TPU.
        width, height: the size of its input.
        labels: class names by number.
        classes: the number of classes, if the model contains it.
    """

    folder: str
    model: str
    compiled: bool
    width: int
    height: int
    labels: dict[int, str]
    classes: int | None

    def to_json(self) -> dict[str, Any]:
        """Return the export as a plain map."""
        return {"schema_version": 1, **asdict(self)}


def export(path: Path, folder: Path, labels: Path | None = None) -> Export:
    """Write the files.

    Args:
        path: a .tflite file, or a bundle (its compiled model if there is one, otherwise the int8 model).
        folder: the folder for the files; it is created if necessary.
        labels: class names, one on each line, or `number name`; a bundle contains its own.

    Raises:
        ModelError: the model is not suitable for that detector, or the labels do not fit.
        StoreError: the folder cannot be written.
    """
    content, names = _opened(path)
    if labels is not None:
        names = _read_labels(labels)
    if not names:
        raise ModelError("the class names are missing", where=str(path), hint="give them with --labels FILE")
    model = graph.parse(content, str(path))
    last = _postprocess(model, str(path))
    height, width = _input(model, str(path))
    classes = _classes(model, last, str(path))
    if classes is not None and max(names) >= classes:
        what = f"has a name for class {max(names)}, and the model has {classes} classes (0 to {classes - 1})"
        raise ModelError(what, where=str(labels or path), hint="remove the background class")
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", path.stem).strip(".-") or "model"
    compiled = bool(model.custom_operators(OPERATOR))
    exported = Export(str(folder), f"{name}.tflite", compiled, width, height, names, classes)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / exported.model, content)
        write_atomically(folder / "labelmap.txt", "".join(f"{n} {names[n]}\n" for n in sorted(names)).encode())
        write_atomically(folder / "frigate.yml", configuration(exported).encode())
    except OSError as error:
        raise explain(error, f"{folder} cannot be written") from error
    return exported


def configuration(exported: Export) -> str:
    """Return the part of Frigate's config.yml for the model."""
    device = "" if exported.compiled else "# NOT COMPILED: the Edge TPU cannot run this model; compile it first\n"
    return (
        f"# for config.yml of Frigate 0.12 to 0.17; the files go to {FOLDER}\n{device}"
        "detectors:\n  coral:\n    type: edgetpu\n    device: usb  # or pci\n"
        f"model:\n  path: {FOLDER}/{exported.model}\n  labelmap_path: {FOLDER}/labelmap.txt\n"
        f"  width: {exported.width}\n  height: {exported.height}\n"
        "  input_tensor: nhwc\n  input_pixel_format: rgb\n  model_type: ssd\n"
    )


def describe(exported: Export) -> str:
    """Return the export as text for a person."""
    lines = [f"{exported.folder}: {exported.model}, labelmap.txt, frigate.yml"]
    lines.append(f"copy the first two to {FOLDER}, and frigate.yml into config.yml")
    if not exported.compiled:
        lines.append("the model is not compiled: compile it with edgetpu_compiler, and export the result")
    return "\n".join(lines)


def _opened(path: Path) -> tuple[bytes, dict[int, str]]:
    """Return the model's bytes, and the class names in a bundle."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ModelError(f"cannot be read: {error.strerror}", where=str(path)) from error
    if content[4:8] == graph.IDENTIFIER:
        return content, {}
    try:
        opened = bundle.Bundle(content)
    except bundle.BundleError as error:
        raise ModelError(f"is neither a .tflite file nor a bundle: {error}", where=str(path)) from error
    models = opened.manifest["models"]
    role = next((role for role in ("compiled", "int8") if role in models), None)
    if role is None:
        raise ModelError("the bundle has no int8 model", where=str(path))
    return opened.members[models[role]["file"]], dict(enumerate(opened.labels))


def _read_labels(path: Path) -> dict[int, str]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"the labels cannot be read: {error}", where=str(path)) from error
    names = {index: line.strip() for index, line in enumerate(lines) if line.strip()}
    matches = [_NUMBERED.match(name) for name in names.values()]
    if None in matches:
        return names
    return {int(match[1]): match[2] for match in matches if match}


def _input(model: Graph, where: str) -> tuple[int, int]:
    """Return height and width of the input."""
    if len(model.inputs) != 1:
        raise ModelError(f"has {len(model.inputs)} inputs; Frigate supports one", where=where)
    tensor = model.tensors[model.inputs[0]]
    if tensor.dtype == "FLOAT32":
        hint = "quantize it, with uint8 input"
        raise ModelError("has a float32 input; Frigate needs uint8", where=where, hint=hint)
    if tensor.dtype != "UINT8":
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


def _classes(model: Graph, operator: Operator, where: str) -> int | None:
    """Return `num_classes` from the operator's options, a FlexBuffer map; None without such an entry."""
    from flatbuffers import flexbuffers

    stored = model.source.subgraphs[0].operators[operator.index].customOptions
    if stored is None or len(stored) == 0:
        return None
    try:
        root = flexbuffers.GetRoot(bytes(bytearray(stored)))
        value = root.AsMap["num_classes"] if root.IsMap else None
        classes = int(value.AsInt) if value is not None and value.IsNumeric else None
    except KeyError:
        return None
    except (struct.error, IndexError, ValueError, TypeError, RecursionError, OverflowError) as error:
        raise ModelError(f"the options of its {POSTPROCESS} cannot be read: {error}", where=where) from error
    if classes is not None and not 0 < classes <= MAX_CLASSES:
        raise ModelError(f"its {POSTPROCESS} has {classes} classes", where=where, allowed=f"1 to {MAX_CLASSES:,}")
    return classes
