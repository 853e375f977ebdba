"""ONNX files as Keras models: the files of exporters, refused operators, and malicious files."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from one_node import EXACT, Model, constant, floats, imported, node, number, whole
from onnx import TensorProto, helper, numpy_helper

from compress.core.errors import ModelError
from compress.model.importers.common import verification
from compress.model.importers.common.unsupported import Refused
from compress.model.importers.onnx import network_builder, onnx_file
from compress.model.importers.onnx.ops import rules
from compress.model.ir import channel_groups, keras_graph

pytestmark = [
    pytest.mark.tensorflow,
    pytest.mark.usefixtures("onnx_at_once"),
]
Saved = Callable[[Model], Path]
IMAGE = ("N", 4, 8, 8)


NOTHING = helper.make_graph([], "nothing", [], [])
CONV = node("Conv", ["x", floats(6, 4, 3, 3), floats(6)], ["c"], pads=[1] * 4)
ERF = [node("Div", ["c", number(2**0.5)], ["e1"]), node("Erf", ["e1"], ["e2"]), node("Add", ["e2", number(1)], ["e3"])]
SHUFFLE = [
    node("Reshape", ["c", whole(1, 2, 3, 8, 8)], ["s1"]),
    node("Transpose", ["s1"], ["s2"], perm=[0, 2, 1, 3, 4]),
    node("Reshape", ["s2", whole(1, 6, 8, 8)], ["s3"]),
    node("Conv", ["s3", floats(3, 6, 1, 1)], ["y"]),
]
HEADS = [
    node("Transpose", ["c"], ["t"], perm=[0, 2, 3, 1]),
    node("Reshape", ["t", whole(1, -1, 2)], ["h1"]),
    node("Transpose", ["x"], ["u"], perm=[0, 2, 3, 1]),
    node("Reshape", ["u", whole(1, -1, 2)], ["h2"]),
    node("Concat", ["h1", "h2"], ["h"], axis=1),
    node("Softmax", ["h"], ["y"], axis=2),
]
FOCUS = [
    *(
        node("Slice", ["x", whole(a, b), whole(2**31, 2**31), whole(2, 3), whole(2, 2)], [f"f{a}{b}"])
        for a in (0, 1)
        for b in (0, 1)
    ),
    node("Concat", ["f00", "f10", "f01", "f11"], ["f"], axis=1),
    node("Conv", ["f", floats(3, 16, 1, 1)], ["y"]),
]
SCALED = [
    node("Mul", ["c", floats(6, 1, 1)], ["m"]),
    node("Add", ["m", floats(1, 6, 1, 1)], ["a"]),
    node("Sub", ["a", number(0.5)], ["s"]),
    node("Relu", ["s"], ["y"]),
]
TURNED = [
    node("Transpose", ["x"], ["t"], perm=[0, 3, 1, 2]),
    node("Conv", ["t", floats(6, 4, 3, 3)], ["c"]),
    node("Relu", ["c"], ["r"]),
    node("Transpose", ["r"], ["y"], perm=[0, 2, 3, 1]),
]
ROWS = [
    node("Flatten", ["c"], ["f"], axis=1),
    node("Mul", ["f", floats(384)], ["m"]),
    node("Relu", ["m"], ["r"]),
    node("Gemm", ["r", floats(3, 384), floats(3)], ["y"], transB=1),
]
ATTENTION = [
    node("Flatten", ["c"], ["f"], axis=2),
    node("Reshape", ["c", whole(1, 6, 64)], ["f6"]),
    node("Transpose", ["f6"], ["tokens"], perm=[0, 2, 1]),
    node("LayerNormalization", ["tokens", floats(6), floats(6)], ["n"]),
    *(node("MatMul", ["n", floats(6, 6 + add)], [name]) for add, name in ((0, "q0"), (0, "k0"), (0, "v0"))),
    *(node("Reshape", [f"{name}0", whole(1, 64, 2, 3)], [f"{name}1"]) for name in "qkv"),
    *(node("Transpose", [f"{name}1"], [name], perm=[0, 2, 3, 1] if name == "k" else [0, 2, 1, 3]) for name in "qkv"),
    node("MatMul", ["q", "k"], ["a"]),
    node("Softmax", ["a"], ["s"], axis=-1),
    node("MatMul", ["s", "v"], ["o"]),
    node("Transpose", ["o"], ["o1"], perm=[0, 2, 1, 3]),
    node("Reshape", ["o1", whole(1, 64, 6)], ["o2"]),
    node("Add", ["o2", "tokens"], ["o3"]),
    node("ReduceMean", ["o3"], ["y"], axes=[1], keepdims=0),
]
PATTERNS: dict[str, tuple[list[Any], list[str] | None]] = {
    "flatten, product, dense": ([CONV, *ROWS], None),
    "GELU of PyTorch": (
        [CONV, *ERF, node("Mul", ["c", "e3"], ["e4"]), node("Mul", ["e4", number(0.5)], ["y"])],
        ["Conv2D", "Gelu"],
    ),
    "GELU of TensorFlow": (
        [CONV, *ERF, node("Mul", ["e3", number(0.5)], ["e4"]), node("Mul", ["c", "e4"], ["y"])],
        ["Conv2D", "Gelu"],
    ),
    "GELU halved first": (
        [CONV, *ERF, node("Mul", [number(0.5), "c"], ["e4"]), node("Mul", ["e4", "e3"], ["y"])],
        ["Conv2D", "Gelu"],
    ),
    "SiLU": ([CONV, node("Sigmoid", ["c"], ["s"]), node("Mul", ["c", "s"], ["y"])], ["Conv2D", "Activation"]),
    "hard SiLU": (
        [CONV, node("HardSigmoid", ["c"], ["s"], alpha=1 / 6), node("Mul", ["s", "c"], ["y"])],
        ["Conv2D", "Activation"],
    ),
    "channel shuffle": ([CONV, *SHUFFLE], ["Conv2D", "Reshape", "Permute", "Reshape", "Conv2D"]),
    "heads of a detector": ([CONV, *HEADS], ["Conv2D", "Reshape", "Reshape", "Concatenate", "Softmax"]),
    "focus of YOLO": (FOCUS, ["GetItem"] * 4 + ["Concatenate", "Conv2D"]),
    "a norm in pieces": ([CONV, *SCALED], ["Conv2D", "Activation"]),
    "zeros before": (
        [
            node("Pad", ["x", whole(0, 0, 0, 0, 0, 0, 1, 1)], ["p"]),
            node("Conv", ["p", floats(6, 4, 3, 3)], ["y"], strides=[2, 2]),
        ],
        ["Conv2D"],
    ),
    "attention": ([CONV, *ATTENTION], None),
}


@pytest.mark.parametrize("name", PATTERNS)
def test_what_exporters_write(name: str, saved_onnx: Saved) -> None:
    nodes, layers = PATTERNS[name]
    _, model, kinds = imported(saved_onnx(Model(nodes, {"x": IMAGE}, ["y"], 17)))
    assert sorted(kinds) == sorted(layers or kinds)
    assert model.inputs[0].shape == (None, 8, 8, 4)
    assert name in ("channel shuffle", "attention") or "Permute" not in kinds


def test_a_model_that_was_channel_last_before_stays_so(saved_onnx: Saved) -> None:
    file, model, kinds = imported(saved_onnx(Model(TURNED, {"x": ("N", 8, 7, 4)}, ["y"], 13)))
    assert kinds == ["Conv2D", "Activation"]
    assert (model.inputs[0].shape, model.outputs[0].shape) == ((None, 8, 7, 4), (None, 6, 5, 6))
    assert file.notes == ("its open batch dimension is set to 1",)


def test_weights_are_trainable_and_answers_do_not_hang_on_the_batch(saved_onnx: Saved) -> None:
    norm = node("BatchNormalization", ["c", *[floats(6, low=0.1)] * 4], ["n"])
    nodes = [CONV, norm, node("GlobalAveragePool", ["n"], ["g"]), node("Flatten", ["g"], ["f"])]
    path = saved_onnx(Model([*nodes, node("Gemm", ["f", floats(6, 3), floats(3)], ["y"])], {"x": IMAGE}, ["y"]))
    file, model, kinds = imported(path)
    assert kinds == ["Conv2D", "BatchNormalization", "GlobalAveragePooling2D", "Dense"]
    assert model.count_params() == sum(n.size for n in file.graph.constants.values() if n.dtype == np.float32)
    assert len(model.trainable_weights) == 6
    samples = np.random.default_rng(0).random((5, 8, 8, 4), np.float32)
    np.testing.assert_allclose(model(samples), np.concatenate([model(sample[None]) for sample in samples]), rtol=1e-5)
    assert channel_groups.find_groups(keras_graph.read(model)).unsupported == ()


def test_several_inputs_and_outputs_keep_their_names(saved_onnx: Saved) -> None:
    nodes = [
        node("Conv", ["left/image:0", floats(3, 4, 1, 1)], ["c"]),
        node("Add", ["c", "right.image"], ["sum"], name="/body/add/Add"),
        node("ReduceMax", ["sum"], ["top"], axes=[2, 3], keepdims=0),
    ]
    inputs = {"left/image:0": IMAGE, "right.image": ("N", 3, 8, 8), "unused": (1, 2)}
    file, model, _ = imported(saved_onnx(Model(nodes, inputs, ["top", "sum"])))
    assert [tensor.name for tensor in model.inputs] == ["image", "right_image"]
    assert [tuple(tensor.shape[1:]) for tensor in model.outputs] == [(3,), (8, 8, 3)]
    assert "body_add" in [layer.name for layer in model.layers] or "add" in [layer.name for layer in model.layers]
    assert "its input 'unused' is not used: it is removed" in file.notes
    assert "its output 'sum', [1, 3, 8, 8], is now channel-last: [1, 8, 8, 3]" in file.notes


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model_1/stem/conv/Conv2D:0", "stem_conv"),
        ("/features/features.0/features.0.0/Conv", "features.0.0"),
        ("Conv_12", "Conv_12"),
        ("a;b", "a"),
    ],
)
def test_names(name: str, expected: str) -> None:
    assert network_builder.title(name) == expected


@pytest.mark.parametrize(("kind", "name"), [(TensorProto.FLOAT16, "FLOAT16"), (TensorProto.DOUBLE, "DOUBLE")])
def test_other_floats_are_taken_as_float32(tmp_path: Path, kind: int, name: str) -> None:
    dtype = np.float16 if kind == TensorProto.FLOAT16 else np.float64
    graph = helper.make_graph(
        [helper.make_node("Cast", ["x"], ["h"], to=kind), helper.make_node("MatMul", ["h", "w"], ["y"])],
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 4])],
        [helper.make_tensor_value_info("y", kind, [1, 2])],
        [numpy_helper.from_array(np.ones((4, 2), dtype), "w")],
    )
    path = tmp_path / "model.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8), path)
    assert imported(path)[0].notes == (f"its {name} values are converted to float32 (1 stored tensors)",)


def test_a_first_dimension_that_becomes_channels_is_no_batch(saved_onnx: Saved) -> None:
    nodes = [node("Unsqueeze", ["x", whole(0)], ["u"]), node("Conv", ["u", floats(6, 4, 3, 3)], ["y"])]
    file, model, _ = imported(saved_onnx(Model(nodes, {"x": (4, 8, 8)}, ["y"])))
    assert "its input 'x', [4, 8, 8], now has a batch dimension in front: [1, 4, 8, 8]" in file.notes or model.inputs[
        0
    ].shape == (None, 8, 8, 4)


def test_functions_are_written_out_and_operators_brought_in_order(tmp_path: Path) -> None:
    twice = helper.make_function(
        "own", "Twice", ["a"], ["b"], [helper.make_node("Add", ["a", "a"], ["b"])], [helper.make_opsetid("", 17)]
    )
    nodes = [helper.make_node("Relu", ["h"], ["y"]), helper.make_node("Twice", ["x"], ["h"], domain="own")]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 4]) for name in ("x", "y")]
    graph = helper.make_graph(nodes, "graph", ends[:1], ends[1:])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("own", 1)]
    path = tmp_path / "model.onnx"
    onnx.save(helper.make_model(graph, opset_imports=opsets, functions=[twice], ir_version=8), path)
    assert imported(path)[2] == ["Add", "Activation"]


def test_everything_without_a_counterpart_is_listed_at_once(saved_onnx: Saved) -> None:
    nodes = [
        node("Einsum", ["x"], ["a"], equation="ij->ij"),
        node("Relu", ["a"], ["b"]),
        node("BatchNormalization", ["b", *[floats(4, low=0.1)] * 4], ["c", "m", "v"], training_mode=1),
        node("Hardmax", ["c"], ["y"]),
    ]
    file = onnx_file.read(saved_onnx(Model(nodes, {"x": (1, 4)}, ["y"])))
    assert file.problems == (
        Refused("a", "Einsum", "Keras has no layer for it"),
        Refused("c", "BatchNormalization", "it is in training mode; export the model for use (eval)"),
        Refused("y", "Hardmax", "Keras has no layer for it"),
    )
    with pytest.raises(ModelError, match="3 operators cannot be converted to Keras layers: Einsum 'a'"):
        onnx_file.load(file)


@pytest.mark.parametrize(
    ("tested_node", "reason"),
    [
        (node("FusedConv", ["x"], ["y"], domain="com.microsoft"), "it is a custom operator, of 'com.microsoft'"),
        (
            node("QuantizeLinear", ["x", number(0.1)], ["y"]),
            "the model is quantized already; use the original float model",
        ),
        (node("SequenceConstruct", ["x"], ["y"]), "it works on sequences of tensors"),
        (
            node("If", ["x"], ["y"], then_branch=NOTHING, else_branch=NOTHING),
            "it is control flow that depends on the data",
        ),
    ],
)
def test_what_is_refused_for_what_it_is(tested_node: Any, reason: str, saved_onnx: Saved) -> None:
    (problem,) = onnx_file.read(saved_onnx(Model([tested_node], {"x": ("N", "any")}, ["y"]))).problems
    assert (problem.node, problem.operator) == ("y", tested_node[0].op_type)
    assert problem.reason.startswith(reason)


def test_the_first_operator_that_differs_is_named(saved_onnx: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = dict(rules.RULES) | {"Relu": rules.RULES["Tanh"]}
    monkeypatch.setattr(onnx_file, "RULES", wrong)
    nodes = [CONV, node("Relu", ["c"], ["r"], name="the/relu"), node("Exp", ["r"], ["y"])]
    with pytest.raises(ModelError, match=r"differ by .*; first at Relu 'the/relu', by .*allowed: 0.0001"):
        onnx_file.load(onnx_file.read(saved_onnx(Model(nodes, {"x": IMAGE}, ["y"]))))


def test_real_samples_are_compared_too(saved_onnx: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = dict(rules.RULES) | {"Relu": rules.RULES["Identity"]}
    monkeypatch.setattr(onnx_file, "RULES", wrong)
    nodes = [node("Sub", ["x", number(-100)], ["s"]), node("Relu", ["s"], ["y"])]
    file = onnx_file.read(saved_onnx(Model(nodes, {"x": (1, 4)}, ["y"])))
    assert onnx_file.load(file)[1].max_rel < EXACT  # random samples stay above -100
    with pytest.raises(ModelError, match="outputs of the rebuilt Keras model differ"):
        onnx_file.load(file, np.full((2, 4), -200, np.float32))


def test_an_answer_that_hangs_on_the_last_bit_is_no_difference(
    saved_onnx: Saved, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The logarithm of the difference between a convolution and the sum of its two halves: it is only rounding."""
    kernel = np.random.default_rng(0).uniform(-1, 1, (6, 4, 3, 3)).astype(np.float32)
    nodes = [
        node("Conv", ["x", constant(kernel)], ["all"]),
        node("Split", ["x"], ["x1", "x2"], axis=1),
        node("Conv", ["x1", constant(kernel[:, :2])], ["one"]),
        node("Conv", ["x2", constant(kernel[:, 2:])], ["other"]),
        node("Add", ["one", "other"], ["both"]),
        node("Sub", ["all", "both"], ["rest"]),
        node("Mul", ["rest", "rest"], ["square"]),
        node("Add", ["square", number(1e-10)], ["more"]),
        node("Log", ["more"], ["y"]),
    ]
    file = onnx_file.read(saved_onnx(Model(nodes, {"x": IMAGE}, ["y"], 13)))
    assert verification.TOLERANCE < onnx_file.load(file)[1].max_rel < verification.MAXIMUM_TOLERANCE
    monkeypatch.setattr(verification, "SENSITIVITY_FACTOR", 0)
    with pytest.raises(ModelError, match="outputs of the rebuilt Keras model differ"):
        onnx_file.load(file)


def damaged(change: Callable[[Any], Any]) -> bytes:
    """Return a valid model after a change."""
    nodes = [CONV, node("Relu", ["c"], ["r"]), node("MaxPool", ["r"], ["y"], kernel_shape=[2, 2])]
    proto = Model(nodes, {"x": IMAGE}, ["y"]).proto()
    changed = change(proto)
    return changed if isinstance(changed, bytes) else bytes(proto.SerializeToString())


def attribute(number: int, name: str, value: Any) -> Callable[[Any], None]:
    def change(proto: Any) -> None:
        attributes = proto.graph.node[number].attribute
        for old_attribute in [candidate for candidate in attributes if candidate.name == name]:
            attributes.remove(old_attribute)
        attributes.append(helper.make_attribute(name, value))

    return change


def external(location: str, **more: str) -> Callable[[Any], None]:
    def change(proto: Any) -> None:
        tensor = proto.graph.initializer[0]
        tensor.ClearField("raw_data")
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in {"location": location, **more}.items():
            entry = tensor.external_data.add()
            entry.key, entry.value = key, value

    return change


def assigned(find: Callable[[Any], Any], name: str, value: Any) -> Callable[[Any], None]:
    return lambda proto: setattr(find(proto), name, value)


def height(proto: Any) -> Any:
    return proto.graph.input[0].type.tensor_type.shape.dim[2]


def opset(version: int) -> Callable[[Any], None]:
    return assigned(lambda proto: proto.opset_import[0], "version", version)


def circle(proto: Any) -> None:
    proto.graph.node[0].input[0] = "y"


def absurd(proto: Any) -> None:
    proto.graph.initializer[0].dims[0] = 2**40


def recursive(proto: Any) -> None:
    proto.functions.append(
        helper.make_function("own", "F", ["a"], ["b"], [helper.make_node("F", ["a"], ["b"], domain="own")], [])
    )


DAMAGE: dict[str, tuple[Callable[[Any], Any], str]] = {
    "cut off": (lambda proto: proto.SerializeToString()[:300], "it is truncated|it has no operators"),
    "text": (lambda proto: b"this is no model" * 9, "it is not an ONNX model"),
    "empty": (lambda proto: b"", "it is not an ONNX model"),
    "zip": (lambda proto: b"PK\x03\x04" + bytes(100), "it is not an ONNX model"),
    "opset 6": (opset(6), "uses opset 6; allowed: 7 to 23"),
    "opset 99": (opset(99), "uses opset 99; allowed: 7 to 23"),
    "twice": (
        lambda proto: proto.graph.node.append(helper.make_node("Relu", ["c"], ["r"], "again")),
        "two operators compute 'r'",
    ),
    "circle": (circle, "Conv 'c' depends on its own result"),
    "absurd": (absurd, "'c_1' has the shape .*1099511627776"),
    "wide": (assigned(height, "dim_value", 2**30), "has the shape .*1073741824"),
    "stride 0": (attribute(0, "strides", [0, 0]), r"Conv 'c' has strides \[0, 0\]; allowed: 1 to"),
    "group 0": (attribute(0, "group", 0), r"Conv 'c' has group \[0\]"),
    "no window": (attribute(2, "kernel_shape", [2**40, 1]), "MaxPool 'y' has kernel_shape"),
    "not fixed": (
        assigned(height, "dim_param", "height"),
        "its input 'x' has open dimensions: .*'height'.*--shape x=1,4,320,8$",
    ),
    "recursion": (recursive, "its function 'F' calls itself"),
    "elsewhere": (external("../secret.bin"), "is stored in '../secret.bin'; allowed: a file in the model's folder"),
    "absolute": (external("/etc/passwd"), "'c_1' is stored in '/etc/passwd'; allowed"),
    "by a link": (external("link.bin"), "'c_1' is stored in 'link.bin'; allowed"),
    "missing": (external("weights.bin"), "'c_1' is stored in 'weights.bin'; allowed"),
    "beyond": (external("here.bin", offset="8", length="1000000"), "is stored at bytes 8 to 1,000,008 of 'here.bin'"),
    "before": (external("here.bin", offset="-8"), "is stored at bytes -8 to"),
    "short": (external("here.bin"), "'c_1' is damaged"),
    "no number": (external("here.bin", offset="x"), "cannot be read from 'here.bin'"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_files_that_mean_no_good_are_refused_in_words(name: str, tmp_path: Path) -> None:
    change, message = DAMAGE[name]
    (tmp_path / "secret.bin").write_bytes(bytes(864))
    folder = tmp_path / "models"
    folder.mkdir()
    (folder / "link.bin").symlink_to(tmp_path / "secret.bin")
    (folder / "here.bin").write_bytes(bytes(100))
    path = folder / "model.onnx"
    path.write_bytes(damaged(change))
    with pytest.raises(ModelError, match=message) as caught:
        onnx_file.read(path)
    assert caught.value.where == str(path)


def test_tensors_in_a_file_beside_the_model(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(
        Model([CONV], {"x": IMAGE}, ["c"]).proto(), path, save_as_external_data=True, location="w.bin", size_threshold=0
    )
    assert (tmp_path / "w.bin").stat().st_size >= 864
    assert imported(path)[2] == ["Conv2D"]


def test_damaged_files_give_an_error_or_an_answer(tmp_path: Path) -> None:
    sound = damaged(lambda proto: None)
    path, outcomes = tmp_path / "model.onnx", Counter[str]()
    for turn in range(300):
        dice = random.Random(f"onnx:{turn}")
        data = bytearray(sound)
        for _ in range(dice.randint(1, 4)):
            data[dice.randrange(len(data))] = dice.randrange(256)
        path.write_bytes(bytes(data[: dice.randrange(len(data))] if turn % 5 == 0 else data))
        try:
            outcomes["problems" if onnx_file.read(path).problems else "imported"] += 1
        except ModelError:
            outcomes["error"] += 1
    assert set(outcomes) >= {"error", "imported"}
