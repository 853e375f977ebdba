"""Low-rank factorization of dense layers and convolutions: one layer becomes two or three with fewer weights.

A convolution with an output projection becomes a convolution to `rank` channels and a 1x1 convolution; with an input
projection a 1x1 convolution precedes it; with both it is a Tucker-2 decomposition. A dense layer has an output
projection only: two dense layers.

Source: Kim et al., Compression of Deep CNNs for Fast and Low Power Mobile Applications, ICLR 2016 (Tucker-2).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from compress.model.ir.keras_graph import Layer, LayerOutput, Network
from compress.model.ir.layer_specs import spec_of
from compress.model.ir.layer_specs.families import ConvolutionSpec, DenseSpec

Side = Literal["inputs", "outputs"]
_LINEAR = {"use_bias": False, "activation": "linear"}


@dataclass(frozen=True)
class Projection:
    """A linear map of channels to `rank` others, and the map back.

    Attributes:
        into: [channels, rank].
        back: [rank, channels].
    """

    into: NDArray[np.float64]
    back: NDArray[np.float64]

    @property
    def rank(self) -> int:
        """The number of channels between the two maps."""
        return int(self.into.shape[1])


def refusal(layer: Layer) -> str | None:
    """Return the reason why a layer cannot be factorized, or None."""
    spec = spec_of(layer)
    if not isinstance(spec, ConvolutionSpec | DenseSpec):
        return "it is not a dense layer or a convolution"
    if layer.config.get("groups", 1) > 1:
        return "it is a grouped convolution"
    if layer.config.get("data_format") == "channels_first":
        return "its channels are first"
    return None if len(layer.calls) == 1 else "it is called more than once"


def is_linear(layer: Layer) -> bool:
    """Whether a layer is a dense layer or a convolution without bias and activation, such as a factor of another."""
    has_kernel = isinstance(spec_of(layer), ConvolutionSpec | DenseSpec)
    is_plain = layer.config.get("activation") in ("linear", None)
    return has_kernel and is_plain and not layer.config.get("use_bias", True)


def factor_names(network: Network, name: str) -> dict[Side, str]:
    """Return the names of the layers that will make the channels of each projection of a layer."""
    return {"inputs": network.free_name(f"{name}_narrow"), "outputs": network.free_name(f"{name}_core")}


def factorized(
    network: Network, name: str, projections: Mapping[Side, Projection], names: Mapping[Side, str]
) -> Network:
    """Return the network with a layer replaced by its factors; the last one has the name of the layer.

    Args:
        network: the network.
        name: a layer that `refusal` allows.
        projections: of its input channels, its output channels or both; a 1x1 layer has one of its outputs.
        names: the names of the new layers, see `factor_names`.
    """
    layer = network.layers[name]
    spec = spec_of(layer)
    source, output = layer.inputs()[0], LayerOutput(name)
    kernel = layer.weights[0].astype(np.float64)
    core, calls = layer, layer.calls
    layers = dict(network.layers)
    shapes = dict(network.shapes)
    narrow, wide = projections.get("inputs"), projections.get("outputs")
    if narrow is not None:
        first = _pointwise(layer, narrow.into, names["inputs"], calls, {spec.width_setting: narrow.rank, **_LINEAR})
        layers[first.name] = first
        shapes[LayerOutput(first.name)] = (*shapes[source][:-1], narrow.rank)
        kernel = narrow.back @ kernel
        calls = _reading(first.name)
    if wide is not None:
        kernel = kernel @ wide.into
        core = layer.configured(name=names["outputs"], **{spec.width_setting: wide.rank}, **_LINEAR)
        core = replace(core, name=names["outputs"], weights=())
        shapes[LayerOutput(core.name)] = (*shapes[output][:-1], wide.rank)
        layers[name] = _pointwise(layer, wide.back, name, _reading(core.name), {}, layer.weights[1:])
    weights = (kernel.astype(np.float32), *core.weights[1:])
    layers[core.name] = replace(core, calls=calls, weights=weights)
    return replace(network, layers=layers, shapes=shapes)


def _reading(name: str) -> tuple[Any, ...]:
    """Return the calls of a layer that reads another one."""
    return ({"args": [LayerOutput(name)], "kwargs": {}},)


def _pointwise(
    layer: Layer,
    matrix: NDArray[np.float64],
    name: str,
    calls: tuple[Any, ...],
    settings: Mapping[str, Any],
    biases: tuple[NDArray[Any], ...] = (),
) -> Layer:
    """Return a layer like another one, but with a kernel for single positions: `matrix` [in, out]."""
    spatial = layer.weights[0].ndim - 2
    window: dict[str, Any] = {}
    if spatial:
        window = {name: [1] * spatial for name in ("kernel_size", "strides", "dilation_rate")} | {"padding": "valid"}
    kernel = matrix.astype(np.float32).reshape((1,) * spatial + matrix.shape)
    configured = layer.configured(**{**window, **settings, "name": name})
    return replace(configured, name=name, calls=calls, weights=(kernel, *biases))
