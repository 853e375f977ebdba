"""Detector models assembled by hand: outputs of any box code, copied from inputs or computed from an image."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import devices
import numpy as np
import one_op
from one_op import Op, Tensor

from compress.model.tflite import graph
from compress.model.tflite.edit import VALID
from compress.model.tflite.graph import Graph
from compress.model.tflite.interpreter import LoadedModel
from deploy.contract import bundle
from deploy.contract.detection import Detector
from deploy.contract.preprocessing import VERSION, Preprocessing

SCALES = {"boxes": 0.03, "scores": 0.05, "objectness": 0.04}
"""Scales of 8-bit outputs; those of later maps are larger."""


def specification(code: str, side: int = 64, **changes: Any) -> dict[str, Any]:
    """Return a specification with maps of strides 8, 16 and 32 pixels, and an output for each map and part."""
    objectness = changes.pop("with_objectness", False)
    parts = ["boxes", "scores", *(["objectness"] if objectness else [])]
    maps: list[dict[str, Any]] = [{"cells": [side // stride, side // stride]} for stride in (8, 16, 32)]
    if code == "ssd":
        for number, entry in enumerate(maps):
            entry["boxes"] = [[0.1 * 2**number, 0.2], [0.3, 0.1 * 2**number]]
    tensors = [{"part": part, "map": number} for number in range(3) for part in parts]
    return {"maps": maps, "code": code, "tensors": tensors, **changes}


def outputs(described: Mapping[str, Any], classes: int, dtype: str = "INT8") -> dict[str, Tensor]:
    """Return the output tensors of a detector by name, [1, height, width, values]."""
    detector = Detector(described)
    columns = classes + (detector.specification["background"] is not None)
    tensors = {}
    for number, entry in enumerate(detector.specification["tensors"]):
        grid = detector.specification["maps"][entry["map"]]
        anchors = len(grid.get("boxes", ())) or 1
        width = {"boxes": 4, "scores": columns, "objectness": 1}[entry["part"]] * anchors
        if entry["part"] == "boxes" and detector.specification["code"] == "dfl":
            width *= detector.specification["bins"]
        scale = SCALES[entry["part"]] * (1 + 0.2 * entry["map"])
        quantization: dict[str, Any] = {"scales": (scale,), "zero_point": 20} if dtype != "FLOAT32" else {"scales": ()}
        if dtype != "FLOAT32" and detector.specification["scores"] == "probabilities" and entry["part"] != "boxes":
            quantization = {"scales": (1 / 256,), "zero_point": -128 if dtype == "INT8" else 0}
        elif dtype == "UINT8":
            quantization["zero_point"] = 148
        tensors[f"{entry['part']}{entry['map']}-{number}"] = Tensor((1, *grid["cells"], width), dtype, **quantization)
    return tensors


def flat_outputs(described: Mapping[str, Any], classes: int, dtype: str = "INT8") -> dict[str, Tensor]:
    """Return tensors for the boxes and scores of all locations, [1, n, values]."""
    detector = Detector(described)
    count, columns = len(detector.anchors), classes + (detector.specification["background"] is not None)
    real = {"scales": ()}
    return {
        "boxes": Tensor(
            (1, count, 4), dtype, **(real if dtype == "FLOAT32" else {"scales": (0.03,), "zero_point": 128})
        ),
        "scores": Tensor((1, count, columns), dtype, **(real if dtype == "FLOAT32" else {"scales": (1 / 256,)})),
    }


def from_inputs(described: Mapping[str, Any], classes: int, dtype: str = "INT8", *, flat: bool = False) -> Graph:
    """Return a model whose outputs are copies of its inputs."""
    results = flat_outputs(described, classes, dtype) if flat else outputs(described, classes, dtype)
    tensors, operators = dict(results), []
    for name, tensor in results.items():
        tensors[f"given-{name}"] = tensor
        tensors[f"shape-{name}"] = one_op.integers(*tensor.shape)
        operators.append(Op("RESHAPE", [f"given-{name}", f"shape-{name}"], [name]))
    return one_op.read(tensors, operators, [f"given-{name}" for name in results], list(results))


def from_image(described: Mapping[str, Any], classes: int, image: Tensor) -> Graph:
    """Return a model that computes its outputs from an image: the mean of each cell, then a 1x1 convolution."""
    random = np.random.default_rng(0)
    results = outputs(described, classes, "INT8")
    tensors, operators = {"image": image, **results}, []
    start = "image"
    if image.dtype == "UINT8":
        start = "signed"
        tensors[start] = Tensor(image.shape, "INT8", None, image.scales, image.zero_point - 128)
        operators.append(Op("QUANTIZE", ["image"], [start]))
    signed = tensors[start]
    middle = 0 if image.zero_point in (-1, 0) and image.dtype == "INT8" else 1  # inputs from -1 to 1, or from 0 to 1
    for name, tensor in results.items():
        step = image.shape[1] // tensor.shape[1]
        pooled = f"pooled-{name}"
        tensors[pooled] = Tensor((1, *tensor.shape[1:3], 3), "INT8", None, signed.scales, signed.zero_point)
        pool = {"filterHeight": step, "filterWidth": step, "strideH": step, "strideW": step, "padding": VALID}
        operators.append(Op("AVERAGE_POOL_2D", [start], [pooled], 2, pool))
        width = tensor.shape[3]
        kernel = random.integers(-127, 128, (width, 1, 1, 3))
        centre, deviation = {"boxes": (1.2, 0.3), "scores": (-1.5, 2.0), "objectness": (0.5, 1.0)}[
            name.rstrip("-0123456789")
        ]
        value = deviation / 40  # value of one step of the kernel: inputs have a standard deviation of about 0.3
        tensors[f"kernel-{name}"] = Tensor(kernel.shape, "INT8", kernel, (value,) * width)
        biases = np.round((centre / value - kernel.sum(axis=(1, 2, 3)) * 0.5 * middle) / image.scales[0])
        tensors[f"bias-{name}"] = Tensor((width,), "INT32", biases, (value * image.scales[0],) * width)
        convolution = {"strideH": 1, "strideW": 1, "padding": VALID}
        operators.append(Op("CONV_2D", [pooled, f"kernel-{name}", f"bias-{name}"], [name], 3, convolution))
    return one_op.read(tensors, operators, ["image"], list(results))


def answers(content: bytes, inputs: Sequence[Any]) -> list[np.ndarray]:
    """Return the dequantized outputs of a model, in the order of the file."""
    from ai_edge_litert.interpreter import Interpreter

    interpreter = Interpreter(model_content=content)
    interpreter.allocate_tensors()
    for detail, values in zip(interpreter.get_input_details(), inputs, strict=True):
        interpreter.set_tensor(detail["index"], values)
    interpreter.invoke()
    dequantized = []
    for detail in interpreter.get_output_details():
        values = interpreter.get_tensor(detail["index"])
        scale, zero_point = detail["quantization"]
        dequantized.append((values.astype(np.float32) - zero_point) * scale if scale else values)
    return dequantized


def bundle_of(content: bytes, described: Mapping[str, Any], steps: Sequence[Any], labels: Sequence[str]) -> bytes:
    """Return a bundle of an 8-bit detector without golden outputs."""
    preprocessing = Preprocessing(steps)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "m.tflite")
        path.write_bytes(content)
        entry = devices.described(LoadedModel(path, reproducible=True), "int8.tflite")
    manifest = {
        "name": "objects",
        "coralline": "0.0",
        "task": "detection",
        "labels": list(labels),
        "preprocessing": {"version": VERSION, "digest": preprocessing.digest, "steps": steps},
        "models": {"int8": entry},
        "golden": {"inputs": [], "outputs": {}},
        "detection": dict(described),
    }
    return bundle.pack(manifest, {"int8.tflite": content})


def small(side: int, steps: Sequence[Any], **changes: Any) -> bytes:
    """Return a bundle of a detector of three classes for side x side pixels with values from 0 to 1."""
    described = specification("ltrb", side, **changes)
    image = Tensor((1, side, side, 3), "INT8", scales=(1 / 255,), zero_point=-128)
    return bundle_of(graph.serialize(from_image(described, 3, image)), described, steps, ["a", "b", "c"])


def small_bundle(folder: Path, side: int, steps: Sequence[Any]) -> Path:
    """Write the bundle `small`; return its path."""
    path = folder / "d.coralline"
    path.write_bytes(small(side, steps))
    return path


def photo(seed: int, height: int = 120, width: int = 160) -> np.ndarray:
    """Random squares of 20 x 20 pixels: uint8 [height, width, 3]."""
    random = np.random.default_rng(seed)
    return np.kron(random.integers(0, 256, (height // 20, width // 20, 3)), np.ones((20, 20, 1))).astype(np.uint8)
