"""Limits of the values in a .tflite file, checked once, when the file is read; a value beyond them is a ValueError.

Code that works with a graph may then trust them: no stride is 0, no scale is negative, no axis is out of range, and no
loop over a version or a count runs for long.

Sources: tensorflow/lite/schema/schema.fbs; the kernels in tensorflow/lite/kernels, which abort on most values outside
these limits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import isfinite
from typing import Any

import numpy as np

MAX_RANK = 16
"""TFLite kernels support up to rank 8."""
MAX_ELEMENTS = 2**29
"""Elements of one tensor. A .tflite file has at most 2 GiB."""
MAX_INPUT_ELEMENTS = 2**26
"""Elements of all inputs together of a graph that is run: 4,700 x 4,700 pixels in colour."""
MAX_STEP = 2**20
"""The largest stride, dilation or kernel: products of two of them stay below int64."""
MAX_VERSION = 1000
"""The newest version of an operator is below 20."""
_STEP = (1, MAX_STEP)
_COUNT = (0, MAX_STEP)
_AXIS = (-MAX_RANK, MAX_RANK)
_MASK = (0, 2**MAX_RANK - 1)
_ENUM = (0, 127)
"""Enumerations of schema.fbs are bytes that are not negative."""
_INT32 = (-(2**31), 2**31 - 1)
RANGES: Mapping[str, tuple[int, int]] = {
    **dict.fromkeys(("strideH", "strideW", "strideD"), _STEP),
    **dict.fromkeys(("dilationHFactor", "dilationWFactor", "dilationDFactor"), _STEP),
    **dict.fromkeys(("filterHeight", "filterWidth", "blockSize", "numSplits"), _STEP),
    **dict.fromkeys(("depthMultiplier", "num", "valuesCount", "numChannels", "radius", "rank"), _COUNT),
    **dict.fromkeys(("maxSkipSize", "ngramSize"), _COUNT),
    **dict.fromkeys(("axis", "batchDims", "batchDim", "seqDim", "squeezeDims"), _AXIS),
    **dict.fromkeys(("beginMask", "endMask", "ellipsisMask", "newAxisMask", "shrinkAxisMask"), _MASK),
    **dict.fromkeys(("fusedActivationFunction", "padding", "mode", "combiner", "weightsFormat", "kernelType"), _ENUM),
    **dict.fromkeys(("inDataType", "outDataType", "outType", "outputType", "idxOutType", "quantizedBiasType"), _ENUM),
    "newShape": (-1, MAX_ELEMENTS),
    "numBits": (0, 32),
}
"""The allowed values of each option with an integer or a list of them, by its name in the schema.

An option with the same name means the same in every operator. No part of this program reads options of StableHLO."""
SUBGRAPHS = (
    *("thenSubgraphIndex", "elseSubgraphIndex", "condSubgraphIndex", "bodySubgraphIndex", "initSubgraphIndex"),
    *("subgraph", "comparatorSubgraphIndex", "updateComputationSubgraphIndex", "decompositionSubgraphIndex"),
)
"""Options with the index of a subgraph; -1 in those that are not set."""
ZERO_POINTS = {"INT8": (-128, 127), "UINT8": (0, 255), "INT16": (-(2**15), 2**15 - 1), "INT32": _INT32}


def check_version(version: int) -> None:
    """Check that the version of an operator is between 1 and MAX_VERSION."""
    _check("an operator's version", version, (1, MAX_VERSION))


def check_options(name: str, options: Any, subgraphs: int) -> None:
    """Check the options of an operator; `subgraphs` is the number of subgraphs in the file."""
    stablehlo = type(options).__name__.startswith("Stablehlo")
    for option, value in vars(options).items() if options is not None else ():
        what = f"{option} of {name[:80]}"
        if isinstance(value, float) and not isfinite(value):
            raise ValueError(f"{what} is not a finite number")
        if option in SUBGRAPHS:
            _check(what, value, (-1, subgraphs - 1))
        elif option in RANGES and not stablehlo:
            for integer in _integers(value):
                _check(what, integer, RANGES[option])


def check_shape(index: int, shape: Sequence[int]) -> None:
    """Check the rank, the dimensions and the number of elements of a tensor."""
    elements = 1
    for size in shape[: MAX_RANK + 1]:
        elements *= max(size, 1)
    if len(shape) > MAX_RANK or min(shape, default=0) < 0 or elements > MAX_ELEMENTS:
        raise ValueError(f"tensor {index} has the shape {list(shape[:MAX_RANK])}")


def check_data(index: int, dtype: str | None, elements: int, size: int) -> None:
    """Check that the bytes of a constant fill its shape; a dtype of None has elements of no fixed size."""
    expected = size if dtype is None else elements * np.dtype(dtype).itemsize
    if size != expected:
        raise ValueError(f"tensor {index} has {size:,} bytes, and needs {expected:,}")


def check_quantization(
    index: int, dtype: str, shape: Sequence[int], scales: Sequence[float], zero_points: Sequence[int], axis: int
) -> None:
    """Check that scales, zero points and axis of a tensor fit each other, the type and the shape."""
    if not all(isfinite(scale) and scale >= 0 for scale in scales):
        raise ValueError(f"a scale of tensor {index} is negative or not a finite number")
    if len(zero_points) not in (0, 1, len(scales)):
        raise ValueError(f"tensor {index} has {len(scales)} scales and {len(zero_points)} zero points")
    _check(f"the quantized dimension of tensor {index}", axis, (0, max(len(shape) - 1, 0)))
    if len(scales) > 1 and (not shape or shape[axis] != len(scales)):
        raise ValueError(f"tensor {index} has {len(scales)} scales, and the shape {list(shape)}")
    for zero_point in zero_points if dtype in ZERO_POINTS else ():
        _check(f"a zero point of tensor {index}", zero_point, ZERO_POINTS[dtype])


def check_runnable(shapes: Iterable[Sequence[int]]) -> None:
    """Check the number of elements of the inputs of a graph before arrays for them are made."""
    total = sum(int(np.prod(shape, dtype=np.float64)) for shape in shapes)
    if total > MAX_INPUT_ELEMENTS:
        raise ValueError(f"its inputs have {total:,} values; at most {MAX_INPUT_ELEMENTS:,} are run")


def _check(what: str, value: int, limits: tuple[int, int]) -> None:
    low, high = limits
    if not low <= value <= high:
        raise ValueError(f"{what} is {value}; allowed: {low} to {high}")


def _integers(value: Any) -> list[int]:
    """Return an option as a list of integers; an empty list for a boolean or a missing list."""
    if isinstance(value, bool) or value is None:
        return []
    return [int(value)] if isinstance(value, int) else np.asarray(value).tolist()
