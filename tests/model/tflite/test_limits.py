"""Numbers in .tflite files that no real model has are refused when the file is read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tiny

from compress.core.errors import ModelError
from compress.model.tflite import graph, limits
from compress.surface.cli.main import main

Edit = Callable[[Any], object]


def content(source: Any) -> bytes:
    return graph.serialize(SimpleNamespace(source=source))  # type: ignore[arg-type]


def convolution(source: Any) -> Any:
    return next(operator for operator in source.subgraphs[0].operators if hasattr(operator.builtinOptions, "strideH"))


def quantization(source: Any, index: int = 0) -> Any:
    return source.subgraphs[0].tensors[index].quantization


CASES: dict[str, tuple[Edit, str]] = {
    "version": (lambda s: setattr(s.operatorCodes[0], "version", 2**31 - 1), "version is 2147483647; allowed: 1 to"),
    "version 0": (lambda s: setattr(s.operatorCodes[0], "version", 0), "version is 0"),
    "stride": (lambda s: setattr(convolution(s).builtinOptions, "strideH", 0), "strideH of CONV_2D is 0"),
    "dilation": (lambda s: setattr(convolution(s).builtinOptions, "dilationWFactor", -1), "dilationWFactor"),
    "padding": (lambda s: setattr(convolution(s).builtinOptions, "padding", -3), "padding of CONV_2D is -3"),
    "negative scale": (lambda s: setattr(quantization(s), "scale", [-0.5]), "scale of tensor 0 is negative"),
    "infinite scale": (lambda s: setattr(quantization(s), "scale", [float("inf")]), "not a finite number"),
    "zero point": (lambda s: setattr(quantization(s), "zeroPoint", [300]), "zero point of tensor 0 is 300"),
    "zero points": (lambda s: setattr(quantization(s), "zeroPoint", [0, 0, 0]), "1 scales and 3 zero points"),
    "axis": (lambda s: setattr(quantization(s), "quantizedDimension", 9), "quantized dimension of tensor 0 is 9"),
    "rank": (lambda s: setattr(s.subgraphs[0].tensors[0], "shape", [1] * 17), "has the shape"),
    "side": (lambda s: setattr(s.subgraphs[0].tensors[0], "shape", [1, -2]), "has the shape"),
    "elements": (lambda s: setattr(s.subgraphs[0].tensors[0], "shape", [2**20, 2**20]), "has the shape"),
    "zero times many": (lambda s: setattr(s.subgraphs[0].tensors[0], "shape", [0, 2**30, 2**30]), "has the shape"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_number_out_of_range(case: str) -> None:
    edit, message = CASES[case]
    source = graph.parse(tiny.classifier()).source
    edit(source)
    with pytest.raises(ModelError, match=message):
        graph.parse(content(source))


def test_every_option_of_the_schema_has_a_range() -> None:
    """An integer field of a later schema must be added to the table."""
    from ai_edge_litert import schema_py_generated as schema

    other = {"seed", "seed2", "tableId", "keyDtype", "valueDtype", "type", "version", "reduceFunction"}
    other |= {"compositeAttributesFormat"}
    for name in [name for name in vars(schema) if name.endswith("OptionsT") and not name.startswith("Stablehlo")]:
        for option, value in vars(getattr(schema, name)()).items():
            if isinstance(value, int) and not isinstance(value, bool):
                assert option in {*limits.RANGES, *limits.SUBGRAPHS, *other}, f"{name}.{option}"


def test_a_subgraph_that_does_not_exist() -> None:
    from ai_edge_litert import schema_py_generated as schema

    options = schema.WhileOptionsT()
    options.bodySubgraphIndex = 7
    with pytest.raises(ValueError, match="bodySubgraphIndex of WHILE is 7; allowed: -1 to 1"):
        limits.check_options("WHILE", options, 2)


@pytest.mark.parametrize("case", ["version", "negative scale"])
def test_legalize_refuses_it(tmp_path: Path, case: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Until 2026 these two files made `legalize` loop for hours, and abort."""
    source = graph.parse(tiny.classifier()).source
    CASES[case][0](source)
    (tmp_path / "m.tflite").write_bytes(content(source))
    assert main(["legalize", str(tmp_path / "m.tflite"), str(tmp_path / "out.tflite")]) == 4
    assert CASES[case][1] in capsys.readouterr().err
    assert not (tmp_path / "out.tflite").exists()


def test_inputs_that_are_too_large_are_not_run() -> None:
    with pytest.raises(ValueError, match="its inputs have 100,000,000 values"):
        limits.check_runnable([(10_000, 10_000)])
    assert np.prod((1, 640, 640, 3)) < limits.MAX_INPUT_ELEMENTS
