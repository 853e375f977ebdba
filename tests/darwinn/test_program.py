"""Programs: their instructions, transfers, addresses, and the operators that are recovered from them."""

from __future__ import annotations

import numpy as np
import pytest
from edgetpu_programs import ALL_TILES, Loops, ProgramMaker, traversal

from compress.core.errors import ModelError
from darwinn import tensor_steps as steps_module
from darwinn.instructions import ADD, PAIR, POOL_AVERAGE, bundles
from darwinn.program import PARAMETER_READ, Program, read_program
from darwinn.program_parameters import (
    ProgramParameters,
    cached_parameters,
    streamed_parameters,
)
from darwinn.recovery import Certainty, RecoveredOperator, layout_text, recover
from darwinn.tensor_steps import StepKind, tensor_steps
from darwinn.traversal import Loop, traversals


def read(maker: ProgramMaker) -> Program:
    return read_program(bundles(maker.finished()))


def test_reading_continues_after_a_bundle_that_is_not_understood() -> None:
    maker = ProgramMaker()
    maker.numbered(0x14, 7)
    maker.unknown()
    maker.number += 1  # the number of the instruction that is not understood
    maker.numbered(0x10, 4, 0b10)
    program = read(maker)
    assert len(program.unknown) == 1
    assert not program.is_complete
    assert [instruction.operation for instruction in program.instructions] == [0x14, 0x10]
    maker = ProgramMaker(number=5)
    maker.numbered(0x10, 4)
    assert read(maker).instructions == []  # an instruction with another number is not one


def test_the_numbers_of_another_stream_begin_again() -> None:
    first, second = ProgramMaker(), ProgramMaker()
    for maker in (first, second):
        maker.numbered(0x14, 7)
    program = read_program(bundles(first.finished() + second.finished()))
    assert program.is_complete
    assert len(program.instructions) == 2


@pytest.mark.parametrize("loops", [[], [(1, 9), (40, 4), (10, 4), (0, 15)], [(24, 3), (936, 3), (48, 19), (1, 24)]])
def test_loops_are_read(loops: Loops) -> None:
    maker = ProgramMaker()
    maker.tensor(traversal(15360, loops), traversal(1024, loops[::-1]))
    program = read(maker)
    source, target = traversals(program.bundles, program.instructions[0].bundle)
    assert source.start == 15360
    assert source.loops == tuple(Loop(*loop) for loop in loops)
    assert target.loops == tuple(Loop(*loop) for loop in loops[::-1])
    last = sum(stride * (count - 1) for stride, count in loops)
    assert source.extent == range(15360, 15360 + 4 * (last + 1))


def test_the_second_operand_of_a_pair_is_read() -> None:
    maker = ProgramMaker()
    maker.tensor(traversal(1000, [(0, 2), (1119, 2), (40, 4)], mode=2), traversal(0, [(1, 4)]), kind=ADD)
    (step,) = tensor_steps(read(maker))
    assert [source.start for source in step.sources] == [1000, 1000 + 4 * 1120]


def parameters(size: int, *, offset: int = 0, tiles: tuple[int, ...] = (1,)) -> ProgramParameters:
    return ProgramParameters(0, offset, size, tiles, is_cached=True)


def recovered(maker: ProgramMaker, *sizes: int) -> list[RecoveredOperator]:
    """Return the operators of a program with parameters of these sizes, which are not matrices of zeros and ones."""
    regions = [parameters(size, offset=64 * index) for index, size in enumerate(sizes)]
    return recover(tensor_steps(read(maker)), regions, [np.full(size, 7, np.uint8) for size in sizes])


# A tile of 6x5 outputs with 128 channels, of a 3x3 convolution with stride 2 over 16 channels; rows of 13 positions.
SOURCE = traversal(4096, [(1, 2), (4, 3), (52, 3), (8, 5), (104, 6), (2, 2), (0, 2)])
TARGET = traversal(0, [(1, 16), (32, 5), (160, 6), (16, 2)])


def test_a_convolution_is_recovered() -> None:
    maker = ProgramMaker()
    maker.tensor(SOURCE, TARGET)
    (operator,) = recovered(maker, 128 * (9 * 16 + 12))
    assert operator.names == ("CONV_2D",)
    assert operator.certainty is Certainty.CONFIRMED
    geometry = operator.geometry
    assert geometry is not None
    assert (geometry.kernel, geometry.stride) == ((3, 3), (2, 2))
    assert (geometry.input_blocks, geometry.output_blocks) == (4, 32)
    assert (operator.height, operator.width) == (24, 20)
    assert operator.cycles == 2 * 9 * 30 * 2 * 2
    assert layout_text(operator) == "128 rows of 144 bytes of weights and 12 bytes of bias and scale"
    (operator,) = recovered(maker, 64)
    assert (operator.certainty, operator.parameters) == (Certainty.INFERRED, [])


def test_parameters_of_zeros_and_ones_move_data() -> None:
    maker = ProgramMaker()
    maker.tensor(traversal(0, [(1, 3)]), traversal(64, [(1, 4)]), rows=16, tiles=1)
    size = 16 * (12 + 4)
    (operator,) = recover(tensor_steps(read(maker)), [parameters(size)], [np.zeros(size, np.uint8)])
    assert "CONCATENATION" in operator.names


def test_a_depthwise_convolution_is_recovered() -> None:
    maker = ProgramMaker()
    source = traversal(0, [(24, 3), (312, 3), (24, 11), (312, 7), (1, 24)])
    maker.tensor(source, traversal(65536, [(24, 77), (1, 24)]), rows=4)
    (operator,) = recovered(maker, 24 * (16 * 9 + 48))
    assert operator.names == ("DEPTHWISE_CONV_2D",)
    assert operator.geometry is not None
    assert (operator.geometry.kernel, operator.geometry.stride) == ((3, 3), (1, 1))
    assert (operator.height, operator.width, operator.geometry.output_blocks) == (28, 44, 24)


def test_a_dense_layer_is_divided_among_tiles() -> None:
    maker = ProgramMaker()
    maker.tensor(traversal(0, [(1, 64)]), traversal(256, [(1, 16)]), tiles=0b1111)
    (operator,) = recovered(maker, 256 * (256 + 8))
    assert operator.names == ("FULLY_CONNECTED", "CONV_2D")
    assert operator.positions == 1
    assert operator.output_blocks == 64


def test_a_step_with_the_parameters_of_an_earlier_one_is_a_pass_of_it() -> None:
    maker = ProgramMaker()
    maker.tensor(SOURCE, TARGET)
    maker.tensor(traversal(9000, [(1, 12), (12, 30)]), traversal(60000, [(1, 4), (4, 30)]), rows=16, multiplier=2)
    maker.tensor(SOURCE, traversal(32768, [(1, 16), (32, 5), (160, 6), (16, 2)]))
    first, second = recovered(maker, 128 * (9 * 16 + 12), 16 * (48 + 4))
    assert (first.passes, first.steps) == (2, [0, 2])
    assert (second.passes, second.steps) == (1, [1])


def test_the_tiles_that_are_read_tell_a_pass_from_the_next_operator() -> None:
    maker = ProgramMaker()
    size = 48 * (48 + 4)
    for start, stop, tiles in ((0, 4096, 1), (4096, 8192, 2), (1440, 12288, 1)):
        maker.tensor(traversal(start, [(1, 12), (12, 30)]), traversal(stop, [(1, 12), (12, 30)]), rows=48)
        maker.numbered(PARAMETER_READ, 4, tiles)
    regions = [parameters(size, offset=size * index, tiles=(tiles,)) for index, tiles in enumerate((1, 2, 4))]
    first, second = recover(tensor_steps(read(maker)), regions, [np.full(size, 7, np.uint8)] * 3)
    assert (first.steps, first.passes) == ([0, 2], 2)
    assert (second.steps, second.passes) == ([1], 1)


def test_an_operator_reads_what_was_written_last_at_its_addresses() -> None:
    maker = ProgramMaker()
    chain = [(0, 4096), (4096, 8192), (8192, 0), (0, 4096)]
    for number, (start, stop) in enumerate(chain):
        maker.tensor(
            traversal(start, [(1, 12), (12, 30)]), traversal(stop, [(1, 12), (12, 30)]), rows=48, multiplier=number + 1
        )
    operators = recovered(maker, *[48 * (48 + 4)] * 4)
    assert [operator.reads for operator in operators] == [(-1,), (0,), (1,), (2,)]


def test_instructions_for_other_tiles_with_the_same_numbers_are_one_step() -> None:
    maker = ProgramMaker()
    for tiles in (0x0777, 0x0888, 0x7000, 0x8000):
        maker.tensor(SOURCE, TARGET, tiles=tiles)
    maker.tensor(SOURCE, TARGET, tiles=0x0777)
    steps = tensor_steps(read(maker))
    assert [step.tiles for step in steps] == [ALL_TILES, 0x0777]


def test_a_move_is_not_an_operator_with_weights() -> None:
    maker = ProgramMaker()
    maker.tensor(traversal(0, [(1, 3)], mode=1), traversal(0, [(1, 3)]), kind=PAIR, rows=4)
    (step,) = tensor_steps(read(maker))
    assert step.kind is StepKind.PRODUCT
    assert step.sources == []


def test_the_window_of_an_average_is_read() -> None:
    maker = ProgramMaker()
    maker.tensor(traversal(0, [(0, 2), (0, 3), (1, 16)]), traversal(64, [(1, 16)]), kind=POOL_AVERAGE, multiplier=9)
    (operator,) = recovered(maker)
    assert operator.names == ("AVERAGE_POOL_2D", "MEAN")
    assert operator.window == (3, 2)
    assert operator.reads == ()


def test_too_many_steps_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps_module, "MAX_STEPS", 2)
    maker = ProgramMaker()
    for number in range(3):
        maker.tensor(SOURCE, TARGET, multiplier=number)
    with pytest.raises(ModelError, match="more than 2 steps"):
        tensor_steps(read(maker))


def test_the_parts_of_a_caching_program_are_grouped_by_operator() -> None:
    maker = ProgramMaker()
    maker.parameters([(0, 0b1)])
    maker.parameters([(10, 0b10), (20, 0b100)])
    maker.parameters([(30, 0b1000)])
    groups = cached_parameters(read(maker), 0, 64 * 40)
    extents = [(0, 640, (0b1,)), (640, 1280, (0b10, 0b100)), (1920, 640, (0b1000,))]
    assert [(group.offset, group.size_bytes, group.tiles) for group in groups] == extents
    assert cached_parameters(read(maker), 0, 64 * 30) == []  # the last part would be empty
    maker = ProgramMaker()
    for line in (0, 60_000, 70_000):  # the lines of a long stream are counted on
        maker.parameters([(line, 1)])
    assert [group.offset // 64 for group in cached_parameters(read(maker), 0, 64 * 80_000)] == [0, 60_000, 70_000]


def test_streamed_parameters_are_the_transfers_of_the_program() -> None:
    """Parameters that are streamed again are the same."""
    groups = streamed_parameters([(None, 512), (None, 1024)], 0, 1536)
    assert [group.extent for group in groups] == [range(512), range(512, 1536)]
    assert streamed_parameters([(None, 512), (None, 1024)], 0, 1537) == []
    groups = streamed_parameters([(0, 512), (512, 64), (0, 512), (512, 64)], 0, 576)
    assert [group.extent for group in groups] == [range(512), range(512, 576)]
    assert streamed_parameters([(0, 512), (512, 64), (0, 512)], 0, 600) == []


def test_streamed_parameters_of_one_operator_can_be_several_transfers() -> None:
    maker = ProgramMaker()
    maker.tensor(SOURCE, TARGET)
    size = 128 * (9 * 16 + 12)
    parts = streamed_parameters([(None, 64 * 100), (None, size - 64 * 100)], 0, size)
    contents = [np.full(part.size_bytes, 7, np.uint8) for part in parts]
    (operator,) = recover(tensor_steps(read(maker)), parts, contents)
    assert operator.certainty is Certainty.CONFIRMED
    assert [group.size_bytes for group in operator.parameters] == [size]
