"""Import rules for ONNX Resize and Upsample.

Along each dimension the result is a matrix product, as the ONNX specification of Resize defines it. If Keras has a
layer or an operation with the same matrix, the rule uses it. Otherwise the rule uses Take (nearest) or Matmul (linear,
cubic).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import ceil, floor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compress.model.importers.common.graph_builder import IMAGE, NUMPY, UNKNOWN, NotImportedError
from compress.model.importers.onnx.layout import OnnxValue, channel_last, laid
from compress.model.importers.onnx.network_builder import OnnxCall, Rule
from compress.model.importers.onnx.ops.convolution import image

Matrix = NDArray[np.float64]
Shares = list[tuple[int, float]]
"""The input positions of one output value, and their weights."""
MOST_IN_MATRIX = 2**17
"""A resize along one axis is a matrix of weights, which the file would have to carry."""
NEAREST: Mapping[str, Callable[[float], int]] = {
    "round_prefer_floor": lambda coordinate: ceil(coordinate - 0.5),
    "round_prefer_ceil": lambda coordinate: floor(coordinate + 0.5),
    "floor": floor,
    "ceil": ceil,
}


def resize(call: OnnxCall) -> OnnxValue:
    """Resize, and Upsample of opsets 7 to 9."""
    source, result = image(call), call.output_shape()
    rank = len(source.shape) - 2
    if result[:2] != source.shape[:2]:
        raise NotImportedError(
            f"it resizes {list(source.shape)} to {list(result)}: resizing of channels is not supported"
        )
    scales = _scales(call, source.shape, result)
    matrices = [
        _matrix(call, size, out, scale)
        for size, out, scale in zip(source.shape[2:], result[2:], scales[2:], strict=True)
    ]
    if all(matrix.shape[0] == matrix.shape[1] and np.allclose(matrix, np.eye(len(matrix))) for matrix in matrices):
        return source
    like = laid(UNKNOWN, result, channel_last(rank + 2))
    if (resized := _by_layer(call, source, like, matrices)) is not None:
        return resized
    for axis, matrix in enumerate(matrices, start=2):
        source = _along(call, source, axis, matrix)
    return source


def _scales(call: OnnxCall, shape: Sequence[int], result: Sequence[int]) -> list[float]:
    """Return the scale of each dimension; if the node has only sizes, the ratio of the sizes."""
    if call.setting("antialias", 0) or call.setting("keep_aspect_ratio_policy", "stretch") != "stretch":
        raise NotImportedError("antialias and keep_aspect_ratio_policy are not supported")
    exact = [after / before for before, after in zip(shape, result, strict=True)]
    index = 1 if call.node.operator == "Upsample" or call.builder.graph.opset < 11 else 2
    scales = call.setting("scales")
    if scales is None and call.has(index):
        scales = call.constant(index).reshape(-1)
    axes = call.integers("axes") or list(range(len(shape)))
    if scales is None or len(scales) != len(axes):
        return exact
    for axis, scale in zip(axes, scales, strict=True):
        exact[axis] = float(scale)
    return exact


def _matrix(call: OnnxCall, size: int, out: int, scale: float) -> Matrix:
    """Return the weights [output position, input position] along one dimension."""
    if size * out > MOST_IN_MATRIX * 8:
        raise NotImportedError(f"it resizes a dimension of {size} to {out}: the matrix is too large")
    coordinates = [_coordinate(call, at, size, out, scale) for at in range(out)]
    mode = call.setting("mode", "nearest")
    if mode == "nearest":
        rounding = call.setting("nearest_mode", "round_prefer_floor" if call.builder.graph.opset >= 11 else "floor")
        return _weighted(size, [[(NEAREST[rounding](coordinate), 1.0)] for coordinate in coordinates])
    if mode in ("linear", "bilinear"):
        return _weighted(size, map(_linear, coordinates))
    if mode == "cubic":
        return _weighted(size, [_cubic(call, coordinate) for coordinate in coordinates])
    raise NotImportedError(f"its mode is {mode!r}")


def _weighted(size: int, shares: Iterable[Shares]) -> Matrix:
    """Return the matrix of shares for each output position; a position outside takes the input at the edge."""
    rows = []
    for row_shares in shares:
        rows.append(np.zeros(size))
        for near, share in row_shares:
            rows[-1][min(max(near, 0), size - 1)] += share
    return np.array(rows)


def _coordinate(call: OnnxCall, at: int, size: int, out: int, scale: float) -> float:
    """Return the input coordinate of an output position."""
    way = call.setting("coordinate_transformation_mode", "half_pixel")
    if call.node.operator == "Upsample" or call.builder.graph.opset < 11:
        way = "asymmetric"
    if way == "half_pixel" or (way == "pytorch_half_pixel" and out > 1):
        return (at + 0.5) / scale - 0.5
    if way == "pytorch_half_pixel":
        return 0.0
    if way == "align_corners":
        return at * (size - 1) / (out - 1) if out > 1 else 0.0
    if way == "asymmetric":
        return at / scale
    if way == "half_pixel_symmetric":
        centre = size / 2
        return centre * (1 - out / (scale * size)) + (at + 0.5) / scale - 0.5
    raise NotImportedError(f"it samples by {way!r}")


def _linear(coordinate: float) -> Shares:
    first = floor(coordinate)
    return [(first, 1 - (coordinate - first)), (first + 1, coordinate - first)]


def _cubic(call: OnnxCall, coordinate: float) -> Shares:
    first = floor(coordinate)
    past = coordinate - first
    if call.setting("exclude_outside", 0):
        raise NotImportedError("exclude_outside is not supported")
    coefficient = float(call.setting("cubic_coeff_a", -0.75))

    def share(far: float) -> float:
        if far <= 1:
            return (coefficient + 2) * far**3 - (coefficient + 3) * far**2 + 1
        return coefficient * far**3 - 5 * coefficient * far**2 + 8 * coefficient * far - 4 * coefficient

    return [(first + near, share(abs(past - near))) for near in (-1, 0, 1, 2)]


def _by_layer(call: OnnxCall, source: OnnxValue, like: OnnxValue, matrices: Sequence[Matrix]) -> OnnxValue | None:
    """Use a Keras layer or operation with the same matrices, if there is one."""
    pairs = [(matrix.shape[1], matrix.shape[0]) for matrix in matrices]
    times = [out // size for size, out in pairs]
    exact = all(size * time == out for (size, out), time in zip(pairs, times, strict=True))
    repeated = exact and all(
        np.array_equal(matrix, np.repeat(np.eye(size), time, 0))
        for matrix, (size, _), time in zip(matrices, pairs, times, strict=True)
    )
    if len(matrices) == 1:
        return call.layer("UpSampling1D", {"size": times[0]}, [source], like) if repeated else None
    if repeated:
        return call.layer("UpSampling2D", {"size": times, "interpolation": "nearest"}, [source], like)
    for interpolation, usual in (("bilinear", _bilinear), ("nearest", _nearest)):
        if all(np.allclose(matrix, usual(*pair), atol=1e-6) for matrix, pair in zip(matrices, pairs, strict=True)):
            if exact and interpolation == "bilinear":
                return call.layer("UpSampling2D", {"size": times, "interpolation": "bilinear"}, [source], like)
            config: dict[str, Any] = {"size": [out for _, out in pairs], "interpolation": interpolation}
            return call.operation(IMAGE, "Resize", {**config, "antialias": False}, [source], like)
    return None


def _bilinear(size: int, out: int) -> Matrix:
    """Return TensorFlow's bilinear matrix, sampled at pixel centres."""
    return _weighted(size, [_linear((at + 0.5) * size / out - 0.5) for at in range(out)])


def _nearest(size: int, out: int) -> Matrix:
    """Return TensorFlow's nearest-neighbour matrix, sampled at pixel centres."""
    return _weighted(size, [[(floor((at + 0.5) * size / out), 1.0)] for at in range(out)])


def _along(call: OnnxCall, source: OnnxValue, axis: int, matrix: Matrix) -> OnnxValue:
    """Resize one dimension with Take or with a matrix product."""
    out, size = matrix.shape
    if out == size and np.allclose(matrix, np.eye(size)):
        return source
    shape = (*source.shape[:axis], out, *source.shape[axis + 1 :])
    if set(np.unique(matrix)) <= {0.0, 1.0}:
        like = laid(UNKNOWN, shape, channel_last(len(shape)))
        return call.operation(NUMPY, "Take", {"axis": axis - 1}, [source, matrix.argmax(1)], like)
    if matrix.size > MOST_IN_MATRIX:
        raise NotImportedError(f"it resizes a dimension of {size} to {out}: the matrix is too large")
    # To the left of a matrix product: [out, size] x [..., size, what follows].
    before = [source.shape[dimension] for dimension in range(2, axis)]
    rest = [source.shape[dimension] for dimension in range(axis + 1, len(shape))]
    after = int(np.prod([*rest, source.shape[1]]))
    flat, result = (call.template((1, *before, length, after)) for length in (size, out))
    seen = call.in_network_shape(source, flat)
    product = call.operation(NUMPY, "Matmul", {}, [np.asarray(matrix, np.float32), seen], result)
    return call.in_network_shape(product, laid(UNKNOWN, shape, channel_last(len(shape))))


RULES: Mapping[str, Rule] = {"Resize": resize, "Upsample": resize}
