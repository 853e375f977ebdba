"""Models that select objects themselves: non-maximum suppression at the end of an .onnx file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from one_node import Model, constant, floats, node, whole
from onnx import TensorProto

from compress.model.importers import model_file
from compress.model.importers.onnx import onnx_model
from compress.model.importers.onnx.selection import without_selection

FIVE, COLUMN, CELLS = whole(5), whole(2), whole(16)
MOST, OVERLAP, LEAST = whole(10), constant(np.array([0.45], np.float32)), constant(np.array([0.25], np.float32))
HEAD = [
    node("Conv", ["image", floats(6, 3, 2, 2)], ["map"], strides=[2, 2]),
    node("Reshape", ["map", whole(1, 6, 16)], ["rows"]),
    node("Split", ["rows", whole(4, 2)], ["box_columns", "logits"], axis=1),
    node("Transpose", ["box_columns"], ["boxes"], perm=[0, 2, 1]),
    node("Sigmoid", ["logits"], ["scores"]),
]
SUPPRESSION = [
    node("NonMaxSuppression", ["boxes", "scores", MOST, OVERLAP, LEAST], ["selected"]),
    node("Gather", ["selected", COLUMN], ["indices"], axis=1),
    node("Gather", ["boxes", "indices"], ["found"], axis=1),
]
TOP = [  # YOLOv10 and YOLO26
    node("Transpose", ["scores"], ["rows of scores"], perm=[0, 2, 1]),
    node("ReduceMax", ["rows of scores"], ["best"], axes=[2], keepdims=0),
    node("TopK", ["best", FIVE], ["", "places"], name="first", axis=1),
    node("Unsqueeze", ["places", COLUMN], ["column of places"]),
    node("Concat", ["column of places"] * 4, ["places of boxes"], axis=2),
    node("Concat", ["column of places"] * 2, ["places of scores"], axis=2),
    node("GatherElements", ["boxes", "places of boxes"], ["five boxes"], axis=1),
    node("GatherElements", ["rows of scores", "places of scores"], ["five scores"], axis=1),
    node("Reshape", ["five scores", whole(1, -1)], ["joined scores"]),
    node("TopK", ["joined scores", FIVE], ["top scores", "top places"], axis=1),
    node("Mod", ["top places", constant(np.array(2))], ["labels"]),
    node("Cast", ["labels"], ["found"], to=TensorProto.FLOAT),
]
PEAKS = [  # CenterNet
    node("Reshape", ["scores", whole(1, 2, 4, 4)], ["heat"]),
    node("MaxPool", ["heat"], ["highest"], kernel_shape=[3, 3], pads=[1, 1, 1, 1]),
    node("Equal", ["heat", "highest"], ["peaks"]),
    node("Cast", ["peaks"], ["kept"], to=TensorProto.FLOAT),
    node("Mul", ["heat", "kept"], ["filtered"]),
    node("Reshape", ["filtered", whole(1, 32)], ["likely"]),
    node("TopK", ["likely", MOST], ["", "places"], name="first", axis=1),
    node("Mod", ["places", CELLS], ["indices"]),
    node("Gather", ["boxes", "indices"], ["found"], axis=1),
]
BEST = [  # the best class of each location, as in programs with one suppression for all classes
    node("ReduceMax", ["scores"], ["best"], axes=[1], keepdims=1),
    node("ArgMax", ["scores"], ["label"], axis=1, keepdims=1),
    node("NonMaxSuppression", ["boxes", "best", MOST, OVERLAP], ["selected"]),
    node("Gather", ["selected", COLUMN], ["indices"], axis=1),
    node("Gather", ["label", "indices"], ["found"], axis=2),
]


def detector(path: Path, nodes: list[Any], output: str = "found") -> Path:
    """A convolution, its 6 channels as boxes [1, 16, 4] and scores [1, 2, 16], and a selection."""
    path.write_bytes(Model(nodes, {"image": (1, 3, 8, 8)}, [output], 13).proto().SerializeToString())
    return path


@pytest.mark.parametrize(
    ("end", "scores", "removed"),
    [
        (SUPPRESSION, "scores", "NonMaxSuppression (overlap 0.45, least score 0.25)"),
        (BEST, "scores", "NonMaxSuppression (overlap 0.45)"),
        (TOP, "rows of scores", "TopK"),
        (PEAKS, "heat", "TopK"),  # the search for the peaks of a map is part of the selection
    ],
)
def test_boxes_and_scores_in_front_of_the_selection_become_the_outputs(
    tmp_path: Path, end: list[Any], scores: str, removed: str
) -> None:
    model, notes = onnx_model.read(detector(tmp_path / "detector.onnx", [*HEAD, *end]))
    assert [output.name for output in model.graph.output] == ["boxes", scores]
    assert {node.op_type for node in model.graph.node} == {"Conv", "Reshape", "Split", "Transpose", "Sigmoid"}
    assert notes == (f"its {removed} is taken off: the device selects the objects",)


def test_the_best_classes_and_the_queries_of_a_transformer_stay() -> None:
    names = constant(np.arange(8, dtype=np.float32))
    classes = [
        node("Softmax", ["x"], ["scores"]),
        node("TopK", ["scores", whole(2)], ["values", "places"]),
        node("Gather", [names, "places"], ["found"]),
    ]
    queries = [
        node("Split", ["x"], ["left", "right"], axis=1),
        node("TopK", ["left", whole(2)], ["values", "places"]),
        node("GatherElements", ["right", "places"], ["queries"], axis=1),
        node("MatMul", ["queries", names], ["found"]),
    ]
    for nodes in (classes, queries):
        assert without_selection(Model(nodes, {"x": (1, 8)}, ["found"], 13).proto()) == []


@pytest.mark.tensorflow
def test_the_rest_is_imported(tmp_path: Path, keras: Any) -> None:
    file = model_file.read(detector(tmp_path / "detector.onnx", [*HEAD, *SUPPRESSION]))
    model = model_file.load(file).model
    assert [tuple(output.shape[1:]) for output in model.outputs] == [(16, 4), (16, 2)]


def test_models_without_suppression_keep_their_outputs(tmp_path: Path) -> None:
    read, notes = onnx_model.read(detector(tmp_path / "detector.onnx", [*HEAD, *BEST[:2]], "label"))
    assert [output.name for output in read.graph.output] == ["label"]
    assert notes == ()


def test_the_largest_value_of_a_map_in_front_of_a_convolution_stays(tmp_path: Path) -> None:
    attention = [
        node("ReduceMax", ["image"], ["largest"], axes=[1], keepdims=1),
        node("Mul", ["image", "largest"], ["weighted"]),
        node("Conv", ["weighted", floats(6, 3, 2, 2)], ["map"], strides=[2, 2]),
    ]
    read, _ = onnx_model.read(detector(tmp_path / "detector.onnx", [*attention, *HEAD[1:], *SUPPRESSION]))
    assert [output.name for output in read.graph.output] == ["boxes", "scores"]
    assert [node.op_type for node in read.graph.node][:3] == ["ReduceMax", "Mul", "Conv"]


def test_a_suppression_of_the_inputs_stays() -> None:
    suppression = [node("NonMaxSuppression", ["boxes", "scores"], ["found"])]
    model = Model(suppression, {"boxes": (1, 4, 4), "scores": (1, 4, 4)}, ["found"]).proto()
    assert without_selection(model) == []
    assert [output.name for output in model.graph.output] == ["found"]
