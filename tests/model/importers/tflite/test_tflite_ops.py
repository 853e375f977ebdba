"""Each operator of a float .tflite file, rebuilt in Keras and compared with the TFLite runtime."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from one_op import Op, Tensor, integers, one, read

from compress.core.errors import ModelError
from compress.model.importers.tflite import tflite_file
from compress.model.importers.tflite.ops.layers import RULES
from compress.model.tflite import graph

pytestmark = pytest.mark.tensorflow
EXACT = 1e-5


def computed(*shape: int) -> Tensor:
    return Tensor(shape, "FLOAT32")


def constant(*shape: int, low: float = -1.0) -> Tensor:
    """Return different random values, always the same for the same shape."""
    return Tensor(shape, "FLOAT32", np.random.default_rng(len(shape)).uniform(low, 1.0, shape))


def imported(parsed: graph.Graph, tmp_path: Path) -> tuple[tflite_file.TfliteFile, Any, float]:
    """Import a graph; return the file, the Keras model, and the largest relative difference of their outputs."""
    path = tmp_path / "model.tflite"
    path.write_bytes(graph.serialize(parsed))
    file = tflite_file.read(path)
    model, parity = tflite_file.load(file)
    return file, model, parity.max_rel


def kinds(model: Any) -> list[str]:
    return [type(operation).__name__ for operation in model.operations if type(operation).__name__ != "InputLayer"]


IMAGE = computed(1, 8, 6, 4)
ROWS = computed(1, 5, 6)
PADS = Tensor((4, 2), "INT32", [[0, 0], [1, 2], [0, 3], [0, 0]], ())
Case = tuple[str, Sequence[Tensor | None], Tensor, dict[str, Any], list[str]]
CONV = {"strideH": 1, "strideW": 1, "dilationHFactor": 1, "dilationWFactor": 1}
POOL = {"strideH": 2, "strideW": 1, "filterHeight": 3, "filterWidth": 2}
COMPARISONS = ["EQUAL", "NOT_EQUAL", "GREATER", "GREATER_EQUAL", "LESS", "LESS_EQUAL"]
UNARY = dict.fromkeys(("RELU", "RELU6", "LOGISTIC", "TANH", "ELU", "HARD_SWISH", "LOG_SOFTMAX"), "Activation")
UNARY |= {name: name.title() for name in ("EXP", "LOG", "SQRT", "RSQRT", "SIN", "COS", "FLOOR", "CEIL", "SIGN")}
UNARY |= {"RELU_N1_TO_1": "Clip", "RELU_0_TO_1": "Clip", "ABS": "Absolute", "NEG": "Multiply", "SQUARE": "Multiply"}
CASES: list[Case] = [
    ("CONV_2D", (IMAGE, constant(5, 3, 3, 4), constant(5)), computed(1, 8, 6, 5), CONV, ["Conv2D"]),
    (
        "CONV_2D",
        (IMAGE, constant(6, 3, 2, 2), constant(6)),
        computed(1, 3, 3, 6),
        CONV | {"padding": 1, "strideH": 2, "strideW": 2, "fusedActivationFunction": 3},
        ["Conv2D", "Activation"],
    ),
    (
        "CONV_2D",
        (IMAGE, constant(5, 3, 3, 4), constant(5)),
        computed(1, 8, 6, 5),
        CONV | {"dilationWFactor": 2},
        ["Conv2D"],
    ),
    (
        "DEPTHWISE_CONV_2D",
        (IMAGE, constant(1, 3, 3, 8), constant(8)),
        computed(1, 4, 3, 8),
        CONV | {"strideH": 2, "strideW": 2, "depthMultiplier": 2, "fusedActivationFunction": 1},
        ["DepthwiseConv2D", "Activation"],
    ),
    (
        "DEPTHWISE_CONV_2D",
        (IMAGE, constant(1, 3, 3, 4), constant(4)),
        computed(1, 4, 6, 4),
        CONV | {"strideH": 2, "depthMultiplier": 1},
        ["Conv2D"],
    ),
    *(
        (
            "TRANSPOSE_CONV",
            (integers(1, *size, 3), constant(3, 3, 3, 4), IMAGE, constant(3)),
            computed(1, *size, 3),
            {"strideH": 2, "strideW": 2, "padding": padding},
            ["Conv2DTranspose"],
        )
        for size, padding in (((16, 12), 0), ((15, 11), 0), ((17, 13), 1), ((18, 13), 1))
    ),
    ("FULLY_CONNECTED", (computed(1, 6), constant(3, 6), constant(3)), computed(1, 3), {}, ["Dense"]),
    ("FULLY_CONNECTED", (ROWS, constant(3, 6), None), computed(5, 3), {}, ["Dense", "Reshape"]),
    (
        "FULLY_CONNECTED",
        (ROWS, constant(3, 6), constant(3)),
        computed(1, 5, 3),
        {"keepNumDims": True, "fusedActivationFunction": 1},
        ["Dense", "Activation"],
    ),
    ("FULLY_CONNECTED", (ROWS, constant(3, 30), constant(3)), computed(1, 3), {}, ["Flatten", "Dense"]),
    ("FULLY_CONNECTED", (ROWS, constant(3, 15), constant(3)), computed(2, 3), {}, ["Reshape", "Dense"]),
    ("AVERAGE_POOL_2D", (IMAGE,), computed(1, 4, 6, 4), POOL, ["AveragePooling2D"]),
    ("MAX_POOL_2D", (IMAGE,), computed(1, 3, 5, 4), POOL | {"padding": 1}, ["MaxPooling2D"]),
    ("ADD", (IMAGE, computed(1, 1, 1, 4)), IMAGE, {"fusedActivationFunction": 1}, ["Add", "Activation"]),
    ("ADD", (IMAGE, constant(4)), IMAGE, {"fusedActivationFunction": 2}, ["Add", "Clip"]),
    ("ADD", (IMAGE, computed(1, 4)), IMAGE, {}, ["Reshape", "Add"]),
    ("ADD", (computed(1, 4), constant(3, 4)), computed(3, 4), {}, ["Reshape", "Add"]),
    ("SUB", (IMAGE, IMAGE), IMAGE, {}, ["Subtract"]),
    ("SUB", (constant(1, 1, 1, 4), IMAGE), IMAGE, {}, ["Subtract"]),
    ("MUL", (IMAGE, constant()), IMAGE, {}, ["Multiply"]),
    ("DIV", (constant(4), computed(1, 4)), computed(1, 4), {}, ["Divide"]),
    ("MAXIMUM", (IMAGE, IMAGE), IMAGE, {}, ["Maximum"]),
    ("MINIMUM", (IMAGE, constant(1)), IMAGE, {}, ["Minimum"]),
    ("SQUARED_DIFFERENCE", (IMAGE, IMAGE), IMAGE, {}, ["Subtract", "Multiply"]),
    ("POW", (IMAGE, Tensor((), "FLOAT32", 2.0)), IMAGE, {}, ["Power"]),
    *((name, (ROWS,), ROWS, {}, [kind]) for name, kind in UNARY.items()),
    ("GELU", (ROWS,), ROWS, {"approximate": False}, ["Gelu"]),
    ("GELU", (ROWS,), ROWS, {"approximate": True}, ["Gelu"]),
    ("LEAKY_RELU", (ROWS,), ROWS, {"alpha": 0.125}, ["LeakyReLU"]),
    ("PRELU", (IMAGE, constant(1, 1, 4)), IMAGE, {}, ["PReLU"]),
    ("PRELU", (IMAGE, constant(8, 6, 4)), IMAGE, {}, ["PReLU"]),
    ("SOFTMAX", (ROWS,), ROWS, {"beta": 1.0}, ["Softmax"]),
    ("SOFTMAX", (ROWS,), ROWS, {"beta": 0.5}, ["Multiply", "Softmax"]),
    ("L2_NORMALIZATION", (ROWS,), ROWS, {}, ["UnitNormalization"]),
    ("BATCH_MATMUL", (computed(1, 2, 5, 6), computed(1, 2, 6, 3)), computed(1, 2, 5, 3), {}, ["Matmul"]),
    (
        "BATCH_MATMUL",
        (computed(1, 2, 5, 6), computed(1, 2, 3, 6)),
        computed(1, 2, 5, 3),
        {"adjY": True},
        ["Permute", "Matmul"],
    ),
    ("BATCH_MATMUL", (ROWS, constant(6, 3)), computed(1, 5, 3), {}, ["Dense"]),
    ("RESHAPE", (IMAGE, integers(1, 48, 4)), computed(1, 48, 4), {}, ["Reshape"]),
    ("RESHAPE", (IMAGE, integers(1, 192)), computed(1, 192), {}, ["Flatten"]),
    ("RESHAPE", (IMAGE, integers(48, 4)), computed(48, 4), {}, ["Reshape"]),
    ("EXPAND_DIMS", (ROWS, integers(2)), computed(1, 5, 1, 6), {}, ["Reshape"]),
    ("TRANSPOSE", (IMAGE, integers(0, 3, 1, 2)), computed(1, 4, 8, 6), {}, ["Permute"]),
    ("TRANSPOSE", (ROWS, integers(1, 0, 2)), computed(5, 1, 6), {}, ["Reshape", "Permute"]),
    ("CONCATENATION", (IMAGE, IMAGE), computed(1, 8, 6, 8), {"axis": -1}, ["Concatenate"]),
    ("CONCATENATION", (ROWS, ROWS), computed(2, 5, 6), {"axis": 0}, ["Reshape", "Reshape", "Concatenate"]),
    ("PACK", (ROWS, ROWS), computed(1, 5, 2, 6), {"axis": 2, "valuesCount": 2}, ["Reshape", "Reshape", "Concatenate"]),
    (
        "STRIDED_SLICE",
        (IMAGE, integers(0, 1, -3, 0), integers(1, 8, 6, 4), integers(1, 2, 1, 1)),
        computed(1, 4, 3, 4),
        {"beginMask": 1, "endMask": 9},
        ["GetItem"],
    ),
    (
        "STRIDED_SLICE",
        (IMAGE, integers(0, 0, -1, 0), integers(1, 8, 0, 4), integers(1, 1, 1, -1)),
        computed(1, 8, 4),
        {"shrinkAxisMask": 4, "beginMask": 8, "endMask": 8},
        ["GetItem", "Reshape"],
    ),
    (
        "STRIDED_SLICE",
        (IMAGE, integers(0, 0, 1), integers(0, 0, 3), integers(1, 1, 1)),
        computed(1, 8, 6, 1, 2),
        {"ellipsisMask": 1, "newAxisMask": 2},
        ["GetItem", "Reshape"],
    ),
    ("REVERSE_V2", (IMAGE, integers(2, 3)), IMAGE, {}, ["GetItem"]),
    ("SLICE", (IMAGE, integers(0, 2, 0, 1), integers(1, 3, -1, 2)), computed(1, 3, 6, 2), {}, ["GetItem"]),
    ("GATHER", (IMAGE, integers(2, 0, 2)), computed(1, 8, 6, 3), {"axis": 3}, ["Take"]),
    ("PAD", (IMAGE, PADS), computed(1, 11, 9, 4), {}, ["ZeroPadding2D"]),
    ("PAD", (ROWS, Tensor((3, 2), "INT32", [[0, 0], [0, 0], [1, 2]], ())), computed(1, 5, 9), {}, ["Pad"]),
    ("PADV2", (IMAGE, PADS, Tensor((), "FLOAT32", -2.5)), computed(1, 11, 9, 4), {}, ["Pad"]),
    *(("MIRROR_PAD", (IMAGE, PADS), computed(1, 11, 9, 4), {"mode": mode}, ["Pad"]) for mode in (0, 1)),
    ("RESIZE_BILINEAR", (IMAGE, integers(11, 12)), computed(1, 11, 12, 4), {"halfPixelCenters": True}, ["Resize"]),
    ("RESIZE_NEAREST_NEIGHBOR", (IMAGE, integers(16, 18)), computed(1, 16, 18, 4), {}, ["UpSampling2D"]),
    (
        "RESIZE_NEAREST_NEIGHBOR",
        (IMAGE, integers(11, 9)),
        computed(1, 11, 9, 4),
        {"halfPixelCenters": True},
        ["Resize"],
    ),
    ("SPACE_TO_DEPTH", (IMAGE,), computed(1, 4, 3, 16), {"blockSize": 2}, ["SpaceToDepth"]),
    ("DEPTH_TO_SPACE", (IMAGE,), computed(1, 16, 12, 1), {"blockSize": 2}, ["DepthToSpace"]),
    ("MEAN", (IMAGE, integers(1, 2)), computed(1, 4), {}, ["GlobalAveragePooling2D"]),
    ("MEAN", (IMAGE, integers(2, 1)), computed(1, 1, 1, 4), {"keepDims": True}, ["GlobalAveragePooling2D"]),
    ("MEAN", (ROWS, integers(1)), computed(1, 6), {}, ["GlobalAveragePooling1D"]),
    ("MEAN", (IMAGE, integers(-1)), computed(1, 8, 6), {}, ["Mean", "Reshape"]),
    ("REDUCE_MAX", (IMAGE, integers(1, 2)), computed(1, 4), {}, ["GlobalMaxPooling2D"]),
    ("SUM", (IMAGE, integers(0, 3)), computed(8, 6), {}, ["Reshape", "Sum", "Reshape"]),
    ("REDUCE_MIN", (ROWS, integers(2)), computed(1, 5, 1), {"keepDims": True}, ["Min"]),
    ("REDUCE_PROD", (ROWS, integers(2)), computed(1, 5, 1), {"keepDims": True}, ["Prod"]),
    ("TILE", (ROWS, integers(1, 2, 3)), computed(1, 10, 18), {}, ["Tile"]),
    ("BROADCAST_TO", (computed(1, 5, 1), integers(1, 5, 6)), ROWS, {}, ["Tile"]),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{'-'.join(case[4])}")
def test_an_operator_becomes_layers_that_compute_the_same(keras: Any, tmp_path: Path, case: Case) -> None:
    name, inputs, output, options, expected = case
    version = 2 if name == "BROADCAST_TO" else 1
    _, model, difference = imported(one(name, inputs, output, version, **options), tmp_path)
    assert difference < EXACT
    assert kinds(model) == expected


@pytest.mark.parametrize(
    ("name", "inputs", "sizes", "axis", "shape"),
    [
        ("SPLIT", [integers(3), IMAGE], None, 3, (1, 8, 6, 2)),
        ("SPLIT_V", [IMAGE, integers(3, -1), integers(1)], (3, 5), 1, (1, 0, 6, 4)),
        ("UNPACK", [ROWS], None, 1, (1, 6)),
    ],
)
def test_an_operator_with_several_outputs(
    keras: Any, tmp_path: Path, name: str, inputs: list[Tensor], sizes: Any, axis: int, shape: tuple[int, ...]
) -> None:
    count = 5 if name == "UNPACK" else 2
    shapes = [tuple(size if side == axis else s for side, s in enumerate(shape)) for size in sizes or ()]
    parts = {f"part{at}": computed(*(shapes[at] if shapes else shape)) for at in range(count)}
    tensors = {f"in{at}": tensor for at, tensor in enumerate(inputs)} | parts
    input_names = [name for name, tensor in tensors.items() if name.startswith("in") and tensor.data is None]
    options = {"numSplits": 2} if name.startswith("SPLIT") else {"num": 5, "axis": 1}
    parsed = read(
        tensors, [Op(name, [n for n in tensors if n[:2] == "in"], [*parts], 1, options)], input_names, [*parts]
    )
    _, model, difference = imported(parsed, tmp_path)
    assert difference < EXACT
    assert len(model.outputs) == count


@pytest.mark.parametrize("comparison", COMPARISONS)
@pytest.mark.parametrize("joined", ["LOGICAL_AND", "LOGICAL_OR"])
def test_a_choice_between_two_tensors(keras: Any, tmp_path: Path, comparison: str, joined: str) -> None:
    """As in `tf.math.divide_no_nan`: values of one tensor where a condition is true, and of another elsewhere."""
    condition = Tensor((1, 5, 6), "BOOL", None, ())
    tensors = {
        "x": ROWS,
        "limit": Tensor((), "FLOAT32", 0.5),
        "above": condition,
        "other": condition,
        "both": condition,
        "zero": Tensor((), "FLOAT32", 0.0),
        "out": ROWS,
    }
    ops = [
        Op(comparison, ["x", "limit"], ["above"], 1, {}),
        Op("LOGICAL_NOT", ["above"], ["other"], 1, {}),
        Op(joined, ["above", "other"], ["both"], 1, {}),
        Op("SELECT_V2", ["both" if joined == "LOGICAL_OR" else "above", "x", "zero"], ["out"], 1, {}),
    ]
    _, model, difference = imported(read(tensors, ops, ["x"], ["out"]), tmp_path)
    assert difference < EXACT
    assert "Where" in kinds(model)


@pytest.mark.parametrize("other", [-np.inf, -1e9, 0.0])
def test_a_selection_by_a_constant_is_a_sum(other: float, tmp_path: Path) -> None:
    chosen = np.random.default_rng(1).random((1, 5, 6)) < 0.7
    chosen[..., 0] = True
    tensors = {
        "x": ROWS,
        "chosen": Tensor((1, 5, 6), "BOOL", chosen),
        "other": Tensor((), "FLOAT32", other),
        "masked": ROWS,
        "out": ROWS,
    }
    ops = [
        Op("SELECT_V2", ["chosen", "x", "other"], ["masked"], 1, {}),
        Op("SOFTMAX", ["masked"], ["out"], 1, {"beta": 1.0}),
    ]
    _, model, difference = imported(read(tensors, ops, ["x"], ["out"]), tmp_path)
    assert difference < EXACT
    assert "Where" not in kinds(model)


def test_a_condition_cannot_be_the_output(tmp_path: Path) -> None:
    condition = Tensor((1, 5, 6), "BOOL", None, ())
    path = tmp_path / "model.tflite"
    path.write_bytes(graph.serialize(one("GREATER", (ROWS, constant(1, 5, 6)), condition)))
    with pytest.raises(ModelError, match="its output 'out' is BOOL; allowed: FLOAT32"):
        tflite_file.load(tflite_file.read(path))


def test_every_rule_has_a_case() -> None:
    tried = {case[0] for case in CASES} | {"SPLIT", "SPLIT_V", "UNPACK", *COMPARISONS}
    tried |= {"LOGICAL_AND", "LOGICAL_OR", "LOGICAL_NOT", "SELECT", "SELECT_V2"}
    assert set(RULES) - tried == {"SQUEEZE"}  # the same rule as RESHAPE and EXPAND_DIMS


@pytest.mark.parametrize(
    ("name", "inputs", "output", "options", "why"),
    [
        ("CONV_2D", (IMAGE, computed(1, 3, 3, 4)), computed(1, 8, 6, 1), CONV, "its input 1, 'in1', is computed"),
        ("CONV_2D", (IMAGE, constant(5, 3, 3, 3)), computed(1, 8, 6, 5), CONV, "weights [5, 3, 3, 3] do not fit 4 ch"),
        (
            "CONV_2D",
            (IMAGE, constant(5, 3, 3, 4)),
            computed(1, 7, 6, 5),
            CONV,
            "it computes [1, 8, 6, 5], but the file",
        ),
        (
            "CONV_2D",
            (IMAGE, constant(5, 3, 3, 4)),
            computed(1, 4, 3, 5),
            dict.fromkeys(CONV, 2),
            "it has both strides [2, 2] and dilation [2, 2]",
        ),
        ("FULLY_CONNECTED", (ROWS, constant(3, 7)), computed(1, 3), {}, "weights [3, 7] do not fit [1, 5, 6]"),
        ("ADD", (IMAGE, computed(1, 5)), IMAGE, {}, "[1, 8, 6, 4] and [1, 5] do not fit each other"),
        ("TRANSPOSE", (ROWS, integers(0, 1, 1)), ROWS, {}, "[0, 1, 1] is not a permutation of the axes of [1, 5, 6]"),
        ("RESIZE_BILINEAR", (IMAGE, integers(9, 9)), computed(1, 9, 9, 4), {"alignCorners": True}, "Keras samples at"),
        (
            "STRIDED_SLICE",
            (ROWS, integers(0), integers(1), integers(0)),
            ROWS,
            {},
            "it slices 1 dimensions of [1, 5, 6]",
        ),
        ("ATAN2", (ROWS, ROWS), ROWS, {}, "Keras has no layer for it"),
        ("ARG_MAX", (ROWS, integers(2)), Tensor((1, 5), "INT32", None, ()), {}, "Keras has no layer for it"),
    ],
)
def test_what_has_no_counterpart_says_why(
    tmp_path: Path, name: str, inputs: Any, output: Tensor, options: dict[str, Any], why: str
) -> None:
    path = tmp_path / "model.tflite"
    path.write_bytes(graph.serialize(one(name, inputs, output, **options)))
    (problem,) = tflite_file.read(path).problems
    assert str(problem).startswith(f"{name} 'operator 0, out': {why}")
    with pytest.raises(ModelError, match="1 operator cannot be converted to Keras layers"):
        tflite_file.load(tflite_file.read(path))
