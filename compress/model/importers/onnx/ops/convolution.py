"""Import rules for ONNX convolutions and pooling.

Source: ONNX' operator specification, opsets 7 to 23 (Conv, ConvTranspose, MaxPool, AveragePool).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compress.model.importers.common.graph_builder import NUMPY, UNKNOWN, NotImportedError
from compress.model.importers.common.shape_rules import bias_of, kernel_of
from compress.model.importers.onnx.layout import OnnxValue, channel_last, laid
from compress.model.importers.onnx.network_builder import OnnxCall, Rule

Pads = list[tuple[int, int]]
MOST_WRITTEN_OUT = 2**22
"""Maximum number of values in a kernel whose groups or dilations are filled with zeros."""
BOUNDED_BELOW = {"relu", "relu6", "sigmoid", "hard_sigmoid", "softmax", "softplus", "exponential"}
PASSING = {
    *("ZeroPadding1D", "ZeroPadding2D", "Reshape", "Flatten", "Permute", "Concatenate", "Add", "Multiply"),
    *("MaxPooling1D", "MaxPooling2D", "AveragePooling1D", "AveragePooling2D", "UpSampling2D", "Maximum"),
}
"""Layers whose outputs are not negative if their inputs are not negative."""


@dataclass(frozen=True)
class SlidingWindow:
    """The window of a convolution or pooling, by spatial dimension; `pads` are (before, after)."""

    size: list[int]
    strides: list[int]
    dilation: list[int]
    pads: Pads

    @property
    def reach(self) -> list[int]:
        """Size of the window with its dilation."""
        return [(size - 1) * far + 1 for size, far in zip(self.size, self.dilation, strict=True)]

    def same(self, dims: Sequence[int]) -> Pads:
        """Return the padding that TensorFlow calls "same"."""
        pads = []
        for dim, stride, reach in zip(dims, self.strides, self.reach, strict=True):
            total = max((-(-dim // stride) - 1) * stride + reach - dim, 0)
            pads.append((total // 2, total - total // 2))
        return pads


def image(call: OnnxCall) -> OnnxValue:
    """Return the input as a channel-last image or sequence."""
    source = call.value(0)
    rank = len(source.shape)
    if rank not in (3, 4):
        raise NotImportedError(f"its input has {rank} dimensions; 3 or 4 are supported")
    result = call.arranged(source, channel_last(rank))
    if len(result.network_shape) == rank:
        raise NotImportedError(f"its first dimension is {source.shape[0]}: it is used as a batch")
    return result


def window(call: OnnxCall, source: OnnxValue, size: Sequence[int]) -> SlidingWindow:
    """Return the window from the attributes."""
    dims, rank = source.shape[2:], len(source.shape) - 2
    strides = call.integers("strides") or [1] * rank
    dilation = call.integers("dilations") or [1] * rank
    pad_values = call.integers("pads") or [0] * (2 * rank)
    size = list(size)
    if not len(size) == len(strides) == len(dilation) == rank == len(pad_values) // 2:
        raise NotImportedError(f"its window {size} does not fit {list(source.shape)}")
    sliding = SlidingWindow(size, strides, dilation, list(zip(pad_values[:rank], pad_values[rank:], strict=True)))
    auto = call.setting("auto_pad", "NOTSET")
    if auto == "SAME_UPPER":
        return replace(sliding, pads=sliding.same(dims))
    if auto == "SAME_LOWER":
        return replace(sliding, pads=[(before, after) for after, before in sliding.same(dims)])
    if min(pad_values) < 0:
        raise NotImportedError(f"its pads are {pad_values}")
    return sliding if auto == "NOTSET" else replace(sliding, pads=[(0, 0)] * rank)


def zero_padded(call: OnnxCall, source: OnnxValue, pads: Pads) -> OnnxValue:
    """Pad an image with zeros."""
    if not any(map(any, pads)):
        return source
    rank = len(pads)
    shape = (*source.shape[:2], *(dim + sum(pad) for dim, pad in zip(source.shape[2:], pads, strict=True)))
    padding = [list(pad) for pad in pads] if rank > 1 else list(pads[0])
    like = laid(UNKNOWN, shape, channel_last(rank + 2))
    result = call.layer(f"ZeroPadding{rank}D", {"padding": padding}, [source], like)
    call.builder.padded[result.tensor] = (source, pads)
    return result


def conv(call: OnnxCall) -> OnnxValue:
    """Conv: weights [out, in / groups, spatial dimensions...]; depthwise if each channel is a group."""
    source = image(call)
    kernel, channels = kernel_of(call.weights(1), len(source.shape)), source.shape[1]
    out, groups, rank = kernel.shape[0], int(call.setting("group", 1)), kernel.ndim - 2
    if kernel.shape[1] * groups != channels or out % groups:
        raise NotImportedError(f"weights {list(kernel.shape)} in {groups} groups do not fit {channels} channels")
    sliding = window(call, source, kernel.shape[2:])
    if max(sliding.strides) > 1 and max(sliding.dilation) > 1:  # Keras supports only one of them
        kernel, sliding = _spread(kernel, sliding)
    like = laid(UNKNOWN, call.output_shape(), channel_last(rank + 2))
    source, padding = _conv_padding(call, source, sliding)
    bias = bias_of(call.weights(2), out) if call.has(2) else []
    config: dict[str, Any] = {"kernel_size": sliding.size, "strides": sliding.strides, "padding": padding}
    config |= {"dilation_rate": sliding.dilation, "use_bias": bool(bias)}
    spatial_axes = tuple(range(2, rank + 2))
    if groups == channels > 1 and len(set(sliding.strides)) == 1:
        depthwise = kernel.reshape(channels, out // channels, *sliding.size).transpose(*spatial_axes, 0, 1)
        config["depth_multiplier"] = out // channels
        return call.layer(f"DepthwiseConv{rank}D", config, [source], like, [depthwise, *bias])
    config |= {"filters": out, "groups": groups}
    return call.layer(f"Conv{rank}D", config, [source], like, [kernel.transpose(*spatial_axes, 1, 0), *bias])


def _spread(kernel: NDArray[np.float32], sliding: SlidingWindow) -> tuple[NDArray[np.float32], SlidingWindow]:
    """Return a dilated kernel filled with zeros, and its window."""
    shape = (*kernel.shape[:2], *sliding.reach)
    if prod(shape) > MOST_WRITTEN_OUT:
        raise NotImportedError(f"it has dilations {sliding.dilation}")
    full = np.zeros(shape, np.float32)
    full[(slice(None), slice(None), *(slice(None, None, far) for far in sliding.dilation))] = kernel
    return full, SlidingWindow(sliding.reach, sliding.strides, [1] * len(sliding.size), sliding.pads)


def _conv_padding(call: OnnxCall, source: OnnxValue, sliding: SlidingWindow) -> tuple[OnnxValue, str]:
    """Return the input and padding of a convolution, merged with a zero padding before it."""
    before, pads = call.builder.padded.get(source.tensor, (source, [(0, 0)] * len(sliding.pads)))
    pads = _joined(pads, sliding.pads)
    if not any(map(any, pads)):
        return source, "valid"
    if pads == sliding.same(before.shape[2:]):
        return before, "same"
    return (source, "valid") if not any(map(any, sliding.pads)) else (zero_padded(call, before, pads), "valid")


def _joined(pads: Pads, more: Pads) -> Pads:
    """Return the padding of an operator together with that of an operator before it."""
    return [(a + c, b + d) for (a, b), (c, d) in zip(pads, more, strict=True)]


def conv_transpose(call: OnnxCall) -> OnnxValue:
    """ConvTranspose: weights [in, out / groups, positions...]; excess at the edges is cropped."""
    source = image(call)
    kernel = kernel_of(call.weights(1), len(source.shape))
    channels = source.shape[1]
    groups = int(call.setting("group", 1))
    sliding = window(call, source, kernel.shape[2:])
    if kernel.shape[0] != channels or channels % groups:
        raise NotImportedError(f"weights {list(kernel.shape)} in {groups} groups do not fit {channels} channels")
    if max(sliding.dilation) > 1:
        kernel, sliding = _spread(kernel, sliding)
    if groups > 1:
        kernel = _written_out(kernel, groups)
    rank = kernel.ndim - 2
    bias = bias_of(call.weights(2), kernel.shape[1]) if call.has(2) else []
    weights = [kernel.transpose(*range(2, rank + 2), 1, 0), *bias]
    config = {"filters": kernel.shape[1], "kernel_size": sliding.size, "strides": sliding.strides}
    config["use_bias"] = bool(bias)
    result = call.output_shape()
    cuts = _cuts(call, source, sliding, result)
    excess = [max(size - stride, 0) for size, stride in zip(sliding.size, sliding.strides, strict=True)]
    strided = [size * stride for size, stride in zip(source.shape[2:], sliding.strides, strict=True)]
    if cuts == [(total // 2, total - total // 2) for total in excess] and list(result[2:]) == strided:
        config["padding"] = "same"
        like = laid(UNKNOWN, result, channel_last(rank + 2))
        return call.layer(f"Conv{rank}DTranspose", config, [source], like, weights)
    added = [max(-after, 0) for _, after in cuts]
    if any(more >= stride for more, stride in zip(added, sliding.strides, strict=True)) or min(c for c, _ in cuts) < 0:
        raise NotImportedError(f"Keras cannot compute its output {list(result)} from {list(source.shape)}")
    sizes = _full_sizes(source, sliding, added)
    usual = _full_sizes(source, sliding, [max(t - s, 0) for t, s in zip(sliding.strides, sliding.size, strict=True)])
    config |= {"padding": "valid", "output_padding": None if sizes == usual else added}
    like = laid(UNKNOWN, (1, kernel.shape[1], *sizes), channel_last(rank + 2))
    full = call.layer(f"Conv{rank}DTranspose", config, [source], like, weights)
    return _cropped(call, full, [[before, max(after, 0)] for before, after in cuts])


def _full_sizes(source: OnnxValue, sliding: SlidingWindow, added: Sequence[int]) -> list[int]:
    """Return the output sizes of a transposed convolution without cropping, with `added` zeros at the end."""
    sizes = zip(source.shape[2:], sliding.strides, sliding.size, added, strict=True)
    return [(before - 1) * stride + size + more for before, stride, size, more in sizes]


def _cropped(call: OnnxCall, full: OnnxValue, cropping: list[list[int]]) -> OnnxValue:
    if not any(map(any, cropping)):
        return full
    rank = len(cropping)
    settings = {"cropping": cropping if rank > 1 else cropping[0]}
    return call.layer(f"Cropping{rank}D", settings, [full], laid(UNKNOWN, call.output_shape(), channel_last(rank + 2)))


def _cuts(call: OnnxCall, source: OnnxValue, sliding: SlidingWindow, result: tuple[int, ...]) -> Pads:
    """Return the cropping (before, after) of the full output; negative where zeros are added."""
    extra = call.integers("output_padding") or [0] * len(sliding.size)
    cuts = []
    for dim, size, stride, (before, after), more, out in zip(
        source.shape[2:], sliding.size, sliding.strides, sliding.pads, extra, result[2:], strict=True
    ):
        full, auto = (dim - 1) * stride + size, call.setting("auto_pad", "NOTSET")
        if auto in ("SAME_UPPER", "SAME_LOWER") or call.setting("output_shape") is not None:
            total = full + more - out
            less = total // 2
            before, after = (less, total - less) if auto == "SAME_UPPER" else (total - less, less)
        cuts.append((before, after - more))
        if full - before - after + more != out:
            raise NotImportedError(f"its pads do not give {list(result)} from {list(source.shape)}")
    return cuts


def _written_out(kernel: NDArray[np.float32], groups: int) -> NDArray[np.float32]:
    """Return a grouped kernel as one kernel over all channels, filled with zeros."""
    channels, out = kernel.shape[0], kernel.shape[1]
    if channels * out * groups * prod(kernel.shape[2:]) > MOST_WRITTEN_OUT:
        raise NotImportedError(f"it has {groups} groups")
    full = np.zeros((channels, out * groups, *kernel.shape[2:]), np.float32)
    for group, part in enumerate(np.split(kernel, groups)):
        rows = slice(group * len(part), (group + 1) * len(part))
        full[rows, group * out : (group + 1) * out] = part
    return full


def pool(call: OnnxCall, kind: str) -> OnnxValue:
    """MaxPool and AveragePool."""
    source = image(call)
    sliding = window(call, source, call.integers("kernel_shape") or [])
    if source.tensor in call.builder.padded_below:
        source, pads = call.builder.padded_below[source.tensor]
        sliding = replace(sliding, pads=_joined(pads, sliding.pads))
    result = call.output_shape()
    if max(sliding.dilation) > 1:
        raise NotImportedError(f"it has dilations {sliding.dilation}")
    needed = [
        (before, max((out - 1) * stride + reach - dim - before, 0))
        for dim, out, stride, reach, (before, _) in zip(
            source.shape[2:], result[2:], sliding.strides, sliding.reach, sliding.pads, strict=True
        )
    ]
    return (_max_pool if kind == "Max" else _average_pool)(call, source, sliding, needed)


def padded_below(call: OnnxCall, source: OnnxValue, pads: Pads) -> OnnxValue:
    """Pad an image with -inf, for the max poolings after it, which are the only operators that read it."""
    result = zero_padded(call, source, pads)
    call.builder.padded_below[result.tensor] = call.builder.padded.pop(result.tensor)
    return result


def _pooled(call: OnnxCall, kind: str, source: OnnxValue, sliding: SlidingWindow, padding: str) -> OnnxValue:
    rank = len(sliding.size)
    dims = [
        -(-dim // stride) if padding == "same" else (dim - size) // stride + 1
        for dim, size, stride in zip(source.shape[2:], sliding.size, sliding.strides, strict=True)
    ]
    like = laid(UNKNOWN, (*source.shape[:2], *dims), channel_last(rank + 2))
    config = {"pool_size": sliding.size, "strides": sliding.strides, "padding": padding}
    return call.layer(f"{kind}Pooling{rank}D", config, [source], like)


def _max_pool(call: OnnxCall, source: OnnxValue, sliding: SlidingWindow, pads: Pads) -> OnnxValue:
    """Max pooling; with "same" padding, or with zeros if no input value is negative."""
    if not any(map(any, pads)):
        return _pooled(call, "Max", source, sliding, "valid")
    if pads == sliding.same(source.shape[2:]):
        return _pooled(call, "Max", source, sliding, "same")
    if _not_below_zero(call, source):
        return _pooled(call, "Max", zero_padded(call, source, pads), sliding, "valid")
    half = [size // 2 for size in sliding.size]
    if [before for before, _ in sliding.pads] == half and all(size % 2 for size in sliding.size):
        one = [1] * len(half)
        step = SlidingWindow(one, sliding.strides, one, [(0, 0)] * len(half))
        everywhere = _pooled(call, "Max", source, SlidingWindow(sliding.size, one, one, pads), "same")
        return _pooled(call, "Max", everywhere, step, "valid")
    raise NotImportedError(f"its pads are {pads}, and its input may be negative")


def _not_below_zero(call: OnnxCall, value: OnnxValue) -> bool:
    """Whether the layers before a value guarantee that it is not negative."""
    waiting = [value.tensor.layer]
    seen: set[str] = set()
    layers = call.builder.layers
    while waiting:
        layer = layers.get(waiting.pop())
        if layer is None:  # the output of an unsupported operator
            return False
        activation = layer.config.get("activation")
        if layer.kind == "Activation" and activation in BOUNDED_BELOW:
            continue
        if layer.kind not in PASSING:
            return False
        seen.add(layer.name)
        waiting += {tensor.layer for tensor in layer.inputs()} - seen
    return True


def _average_pool(call: OnnxCall, source: OnnxValue, sliding: SlidingWindow, pads: Pads) -> OnnxValue:
    """Average pooling over the image, or over the window with its padding (count_include_pad)."""
    if not any(map(any, pads)):
        return _pooled(call, "Average", source, sliding, "valid")
    declared = [(before, min(after, needed)) for (before, after), (_, needed) in zip(sliding.pads, pads, strict=True)]
    counted = bool(call.setting("count_include_pad", 0))
    if not counted and pads == sliding.same(source.shape[2:]):
        return _pooled(call, "Average", source, sliding, "same")
    result = _pooled(call, "Average", zero_padded(call, source, pads), sliding, "valid")
    if counted and declared == pads:
        return result
    factors = [
        _shares(dim, out, size, stride, pad, edge if counted else (0, 0), counted)
        for dim, out, size, stride, pad, edge in zip(
            source.shape[2:], result.shape[2:], sliding.size, sliding.strides, pads, sliding.pads, strict=True
        )
    ]
    grid = np.asarray(reduce(np.multiply, np.ix_(*factors)), np.float32)
    return call.operation(NUMPY, "Multiply", {}, [result, grid[None, ..., None]], result)


def _shares(
    dim: int, out: int, size: int, stride: int, pads: tuple[int, int], edge: tuple[int, int], counted: bool
) -> NDArray[np.float64]:
    """Return the ratio of the window size to the number of counted positions, for each output position."""
    positions = np.arange(-pads[0], dim + pads[1])
    counts = (positions >= -edge[0]) & (positions < dim + edge[1]) if counted else (positions >= 0) & (positions < dim)
    return np.array([size / counts[at * stride : at * stride + size].sum() for at in range(out)])


def global_pool(call: OnnxCall, kind: str) -> OnnxValue:
    """GlobalAveragePool and GlobalMaxPool; without dimensions of 1 if the next operator removes them."""
    return globally(call, kind, image(call), call.output_shape())


def globally(call: OnnxCall, kind: str, source: OnnxValue, result: tuple[int, ...]) -> OnnxValue:
    """Add a global pooling layer."""
    rank = len(source.shape)
    name = call.node.outputs[0]
    takers = [node.operator for node in call.builder.graph.nodes if name in node.inputs]
    keep = not takers or not set(takers) <= {"Flatten", "Reshape", "Squeeze"}
    keep = keep and len(result) == rank
    like = laid(UNKNOWN, result, channel_last(len(result)), None if keep else (source.shape[1],))
    return call.layer(f"Global{kind}Pooling{rank - 2}D", {"keepdims": keep}, [source], like)


RULES: Mapping[str, Rule] = {
    "Conv": conv,
    "ConvTranspose": conv_transpose,
    "MaxPool": partial(pool, kind="Max"),
    "AveragePool": partial(pool, kind="Average"),
    "GlobalAveragePool": partial(global_pool, kind="Average"),
    "GlobalMaxPool": partial(global_pool, kind="Max"),
}
