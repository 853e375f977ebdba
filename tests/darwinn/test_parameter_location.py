"""The order of the numbers in a region, and the search for regions in compiled files that are made here."""

from __future__ import annotations

import struct

import numpy as np
import packages
import pytest
import tiny
from numpy.typing import NDArray

from compress.core.errors import ModelError
from compress.model.tflite import graph
from compress.model.tflite.graph import Graph
from darwinn import compiled_file
from darwinn.parameter_layout import ALIGNMENT, Matrix, NumberKind, Values, depthwise, vector
from darwinn.parameter_location import LeftoverKind, ParameterLocation, locate
from darwinn.stored_parameters import Single, stored_parameters


def values(outputs: int, weights: int) -> Values:
    return Values(
        {
            NumberKind.ZERO_POINT: np.full(1, 128, np.uint32),
            NumberKind.BIAS: np.arange(1, outputs + 1, dtype=np.int32),
            NumberKind.WEIGHT: np.arange(weights, dtype=np.uint8),
        }
    )


def test_the_order_of_a_convolution() -> None:
    """Two outputs, two taps, 6 channels in two blocks: a block of 4 channels has the rows of all outputs."""
    positions = np.arange(24, dtype=np.int32).reshape(2, 2, 6)
    matrix = Matrix(values(2, 24), positions, 4, (NumberKind.BIAS,))
    assert matrix.inner_blocks == [2, 1]
    region = matrix.layout_of(1).encode(matrix.values)
    assert len(region) == matrix.size_bytes == 4 * (4 + 2 * 8)
    assert region[:16].view(np.int32).tolist() == [1, 2, 0, 0]
    blocks = region[16:].reshape(4, 4, 4)
    assert blocks[0].tolist() == [[0, 1, 2, 3], [12, 13, 14, 15], [128] * 4, [128] * 4]
    assert blocks[1][:2].tolist() == [[6, 7, 8, 9], [18, 19, 20, 21]]  # the second tap before the second block
    assert blocks[2][:2].tolist() == [[4, 5, 128, 128], [16, 17, 128, 128]]
    assert matrix.layout_of(2).encode(matrix.values)[32:36].tolist() == [4, 5, 128, 128]


def test_the_rows_of_a_second_group() -> None:
    """After the outputs in whole blocks of 4, weights are 0 and multipliers are 0 or 1."""
    numbers = Values(
        {
            NumberKind.ZERO_POINT: np.full(66, 128, np.uint32),
            NumberKind.MULTIPLIER: np.full(66, 0.25, np.float32),
            NumberKind.WEIGHT: np.full(66 * 4, 7, np.uint8),
        }
    )
    positions = np.arange(66 * 4, dtype=np.int32).reshape(66, 1, 4)
    matrix = Matrix(numbers, positions, 128, (NumberKind.MULTIPLIER, NumberKind.ZERO_POINT))
    second = matrix.layout_of(1, ones=True).encode(numbers)[matrix.size_bytes // 2 :]
    assert second[:256].view(np.float32).tolist() == [0.25] * 4 + [1.0] * 60
    assert second[256:512].view(np.uint32).tolist() == [128] * 4 + [0] * 60
    assert second[512:].tolist() == [7] * 8 + [128] * 8 + [0] * 240


def test_the_diagonals_of_a_depthwise_convolution() -> None:
    positions = np.arange(10, dtype=np.int32).reshape(5, 2, 1)
    matrix = Matrix(values(5, 10), positions, 4, (NumberKind.BIAS,))
    region = depthwise(matrix).encode(matrix.values)
    assert len(region) == 2 * (16 + 2 * 16)
    assert region[16:32].reshape(4, 4).diagonal().tolist() == [0, 2, 4, 6]
    assert region[32:48].reshape(4, 4).diagonal().tolist() == [1, 3, 5, 7]
    assert region[48:64].view(np.int32).tolist() == [5, 0, 0, 0]
    assert region[64:80].reshape(4, 4).diagonal().tolist() == [8, 128, 128, 128]


def test_a_vector_and_other_numbers() -> None:
    numbers = Values({NumberKind.CONSTANT: np.array([3, 5, 7, 9, 11], np.int32)})
    layout = vector(numbers)
    region = layout.encode(numbers)
    assert (len(region), region[:16].view(np.int32).tolist(), region[16:64].any()) == (128, [3, 5, 7, 9], False)
    region[64] = 12
    (difference,) = layout.differences(region, numbers)
    assert (difference.index, difference.expected, difference.actual) == (4, 11, 12)
    with pytest.raises(ModelError, match="its parameters are 4 x constant; the layout is for 5 x constant"):
        layout.encode(Values({NumberKind.CONSTANT: np.zeros(4, np.int32)}))


def blob(model: Graph) -> NDArray[np.uint8]:
    """The parameters of all operators as the compiler would write them, one after another."""
    regions = []
    for operator in model.operators:
        for part in stored_parameters(operator, model):
            choice = part.choices[0]
            layout = choice.usual_layout if isinstance(choice, Single) else choice.layout_of(choice.inner_blocks[-1])
            region = layout.encode(choice.values)
            regions.append(np.pad(region, (0, -len(region) % ALIGNMENT)))
    return np.concatenate(regions)


def located(content: bytes, parameters: NDArray[np.uint8]) -> ParameterLocation:
    executables = [packages.executable(1, parameters.tobytes()), packages.executable(2, b"")]
    file = compiled_file.parse(packages.compiled(content, executables=executables))
    model = graph.parse(content)
    return locate(file, model, model.operators)


def test_every_byte_is_accounted_for() -> None:
    content = tiny.classifier((8, 8, 3), 10, filters=24)
    parameters = blob(graph.parse(content))
    location = located(content, parameters)
    assert location.is_complete
    covered = [part.extent for part in (*location.regions, *location.leftovers)]
    assert {place for extent in covered for place in extent} == set(range(len(parameters)))


def test_bytes_of_no_operator() -> None:
    content = tiny.classifier((8, 8, 3), 10, filters=24)
    strange = np.arange(ALIGNMENT, dtype=np.uint8)
    location = located(content, np.concatenate([blob(graph.parse(content)), strange]))
    assert not location.is_complete
    assert [len(leftover.extent) for leftover in location.leftovers if leftover.kind is LeftoverKind.UNKNOWN] == [
        ALIGNMENT
    ]


def test_a_region_with_other_numbers_and_one_that_is_missing() -> None:
    content = tiny.classifier((8, 8, 3), 10, filters=24)
    parameters = blob(graph.parse(content))
    region = located(content, parameters).regions[0]
    place = int(np.flatnonzero(~region.layout.padding)[-1])
    parameters[region.offset + place] ^= 1
    (changed_region,) = [candidate for candidate in located(content, parameters).regions if not candidate.is_equal]
    assert (changed_region.operator.index, changed_region.offset) == (region.operator.index, region.offset)
    noise = np.random.default_rng(0).integers(1, 255, len(parameters), np.uint8)
    assert {missing_parameters.operator.index for missing_parameters in located(content, noise).missing} >= {
        region.operator.index
    }


def test_positions_are_those_of_the_bytes_in_the_file() -> None:
    file = compiled_file.parse(packages.compiled(tiny.classifier()))
    caching, execution = file.executables
    assert file.bytes_at(caching.parameters) == b"p" * 4096
    assert [file.bytes_at(stream) for stream in execution.instructions] == [b"i" * 100, b"j" * 11]
    assert caching.token_position is not None
    assert struct.unpack_from("<Q", file.content, caching.token_position) == (99,)
    layer = execution.outputs[0]
    assert layer.zero_point_position is not None
    assert layer.scale_position is not None
    assert struct.unpack_from("<i", file.content, layer.zero_point_position) == (7,)
    assert struct.unpack_from("<f", file.content, layer.scale_position) == (0.25,)
