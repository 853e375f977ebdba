"""The compile stage: with the vendor's compiler, played by a script, and without."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
from pydantic import ValidationError

from compress.edgetpu.compiler import HOW_TO_COMPILE
from compress.errors import ModelError, StageError
from compress.stage import MODEL_EDGETPU, MODEL_TFLITE, Artifact, Context, Kind
from compress.stages.compile import Compile
from compress.target import load

SCRIPT = """\
import pathlib, sys
model, folder = pathlib.Path(sys.argv[-1]), pathlib.Path(sys.argv[3])
(folder / (model.stem + "_edgetpu.tflite")).write_bytes(b"compiled " + model.read_bytes())
(folder / (model.stem + "_edgetpu.log")).write_text("the table again")
print("On-chip memory used for caching model parameters: 1.25KiB")
print("Off-chip memory used for streaming uncached model parameters: 0.00B")
print("Compilation succeeded! \\u2713")
"""


@pytest.fixture
def given(tmp_path: Path) -> Callable[..., Artifact]:
    def make(content: bytes = tiny.classifier()) -> Artifact:
        folder = tmp_path / "given"
        folder.mkdir(exist_ok=True)
        (folder / MODEL_TFLITE).write_bytes(content)
        return Artifact("0" * 64, Kind.TFLITE, folder, {MODEL_TFLITE: hashlib.sha256(content).hexdigest()}, {}, 0.0)

    return make


@pytest.fixture
def context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Context:
    """An empty folder, and no compiler on PATH."""
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    (tmp_path / "work").mkdir()
    nothing: Any = None
    return Context("tiny", tmp_path / "work", nothing, nothing, load("edgetpu"), 0, False, tiny.Notes())


@pytest.fixture
def program(tmp_path: Path) -> Callable[..., Path]:
    def write(body: str = SCRIPT, name: str = "edgetpu_compiler") -> Path:
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!{sys.executable} -IX utf8\n{body}", encoding="utf-8")
        path.chmod(0o755)
        return path

    return write


def files(context: Context) -> list[str]:
    return sorted(path.name for path in context.folder.iterdir())


def test_without_a_compiler(given: Any, context: Context) -> None:
    artifact = given()
    facts = Compile().run(artifact, context)
    assert files(context) == [MODEL_TFLITE]
    assert (context.folder / MODEL_TFLITE).read_bytes() == artifact.file(MODEL_TFLITE).read_bytes()
    assert facts["compiled"] is False
    assert facts["reason"] == "not compiled: edgetpu_compiler was not found"
    assert facts["how_to_compile"] == HOW_TO_COMPILE
    assert facts["placement"]["summary"] == "all 2 operators would run on the Edge TPU"
    assert facts["placement"]["compiles"] is True
    assert "report_on_chip_bytes" not in facts
    json.dumps(facts, allow_nan=False)


@pytest.mark.parametrize("named", [True, False])
def test_with_a_compiler(given: Any, context: Context, program: Any, named: bool) -> None:
    path = program(name="mine" if named else "edgetpu_compiler")
    artifact = given()
    facts = Compile(compiler=str(path) if named else None).run(artifact, context)
    assert files(context) == sorted([MODEL_TFLITE, MODEL_EDGETPU, "compiler.log"])
    model = artifact.file(MODEL_TFLITE).read_bytes()
    assert (context.folder / MODEL_TFLITE).read_bytes() == model
    assert (context.folder / MODEL_EDGETPU).read_bytes() == b"compiled " + model
    assert (context.folder / "compiler.log").read_text(encoding="utf-8").endswith("Compilation succeeded! \u2713\n")
    assert facts["compiled"] is True
    assert (facts["report_on_chip_bytes"], facts["report_off_chip_bytes"]) == (1280, 0)
    assert "reason" not in facts
    assert facts["placement"]["compiles"] is True
    json.dumps(facts, allow_nan=False)


def test_a_compiler_that_fails(given: Any, context: Context, program: Any) -> None:
    program("print('Internal compiler error. Aborting!')\nraise SystemExit(1)")
    with pytest.raises(StageError, match=r"the compiler failed \(exit code 1\): Internal compiler error\. Aborting!"):
        Compile().run(given(), context)


def test_a_compiler_that_takes_too_long(given: Any, context: Context, program: Any) -> None:
    program("import time\ntime.sleep(600)")
    with pytest.raises(StageError, match=r"longer than 0\.2 s"):
        Compile(timeout_s=0.2).run(given(), context)


def test_a_setting_that_names_no_program(given: Any, context: Context, tmp_path: Path) -> None:
    stage = Compile(compiler=str(tmp_path))
    for ask in (stage.environment, lambda: stage.run(given(), context)):
        with pytest.raises(StageError, match=r"is not a program that can be run; check compile\.compiler"):
            ask()


def test_a_float_model(given: Any, context: Context) -> None:
    placement = Compile().run(given(tiny.classifier(int8=False)), context)["placement"]
    assert placement["compiles"] is False
    assert placement["failure"] == "no operator can run on the Edge TPU; is the model quantized to full integer?"
    assert {op["placement"] for op in placement["ops"]} == {"cpu"}


def test_a_file_that_is_no_model(given: Any, context: Context) -> None:
    with pytest.raises(ModelError, match=r"is not a \.tflite file"):
        Compile().run(given(b"no model"), context)


def test_the_compiler_is_part_of_the_key(context: Context, program: Any) -> None:
    stage = Compile()
    assert stage.environment() == {"compiler": "none"}
    program()
    first = stage.environment()["compiler"]
    program(SCRIPT + "# newer")
    assert len({first, stage.environment()["compiler"], "none"}) == 3


def test_only_where_there_is_an_accelerator() -> None:
    stage = Compile()
    assert stage.skip(Kind.TFLITE, from_file=False, target=load("edgetpu")) is None
    assert stage.skip(Kind.TFLITE, from_file=False, target=load("cpu")) == "the target cpu needs no compiler"


@pytest.mark.parametrize("settings", [{"timeout_s": 0.0}, {"timeout_s": 1e6}, {"compiler": 1}, {"timeout": 5.0}])
def test_bad_settings(settings: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Compile(**settings)
