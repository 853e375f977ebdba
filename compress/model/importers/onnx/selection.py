"""Remove the selection of objects at the end of a detector: non-maximum suppression, and what selects the best boxes.

These operators have results of variable size, which no target runs and no layer computes. In front of them are the
boxes and scores of all locations: these become the outputs of the model, and the device selects among them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

SUPPRESSION = frozenset({"NonMaxSuppression", "EfficientNMS_TRT", "BatchedNMS_TRT", "BatchedNMSDynamic_TRT"})
"""Operators that show that a model selects objects; those with TRT are plugins of TensorRT."""
TOP_K = "TopK"
CHOOSING = SUPPRESSION | {"NonZero", TOP_K, "ArgMax", "ReduceMax", "MaxPool"}
"""Operators that are part of the selection, in a model that has one, unless a convolution follows them. A MaxPool
finds the peaks of a map of scores."""
GATHERING = frozenset({"Gather", "GatherElements", "GatherND"})
WEIGHTED = frozenset({"MatMul", "Gemm", "LayerNormalization"})
"""Operators of a network: after them, the best values are not its answer (the queries of a transformer)."""
CONVOLUTIONS = frozenset({"Conv", "ConvTranspose", "ConvInteger", "QLinearConv"})


def without_selection(model: Any) -> list[str]:
    """Make the tensors in front of the selection the outputs of a model, and return notes.

    A model without a selection, or with nothing in front of it, stays as it is: no notes.

    Args:
        model: an onnx.ModelProto with sorted nodes; it is changed.
    """
    from onnx import TensorProto, helper

    nodes = list(model.graph.node)
    selection = next((node for node in nodes if node.op_type in SUPPRESSION), None) or _best_boxes(model)
    if selection is None:
        return []
    selected: set[str] = set()
    removed = []
    inside = _before_convolutions(model)
    for node in nodes:
        chooses = node.op_type in CHOOSING and (node.op_type in SUPPRESSION or not inside.intersection(node.output))
        if chooses or any(name in selected for name in node.input):
            selected.update(node.output)
            removed.append(node)
    inputs = {tensor.name for tensor in model.graph.input} - {tensor.name for tensor in model.graph.initializer}
    computed = _after(model, inputs)
    frontier = {name for node in removed for name in node.input if name in computed and name not in selected}
    after = _after(model, frontier)  # what is computed from another one of them adds nothing
    kept = [name for name in computed if name in frontier and name not in after]
    others = [output for output in model.graph.output if output.name not in selected]
    if len(kept) < (2 if selection.op_type == TOP_K else 1) and not others:
        return []
    del model.graph.output[:]
    model.graph.output.extend(others)
    known = {output.name for output in others}
    model.graph.output.extend(
        helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in kept if name not in known
    )
    return [f"its {selection.op_type}{_thresholds(model, selection)} is taken off: the device selects the objects"]


def _best_boxes(model: Any) -> Any:
    """Return the TopK by which a detector without suppression selects its objects (YOLOv10, YOLO26); None without."""
    for node in model.graph.node:
        if node.op_type != TOP_K:
            continue
        after = _after(model, set(node.output))
        kinds = {consumer.op_type for consumer in model.graph.node if any(name in after for name in consumer.output)}
        if kinds & GATHERING and not kinds & (WEIGHTED | CONVOLUTIONS):
            return node
    return None


def _before_convolutions(model: Any) -> set[str]:
    """Return the tensors that a convolution is computed from, such as those of attention in the backbone."""
    tensors: set[str] = set()
    for node in reversed(model.graph.node):
        if node.op_type in CONVOLUTIONS or tensors.intersection(node.output):
            tensors.update(node.input)
    return tensors


def _after(model: Any, sources: Collection[str]) -> dict[str, None]:
    """Return the tensors that are computed from the values of some tensors, in their order."""
    tensors: dict[str, None] = {}
    for node in model.graph.node:
        if node.op_type not in ("Shape", "Size") and any(name in sources or name in tensors for name in node.input):
            tensors.update(dict.fromkeys(filter(None, node.output)))
    return tensors


def _thresholds(model: Any, node: Any) -> str:
    """Return the thresholds of a NonMaxSuppression as text, if they are constants."""
    from onnx import numpy_helper

    if node.op_type not in SUPPRESSION:
        return ""
    constants: Mapping[str, Any] = {tensor.name: tensor for tensor in model.graph.initializer}
    shown = []
    for index, title in ((3, "overlap"), (4, "least score")):
        name = node.input[index] if len(node.input) > index else ""
        if name in constants:
            value = np.asarray(numpy_helper.to_array(constants[name])).ravel()
            shown += [f"{title} {value[0]:g}"] if len(value) == 1 and value.dtype.kind == "f" else []
    return f" ({', '.join(shown)})" if shown else ""
