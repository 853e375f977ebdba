"""What Resize and Upsample of ONNX become in Keras.

Along each side the result is a matrix times the numbers, as ONNX' specification of Resize defines
it. Where Keras has a layer or an operation with the same matrix it is taken; otherwise places are
picked (nearest) or the matrix itself is multiplied (linear, cubic).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import ceil, floor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compress.importers.common.graph_builder import UNKNOWN
from compress.importers.common.layer_calls import IMAGE, NUMPY, NotImportedError
from compress.importers.onnx.layout import OnnxValue, channel_last, laid
from compress.importers.onnx.network_builder import OnnxCall
from compress.importers.onnx.ops.convolution import image

Matrix = NDArray[np.float64]
MOST_IN_MATRIX = 2**17
NEAREST: Mapping[str, Callable[[float], int]] = {
    "round_prefer_floor": lambda place: ceil(place - 0.5),
    "round_prefer_ceil": lambda place: floor(place + 0.5),
    "floor": floor,
    "ceil": ceil,
}


def resize(call: OnnxCall) -> OnnxValue:
    """Resize, and Upsample of opsets 7 to 9."""
    given, made = image(call), call.made()
    rank = len(given.shape) - 2
    if made[:2] != given.shape[:2]:
        raise NotImportedError(f"it makes {list(made)} of {list(given.shape)}: more channels")
    scales = _scales(call, given.shape, made)
    matrices = [
        _matrix(call, side, out, scale) for side, out, scale in zip(given.shape[2:], made[2:], scales[2:], strict=True)
    ]
    if all(matrix.shape[0] == matrix.shape[1] and np.allclose(matrix, np.eye(len(matrix))) for matrix in matrices):
        return given
    like = laid(UNKNOWN, made, channel_last(rank + 2))
    if (found := _by_layer(call, given, like, matrices)) is not None:
        return found
    for side, matrix in enumerate(matrices):
        given = _along(call, given, side + 2, matrix)
    return given


def _scales(call: OnnxCall, shape: Sequence[int], made: Sequence[int]) -> list[float]:
    """Of each side; those that follow from the sizes where only these are told."""
    if call.setting("antialias", 0) or call.setting("keep_aspect_ratio_policy", "stretch") != "stretch":
        raise NotImportedError("it smooths, or keeps the ratio of the sides")
    exact = [after / before for before, after in zip(shape, made, strict=True)]
    place = 1 if call.node.operator == "Upsample" or call.builder.graph.opset < 11 else 2
    told = call.setting("scales")
    if told is None and call.has(place):
        told = call.constant(place).reshape(-1)
    axes = call.integers("axes") or list(range(len(shape)))
    if told is None or len(told) != len(axes):
        return exact
    for axis, scale in zip(axes, told, strict=True):
        exact[axis] = float(scale)
    return exact


def _matrix(call: OnnxCall, side: int, out: int, scale: float) -> Matrix:
    """What each place of the result takes of each place of the input, along one side.

    Raises:
        NotImportedError: it is too large, or samples in a way that is not known.
    """
    if side * out > MOST_IN_MATRIX * 8:
        raise NotImportedError(f"it makes {out} places of {side}")
    matrix = np.zeros((out, side))
    mode = call.setting("mode", "nearest")
    for at in range(out):
        place = _place(call, at, side, out, scale)
        if mode == "nearest":
            rounding = call.setting("nearest_mode", "round_prefer_floor" if call.builder.graph.opset >= 11 else "floor")
            matrix[at, min(max(NEAREST[rounding](place), 0), side - 1)] = 1
        elif mode in ("linear", "bilinear", "cubic"):
            for near, share in _shares(call, place, cubic=mode == "cubic"):
                matrix[at, min(max(near, 0), side - 1)] += share
        else:
            raise NotImportedError(f"its mode is {mode!r}")
    return matrix


def _place(call: OnnxCall, at: int, side: int, out: int, scale: float) -> float:
    """Where a place of the result is stored in the input."""
    way = call.setting("coordinate_transformation_mode", "half_pixel")
    if call.node.operator == "Upsample" or call.builder.graph.opset < 11:
        way = "asymmetric"
    if way == "half_pixel" or (way == "pytorch_half_pixel" and out > 1):
        return (at + 0.5) / scale - 0.5
    if way == "pytorch_half_pixel":
        return 0.0
    if way == "align_corners":
        return at * (side - 1) / (out - 1) if out > 1 else 0.0
    if way == "asymmetric":
        return at / scale
    if way == "half_pixel_symmetric":
        centre = side / 2
        return centre * (1 - out / (scale * side)) + (at + 0.5) / scale - 0.5
    raise NotImportedError(f"it samples by {way!r}")


def _shares(call: OnnxCall, place: float, *, cubic: bool) -> list[tuple[int, float]]:
    """The places that a number is made of, and how much of each."""
    first = floor(place)
    past = place - first
    if not cubic:
        return [(first, 1 - past), (first + 1, past)]
    if call.setting("exclude_outside", 0):
        raise NotImportedError("it leaves out what lies outside")
    bend = float(call.setting("cubic_coeff_a", -0.75))

    def share(far: float) -> float:
        if far <= 1:
            return (bend + 2) * far**3 - (bend + 3) * far**2 + 1
        return bend * far**3 - 5 * bend * far**2 + 8 * bend * far - 4 * bend

    return [(first + near, share(abs(past - near))) for near in (-1, 0, 1, 2)]


def _by_layer(call: OnnxCall, given: OnnxValue, like: OnnxValue, matrices: Sequence[Matrix]) -> OnnxValue | None:
    """What Keras has a layer or an operation for."""
    pairs = [(matrix.shape[1], matrix.shape[0]) for matrix in matrices]
    times = [out // side for side, out in pairs]
    whole = all(side * time == out for (side, out), time in zip(pairs, times, strict=True))
    repeated = whole and all(
        np.array_equal(matrix, np.repeat(np.eye(side), time, 0))
        for matrix, (side, _), time in zip(matrices, pairs, times, strict=True)
    )
    if len(matrices) == 1:
        return call.layer("UpSampling1D", {"size": times[0]}, [given], like) if repeated else None
    if repeated:
        return call.layer("UpSampling2D", {"size": times, "interpolation": "nearest"}, [given], like)
    for interpolation, usual in (("bilinear", _bilinear), ("nearest", _nearest)):
        if all(np.allclose(matrix, usual(*pair), atol=1e-6) for matrix, pair in zip(matrices, pairs, strict=True)):
            if whole and interpolation == "bilinear":
                return call.layer("UpSampling2D", {"size": times, "interpolation": "bilinear"}, [given], like)
            config: dict[str, Any] = {"size": [out for _, out in pairs], "interpolation": interpolation}
            return call.operation(IMAGE, "Resize", {**config, "antialias": False}, [given], like)
    return None


def _bilinear(side: int, out: int) -> Matrix:
    """TensorFlow's, at the centres of pixels."""
    matrix = np.zeros((out, side))
    for at in range(out):
        place = (at + 0.5) * side / out - 0.5
        first = floor(place)
        for near, share in ((first, 1 - (place - first)), (first + 1, place - first)):
            matrix[at, min(max(near, 0), side - 1)] += share
    return matrix


def _nearest(side: int, out: int) -> Matrix:
    """TensorFlow's, likewise."""
    return np.eye(side)[[min(floor((at + 0.5) * side / out), side - 1) for at in range(out)]]


def _along(call: OnnxCall, given: OnnxValue, axis: int, matrix: Matrix) -> OnnxValue:
    """One side resized: by picking places, or by a product with the matrix."""
    out, side = matrix.shape
    if out == side and np.allclose(matrix, np.eye(side)):
        return given
    shape = (*given.shape[:axis], out, *given.shape[axis + 1 :])
    if set(np.unique(matrix)) <= {0.0, 1.0}:
        like = laid(UNKNOWN, shape, channel_last(len(shape)))
        return call.operation(NUMPY, "Take", {"axis": axis - 1}, [given, matrix.argmax(1)], like)
    if matrix.size > MOST_IN_MATRIX:
        raise NotImportedError(f"it makes {out} places of {side}")
    # To the left of a matrix product: [out, side] x [..., side, what follows].
    before = [given.shape[each] for each in range(2, axis)]
    rest = [given.shape[each] for each in range(axis + 1, len(shape))]
    after = int(np.prod([*rest, given.shape[1]]))
    flat = laid(UNKNOWN, (1, *before, side, after), tuple(range(len(before) + 3)))
    seen = (
        given
        if tuple(flat.sides) == given.sides
        else call.layer("Reshape", {"target_shape": list(flat.sides)}, [given], flat)
    )
    made = laid(UNKNOWN, (1, *before, out, after), tuple(range(len(before) + 3)))
    product = call.operation(NUMPY, "Matmul", {}, [np.asarray(matrix, np.float32), seen], made)
    like = laid(UNKNOWN, shape, channel_last(len(shape)))
    if product.sides == like.sides:
        return laid(product.tensor, shape, channel_last(len(shape)))
    return call.layer("Reshape", {"target_shape": list(like.sides)}, [product], like)


RULES: Mapping[str, Callable[[OnnxCall], OnnxValue | list[OnnxValue]]] = {"Resize": resize, "Upsample": resize}
