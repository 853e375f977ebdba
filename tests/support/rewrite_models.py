"""Models that the rewrites of the Edge TPU target change, and how far two models' outputs differ."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import one_op
from numpy.typing import NDArray
from one_op import Op, Tensor, integers

from compress.model.tflite import comparison
from compress.model.tflite.graph import Graph

RANDOM = np.random.default_rng(0)
STEP = 0.05
MAP = Tensor((1, 8, 8, 8), scales=(STEP,), zero_point=-3)
"""The input of most models here: values from -6.25 to 6.5."""


def codes(*shape: int) -> NDArray[np.int8]:
    return RANDOM.integers(-127, 128, shape).astype(np.int8)


def weights(*shape: int, scales: int = 1) -> Tensor:
    spread = tuple(float(scale) for scale in RANDOM.uniform(0.002, 0.01, scales))
    return Tensor(shape, data=codes(*shape), scales=spread)


def bias(count: int) -> Tensor:
    return Tensor((count,), "INT32", RANDOM.integers(-2000, 2000, count), ())


def made(*shape: int, step: float = STEP, zero_point: int = -3) -> Tensor:
    return Tensor(shape, scales=(step,), zero_point=zero_point)


def function(name: str, out: Tensor, version: int = 1, source: Tensor = MAP, **options: Any) -> Graph:
    return one_op.one(name, [source], out, version, **options)


def positive(step: float = 0.03) -> Tensor:
    return made(1, 8, 8, 8, step=step, zero_point=-120)


def dense(spread: float = 1.0) -> Graph:
    scales = tuple(float(scale) for scale in np.geomspace(0.004, 0.004 * spread, 6))
    kernel = Tensor((6, 32), data=codes(6, 32), scales=scales)
    return one_op.one("FULLY_CONNECTED", [made(1, 32), kernel, bias(6)], made(1, 6, step=0.5), 4)


def grouped(groups: int, scales: int = 16) -> Graph:
    kernel = weights(16, 3, 3, 8 // groups, scales=scales)
    out = made(1, 8, 8, 16, step=0.4, zero_point=-128)
    options = {"strideH": 1, "strideW": 1, "fusedActivationFunction": 1}
    return one_op.one("CONV_2D", [MAP, kernel, bias(16)], out, 6, **options)


def transposed_convolution(out: Tensor, activation: int) -> Graph:
    inputs = [integers(1, 16, 16, 8), weights(8, 3, 3, 8, scales=8), MAP, bias(8)]
    options = {"strideH": 2, "strideW": 2, "fusedActivationFunction": activation}
    return one_op.one("TRANSPOSE_CONV", inputs, out, 4, **options)


def pooling(activation: int) -> Graph:
    options = {"strideH": 2, "strideW": 2, "filterHeight": 2, "filterWidth": 2, "padding": 1}
    return one_op.one("MAX_POOL_2D", [MAP], made(1, 4, 4, 8), 2, fusedActivationFunction=activation, **options)


def batch_norm(name: str, sign: int = 1, step: float = 0.1, scales: int = 8) -> Graph:
    """A convolution, then a multiplication or an addition by channel. `sign` is the sign of every second value."""
    factors = Tensor((8,), data=RANDOM.integers(40, 128, 8) * np.asarray([1, sign] * 4), scales=(0.01,))
    tensors = {
        "x": MAP,
        "w": Tensor((8, 1, 1, 8), data=codes(8, 1, 1, 8), scales=tuple(np.linspace(0.001, 0.002, scales).tolist())),
        "b": bias(8),
        "sum": made(1, 8, 8, 8, step=step, zero_point=5),
        "factors": factors,
        "y": made(1, 8, 8, 8, step=0.12, zero_point=3),
    }
    conv = Op("CONV_2D", ["x", "w", "b"], ["sum"], 3, {"strideH": 1, "strideW": 1})
    return one_op.read(tensors, [conv, Op(name, ["sum", "factors"], ["y"], 2)], ["x"], ["y"])


def mean(*shape: int, keep: bool = True) -> Graph:
    out = made(*shape[:-1], 1) if keep else made(*shape[:-1])
    return one_op.one("MEAN", [made(*shape), integers(-1)], out, 2, keepDims=keep)


def matmul(transposed: bool) -> Graph:
    matrix = weights(10, 16) if transposed else weights(16, 10)
    return one_op.one("BATCH_MATMUL", [made(1, 4, 16), matrix], made(1, 4, 10, step=0.2), 2, adjY=transposed)


def resize() -> Graph:
    return one_op.one("RESIZE_BILINEAR", [made(1, 1, 1, 8), integers(5, 5)], made(1, 5, 5, 8), 3, alignCorners=True)


def slices(begin: tuple[int, ...], end: tuple[int, ...], strides: tuple[int, ...], out: tuple[int, ...]) -> Graph:
    inputs = [MAP, integers(*begin), integers(*end), integers(*strides)]
    return one_op.one("STRIDED_SLICE", inputs, made(*out), 2, endMask=1)


def parts(name: str, outs: list[tuple[int, ...]], more: dict[str, Tensor], **options: Any) -> Graph:
    names = [f"part{i}" for i in range(len(outs))]
    tensors = {"x": MAP, **more} | {name: made(*shape) for name, shape in zip(names, outs, strict=True)}
    return one_op.read(tensors, [Op(name, ["x", *more], names, 2, options)], ["x"], names)


def split_v() -> Graph:
    more = {"sizes": integers(2, 5, 1), "axis": Tensor((), "INT32", 3, ())}
    return parts("SPLIT_V", [(1, 8, 8, 2), (1, 8, 8, 5), (1, 8, 8, 1)], more, numSplits=3)


def gather(*chosen: int, out: tuple[int, ...], scalar: bool = False) -> Graph:
    indices = Tensor((), "INT32", chosen[0], ()) if scalar else integers(*chosen)
    return one_op.one("GATHER", [MAP, indices], made(*out), 2, axis=3)


def padding(value: int) -> Graph:
    amounts = Tensor((4, 2), "INT32", [[0, 0], [1, 1], [2, 0], [0, 0]], ())
    filled = Tensor((1,), data=value, scales=(STEP,), zero_point=-3)
    return one_op.one("PADV2", [MAP, amounts, filled], made(1, 10, 10, 8), 2)


def depth_to_space() -> Graph:
    return one_op.one("DEPTH_TO_SPACE", [MAP], made(1, 16, 16, 2), 2, blockSize=2)


def even_and_odd() -> Graph:
    """The even and the odd channels, of which the odd ones are rectified, as FastestDet's backbone splits them."""
    half = made(1, 8, 8, 4)
    tensors = {"x": MAP, "pairs": made(1, 8, 8, 4, 2), "to": integers(1, 8, 8, 4, 2), "step": integers(1, 1, 1, 1, 1)}
    tensors |= {"map": integers(1, 8, 8, 4), "odd rectified": half, "y": MAP}
    operators = [Op("RESHAPE", ["x", "to"], ["pairs"])]
    for number, name in enumerate(("even", "odd")):
        tensors |= {f"{name} pair": made(1, 8, 8, 4, 1), name: half}
        tensors |= {f"{name} from": integers(0, 0, 0, 0, number), f"{name} to": integers(1, 8, 8, 4, number + 1)}
        inputs = ["pairs", f"{name} from", f"{name} to", "step"]
        operators += [
            Op("STRIDED_SLICE", inputs, [f"{name} pair"], 2),
            Op("RESHAPE", [f"{name} pair", "map"], [name]),
        ]
    operators += [
        Op("RELU", ["odd"], ["odd rectified"], 2),
        Op("CONCATENATION", ["even", "odd rectified"], ["y"], 2, {"axis": 3}),
    ]
    return one_op.read(tensors, operators, ["x"], ["y"])


def shuffled(chosen: tuple[int, ...], order: tuple[int, ...], out: tuple[int, ...], function: str = "") -> Graph:
    """A reshape, a transpose with more dimensions than the Edge TPU has, a function of the result, and a reshape."""
    moved, sigmoid = tuple(chosen[axis] for axis in order), {"step": 1 / 256, "zero_point": -128} if function else {}
    tensors = {
        "x": MAP,
        "a": made(*chosen),
        "b": made(*moved),
        "c": made(*moved, **sigmoid),
        "y": made(*out, **sigmoid),
    }
    tensors |= {"to": integers(*chosen), "order": integers(*order), "back": integers(*out)}
    operators = [Op("RESHAPE", ["x", "to"], ["a"]), Op("TRANSPOSE", ["a", "order"], ["b"], 4)]
    operators += [Op(function, ["b"], ["c"], 2)] if function else []
    last = Op("RESHAPE", ["c" if function else "b", "back"], ["y"])
    return one_op.read(tensors, [*operators, last], ["x"], ["y"])


def upsampled(name: str) -> Graph:
    """UpSampling2D of one dimension, as Keras 3 or other tools convert it: RESHAPE, the operator `name`, RESHAPE."""
    times = integers(1, 1, 2, 1, 1) if name == "TILE" else integers(1, 8, 2, 8, 8)
    tensors = {"x": MAP, "a": made(1, 8, 1, 8, 8), "b": made(1, 8, 2, 8, 8), "y": made(1, 16, 8, 8)}
    tensors |= {"to": integers(1, 8, 1, 8, 8), "times": times, "back": integers(1, 16, 8, 8)}
    operators = [Op("RESHAPE", ["x", "to"], ["a"]), Op(name, ["a", "times"], ["b"], 3)]
    return one_op.read(tensors, [*operators, Op("RESHAPE", ["b", "back"], ["y"])], ["x"], ["y"])


def mirrored(mode: int) -> Graph:
    amounts = Tensor((4, 2), "INT32", [[0, 0], [1, 1], [2, 0], [0, 0]], ())
    return one_op.one("MIRROR_PAD", [MAP, amounts], made(1, 10, 10, 8), 2, mode=mode)


def dense_on_rows(x: Tensor, out: Tensor, scales: int = 1) -> Graph:
    inputs = [x, weights(12, 8, scales=scales), bias(12)]
    return one_op.one("FULLY_CONNECTED", inputs, out, 4, keepNumDims=True, fusedActivationFunction=1)


def dilated(same: bool) -> Graph:
    """A convolution with dilation 2, as old converters write it."""
    pads = [[2, 2], [2, 2]] if same else [[0, 0], [0, 0]]
    side, out = (12, 8) if same else (8, 4)
    tensors = {
        "x": MAP,
        "block": integers(2, 2),
        "pads": Tensor((2, 2), "INT32", pads, ()),
        "crops": Tensor((2, 2), "INT32", 0, ()),
        "batch": made(4, side // 2, side // 2, 8),
        "w": weights(6, 3, 3, 8, scales=6),
        "b": bias(6),
        "small": made(4, out // 2, out // 2, 6, step=0.5),
        "y": made(1, out, out, 6, step=0.5),
    }
    operators = [
        Op("SPACE_TO_BATCH_ND", ["x", "block", "pads"], ["batch"], 2),
        Op("CONV_2D", ["batch", "w", "b"], ["small"], 3, {"padding": 1, "strideH": 1, "strideW": 1}),
        Op("BATCH_TO_SPACE_ND", ["small", "block", "crops"], ["y"], 2),
    ]
    return one_op.read(tensors, operators, ["x"], ["y"])


def island(name: str, constant: float | None = None, step: float = STEP) -> Graph:
    """A float operator between DEQUANTIZE and QUANTIZE."""
    floating = Tensor((1, 8, 8, 8), "FLOAT32", scales=())
    tensors = {"x": made(1, 8, 8, 8, step=step), "f": floating, "g": floating, "y": made(1, 8, 8, 8, step=0.08)}
    if constant is not None:
        tensors["c"] = Tensor((), "FLOAT32", constant, ())
    operators = [
        Op("DEQUANTIZE", ["x"], ["f"], 2),
        Op(name, ["f", "c"] if constant is not None else ["f"], ["g"]),
        Op("QUANTIZE", ["g"], ["y"]),
    ]
    return one_op.read(tensors, operators, ["x"], ["y"])


def dilated_series(pad: int) -> Graph:
    """A Conv1D with dilation 2 and a dynamic batch size, as converters write it."""
    long = 16 + pad
    tensors = {
        "x": made(1, 16, 8),
        "block": integers(2),
        "pads": Tensor((1, 2), "INT32", [[pad, 0]], ()),
        "crops": Tensor((1, 2), "INT32", 0, ()),
        "batch": made(2, long // 2, 8),
        "axis": Tensor((), "INT32", -3, ()),
        "map": made(2, 1, long // 2, 8),
        "w": weights(6, 1, 3, 8, scales=6),
        "b": bias(6),
        "made": made(2, 1, long // 2 - 2, 6, step=0.5),
        "to": integers(-1, long // 2 - 2, 6),
        "small": made(2, long // 2 - 2, 6, step=0.5),
        "y": made(1, long - 4, 6, step=0.5),
    }
    operators = [
        Op("SPACE_TO_BATCH_ND", ["x", "block", "pads"], ["batch"], 3),
        Op("EXPAND_DIMS", ["batch", "axis"], ["map"]),
        Op("CONV_2D", ["map", "w", "b"], ["made"], 3, {"padding": 1, "strideH": 1, "strideW": 1}),
        Op("RESHAPE", ["made", "to"], ["small"]),
        Op("BATCH_TO_SPACE_ND", ["small", "block", "crops"], ["y"], 3),
    ]
    return one_op.read(tensors, operators, ["x"], ["y"])


def moved_in_float() -> Graph:
    """A reshape in float, between DEQUANTIZE and QUANTIZE with different scales."""
    tensors = {"x": MAP, "f": Tensor((1, 8, 8, 8), "FLOAT32", scales=()), "g": Tensor((1, 64, 8), "FLOAT32", scales=())}
    tensors |= {"to": integers(1, 64, 8), "y": made(1, 64, 8, step=0.07)}
    operators = [Op("DEQUANTIZE", ["x"], ["f"], 2), Op("RESHAPE", ["f", "to"], ["g"]), Op("QUANTIZE", ["g"], ["y"])]
    return one_op.read(tensors, operators, ["x"], ["y"])


def exponential() -> Graph:
    """EXP of values from -3.2 to 3.2, as for the boxes in a detector's head."""
    return function("EXP", made(1, 8, 8, 8, step=0.095, zero_point=-128), 2, made(1, 8, 8, 8, step=0.025, zero_point=0))


def softplus(step: float = STEP) -> Graph:
    """Log(exp(x) + 1), as converters write it."""
    x = made(1, 8, 8, 8, step=step)
    high = float(np.exp(131 * step)) + 1
    wide, out = (made(1, 8, 8, 8, step=most / 255, zero_point=-128) for most in (high, np.log(high)))
    tensors = {"x": x, "one": Tensor((), data=127, scales=(1 / 127,)), "e": wide, "s": wide, "y": out}
    operators = [Op("EXP", ["x"], ["e"], 2), Op("ADD", ["e", "one"], ["s"], 2), Op("LOG", ["s"], ["y"], 2)]
    return one_op.read(tensors, operators, ["x"], ["y"])


def divided() -> Graph:
    return one_op.one("DIV", [unsigned(MAP), Tensor((8,), "UINT8", 200, (0.01,))], unsigned(made(1, 8, 8, 8)), 2)


def unsigned(tensor: Tensor) -> Tensor:
    return Tensor(tensor.shape, "UINT8", None, tensor.scales, tensor.zero_point + 128)


CASES: list[tuple[str, str, Callable[[], Graph]]] = [
    ("grouped_convolution", "2 groups", lambda: grouped(2)),
    ("grouped_convolution", "4 groups", lambda: grouped(4)),
    ("grouped_convolution", "one scale", lambda: grouped(4, scales=1)),
    ("grouped_convolution", "one channel each", lambda: grouped(8)),
    ("fused_activation", "relu by range", lambda: transposed_convolution(made(1, 16, 16, 8, zero_point=-128), 1)),
    ("fused_activation", "relu", lambda: transposed_convolution(made(1, 16, 16, 8), 1)),
    ("fused_activation", "relu6", lambda: transposed_convolution(made(1, 16, 16, 8, step=0.1), 3)),
    ("fused_activation", "pooling", lambda: pooling(1)),
    ("dense_layer_on_rows", "a map", lambda: dense_on_rows(MAP, made(1, 8, 8, 12, step=0.4), 12)),
    ("dense_layer_on_rows", "rows", lambda: dense_on_rows(made(1, 9, 8), made(1, 9, 12, step=0.4))),
    (
        "dense_layer_on_rows",
        "uint8",
        lambda: dense_on_rows(unsigned(made(1, 9, 8)), unsigned(made(1, 9, 12, step=0.4))),
    ),
    ("per_channel_dense_layer", "alike", lambda: dense(2.0)),
    ("per_channel_dense_layer", "far apart: a convolution", lambda: dense(3000.0)),
    ("channel_scale_and_shift", "MUL", lambda: batch_norm("MUL")),
    ("channel_scale_and_shift", "MUL with signs", lambda: batch_norm("MUL", -1)),
    ("channel_scale_and_shift", "ADD", lambda: batch_norm("ADD")),
    ("channel_scale_and_shift", "SUB", lambda: batch_norm("SUB")),
    ("channel_scale_and_shift", "ADD, one scale", lambda: batch_norm("ADD", scales=1)),
    ("mean_over_channels", "a map", lambda: mean(1, 8, 8, 6)),
    ("mean_over_channels", "without keeping the axis", lambda: mean(1, 8, 8, 7, keep=False)),
    ("mean_over_channels", "rows", lambda: mean(1, 9, 10)),
    ("constant_matmul", "as it stands", lambda: matmul(False)),
    ("constant_matmul", "transposed", lambda: matmul(True)),
    ("hard_swish", "", lambda: function("HARD_SWISH", positive())),
    ("leaky_relu", "0.1", lambda: function("LEAKY_RELU", made(1, 8, 8, 8, step=0.028, zero_point=-105), 2, alpha=0.1)),
    ("leaky_relu", "of a vector", lambda: function("LEAKY_RELU", made(1, 9), 2, made(1, 9), alpha=0.3)),
    ("gelu", "exact", lambda: function("GELU", positive())),
    ("gelu", "by tanh", lambda: function("GELU", positive(), approximate=True)),
    ("elu", "", lambda: island("ELU")),
    ("absolute", "", lambda: function("ABS", positive(0.027), 2)),
    ("negative", "", lambda: island("NEG")),
    ("divide", "by constants", divided),
    ("float_island", "addition", lambda: island("ADD", 1.5)),
    ("requantized", "", moved_in_float),
    ("fitted_function", "softplus", softplus),
    ("fitted_function", "softplus around zero", lambda: softplus(1 / 40)),
    ("fitted_function", "exponential", exponential),
    ("fitted_function", "cosine", lambda: island("COS", step=0.02)),
    ("resized_1x1_map", "", resize),
    ("strided_slice", "every second", lambda: slices((0, 0, 1, 0), (1, 8, 8, 8), (1, 2, 2, 1), (1, 4, 4, 8))),
    ("strided_slice", "some channels", lambda: slices((0, 1, 0, 2), (1, 7, 8, 5), (1, 3, 1, 1), (1, 2, 8, 3))),
    ("split_sizes", "", split_v),
    ("unpack", "", lambda: parts("UNPACK", [(1, 8, 8)] * 8, {}, num=8, axis=-1)),
    ("gather", "neighbours", lambda: gather(2, 3, 4, out=(1, 8, 8, 3))),
    ("gather", "one", lambda: gather(5, out=(1, 8, 8), scalar=True)),
    ("pad_value", "", lambda: padding(-3)),
    ("pad_value", "another value", lambda: padding(7)),
    ("pad_value", "the least, before a maximum", lambda: padding(-128)),
    ("depth_to_space", "", depth_to_space),
    ("data_movement_chain", "upsampling", lambda: upsampled("TILE")),
    ("data_movement_chain", "a broadcast", lambda: upsampled("BROADCAST_TO")),
    ("data_movement_chain", "reflection", lambda: mirrored(0)),
    ("data_movement_chain", "symmetry", lambda: mirrored(1)),
    ("data_movement_chain", "channels here and there", lambda: gather(6, 1, 1, 3, out=(1, 8, 8, 4))),
    ("data_movement_chain", "channel shuffle", lambda: shuffled((1, 8, 8, 2, 4), (0, 1, 2, 4, 3), (1, 8, 8, 8))),
    ("data_movement_chain", "even and odd channels", even_and_odd),
    ("data_movement_chain", "to depth", lambda: shuffled((1, 4, 2, 4, 2, 8), (0, 1, 3, 2, 4, 5), (1, 4, 4, 32))),
    ("data_movement_chain", "from depth", lambda: shuffled((1, 8, 8, 2, 2, 2), (0, 1, 4, 2, 5, 3), (1, 16, 16, 2))),
    (
        "data_movement_chain",
        "uint8",
        lambda: one_op.one("TILE", [unsigned(MAP), integers(1, 1, 1, 2)], unsigned(made(1, 8, 8, 16)), 3),
    ),
    ("data_movement_chain", "strides", lambda: slices((0, 0, 1, 0), (1, 8, 8, 8), (1, 1, 2, 2), (1, 8, 4, 4))),
    ("data_movement_chain", "a head", lambda: shuffled((1, 2, 4, 8, 8), (0, 1, 3, 4, 2), (1, 128, 4))),
    ("elementwise_before_movement", "", lambda: shuffled((1, 2, 4, 8, 8), (0, 1, 3, 4, 2), (1, 128, 4), "LOGISTIC")),
    ("dilated_convolution", "same", lambda: dilated(True)),
    ("dilated_convolution", "valid", lambda: dilated(False)),
    ("dilated_row", "", lambda: dilated_series(0)),
    ("dilated_row", "causal", lambda: dilated_series(4)),
    ("older_version", "", lambda: one_op.one("ADD", [MAP, weights(8)], made(1, 8, 8, 8, step=0.1), 4)),
]


def outputs(model: Graph, feeds: list[NDArray[Any]]) -> list[NDArray[Any]]:
    """Run a model with one input. Return for each feed an array with the values of all outputs, one after the other."""
    runner = comparison.Runner(model)
    return [np.concatenate([tensor.ravel() for tensor in runner.run([feed])]) for feed in feeds]


def apart(one: Graph, other: Graph) -> int:
    """Return the largest difference in steps of the outputs of two 8-bit models, on random codes and on all codes."""
    tensor = one.tensors[one.inputs[0]]
    feeds = [RANDOM.integers(-128, 128, tensor.shape) for _ in range(4)]
    feeds.append(np.resize(np.arange(-128, 128), tensor.shape))
    dtype = comparison.DTYPES[tensor.dtype]
    shifted = [(feed + (128 if dtype == "uint8" else 0)).astype(dtype) for feed in feeds]
    pairs = zip(outputs(one, shifted), outputs(other, shifted), strict=True)
    return max(int(np.abs(a.astype(int) - b.astype(int)).max()) for a, b in pairs)
