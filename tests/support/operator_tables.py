"""Operator tables: descriptions of a graph without its weights, and graphs that are rebuilt from such tables.

A table holds shapes, types, options and versions, the values of structural constants (axes, paddings, new shapes), and
of other constants only whether all their values are equal. Placement and parameter bytes depend on nothing else.
Descriptions that occur more than once are stored once, and referred to by index.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from paths import ROOT

from compress.model.tflite import graph

FIXTURE = ROOT / "tests" / "targets" / "edgetpu" / "compiled_models.json"
STRUCTURAL_ELEMENTS = 32
MIXED = "mixed"
"""Marks a constant whose values differ."""


def load() -> dict[str, Any]:
    """Return the recorded facts: `models` with their tables, and the compiler's `memory_reports`."""
    recorded: dict[str, Any] = json.loads(FIXTURE.read_text())
    return recorded


def table_of(parsed: graph.Graph) -> dict[str, Any]:
    tensor_kinds, tensors = _unique([_tensor_row(tensor) for tensor in parsed.tensors])
    operator_kinds, kinds = _unique([_operator_row(operator) for operator in parsed.operators])
    operators = [[kind, op.inputs, op.outputs] for kind, op in zip(kinds, parsed.operators, strict=True)]
    return {
        "tensor_kinds": tensor_kinds,
        "tensors": tensors,
        "operator_kinds": operator_kinds,
        "operators": operators,
        "inputs": parsed.inputs,
        "outputs": parsed.outputs,
        "subgraphs": parsed.subgraphs,
    }


def graph_of(table: Mapping[str, Any]) -> graph.Graph:
    """Return a graph with the operators of a table and invented weights."""
    tensor_kinds = table["tensor_kinds"]
    operator_kinds = table["operator_kinds"]
    tensors = tuple(_tensor(index, tensor_kinds[kind]) for index, kind in enumerate(table["tensors"]))
    operators = tuple(
        _operator(index, operator_kinds[kind], tuple(inputs), tuple(outputs))
        for index, (kind, inputs, outputs) in enumerate(table["operators"])
    )
    return graph.Graph(tensors, operators, tuple(table["inputs"]), tuple(table["outputs"]), table["subgraphs"], None)


def _unique(rows: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[int]]:
    """Return the different rows in order of appearance, and the index of each row among them."""
    positions: dict[str, int] = {}
    indices = [positions.setdefault(json.dumps(row), len(positions)) for row in rows]
    return [json.loads(text) for text in positions], indices


def _tensor_row(tensor: graph.Tensor) -> dict[str, Any]:
    row: dict[str, Any] = {"type": tensor.dtype, "shape": tensor.shape}
    if tensor.dynamic:
        row["dynamic"] = True
    if tensor.is_variable:
        row["variable"] = True
    if tensor.quantization is not None:
        row["scales"] = len(tensor.quantization.scale)
        row["one_scale"] = tensor.quantization.one_scale
        row["axis"] = tensor.quantization.axis
        row["zero_points"] = sorted(set(tensor.quantization.zero_point))
    if tensor.is_constant:
        row["constant"] = _constant_fact(tensor)
    return row


def _constant_fact(tensor: graph.Tensor) -> Any:
    values = tensor.array()
    structural = tensor.dtype in ("INT32", "INT64") and (tensor.quantization is None or not tensor.quantization.scale)
    if structural and values.size <= STRUCTURAL_ELEMENTS:
        return values.tolist()
    uniform = values.size > 0 and bool((values == values.flat[0]).all())
    return {"all": values.flat[0].item()} if uniform else MIXED


def _operator_row(operator: graph.Operator) -> dict[str, Any]:
    options = None
    if operator.options is not None:
        options = {name: _plain(value) for name, value in vars(operator.options).items()}
    return {"name": operator.name, "version": operator.version, "custom": operator.custom, "options": options}


def _plain(value: Any) -> Any:
    if isinstance(value, (bytes, np.ndarray)):
        return list(value)
    return value.item() if isinstance(value, np.generic) else value


def _tensor(index: int, row: Mapping[str, Any]) -> graph.Tensor:
    shape = tuple(row["shape"])
    data = _constant(row["constant"], row["type"], shape) if "constant" in row else None
    dynamic, variable = row.get("dynamic", False), row.get("variable", False)
    return graph.Tensor(index, f"tensor_{index}", row["type"], shape, dynamic, _quantization(row), data, variable)


def _quantization(row: Mapping[str, Any]) -> graph.Quantization | None:
    if "scales" not in row:
        return None
    count = row["scales"]
    scales = np.full(count, 0.5) if row["one_scale"] else np.linspace(0.25, 0.5, count)
    zero_points = np.resize(row["zero_points"], count) if row["zero_points"] else ()
    return graph.Quantization(tuple(map(float, scales)), tuple(map(int, zero_points)), row["axis"])


def _constant(fact: Any, dtype: str, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    kind = graph.DTYPES[dtype]
    if fact == MIXED:
        values = np.resize(np.asarray([1, 2], kind), shape)
    elif isinstance(fact, dict):
        values = np.full(shape, fact["all"], kind)
    else:
        values = np.asarray(fact, kind).reshape(shape)
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8)


def _operator(index: int, row: Mapping[str, Any], inputs: tuple[int, ...], outputs: tuple[int, ...]) -> graph.Operator:
    options = None if row["options"] is None else SimpleNamespace(**row["options"])
    return graph.Operator(index, row["name"], row["custom"], row["version"], inputs, outputs, options)
