"""Each operator of an ONNX graph, rebuilt in Keras and compared with onnxruntime, over opsets."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from one_node import EXACT, Model, constant, floats, node, number, whole
from paths import ROOT

from compress.model.importers.onnx import onnx_file
from compress.model.importers.onnx.ops.rules import RULES

pytestmark = [
    pytest.mark.tensorflow,
    pytest.mark.usefixtures("onnx_at_once"),
]
ROW, SEQUENCE, IMAGE = (1, 6), (1, 4, 10), (1, 4, 9, 8)
Case = tuple[str, int, Sequence[int], list[Any], list[str] | None]
"""A name, an opset, the input's shape, operators, and the layers that they should become."""


def one(kind: str, *more: Any, **settings: Any) -> list[Any]:
    return [node(kind, ["x", *more], ["y"], **settings)]


def masked(first: Any, second: Any) -> list[Any]:
    """Return a selection by a constant below and above the diagonal, as in a causal attention, and its softmax."""
    below = constant(np.tril(np.ones((5, 5), bool)))
    return [
        node("Relu", ["x"], ["r"]),
        node("Where", [below, first, second], ["m"]),
        node("Softmax", ["m"], ["y"], axis=-1),
    ]


average, transposed = partial(one, "AveragePool"), partial(one, "ConvTranspose")
ONES, TWOS, THREES = [1] * 4, [2, 2], [3, 3]
PADDED, TRANSPOSED, CROPPED = ["ZeroPadding2D", "Conv2D"], ["Conv2DTranspose"], ["Conv2DTranspose", "Cropping2D"]
UNARY = dict.fromkeys(("Relu", "Sigmoid", "Tanh", "Softplus", "Softsign", "Selu"), "Activation")
UNARY |= {kind: kind for kind in ("Celu", "Exp", "Erf", "Floor", "Ceil", "Round", "Sign", "Sin", "Cos")}
UNARY |= {"LeakyRelu": "LeakyReLU", "Elu": "ELU", "Abs": "Absolute", "Neg": "Multiply", "Reciprocal": "Divide"}
BINARY = {"Add": "Add", "Sub": "Subtract", "Mul": "Multiply", "Div": "Divide", "Max": "Maximum", "Min": "Minimum"}
COMPARISONS = {"Greater": "Greater", "Less": "Less", "Equal": "Equal"}
COMPARISONS |= {"LessOrEqual": "LessEqual", "GreaterOrEqual": "GreaterEqual"}
KERNEL, BIAS = floats(6, 4, 3, 3), floats(6)
REDUCTIONS = [f"Reduce{how}" for how in ("Mean", "Max", "Min", "Sum", "Prod", "L1", "L2", "SumSquare", "LogSumExp")]
CASES: list[Case] = [
    ("conv", 7, IMAGE, one("Conv", KERNEL, BIAS), ["Conv2D"]),
    ("conv same", 11, IMAGE, one("Conv", KERNEL, pads=ONES), ["Conv2D"]),
    ("conv pads", 11, IMAGE, one("Conv", KERNEL, pads=ONES, strides=TWOS), PADDED),
    ("conv uneven", 11, IMAGE, one("Conv", KERNEL, pads=[0, 1, 2, 3]), PADDED),
    ("conv upper", 11, IMAGE, one("Conv", KERNEL, auto_pad="SAME_UPPER", strides=TWOS), ["Conv2D"]),
    ("conv lower", 11, IMAGE, one("Conv", floats(6, 4, 2, 2), auto_pad="SAME_LOWER"), PADDED),
    ("conv valid", 11, IMAGE, one("Conv", KERNEL, auto_pad="VALID", strides=[2, 1]), ["Conv2D"]),
    ("conv dilated", 22, IMAGE, one("Conv", KERNEL, dilations=[2, 2], pads=[2, 2, 2, 2]), ["Conv2D"]),
    (
        "conv strides dilated",
        11,
        IMAGE,
        one("Conv", KERNEL, BIAS, dilations=[2, 1], strides=[1, 2], pads=[2, 1, 2, 1]),
        PADDED,
    ),
    ("conv groups", 11, IMAGE, one("Conv", floats(6, 2, 3, 3), BIAS, group=2), ["Conv2D"]),
    ("depthwise", 11, IMAGE, one("Conv", floats(4, 1, 3, 3), floats(4), group=4, pads=ONES), ["DepthwiseConv2D"]),
    ("multiplier", 11, IMAGE, one("Conv", floats(8, 1, 3, 3), floats(8), group=4), ["DepthwiseConv2D"]),
    ("uneven depthwise", 11, IMAGE, one("Conv", floats(4, 1, 3, 3), group=4, strides=[2, 1]), ["Conv2D"]),
    ("one channel", 11, (1, 1, 8, 8), one("Conv", floats(3, 1, 3, 3)), ["Conv2D"]),
    (
        "conv 1d",
        11,
        SEQUENCE,
        one("Conv", floats(5, 4, 3), floats(5), pads=[1, 1], strides=[2]),
        ["ZeroPadding1D", "Conv1D"],
    ),
    (
        "depthwise strides dilated",
        11,
        IMAGE,
        one("Conv", floats(4, 1, 3, 3), floats(4), group=4, dilations=[2, 2], strides=TWOS),
        ["DepthwiseConv2D"],
    ),
    ("depthwise 1d", 11, SEQUENCE, one("Conv", floats(4, 1, 3), group=4), ["DepthwiseConv1D"]),
    ("transposed", 11, IMAGE, transposed(floats(4, 5, 3, 3), floats(5)), TRANSPOSED),
    ("transposed 2", 11, IMAGE, transposed(floats(4, 5, 2, 2), strides=TWOS), TRANSPOSED),
    ("transposed pads", 11, IMAGE, transposed(floats(4, 5, 4, 4), strides=TWOS, pads=ONES), TRANSPOSED),
    (
        "transposed more",
        11,
        IMAGE,
        transposed(floats(4, 5, 3, 3), strides=TWOS, pads=ONES, output_padding=[1, 1]),
        CROPPED,
    ),
    ("transposed upper", 11, IMAGE, transposed(floats(4, 5, 3, 3), strides=TWOS, auto_pad="SAME_UPPER"), TRANSPOSED),
    ("transposed shape", 11, IMAGE, transposed(floats(4, 5, 3, 3), strides=TWOS, output_shape=[18, 16]), CROPPED),
    ("transposed far", 11, IMAGE, transposed(floats(4, 5, 2, 2), strides=[3, 3], output_padding=[1, 2]), TRANSPOSED),
    (
        "transposed dilated",
        11,
        IMAGE,
        transposed(floats(4, 5, 3, 3), dilations=[2, 3], strides=[2, 1], pads=ONES, output_padding=[1, 0]),
        CROPPED,
    ),
    ("transposed groups", 11, IMAGE, transposed(floats(4, 1, 4, 4), strides=TWOS, pads=ONES, group=4), TRANSPOSED),
    (
        "transposed dilated groups 1d",
        11,
        SEQUENCE,
        transposed(floats(4, 2, 3), floats(4), dilations=[2], group=2),
        ["Conv1DTranspose"],
    ),
    ("transposed 1d", 11, SEQUENCE, transposed(floats(4, 3, 4), strides=[2], pads=[1, 1]), ["Conv1DTranspose"]),
    ("max", 8, IMAGE, one("MaxPool", kernel_shape=[2, 2], strides=TWOS), ["MaxPooling2D"]),
    ("max ceil", 10, IMAGE, one("MaxPool", kernel_shape=[2, 2], strides=TWOS, ceil_mode=1), ["MaxPooling2D"]),
    (
        "max pads",
        11,
        (1, 4, 8, 8),
        one("MaxPool", kernel_shape=THREES, strides=TWOS, pads=ONES),
        ["MaxPooling2D", "MaxPooling2D"],
    ),
    (
        "max of relu",
        11,
        (1, 4, 8, 8),
        [node("Relu", ["x"], ["r"]), node("MaxPool", ["r"], ["y"], kernel_shape=THREES, strides=TWOS, pads=ONES)],
        ["Activation", "ZeroPadding2D", "MaxPooling2D"],
    ),
    ("max same", 11, IMAGE, one("MaxPool", kernel_shape=THREES, strides=[1, 1], pads=ONES), ["MaxPooling2D"]),
    ("max 1d", 11, SEQUENCE, one("MaxPool", kernel_shape=[2], strides=[2]), ["MaxPooling1D"]),
    ("average", 7, IMAGE, average(kernel_shape=[3, 2], strides=TWOS), ["AveragePooling2D"]),
    ("average same", 11, IMAGE, average(kernel_shape=THREES, pads=ONES), ["AveragePooling2D"]),
    (
        "average all",
        11,
        IMAGE,
        average(kernel_shape=THREES, pads=ONES, count_include_pad=1),
        ["ZeroPadding2D", "AveragePooling2D"],
    ),
    ("average uneven", 11, IMAGE, average(kernel_shape=THREES, pads=ONES, strides=TWOS), None),
    (
        "average ceil",
        19,
        IMAGE,
        average(kernel_shape=THREES, strides=TWOS, ceil_mode=1, pads=ONES, count_include_pad=1),
        None,
    ),
    ("average 1d", 11, SEQUENCE, average(kernel_shape=[2], strides=[2]), ["AveragePooling1D"]),
    ("global", 7, IMAGE, one("GlobalAveragePool"), ["GlobalAveragePooling2D"]),
    ("global max", 7, IMAGE, one("GlobalMaxPool"), ["GlobalMaxPooling2D"]),
    ("global 1d", 7, SEQUENCE, one("GlobalAveragePool"), ["GlobalAveragePooling1D"]),
    ("gemm", 7, ROW, one("Gemm", floats(6, 5), floats(5)), ["Dense"]),
    ("gemm turned", 11, ROW, one("Gemm", floats(5, 6), floats(1, 5), transB=1, alpha=0.5, beta=2.0), ["Dense"]),
    ("gemm bare", 13, ROW, one("Gemm", floats(6, 5)), ["Dense"]),
    ("gemm scalar", 13, ROW, one("Gemm", floats(6, 5), number(0.5)), ["Dense"]),
    ("gemm columns", 13, (6, 3), one("Gemm", floats(6, 5), transA=1), ["Permute", "Dense"]),
    ("gemm of two", 13, ROW, one("Gemm", floats(6, 6), "x"), ["Dense", "Add"]),
    ("matmul", 13, ROW, one("MatMul", floats(6, 5)), ["Dense"]),
    ("matmul rows", 13, (1, 5, 6), one("MatMul", floats(6, 3)), ["Dense"]),
    ("matmul vector", 13, (1, 5, 6), one("MatMul", floats(6)), None),
    ("matmul left", 13, (1, 5, 6), [node("MatMul", [floats(3, 5), "x"], ["y"])], None),
    ("matmul two", 13, (1, 5, 5), one("MatMul", "x"), ["Matmul"]),
    ("matmul many", 13, (1, 3, 5, 5), one("MatMul", floats(3, 5, 2)), None),
    ("norm", 7, IMAGE, one("BatchNormalization", *[floats(4, low=0.1)] * 4, epsilon=0.01), ["BatchNormalization"]),
    ("norm rows", 15, (1, 4), one("BatchNormalization", *[floats(4, low=0.1)] * 4), ["BatchNormalization"]),
    ("norm 1d", 14, SEQUENCE, one("BatchNormalization", *[floats(4, low=0.1)] * 4), ["BatchNormalization"]),
    ("instance", 7, IMAGE, one("InstanceNormalization", floats(4), floats(4)), ["GroupNormalization"]),
    ("group 21", 21, IMAGE, one("GroupNormalization", floats(4), floats(4), num_groups=2), ["GroupNormalization"]),
    ("layer", 17, (1, 5, 6), one("LayerNormalization", floats(6), floats(6), axis=-1), ["LayerNormalization"]),
    ("layer 2", 17, (1, 5, 6), one("LayerNormalization", floats(5, 6), axis=1), ["LayerNormalization"]),
    ("neighbours", 13, (1, 7, 3, 3), one("LRN", size=3, alpha=0.5, beta=0.7, bias=2.0), None),
    ("softmax 7", 7, ROW, one("Softmax", axis=1), ["Softmax"]),
    ("softmax all", 11, SEQUENCE, one("Softmax"), None),
    ("softmax 13", 13, SEQUENCE, one("Softmax", axis=1), ["Softmax"]),
    ("softmax last", 13, SEQUENCE, one("Softmax"), ["Softmax"]),
    ("log softmax", 13, SEQUENCE, one("LogSoftmax", axis=1), ["LogSoftmax"]),
    ("log softmax 9", 9, ROW, one("LogSoftmax"), ["LogSoftmax"]),
    *((kind, 13, IMAGE, one(kind), [layer]) for kind, layer in UNARY.items()),
    ("elu", 7, IMAGE, one("Elu", alpha=0.5), ["ELU"]),
    ("leaky", 16, IMAGE, one("LeakyRelu", alpha=0.2), ["LeakyReLU"]),
    ("hard sigmoid", 7, IMAGE, one("HardSigmoid"), ["Multiply", "Add", "Clip"]),
    ("hard sigmoid of keras", 7, IMAGE, one("HardSigmoid", alpha=1 / 6), ["Activation"]),
    ("hard swish", 14, IMAGE, one("HardSwish"), ["Activation"]),
    ("mish", 18, IMAGE, one("Mish"), ["Activation"]),
    ("gelu", 20, IMAGE, one("Gelu"), ["Gelu"]),
    ("gelu tanh", 20, IMAGE, one("Gelu", approximate="tanh"), ["Gelu"]),
    ("prelu", 7, IMAGE, one("PRelu", floats(4, 1, 1)), ["PReLU"]),
    ("prelu one", 9, IMAGE, one("PRelu", floats(1)), ["PReLU"]),
    ("prelu each", 9, IMAGE, one("PRelu", floats(4, 9, 8)), ["PReLU"]),
    ("clip 7", 7, IMAGE, one("Clip", min=0.0, max=6.0), ["Activation"]),
    ("clip 11", 11, IMAGE, one("Clip", number(0), number(6)), ["Activation"]),
    ("clip other", 13, IMAGE, one("Clip", number(-0.5), number(0.25)), ["Clip"]),
    ("clip below", 13, IMAGE, one("Clip", number(-0.5)), ["Maximum"]),
    ("clip above", 13, IMAGE, one("Clip", "", number(0.5)), ["Minimum"]),
    ("clip nothing", 13, IMAGE, [node("Clip", ["x"], ["c"]), node("Relu", ["c"], ["y"])], ["Activation"]),
    *((kind, 14, IMAGE, one(kind, floats(4, 1, 1, low=0.2)), [layer]) for kind, layer in BINARY.items()),
    ("add row", 7, IMAGE, one("Add", floats(8)), ["Add"]),
    ("add image", 7, IMAGE, one("Add", floats(1, 4, 9, 8)), ["Add"]),
    ("add two", 7, IMAGE, one("Add", "x"), ["Add"]),
    ("from constant", 13, IMAGE, [node("Sub", [floats(4, 1, 1), "x"], ["y"])], ["Subtract"]),
    ("grows", 13, (1, 4, 1, 8), one("Mul", floats(1, 1, 9, 1)), ["Multiply"]),
    ("sum", 8, IMAGE, one("Sum", "x", floats(4, 1, 1)), None),
    ("mean", 8, IMAGE, one("Mean", "x"), ["Average"]),
    ("square", 13, IMAGE, one("Pow", number(2)), ["Multiply"]),
    ("power", 13, IMAGE, one("Pow", number(3)), ["Power"]),
    ("square root", 13, IMAGE, [node("Abs", ["x"], ["a"]), node("Sqrt", ["a"], ["y"])], ["Absolute", "Sqrt"]),
    ("log", 13, IMAGE, [node("Exp", ["x"], ["e"]), node("Log", ["e"], ["y"])], ["Exp", "Log"]),
    *(
        (f"where with {name}", 16, (1, 5, 5), nodes, layers)
        for name, nodes, layers in (
            ("-inf", masked("x", number(-np.inf)), ["Add", "Softmax"]),
            ("a number", masked("x", number(-1e9)), ["Multiply", "Add", "Softmax"]),
            ("the other", masked(floats(1, 5, 5), "x"), ["Multiply", "Add", "Softmax"]),
            ("a sum", masked("x", "r"), ["Activation", "Multiply", "Multiply", "Add", "Softmax"]),
        )
    ),
    *(
        (
            kind,
            16,
            IMAGE,
            [node(kind, ["x", number(0.25)], ["c"]), node("Where", ["c", "x", floats(4, 1, 1)], ["y"])],
            [layer, "Where"],
        )
        for kind, layer in COMPARISONS.items()
    ),
    (
        "logic",
        16,
        IMAGE,
        [
            node("Greater", ["x", number(0.25)], ["a"]),
            node("Less", ["x", number(0.75)], ["b"]),
            node("And", ["a", "b"], ["c"]),
            node("Not", ["a"], ["d"]),
            node("Or", ["c", "d"], ["e"]),
            node("Cast", ["e"], ["y"], to=1),
        ],
        ["Greater", "Less", "LogicalAnd", "LogicalNot", "LogicalOr", "Cast"],
    ),
    ("concat", 7, IMAGE, one("Concat", "x", axis=1), ["Concatenate"]),
    ("concat rows", 13, IMAGE, one("Concat", "x", axis=-1), ["Concatenate"]),
    ("concat batch", 13, IMAGE, one("Concat", "x", axis=0), None),
    ("reshape", 13, IMAGE, one("Reshape", whole(0, 4, -1)), None),
    ("flatten", 13, IMAGE, one("Flatten"), None),
    ("transpose", 13, IMAGE, one("Transpose", perm=[0, 2, 3, 1]), []),
    ("turned round", 13, (1, 4, 5), one("Transpose", perm=[0, 2, 1]), []),
    ("unsqueeze 7", 7, ROW, one("Unsqueeze", axes=[1, 3]), ["Reshape"]),
    ("squeeze", 13, (1, 4, 1, 6), one("Squeeze", whole(2)), None),
    (
        "split",
        11,
        IMAGE,
        [node("Split", ["x"], ["a", "b"], axis=1, split=[2, 2]), node("Mul", ["a", "b"], ["y"])],
        ["GetItem", "GetItem", "Multiply"],
    ),
    (
        "split evenly",
        18,
        IMAGE,
        [node("Split", ["x"], ["a", "b"], axis=-1, num_outputs=2), node("Sub", ["a", "b"], ["y"])],
        ["GetItem", "GetItem", "Subtract"],
    ),
    ("slice 7", 7, IMAGE, one("Slice", starts=[1, 2], ends=[3, 100], axes=[1, 2]), ["GetItem"]),
    ("slice 10", 10, IMAGE, one("Slice", whole(-3), whole(2**40), whole(3)), ["GetItem"]),
    ("slice steps", 13, IMAGE, one("Slice", whole(0, 7), whole(9, -100), whole(2, 3), whole(2, -1)), ["GetItem"]),
    ("gather", 13, IMAGE, one("Gather", whole(3, 0, 1), axis=1), ["Take"]),
    ("gather one", 13, IMAGE, one("Gather", constant(np.array(2)), axis=2), ["GetItem", "Reshape"]),
    ("arg max", 13, IMAGE, one("ArgMax", axis=1, keepdims=0), ["Argmax", "Reshape"]),
    ("arg max rows", 11, ROW, one("ArgMax", axis=-1), ["Argmax"]),
    ("log sum", 13, IMAGE, [node("Exp", ["x"], ["e"]), node("ReduceLogSum", ["e"], ["y"], axes=[2, 3])], None),
    ("pad 7", 7, IMAGE, one("Pad", pads=[0, 0, 1, 2, 0, 0, 3, 0]), ["ZeroPadding2D"]),
    (
        "pad 11",
        11,
        SEQUENCE,
        [node("Pad", ["x", whole(0, 0, 1, 0, 0, 2)], ["p"]), node("Conv", ["p", floats(5, 4, 3)], ["y"], strides=[2])],
        ["ZeroPadding1D", "Conv1D"],
    ),
    ("pad axes", 18, IMAGE, one("Pad", whole(1, 1), "", whole(3)), ["ZeroPadding2D"]),
    ("pad channels", 11, IMAGE, one("Pad", whole(0, 1, 0, 0, 0, 2, 0, 0)), ["Pad"]),
    ("pad ones", 11, IMAGE, one("Pad", whole(0, 0, 1, 1, 0, 0, 1, 1), number(1)), ["Pad"]),
    (
        "pad with -inf before max",
        11,
        (1, 4, 8, 8),
        [
            node("Pad", ["x", whole(0, 0, 0, 0, 0, 0, 1, 1), number(-np.inf)], ["p"]),
            node("MaxPool", ["p"], ["y"], kernel_shape=THREES, strides=TWOS),
        ],
        ["MaxPooling2D"],
    ),
    (
        "add one number for each column of a square map",
        13,
        (1, 4, 8, 8),
        [
            node("Conv", ["x", floats(4, 4, 1, 1)], ["c"]),
            node("Reshape", ["c", whole(1, 2, 2, 8, 8)], ["r"]),
            node("Transpose", ["r"], ["t"], perm=[0, 1, 3, 4, 2]),
            node("Gather", ["t", whole(1)], ["g"], axis=4),
            node("Squeeze", ["g", whole(4)], ["q"]),
            node("Sigmoid", ["q"], ["s"]),
            node("Add", ["s", floats(1, 1, 1, 8)], ["y"]),
        ],
        None,
    ),
    ("pad reflect", 11, IMAGE, one("Pad", whole(0, 0, 2, 1, 0, 0, 2, 1), mode="reflect"), ["Pad"]),
    ("pad edge", 11, IMAGE, one("Pad", whole(0, 0, 1, 1, 0, 0, 1, 1), mode="edge"), ["Pad"]),
    ("pad edge far", 11, IMAGE, one("Pad", whole(0, 0, 2, 0, 0, 0, 3, 4), mode="edge"), ["Take", "Take"]),
    ("pad wrap", 19, IMAGE, one("Pad", whole(0, 0, 2, 0, 0, 0, 9, 4), mode="wrap"), ["Take", "Take"]),
    ("pad less", 11, IMAGE, one("Pad", whole(0, 0, -1, 0, 0, 0, 1, -2)), None),
    ("expand", 13, (1, 4, 1, 8), one("Expand", whole(1, 4, 5, 8)), ["Tile"]),
    ("tile", 13, IMAGE, one("Tile", whole(1, 2, 1, 3)), ["Tile"]),
    ("depth to space", 11, IMAGE, one("DepthToSpace", blocksize=2), ["DepthToSpace"]),
    ("pixel shuffle", 11, (1, 8, 3, 3), one("DepthToSpace", blocksize=2, mode="CRD"), ["Take", "DepthToSpace"]),
    ("space to depth", 13, (1, 3, 4, 6), one("SpaceToDepth", blocksize=2), ["SpaceToDepth"]),
    *(
        (f"{kind} {opset}", opset, IMAGE, one(kind, axes=[1], keepdims=0), None)
        for opset in (7, 11)
        for kind in REDUCTIONS
    ),
    *((f"{kind} 18", 18, IMAGE, one(kind, whole(-2)), None) for kind in REDUCTIONS),
    ("reduce all", 13, IMAGE, one("ReduceMean"), None),
    ("reduce image", 13, IMAGE, one("ReduceMean", axes=[2, 3]), ["GlobalAveragePooling2D"]),
    ("reduce image away", 13, IMAGE, one("ReduceMax", axes=[-1, -2], keepdims=0), ["GlobalMaxPooling2D"]),
    ("upsample 7", 7, IMAGE, one("Upsample", scales=[1.0, 1.0, 2.0, 3.0]), ["UpSampling2D"]),
    ("upsample 9", 9, IMAGE, one("Upsample", constant(np.array([1, 1, 2, 2], np.float32)), mode="linear"), None),
    ("resize 10", 10, IMAGE, one("Resize", constant(np.array([1, 1, 2, 2], np.float32))), ["UpSampling2D"]),
    *(
        (
            f"resize {way} {mode} {sides}",
            13,
            IMAGE,
            one("Resize", "", "", whole(1, 4, *sides), mode=mode, coordinate_transformation_mode=way),
            None,
        )
        for way in ("half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric")
        for mode in ("nearest", "linear", "cubic")
        for sides in ((18, 16), (5, 11))
    ),
    *(
        (f"resize {way}", 18, IMAGE, one("Resize", "", "", whole(1, 4, 5, 11), mode="nearest", nearest_mode=way), None)
        for way in ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil")
    ),
    (
        "resize axes",
        18,
        IMAGE,
        one("Resize", "", constant(np.array([2, 2], np.float32)), mode="linear", axes=[2, 3]),
        ["UpSampling2D"],
    ),
    (
        "resize 1d",
        13,
        SEQUENCE,
        one("Resize", "", "", whole(1, 4, 20), coordinate_transformation_mode="asymmetric", nearest_mode="floor"),
        ["UpSampling1D"],
    ),
    ("resize 1d linear", 13, SEQUENCE, one("Resize", "", "", whole(1, 4, 7), mode="linear"), None),
    (
        "identity",
        13,
        IMAGE,
        [
            node("Identity", ["x"], ["i"]),
            node("Dropout", ["i"], ["d"]),
            node("Cast", ["d"], ["c"], to=1),
            node("Relu", ["c"], ["y"]),
        ],
        ["Activation"],
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])
def test_an_operator_computes_the_same_in_keras(case: Case, saved_onnx: Callable[[Model], Path]) -> None:
    _, opset, shape, nodes, layers = case
    file = onnx_file.read(saved_onnx(Model(nodes, {"x": shape}, ["y"], opset)))
    assert file.problems == ()
    model, parity = onnx_file.load(file)
    assert parity.max_rel < EXACT
    if layers is not None:
        kinds = [type(operation).__name__ for operation in model.operations]
        assert [kind for kind in kinds if kind != "InputLayer"] == layers


def test_the_manual_lists_what_there_is() -> None:
    text = (ROOT / "docs" / "onnx.md").read_text()
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    listed = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert sorted(listed) == sorted(set(RULES))


def test_every_rule_is_tried() -> None:
    tried = {node_proto.op_type for _, _, _, nodes, _ in CASES for node_proto, _ in nodes}
    assert set(RULES) <= tried | {"LSTM", "GRU", "RNN"}  # test_onnx_recurrent.py
