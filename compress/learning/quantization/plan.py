"""The quantization plan: the range of every activation, and the changes of the weights.

Calibration and training produce a plan. It is written next to the model as JSON, and people can
read and edit it. `edited` and `gridded` apply a plan to a network, and `export.convert` turns both into a .tflite file.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from compress.core.errors import StageError
from compress.core.settings import Settings
from compress.learning.quantization import equalization
from compress.model.ir.keras_graph import Layer, Network
from compress.model.ir.layer_specs import spec_of
from compress.model.ir.passes import separate_gates

SCHEMA_VERSION = 2
LEVELS = 255
"""Steps of an 8-bit range."""
FARTHEST = 1e30
"""Largest end of a range: beyond it TensorFlow's quantizer ends the process, since a step must be a float32."""
FACTORS = (1e-6, 1e6)
"""Least and greatest factor of a plan; a search goes from 1e-4 to 1e4 (`equalization.LIMIT`)."""


@dataclass(frozen=True)
class QuantizationPlan:
    """Ranges of activations, and changes of layers; in this order: separated gates, factors, bias shifts, rounding.

    Attributes:
        ranges: (lowest, highest) by point; a point is named after the layer call whose output it is, and further
            outputs of that call after their number too (`layer:call:output`).
        method: how the ranges were chosen, for people.
        factors: by layer the divisor of each of its output channels, which layers that use it multiply by
            (`equalization`); a layer without factors keeps its channels.
        bias_shifts: by layer the values that are added to its biases.
        rounding: by layer which weights AdaRound rounds up instead of down: one bit for each weight in the order of
            the kernel, base64; weights of other layers are rounded to the nearest step.
        weights_digest: of the weights that it was made for (`weights_digest`); empty if unknown.
        trained_with_rounding: whether those weights are the result of QAT, and only in its .tflite file.
        separated_gates: the activations whose gate is a layer of its own (`ir.passes.separate_gates`). The layer that
            computes the first factor of such a product needs factors: equal layers become one in the .tflite file.
    """

    ranges: Mapping[str, tuple[float, float]]
    method: str
    factors: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    bias_shifts: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    rounding: Mapping[str, str] = field(default_factory=dict)
    weights_digest: str = ""
    trained_with_rounding: bool = False
    separated_gates: tuple[str, ...] = ()

    def to_json(self) -> str:
        """Return the plan as text, for a file next to the model."""
        content: dict[str, Any] = {"schema_version": SCHEMA_VERSION, "method": self.method}
        for name in ("ranges", "factors", "bias_shifts"):
            content[name] = {key: list(values) for key, values in getattr(self, name).items()}
        content["rounding"] = dict(self.rounding)
        content["separated_gates"] = list(self.separated_gates)
        content |= {"weights_digest": self.weights_digest, "trained_with_rounding": self.trained_with_rounding}
        return json.dumps(content, indent=1) + "\n"


class _File(Settings):
    """A plan in a file."""

    schema_version: Literal[2]
    method: str
    ranges: dict[str, tuple[float, float]]
    factors: dict[str, tuple[float, ...]] = {}
    bias_shifts: dict[str, tuple[float, ...]] = {}
    rounding: dict[str, str] = {}
    weights_digest: str = ""
    trained_with_rounding: bool = False
    separated_gates: tuple[str, ...] = ()


def read(path: Path) -> QuantizationPlan:
    """Read a plan from its file, which people may have edited.

    Raises:
        StageError: the file cannot be read, or is not a plan.
    """
    try:
        content = _File.model_validate_json(path.read_bytes(), strict=True)
    except OSError as error:
        raise StageError(f"cannot be read: {error.strerror}", where=str(path), hint="check quantize.plan") from error
    except ValidationError as errors:
        first = errors.errors()[0]
        location = ".".join(str(part) for part in first["loc"])
        raise StageError(
            f"is not a plan: {location}: {first['msg']}" if location else f"is not a plan: {first['msg']}",
            where=str(path),
            hint="start from the quantization.json that `quantize` writes",
        ) from errors
    _refuse_beyond(content, path)
    ranges = {point: nudged(*limits) for point, limits in content.ranges.items()}
    edits = (content.factors, content.bias_shifts, content.rounding)
    origin = (content.weights_digest, content.trained_with_rounding)
    return QuantizationPlan(ranges, content.method, *edits, *origin, content.separated_gates)


def weights_digest(network: Network) -> str:
    """Return the SHA-256 digest of the names, shapes and values of a canonical network's weights."""
    digest = hashlib.sha256()
    for name in sorted(network.layers):
        for weight in network.layers[name].weights:
            digest.update(f"{name} {weight.dtype} {weight.shape}\n".encode() + weight.tobytes())
    return digest.hexdigest()


def _refuse_beyond(plan: _File, path: Path) -> None:
    """Refuse values that no calibration produces."""
    for point, (low, high) in plan.ranges.items():
        if not -FARTHEST <= low <= 0 <= high <= FARTHEST:
            raise StageError(
                f"the range of {point} is {low:g} to {high:g}",
                where=str(path),
                allowed=f"a range that contains 0, between {-FARTHEST:g} and {FARTHEST:g}",
            )
    kinds = (
        ("factors", plan.factors, *FACTORS),
        ("bias_shifts", plan.bias_shifts, -FARTHEST, FARTHEST),
    )
    for name, by_layer, least, most in kinds:
        for layer, values in by_layer.items():
            beyond = next((value for value in values if not least <= value <= most), None)
            if beyond is not None:
                raise StageError(
                    f"{beyond:g} is one of the {name} of {layer}",
                    where=str(path),
                    allowed=f"values from {least:g} to {most:g}",
                )


def packed(up: NDArray[np.bool_]) -> str:
    """Return rounding directions in the form of a plan."""
    return base64.b64encode(np.packbits(up.ravel()).tobytes()).decode()


def unpacked(text: str, shape: tuple[int, ...]) -> NDArray[np.bool_]:
    """Return the rounding directions for a kernel of some shape.

    Raises:
        ValueError: the text is not base64, or for another shape.
    """
    count = int(np.prod(shape))
    content = base64.b64decode(text, validate=True)
    if len(content) != -(-count // 8):
        raise ValueError(f"{len(content)} bytes for {count} weights")
    return np.unpackbits(np.frombuffer(content, np.uint8), count=count).reshape(shape).astype(bool)


def nudged(low: float, high: float) -> tuple[float, float]:
    """Return the range shifted so that 0 is exactly a step, as in the 8-bit file.

    Source: TensorFlow's fake_quant documentation; Jacob et al., CVPR 2018, section 3.1.
    """
    low, high = min(low, 0.0), max(high, 0.0)
    if high - low < 1e-6:  # a tensor that is always 0
        high = low + 1e-6
    scale = (high - low) / LEVELS
    zero_point = round(-low / scale)
    return -zero_point * scale, (LEVELS - zero_point) * scale


def restructured(network: Network, plan: QuantizationPlan) -> Network:
    """Return the network with the layers that a plan names: the same function, with some gates separated.

    Raises:
        StageError: the plan is for another network.
    """
    return separate_gates.separated(network, plan.separated_gates)


def edited(network: Network, plan: QuantizationPlan) -> Network:
    """Return the network with the layers, weights and biases of a plan, not yet rounded."""
    return shifted(equalization.applied(restructured(network, plan), plan.factors), plan.bias_shifts)


def shifted(network: Network, shifts: Mapping[str, tuple[float, ...]]) -> Network:
    """Return the network with values added to its biases."""
    changed = {}
    for name, values in shifts.items():
        layer = network.layers[name]
        bias = layer.weights[1] if len(layer.weights) > 1 else np.float32(0)
        moved = (bias + np.asarray(values)).astype(np.float32)
        changed[name] = replace(layer.configured(use_bias=True), weights=(layer.weights[0], moved))
    return network.edited(changed, {})


def gridded(network: Network, plan: QuantizationPlan | None = None) -> Network:
    """Return the network with all kernels rounded onto their 8-bit grids: to the nearest step, or as a plan says."""
    rounding = plan.rounding if plan else {}
    changed = {}
    for name, layer in network.layers.items():
        axes = spec_of(layer).kernel
        if axes is None:
            continue
        kernel, *others = layer.weights
        if name in rounding:
            kernel = rounded(layer, unpacked(rounding[name], kernel.shape))
        else:
            kernel = on_grid(kernel, axes.scale_axes(kernel.ndim))
        changed[name] = replace(layer, weights=(kernel, *others))
    return network.edited(changed, {})


def rounded(layer: Layer, up: NDArray[np.bool_]) -> NDArray[np.float32]:
    """Return the layer's kernel with each weight rounded up or down; those on a step stay on it."""
    scale = grid(layer).astype(np.float64)
    position = layer.weights[0] / scale
    near = np.abs(position - np.rint(position)) < 1e-4
    chosen = np.where(near, np.rint(position), np.floor(position) + up)
    return np.asarray(np.clip(chosen, -127, 127) * scale, np.float32)


def grid(layer: Layer) -> NDArray[np.float32]:
    """Return the step of each output's weights, in a shape that broadcasts over the kernel."""
    kernel = layer.weights[0]
    return _step(kernel, spec_of(layer).kernels[0].scale_axes(kernel.ndim)).astype(np.float32)


def on_grid(weights: NDArray[np.float32], axes: tuple[int, ...]) -> NDArray[np.float32]:
    """Return weights rounded onto their symmetric int8 grid; weights along `axes` share one scale.

    The largest weight of each channel becomes +-127 steps, so a converter that derives the
    scale from the rounded weights finds the same grid.
    """
    scale = _step(weights, axes)
    return (np.clip(np.rint(weights / scale), -127, 127) * scale).astype(np.float32)


def _step(weights: NDArray[np.float32], axes: tuple[int, ...]) -> NDArray[np.float64]:
    scale = np.abs(weights).max(axis=axes, keepdims=True).astype(np.float64) / 127
    return np.where(scale > 0, scale, 1.0)
