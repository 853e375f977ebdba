"""ONNX files as programs other than today's PyTorch write them: older opsets, other forms of the same operations."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from one_node import EXACT, Model, constant, floats, imported, node, number, whole
from onnx import TensorProto, helper

from compress.core.errors import ModelError
from compress.model.importers.onnx import onnx_file, onnx_model

pytestmark = [
    pytest.mark.tensorflow,
    pytest.mark.usefixtures("onnx_at_once"),
]
Saved = Callable[[Model], Path]
IMAGE = ("N", 4, 8, 8)
CONV = node("Conv", ["x", floats(6, 4, 3, 3), floats(6)], ["c"], pads=[1] * 4)


def relu_of(name: str) -> Any:
    """Return a graph inside an operator, which takes a tensor of the outer graph."""
    output = helper.make_tensor_value_info("r", TensorProto.FLOAT, (1, 6, 8, 8))
    return helper.make_graph([helper.make_node("Relu", [name], ["r"])], "branch", [], [output])


def kinds(path: Path) -> list[str]:
    """Import a file, and check its outputs; return the kinds of its layers."""
    return imported(path)[2]


# --- opsets 7 to 12: values that are computed when the file is read --------------------------

FLAT = [
    node("Shape", ["c"], ["shape"]),
    node("Gather", ["shape", constant(np.array(0))], ["batch"], axis=0),
    node("Unsqueeze", ["batch"], ["first"], axes=[0]),
    node("Concat", ["first", whole(-1)], ["to"], axis=0),
    node("Reshape", ["c", "to"], ["flat"]),
    node("Gemm", ["flat", floats(384, 3), floats(3)], ["y"]),
]
SIDES = [
    node("Shape", ["c"], ["shape"]),
    *(node("Gather", ["shape", constant(np.array(2 + side))], [f"side{side}"]) for side in (0, 1)),
    *(node("Unsqueeze", [f"side{side}"], [f"s{side}"], axes=[0]) for side in (0, 1)),
]
HEAD = [
    *SIDES,
    node("Concat", [whole(1, 2, 3), "s0", "s1"], ["to"], axis=0),
    node("Reshape", ["c", "to"], ["cells"]),
    node("Transpose", ["cells"], ["y"], perm=[0, 1, 3, 4, 2]),
]
GROW = [
    *SIDES,
    node("Concat", ["s0", "s1"], ["sides"], axis=0),
    node("Cast", ["sides"], ["is"], to=1),
    node("Mul", ["is", constant(np.array([2, 2], np.float32))], ["twice"]),
    node("Div", ["twice", "is"], ["times"]),
    node("Concat", [constant(np.ones(2, np.float32)), "times"], ["scales"], axis=0),
    node("Upsample", ["c", "scales"], ["y"]),
]
FOLDED: dict[str, tuple[int, list[Any], list[str]]] = {
    **{f"flatten {opset}": (opset, FLAT, ["Conv2D", "Flatten", "Dense"]) for opset in (7, 9, 11, 12)},
    "head of YOLO 11": (11, HEAD, ["Conv2D", "Reshape", "Permute", "Reshape"]),
    "upsample by what is computed 9": (9, GROW, ["Conv2D", "UpSampling2D"]),
    "a bias with more sides 11": (
        11,
        [node("Unsqueeze", [floats(6)], ["b"], axes=[0, 2, 3]), node("Add", ["c", "b"], ["y"])],
        ["Conv2D"],
    ),
    "a clipped scale 9": (
        9,
        [node("Clip", [floats(6, 1, 1)], ["k"], min=0.1, max=0.9), node("Mul", ["c", "k"], ["y"])],
        ["Conv2D"],
    ),
}


@pytest.mark.parametrize("name", FOLDED)
def test_what_hangs_on_no_input_is_computed_as_its_opset_says(name: str, saved_onnx: Saved) -> None:
    opset, nodes, layers = FOLDED[name]
    assert kinds(saved_onnx(Model([CONV, *nodes], {"x": IMAGE}, ["y"], opset))) == layers


# --- integer inputs, as in the zoo of TensorFlow's detectors ----------------------------------


WHOLE = {"UINT8": TensorProto.UINT8, "INT32": TensorProto.INT32, "INT64": TensorProto.INT64, "BOOL": TensorProto.BOOL}
TURNED = [
    node("Cast", ["x"], ["f"], to=TensorProto.FLOAT),
    node("Transpose", ["f"], ["t"], perm=[0, 3, 1, 2]),
    node("Conv", ["t", floats(6, 4, 3, 3)], ["y"]),
]


@pytest.mark.parametrize("kind", WHOLE)
def test_an_input_of_whole_numbers_is_compared_on_such(kind: str, saved_onnx: Saved) -> None:
    path = saved_onnx(Model(TURNED, {"x": ("b", 8, 8, 4)}, ["y"], 10, {"x": WHOLE[kind]}))
    assert kinds(path) in (["Conv2D"], ["Cast", "Conv2D"])
    file = onnx_file.read(path)
    assert f"its input 'x' is {kind}; the Keras model takes it as floats" in file.notes
    samples = np.random.default_rng(0).uniform(-3, 300, (2, 8, 8, 4)).astype(np.float32)
    assert onnx_file.load(file, samples)[1].max_rel < EXACT  # rounded, and clipped to the range of the type


@pytest.mark.parametrize("side", [-1, 0])
def test_a_batch_may_be_stored_as_a_number_that_is_none(side: int, saved_onnx: Saved) -> None:
    path = saved_onnx(Model([CONV], {"x": (side, 4, 8, 8)}, ["c"], 11))
    assert kinds(path) == ["Conv2D"]
    assert onnx_file.read(path).notes[0] == "its open batch dimension is set to 1"


def test_what_no_output_hangs_on_is_left_out(saved_onnx: Saved) -> None:
    branch = relu_of("kept")
    dead = [
        node("Identity", ["c"], ["kept"]),
        node("Einsum", ["kept"], ["e"], equation="bchw->bhwc"),
        node("TopK", ["e", "one"], ["largest", "places"]),
        node("If", [constant(np.array(True))], ["either"], then_branch=branch, else_branch=branch),
    ]
    path = saved_onnx(Model([CONV, *dead, node("Relu", ["c"], ["y"])], {"x": IMAGE}, ["y"]))
    assert kinds(path) == ["Conv2D", "Activation"]


def test_what_an_inner_graph_takes_is_kept(saved_onnx: Saved) -> None:
    branch = relu_of("kept")
    nodes = [
        CONV,
        node("Identity", ["c"], ["kept"]),
        node("If", [constant(np.array(True))], ["y"], then_branch=branch, else_branch=branch),
    ]
    model, _ = onnx_model.read(saved_onnx(Model(nodes, {"x": IMAGE}, ["y"])))
    assert [node_proto.op_type for node_proto in model.graph.node] == ["Conv", "Identity", "If"]


def test_a_file_whose_operators_make_none_of_its_outputs(saved_onnx: Saved) -> None:
    with pytest.raises(ModelError, match="no operator computes any of its outputs"):
        onnx_file.read(saved_onnx(Model([CONV], {"x": (1, 4, 8, 8)}, ["x"])))


# --- dynamic dimensions -----------------------------------------------------------------------


OPEN = {"a b": ("N", 4, "height", "width"), "x": ("N", 4, "h", 8)}
BOTH = Model([node("Add", ["a b", "x"], ["s"]), node("Conv", ["s", floats(6, 4, 3, 3)], ["y"])], OPEN, ["y"], 11)


def test_open_sides_are_refused_with_the_command_that_fixes_them(saved_onnx: Saved) -> None:
    path = saved_onnx(BOTH)
    with pytest.raises(ModelError) as caught:
        onnx_file.read(path)
    assert "its input 'a b' has open dimensions: [1, 4, 'height', 'width']" in caught.value.what
    assert "its input 'x' has open dimensions: [1, 4, 'h', 8]" in caught.value.what
    command = f"python -m compress import {path} --shape 'a b=1,4,320,320' --shape x=1,4,320,8"
    assert caught.value.hint.endswith(command)


def test_open_sides_can_be_given(saved_onnx: Saved) -> None:
    file = onnx_file.read(saved_onnx(BOTH), {"a b": [1, 4, 6, 8], "x": [1, 4, 6, 8]})
    model, parity = onnx_file.load(file)
    assert parity.max_rel < EXACT
    assert [tensor.shape for tensor in model.inputs] == [(None, 6, 8, 4)] * 2
    assert "its input 'x' has the requested shape [1, 4, 6, 8]" in file.notes


@pytest.mark.parametrize(
    ("name", "sides", "says"),
    [
        ("y", [1], "it has no input 'y'; allowed: a b, x"),
        ("x", [1, 3, 6, 8], r"its input 'x' cannot have the shape \[1, 3, 6, 8\]; allowed: \['N', 4, 'h', 8\]"),
        ("x", [1, 4, 6], "its input 'x' cannot have the shape"),
        ("x", [2**30, 4, 2**30, 8], "has the shape"),
    ],
)
def test_a_shape_that_is_not_that_of_the_file(name: str, sides: list[int], says: str, saved_onnx: Saved) -> None:
    with pytest.raises(ModelError, match=says):
        onnx_file.read(saved_onnx(BOTH), {"a b": [1, 4, 6, 8], "x": [1, 4, 6, 8], name: sides})


# --- all refused operators are listed at once -------------------------------------------------


def test_what_has_no_rule_is_listed_with_what_is_refused_for_what_it_is(saved_onnx: Saved) -> None:
    branch = relu_of("c")
    nodes = [
        CONV,
        node("Einsum", ["c"], ["e"], equation="bchw->bhwc"),
        node("Range", [constant(np.array(argument)) for argument in (1, 2, 1)], ["one"]),
        node("If", [constant(np.array(True))], ["i"], then_branch=branch, else_branch=branch),
        node("TopK", ["e", "one"], ["largest", "places"]),
        node("Add", ["i", "largest"], ["y"]),
    ]
    listed = [("e", "Einsum"), ("i", "If"), ("largest", "TopK")]
    without_if = [*nodes[:3], nodes[4], node("Relu", ["largest"], ["y"])]
    shape = ("N", 4, "h", "w")
    for kept, sides, expected in (nodes, IMAGE, listed), (nodes, shape, listed), (without_if, shape, listed[::2]):
        file = onnx_file.read(saved_onnx(Model(kept, {"x": sides}, ["y"])))
        assert [(problem.node, problem.operator) for problem in file.problems] == expected


# --- files that onnx's checker refuses and onnxruntime accepts --------------------------------


CHANGES: dict[str, Callable[[Any], None]] = {
    "no shape": lambda proto: proto.graph.output[0].type.tensor_type.ClearField("shape"),
    "no type": lambda proto: proto.graph.output[0].ClearField("type"),
    "old": lambda proto: setattr(proto, "ir_version", 3),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("batch", [1, 4])
def test_what_only_the_checker_minds(change: str, batch: int, tmp_path: Path) -> None:
    proto = Model([CONV], {"x": (batch, 4, 8, 8)}, ["c"], 9).proto()
    CHANGES[change](proto)
    (tmp_path / "model.onnx").write_bytes(proto.SerializeToString())
    assert kinds(tmp_path / "model.onnx") == ["Conv2D"]
    notes = onnx_file.read(tmp_path / "model.onnx").notes
    assert ("its batch of 4 is set to 1" in notes) == (batch == 4)


# --- other forms of the same operations -------------------------------------------------------

PLUS = [node("Add", ["c", number(3)], ["p"]), node("Clip", ["p"], ["k"], min=0.0, max=6.0)]
GROUPS = [
    node("Reshape", ["c", whole(0, 3, -1)], ["g"]),
    node("InstanceNormalization", ["g", floats(3, low=0.5), floats(3)], ["n"]),
    node("Reshape", ["n", whole(1, 6, 8, 8)], ["o"]),
]
PIECES: dict[str, tuple[int, list[Any], list[str]]] = {
    "hard SiLU: a product, divided": (
        9,
        [*PLUS, node("Mul", ["c", "k"], ["m"]), node("Div", ["m", number(6)], ["y"])],
        ["Conv2D", "Activation"],
    ),
    "hard SiLU: a quotient, multiplied": (
        9,
        [*PLUS, node("Div", ["k", number(6)], ["m"]), node("Mul", ["m", "c"], ["y"])],
        ["Conv2D", "Activation"],
    ),
    "hard SiLU: by a sixth": (
        9,
        [*PLUS, node("Mul", ["k", number(1 / 6)], ["m"]), node("Mul", ["c", "m"], ["y"])],
        ["Conv2D", "Activation"],
    ),
    "another product by a sixth": (
        9,
        [*PLUS, node("Relu", ["c"], ["r"]), node("Mul", ["r", "k"], ["m"]), node("Div", ["m", number(6)], ["y"])],
        ["Conv2D", "Add", "Activation", "Activation", "Multiply", "Divide"],
    ),
    "a square by a sixth": (
        9,
        [*PLUS, node("Mul", ["k", "k"], ["m"]), node("Div", ["m", number(6)], ["d"]), node("Add", ["d", "c"], ["y"])],
        ["Conv2D", "Add", "Activation", "Multiply", "Divide", "Add"],
    ),
    "hard sigmoid": (
        9,
        [
            node("Relu", ["c"], ["r"]),
            node("Add", ["r", number(3)], ["p"]),
            node("Clip", ["p"], ["k"], min=0.0, max=6.0),
            node("Div", ["k", number(6)], ["y"]),
        ],
        ["Conv2D", "Activation", "Activation"],
    ),
    "squeeze and excite": (
        11,
        [
            node("GlobalAveragePool", ["c"], ["g"]),
            node("Conv", ["g", floats(6, 6, 1, 1)], ["h"]),
            node("Add", ["h", number(3)], ["p"]),
            node("Clip", ["p", number(0), number(6)], ["k"]),
            node("Div", ["k", number(6)], ["d"]),
            node("Mul", ["c", "d"], ["y"]),
        ],
        ["Conv2D", "GlobalAveragePooling2D", "Conv2D", "Activation", "Multiply"],
    ),
    "a class token": (
        13,
        [
            node("Reshape", ["c", whole(0, 6, 64)], ["t0"]),
            node("Transpose", ["t0"], ["t"], perm=[0, 2, 1]),
            node("Concat", [floats(1, 1, 6), "t"], ["u"], axis=1),
            node("MatMul", ["u", floats(6, 3)], ["y"]),
        ],
        ["Conv2D", "Reshape", "Pad", "Add", "Dense"],
    ),
    "constants on all sides": (
        13,
        [node("Concat", [floats(1, 2, 8, 8), "c", floats(1, 1, 8, 8), floats(1, 3, 8, 8), "x"], ["y"], axis=1)],
        ["Conv2D", "Pad", "Add", "Concatenate"],
    ),
    "a constant behind": (13, [node("Concat", ["c", floats(1, 6, 1, 8)], ["y"], axis=-2)], ["Conv2D", "Pad", "Add"]),
    "groups that are normalized": (
        11,
        [*GROUPS, node("Conv", ["o", floats(3, 6, 3, 3)], ["y"])],
        ["Conv2D", "GroupNormalization", "Conv2D"],
    ),
    "groups that are normalized, scaled, shifted": (
        11,
        [
            *GROUPS,
            node("Mul", ["o", floats(6, 1, 1)], ["m"]),
            node("Add", ["m", floats(1, 6, 1, 1)], ["a"]),
            node("Relu", ["a"], ["y"]),
        ],
        ["Conv2D", "GroupNormalization", "Activation"],
    ),
    "groups of a normalization 21": (
        21,
        [
            node("Reshape", ["c", whole(0, 3, -1)], ["g"]),
            node("GroupNormalization", ["g", floats(3, low=0.5), floats(3)], ["n"], num_groups=1),
            node("Reshape", ["n", whole(1, 6, 8, 8)], ["y"]),
        ],
        ["Conv2D", "GroupNormalization"],
    ),
    "rows that are normalized": (
        11,
        [
            node("Transpose", ["c"], ["t"], perm=[0, 2, 1, 3]),
            node("Reshape", ["t", whole(0, 4, -1)], ["g"]),
            node("InstanceNormalization", ["g", floats(4, low=0.5), floats(4)], ["y"]),
        ],
        ["Conv2D", "Reshape", "Permute", "Reshape", "GroupNormalization"],
    ),
    "a mask, cast to what it is": (
        11,
        [
            node("Greater", ["c", number(0.25)], ["g"]),
            node("Cast", ["g"], ["b"], to=TensorProto.BOOL),
            node("Where", ["b", number(-2), "c"], ["y"]),
        ],
        ["Conv2D", "Greater", "Where"],
    ),
    "a mask of what is not 0": (
        11,
        [
            node("Relu", ["c"], ["r"]),
            node("Cast", ["r"], ["b"], to=TensorProto.BOOL),
            node("Where", ["b", number(-2), "c"], ["y"]),
        ],
        ["Conv2D", "Activation", "NotEqual", "Where"],
    ),
}


@pytest.mark.parametrize("name", PIECES)
def test_other_ways_to_say_the_same(name: str, saved_onnx: Saved) -> None:
    opset, nodes, layers = PIECES[name]
    assert sorted(kinds(saved_onnx(Model([CONV, *nodes], {"x": IMAGE}, ["y"], opset)))) == sorted(layers)


def test_a_class_token_is_that_of_every_sample(saved_onnx: Saved) -> None:
    nodes = [node("Concat", [floats(1, 1, 6), "x"], ["y"], axis=1)]
    model, _ = onnx_file.load(onnx_file.read(saved_onnx(Model(nodes, {"x": ("N", 5, 6)}, ["y"]))))
    outputs = np.asarray(model(np.random.default_rng(0).random((3, 5, 6), np.float32)))
    np.testing.assert_array_equal(outputs[:, 0], np.repeat(floats(1, 1, 6).numbers[0], 3, 0))


def test_what_comes_behind_something_refused_is_not_blamed(saved_onnx: Saved) -> None:
    """The response normalization of PyTorch 2: a pooling with three spatial dimensions, then MUL and DIV."""
    nodes = [
        node("Unsqueeze", ["x", whole(1)], ["u"]),
        node("AveragePool", ["u"], ["a"], kernel_shape=[3, 1, 1], pads=[1, 0, 0, 1, 0, 0]),
        node("Squeeze", ["a", whole(1)], ["s"]),
        node("Mul", ["s", number(0.5)], ["m"]),
        node("Mul", ["m", "s"], ["n"]),
        node("Div", ["n", "s"], ["d"]),
        node("MaxPool", ["d"], ["y"], kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 0, 0]),
    ]
    file = onnx_file.read(saved_onnx(Model(nodes, {"x": IMAGE}, ["y"], 18)))
    assert (file.problems[0].node, file.problems[0].reason) == ("a", "its input has 5 dimensions; 3 or 4 are supported")
    assert not [problem for problem in file.problems if "?" in problem.reason]


# --- rows of tables, integer outputs ----------------------------------------------------------


@pytest.mark.parametrize("kind", ["INT32", "INT64"])
def test_rows_of_a_table_are_an_embedding(kind: str, saved_onnx: Saved) -> None:
    nodes = [
        node("Cast", ["x"], ["c"], to=TensorProto.INT64),
        node("Gather", [floats(5, 3), "c"], ["words"]),
        node("Gather", [floats(2, 3), "kind"], ["kinds"]),
        node("Add", ["words", "kinds"], ["sum"]),
        node("ReduceMean", ["sum"], ["y"], axes=[1], keepdims=0),
    ]
    input_shapes = {"x": ("N", 4), "kind": ("N", 4)}
    path = saved_onnx(Model(nodes, input_shapes, ["y"], 13, dict.fromkeys(input_shapes, WHOLE[kind])))
    assert sorted(kinds(path)) == ["Add", "Embedding", "Embedding", "Flatten", "Mean"]
    model, _ = onnx_file.load(onnx_file.read(path))
    assert model.count_params() == 21
    samples = np.random.default_rng(0).integers(0, 2, (2, 3, 4))
    expected = (floats(5, 3).numbers[samples[0]] + floats(2, 3).numbers[samples[1]]).mean(1)
    np.testing.assert_allclose(model(list(samples.astype(np.float32))), expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("tested_node", "reason"),
    [
        (node("Gather", [floats(5, 3), "x"], ["y"], axis=1), "it indexes a constant"),
        (node("ArgMax", ["f"], ["y"], select_last_index=1), "select_last_index is not supported"),
    ],
)
def test_what_is_neither_an_embedding_nor_the_largest(tested_node: Any, reason: str, saved_onnx: Saved) -> None:
    nodes = [node("Cast", ["x"], ["f"], to=1), tested_node]
    nodes = nodes[tested_node[0].op_type == "Gather" :]
    (problem,) = onnx_file.read(saved_onnx(Model(nodes, {"x": (1, 4)}, ["y"], 13, {"x": WHOLE["INT64"]}))).problems
    assert reason in problem.reason


def test_places_of_the_largest_are_for_the_end(saved_onnx: Saved) -> None:
    nodes = [CONV, node("ArgMax", ["c"], ["a"], axis=1), node("Cast", ["a"], ["y"], to=1)]
    (problem,) = onnx_file.read(saved_onnx(Model(nodes, {"x": IMAGE}, ["y"]))).problems
    assert "only a model output may be integers" in problem.reason
