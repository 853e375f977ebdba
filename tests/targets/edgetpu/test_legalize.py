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
from ai_edge_litert.interpreter import Interpreter
from one_op import Op, Tensor, integers
from rewrite_models import (
    CASES,
    MAP,
    RANDOM,
    STEP,
    apart,
    batch_norm,
    bias,
    codes,
    function,
    island,
    made,
    mean,
    positive,
    shuffled,
    unsigned,
    weights,
)

from compress.core.errors import DataError, ModelError
from compress.model.tflite import comparison, graph
from compress.model.tflite.graph import Graph
from compress.targets import load
from compress.targets.edgetpu.legalize import legalize
from compress.targets.edgetpu.placement import place
from compress.targets.edgetpu.rewrites import REWRITES

TARGET = load("edgetpu")


IMPROVEMENTS = ("per_channel_dense_layer", "channel_scale_and_shift")
"""Rewrites of operators that are mapped already."""


@pytest.mark.parametrize(("name", "what", "build"), CASES, ids=[f"{name} {what}".strip() for name, what, _ in CASES])
def test_a_rewrite(name: str, what: str, build: Callable[[], Graph]) -> None:
    model = build()
    before = place(model, TARGET)
    assert name in IMPROVEMENTS or any(op.placement == "cpu" for op in before.ops)
    legalized = legalize(model, TARGET)
    kept = [change for change in legalized.changes if change.kept]
    assert name in [change.rewrite for change in kept], legalized.changes
    assert legalized.after.failure is None
    assert {op.placement for op in legalized.after.ops} == {"tpu"}
    assert all(change.steps is not None and change.steps <= change.tolerance for change in kept)
    interpreter = Interpreter(model_content=graph.serialize(legalized.graph))
    interpreter.allocate_tensors()  # with the default kernels, which refuse more than those of the comparison
    if name != "fitted_function":  # this one is nearer to the function than the operator that it replaces
        assert apart(model, legalized.graph) <= sum(change.tolerance for change in kept)


def test_every_rewrite_of_an_operator_is_tried() -> None:
    """Except for operators that TFLite does not run in 8 bits, or that only newer compilers have: see below."""
    untried = {entry.name for entry in REWRITES} - {name for name, _, _ in CASES}
    assert untried == {"square", "relu_0_to_1", "squared_difference", "float_on_cpu"}


def test_an_operator_that_makes_the_compiler_refuse_runs_in_float() -> None:
    """The compiler's parser of 2021 does not know SQRT of 8-bit tensors; in float it stays on the CPU."""
    tensors = {
        "in": MAP,
        "positive": made(1, 8, 8, 8, step=0.1, zero_point=-128),
        "out": made(1, 8, 8, 8, step=0.02, zero_point=-128),
    }
    operators = [Op("RELU", ["in"], ["positive"], 2, {}), Op("SQRT", ["positive"], ["out"], 2, {})]
    model = one_op.read(tensors, operators, ["in"], ["out"])
    before = place(model, TARGET)
    assert "SQRT version 2" in (before.failure or "")
    legalized = legalize(model, TARGET)
    assert legalized.after.failure is None
    assert [(op.op, op.placement) for op in legalized.after.ops if op.op == "SQRT"] == [("SQRT", "cpu")]
    assert apart(model, legalized.graph) <= 1


@pytest.mark.parametrize("name", ["SQUARE", "RELU_0_TO_1"])
def test_a_float_function_between_integers(name: str) -> None:
    model = island(name)
    legalized = legalize(model, TARGET)
    assert [change.kept for change in legalized.changes] == [True]
    assert {op.placement for op in legalized.after.ops} == {"tpu"}
    assert apart(model, legalized.graph) <= legalized.changes[0].tolerance


def test_squared_difference_for_an_older_compiler() -> None:
    model = one_op.one("SQUARED_DIFFERENCE", [MAP, weights(8)], made(1, 8, 8, 8, step=0.2, zero_point=-128), 2)
    assert legalize(model, TARGET).changes == ()
    legalized = legalize(model, TARGET.compiled_by("15.0"))
    assert [op.op for op in legalized.after.ops] == ["SUB", "MUL"]
    assert apart(model, legalized.graph) <= 2


@pytest.mark.parametrize(
    ("what", "build", "reason"),
    [
        ("four axes turned about", lambda: shuffled((1, 4, 2, 8, 8), (0, 4, 3, 2, 1), (1, 64, 2, 4)), None),
        ("a sine with many periods", lambda: island("SIN", step=0.5), None),
        ("a convolution that would not be exact", lambda: batch_norm("MUL", step=2.0), "changes its output by"),
    ],
)
def test_what_is_left_alone(what: str, build: Callable[[], Graph], reason: str | None) -> None:
    model = build()
    legalized = legalize(model, TARGET)
    assert not any(change.kept for change in legalized.changes)
    assert legalized.graph is model
    assert reason is None or any(reason in change.reason for change in legalized.changes)


def test_what_comes_too_late_is_left_alone() -> None:
    """A rewrite after an operator that stays on the CPU gains nothing; one after a rewritten operator is kept."""
    logarithm = Op("LOG_SOFTMAX", ["b"], ["g"], 2)
    tensors = {"x": MAP, "b": MAP, "g": made(1, 8, 8, 8, step=16 / 256, zero_point=127), "y": MAP}
    late = one_op.read(tensors, [Op("RELU", ["x"], ["b"], 2), logarithm, Op("HARD_SWISH", ["g"], ["y"])], ["x"], ["y"])
    change = legalize(late, TARGET).changes[0]
    assert (change.kept, change.reason) == (False, "it comes after an operator that stays on the CPU")
    operators = Op("RELU", "x", "a", 2), Op("ABS", "a", "b", 2), Op("HARD_SWISH", "b", "y")
    legalized = legalize(chain(*operators, x=MAP, a=positive(), b=positive(), y=positive()), TARGET)
    assert [change.rewrite for change in legalized.changes if change.kept] == ["absolute", "hard_swish"]


def test_dense_layers_left_on_the_cpu_get_one_scale_too() -> None:
    """The runtime of 2021, which computes them there, uses one scale where there are many."""
    x, out = made(1, 9, 8), made(1, 9, 12, step=0.4)
    tensors = {"x": x, "b": made(1, 9, 8, step=16 / 256, zero_point=127), "w": weights(12, 8, scales=12), "y": out}
    dense = Op("FULLY_CONNECTED", ["b", "w", ""], ["y"], 4, {"keepNumDims": True})
    operators = [Op("RELU", ["x"], ["a"], 2), Op("LOG_SOFTMAX", ["a"], ["b"], 2), dense]
    legalized = legalize(one_op.read(tensors | {"a": x}, operators, ["x"], ["y"]), TARGET)
    left = legalized.graph.operators[-1]
    assert left.name == "FULLY_CONNECTED"
    assert legalized.graph.tensors[left.inputs[1]].quantization.one_scale


def test_what_came_too_late_is_tried_again() -> None:
    """Alone, the first rewrite gains nothing: the second operator stays on the CPU, and all after it come too late."""
    tensors = {"x": MAP, "a": MAP, "i": integers(5, 1), "b": made(1, 8, 8, 2), "y": made(1, 8, 8, 2)}
    operators = [Op("LEAKY_RELU", ["x"], ["a"], 2, {"alpha": 0.1}), Op("GATHER", ["a", "i"], ["b"], 2, {"axis": 3})]
    legalized = legalize(one_op.read(tensors, [*operators, Op("RELU", ["b"], ["y"], 2)], ["x"], ["y"]), TARGET)
    assert [change.rewrite for change in legalized.changes] == ["data_movement_chain", "leaky_relu"]
    assert {op.placement for op in legalized.after.ops} == {"tpu"}


def test_a_rewrite_is_for_a_compiler() -> None:
    """PRELU is newer than the other form of LEAKY_RELU."""
    model = function("LEAKY_RELU", made(1, 8, 8, 8), 2, alpha=0.1)
    assert [op.op for op in legalize(model, TARGET).after.ops] == ["PRELU"]
    assert [op.op for op in legalize(model, TARGET.compiled_by("2.1")).after.ops] == ["MUL", "MAXIMUM"]


# --- whole graphs -----------------------------------------------------------------------


def chain(*operators: Op, **tensors: Tensor) -> Graph:
    """Return a graph of operators from x to y."""
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
    legalized = legalize(model, TARGET, io=io)
    ends = [legalized.graph.tensors[index] for index in (*legalized.graph.inputs, *legalized.graph.outputs)]
    assert [tensor.name for tensor in ends] == ["x", "y"]
    assert {tensor.dtype for tensor in ends} == {io or inside}
    assert [op.op for op in legalized.after.ops] == (
        ["RELU"] if io in (None, inside) else ["QUANTIZE", "RELU", "QUANTIZE"]
    )
    assert legalized.difference.largest < 0.01
    assert legalized.after.summary.startswith("all")


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
    legalized = legalize(chain(*operators, x=floating, a=MAP, b=MAP, f=floating, y=floating), TARGET)
    assert legalized.changes == ()


def dynamic_batch() -> Graph:
    """A reshape to a shape that is computed from the batch, as in Keras models with Reshape."""
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
    legalized = legalize(model, TARGET)
    assert [change.rewrite for change in legalized.changes if change.kept] == ["fixed_shapes", "folded_constants"]
    assert [op.op for op in legalized.after.ops] == ["RESHAPE", "RELU"]
    assert legalized.after.summary == "all 2 operators would run on the Edge TPU"
    stored = legalized.graph.source.subgraphs[0].tensors
    assert all(tensor.shapeSignature is None or -1 not in tensor.shapeSignature for tensor in stored)
    assert apart(model, legalized.graph) == 0
    free = Tensor((1, 4, 4, 2), signature=(-1, -1, 4, 2))
    with pytest.raises(ModelError, match="x has dynamic dimensions other than the batch; fix every dimension"):
        legalize(chain(Op("RELU", "x", "y", 2), x=free, y=free), TARGET)


def layouts() -> Graph:
    """Two branches in channels-first layout, joined and transposed back, as exporters of other frameworks do."""
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
    legalized = legalize(model, TARGET)
    assert sorted(op.op for op in legalized.after.ops if op.op != "RESHAPE") == ["ADD", "MAXIMUM", "RELU"]
    assert apart(model, legalized.graph) == 0


def channels_first(side: int) -> Graph:
    """A layer as exporters write it: channels are first in padding and split, and last in the layer itself."""
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
    """Small transposes become one. Large ones stay on the CPU at the front, and keep no other operator there."""
    model = channels_first(16)
    legalized = legalize(model, TARGET)
    assert [op.op for op in legalized.after.ops] == ["TRANSPOSE", "PAD", "SPLIT", "CONV_2D", "ADD"]
    assert apart(model, legalized.graph) == 0
    model = channels_first(200)
    assert sum(op.placement == "tpu" for op in place(model, TARGET).ops) == 2
    legalized = legalize(model, TARGET)
    assert [op.op for op in legalized.after.ops if op.placement == "cpu"] == ["TRANSPOSE"]
    assert [legalized.graph.tensors[index].name for index in legalized.graph.inputs] == ["x"]
    assert apart(model, legalized.graph) == 0


def test_a_long_head_takes_no_memory() -> None:
    """The rewrite does not treat thousands of rows as one block."""
    tensors = {"x": made(1, 25600, 3, 10), "order": integers(0, 2, 1, 3), "y": made(1, 3, 25600, 10)}
    model = one_op.read(tensors, [Op("TRANSPOSE", ["x", "order"], ["y"], 2)], ["x"], ["y"])
    assert legalize(model, TARGET).graph is model


def test_a_transpose_that_meets_none_or_of_another_type_stays_where_it_is() -> None:
    tensors = {"x": made(1, 6, 6, 8), "order": integers(0, 3, 1, 2), "a": made(1, 8, 6, 6), "y": made(1, 8, 6, 6)}
    operators = [Op("TRANSPOSE", ["x", "order"], ["a"], 2), Op("RELU", ["a"], ["y"], 2)]
    legalized = legalize(one_op.read(tensors, operators, ["x"], ["y"]), TARGET)
    assert [op.op for op in legalized.after.ops] == ["TRANSPOSE", "RELU"]
    assert legalized.changes == ()
    for dtype in ("FLOAT32", "INT16", "INT32"):  # it moves no values, so an 8-bit one would become a reshape
        shapes = {"x": Tensor((1, 1, 6, 8), dtype, scales=()), "y": Tensor((1, 6, 1, 8), dtype, scales=())}
        order, operators = integers(0, 2, 1, 3), [Op("TRANSPOSE", ["x", "order"], ["y"], 2)]
        legalized = legalize(one_op.read({**shapes, "order": order}, operators, ["x"], ["y"]), TARGET)
        assert [op.op for op in legalized.after.ops] == ["TRANSPOSE"]


def test_what_stays_at_the_end_is_named() -> None:
    """A float model has no such end."""
    floating = Tensor((1, 8, 8, 8), "FLOAT32", scales=())
    legalized = legalize(chain(Op("RELU", "x", "a"), Op("ABS", "a", "y"), x=floating, a=floating, y=floating), TARGET)
    assert legalized.trailing == []
    assert "is the model quantized to full integer?" in legalized.describe()
    tensors = {"x": made(1, 16), "a": made(1, 16), "axis": Tensor((), "INT32", 1, ())}
    tensors["y"] = Tensor((1,), "INT32", scales=())
    operators = [Op("RELU", ["x"], ["a"], 2), Op("ARG_MAX", ["a", "axis"], ["y"], 2, {"outputType": 2})]
    legalized = legalize(one_op.read(tensors, operators, ["x"], ["y"]), TARGET)
    assert [op.op for op in legalized.trailing] == ["ARG_MAX"]
    assert "ARG_MAX (y) stays on the CPU, at the end of the model" in legalized.describe()


def test_a_custom_operator_that_only_the_device_has() -> None:
    """Verification stops before it, and still covers the rewrites before it."""
    operators = Op("HARD_SWISH", "x", "a"), Op("RELU", "a", "b", 2), Op("PosenetDecoderOp", "b", "y", custom=True)
    legalized = legalize(chain(*operators, x=MAP, a=positive(), b=positive(), y=Tensor((1, 4), "FLOAT32")), TARGET)
    assert [change.rewrite for change in legalized.changes if change.kept] == ["hard_swish"]
    assert [op.op for op in legalized.trailing] == ["PosenetDecoderOp"]
    assert legalized.difference.feeds > 0


def test_nothing_to_do_leaves_the_model_as_it_is() -> None:
    model = chain(Op("RELU", "x", "y", 2), x=MAP, y=MAP)
    legalized = legalize(model, TARGET)
    assert legalized.graph is model
    assert legalized.describe().startswith("nothing to rewrite\n")
    assert json.loads(json.dumps(legalized.to_json()))["changes"] == []


def test_what_is_left_behind_is_gone_from_the_file() -> None:
    """An old runtime would look for an unused operator code, too, and refuse the file."""
    read = graph.parse(graph.serialize(legalize(function("GELU", positive()), TARGET).graph))
    codes_left = {code.builtinCode for code in read.source.operatorCodes}
    assert len(codes_left) == len({operator.name for operator in read.operators})
    used = {index for operator in read.operators for index in (*operator.inputs, *operator.outputs)}
    assert used == set(range(len(read.tensors)))


# --- real inputs and the command --------------------------------------------------------


def command(*arguments: Any) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "compress", "legalize", *map(str, arguments)]
    return subprocess.run(line, capture_output=True, text=True, check=False)


@pytest.mark.essential
def test_the_command(tmp_path: Path) -> None:
    model_path, out, inputs = tmp_path / "in.tflite", tmp_path / "out.tflite", tmp_path / "inputs.npy"
    model_path.write_bytes(graph.serialize(float_ended()))
    np.save(inputs, RANDOM.uniform(-5, 5, (12, 8, 8, 8)).astype(np.float32))
    done = command(model_path, out, "--inputs", inputs, "--io", "uint8")
    assert (done.returncode, done.stderr) == (0, "")
    assert "kept integer_interface" in done.stdout
    assert "on 8 real inputs" in done.stdout
    assert graph.read(out).tensors[graph.read(out).inputs[0]].dtype == "UINT8"
    report = json.loads(command(model_path, out, "--json").stdout)
    assert report["real_inputs"] is False
    assert set(report) == {"before", "after", "changes", "difference", "real_inputs", "trailing"}


def test_the_command_on_what_stays_refused_and_on_a_wrong_file(tmp_path: Path) -> None:
    model_path, out = tmp_path / "in.tflite", tmp_path / "out.tflite"
    model_path.write_bytes(graph.serialize(float_ended())[:200])
    assert command(model_path, out).returncode == 4
    assert [path.name for path in tmp_path.iterdir()] == ["in.tflite"]
    model_path.write_bytes(
        graph.serialize(function("FLOOR", Tensor((1, 8), "FLOAT32", scales=()), source=Tensor((1, 8), "FLOAT32")))
    )
    done = command(model_path, out)
    assert (done.returncode, "nothing to rewrite" in done.stdout) == (10, True)


def test_inputs_that_do_not_fit(tmp_path: Path) -> None:
    path = tmp_path / "inputs.npz"
    damages: list[Callable[[], object]] = [
        lambda: None,  # no file
        lambda: path.write_text("no array"),
        lambda: np.savez(path, x=np.asarray([{}], object)),
        lambda: np.savez(path, x=np.zeros((3, 4))),
        lambda: np.savez(path, x=np.zeros((0, 8, 8, 8))),
        lambda: np.savez(path, z=np.zeros((3, 8, 8, 8))),
    ]
    for damage in damages:
        damage()
        with pytest.raises(DataError, match=r"inputs\.npz: "):
            comparison.read_feeds(path, float_ended())


def test_all_codes_are_tried_on_small_tensors_too() -> None:
    feeds = comparison.ramp_feeds(function("HARD_SWISH", made(1, 10), source=made(1, 10)))
    assert sorted({int(code) for (value,) in feeds for code in value.ravel()}) == list(range(-128, 128))


def test_what_takes_no_input_is_proved_all_the_same() -> None:
    """The operator reads a constant and gives an output, so it is not folded. It runs once for every feed."""
    tensors = {"x": MAP, "y": MAP, "c": Tensor((1, 16), data=codes(1, 16), scales=(STEP,)), "z": made(1, 16)}
    operators = [Op("RELU", ["x"], ["y"], 2), Op("HARD_SWISH", ["c"], ["z"])]
    legalized = legalize(one_op.read(tensors, operators, ["x"], ["y", "z"]), TARGET)
    (change,) = legalized.changes
    assert change.steps is not None
    assert change.kept is (change.steps <= change.tolerance)
    assert "refuses" not in change.reason


def test_a_dynamic_batch_before_an_operator_that_the_runtime_lacks() -> None:
    """Operators of TensorFlow ("Flex") cannot run here: nothing after them is rewritten."""
    tensors = {name: Tensor((1, 4, 4, 8), signature=(-1, 4, 4, 8)) for name in ("x", "middle", "y", "z")}
    operators = [
        Op("LEAKY_RELU", ["x"], ["middle"], 2, {"alpha": 0.1}),
        Op("FlexErf", ["middle"], ["y"], custom=True),
        Op("LEAKY_RELU", ["y"], ["z"], 2, {"alpha": 0.1}),
    ]
    legalized = legalize(one_op.read(tensors, operators, ["x"], ["z"]), TARGET)
    assert [change.rewrite for change in legalized.changes if change.kept] == ["fixed_shapes", "leaky_relu"]
    assert "does not know the custom operator FlexErf" in legalized.after.summary


def test_a_map_without_pixels_is_left_as_it_is() -> None:
    """A dimension of 0 divided by zero, which ended the whole call."""
    legalized = legalize(mean(1, 0, 8, 6), TARGET)
    assert [(change.rewrite, change.kept) for change in legalized.changes] == [("mean_over_channels", False)]
