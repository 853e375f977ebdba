"""Any function of one number, however many operators compute it: fitted by a few TANH and one RELU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

import numpy as np
from numpy.typing import NDArray

from compress.errors import ModelError
from compress.targets.edgetpu.rewrites.elementwise import (
    all_values,
    is_per_tensor_8bit,
    add_rescaling,
    scalar_constant,
    dequantized_constant,
    quantization_for_range,
)
from compress.tflite.comparison import Runner
from compress.tflite.edit import Edit, extract
from compress.tflite.graph import DTYPES, NONE, Graph, Operator, Quantization, Tensor

FUNCTIONS = (
    *("ABS", "CEIL", "COS", "ELU", "EXP", "FLOOR", "GELU", "HARD_SWISH", "LEAKY_RELU", "LOG", "NEG", "RELU_0_TO_1"),
    *("ROUND", "RSQRT", "SIGN", "SIN", "SQRT", "SQUARE", "DIV", "EQUAL", "GREATER", "GREATER_EQUAL", "LESS"),
    *("LESS_EQUAL", "LOGICAL_AND", "LOGICAL_NOT", "LOGICAL_OR", "NOT_EQUAL", "POW", "SELECT", "SELECT_V2"),
)
"""Operators that a curve may stand for."""
ELEMENTWISE = (
    *FUNCTIONS,
    *("CAST", "DEQUANTIZE", "QUANTIZE", "LOGISTIC", "RELU", "RELU6", "RELU_N1_TO_1", "TANH"),
    *("ADD", "MAXIMUM", "MINIMUM", "MUL", "SQUARED_DIFFERENCE", "SUB"),
)
"""Operators whose every output number depends on the input numbers at its own place alone."""
MAX_TANH = 4
_NEAR = 1.5
"""Steps of the output's scale that a fit may be off, rounding inside not counted."""
_DAMPINGS = (0.1, 0.03, 0.01)
"""How much large weights are held down in a fit: those that cancel would be lost in rounding."""


def fitted_function(operator: Operator, graph: Graph) -> Iterator[Edit]:
    """Operators that together are a function of one tensor's numbers, some of them not supported, become
    a straight line, a RELU and up to four TANH, fitted to the 256 values."""
    found = _region(operator, graph)
    if found is None:
        return
    region, x, out = found
    first = next(each for each in region if each.name in FUNCTIONS)
    if first.index < operator.index and (same := _region(first, graph)) and same[2].index == out.index:
        return  # tried already
    exact = _exact(graph, region, x, out)
    wanted = _table(exact, x)
    if wanted is None:
        return
    values, step = all_values(x), out.quantization.scale[0] if out.quantization else 1.0
    for curves, damping in product(range(1, MAX_TANH + 1), _DAMPINGS):
        steep, straight = _fitted(values, wanted, curves, damping)
        if np.abs(_basis(values, steep) @ straight - wanted).max() <= _NEAR * step:
            edit = Edit(graph)
            edit.remove(*region)
            edit.exact = exact
            _write(edit, x, out, steep, straight)
            yield edit


# --- which operators --------------------------------------------------------------------


def _region(operator: Operator, graph: Graph) -> tuple[list[Operator], Tensor, Tensor] | None:
    """The operators from one 8-bit tensor to another that an operator stands between, all of them elementwise."""
    roots = _roots(graph)
    root = roots.get(operator.outputs[0], operator.outputs[0])
    if not is_per_tensor_8bit(graph.tensors[root]) or root == operator.outputs[0]:
        return None
    last = max(each.index for each in graph.operators if roots.get(each.outputs[0]) == root)
    for index in range(last, operator.index - 1, -1):
        end = graph.operators[index]
        if roots.get(end.outputs[0]) != root or not is_per_tensor_8bit(graph.output_tensors(end)[0]):
            continue
        region = _removable_operators(end, root, graph)
        if any(each.index == operator.index for each in region):
            return region, graph.tensors[root], graph.output_tensors(end)[0]
    return None


def _roots(graph: Graph) -> dict[int, int]:
    """By tensor: the 8-bit tensor that it is an elementwise function of."""
    roots: dict[int, int] = {}
    for operator in graph.operators:
        given = graph.input_tensors(operator)
        computed = [tensor for tensor in given if not tensor.is_constant]
        single = all(tensor.elements == 1 for tensor in given if tensor.is_constant)
        found = {roots.get(tensor.index, tensor.index) for tensor in computed}
        plain = operator.name in ELEMENTWISE and not operator.custom and len(operator.outputs) == 1
        if plain and single and len(found) == 1:
            root = found.pop()
            if graph.output_tensors(operator)[0].shape == graph.tensors[root].shape:
                roots[operator.outputs[0]] = root
    return roots


def _removable_operators(end: Operator, root: int, graph: Graph) -> list[Operator]:
    """Operators that can go if `end` is computed from `root` differently: those that only `end` waits for."""
    region = {end.index}
    waiting = [index for index in end.inputs if index not in (NONE, root)]
    while waiting:
        index = waiting.pop()
        maker = graph.producer.get(index)
        readers = {each.index for each in graph.consumers.get(index, ())}
        if maker is not None and readers <= region and index not in graph.outputs and maker.index not in region:
            region.add(maker.index)
            waiting += [each for each in maker.inputs if each not in (NONE, root)]
    known = {root, *(index for position in region for index in graph.operators[position].outputs)}
    inputs = {index for position in region for index in graph.operators[position].inputs if index != NONE}
    if any(index not in known and not graph.tensors[index].is_constant for index in inputs):
        return []
    return [graph.operators[index] for index in sorted(region)]


def _exact(graph: Graph, region: Sequence[Operator], x: Tensor, out: Tensor) -> Graph:
    """The same operators in float between a DEQUANTIZE and a QUANTIZE: without the rounding in between."""
    edit, place = Edit(graph), {NONE: NONE}
    edit.remove(*graph.operators)

    def floating(index: int) -> int:
        tensor = graph.tensors[index]
        if index not in place:
            values = (
                dequantized_constant(tensor).astype(np.float32)
                if tensor.is_constant and is_per_tensor_8bit(tensor)
                else None
            )
            kept = (tensor.is_constant and values is None) or tensor.dtype == "BOOL"
            made = index if kept else edit.tensor("exact", tensor.shape, "FLOAT32", values=values)
            place[index] = made
        return place[index]

    edit.add("DEQUANTIZE", [x.index], [floating(x.index)], edit.options("DequantizeOptions"))
    for operator in region:
        given, made = ([floating(index) for index in ends] for ends in (operator.inputs, operator.outputs))
        if operator.name in ("QUANTIZE", "DEQUANTIZE"):
            place[operator.outputs[0]] = given[0]
        else:
            edit.change(operator, inputs=given, outputs=made)
    edit.add("QUANTIZE", [place[out.index]], [out.index], edit.options("QuantizeOptions"))
    changed = edit.graph()
    return extract(changed, range(len(changed.operators)), [x.index], [out.index])


def _table(exact: Graph, x: Tensor) -> NDArray[np.float64] | None:
    """The exact output for each of the 256 codes of the input, as real numbers."""
    lowest = -128 if x.dtype == "INT8" else 0
    codes, table = np.arange(lowest, lowest + 256), np.zeros(256)
    wanted = exact.producer[exact.outputs[0]].inputs
    try:
        runner = Runner(exact, keep=True)
        for first in range(0, 256, x.elements):
            chosen = codes[first : first + x.elements]
            (made,) = runner.run([np.resize(chosen, x.shape).astype(DTYPES[x.dtype])], wanted)
            table[first : first + len(chosen)] = made.ravel()[: len(chosen)]
    except ModelError:
        return None
    return table if np.isfinite(table).all() else None


# --- the fit ----------------------------------------------------------------------------


def _fitted(
    values: NDArray[np.float64], wanted: NDArray[np.float64], curves: int, damping: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Steepness and shift of each TANH, [2, curves]; and the weights of 1, x, relu(x) and each TANH."""
    from scipy.optimize import least_squares

    extent = float(np.abs(values).max()) or 1.0
    target = np.concatenate([wanted, np.zeros(3 + curves)])

    def stacked(steep: NDArray[np.float64]) -> NDArray[np.float64]:
        basis = _basis(values, steep.reshape(2, curves))
        return np.vstack([basis, damping * np.eye(basis.shape[1])])

    def solved(steep: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.asarray(np.linalg.lstsq(stacked(steep), target, rcond=None)[0])

    def missed(steep: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.asarray(stacked(steep) @ solved(steep) - target)

    def slopes(steep: NDArray[np.float64]) -> NDArray[np.float64]:
        """Of what is missed, the weights solved for anew (variable projection, Kaufman 1975)."""
        rows = stacked(steep)
        basis, _ = np.linalg.qr(rows)
        bent = (1 - rows[: len(values), 3:] ** 2) * solved(steep)[3:]
        moved = np.zeros((len(rows), 2 * curves))
        moved[: len(values)] = np.hstack([bent * values[:, None], bent])
        return np.asarray(moved - basis @ (basis.T @ moved))

    generator, best, least = np.random.default_rng(0), np.ones(2 * curves), np.inf
    bounds = [0.05] * curves + [-8.0] * curves, [max(64 / extent, 4.0)] * curves + [8.0] * curves
    for _ in range(6):
        guess = np.concatenate([generator.uniform(0.3, 3.0, curves), generator.uniform(-2.0, 2.0, curves)])
        found = least_squares(missed, guess, slopes, bounds, max_nfev=60)
        worst = np.abs(found.fun[: len(values)]).max()
        best, least = (found.x, worst) if worst < least else (best, least)
    return best.reshape(2, curves), solved(best)


def _basis(values: NDArray[np.float64], steep: NDArray[np.float64]) -> NDArray[np.float64]:
    curves = [np.tanh(k * values + shift) for k, shift in steep.T]
    return np.stack([np.ones_like(values), values, np.maximum(values, 0), *curves], axis=1)


# --- the operators ----------------------------------------------------------------------


def _write(edit: Edit, x: Tensor, out: Tensor, steep: NDArray[np.float64], straight: NDArray[np.float64]) -> None:
    """The fit as operators; the smallest parts are added up first, where rounding costs least."""
    values = all_values(x)
    parts = []
    for k, shift, weight in zip(*steep, straight[3:], strict=True):
        inside = edit.like(x, "inside", quantization=_around(x, k * values + shift))
        edit.add(
            "ADD",
            [add_rescaling(edit, x, float(k)), scalar_constant(edit, x, float(shift))],
            [inside],
            _plain(edit, "Add"),
        )
        bent = edit.like(x, "tanh", quantization=Quantization((1 / 128,), (0 if x.dtype == "INT8" else 128,), 0))
        edit.add("TANH", [inside], [bent])
        parts.append((_weighted(edit, x, bent, float(weight), 1.0), weight * np.tanh(k * values + shift)))
    extent = float(np.abs(values).max())
    if straight[2]:
        above = edit.like(x, "relu")
        edit.add("RELU", [x.index], [above])
        parts.append((_weighted(edit, x, above, float(straight[2]), extent), straight[2] * np.maximum(values, 0)))
    if straight[1]:
        parts.append((_weighted(edit, x, x.index, float(straight[1]), extent), straight[1] * values))
    parts.sort(key=lambda each: float(np.ptp(each[1])))
    constant = float(straight[0])
    total, sums = scalar_constant(edit, x, constant), np.full_like(values, constant)
    for position, (index, each) in enumerate(parts):
        sums = sums + each
        made = out.index if position == len(parts) - 1 else edit.like(x, "sum", quantization=_around(x, sums))
        edit.add("ADD", [index, total], [made], _plain(edit, "Add"))
        total = made


def _weighted(edit: Edit, x: Tensor, index: int, weight: float, extent: float) -> int:
    made = edit.like(x, "weighted", quantization=quantization_for_range(x, -abs(weight) * extent, abs(weight) * extent))
    edit.add("MUL", [index, scalar_constant(edit, x, weight)], [made], _plain(edit, "Mul"))
    return made


def _around(x: Tensor, values: NDArray[np.float64]) -> Quantization:
    return quantization_for_range(x, min(float(values.min()), 0.0), max(float(values.max()), 1e-6))


def _plain(edit: Edit, name: str) -> object:
    return edit.options(f"{name}Options")
