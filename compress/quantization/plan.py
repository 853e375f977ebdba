"""What is decided before anything is quantized: the range of every activation, and what changes in the weights.

Calibration makes a plan, training makes a plan; it is written beside the model as plain JSON,
to be read by people. `conversion.convert` turns a model and a plan into a .tflite file.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

SCHEMA_VERSION = 2
LEVELS = 255
"""Steps of an 8-bit range."""
FIXED = {"softmax": (0.0, 255 / 256), "sigmoid": (0.0, 255 / 256), "tanh": (-1.0, 127 / 128)}
"""Output ranges that TFLite prescribes for some activations (scale 1/256 or 1/128)."""


@dataclass(frozen=True)
class QuantizationPlan:
    """Ranges of activations, and edits of weights; in this order: factors, bias shifts, rounding.

    Attributes:
        ranges: (lowest, highest) by point; a point is named after the layer call whose output it is.
        method: how the ranges were found.
        factors: by layer what each of its output channels is divided by, and every layer that takes it multiplied
            by (`equalization`); a layer without factors keeps its channels.
        bias_shifts: by layer what is added to its biases.
        rounding: by layer which weights go to the step above instead of below, where that was learnt: one bit for
            each weight in the order of the kernel, base64; other layers go to the nearest step.
    """

    ranges: Mapping[str, tuple[float, float]]
    method: str
    factors: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    bias_shifts: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    rounding: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> str:
        """As text, for a file beside the model."""
        content: dict[str, Any] = {"schema_version": SCHEMA_VERSION, "method": self.method}
        for name in ("ranges", "factors", "bias_shifts"):
            content[name] = {key: list(values) for key, values in getattr(self, name).items()}
        content["rounding"] = dict(self.rounding)
        return json.dumps(content, indent=1) + "\n"


def packed(up: NDArray[np.bool_]) -> str:
    """Choices as they stand in a plan."""
    return base64.b64encode(np.packbits(up.ravel()).tobytes()).decode()


def unpacked(text: str, shape: tuple[int, ...]) -> NDArray[np.bool_]:
    """The choices for a kernel of that shape."""
    bits = np.unpackbits(np.frombuffer(base64.b64decode(text), np.uint8), count=int(np.prod(shape)))
    return bits.reshape(shape).astype(bool)


def nudged(low: float, high: float) -> tuple[float, float]:
    """The range moved so that 0 is exactly a step, as the 8-bit file will have it.

    Source: TensorFlow's fake_quant documentation; Jacob et al., CVPR 2018, section 3.1.
    """
    low, high = min(low, 0.0), max(high, 0.0)
    if high - low < 1e-6:  # a tensor that is always 0
        high = low + 1e-6
    scale = (high - low) / LEVELS
    zero_point = round(-low / scale)
    return -zero_point * scale, (LEVELS - zero_point) * scale


def on_grid(weights: NDArray[np.float32], axes: tuple[int, ...]) -> NDArray[np.float32]:
    """Weights rounded onto their symmetric int8 grid; one scale for all that `axes` run over.

    The largest weight of each channel becomes +-127 steps, so a converter that derives the
    scale from the rounded weights finds the same grid.
    """
    scale = np.abs(weights).max(axis=axes, keepdims=True).astype(np.float64) / 127
    scale = np.where(scale > 0, scale, 1.0)
    return (np.clip(np.rint(weights / scale), -127, 127) * scale).astype(np.float32)
