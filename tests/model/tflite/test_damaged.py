"""Files that are not .tflite files, or are damaged: they give a ModelError and nothing else."""

from __future__ import annotations

import random
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import inspection_text
import mutations
import numpy as np
import one_op
import pytest
import tiny
from ai_edge_litert import schema_py_generated as schema
from one_op import Op, Tensor
from paths import SHARED

from compress.core.errors import ModelError
from compress.model.tflite import graph, macs
from compress.targets import load
from compress.targets.edgetpu.check import check
from compress.targets.edgetpu.placement import place

GOOD = tiny.classifier()


def used(content: bytes) -> bool:
    """Read a file and use all of it; return whether it was accepted."""
    try:
        parsed = graph.parse(content, "m.tflite")
        place(parsed, load("edgetpu")).to_json()
        assert macs.total_macs(parsed) >= 0
        assert macs.parameters(parsed) >= 0
    except ModelError:
        return False
    return True


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
    assert used(GOOD)
    taken = [length for length in range(len(GOOD)) if used(GOOD[:length])]
    assert all(length > 0.95 * len(GOOD) for length in taken)


def models(real: bool) -> list[mutations.Model]:
    """Return small models: ones made here, or some of the smallest real ones."""
    if real:
        paths = sorted(SHARED.glob("edgetpu/pairs/*/*.tflite"), key=lambda path: path.stat().st_size)
        return [mutations.Model(str(path), path.read_bytes()) for path in paths[::4][:8]]
    return [mutations.Model("dense", GOOD), mutations.Model("convolution", edited(lambda source: None))]


def outcome(content: bytes) -> str:
    """Return the answer to a file; "" if it is refused."""
    try:
        return inspection_text.inspection_text(content)
    except ModelError:
        return ""


@pytest.mark.parametrize("real", [False, True], ids=["made here", "real"])
@pytest.mark.parametrize("kind", mutations.MUTATORS)
def test_mutations(kind: str, real: bool) -> None:
    sound = models(real)
    if not sound:
        pytest.skip(f"{SHARED} is not there; CORALLINE_SHARED names the folder of shared files")
    dice = random.Random(kind)
    answers = {model.name: inspection_text.inspection_text(model.content) for model in sound}
    taken, count = 0, 15 if kind == "bombs" else 100  # those that are accepted are large
    for _ in range(count):
        model = dice.choice(sound)
        report = outcome(mutations.mutate(kind, model, dice))
        taken += bool(report)
        if kind == "bits of weights":
            assert report == answers[model.name]
    assert taken < count or kind in ("bits of weights", "one blob for many")


def test_a_little_that_unpacks_to_much_is_refused_before_it_takes_memory() -> None:
    convolution, dice = models(False)[1], random.Random(1)
    bombs = [mutations.bomb(convolution, dice) for _ in range(5)]
    buffers = [schema.BufferT(data=np.ones(size, np.uint8)) for size in (100_000, *[1] * 2000)]
    shared = mutations.one_blob(mutations.Model("", edited(lambda m: setattr(m, "buffers", buffers))), dice)
    for content in (*bombs, shared):
        tracemalloc.start()
        outcome(content)
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert most <= inspection_text.TIMES * len(content) + inspection_text.ROOM
    for content in (max(bombs, key=len), shared):
        with pytest.raises(ModelError, match="it unpacks to far more than it holds"):
            graph.parse(content)


ONES = {"strideH": 1, "strideW": 1, "dilationHFactor": 1, "dilationWFactor": 1}


def edited(change: Callable[[Any], None]) -> bytes:
    """Return the file of a convolution after a change, which may make it invalid."""
    tensors = {"x": Tensor((1, 4, 4, 2)), "w": Tensor((3, 1, 1, 2), data=1), "y": Tensor((1, 4, 4, 3))}
    source = one_op.model(tensors, [Op("CONV_2D", "xw", "y", 1, ONES)], "x", "y")
    change(source)
    return graph.serialize(graph.Graph((), (), (), (), 1, source))


def many(source: Any, name: bytes, count: int) -> None:
    """Give the first tensor a name, and add `count` operators that read it."""
    main = source.subgraphs[0]
    main.tensors[0].name = name
    for _ in range(count):
        operator = schema.OperatorT(inputs=[0, 1], outputs=[len(main.tensors)])
        main.tensors.append(schema.TensorT())
        main.operators.append(operator)


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
    "an input many times": lambda m: setattr(m.subgraphs[0], "inputs", [0] * 4),
    "a tensor made twice": lambda m: m.subgraphs[0].operators.append(m.subgraphs[0].operators[0]),
    "a scale that is no number": lambda m: setattr(m.subgraphs[0].tensors[0].quantization, "scale", [float("nan")]),
    "a long name with each of many operators": lambda m: many(m, b"n" * 100_000, 500),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_impossible_files(change: Callable[[Any], None]) -> None:
    assert used(edited(lambda source: None))
    with pytest.raises(ModelError, match=r"is a damaged \.tflite file"):
        graph.parse(edited(change))


@pytest.mark.parametrize(("lacking", "left"), [("inputs", [0]), ("outputs", [])])
def test_operators_that_lack_something(lacking: str, left: list[int]) -> None:
    parsed = graph.parse(edited(lambda m: setattr(m.subgraphs[0].operators[0], lacking, left)))
    with pytest.raises(ModelError, match=r"operator 0 \(CONV_2D\) lacks an input, an output or a dimension"):
        macs.total_macs(parsed)
    tensors = {"x": Tensor((1, 2)), "y": Tensor((1, 2))}
    parsed = one_op.read(tensors, [Op("FULLY_CONNECTED", "x", "y")], "x", "y")
    with pytest.raises(ModelError, match=r"operator 0 \(FULLY_CONNECTED\) lacks"):
        place(parsed, load("edgetpu"))


UNLIKELY: dict[str, tuple[str, list[Tensor | None], dict[str, int]]] = {
    "no first input": ("CONV_2D", [None, Tensor((3, 1, 1, 2), data=1)], {}),
    "no weights": ("CONV_2D", [Tensor((1, 4, 4, 2)), None], {"strideH": 1, "strideW": 1}),
    "a huge kernel": ("CONV_2D", [Tensor((1, 4, 4, 2)), Tensor((1, 9000, 1, 2), data=1)], {"strideH": 1}),
    "too many axes": ("MEAN", [Tensor((1, 4, 4, 2)), one_op.integers(*[1] * 5000)], {}),
}


@pytest.mark.parametrize(("name", "inputs", "options"), UNLIKELY.values(), ids=UNLIKELY)
def test_operators_that_are_not_as_their_kind_must_be(
    name: str, inputs: list[Tensor | None], options: dict[str, int]
) -> None:
    parsed = one_op.one(name, inputs, Tensor((1, 4, 4, 3)), **options)
    with pytest.raises(ModelError, match="an operator is invalid"):
        check(parsed, load("edgetpu"))


def test_what_many_operators_share_is_looked_at_once() -> None:
    weights = Tensor((30_000, 1, 1, 2), data=1, scales=(0.5,) * 30_000)
    bias = Tensor((30_000,), "INT32", data=0)
    outputs = {f"y{index}": Tensor((1, 4, 4, 30_000)) for index in range(400)}
    operators = [Op("CONV_2D", "xwb", [name], 1, ONES) for name in outputs]
    parsed = one_op.read({"x": Tensor((1, 4, 4, 2)), "w": weights, "b": bias, **outputs}, operators, "x", ["y0"])
    began = time.monotonic()
    assert check(parsed, load("edgetpu")).parameters is not None
    assert time.monotonic() - began < 2  # 10 s if each operator counts the scales again


def test_blockers_that_meet_again_and_again() -> None:
    """Each of many joins waits for one more blocker. The MACs that each blocker keeps on the CPU are still reported."""
    tensors = {"x": Tensor((1, 4, 4, 2), "FLOAT32"), "w": Tensor((2, 1, 1, 2), "FLOAT32", data=1)}
    tensors |= {f"{kind}{index}": Tensor((1, 4, 4, 2), "FLOAT32") for kind in "bj" for index in range(300)}
    operators = [Op("CONV_2D", ["x", "w"], [f"b{index}"]) for index in range(300)]
    operators += [
        Op("CONV_2D", [f"j{index - 1}" if index else "x", "w", f"b{index}"], [f"j{index}"]) for index in range(300)
    ]
    placement = check(one_op.read(tensors, operators, "x", ["j299"]), load("edgetpu"))
    operator_macs = 1 * 4 * 4 * 2 * 2
    assert [blocker.macs for blocker in placement.blockers] == [operator_macs * (301 - index) for index in range(300)]
