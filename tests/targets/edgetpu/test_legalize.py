"""Rewrites: each on a model that needs it, run before and after; and models that must be left alone."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import one_op
import pytest
from numpy.typing import NDArray
from one_op import Op, Tensor, integers

from compress.errors import DataError, ModelError
from compress.targets import load
from compress.targets.edgetpu.legalize import legalize
from compress.targets.edgetpu.placement import place
from compress.targets.edgetpu.rewrites import REWRITES
from compress.tflite import comparison, graph
from compress.tflite.graph import Graph

TARGET = load("edgetpu")
RANDOM = np.random.default_rng(0)
STEP = 0.05
MAP = Tensor((1, 8, 8, 8), scales=(STEP,), zero_point=-3)
"""What most models here take: from -6.25 to 6.5."""


def codes(*shape: int, low: int = -127) -> NDArray[np.int8]:
    return RANDOM.integers(low, 128, shape).astype(np.int8)


def weights(*shape: int, scales: int = 1) -> Tensor:
    spread = tuple(float(each) for each in RANDOM.uniform(0.002, 0.01, scales))
    return Tensor(shape, data=codes(*shape), scales=spread)


def bias(count: int) -> Tensor:
    return Tensor((count,), "INT32", RANDOM.integers(-2000, 2000, count), ())


def made(*shape: int, step: float = STEP, zero_point: int = -3) -> Tensor:
    return Tensor(shape, scales=(step,), zero_point=zero_point)


def function(name: str, out: Tensor, version: int = 1, given: Tensor = MAP, **options: Any) -> Graph:
    return one_op.one(name, [given], out, version, **options)


def positive(step: float = 0.03) -> Tensor:
    return made(1, 8, 8, 8, step=step, zero_point=-120)


def dense(spread: float = 1.0) -> Graph:
    scales = tuple(float(each) for each in np.geomspace(0.004, 0.004 * spread, 6))
    kernel = Tensor((6, 32), data=codes(6, 32), scales=scales)
    return one_op.one("FULLY_CONNECTED", [made(1, 32), kernel, bias(6)], made(1, 6, step=0.5), 4)


def grouped(groups: int, scales: int = 16) -> Graph:
    kernel = weights(16, 3, 3, 8 // groups, scales=scales)
    out = made(1, 8, 8, 16, step=0.4, zero_point=-128)
    options = {"strideH": 1, "strideW": 1, "fusedActivationFunction": 1}
    return one_op.one("CONV_2D", [MAP, kernel, bias(16)], out, 6, **options)


def transposed_convolution(out: Tensor, activation: int) -> Graph:
    given = [integers(1, 16, 16, 8), weights(8, 3, 3, 8, scales=8), MAP, bias(8)]
    options = {"strideH": 2, "strideW": 2, "fusedActivationFunction": activation}
    return one_op.one("TRANSPOSE_CONV", given, out, 4, **options)


def pooling(activation: int) -> Graph:
    options = {"strideH": 2, "strideW": 2, "filterHeight": 2, "filterWidth": 2, "padding": 1}
    return one_op.one("MAX_POOL_2D", [MAP], made(1, 4, 4, 8), 2, fusedActivationFunction=activation, **options)


def batch_norm(name: str, sign: int = 1, step: float = 0.1) -> Graph:
    """A convolution, then a multiplication (by numbers of both signs) or an addition for each channel."""
    factors = Tensor((8,), data=RANDOM.integers(40, 128, 8) * np.asarray([1, sign] * 4), scales=(0.01,))
    tensors = {
        "x": MAP,
        "w": Tensor((8, 1, 1, 8), data=codes(8, 1, 1, 8), scales=tuple(np.linspace(0.001, 0.002, 8).tolist())),
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
    given = [MAP, integers(*begin), integers(*end), integers(*strides)]
    return one_op.one("STRIDED_SLICE", given, made(*out), 2, endMask=1)


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


def shuffled(chosen: tuple[int, ...], order: tuple[int, ...], out: tuple[int, ...], function: str = "") -> Graph:
    """A reshape, a transpose over more dimensions than the Edge TPU has, a function of what it moved, and a reshape."""
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
    """What Keras 3 makes of UpSampling2D, of one side; and what others make of it."""
    times = integers(1, 1, 2, 1, 1) if name == "TILE" else integers(1, 8, 2, 8, 8)
    tensors = {"x": MAP, "a": made(1, 8, 1, 8, 8), "b": made(1, 8, 2, 8, 8), "y": made(1, 16, 8, 8)}
    tensors |= {"to": integers(1, 8, 1, 8, 8), "times": times, "back": integers(1, 16, 8, 8)}
    operators = [Op("RESHAPE", ["x", "to"], ["a"]), Op(name, ["a", "times"], ["b"], 3)]
    return one_op.read(tensors, [*operators, Op("RESHAPE", ["b", "back"], ["y"])], ["x"], ["y"])


def mirrored(mode: int) -> Graph:
    amounts = Tensor((4, 2), "INT32", [[0, 0], [1, 1], [2, 0], [0, 0]], ())
    return one_op.one("MIRROR_PAD", [MAP, amounts], made(1, 10, 10, 8), 2, mode=mode)


def dense_on_rows(x: Tensor, out: Tensor, scales: int = 1) -> Graph:
    given = [x, weights(12, 8, scales=scales), bias(12)]
    return one_op.one("FULLY_CONNECTED", given, out, 4, keepNumDims=True, fusedActivationFunction=1)


def dilated_row() -> Graph:
    given, out = [made(1, 1, 16, 8), weights(6, 1, 3, 8, scales=6), bias(6)], made(1, 1, 12, 6, step=0.5)
    return one_op.one("CONV_2D", given, out, 3, padding=1, strideH=1, strideW=1, dilationWFactor=2, dilationHFactor=1)


def dilated(same: bool) -> Graph:
    """What old converters made of a convolution with dilation 2."""
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
    """What converters make of a Conv1D with dilation 2 and a batch that is not fixed."""
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
    """A reshape in float, between scales that differ."""
    tensors = {"x": MAP, "f": Tensor((1, 8, 8, 8), "FLOAT32", scales=()), "g": Tensor((1, 64, 8), "FLOAT32", scales=())}
    tensors |= {"to": integers(1, 64, 8), "y": made(1, 64, 8, step=0.07)}
    operators = [Op("DEQUANTIZE", ["x"], ["f"], 2), Op("RESHAPE", ["f", "to"], ["g"]), Op("QUANTIZE", ["g"], ["y"])]
    return one_op.read(tensors, operators, ["x"], ["y"])


def exponential() -> Graph:
    """Of -3.2 to 3.2, as boxes in a detector's head."""
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


IMPROVEMENTS = ("dense_scales", "batch_norm_leftover")
"""Rewrites of operators that are mapped already."""
CASES: list[tuple[str, str, Callable[[], Graph]]] = [
    ("grouped_convolution", "2 groups", lambda: grouped(2)),
    ("grouped_convolution", "4 groups", lambda: grouped(4)),
    ("grouped_convolution", "one scale", lambda: grouped(4, scales=1)),
    ("grouped_convolution", "one channel each", lambda: grouped(8)),
    ("fused_activation", "relu by range", lambda: transposed_convolution(made(1, 16, 16, 8, zero_point=-128), 1)),
    ("fused_activation", "relu", lambda: transposed_convolution(made(1, 16, 16, 8), 1)),
    ("fused_activation", "relu6", lambda: transposed_convolution(made(1, 16, 16, 8, step=0.1), 3)),
    ("fused_activation", "pooling", lambda: pooling(1)),
    ("one_dilation", "", dilated_row),
    ("dense_rows", "a map", lambda: dense_on_rows(MAP, made(1, 8, 8, 12, step=0.4), 12)),
    ("dense_rows", "rows", lambda: dense_on_rows(made(1, 9, 8), made(1, 9, 12, step=0.4))),
    ("dense_rows", "uint8", lambda: dense_on_rows(unsigned(made(1, 9, 8)), unsigned(made(1, 9, 12, step=0.4)))),
    ("dense_scales", "alike", lambda: dense(2.0)),
    ("dense_scales", "far apart: a convolution", lambda: dense(3000.0)),
    ("batch_norm_leftover", "MUL", lambda: batch_norm("MUL")),
    ("batch_norm_leftover", "MUL with signs", lambda: batch_norm("MUL", -1)),
    ("batch_norm_leftover", "ADD", lambda: batch_norm("ADD")),
    ("batch_norm_leftover", "SUB", lambda: batch_norm("SUB")),
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
    ("curve", "softplus", softplus),
    ("curve", "softplus around zero", lambda: softplus(1 / 40)),
    ("curve", "exponential", exponential),
    ("curve", "cosine", lambda: island("COS", step=0.02)),
    ("repeated_map", "", resize),
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
    ("moved_numbers", "upsampling", lambda: upsampled("TILE")),
    ("moved_numbers", "a broadcast", lambda: upsampled("BROADCAST_TO")),
    ("moved_numbers", "reflection", lambda: mirrored(0)),
    ("moved_numbers", "symmetry", lambda: mirrored(1)),
    ("moved_numbers", "channels here and there", lambda: gather(6, 1, 1, 3, out=(1, 8, 8, 4))),
    ("moved_numbers", "channel shuffle", lambda: shuffled((1, 8, 8, 2, 4), (0, 1, 2, 4, 3), (1, 8, 8, 8))),
    ("moved_numbers", "to depth", lambda: shuffled((1, 4, 2, 4, 2, 8), (0, 1, 3, 2, 4, 5), (1, 4, 4, 32))),
    ("moved_numbers", "from depth", lambda: shuffled((1, 8, 8, 2, 2, 2), (0, 1, 4, 2, 5, 3), (1, 16, 16, 2))),
    (
        "moved_numbers",
        "uint8",
        lambda: one_op.one("TILE", [unsigned(MAP), integers(1, 1, 1, 2)], unsigned(made(1, 8, 8, 16)), 3),
    ),
    ("moved_numbers", "strides", lambda: slices((0, 0, 1, 0), (1, 8, 8, 8), (1, 1, 2, 2), (1, 8, 4, 4))),
    ("moved_numbers", "a head", lambda: shuffled((1, 2, 4, 8, 8), (0, 1, 3, 4, 2), (1, 128, 4))),
    ("function_first", "", lambda: shuffled((1, 2, 4, 8, 8), (0, 1, 3, 4, 2), (1, 128, 4), "LOGISTIC")),
    ("dilated_convolution", "same", lambda: dilated(True)),
    ("dilated_convolution", "valid", lambda: dilated(False)),
    ("dilated_row", "", lambda: dilated_series(0)),
    ("dilated_row", "causal", lambda: dilated_series(4)),
    ("older_version", "", lambda: one_op.one("ADD", [MAP, weights(8)], made(1, 8, 8, 8, step=0.1), 4)),
]


def outputs(model: Graph, feeds: list[NDArray[Any]]) -> list[NDArray[Any]]:
    """What the runtime makes of a written model with one input: an array for each feed, outputs one after the other."""
    from ai_edge_litert.interpreter import Interpreter, OpResolverType

    resolver = OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES  # those round differently in every version
    interpreter = Interpreter(model_content=graph.serialize(model), experimental_op_resolver_type=resolver)
    interpreter.allocate_tensors()
    (given,), found = interpreter.get_input_details(), []
    for feed in feeds:
        interpreter.set_tensor(given["index"], feed)
        interpreter.invoke()
        made = [interpreter.get_tensor(each["index"]) for each in interpreter.get_output_details()]
        found.append(np.concatenate([each.ravel() for each in made]))
    return found


def apart(one: Graph, other: Graph) -> int:
    """By how many steps the outputs of two 8-bit models differ at most, on random codes and on all of them."""
    tensor = one.tensors[one.inputs[0]]
    feeds = [RANDOM.integers(-128, 128, tensor.shape) for _ in range(4)]
    feeds.append(np.resize(np.arange(-128, 128), tensor.shape))
    dtype = comparison.DTYPES[tensor.dtype]
    shifted = [(feed + (128 if dtype == "uint8" else 0)).astype(dtype) for feed in feeds]
    pairs = zip(outputs(one, shifted), outputs(other, shifted), strict=True)
    return max(int(np.abs(a.astype(int) - b.astype(int)).max()) for a, b in pairs)


@pytest.mark.parametrize(("name", "what", "build"), CASES, ids=[f"{name} {what}".strip() for name, what, _ in CASES])
def test_a_rewrite(name: str, what: str, build: Callable[[], Graph]) -> None:
    model = build()
    before = place(model, TARGET)
    assert name in IMPROVEMENTS or any(op.placement == "cpu" for op in before.ops)
    found = legalize(model, TARGET)
    kept = [change for change in found.changes if change.kept]
    assert name in [change.rewrite for change in kept], found.changes
    assert found.after.failure is None
    assert {op.placement for op in found.after.ops} == {"tpu"}
    assert all(change.steps is not None and change.steps <= change.tolerance for change in kept)
    if name != "curve":  # nearer to the function than what it replaces
        assert apart(model, found.graph) <= sum(change.tolerance for change in kept)


def test_every_rewrite_of_an_operator_is_tried() -> None:
    """But those of operators that TFLite does not run in 8 bits, or only newer compilers have: below."""
    untried = {entry.name for entry in REWRITES} - {name for name, _, _ in CASES}
    assert untried == {"square", "relu_0_to_1", "squared_difference"}


@pytest.mark.parametrize("name", ["SQUARE", "RELU_0_TO_1"])
def test_a_float_function_between_integers(name: str) -> None:
    model = island(name)
    found = legalize(model, TARGET)
    assert [change.kept for change in found.changes] == [True]
    assert {op.placement for op in found.after.ops} == {"tpu"}
    assert apart(model, found.graph) <= found.changes[0].tolerance


def test_squared_difference_for_an_older_compiler() -> None:
    model = one_op.one("SQUARED_DIFFERENCE", [MAP, weights(8)], made(1, 8, 8, 8, step=0.2, zero_point=-128), 2)
    assert legalize(model, TARGET).changes == ()
    found = legalize(model, TARGET.compiled_by("15.0"))
    assert [op.op for op in found.after.ops] == ["SUB", "MUL"]
    assert apart(model, found.graph) <= 2


@pytest.mark.parametrize(
    ("what", "build", "reason"),
    [
        ("four axes turned about", lambda: shuffled((1, 4, 2, 8, 8), (0, 4, 3, 2, 1), (1, 64, 2, 4)), None),
        ("a sine with many periods", lambda: island("SIN", step=0.5), None),
        ("a convolution that would not be exact", lambda: batch_norm("MUL", step=2.0), "moves its output by"),
    ],
)
def test_what_is_left_alone(what: str, build: Callable[[], Graph], reason: str | None) -> None:
    model = build()
    found = legalize(model, TARGET)
    assert not any(change.kept for change in found.changes)
    assert found.graph is model
    assert reason is None or any(reason in change.reason for change in found.changes)


def test_what_comes_too_late_is_left_alone() -> None:
    """Nothing is won behind an operator that stays on the CPU; behind one that is rewritten, all is."""
    logarithm = Op("LOG_SOFTMAX", ["b"], ["g"], 2)
    tensors = {"x": MAP, "b": MAP, "g": made(1, 8, 8, 8, step=16 / 256, zero_point=127), "y": MAP}
    late = one_op.read(tensors, [Op("RELU", ["x"], ["b"], 2), logarithm, Op("HARD_SWISH", ["g"], ["y"])], ["x"], ["y"])
    change = legalize(late, TARGET).changes[0]
    assert (change.kept, change.reason) == (False, "it comes after an operator that stays on the CPU")
    operators = Op("RELU", "x", "a", 2), Op("ABS", "a", "b", 2), Op("HARD_SWISH", "b", "y")
    found = legalize(chain(*operators, x=MAP, a=positive(), b=positive(), y=positive()), TARGET)
    assert [change.rewrite for change in found.changes if change.kept] == ["absolute", "hard_swish"]


def test_dense_layers_left_on_the_cpu_get_one_scale_too() -> None:
    """The runtime of 2021 that computes them there takes many scales for one."""
    x, out = made(1, 9, 8), made(1, 9, 12, step=0.4)
    tensors = {"x": x, "b": made(1, 9, 8, step=16 / 256, zero_point=127), "w": weights(12, 8, scales=12), "y": out}
    dense = Op("FULLY_CONNECTED", ["b", "w", ""], ["y"], 4, {"keepNumDims": True})
    operators = [Op("RELU", ["x"], ["a"], 2), Op("LOG_SOFTMAX", ["a"], ["b"], 2), dense]
    found = legalize(one_op.read(tensors | {"a": x}, operators, ["x"], ["y"]), TARGET)
    left = found.graph.operators[-1]
    assert left.name == "FULLY_CONNECTED"
    assert found.graph.tensors[left.inputs[1]].quantization.one_scale


def test_what_came_too_late_is_tried_again() -> None:
    """Alone, the first one helps nothing: it makes an end of the second one, and all behind it come too late."""
    tensors = {"x": MAP, "a": MAP, "i": integers(5, 1), "b": made(1, 8, 8, 2), "y": made(1, 8, 8, 2)}
    operators = [Op("LEAKY_RELU", ["x"], ["a"], 2, {"alpha": 0.1}), Op("GATHER", ["a", "i"], ["b"], 2, {"axis": 3})]
    found = legalize(one_op.read(tensors, [*operators, Op("RELU", ["b"], ["y"], 2)], ["x"], ["y"]), TARGET)
    assert [change.rewrite for change in found.changes] == ["moved_numbers", "leaky_relu"]
    assert {op.placement for op in found.after.ops} == {"tpu"}


def test_a_rewrite_is_for_a_compiler() -> None:
    """PRELU is newer than LEAKY_RELU's other form."""
    model = function("LEAKY_RELU", made(1, 8, 8, 8), 2, alpha=0.1)
    assert [op.op for op in legalize(model, TARGET).after.ops] == ["PRELU"]
    assert [op.op for op in legalize(model, TARGET.compiled_by("2.1")).after.ops] == ["MUL", "MAXIMUM"]


# --- whole graphs -----------------------------------------------------------------------


def chain(*operators: Op, **tensors: Tensor) -> Graph:
    """Operators from x to y."""
    return one_op.read(tensors, operators, ["x"], ["y"])


def float_ended(dtype: str = "INT8") -> Graph:
    inside = MAP if dtype == "INT8" else unsigned(MAP)
    floating = Tensor((1, 8, 8, 8), "FLOAT32", scales=())
    operators = Op("QUANTIZE", "x", "a"), Op("RELU", "a", "b", 2), Op("DEQUANTIZE", "b", "y", 2)
    return chain(*operators, x=floating, a=inside, b=inside, y=floating)


@pytest.mark.parametrize("inside", ["INT8", "UINT8"])
@pytest.mark.parametrize("io", [None, "INT8", "UINT8"])
def test_float_ends_become_integers(inside: str, io: str | None) -> None:
    model = float_ended(inside)
    found = legalize(model, TARGET, io=io)
    ends = [found.graph.tensors[index] for index in (*found.graph.inputs, *found.graph.outputs)]
    assert [tensor.name for tensor in ends] == ["x", "y"]
    assert {tensor.dtype for tensor in ends} == {io or inside}
    assert [op.op for op in found.after.ops] == (["RELU"] if io in (None, inside) else ["QUANTIZE", "RELU", "QUANTIZE"])
    assert found.difference.largest < 0.01
    assert found.after.summary.startswith("all")


@pytest.mark.parametrize("io", [None, "UINT8"])
def test_values_put_out_twice_keep_both_names(io: str | None) -> None:
    floating = Tensor((1, 8, 8, 8), "FLOAT32", scales=())
    operators = [Op("RELU", ["x"], ["a"], 2), Op("DEQUANTIZE", ["a"], ["y"], 2), Op("DEQUANTIZE", ["a"], ["z"], 2)]
    model = one_op.read({"x": MAP, "a": MAP, "y": floating, "z": floating}, operators, ["x"], ["y", "z"])
    result = legalize(model, TARGET, io=io).graph
    assert [result.tensors[index].name for index in result.outputs] == ["y", "z"]


def test_a_float_end_that_is_used_twice_stays() -> None:
    floating = Tensor((1, 8, 8, 8), "FLOAT32", scales=())
    operators = [Op("QUANTIZE", "x", "a"), Op("RELU", "a", "b", 2), Op("DEQUANTIZE", "b", "f", 2)]
    operators.append(Op("ADD", "xf", "y"))
    found = legalize(chain(*operators, x=floating, a=MAP, b=MAP, f=floating, y=floating), TARGET)
    assert found.changes == ()


def dynamic_batch() -> Graph:
    """A reshape to a shape that is computed from the batch: what Keras models with Reshape become."""
    tensors = {
        "x": Tensor((1, 4, 4, 2), scales=(STEP,), signature=(-1, 4, 4, 2)),
        "shape": Tensor((4,), "INT32", scales=()),
        "from": integers(0),
        "to": integers(1),
        "step": integers(1),
        "batch": Tensor((), "INT32", scales=()),
        "32": Tensor((), "INT32", 32, ()),
        "wanted": Tensor((2,), "INT32", scales=()),
        "flat": Tensor((1, 32), scales=(STEP,), signature=(-1, 32)),
        "y": Tensor((1, 32), scales=(STEP,), signature=(-1, 32)),
    }
    operators = [
        Op("SHAPE", ["x"], ["shape"], 1, {"outType": 2}),
        Op("STRIDED_SLICE", ["shape", "from", "to", "step"], ["batch"], 1, {"shrinkAxisMask": 1}),
        Op("PACK", ["batch", "32"], ["wanted"], 1, {"valuesCount": 2}),
        Op("RESHAPE", ["x", "wanted"], ["flat"]),
        Op("RELU", ["flat"], ["y"], 2),
    ]
    return one_op.read(tensors, operators, ["x"], ["y"])


def test_a_dynamic_batch_is_fixed_and_what_follows_is_constant() -> None:
    model = dynamic_batch()
    assert sum(op.placement == "cpu" for op in place(model, TARGET).ops) > 2
    found = legalize(model, TARGET)
    assert [change.rewrite for change in found.changes if change.kept] == ["fixed_shapes", "folded_constants"]
    assert [op.op for op in found.after.ops] == ["RESHAPE", "RELU"]
    assert found.after.summary == "all 2 operators would run on the Edge TPU"
    stored = found.graph.source.subgraphs[0].tensors
    assert all(tensor.shapeSignature is None or -1 not in tensor.shapeSignature for tensor in stored)
    assert apart(model, found.graph) == 0


def test_other_dynamic_sides_are_refused() -> None:
    free = Tensor((1, 4, 4, 2), signature=(-1, -1, 4, 2))
    with pytest.raises(ModelError, match="x has sides other than the batch that may change; fix every side"):
        legalize(chain(Op("RELU", "x", "y", 2), x=free, y=free), TARGET)


def layouts() -> Graph:
    """Two branches in channels-first layout, added, and turned back: what exporters from other frameworks make."""
    first = made(1, 8, 6, 6)
    tensors = {
        "x": made(1, 6, 6, 8),
        "in": integers(0, 3, 1, 2),
        "out": integers(0, 2, 3, 1),
        "a": first,
        "b": first,
        "c": Tensor((8, 1, 1), data=codes(8, 1, 1), scales=(0.02,)),
        "d": first,
        "e": first,
        "y": made(1, 6, 6, 8),
    }
    operators = [
        Op("TRANSPOSE", ["x", "in"], ["a"], 2),
        Op("RELU", ["a"], ["b"], 2),
        Op("ADD", ["a", "c"], ["d"], 2),
        Op("MAXIMUM", ["b", "d"], ["e"], 2),
        Op("TRANSPOSE", ["e", "out"], ["y"], 2),
    ]
    return one_op.read(tensors, operators, ["x"], ["y"])


def test_transposes_that_meet_cancel() -> None:
    model = layouts()
    found = legalize(model, TARGET)
    assert sorted(op.op for op in found.after.ops if op.op != "RESHAPE") == ["ADD", "MAXIMUM", "RELU"]
    assert apart(model, found.graph) == 0


def channels_first(side: int) -> Graph:
    """As exporters write it: channels first outside, padded and split there, and channels last for the layer itself."""
    first, half = (1, 8, side, side), made(1, 4, side + 2, side + 2)
    last = made(1, side + 2, side + 2, 4)
    tensors = {
        "x": made(*first),
        "pads": Tensor((4, 2), "INT32", [[0, 0], [0, 0], [1, 1], [2, 0]], ()),
        "w": weights(4, 1, 1, 4),
    }
    tensors |= {"p": made(1, 8, side + 2, side + 2), "axis": Tensor((), "INT32", 1, ()), "a": half, "b": half}
    tensors |= {
        "in": integers(0, 2, 3, 1),
        "c": last,
        "d": last,
        "bias": bias(4),
        "e": made(1, side + 2, side + 2, 4, step=0.3),
    }
    tensors |= {"f": last, "y": made(1, side + 2, side + 2, 4, step=0.3)}
    operators = [
        Op("PAD", ["x", "pads"], ["p"], 2),
        Op("SPLIT", ["axis", "p"], ["a", "b"], 2, {"numSplits": 2}),
        Op("TRANSPOSE", ["a", "in"], ["c"], 2),
        Op("TRANSPOSE", ["b", "in"], ["d"], 2),
        Op("CONV_2D", ["c", "w", "bias"], ["e"], 3, {"padding": 1, "strideH": 1, "strideW": 1}),
        Op("ADD", ["e", "d"], ["y"], 2),
    ]
    return one_op.read(tensors, operators, ["x"], ["y"])


def test_transposes_move_in_front_of_what_works_along_axes() -> None:
    """Small ones become one; large ones stay on the CPU, in front, where they keep nothing else there."""
    model = channels_first(16)
    found = legalize(model, TARGET)
    assert [op.op for op in found.after.ops] == ["TRANSPOSE", "PAD", "SPLIT", "CONV_2D", "ADD"]
    assert apart(model, found.graph) == 0
    model = channels_first(200)
    assert sum(op.placement == "tpu" for op in place(model, TARGET).ops) == 2
    found = legalize(model, TARGET)
    assert [op.op for op in found.after.ops if op.placement == "cpu"] == ["TRANSPOSE"]
    assert [found.graph.tensors[index].name for index in found.graph.inputs] == ["x"]
    assert apart(model, found.graph) == 0


def test_a_long_head_takes_no_memory() -> None:
    """Rows are not taken for blocks of thousands of rows."""
    tensors = {"x": made(1, 25600, 3, 10), "order": integers(0, 2, 1, 3), "y": made(1, 3, 25600, 10)}
    model = one_op.read(tensors, [Op("TRANSPOSE", ["x", "order"], ["y"], 2)], ["x"], ["y"])
    assert legalize(model, TARGET).graph is model


def test_a_transpose_that_meets_none_stays_where_it_is() -> None:
    tensors = {"x": made(1, 6, 6, 8), "order": integers(0, 3, 1, 2), "a": made(1, 8, 6, 6), "y": made(1, 8, 6, 6)}
    operators = [Op("TRANSPOSE", ["x", "order"], ["a"], 2), Op("RELU", ["a"], ["y"], 2)]
    found = legalize(one_op.read(tensors, operators, ["x"], ["y"]), TARGET)
    assert [op.op for op in found.after.ops] == ["TRANSPOSE", "RELU"]
    assert found.changes == ()


def test_what_stays_at_the_end_is_named() -> None:
    tensors = {"x": made(1, 16), "a": made(1, 16), "axis": Tensor((), "INT32", 1, ())}
    tensors["y"] = Tensor((1,), "INT32", scales=())
    operators = [Op("RELU", ["x"], ["a"], 2), Op("ARG_MAX", ["a", "axis"], ["y"], 2, {"outputType": 2})]
    found = legalize(one_op.read(tensors, operators, ["x"], ["y"]), TARGET)
    assert [op.op for op in found.trailing] == ["ARG_MAX"]
    assert "ARG_MAX (y) stays on the CPU, at the end of the model" in found.describe()


def test_a_custom_operator_that_only_the_device_has() -> None:
    """Proofs end in front of it; what is rewritten before it is proved all the same."""
    operators = Op("HARD_SWISH", "x", "a"), Op("RELU", "a", "b", 2), Op("PosenetDecoderOp", "b", "y", custom=True)
    found = legalize(chain(*operators, x=MAP, a=positive(), b=positive(), y=Tensor((1, 4), "FLOAT32")), TARGET)
    assert [change.rewrite for change in found.changes if change.kept] == ["hard_swish"]
    assert [op.op for op in found.trailing] == ["PosenetDecoderOp"]
    assert found.difference.feeds > 0


def test_a_float_model_has_no_end_that_stays_on_the_cpu() -> None:
    floating = Tensor((1, 8, 8, 8), "FLOAT32", scales=())
    found = legalize(chain(Op("RELU", "x", "a"), Op("ABS", "a", "y"), x=floating, a=floating, y=floating), TARGET)
    assert found.trailing == []
    assert "is the model quantized to full integer?" in found.describe()


def test_nothing_to_do_leaves_the_model_as_it_is() -> None:
    model = chain(Op("RELU", "x", "y", 2), x=MAP, y=MAP)
    found = legalize(model, TARGET)
    assert found.graph is model
    assert found.describe().startswith("nothing to rewrite\n")
    assert json.loads(json.dumps(found.to_json()))["changes"] == []


def test_what_is_left_behind_is_gone_from_the_file() -> None:
    """An operator code that nothing uses would still be looked for, and refused, by an old runtime."""
    read = graph.parse(graph.serialize(legalize(function("GELU", positive()), TARGET).graph))
    codes_left = {code.builtinCode for code in read.source.operatorCodes}
    assert len(codes_left) == len({operator.name for operator in read.operators})
    used = {index for operator in read.operators for index in (*operator.inputs, *operator.outputs)}
    assert used == set(range(len(read.tensors)))


# --- real inputs and the command --------------------------------------------------------


def command(*arguments: Any) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "compress", "legalize", *map(str, arguments)]
    return subprocess.run(line, capture_output=True, text=True, check=False)


def test_the_command(tmp_path: Path) -> None:
    given, out, inputs = tmp_path / "in.tflite", tmp_path / "out.tflite", tmp_path / "inputs.npy"
    given.write_bytes(graph.serialize(float_ended()))
    np.save(inputs, RANDOM.uniform(-5, 5, (12, 8, 8, 8)).astype(np.float32))
    done = command(given, out, "--inputs", inputs, "--io", "uint8")
    assert (done.returncode, done.stderr) == (0, "")
    assert "kept integer_ends" in done.stdout
    assert "on 8 real inputs" in done.stdout
    assert graph.read(out).tensors[graph.read(out).inputs[0]].dtype == "UINT8"
    report = json.loads(command(given, out, "--json").stdout)
    assert report["real_inputs"] is False
    assert set(report) == {"before", "after", "changes", "difference", "real_inputs", "trailing"}


def test_the_command_on_what_stays_refused(tmp_path: Path) -> None:
    given, out = tmp_path / "in.tflite", tmp_path / "out.tflite"
    given.write_bytes(
        graph.serialize(function("FLOOR", Tensor((1, 8), "FLOAT32", scales=()), given=Tensor((1, 8), "FLOAT32")))
    )
    assert command(given, out).returncode == 10
    assert "nothing to rewrite" in command(given, out).stdout


@pytest.mark.parametrize("damage", ["text", "object", "shape", "missing", "names", "empty"])
def test_inputs_that_do_not_fit(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "inputs.npz"
    if damage == "text":
        path.write_text("no array")
    if damage == "object":
        np.savez(path, x=np.asarray([{}], object))
    if damage == "shape":
        np.savez(path, x=np.zeros((3, 4)))
    if damage == "empty":
        np.savez(path, x=np.zeros((0, 8, 8, 8)))
    if damage == "names":
        np.savez(path, z=np.zeros((3, 8, 8, 8)))
    with pytest.raises(DataError, match=r"inputs\.npz: "):
        comparison.read_feeds(path, float_ended())


def test_all_codes_are_tried_on_small_tensors_too() -> None:
    feeds = comparison.ramp_feeds(function("HARD_SWISH", made(1, 10), given=made(1, 10)))
    assert sorted({int(code) for (value,) in feeds for code in value.ravel()}) == list(range(-128, 128))


def test_what_takes_no_input_is_proved_all_the_same() -> None:
    """An operator on a constant that is an output, so that it is not folded: run once for every feed, not never."""
    tensors = {"x": MAP, "y": MAP, "c": Tensor((1, 16), data=codes(1, 16), scales=(STEP,)), "z": made(1, 16)}
    operators = [Op("RELU", ["x"], ["y"], 2), Op("HARD_SWISH", ["c"], ["z"])]
    found = legalize(one_op.read(tensors, operators, ["x"], ["y", "z"]), TARGET)
    (change,) = found.changes
    assert change.steps is not None
    assert change.kept is (change.steps <= change.tolerance)
    assert "refuses" not in change.reason


def test_an_input_that_no_machine_holds() -> None:
    huge = Tensor((1, 1 << 20, 1 << 20, 4))
    with pytest.raises(ModelError, match="has an input of 4,398,046,511,104 numbers"):
        legalize(chain(Op("HARD_SWISH", "x", "y"), x=huge, y=huge), TARGET)


def test_a_wrong_file_leaves_nothing(tmp_path: Path) -> None:
    given, out = tmp_path / "in.tflite", tmp_path / "out.tflite"
    given.write_bytes(graph.serialize(float_ended())[:200])
    done = command(given, out)
    assert done.returncode == 4
    assert [path.name for path in tmp_path.iterdir()] == ["in.tflite"]
