"""An SSD model as Frigate's `edgetpu` detector expects it: model, label map, a piece of configuration.

What that detector does: it gives the one input the pixels as they are (uint8, RGB, [1, height, width, 3]) and
reads the outputs by their place: boxes, classes, scores, count, as TFLite_Detection_PostProcess makes them.
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
"""Where the files are in Frigate's container: /config is its volume."""
MAX_CLASSES = 100_000
_NUMBERED = re.compile(r"(\d+)[\s:]+(\S.*)\Z")
_UINT8 = "python -m compress legalize IN.tflite OUT.tflite --io uint8, then compile again"


@dataclass(frozen=True)
class Export:
    """The written files.

    Attributes:
        folder: where.
        model: name of the model's file.
        compiled: whether the Edge TPU runs it.
        width, height: of its input.
        labels: names by class.
        classes: how many the model tells apart, if it says so.
    """

    folder: str
    model: str
    compiled: bool
    width: int
    height: int
    labels: dict[int, str]
    classes: int | None

    def to_json(self) -> dict[str, Any]:
        """As a plain map."""
        return {"schema_version": 1, **asdict(self)}


def export(path: Path, folder: Path, labels: Path | None = None) -> Export:
    """Writes the files.

    Args:
        path: a .tflite file or a bundle; of a bundle the compiled model, otherwise the int8 one.
        folder: made if it is not there.
        labels: class names, one a line, or `number name`; a bundle has its own.

    Raises:
        ModelError: the model is not one for that detector, and why; or the labels do not fit.
        StoreError: the folder cannot be written.
    """
    content, names = _opened(path)
    if labels is not None:
        names = _read_labels(labels)
    if not names:
        raise ModelError("the class names are missing", where=str(path), todo="give them with --labels FILE")
    model = graph.parse(content, str(path))
    last = _postprocess(model, str(path))
    height, width = _input(model, str(path))
    classes = _classes(model, last, str(path))
    if classes is not None and max(names) >= classes:
        what = (
            f"there is a name for class {max(names)}, and the model tells {classes} classes apart (0 to {classes - 1})"
        )
        raise ModelError(what, where=str(labels or path), todo="leave the background out: it is no class here")
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", path.stem).strip(".-") or "model"
    compiled = any(operator.custom and operator.name == OPERATOR for operator in model.operators)
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
    """The piece of Frigate's config.yml."""
    device = "" if exported.compiled else "# NOT COMPILED: the Edge TPU runs nothing of this model; compile it first\n"
    return (
        f"# for config.yml of Frigate 0.12 to 0.17; the files go to {FOLDER}\n{device}"
        "detectors:\n  coral:\n    type: edgetpu\n    device: usb  # or pci\n"
        f"model:\n  path: {FOLDER}/{exported.model}\n  labelmap_path: {FOLDER}/labelmap.txt\n"
        f"  width: {exported.width}\n  height: {exported.height}\n"
        "  input_tensor: nhwc\n  input_pixel_format: rgb\n  model_type: ssd\n"
    )


def describe(exported: Export) -> str:
    """For people."""
    lines = [f"{exported.folder}: {exported.model}, labelmap.txt, frigate.yml"]
    lines.append(f"copy the first two to {FOLDER}, and frigate.yml into config.yml")
    if not exported.compiled:
        lines.append("the model is not compiled: compile it with edgetpu_compiler, and export the result")
    return "\n".join(lines)


def _opened(path: Path) -> tuple[bytes, dict[int, str]]:
    """The model's bytes, and the names that came with it."""
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
    lines = [line.strip() for line in lines]
    matches = [_NUMBERED.match(line) for line in lines if line]
    if matches and all(matches):
        return {int(match[1]): match[2] for match in matches if match}
    return {index: line for index, line in enumerate(lines) if line}


def _input(model: Graph, where: str) -> tuple[int, int]:
    """Height and width of the one input."""
    if len(model.inputs) != 1:
        raise ModelError(f"has {len(model.inputs)} inputs; Frigate fills one", where=where)
    tensor = model.tensors[model.inputs[0]]
    if tensor.dtype == "FLOAT32":
        raise ModelError("takes float32, and Frigate gives uint8", where=where, todo="quantize it, with uint8 input")
    if tensor.dtype != "UINT8":
        raise ModelError(f"takes {tensor.dtype.lower()}, and Frigate gives uint8", where=where, todo=_UINT8)
    shape = tensor.shape
    if len(shape) != 4 or shape[0] != 1 or shape[3] != 3 or tensor.dynamic:
        raise ModelError(f"takes {list(shape)}; Frigate gives [1, height, width, 3]", where=where)
    return shape[1], shape[2]


def _postprocess(model: Graph, where: str) -> Operator:
    """The operator that makes the outputs."""
    operators = [operator for operator in model.operators if operator.custom and operator.name == POSTPROCESS]
    if len(operators) != 1:
        what = f"has {len(operators) or 'no'} {POSTPROCESS}: that makes the boxes that Frigate reads"
        raise ModelError(what, where=where, todo="export the detector with it, as TensorFlow's SSD models are")
    if model.outputs != operators[0].outputs or len(model.outputs) != len(OUTPUTS):
        output_names = ", ".join(model.tensors[index].name for index in model.outputs)
        what = f"gives {output_names}; Frigate reads {', '.join(OUTPUTS)} of {POSTPROCESS}, in this order"
        raise ModelError(what, where=where)
    wrong = [index for index in model.outputs if model.tensors[index].dtype != "FLOAT32"]
    if wrong:
        raise ModelError(f"its output {model.tensors[wrong[0]].name} is not float32", where=where)
    return operators[0]


def _classes(model: Graph, operator: Operator, where: str) -> int | None:
    """The `num_classes` of the operator's own options, a FlexBuffer map; None where it has no such entry."""
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
        raise ModelError(f"its {POSTPROCESS} says that there are {classes} classes", where=where)
    return classes
