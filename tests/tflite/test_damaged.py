"""Files that are no .tflite, or a damaged one: a ModelError, and nothing else, however they came about."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from typing import Any

import one_op
import pytest
import tiny
from one_op import Op, Tensor

from compress.edgetpu.placement import place
from compress.errors import ModelError
from compress.target import load
from compress.tflite import arithmetic, graph

GOOD = tiny.classifier()


def used(content: bytes) -> bool:
    """Reads and uses a file all the way; whether it was taken for good."""
    try:
        parsed = graph.parse(content, "m.tflite")
        place(parsed, load("edgetpu")).to_json()
        assert arithmetic.total_macs(parsed) >= 0
        assert arithmetic.parameters(parsed) >= 0
    except ModelError:
        return False
    return True


def test_the_undamaged_one() -> None:
    assert used(GOOD)


@pytest.mark.parametrize(
    "content",
    [b"", b"TFL3", b"\x89PNG\r\n\x1a\n" + bytes(100), b"PK\3\4" + bytes(100), bytes(1000), b"\0\0\0\0TFL2" + GOOD[8:]],
)
def test_another_format(content: bytes) -> None:
    with pytest.raises(ModelError, match=r"m\.tflite: is not a \.tflite file; give a model that a TFLite"):
        graph.parse(content, "m.tflite")


@pytest.mark.parametrize(
    "content",
    [
        b"\0\0\0\0TFL3",
        b"\x08\0\0\0TFL3" + bytes(100),
        b"\xff\xff\xff\xffTFL3" + bytes(100),
        b"\xff\xff\xff\x7fTFL3" + GOOD[8:],
        GOOD[:8],
        GOOD[: len(GOOD) // 2],
    ],
)
def test_not_much_behind_the_identifier(content: bytes) -> None:
    with pytest.raises(ModelError, match=r"m\.tflite: is a damaged \.tflite file"):
        graph.parse(content, "m.tflite")


def test_every_length() -> None:
    taken = [length for length in range(len(GOOD)) if used(GOOD[:length])]
    assert all(length > 0.95 * len(GOOD) for length in taken)


def mutated(content: bytes, dice: random.Random) -> bytes:
    """The content with a few changes, of the kinds that happen and of those that hurt."""
    changed = bytearray(content)
    for _ in range(dice.choice((1, 2, 4, 8))):
        where = dice.randrange(len(changed))
        kind = dice.random()
        if kind < 0.4:
            changed[where] = dice.randrange(256)
        elif kind < 0.6:
            changed[where] ^= 1 << dice.randrange(8)
        elif kind < 0.8:
            where -= where % 4
            changed[where : where + 4] = struct.pack("<I", dice.choice((0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)))
        elif kind < 0.9:
            del changed[where : where + dice.randrange(1, 20)]
        else:
            changed[where:where] = dice.randbytes(dice.randrange(1, 9))
    return bytes(changed)


def test_two_thousand_mutations() -> None:
    dice = random.Random(0)
    taken = sum(used(mutated(GOOD, dice)) for _ in range(2000))
    assert 100 < taken < 1900  # neither all refused nor all taken: the changes hit what matters


def edited(change: Callable[[Any], None]) -> bytes:
    """A convolution whose file says something impossible."""
    tensors = {"x": Tensor((1, 4, 4, 2)), "w": Tensor((3, 1, 1, 2), data=1), "y": Tensor((1, 4, 4, 3))}
    source = one_op.model(tensors, [Op("CONV_2D", "xw", "y", 1)], "x", "y")
    change(source)
    return graph.serialize(graph.Graph((), (), (), (), 1, source))


CHANGES: dict[str, Callable[[Any], None]] = {
    "no subgraph": lambda m: setattr(m, "subgraphs", []),
    "no list of subgraphs": lambda m: setattr(m, "subgraphs", None),
    "no buffers": lambda m: setattr(m, "buffers", None),
    "no codes": lambda m: setattr(m, "operatorCodes", None),
    "an unknown code": lambda m: setattr(m.subgraphs[0].operators[0], "opcodeIndex", 9),
    "a tensor beyond": lambda m: setattr(m.subgraphs[0].operators[0], "inputs", [0, 3]),
    "a tensor before": lambda m: setattr(m.subgraphs[0].operators[0], "outputs", [-2]),
    "an input beyond": lambda m: setattr(m.subgraphs[0], "inputs", [3]),
    "an absent output": lambda m: setattr(m.subgraphs[0], "outputs", [-1]),
    "a buffer beyond": lambda m: setattr(m.subgraphs[0].tensors[0], "buffer", 9),
    "a negative side": lambda m: setattr(m.subgraphs[0].tensors[0], "shape", [1, -4, 4, 2]),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_impossible_files(change: Callable[[Any], None]) -> None:
    assert used(edited(lambda source: None))
    with pytest.raises(ModelError, match=r"is a damaged \.tflite file"):
        graph.parse(edited(change))


LACKING: dict[str, Callable[[Any], None]] = {
    "inputs": lambda m: setattr(m.subgraphs[0].operators[0], "inputs", [0]),
    "outputs": lambda m: setattr(m.subgraphs[0].operators[0], "outputs", []),
}


@pytest.mark.parametrize("change", LACKING.values(), ids=LACKING)
def test_operators_that_lack_something(change: Callable[[Any], None]) -> None:
    parsed = graph.parse(edited(change))
    with pytest.raises(ModelError, match=r"operator 0 \(CONV_2D\) lacks an input, an output or a side"):
        arithmetic.total_macs(parsed)


def test_a_dense_layer_that_lacks_its_weights() -> None:
    tensors = {"x": Tensor((1, 2)), "y": Tensor((1, 2))}
    parsed = one_op.read(tensors, [Op("FULLY_CONNECTED", "x", "y")], "x", "y")
    with pytest.raises(ModelError, match=r"operator 0 \(FULLY_CONNECTED\) lacks"):
        place(parsed, load("edgetpu"))
