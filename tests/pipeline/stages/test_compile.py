"""The compile stage: with a stand-in for the vendor's compiler, with a cache, and with neither."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
from packages import compiled
from pydantic import ValidationError
from stand_in import CHANCE, LOG, VERSION, Answer, Programs, success

from compress.core.artifact import MODEL_COMPILED, MODEL_TFLITE, Artifact, Kind
from compress.core.errors import ModelError, StageError
from compress.learning.context import Context
from compress.pipeline.record import placement as recorded
from compress.pipeline.stages.compile import Compile
from compress.pipeline.stages.package import Package
from compress.results.run import StageRecord
from compress.targets import load
from compress.targets.edgetpu.compiler import HOW_TO_COMPILE

MODEL = tiny.classifier()


@pytest.fixture
def make_artifact(tmp_path: Path) -> Callable[..., Artifact]:
    def make(content: bytes = MODEL) -> Artifact:
        folder = tmp_path / "given"
        folder.mkdir(exist_ok=True)
        (folder / MODEL_TFLITE).write_bytes(content)
        return Artifact("0" * 64, Kind.TFLITE, folder, {MODEL_TFLITE: hashlib.sha256(content).hexdigest()}, {}, 0.0)

    return make


@pytest.fixture
def notes() -> tiny.Notes:
    return tiny.Notes()


@pytest.fixture
def context(tmp_path: Path, programs: Programs, notes: tiny.Notes, monkeypatch: pytest.MonkeyPatch) -> Context:
    """A context with an empty folder, and with only the stand-ins on PATH."""
    monkeypatch.setenv("PATH", str(programs.folder))
    (tmp_path / "work").mkdir()
    nothing: Any = None
    return Context("tiny", tmp_path / "work", nothing, nothing, load("edgetpu"), 0, False, notes)


def files(context: Context) -> list[str]:
    return sorted(path.name for path in context.folder.iterdir())


def test_without_a_compiler(make_artifact: Any, context: Context) -> None:
    artifact = make_artifact()
    facts = Compile().run(artifact, context)
    assert files(context) == [MODEL_TFLITE]
    assert (context.folder / MODEL_TFLITE).read_bytes() == artifact.file(MODEL_TFLITE).read_bytes()
    assert facts["compiled"] is False
    assert facts["reason"] == (
        "not compiled: edgetpu_compiler was not found; run `edgetpu_compiler -s model.tflite` on x86-64 Linux"
    )
    assert facts["how_to_compile"] == HOW_TO_COMPILE
    assert facts["placement"]["summary"] == "all 2 operators would run on the Edge TPU"
    assert facts["placement"]["compiles"] is True
    assert [row["op"] for row in facts["expected"]["operations"]] == ["CONV_2D", "FULLY_CONNECTED"]
    assert "report_on_chip_bytes" not in facts
    assert facts["expected_latency"].keys() == set(load("edgetpu").cost.hosts)
    for latency in facts["expected_latency"].values():
        assert latency["low_ms"] < latency["latency_ms"] < latency["high_ms"]
    json.dumps(facts, allow_nan=False)


@pytest.mark.parametrize("named", [True, False])
def test_with_a_compiler(make_artifact: Any, context: Context, programs: Programs, named: bool) -> None:
    path = programs.compiler(success(MODEL), name="mine" if named else "edgetpu_compiler")
    facts = Compile(compiler=str(path) if named else None).run(make_artifact(), context)
    assert files(context) == sorted([MODEL_TFLITE, MODEL_COMPILED, "compiler.log"])
    assert (context.folder / MODEL_TFLITE).read_bytes() == MODEL
    assert (context.folder / MODEL_COMPILED).read_bytes() == compiled(MODEL)
    assert (context.folder / "compiler.log").read_text(encoding="utf-8") == LOG
    assert facts["compiled"] is True
    assert (facts["report_on_chip_bytes"], facts["report_off_chip_bytes"]) == (1280, 0)
    assert facts["reports"][0]["version"] == VERSION
    assert facts["expected"]["operations"] == facts["reports"][0]["operations"]
    assert facts["placement"]["summary"] == "2 of 2 operators run on the Edge TPU"
    assert "reason" not in facts
    json.dumps(facts, allow_nan=False)


def test_what_the_compiler_did_otherwise(
    make_artifact: Any, context: Context, programs: Programs, notes: tiny.Notes
) -> None:
    """The placement is that of the compiled model, not the predicted one, and every difference is reported."""
    late = "More than one subgraph is not supported"
    log = LOG.replace("FULLY_CONNECTED                1          Mapped to Edge TPU", f"FULLY_CONNECTED 1 {late}")
    programs.compiler(Answer(log, {MODEL_COMPILED: compiled(MODEL, on_cpu=1)}))
    facts = Compile().run(make_artifact(), context)
    assert [(op["placement"], op["status"]) for op in facts["placement"]["ops"]] == [
        ("tpu", "Mapped to Edge TPU"),
        ("cpu", late),
    ]
    assert facts["placement"]["summary"] == "1 of 2 operators run on the Edge TPU"
    assert facts["placement"]["macs"]["cpu"] > 0
    differences = [difference for difference in facts["differences"] if "bytes" not in difference["name"]]
    assert differences == [
        {"name": "FULLY_CONNECTED: Mapped to Edge TPU", "predicted": 1, "real": 0},
        {"name": f"FULLY_CONNECTED: {late}", "predicted": 0, "real": 1},
    ]
    assert len(notes.noted) == len(facts["differences"])
    assert f"FULLY_CONNECTED: {late}: predicted 0, compiler 1" in notes.noted
    shown = recorded({"compile": StageRecord("compile", "compile", "done", facts=facts)})
    assert shown is not None
    assert shown.compiled is True
    assert shown.ops[1].placement == "cpu"


def test_a_cached_result_needs_no_compiler(
    make_artifact: Any, context: Context, programs: Programs, tmp_path: Path
) -> None:
    """The result is identical, including its facts."""
    stage = Compile(cache=str(tmp_path / "cache"))
    path = programs.compiler(success(MODEL))
    with_it = stage.run(make_artifact(), context)
    left = {name: (context.folder / name).read_bytes() for name in files(context)}
    path.unlink()
    for name in files(context):
        (context.folder / name).unlink()
    assert stage.run(make_artifact(), context) == with_it
    assert {name: (context.folder / name).read_bytes() for name in files(context)} == left
    assert len(programs.asked()) == 1
    other = stage.run(make_artifact(tiny.classifier(seed=1)), context)
    assert other["reason"] == (
        "not compiled: edgetpu_compiler was not found and no result is cached; "
        "run `edgetpu_compiler -s model.tflite` on x86-64 Linux"
    )


def test_a_run_without_a_compiler_looks_again_when_the_cache_has_grown(
    make_artifact: Any, context: Context, programs: Programs, tmp_path: Path
) -> None:
    stage = Compile(cache=str(tmp_path / "cache"))
    before = stage.target_environment(load("edgetpu"))
    assert stage.target_environment(load("edgetpu")) == before
    path = programs.compiler(success(MODEL))
    stage.run(make_artifact(), context)
    path.unlink()
    assert stage.target_environment(load("edgetpu")) != before


def test_a_compiler_that_fails(make_artifact: Any, context: Context, programs: Programs, notes: tiny.Notes) -> None:
    programs.compiler(Answer(CHANCE, exit_code=1))
    with pytest.raises(StageError, match=r"the compiler failed: .*exit code 1, Internal compiler error"):
        Compile(retries=1).run(make_artifact(), context)
    assert len(programs.asked()) == 2
    assert notes.noted[-1] == CHANCE


def test_a_setting_that_names_no_program(make_artifact: Any, context: Context, tmp_path: Path) -> None:
    stage = Compile(compiler=str(tmp_path))
    assert stage.target_environment(load("edgetpu")) == {"compiler": "none"}
    with pytest.raises(StageError, match=r"is not an executable program; check compile\.compiler"):
        stage.run(make_artifact(), context)


@pytest.mark.parametrize("key", ["docker", "ssh"])
def test_somewhere_else(
    make_artifact: Any, context: Context, programs: Programs, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    monkeypatch.setenv("PATH", f"{programs.folder}:/usr/bin:/bin")
    programs.ssh()
    programs.docker()
    programs.compiler(success(MODEL))
    facts = Compile(**{key: "coral"}).run(make_artifact(), context)
    assert facts["compiled"] is True
    assert (context.folder / "compiler.log").read_text() == LOG
    assert len(programs.asked(f"{key}-asked")) == 1


def test_segments(make_artifact: Any, context: Context, programs: Programs) -> None:
    names = [f"model_segment_{index}_of_2_edgetpu.tflite" for index in range(2)]
    log = LOG + LOG.partition("\n")[2]
    programs.compiler(success(MODEL, log=log, names=names))
    facts = Compile(num_segments=2).run(make_artifact(), context)
    assert files(context) == sorted([MODEL_TFLITE, "compiler.log", *names])
    assert len(facts["reports"]) == 2
    assert facts["differences"] is None
    segmented = Artifact("1" * 64, Kind.COMPILED, context.folder, dict.fromkeys(files(context), ""), facts, 0.0)
    with pytest.raises(StageError, match=r"compiled in segments.*leave out package, or compile\.num_segments"):
        Package().run(segmented, Context(**{**vars(context), "original": segmented}))


def test_a_float_model(make_artifact: Any, context: Context) -> None:
    facts = Compile().run(make_artifact(tiny.classifier(int8=False)), context)
    placement = facts["placement"]
    assert placement["compiles"] is False
    assert facts["expected_latency"] == {}
    assert placement["failure"] == "no operator can run on the Edge TPU; is the model quantized to full integer?"
    assert {op["placement"] for op in placement["ops"]} == {"cpu"}


def test_a_file_that_is_no_model(make_artifact: Any, context: Context) -> None:
    with pytest.raises(ModelError, match=r"is not a \.tflite file"):
        Compile().run(make_artifact(b"no model"), context)


@pytest.mark.parametrize(
    "settings",
    [
        {"timeout_s": 0.0},
        {"ssh": "-oProxyCommand=touch x"},
        {"ssh": "me@-oProxyCommand=x"},
        {"ssh": "host name"},
        {"docker": "--privileged"},
        {"docker": "image", "ssh": "host"},
        {"docker": "image", "compiler": "/x"},
        {"intermediate_tensors": ("a,b",)},
        {"intermediate_tensors": ("-o",)},
        {"compiler_version": "../16.0"},
    ],
)
def test_bad_settings(settings: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Compile(**settings)


def test_addresses_of_other_machines_and_images_are_accepted() -> None:
    assert Compile(ssh="me@build-1.example.org").ssh == "me@build-1.example.org"
    assert Compile(docker="registry.example.org:5000/coral/c@sha256:ab12").timeout_s == 600


@pytest.mark.parametrize("runtime", [9, 15])
def test_a_runtime_that_the_target_does_not_have(runtime: int) -> None:
    refusal = Compile(min_runtime_version=runtime).refused_by_target(load("edgetpu"))
    assert refusal is not None
    assert refusal.what == f"min_runtime_version: {runtime} is not between 10 and 14"
    for version in (10, 14):
        assert Compile(min_runtime_version=version).refused_by_target(load("edgetpu")) is None
