"""The content of compiled models: real ones compared with known facts, and ones made here field by field."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import one_op
import pytest
import tiny
from one_op import Op, Tensor
from packages import ALONE, CACHING, EXECUTION, executable, options
from paths import SHARED

from compress.core.errors import ModelError
from compress.model.tflite import graph
from compress.surface.cli.main import main
from compress.targets.edgetpu import inspection
from darwinn import package


def compiled(path: Path, *custom: bytes) -> Path:
    """A .tflite file with a custom operator for each of these options, and one operator on the CPU."""
    letters = "abcdefgh"[: len(custom) + 2]
    operators = [Op(package.OPERATOR, letters[index], letters[index + 1], custom=True) for index in range(len(custom))]
    operators.append(Op("SOFTMAX", letters[-2], letters[-1]))
    source = one_op.model({letter: Tensor((1, 4)) for letter in letters}, operators, "a", letters[-1])
    for operator, content in zip(source.subgraphs[0].operators, custom, strict=False):
        operator.customOptions = list(content)
    path.write_bytes(graph.serialize(SimpleNamespace(source=source)))
    return path


def test_everything_that_the_package_says(tmp_path: Path) -> None:
    inspection_result = inspection.inspect(
        compiled(tmp_path / "m.tflite", options(EXECUTION, CACHING), options(ALONE, runtime=10))
    )
    report = inspection_result.to_json()
    assert (report["min_runtime"], report["custom_ops"], report["cpu_ops"]) == (14, 2, ["SOFTMAX"])
    assert (report["cached_bytes"], report["streamed_bytes"]) == (4096, 64 + 128)
    assert [executable_facts["type"] for executable_facts in report["executables"]] == [
        "EXECUTION_ONLY",
        "PARAMETER_CACHING",
        "STAND_ALONE",
    ]
    first = report["executables"][0]
    assert (first["parameter_bytes"], first["instruction_bytes"], first["scratch_bytes"]) == (64, 111, 64)
    assert (first["narrow_bytes_per_tile"], first["token"]) == (1024, 99)
    assert first["inputs"] == (
        {
            "name": "in",
            "shape": (4, 6, 3),
            "size_bytes": 96,
            "data_type": "SIGNED_FIXED_POINT8",
            "zero_point": 7,
            "scale": 0.25,
        },
    )
    assert report["inputs"][0]["scale"] == 0.5
    assert "4,096 bytes of parameters, loaded once" in inspection_result.describe()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "0 bytes of options"),
        (b"placeholder code of a program that only claims to compile", ""),
        (options(CACHING, identifier=b"TFL3"), "not of the type DWN1"),
        (options(), "no executables"),
        (options(executable(7, b"")), "an executable of type 7"),
        (options(b"\xff" * 64), ""),
        (options(executable(0, b"", scale=float("nan"))), "a scale is not a finite number"),
        (options(executable(0, b"", inputs=1000)), "unpacks to far more than it holds"),
    ],
)
def test_fakes_are_told_from_what_the_vendors_compiler_makes(tmp_path: Path, content: bytes, reason: str) -> None:
    path = compiled(tmp_path / "fake.tflite", content)
    with pytest.raises(ModelError, match="the vendor's compiler did not make this file") as caught:
        inspection.inspect(path)
    assert caught.value.where == str(path)
    assert reason in str(caught.value)
    with pytest.raises(ModelError, match="it is not compiled for the Edge TPU"):
        inspection.inspect(compiled(path))


def test_damaged_packages_are_errors_or_answers() -> None:
    chance, valid = random.Random(0), options(EXECUTION, CACHING)
    refused = 0
    for _ in range(3000):
        content = bytearray(valid)
        for _ in range(chance.randint(1, 4)):
            content[chance.randrange(len(content))] = chance.randrange(256)
        if chance.random() < 0.2:
            del content[chance.randrange(len(content)) :]
        try:
            package.read(bytes(content))
        except ModelError:
            refused += 1
    assert refused > 100


def test_the_command_and_the_prediction_beside_the_real_thing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model.tflite").write_bytes(tiny.classifier())
    path = compiled(tmp_path / "m.tflite", options(EXECUTION, CACHING))
    command = ["inspect", str(path), "--against", str(tmp_path / "model.tflite")]
    assert main([*command, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    rows = {row["name"]: row for row in report["against"]}
    assert report["cached_bytes"] == rows["cached_bytes"]["real"] == 4096
    assert rows["cpu_ops"] == {"name": "cpu_ops", "predicted": 0, "real": 1}
    assert rows["cached_bytes"]["predicted"] > 0
    assert main(command) == 0
    shown = capsys.readouterr().out
    assert "left on the CPU    SOFTMAX" in shown
    assert "narrow_bytes_per_tile    predicted" in shown
    assert main(["inspect", str(tmp_path / "no.tflite")]) == 4
    assert capsys.readouterr().out == ""


def pairs() -> list[Any]:
    index = SHARED / "edgetpu" / "pairs" / "index.json"
    return json.loads(index.read_text()) if index.exists() else []


@pytest.mark.skipif(not pairs(), reason=f"{SHARED} is not there; CORALLINE_SHARED names the folder of shared files")
@pytest.mark.parametrize("pair", pairs(), ids=lambda pair: pair["name"])
def test_real_compiled_models(pair: dict[str, Any]) -> None:
    report = inspection.inspect(SHARED / "edgetpu" / "pairs" / pair["name"] / "compiled.tflite").to_json()
    known = ("min_runtime", "cached_bytes", "streamed_bytes", "custom_ops", "cpu_ops")
    assert {name: report[name] for name in known} == {name: pair[name] for name in known}
    kinds = {executable_facts["type"] for executable_facts in report["executables"]}
    assert kinds in ({"STAND_ALONE"}, {"EXECUTION_ONLY", "PARAMETER_CACHING"})
    assert all(executable_facts["instruction_bytes"] > 0 for executable_facts in report["executables"])
    assert all(0 <= executable_facts["narrow_bytes_per_tile"] <= 196_608 for executable_facts in report["executables"])
