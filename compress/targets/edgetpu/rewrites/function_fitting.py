"""Element-wise functions of one tensor, computed by any number of operators: fitted by a few TANH and one RELU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

import numpy as np
from numpy.typing import NDArray

from compress.core.errors import ModelError
from compress.model.tflite.comparison import Runner
from compress.model.tflite.edit import Edit, extract
from compress.model.tflite.graph import DTYPES, NONE, Graph, Operator, Quantization, Tensor
from compress.targets.edgetpu.rewrites.elementwise import (
    add_rescaling,
    all_values,
    dequantized_constant,
    is_per_tensor_8bit,
    quantization_for_range,
    scalar_constant,
    symmetric_quantization,
)

FUNCTIONS = (
    *("ABS", "CEIL", "COS", "ELU", "EXP", "FLOOR", "GELU", "HARD_SWISH", "LEAKY_RELU", "LOG", "NEG", "RELU_0_TO_1"),
    *("ROUND", "RSQRT", "SIGN", "SIN", "SQRT", "SQUARE", "DIV", "EQUAL", "GREATER", "GREATER_EQUAL", "LESS"),
    *("LESS_EQUAL", "LOGICAL_AND", "LOGICAL_NOT", "LOGICAL_OR", "NOT_EQUAL", "POW", "SELECT", "SELECT_V2"),
)
"""Unsupported operators that a fit can replace."""
ELEMENTWISE = (
    *FUNCTIONS,
    *("CAST", "DEQUANTIZE", "QUANTIZE", "LOGISTIC", "RELU", "RELU6", "RELU_N1_TO_1", "TANH"),
    *("ADD", "MAXIMUM", "MINIMUM", "MUL", "SQUARED_DIFFERENCE", "SUB"),
)
"""Operators that work element by element."""
MAX_TANH = 4
"""The most TANH of a fit; chosen: with four, a fit has 25 operators."""
_NEAR = 1.5
"""The largest error of a fit in steps of the output's scale, without the rounding of intermediate tensors."""
_DAMPINGS = (0.1, 0.03, 0.01)
"""Regularization of the weights: large weights that cancel each other would be lost in rounding."""


def fitted_function(operator: Operator, graph: Graph) -> Iterator[Edit]:
    """Replace operators that together compute an element-wise function of one tensor by a linear term, a RELU and up to
    four TANH, fitted to the 256 values."""
    region_and_ends = _region(operator, graph)
    if region_and_ends is None:
        return
    region, x, out = region_and_ends
    first = next(member for member in region if member.name in FUNCTIONS)
    if first.index < operator.index and (same := _region(first, graph)) and same[2].index == out.index:
        return  # tried already
    exact = _exact(graph, region, x, out)
    expected = _table(exact, x)
    if expected is None:
        return
    values, step = all_values(x), out.quantization.scale[0] if out.quantization else 1.0
    for curves, damping in product(range(1, MAX_TANH + 1), _DAMPINGS):
        tanh_inputs, weights = _fitted(values, expected, curves, damping)
        if np.abs(_basis(values, tanh_inputs) @ weights - expected).max() <= _NEAR * step:
            edit = Edit(graph)
            edit.remove(*region)
            edit.exact = exact
            _write(edit, x, out, tanh_inputs, weights)
            yield edit


# --- which operators --------------------------------------------------------------------


def _region(operator: Operator, graph: Graph) -> tuple[list[Operator], Tensor, Tensor] | None:
    """Return the element-wise operators around an operator, with the 8-bit tensors before and after them."""
    roots = _roots(graph)
    root = roots.get(operator.outputs[0], operator.outputs[0])
    if not is_per_tensor_8bit(graph.tensors[root]) or root == operator.outputs[0]:
        return None
    last = max(operator_.index for operator_ in graph.operators if roots.get(operator_.outputs[0]) == root)
    for index in range(last, operator.index - 1, -1):
        end = graph.operators[index]
        if roots.get(end.outputs[0]) != root or not is_per_tensor_8bit(graph.output_tensors(end)[0]):
            continue
        region = _removable_operators(end, root, graph)
        if any(operator_.index == operator.index for operator_ in region):
            return region, graph.tensors[root], graph.output_tensors(end)[0]
    return None


def _roots(graph: Graph) -> dict[int, int]:
    """Return, for each tensor, the 8-bit tensor that it is an element-wise function of."""
    roots: dict[int, int] = {}
    for operator in graph.operators:
        if not _is_elementwise(operator, graph):
            continue
        sources = {
            roots.get(tensor.index, tensor.index) for tensor in graph.input_tensors(operator) if not tensor.is_constant
        }
        root, *more = sources or {NONE}
        out = graph.output_tensors(operator)[0]
        if sources and not more and out.shape == graph.tensors[root].shape:
            roots[out.index] = root
    return roots


def _is_elementwise(operator: Operator, graph: Graph) -> bool:
    """Return whether an operator computes each output value from one value of each input, and from scalars."""
    if operator.name not in ELEMENTWISE or operator.custom or len(operator.outputs) != 1:
        return False
    return all(tensor.elements == 1 for tensor in graph.input_tensors(operator) if tensor.is_constant)


def _removable_operators(end: Operator, root: int, graph: Graph) -> list[Operator]:
    """Return the operators that can be removed if `end` is computed directly from `root`: only `end` uses them."""
    region = {end.index}
    stop = {root, *graph.outputs}
    for operator in reversed(graph.operators[: end.index]):
        readers = {reader.index for output in operator.outputs for reader in graph.consumers.get(output, ())}
        if readers and readers <= region and stop.isdisjoint(operator.outputs):
            region.add(operator.index)
    members = [graph.operators[index] for index in sorted(region)]
    written = {root, NONE}.union(*(member.outputs for member in members))
    read_from_outside = set[int]().union(*(member.inputs for member in members)) - written
    return members if all(graph.tensors[index].is_constant for index in read_from_outside) else []


def _exact(graph: Graph, region: Sequence[Operator], x: Tensor, out: Tensor) -> Graph:
    """Return the same operators in float between DEQUANTIZE and QUANTIZE, without rounding of intermediate tensors."""
    edit, float_indices = Edit(graph), {NONE: NONE}
    edit.remove(*graph.operators)

    def floating(index: int) -> int:
        tensor = graph.tensors[index]
        if index not in float_indices:
            values = (
                dequantized_constant(tensor).astype(np.float32)
                if tensor.is_constant and is_per_tensor_8bit(tensor)
                else None
            )
            kept = (tensor.is_constant and values is None) or tensor.dtype == "BOOL"
            outputs = index if kept else edit.tensor("exact", tensor.shape, "FLOAT32", values=values)
            float_indices[index] = outputs
        return float_indices[index]

    edit.add("DEQUANTIZE", [x.index], [floating(x.index)], edit.options("DequantizeOptions"))
    for operator in region:
        inputs, outputs = ([floating(index) for index in ends] for ends in (operator.inputs, operator.outputs))
        if operator.name in ("QUANTIZE", "DEQUANTIZE"):
            float_indices[operator.outputs[0]] = inputs[0]
        else:
            edit.change(operator, inputs=inputs, outputs=outputs)
    edit.add("QUANTIZE", [float_indices[out.index]], [out.index], edit.options("QuantizeOptions"))
    changed = edit.graph()
    return extract(changed, range(len(changed.operators)), [x.index], [out.index])


def _table(exact: Graph, x: Tensor) -> NDArray[np.float64] | None:
    """Return the exact output for each of the 256 codes of the input, as real numbers."""
    lowest = -128 if x.dtype == "INT8" else 0
    codes, table = np.arange(lowest, lowest + 256), np.zeros(256)
    float_output = exact.producer[exact.outputs[0]].inputs
    try:
        runner = Runner(exact, keep=True)
        for first in range(0, 256, x.elements):
            chosen = codes[first : first + x.elements]
            (values,) = runner.run([np.resize(chosen, x.shape).astype(DTYPES[x.dtype])], float_output)
            table[first : first + len(chosen)] = values.ravel()[: len(chosen)]
    except ModelError:
        return None
    return table if np.isfinite(table).all() else None


# --- the fit ----------------------------------------------------------------------------


def _fitted(
    values: NDArray[np.float64], expected: NDArray[np.float64], curves: int, damping: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return slope and shift inside each TANH, [2, curves], and the weights of 1, x, relu(x) and each TANH."""
    from scipy.optimize import least_squares

    extent = float(np.abs(values).max()) or 1.0
    target = np.concatenate([expected, np.zeros(3 + curves)])

    def stacked(tanh_inputs: NDArray[np.float64]) -> NDArray[np.float64]:
        basis = _basis(values, tanh_inputs.reshape(2, curves))
        return np.vstack([basis, damping * np.eye(basis.shape[1])])

    def weights_for(tanh_inputs: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.asarray(np.linalg.lstsq(stacked(tanh_inputs), target, rcond=None)[0])

    def residuals(tanh_inputs: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.asarray(stacked(tanh_inputs) @ weights_for(tanh_inputs) - target)

    def slopes(tanh_inputs: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the Jacobian of the residuals (variable projection, Kaufman 1975)."""
        rows = stacked(tanh_inputs)
        basis, _ = np.linalg.qr(rows)
        tanh_slopes = (1 - rows[: len(values), 3:] ** 2) * weights_for(tanh_inputs)[3:]
        moved = np.zeros((len(rows), 2 * curves))
        moved[: len(values)] = np.hstack([tanh_slopes * values[:, None], tanh_slopes])
        return np.asarray(moved - basis @ (basis.T @ moved))

    generator, best, smallest_error = np.random.default_rng(0), np.ones(2 * curves), np.inf
    bounds = [0.05] * curves + [-8.0] * curves, [max(64 / extent, 4.0)] * curves + [8.0] * curves
    for _ in range(6):
        guess = np.concatenate([generator.uniform(0.3, 3.0, curves), generator.uniform(-2.0, 2.0, curves)])
        solution = least_squares(residuals, guess, slopes, bounds, max_nfev=60)
        largest_error = np.abs(solution.fun[: len(values)]).max()
        best, smallest_error = (solution.x, largest_error) if largest_error < smallest_error else (best, smallest_error)
    return best.reshape(2, curves), weights_for(best)


def _basis(values: NDArray[np.float64], tanh_inputs: NDArray[np.float64]) -> NDArray[np.float64]:
    curves = [np.tanh(k * values + shift) for k, shift in tanh_inputs.T]
    return np.stack([np.ones_like(values), values, np.maximum(values, 0), *curves], axis=1)


# --- the operators ----------------------------------------------------------------------


def _write(edit: Edit, x: Tensor, out: Tensor, tanh_inputs: NDArray[np.float64], weights: NDArray[np.float64]) -> None:
    """Add the operators of a fit. The terms with the smallest range are added first, to reduce rounding errors."""
    values = all_values(x)
    parts = []
    for k, shift, weight in zip(*tanh_inputs, weights[3:], strict=True):
        inside = edit.like(x, "inside", quantization=_around(x, k * values + shift))
        summands = [add_rescaling(edit, x, float(k)), scalar_constant(edit, x, float(shift))]
        edit.add("ADD", summands, [inside], edit.options("AddOptions"))
        tanh_output = edit.like(x, "tanh", quantization=symmetric_quantization(x, 1 / 128))
        edit.add("TANH", [inside], [tanh_output])
        parts.append((_weighted(edit, x, tanh_output, float(weight), 1.0), weight * np.tanh(k * values + shift)))
    extent = float(np.abs(values).max())
    if weights[2]:
        above = edit.like(x, "relu")
        edit.add("RELU", [x.index], [above])
        parts.append((_weighted(edit, x, above, float(weights[2]), extent), weights[2] * np.maximum(values, 0)))
    if weights[1]:
        parts.append((_weighted(edit, x, x.index, float(weights[1]), extent), weights[1] * values))
    parts.sort(key=lambda part_values: float(np.ptp(part_values[1])))
    constant = float(weights[0])
    total, sums = scalar_constant(edit, x, constant), np.full_like(values, constant)
    for position, (index, part_values) in enumerate(parts):
        sums = sums + part_values
        total_index = out.index if position == len(parts) - 1 else edit.like(x, "sum", quantization=_around(x, sums))
        edit.add("ADD", [index, total], [total_index], edit.options("AddOptions"))
        total = total_index


def _weighted(edit: Edit, x: Tensor, index: int, weight: float, extent: float) -> int:
    weighted = edit.like(
        x, "weighted", quantization=quantization_for_range(x, -abs(weight) * extent, abs(weight) * extent)
    )
    edit.add("MUL", [index, scalar_constant(edit, x, weight)], [weighted], edit.options("MulOptions"))
    return weighted


def _around(x: Tensor, values: NDArray[np.float64]) -> Quantization:
    return quantization_for_range(x, min(float(values.min()), 0.0), max(float(values.max()), 1e-6))
