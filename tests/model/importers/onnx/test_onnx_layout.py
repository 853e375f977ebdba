"""The tracked positions of values, compared with numpy, which really moves them."""

from __future__ import annotations

from math import prod

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from compress.model.importers.onnx import layout
from compress.model.importers.onnx.layout import OnnxValue, in_shape, laid, transposed
from compress.model.ir.keras_graph import LayerOutput

SHAPES = st.lists(st.sampled_from([1, 1, 2, 3, 4, 6]), min_size=1, max_size=5).map(tuple)
HERE = LayerOutput("here")


def agrees(value: OnnxValue, numbers: np.ndarray, stored: np.ndarray) -> None:
    """Check that the network stores the graph's values at the positions that the `OnnxValue` states."""
    assert value.shape == numbers.shape
    assert np.array_equal(numbers.reshape(-1)[value.positions], stored)
    assert np.array_equal(value.placed(numbers).reshape(-1), stored)


@given(SHAPES, st.data())
def test_reshapes_and_transposes_are_kept_track_of(shape: tuple[int, ...], data: st.DataObject) -> None:
    numbers = np.arange(prod(shape)).reshape(shape)
    order = tuple(data.draw(st.permutations(range(len(shape)))))
    value, stored = laid(HERE, shape, order), numbers.transpose(order).reshape(-1)
    for _ in range(data.draw(st.integers(0, 4))):
        agrees(value, numbers, stored)
        if data.draw(st.booleans()):
            order = tuple(data.draw(st.permutations(range(numbers.ndim))))
            turned = transposed(value, order)
            if turned is None:  # this transposition is not tracked, so there is nothing to check
                return
            value, numbers = turned, numbers.transpose(order)
        else:
            target = data.draw(st.sampled_from([(-1,), (1, -1), (-1, 1), (*numbers.shape, 1), numbers.shape[::-1]]))
            numbers = numbers.reshape(target)
            value = in_shape(value, numbers.shape)
    agrees(value, numbers, stored)


@given(SHAPES, st.data())
def test_the_natural_order_is_one_that_moves_nothing(shape: tuple[int, ...], data: st.DataObject) -> None:
    order = tuple(data.draw(st.permutations(range(len(shape)))))
    value = laid(HERE, shape, order)
    natural_order = layout.natural(value)
    assert natural_order is not None
    assert sorted(natural_order) == list(range(len(shape)))
    again = laid(HERE, shape, natural_order)
    assert (again.parts, again.order) == (value.parts, value.order)


def test_channels_that_are_spread_have_no_natural_order() -> None:
    value = laid(HERE, (1, 6, 4, 5), (0, 2, 3, 1))
    assert layout.natural(in_shape(value, (1, 120))) is None
    shuffled = transposed(in_shape(value, (1, 2, 3, 4, 5)), (0, 2, 1, 3, 4))
    assert shuffled is not None
    assert layout.natural(in_shape(shuffled, (1, 6, 4, 5))) is None
    assert layout.natural(shuffled) == (0, 3, 4, 2, 1)
