"""5x5 depthwise kernels replaced by 3x3 ones, which take 9 steps for each output instead of 25.

The Edge TPU computes a depthwise convolution tap by tap (`edgetpu.latency`). The smaller kernel is the one whose
outputs are nearest to those of the larger in squares, on the inputs that the layer really gets: neighbouring
pixels are alike, so that the inner taps can do most of the work of the outer ones.

For one channel let k be the 25 taps, c and o their inner nine and outer sixteen, and S the covariance of the
inputs that they meet. The least of E (k x - q x_c - b)^2 is at q = k_c + S_cc^-1 S_co k_o, b = k_o m_o - (q - k_c) m_c.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compress.ir.keras_graph import Layer, LayerOutput, Network, build, living, observed, tensors_in
from compress.ir.layer_specs import CROPPING_2D, DEPTHWISE_CONV_2D, SEPARABLE_CONV_2D, ZERO_PADDING_2D, spec_of
from compress.ir.tensorflow import keras
from compress.replacement.activations import Swaps

NAME = "depthwise_5x5"
BATCH = 8
RIDGE = 1e-3
"""Of the mean variance of a channel's inputs, added to each: channels that never change keep their inner taps."""
INNER = np.array([row * 5 + column for row in (1, 2, 3) for column in (1, 2, 3)])
OUTER = np.setdiff1d(np.arange(25), INNER)


@dataclass(frozen=True)
class Moments:
    """The inputs that the taps of a kernel meet, over all samples and positions.

    Attributes:
        mean: by channel and tap [c, 25].
        covariance: by channel [c, 25, 25].
    """

    mean: NDArray[np.float64]
    covariance: NDArray[np.float64]


def find(network: Network) -> tuple[list[str], dict[str, str]]:
    """The layers with 5x5 depthwise kernels in the order in which they are computed, and why others are left."""
    found, left = [], {}
    for layer, call in network.in_order():
        if call or spec_of(layer) not in (DEPTHWISE_CONV_2D, SEPARABLE_CONV_2D):
            continue
        if layer.weights[0].shape[:2] != (5, 5):
            continue
        why = _unfit(network, layer)
        if why:
            left[layer.name] = why
        else:
            found.append(layer.name)
    return found, left


def _unfit(network: Network, layer: Layer) -> str:
    """Why a layer's kernel cannot be made smaller; "" where nothing speaks against it."""
    if layer.config.get("data_format") == "channels_first":
        return "its channels come first"
    if layer.config["padding"] == "valid":
        return ""
    steps = list(zip(layer.config["strides"], layer.config["dilation_rate"], strict=True))
    for sides in (network.shapes[given][:2] for given in _inputs(layer)):
        for side, (stride, rate) in zip(sides, steps, strict=True):
            if side is None or not _centred(side, stride, rate):
                where = f"with a stride of {stride} on {side or 'an unknown number of'} positions"
                return f"{where} a 3x3 kernel would stand elsewhere"
    return ""


def _centred(side: int, stride: int, rate: int) -> bool:
    """Whether with padding `same` the middle of a 3-tap kernel is where that of a 5-tap kernel is."""

    def middle(taps: int) -> int:
        reach = (taps - 1) * rate
        return int(reach / 2) - max((-(-side // stride) - 1) * stride + reach + 1 - side, 0) // 2

    return middle(5) == middle(3)


def measure(network: Network, names: Sequence[str], samples: NDArray[np.float32]) -> dict[str, Moments]:
    """Runs the network on samples, and looks at the inputs of some 5x5 depthwise layers.

    Args:
        network: which the layers are of.
        names: at least one layer; of a shared one all calls count.
        samples: preprocessed training samples [n, ...].
    """
    import tensorflow

    places = [(name, given) for name in names for given in _inputs(network.layers[name])]
    model = build(observed(network, [given for _, given in places]))
    library = keras()

    @tensorflow.function(reduce_retracing=True)
    def sums(batch):  # type: ignore[no-untyped-def]
        values = library.tree.flatten(model(batch, training=False))
        return [_sums(value, network.layers[name].config) for value, (name, _) in zip(values, places, strict=True)]

    totals: dict[str, list[Any]] = {}
    for start in range(0, len(samples), BATCH):
        for (name, _), parts in zip(places, sums(tensorflow.constant(samples[start : start + BATCH])), strict=True):
            before = totals.get(name, [0.0, 0.0, 0.0])
            totals[name] = [old + np.asarray(part, np.float64) for old, part in zip(before, parts, strict=True)]
    return {name: _moments(*totals[name]) for name in names}


def _inputs(layer: Layer) -> list[LayerOutput]:
    return [layer.given(call)[0] for call in range(len(layer.calls))]


def _sums(value: Any, config: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    """How many patches of a map [n, h, w, c] there are, their sum [c, 25] and the sum of their squares [c, 25, 25]."""
    import tensorflow

    patches = tensorflow.image.extract_patches(
        value,
        [1, 5, 5, 1],
        [1, *config["strides"], 1],
        [1, *config["dilation_rate"], 1],
        str(config["padding"]).upper(),
    )
    channels = value.shape[-1]
    patches = tensorflow.transpose(tensorflow.reshape(patches, [-1, 25, channels]), [2, 0, 1])
    squares = tensorflow.matmul(patches, patches, transpose_a=True)
    return tensorflow.shape(patches)[1], tensorflow.reduce_sum(patches, axis=1), squares


def _moments(count: Any, total: Any, squares: Any) -> Moments:
    mean = total / count
    return Moments(mean, squares / count - mean[:, :, None] * mean[:, None, :])


def fitted(kernel: NDArray[Any], moments: Moments) -> tuple[NDArray[np.float64], NDArray[np.float64], float]:
    """The 3x3 kernel [3, 3, c, m] nearest to a 5x5 one [5, 5, c, m], its offset [c, m], and what is lost.

    The last is the share of the variance of the larger kernel's outputs that the smaller one's do not have.
    """
    taps = np.moveaxis(kernel.astype(np.float64).reshape(25, *kernel.shape[2:]), 0, 1)  # [c, 25, m]
    inner, outer = taps[:, INNER], taps[:, OUTER]
    spread = moments.covariance
    strength = RIDGE * np.einsum("cii->c", spread) / 25 + 1e-12
    within = spread[:, INNER[:, None], INNER] + strength[:, None, None] * np.eye(9)
    change = np.linalg.solve(within, spread[:, INNER[:, None], OUTER] @ outer)
    offset = np.einsum("co,com->cm", moments.mean[:, OUTER], outer)
    offset -= np.einsum("ci,cim->cm", moments.mean[:, INNER], change)
    rest = np.zeros_like(taps)
    rest[:, OUTER], rest[:, INNER] = outer, -change
    lost, whole = (float(np.einsum("cim,cij,cjm->", each, spread, each)) for each in (rest, taps))
    smaller = np.moveaxis(inner + change, 0, 1).reshape(3, 3, *kernel.shape[2:])
    return smaller, offset, max(lost, 0.0) / whole if whole > 0 else 0.0


def narrowed(network: Network, measured: Mapping[str, Moments]) -> tuple[Network, Swaps]:
    """The network with 3x3 kernels in the place of some 5x5 ones. Exact where the outer taps are 0."""
    notes = {}
    for name, moments in measured.items():
        layer = network.layers[name]
        kernel, offset, lost = fitted(layer.weights[0], moments)
        smaller = _with_offset(layer.configured(kernel_size=[3, 3]), kernel, offset)
        if layer.config["padding"] == "valid":
            network = _cropped(network, name, layer.config["dilation_rate"])
        network = network.edited({name: replace(smaller, calls=network.layers[name].calls)}, {})
        notes[name] = f"3x3; {lost:.1%} of the variance of its outputs is lost"
    return living(network), Swaps({NAME: tuple(measured)} if measured else {}, {}, notes)


def _with_offset(layer: Layer, kernel: NDArray[np.float64], offset: NDArray[np.float64]) -> Layer:
    """A layer with another depthwise kernel, whose outputs are moved by an offset [c, m] too."""
    count = spec_of(layer).bias_index
    rest = list(layer.weights[1:count])
    moved = offset.ravel() @ rest[0][0, 0].astype(np.float64) if rest else offset.ravel()
    bias = layer.weights[count].astype(np.float64) if layer.config["use_bias"] else 0.0
    weights = [kernel.astype(np.float32), *rest]
    if layer.config["use_bias"] or moved.any():
        return replace(layer.configured(use_bias=True), weights=(*weights, (bias + moved).astype(np.float32)))
    return replace(layer, weights=tuple(weights))


def _cropped(network: Network, name: str, rate: Sequence[int]) -> Network:
    """The network in which what a layer without padding is given is smaller on every side by what its kernel lost."""
    layer = network.layers[name]
    sources = _inputs(layer)
    pad = network.layers[sources[0].layer]
    consumers, shown = network.consumers(), set(tensors_in(network.outputs))
    alone = all(consumers[each] == [(name, call)] and each not in shown for call, each in enumerate(sources))
    if (
        spec_of(pad) == ZERO_PADDING_2D
        and alone
        and [(each.layer, each.call) for each in sources] == [(pad.name, call) for call in range(len(pad.calls))]
    ):
        smaller = [[amount - by for amount in side] for side, by in zip(pad.config["padding"], rate, strict=True)]
        if min(amount for side in smaller for amount in side) >= 0:
            return _padded(network, pad, smaller)
    new = f"{name}_crop"
    while new in network.layers:
        new += "_"
    crop = CROPPING_2D.layer(new, layer.calls, cropping=[[by, by] for by in rate])
    moved = tuple({"args": [LayerOutput(new, call)], "kwargs": {}} for call in range(len(sources)))
    added = {LayerOutput(new, call): _smaller(network.shapes[each], rate) for call, each in enumerate(sources)}
    shapes = {**network.shapes, **added}
    return replace(network, shapes=shapes).edited({new: crop, name: replace(layer, calls=moved)}, {})


def _padded(network: Network, pad: Layer, amounts: list[list[int]]) -> Network:
    """The network with less of a padding; without it where nothing is left of it."""
    made = [LayerOutput(pad.name, call) for call in range(len(pad.calls))]
    if not any(amount for side in amounts for amount in side):
        return network.edited({pad.name: None}, dict(zip(made, _inputs(pad), strict=True)))
    rate = [old[0] - new[0] for old, new in zip(pad.config["padding"], amounts, strict=True)]
    shapes = {**network.shapes, **{each: _smaller(network.shapes[each], rate) for each in made}}
    return replace(network, shapes=shapes).edited({pad.name: pad.configured(padding=amounts)}, {})


def _smaller(shape: tuple[int | None, ...], rate: Sequence[int]) -> tuple[int | None, ...]:
    """A map's shape without so many rows and columns at each end."""
    sides = [None if side is None else side - 2 * by for side, by in zip(shape[:2], rate, strict=True)]
    return (*sides, *shape[2:])
