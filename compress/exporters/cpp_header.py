"""A bundle's model as a C++ header for coralmicro (Dev Board Micro): bytes, inputs, outputs, labels, preprocessing.

Not tested on hardware: the header compiles, and its values are those of the bundle. It is C++17 and needs only the
standard library. The arithmetic is that of `deploy.contract.preprocessing` after resize and crop, which the camera
driver does.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from compress.errors import ModelError, PipelineError, reason_of
from compress.files import explain, write_atomically
from deploy.contract import bundle
from deploy.contract.tensors import TensorDescription

ALIGNMENT = 16
MAX_RANK = 8
_PER_LINE = 20
_TYPES = {
    "int8": "std::int8_t",
    "uint8": "std::uint8_t",
    "int16": "std::int16_t",
    "int32": "std::int32_t",
    "int64": "std::int64_t",
    "float32": "float",
    "bool": "bool",
}
_INPUTS = ("int8", "uint8")
_TEXT = """\
// {name}.coralline, the {role} model, as a header for coralmicro and other C++17 programs.
// Made by Coralline. NOT TESTED ON HARDWARE: it compiles, and its values are those of the bundle.
// SHA-256 of the model: {digest}
// Task: {task}. Preprocessing of the bundle: {steps}
//
{usage}
#ifndef {guard}
#define {guard}

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>

namespace coralline::{space} {{

struct Tensor {{
  const char* name;
  const char* type;
  int dims[{rank}];
  int rank;
  float scale;  // 0: the values are not quantized
  int zero_point;
}};

inline constexpr int kInputCount = {input_count};
inline constexpr Tensor kInputs[] = {{
{inputs}
}};
inline constexpr int kOutputCount = {output_count};
inline constexpr Tensor kOutputs[] = {{
{outputs}
}};

inline constexpr int kLabelCount = {label_count};
inline constexpr const char* kLabels[] = {{{labels}}};

// The stored value of a quantized tensor for a real value. Rounds half to even, as the bundle's Python does.
template <typename T>
inline T Quantized(float value, const Tensor& tensor) {{
  const float low = static_cast<float>(std::numeric_limits<T>::min());
  const float high = static_cast<float>(std::numeric_limits<T>::max());
  const float stored = std::nearbyint(value / tensor.scale) + static_cast<float>(tensor.zero_point);
  return static_cast<T>(stored < low ? low : stored > high ? high : stored);
}}

// The real value of a stored value of a quantized tensor.
template <typename T>
inline float Real(T stored, const Tensor& tensor) {{
  return static_cast<float>(static_cast<int>(stored) - tensor.zero_point) * tensor.scale;
}}
{image}
inline constexpr std::size_t kModelSize = {size};
alignas({alignment}) inline constexpr std::uint8_t kModel[kModelSize] = {{
{model}
}};

}}  // namespace coralline::{space}

#endif  // {guard}
"""
_IMAGE = """
inline constexpr int kHeight = {height}, kWidth = {width}, kChannels = {channels};

// The preprocessed value of a resized pixel, for each channel: pixel * kFactor + kOffset. The bundle's steps are
// combined and rounded once. Therefore Pixel() may differ from the Python runner by one step for some pixels.
inline constexpr float kFactor[] = {{{factor}}};
inline constexpr float kOffset[] = {{{offset}}};

// The model's input for one value of a resized image.
inline {type} Pixel(float pixel, int channel) {{
  return Quantized<{type}>(pixel * kFactor[channel] + kOffset[channel], kInputs[0]);
}}
"""
_IMAGE_USAGE = """\
//   for each pixel and channel of an image that has kHeight x kWidth:
//     tflite::GetTensorData<{type}>(interpreter.input_tensor(0))[i] = Pixel(pixel, channel);"""
_INPUT_USAGE = """\
//   for each value of the input k (kInputs[k]):
//     tflite::GetTensorData<T>(interpreter.input_tensor(k))[i] = Quantized<T>(value, kInputs[k]);"""
_OUTPUT_USAGE = """\
//   Invoke(); Real(tflite::GetTensorData<T>(interpreter.output_tensor(k))[i], kOutputs[k]) is the value of output k."""


def export(path: Path, out: Path, role: str | None = None) -> str:
    """Write the header, and return the role of its model.

    Args:
        path: a bundle.
        out: the file for the header.
        role: `compiled` or `int8`; None for the compiled model if there is one, otherwise the int8 model.

    Raises:
        ModelError: not a bundle, or see `text`.
        PipelineError: the bundle has no model of this role.
        StoreError: the header cannot be written.
    """
    try:
        opened = bundle.read(str(path))
    except OSError as error:
        raise ModelError(f"cannot be read: {error.strerror}", where=str(path)) from error
    except bundle.BundleError as error:
        raise ModelError(reason_of(error), where=str(path)) from error
    models = opened.models
    chosen_role = role or ("compiled" if "compiled" in models else "int8")
    if chosen_role not in models:
        raise PipelineError(
            f"the bundle has no {chosen_role} model", where=str(path), allowed=", ".join(sorted(models))
        )
    content = text(opened, chosen_role, str(path))
    try:
        write_atomically(out, content.encode())
    except OSError as error:
        raise explain(error, f"{out} cannot be written") from error
    return chosen_role


def text(opened: bundle.Bundle, role: str, where: str = "") -> str:
    """Return the text of the header.

    Raises:
        ModelError: an input is not 8-bit, an output has a type that the header does not support, the input is looked up
            in a table, or the preprocessing has other steps than resize, crop, scale and normalize of an image.
    """
    model = opened.models[role]
    if model.lookup is not None:
        what = "its input is looked up in a table, which the header does not contain"
        raise ModelError(what, where=where, allowed="models without an embedding at their beginning")
    content = opened.content(role)
    for tensor in model.inputs:
        if tensor.dtype not in _INPUTS or not tensor.scale:
            raise ModelError(f"its input {tensor.name} is {tensor.dtype}; coralmicro takes int8 and uint8", where=where)
    for tensor in model.outputs:
        if tensor.dtype not in _TYPES:
            raise ModelError(f"its output {tensor.name} is {tensor.dtype}", where=where, allowed=", ".join(_TYPES))
    steps = opened.manifest["preprocessing"]["steps"]
    image = _image(model.inputs[0], steps, where) if _takes_image(model) else ""
    if steps and not image:
        raise ModelError("has preprocessing, and its input is not an image [1, height, width, channels]", where=where)
    space = re.sub(r"[^a-z0-9]+", "_", opened.manifest["name"].lower()).strip("_") or "model"
    space = f"m_{space}" if space[0].isdigit() else space
    labels = list(opened.labels)
    usage = _IMAGE_USAGE.format(type=_TYPES[model.inputs[0].dtype]) if image else _INPUT_USAGE
    return _TEXT.format(
        name=_comment(opened.manifest["name"]),
        role=role,
        task=opened.task,
        digest=next(row["sha256"] for row in opened.manifest["members"] if row["name"] == model.file),
        steps=_comment(json.dumps(steps)),
        usage=f"{usage}\n{_OUTPUT_USAGE}",
        guard=f"CORALLINE_{space.upper()}_H_",
        space=space,
        rank=MAX_RANK,
        input_count=len(model.inputs),
        inputs=_tensors(model.inputs),
        output_count=len(model.outputs),
        outputs=_tensors(model.outputs),
        image=image,
        label_count=len(labels),
        labels=", ".join(_string(label) for label in labels) or "nullptr",
        size=len(content),
        alignment=ALIGNMENT,
        model=_bytes(content),
    )


def _takes_image(model: bundle.BundledModel) -> bool:
    return len(model.inputs) == 1 and len(model.inputs[0].shape) == 4


def _image(tensor: TensorDescription, steps: Sequence[dict[str, Any]], where: str) -> str:
    """Return the part of the header for a model that takes one image."""
    _, height, width, channels = tensor.shape
    factor, offset = _line(steps, channels, where)
    return _IMAGE.format(
        height=height,
        width=width,
        channels=channels,
        factor=", ".join(map(_float, factor)),
        offset=", ".join(map(_float, offset)),
        type=_TYPES[tensor.dtype],
    )


def _line(steps: Sequence[dict[str, Any]], channels: int, where: str) -> tuple[list[float], list[float]]:
    """Return factor and offset of each channel: the steps `scale` and `normalize` combined.

    Raises:
        ModelError: the header does not support a step.
    """
    factor = np.ones(channels)
    offset = np.zeros(channels)
    for step in steps:
        ((name, settings),) = step.items()
        if name == "scale":
            (low, high), (first, last) = settings["from"], settings.get("to", (0.0, 1.0))
            by = (last - first) / (high - low)
            plus = first - low * (last - first) / (high - low)
            factor = factor * by
            offset = offset * by + plus
        elif name == "normalize":
            mean = np.asarray(settings["mean"], float)
            deviation = np.asarray(settings["std"], float)
            factor = factor / deviation
            offset = (offset - mean) / deviation
        elif name not in ("resize", "crop"):
            raise ModelError(
                f"its preprocessing has the step {name}, which the header does not support",
                where=where,
                allowed="resize, crop, scale, normalize",
            )
    return factor.tolist(), offset.tolist()


def _tensors(tensors: Sequence[TensorDescription]) -> str:
    """Return the rows of an array of `Tensor`."""
    rows = []
    for tensor in tensors:
        dims = ", ".join(map(str, [*tensor.shape, *[1] * MAX_RANK][:MAX_RANK]))
        kind = _string(_TYPES[tensor.dtype])
        values = f"{len(tensor.shape)}, {_float(tensor.scale or 0.0)}, {tensor.zero_point}"
        rows.append(f"    {{{_string(tensor.name)}, {kind}, {{{dims}}}, {values}}},")
    return "\n".join(rows)


def _float(value: float) -> str:
    """Return a float32 as a C++ literal with exactly this value."""
    shown = f"{np.float32(value):.9g}"
    return f"{shown}f" if any(mark in shown for mark in ".en") else f"{shown}.0f"


def _string(label: str) -> str:
    """Return a C++ string literal in UTF-8. Octal escapes have three digits, so the next character is separate."""
    plain = {byte: chr(byte) for byte in range(32, 127) if chr(byte) not in '"\\?'}
    return '"' + "".join(plain.get(byte, f"\\{byte:03o}") for byte in label.encode("utf-8", "replace")) + '"'


def _comment(text: str) -> str:
    """Return a text for a one-line comment, without backslashes: one at the end would continue the comment."""
    return re.sub(r"[^\x20-\x7e]|\\", " ", text)


def _bytes(content: bytes) -> str:
    rows = (content[start : start + _PER_LINE] for start in range(0, len(content), _PER_LINE))
    return "\n".join("    " + ", ".join(f"0x{byte:02x}" for byte in row) + "," for row in rows)
