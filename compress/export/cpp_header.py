"""A bundle's model as a C++ header for coralmicro (Dev Board Micro): bytes, quantization, labels, preprocessing.

Not tested on hardware: the header compiles, and its values are those of the bundle. It is C++17 and needs only <cmath>
and <cstdint>. The arithmetic is that of `deploy.contract.preprocessing` after resize and crop, which the camera driver
does.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from compress.errors import ModelError, PipelineError
from compress.files import explain, write_atomically
from deploy.contract import bundle

ALIGNMENT = 16
_PER_LINE = 20
_TYPES = {"int8": "std::int8_t", "uint8": "std::uint8_t"}
_TEXT = """\
// {name}.coralline, the {role} model, as a header for coralmicro and other C++17 programs.
// Made by Coralline. NOT TESTED ON HARDWARE: it compiles, and its values are those of the bundle.
// SHA-256 of the model: {digest}
// Preprocessing of the bundle: {steps}
//
//   auto* input = interpreter.input_tensor(0);        // kInput.dims, quantized as kInput says
//   for each pixel and channel of an image that has kHeight x kWidth:
//     tflite::GetTensorData<{input_type}>(input)[i] = Quantized(pixel, channel);
//   Invoke(); Score(tflite::GetTensorData<{output_type}>(interpreter.output_tensor(0))[k]) is the score of kLabels[k].
#ifndef {guard}
#define {guard}

#include <cmath>
#include <cstddef>
#include <cstdint>

namespace coralline::{space} {{

struct Tensor {{
  int dims[4];
  int rank;
  float scale;
  int zero_point;
}};

inline constexpr Tensor kInput = {input};
inline constexpr Tensor kOutput = {output};
inline constexpr int kHeight = {height}, kWidth = {width}, kChannels = {channels};

// The preprocessed value of a resized pixel, for each channel: pixel * kFactor + kOffset. The bundle's steps are
// combined and rounded once. Therefore Quantized() may differ from the Python runner by one step for some pixels.
inline constexpr float kFactor[] = {{{factor}}};
inline constexpr float kOffset[] = {{{offset}}};

inline constexpr int kLabelCount = {label_count};
inline constexpr const char* kLabels[] = {{{labels}}};

// The model's input for one value of a resized image. Rounds half to even, as the bundle's Python does.
inline {input_type} Quantized(float pixel, int channel) {{
  const float value = std::nearbyint((pixel * kFactor[channel] + kOffset[channel]) / kInput.scale) +
                      static_cast<float>(kInput.zero_point);
  return static_cast<{input_type}>(value < {low} ? {low} : value > {high} ? {high} : value);
}}

// The score of a stored output value.
inline float Score({output_type} stored) {{
  return static_cast<float>(static_cast<int>(stored) - kOutput.zero_point) * kOutput.scale;
}}

inline constexpr std::size_t kModelSize = {size};
alignas({alignment}) inline constexpr std::uint8_t kModel[kModelSize] = {{
{model}
}};

}}  // namespace coralline::{space}

#endif  // {guard}
"""


def export(path: Path, out: Path, role: str | None = None) -> str:
    """Write the header, and return the role of its model.

    Args:
        path: a bundle.
        out: the file for the header.
        role: `compiled` or `int8`; None for the compiled model if there is one, otherwise the int8 model.

    Raises:
        ModelError: not a bundle, or the bundle of a detector.
        PipelineError: the bundle has no model of this role.
        StoreError: the header cannot be written.
    """
    try:
        opened = bundle.read(str(path))
    except OSError as error:
        raise ModelError(f"cannot be read: {error.strerror}", where=str(path)) from error
    except bundle.BundleError as error:
        raise ModelError(str(error), where=str(path)) from error
    if opened.detector is not None:
        raise ModelError("is a detector", where=str(path), allowed="classifiers: a header has one output")
    models = opened.manifest["models"]
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
        ModelError: the input or output is not 8-bit, the input is not an image, or the preprocessing has other steps
            than resize, crop, scale and normalize.
    """
    entry = opened.manifest["models"][role]
    content = opened.members[entry["file"]]
    input_tensor = entry["input"]
    output_tensor = entry["output"]
    for end, tensor in (("input", input_tensor), ("output", output_tensor)):
        if tensor["dtype"] not in _TYPES or not tensor["scale"]:
            raise ModelError(f"its {end} is {tensor['dtype']}; coralmicro takes int8 and uint8", where=where)
    if len(input_tensor["shape"]) != 4 or len(output_tensor["shape"]) > 4:
        raise ModelError(f"its input {input_tensor['shape']} is not an image [1, height, width, channels]", where=where)
    limits = np.iinfo(input_tensor["dtype"])
    _, height, width, channels = input_tensor["shape"]
    factor, offset = _line(opened.manifest["preprocessing"]["steps"], channels, where)
    space = re.sub(r"[^a-z0-9]+", "_", opened.manifest["name"].lower()).strip("_") or "model"
    space = f"m_{space}" if space[0].isdigit() else space
    labels = list(opened.labels)
    return _TEXT.format(
        name=_comment(opened.manifest["name"]),
        role=role,
        digest=next(row["sha256"] for row in opened.manifest["members"] if row["name"] == entry["file"]),
        steps=_comment(json.dumps(opened.manifest["preprocessing"]["steps"])),
        guard=f"CORALLINE_{space.upper()}_H_",
        space=space,
        input=_tensor(input_tensor),
        output=_tensor(output_tensor),
        input_type=_TYPES[input_tensor["dtype"]],
        output_type=_TYPES[output_tensor["dtype"]],
        height=height,
        width=width,
        channels=channels,
        factor=", ".join(map(_float, factor)),
        offset=", ".join(map(_float, offset)),
        label_count=len(labels),
        labels=", ".join(_string(label) for label in labels) or "nullptr",
        low=f"{limits.min}.0f",
        high=f"{limits.max}.0f",
        size=len(content),
        alignment=ALIGNMENT,
        model=_bytes(content),
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


def _tensor(tensor: dict[str, Any]) -> str:
    shape = [*tensor["shape"], 1, 1, 1, 1][:4]
    dims = ", ".join(map(str, shape))
    return f"{{{{{dims}}}, {len(tensor['shape'])}, {_float(tensor['scale'])}, {tensor['zero_point']}}}"


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
    rows = (content[place : place + _PER_LINE] for place in range(0, len(content), _PER_LINE))
    return "\n".join("    " + ", ".join(f"0x{byte:02x}" for byte in row) + "," for row in rows)
