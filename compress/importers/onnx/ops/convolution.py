"""What ONNX operators that go over an image with a window become in Keras: convolutions and pools.

Source: ONNX' operator specification, opsets 7 to 23 (Conv, ConvTranspose, MaxPool, AveragePool).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compress.importers.common.graph_builder import UNKNOWN
from compress.importers.common.layer_calls import NUMPY, NotImportedError
from compress.importers.onnx.layout import OnnxValue, channel_last, laid
from compress.importers.onnx.network_builder import OnnxCall, Rule

Pads = list[tuple[int, int]]
MOST_WRITTEN_OUT = 2**22
"""Numbers of the kernel that a convolution becomes whose groups or dilations are written out."""
BOUNDED_BELOW = {"relu", "relu6", "sigmoid", "hard_sigmoid", "softmax", "softplus", "exponential"}
PASSING = {
    *("ZeroPadding1D", "ZeroPadding2D", "Reshape", "Flatten", "Permute", "Concatenate", "Add", "Multiply"),
    *("MaxPooling1D", "MaxPooling2D", "AveragePooling1D", "AveragePooling2D", "UpSampling2D", "Maximum"),
}
"""Layers that make no negative numbers of such as are not."""


@dataclass(frozen=True)
class SlidingWindow:
    """How a window goes over the places of an image, side by side.

    Attributes:
        size: of the window.
        strides: steps.
        dilation: distance of neighbours in the window.
        pads: (before, after) of each side.
    """

    size: list[int]
    strides: list[int]
    dilation: list[int]
    pads: Pads

    @property
    def reach(self) -> list[int]:
        """Places from the first to the last of the window."""
        return [(size - 1) * far + 1 for size, far in zip(self.size, self.dilation, strict=True)]

    def same(self, sides: Sequence[int]) -> Pads:
        """The pads that TensorFlow calls "same"."""
        pads = []
        for side, stride, reach in zip(sides, self.strides, self.reach, strict=True):
            total = max((-(-side // stride) - 1) * stride + reach - side, 0)
            pads.append((total // 2, total - total // 2))
        return pads


def image(call: OnnxCall) -> OnnxValue:
    """The input as an image or a sequence, channel-last."""
    given = call.value(0)
    rank = len(given.shape)
    if rank not in (3, 4):
        raise NotImportedError(f"its input has {rank} dimensions; 3 or 4 are supported")
    made = call.arranged(given, channel_last(rank))
    if len(made.sides) == rank:
        raise NotImportedError(f"its first dimension is {given.shape[0]}: it is used as a batch")
    return made


def window(call: OnnxCall, given: OnnxValue, size: Sequence[int]) -> SlidingWindow:
    """What the settings say."""
    sides, rank = given.shape[2:], len(given.shape) - 2
    strides = call.integers("strides") or [1] * rank
    dilation = call.integers("dilations") or [1] * rank
    numbers = call.integers("pads") or [0] * (2 * rank)
    size = list(size)
    if not len(size) == len(strides) == len(dilation) == rank == len(numbers) // 2:
        raise NotImportedError(f"its window {size} does not fit {list(given.shape)}")
    found = SlidingWindow(size, strides, dilation, list(zip(numbers[:rank], numbers[rank:], strict=True)))
    auto = call.setting("auto_pad", "NOTSET")
    if auto in ("SAME_UPPER", "SAME_LOWER"):
        pads = found.same(sides)
        return SlidingWindow(size, strides, dilation, pads if auto == "SAME_UPPER" else [(b, a) for a, b in pads])
    if min(numbers) < 0:
        raise NotImportedError(f"its pads are {numbers}")
    return found if auto == "NOTSET" else SlidingWindow(size, strides, dilation, [(0, 0)] * rank)


def zero_padded(call: OnnxCall, given: OnnxValue, pads: Pads) -> OnnxValue:
    """Zeros around the places of an image."""
    if not any(map(any, pads)):
        return given
    rank = len(pads)
    shape = (*given.shape[:2], *(side + sum(pad) for side, pad in zip(given.shape[2:], pads, strict=True)))
    padding = [list(pad) for pad in pads] if rank > 1 else list(pads[0])
    like = laid(UNKNOWN, shape, channel_last(rank + 2))
    made = call.layer(f"ZeroPadding{rank}D", {"padding": padding}, [given], like)
    call.builder.padded[made.tensor] = (given, pads)
    return made


def _kernel(call: OnnxCall, rank: int) -> NDArray[np.float32]:
    kernel = call.weights(1)
    if kernel.ndim != rank or kernel.size == 0:
        raise NotImportedError(f"its weights have the shape {list(kernel.shape)}")
    return kernel


def _bias(call: OnnxCall, count: int) -> list[NDArray[np.float32]]:
    if not call.has(2):
        return []
    bias = call.weights(2).reshape(-1)
    if bias.size != count:
        raise NotImportedError(f"it has {bias.size} biases for {count} channels")
    return [bias]


def conv(call: OnnxCall) -> OnnxValue:
    """Conv: weights [out, in / groups, places...]; with a group for each channel, a depthwise one."""
    given = image(call)
    kernel, channels = _kernel(call, len(given.shape)), given.shape[1]
    out, groups, rank = kernel.shape[0], int(call.setting("group", 1)), kernel.ndim - 2
    if kernel.shape[1] * groups != channels or out % groups:
        raise NotImportedError(f"weights {list(kernel.shape)} in {groups} groups do not fit {channels} channels")
    found = window(call, given, kernel.shape[2:])
    if max(found.strides) > 1 and max(found.dilation) > 1:  # Keras has layers for either
        kernel, found = _spread(kernel, found)
    like = laid(UNKNOWN, call.made(), channel_last(rank + 2))
    given, padding = _conv_padding(call, given, found)
    bias = _bias(call, out)
    config: dict[str, Any] = {"kernel_size": found.size, "strides": found.strides, "dilation_rate": found.dilation}
    config |= {"padding": padding, "use_bias": bool(bias)}
    places = tuple(range(2, rank + 2))
    if groups == channels > 1 and len(set(found.strides)) == 1:
        depthwise = kernel.reshape(channels, out // channels, *found.size).transpose(*places, 0, 1)
        config["depth_multiplier"] = out // channels
        return call.layer(f"DepthwiseConv{rank}D", config, [given], like, [depthwise, *bias])
    config |= {"filters": out, "groups": groups}
    return call.layer(f"Conv{rank}D", config, [given], like, [kernel.transpose(*places, 1, 0), *bias])


def _spread(kernel: NDArray[np.float32], found: SlidingWindow) -> tuple[NDArray[np.float32], SlidingWindow]:
    """A dilated kernel with zeros between its numbers, and its window."""
    shape = (*kernel.shape[:2], *found.reach)
    if prod(shape) > MOST_WRITTEN_OUT:
        raise NotImportedError(f"it has dilations {found.dilation}")
    full = np.zeros(shape, np.float32)
    full[(slice(None), slice(None), *(slice(None, None, far) for far in found.dilation))] = kernel
    return full, SlidingWindow(found.reach, found.strides, [1] * len(found.size), found.pads)


def _conv_padding(call: OnnxCall, given: OnnxValue, found: SlidingWindow) -> tuple[OnnxValue, str]:
    """What a convolution is given, and its padding; zeros that were put around before count."""
    before, pads = call.builder.padded.get(given.tensor, (given, [(0, 0)] * len(found.pads)))
    pads = [(a + c, b + d) for (a, b), (c, d) in zip(pads, found.pads, strict=True)]
    if not any(map(any, pads)):
        return given, "valid"
    if pads == found.same(before.shape[2:]):
        return before, "same"
    return (given, "valid") if not any(map(any, found.pads)) else (zero_padded(call, before, pads), "valid")


def conv_transpose(call: OnnxCall) -> OnnxValue:
    """ConvTranspose: weights [in, out / groups, places...]; what is too much at the edges is cut off."""
    given = image(call)
    kernel, channels = _kernel(call, len(given.shape)), given.shape[1]
    groups, rank = int(call.setting("group", 1)), kernel.ndim - 2
    found, made = window(call, given, kernel.shape[2:]), call.made()
    if kernel.shape[0] != channels or channels % groups:
        raise NotImportedError(f"weights {list(kernel.shape)} in {groups} groups do not fit {channels} channels")
    if max(found.dilation) > 1:
        kernel, found = _spread(kernel, found)
    if groups > 1:
        kernel = _written_out(kernel, groups)
    bias = _bias(call, kernel.shape[1])
    config: dict[str, Any] = {"filters": kernel.shape[1], "kernel_size": found.size, "strides": found.strides}
    config["use_bias"] = bool(bias)
    weights = [kernel.transpose(*range(2, rank + 2), 1, 0), *bias]
    order, cuts = channel_last(rank + 2), _cuts(call, given, found, made)
    extra = [max(size - stride, 0) for size, stride in zip(found.size, found.strides, strict=True)]
    same = [(total // 2, total - total // 2) for total in extra]
    times = [side * stride for side, stride in zip(given.shape[2:], found.strides, strict=True)]
    if cuts == same and list(made[2:]) == times:
        config["padding"] = "same"
        return call.layer(f"Conv{rank}DTranspose", config, [given], laid(UNKNOWN, made, order), weights)
    more = [max(-after, 0) for _, after in cuts]
    least = [(n - 1) * t + s for n, t, s in zip(given.shape[2:], found.strides, found.size, strict=True)]
    usual = [n * t + max(s - t, 0) for n, t, s in zip(given.shape[2:], found.strides, found.size, strict=True)]
    sides = [side + extra for side, extra in zip(least, more, strict=True)]
    if any(extra >= stride for extra, stride in zip(more, found.strides, strict=True)) or min(c for c, _ in cuts) < 0:
        raise NotImportedError(f"Keras cannot compute its output {list(made)} from {list(given.shape)}")
    config |= {"padding": "valid", "output_padding": None if sides == usual else more}
    like = laid(UNKNOWN, (1, kernel.shape[1], *sides), order)
    full = call.layer(f"Conv{rank}DTranspose", config, [given], like, weights)
    cropping = [[before, max(after, 0)] for before, after in cuts]
    if not any(map(any, cropping)):
        return full
    settings = {"cropping": cropping if rank > 1 else cropping[0]}
    return call.layer(f"Cropping{rank}D", settings, [full], laid(UNKNOWN, made, order))


def _cuts(call: OnnxCall, given: OnnxValue, found: SlidingWindow, made: tuple[int, ...]) -> Pads:
    """What is cut off (before, after) of all that the windows make; below 0 where zeros are added."""
    extra = call.integers("output_padding") or [0] * len(found.size)
    cuts = []
    for side, size, stride, (before, after), more, out in zip(
        given.shape[2:], found.size, found.strides, found.pads, extra, made[2:], strict=True
    ):
        full, auto = (side - 1) * stride + size, call.setting("auto_pad", "NOTSET")
        if auto in ("SAME_UPPER", "SAME_LOWER") or call.setting("output_shape") is not None:
            total = full + more - out
            less = total // 2
            before, after = (less, total - less) if auto == "SAME_UPPER" else (total - less, less)
        cuts.append((before, after - more))
        if full - before - after + more != out:
            raise NotImportedError(f"its pads do not give {list(made)} from {list(given.shape)}")
    return cuts


def _written_out(kernel: NDArray[np.float32], groups: int) -> NDArray[np.float32]:
    """The kernel of a transposed convolution in groups as one over all channels, with zeros."""
    channels, out = kernel.shape[0], kernel.shape[1]
    if channels * out * groups * prod(kernel.shape[2:]) > MOST_WRITTEN_OUT:
        raise NotImportedError(f"it has {groups} groups")
    full = np.zeros((channels, out * groups, *kernel.shape[2:]), np.float32)
    for group, part in enumerate(np.split(kernel, groups)):
        rows = slice(group * len(part), (group + 1) * len(part))
        full[rows, group * out : (group + 1) * out] = part
    return full


def pool(kind: str) -> Rule:
    """MaxPool and AveragePool."""

    def rule(call: OnnxCall) -> OnnxValue:
        given = image(call)
        found = window(call, given, call.integers("kernel_shape") or [])
        made = call.made()
        if max(found.dilation) > 1:
            raise NotImportedError(f"it has dilations {found.dilation}")
        needed = [
            (before, max((out - 1) * stride + reach - side - before, 0))
            for side, out, stride, reach, (before, _) in zip(
                given.shape[2:], made[2:], found.strides, found.reach, found.pads, strict=True
            )
        ]
        return (_max_pool if kind == "Max" else _average_pool)(call, given, found, needed)

    return rule


def _pooled(call: OnnxCall, kind: str, given: OnnxValue, found: SlidingWindow, padding: str) -> OnnxValue:
    rank = len(found.size)
    sides = [
        -(-side // stride) if padding == "same" else (side - size) // stride + 1
        for side, size, stride in zip(given.shape[2:], found.size, found.strides, strict=True)
    ]
    like = laid(UNKNOWN, (*given.shape[:2], *sides), channel_last(rank + 2))
    config = {"pool_size": found.size, "strides": found.strides, "padding": padding}
    return call.layer(f"{kind}Pooling{rank}D", config, [given], like)


def _max_pool(call: OnnxCall, given: OnnxValue, found: SlidingWindow, pads: Pads) -> OnnxValue:
    """The maximum of what is stored in the image; TensorFlow's own padding, or zeros where nothing is below them."""
    if not any(map(any, pads)):
        return _pooled(call, "Max", given, found, "valid")
    if pads == found.same(given.shape[2:]):
        return _pooled(call, "Max", given, found, "same")
    if _not_below_zero(call, given):
        return _pooled(call, "Max", zero_padded(call, given, pads), found, "valid")
    half = [size // 2 for size in found.size]
    if [before for before, _ in found.pads] == half and all(size % 2 for size in found.size):
        one, step = (
            [1] * len(half),
            SlidingWindow([1] * len(half), found.strides, [1] * len(half), [(0, 0)] * len(half)),
        )
        everywhere = _pooled(call, "Max", given, SlidingWindow(found.size, one, one, pads), "same")
        return _pooled(call, "Max", everywhere, step, "valid")
    raise NotImportedError(f"its pads are {pads}, and its input may be negative")


def _not_below_zero(call: OnnxCall, value: OnnxValue) -> bool:
    """Whether no number can be negative, by the layers that make it."""
    waiting, seen, layers = [value.tensor.layer], set[str](), call.builder.layers
    while waiting:
        layer = layers.get(waiting.pop())
        if layer is None:  # what stands for the result of an operator without a counterpart
            return False
        activation = layer.config.get("activation")
        if layer.kind == "Activation" and activation in BOUNDED_BELOW:
            continue
        if layer.kind not in PASSING:
            return False
        seen.add(layer.name)
        waiting += {tensor.layer for tensor in layer.inputs()} - seen
    return True


def _average_pool(call: OnnxCall, given: OnnxValue, found: SlidingWindow, pads: Pads) -> OnnxValue:
    """The average of what is stored in the image, or of all of the window."""
    if not any(map(any, pads)):
        return _pooled(call, "Average", given, found, "valid")
    told = [(before, min(after, needed)) for (before, after), (_, needed) in zip(found.pads, pads, strict=True)]
    counted = bool(call.setting("count_include_pad", 0))
    if not counted and pads == found.same(given.shape[2:]):
        return _pooled(call, "Average", given, found, "same")
    made = _pooled(call, "Average", zero_padded(call, given, pads), found, "valid")
    if counted and told == pads:
        return made
    factors = [
        _shares(side, out, size, stride, told, edge if counted else (0, 0), counted)
        for side, out, size, stride, told, edge in zip(
            given.shape[2:], made.shape[2:], found.size, found.strides, pads, found.pads, strict=True
        )
    ]
    grid = np.asarray(reduce(np.multiply, np.ix_(*factors)), np.float32)
    return call.operation(NUMPY, "Multiply", {}, [made, grid[None, ..., None]], made)


def _shares(
    side: int, out: int, size: int, stride: int, pads: tuple[int, int], edge: tuple[int, int], counted: bool
) -> NDArray[np.float64]:
    """For each place along a side: the window's size to how many of its places count."""
    places = np.arange(-pads[0], side + pads[1])
    counts = (places >= -edge[0]) & (places < side + edge[1]) if counted else (places >= 0) & (places < side)
    return np.array([size / counts[at * stride : at * stride + size].sum() for at in range(out)])


def global_pool(kind: str) -> Rule:
    """GlobalAveragePool and GlobalMaxPool; without the sides of 1 where they are taken away anyway."""

    def rule(call: OnnxCall) -> OnnxValue:
        return globally(call, kind, image(call), call.made())

    return rule


def globally(call: OnnxCall, kind: str, given: OnnxValue, made: tuple[int, ...]) -> OnnxValue:
    """The average or the largest of all places of an image."""
    rank, name = len(given.shape), call.node.outputs[0]
    takers = [node.operator for node in call.builder.graph.nodes if name in node.inputs]
    keep = not takers or not set(takers) <= {"Flatten", "Reshape", "Squeeze"}
    keep = keep and len(made) == rank
    like = laid(UNKNOWN, made, channel_last(len(made)), None if keep else (given.shape[1],))
    return call.layer(f"Global{kind}Pooling{rank - 2}D", {"keepdims": keep}, [given], like)


RULES: dict[str, Callable[[OnnxCall], OnnxValue | list[OnnxValue]]] = {
    "Conv": conv,
    "ConvTranspose": conv_transpose,
    "MaxPool": pool("Max"),
    "AveragePool": pool("Average"),
    "GlobalAveragePool": global_pool("Average"),
    "GlobalMaxPool": global_pool("Max"),
}
