"""Models that select objects themselves: non-maximum suppression at the end of an .onnx file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compress.model.importers import model_file
from compress.model.importers.onnx import onnx_model
from compress.model.importers.onnx.selection import without_selection

onnx = pytest.importorskip("onnx", reason="onnx is not installed")


def detector(path: Path, end: str) -> Path:
    """A convolution, its 6 channels as boxes [1, 16, 4] and scores [1, 2, 16], and a selection."""
    from onnx import TensorProto, helper, numpy_helper

    random = np.random.default_rng(0)
    constants = {
        "kernel": random.normal(size=(6, 3, 2, 2)).astype(np.float32),
        "joined": np.array([1, 6, 16]),
        "most": np.array([10]),
        "overlap": np.array([0.45], np.float32),
        "least": np.array([0.25], np.float32),
        "column": np.array([2]),
    }
    nodes = [
        helper.make_node("Conv", ["image", "kernel"], ["map"], strides=[2, 2]),
        helper.make_node("Reshape", ["map", "joined"], ["rows"]),
        helper.make_node("Split", ["rows", "sizes"], ["box_columns", "logits"], axis=1),
        helper.make_node("Transpose", ["box_columns"], ["boxes"], perm=[0, 2, 1]),
        helper.make_node("Sigmoid", ["logits"], ["scores"]),
    ]
    constants["sizes"] = np.array([4, 2])
    if end == "suppression":
        nodes += [
            helper.make_node("NonMaxSuppression", ["boxes", "scores", "most", "overlap", "least"], ["selected"]),
            helper.make_node("Gather", ["selected", "column"], ["indices"], axis=1),
            helper.make_node("Gather", ["boxes", "indices"], ["found"], axis=1),
        ]
    elif end == "top":  # YOLOv10 and YOLO26
        constants |= {"five": np.array([5]), "flat": np.array([1, -1]), "two": np.array(2), "last": np.array([2])}
        nodes += [
            helper.make_node("Transpose", ["scores"], ["rows of scores"], perm=[0, 2, 1]),
            helper.make_node("ReduceMax", ["rows of scores"], ["best"], axes=[2], keepdims=0),
            helper.make_node("TopK", ["best", "five"], ["", "places"], axis=1),
            helper.make_node("Unsqueeze", ["places", "last"], ["column of places"]),
            helper.make_node("Concat", ["column of places"] * 4, ["places of boxes"], axis=2),
            helper.make_node("Concat", ["column of places"] * 2, ["places of scores"], axis=2),
            helper.make_node("GatherElements", ["boxes", "places of boxes"], ["five boxes"], axis=1),
            helper.make_node("GatherElements", ["rows of scores", "places of scores"], ["five scores"], axis=1),
            helper.make_node("Reshape", ["five scores", "flat"], ["joined scores"]),
            helper.make_node("TopK", ["joined scores", "five"], ["top scores", "top places"], axis=1),
            helper.make_node("Mod", ["top places", "two"], ["labels"]),
            helper.make_node("Cast", ["labels"], ["found"], to=TensorProto.FLOAT),
        ]
    elif end == "peaks":  # CenterNet
        constants |= {"as map": np.array([1, 2, 4, 4]), "flat": np.array([1, 32]), "cells": np.array([16])}
        nodes += [
            helper.make_node("Reshape", ["scores", "as map"], ["heat"]),
            helper.make_node("MaxPool", ["heat"], ["highest"], kernel_shape=[3, 3], pads=[1, 1, 1, 1]),
            helper.make_node("Equal", ["heat", "highest"], ["peaks"]),
            helper.make_node("Cast", ["peaks"], ["kept"], to=TensorProto.FLOAT),
            helper.make_node("Mul", ["heat", "kept"], ["filtered"]),
            helper.make_node("Reshape", ["filtered", "flat"], ["likely"]),
            helper.make_node("TopK", ["likely", "most"], ["", "places"], axis=1),
            helper.make_node("Mod", ["places", "cells"], ["indices"]),
            helper.make_node("Gather", ["boxes", "indices"], ["found"], axis=1),
        ]
    else:  # the best class of each location, as in programs with one suppression for all classes
        nodes += [
            helper.make_node("ReduceMax", ["scores"], ["best"], axes=[1], keepdims=1),
            helper.make_node("ArgMax", ["scores"], ["label"], axis=1, keepdims=1),
            helper.make_node("NonMaxSuppression", ["boxes", "best", "most", "overlap"], ["selected"]),
            helper.make_node("Gather", ["selected", "column"], ["indices"], axis=1),
            helper.make_node("Gather", ["label", "indices"], ["found"], axis=2),
        ]
    graph = helper.make_graph(
        nodes,
        "detector",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, [1, 3, 8, 8])],
        [helper.make_tensor_value_info("found", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(values, name) for name, values in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    path.write_bytes(model.SerializeToString())
    return path


@pytest.mark.parametrize(
    ("end", "shown"), [("suppression", "overlap 0.45, least score 0.25"), ("best", "overlap 0.45")]
)
def test_boxes_and_scores_in_front_of_the_selection_become_the_outputs(tmp_path: Path, end: str, shown: str) -> None:
    model, notes = onnx_model.read(detector(tmp_path / "detector.onnx", end))
    assert [output.name for output in model.graph.output] == ["boxes", "scores"]
    assert {node.op_type for node in model.graph.node} == {"Conv", "Reshape", "Split", "Transpose", "Sigmoid"}
    assert notes == (f"its NonMaxSuppression ({shown}) is taken off: the device selects the objects",)


def test_the_best_boxes_of_a_detector_without_suppression_are_left_to_the_device(tmp_path: Path) -> None:
    model, notes = onnx_model.read(detector(tmp_path / "detector.onnx", "top"))
    assert [output.name for output in model.graph.output] == ["boxes", "rows of scores"]
    assert {node.op_type for node in model.graph.node} == {"Conv", "Reshape", "Split", "Transpose", "Sigmoid"}
    assert notes == ("its TopK is taken off: the device selects the objects",)


def test_the_search_for_the_peaks_of_a_map_is_part_of_the_selection(tmp_path: Path) -> None:
    model, notes = onnx_model.read(detector(tmp_path / "detector.onnx", "peaks"))
    assert [output.name for output in model.graph.output] == ["boxes", "heat"]
    assert notes == ("its TopK is taken off: the device selects the objects",)


def test_the_best_classes_and_the_queries_of_a_transformer_stay() -> None:
    from onnx import TensorProto, helper

    classes = [
        helper.make_node("Softmax", ["x"], ["scores"]),
        helper.make_node("TopK", ["scores", "k"], ["values", "places"]),
        helper.make_node("Gather", ["names", "places"], ["found"]),
    ]
    queries = [
        helper.make_node("Split", ["x"], ["left", "right"], axis=1),
        helper.make_node("TopK", ["left", "k"], ["values", "places"]),
        helper.make_node("GatherElements", ["right", "places"], ["queries"], axis=1),
        helper.make_node("MatMul", ["queries", "names"], ["found"]),
    ]
    for nodes in (classes, queries):
        inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 8])]
        outputs = [helper.make_tensor_value_info("found", TensorProto.FLOAT, None)]
        constants = [
            helper.make_tensor("k", TensorProto.INT64, [1], [2]),
            helper.make_tensor("names", TensorProto.FLOAT, [8], range(8)),
        ]
        model = helper.make_model(helper.make_graph(nodes, "graph", inputs, outputs, constants))
        assert without_selection(model) == []


@pytest.mark.tensorflow
def test_the_rest_is_imported(tmp_path: Path, keras: Any) -> None:
    file = model_file.read(detector(tmp_path / "detector.onnx", "suppression"))
    model = model_file.load(file).model
    assert [tuple(output.shape[1:]) for output in model.outputs] == [(16, 4), (16, 2)]


def test_models_without_suppression_keep_their_outputs(tmp_path: Path) -> None:
    path = detector(tmp_path / "detector.onnx", "best")
    model = onnx.load(path)
    del model.graph.node[7:]
    del model.graph.output[:]
    model.graph.output.append(onnx.helper.make_tensor_value_info("label", onnx.TensorProto.INT64, None))
    path.write_bytes(model.SerializeToString())
    read, notes = onnx_model.read(path)
    assert [output.name for output in read.graph.output] == ["label"]
    assert notes == ()


def test_the_largest_value_of_a_map_in_front_of_a_convolution_stays(tmp_path: Path) -> None:
    path = detector(tmp_path / "detector.onnx", "suppression")
    model = onnx.load(path)
    attention = [
        onnx.helper.make_node("ReduceMax", ["image"], ["largest"], axes=[1], keepdims=1),
        onnx.helper.make_node("Mul", ["image", "largest"], ["weighted"]),
    ]
    model.graph.node[0].input[0] = "weighted"
    rest = [*model.graph.node]
    del model.graph.node[:]
    model.graph.node.extend([*attention, *rest])
    path.write_bytes(model.SerializeToString())
    read, _ = onnx_model.read(path)
    assert [output.name for output in read.graph.output] == ["boxes", "scores"]
    assert [node.op_type for node in read.graph.node][:3] == ["ReduceMax", "Mul", "Conv"]


def test_a_suppression_of_the_inputs_stays(tmp_path: Path) -> None:
    from onnx import TensorProto, helper

    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 4, 4]) for name in ("boxes", "scores")]
    outputs = [helper.make_tensor_value_info("found", TensorProto.INT64, None)]
    node = helper.make_node("NonMaxSuppression", ["boxes", "scores"], ["found"])
    model = helper.make_model(helper.make_graph([node], "selection", inputs, outputs))
    assert without_selection(model) == []
    assert [output.name for output in model.graph.output] == ["found"]
