"""The compiler, replaced by a stand-in: its arguments, its retries, and the handling of its results."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import one_op
import pytest
import tiny
from one_op import Op, Tensor
from packages import compiled
from paths import EDGETPU
from stand_in import CHANCE, FAILED, LOG, VERSION, Answer, Programs, success

from compress.core.errors import StageError
from compress.model.tflite import graph
from compress.targets import load
from compress.targets.base import CompilerSettings
from compress.targets.edgetpu import compilation, compiler, inspection
from compress.targets.edgetpu.compiler import Compiler, output_names
from compress.targets.edgetpu.compiler.cache import Cache
from compress.targets.edgetpu.compiler.host import Docker, Host, Local, Ssh

TARGET = load("edgetpu")
MODEL = tiny.classifier()
LOGS = sorted(EDGETPU.glob("pairs/*/compiler.log"))
OTHER_TRY = "; retry, attempt"

Make = Callable[..., Compiler]


@pytest.fixture
def notes() -> list[str]:
    return []


@pytest.fixture
def make(programs: Programs, tmp_path: Path) -> Make:
    """Return a function that makes a Compiler on this machine, with a cache."""

    def make(settings: dict[str, Any] | None = None, **changes: Any) -> Compiler:
        usual: dict[str, Any] = {"timeout_s": 60.0, "retries": 2, "cache": str(tmp_path / "cache")}
        host = changes.pop("host", Local(programs.folder / "edgetpu_compiler", tmp_path / "here"))
        version = changes.pop("usual", "16.0")
        return Compiler(host, CompilerSettings(**{**usual, **(settings or {}), **changes}), version)

    return make


# --- arguments --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "arguments"),
    [
        ({}, ["-s"]),
        ({"all_subgraphs": True}, ["-s", "-a"]),
        ({"min_runtime_version": 13}, ["-s", "-m", "13"]),
        ({"num_segments": 3}, ["-s", "-n", "3"]),
        ({"intermediate_tensors": ("hidden", "scores")}, ["-s", "-i", "hidden,scores"]),
        ({"search_delegate": True, "child_timeout_s": 300}, ["-s", "-d", "-t", "300"]),
    ],
)
def test_options(make: Make, programs: Programs, options: dict[str, Any], arguments: list[str]) -> None:
    programs.compiler(success(MODEL, names=output_names(make(options).settings)))
    done = make(options).compile(MODEL, pytest.fail)
    assert done is not None
    assert make(options, host=None).compile(MODEL, pytest.fail) == done  # from the cache
    assert programs.asked()[0]["arguments"] == [*arguments, "model.tflite"]
    names = [f"model_segment_{index}_of_3_edgetpu.tflite" for index in range(3)]
    assert list(done.files) == (names if "num_segments" in options else ["model_edgetpu.tflite"])


def test_what_is_expected_for_an_old_runtime() -> None:
    """An operator that needs a newer runtime stays on the CPU: here PRELU, from 13 on."""
    tensors = {letter: Tensor((1, 4, 4, 4)) for letter in "abc"} | {"alpha": Tensor((1, 1, 4), data=1)}
    chain = [Op("RELU", "a", "b"), Op("PRELU", ["b", "alpha"], ["c"])]
    parsed = one_op.read(tensors, chain, "a", "c")

    def sides(runtime: int | None) -> str:
        settings = CompilerSettings(min_runtime_version=runtime)
        expected_check, _ = compilation.expected(parsed, settings, TARGET, None)
        return "".join(op.placement[0] for op in expected_check.ops)

    assert [sides(runtime) for runtime in (None, 14, 13, 12)] == ["tt", "tt", "tt", "tc"]


def test_a_tensor_that_is_not_in_the_model(make: Make, programs: Programs) -> None:
    programs.compiler(success(MODEL))
    with pytest.raises(StageError, match=r"no operator computes a tensor 'hiden'"):
        make({"intermediate_tensors": ("hidden", "hiden")}).compile(MODEL, pytest.fail)
    assert programs.asked() == []


# --- the search for the compiler --------------------------------------------------------


def found(**settings: Any) -> Host | None:
    return compiler.find_compiler(CompilerSettings(**settings), "edgetpu_compiler", None)


def test_it_is_found_on_path(programs: Programs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(programs.folder))
    assert found() is None
    path = programs.compiler(Answer())
    assert found() == Local(path)
    path.chmod(0o644)
    assert found() is None


def test_a_setting_names_it(programs: Programs, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = programs.compiler(Answer(), name="mine")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(programs.folder)
    for setting in (str(path), "~/bin/mine", "mine"):
        assert found(compiler=setting) == Local(path)
    assert found(docker="coral:16") == Docker("coral:16", "edgetpu_compiler")
    assert found(ssh="me@there") == Ssh("me@there", "edgetpu_compiler")


def test_identity(programs: Programs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a compiler, only the content of the cache may change the result."""
    monkeypatch.setenv("PATH", str(tmp_path))

    def identity(**settings: Any) -> dict[str, str]:
        return compiler.identity(CompilerSettings(**settings), "edgetpu_compiler")

    cache = tmp_path / "cache"
    assert identity() == {"compiler": "none"}
    empty = identity(cache=str(cache))
    Cache(cache).keep(MODEL, ["-s"], VERSION, compiler_outcome())
    assert identity(cache=str(cache)) != empty
    program = str(programs.compiler(Answer()))
    assert identity(compiler=program, cache=str(cache)) == identity(compiler=program)
    assert identity(compiler=program)["compiler"] not in ("none", "")


def compiler_outcome() -> Any:
    return compiler.CompilerRun(0, LOG, {"model_edgetpu.tflite": compiled(MODEL)})


def test_names_and_versions_that_the_target_knows() -> None:
    assert TARGET.compiler.name in compiler.HOW_TO_COMPILE
    versions = {VERSION: "16.0", "15.0.340273435": "15.0", "14.1.317412892": None, None: None}
    assert {version: compiler.known_version(version, TARGET) for version in versions} == versions


# --- results ----------------------------------------------------------------------------


def test_success(make: Make, programs: Programs) -> None:
    assert make(host=None).compile(MODEL, pytest.fail) is None
    assert make(host=None, cache=None).compile(MODEL, pytest.fail) is None
    programs.compiler(success(MODEL))
    done = make().compile(MODEL, pytest.fail)
    assert done is not None
    assert done.log == LOG
    assert done.files == {"model_edgetpu.tflite": compiled(MODEL)}
    assert [report.version for report in done.reports] == [VERSION]


def test_chance_is_tried_again(make: Make, programs: Programs, notes: list[str]) -> None:
    programs.compiler(Answer(CHANCE, exit_code=1), Answer(FAILED % "", exit_code=1), success(MODEL))
    assert make().compile(MODEL, notes.append) is not None
    assert len(programs.asked()) == 3
    assert [OTHER_TRY in note for note in notes] == [True, True]
    assert "Internal compiler error. Aborting!" in notes[0]
    assert "attempt 2 of 3" in notes[0]


@pytest.mark.parametrize("retries", [0, 1, 4])
def test_chance_that_is_none(make: Make, programs: Programs, notes: list[str], retries: int) -> None:
    """The failure is not cached, because another run may succeed. The output of the compiler is shown."""
    programs.compiler(Answer(CHANCE, exit_code=255))
    with pytest.raises(StageError, match=r"exit code 255, Internal compiler error.*operator 0 CONV_2D") as caught:
        make(retries=retries).compile(MODEL, notes.append)
    assert len(programs.asked()) == retries + 1
    assert sum(OTHER_TRY in note for note in notes) == retries
    assert notes[-1] == CHANCE
    assert "compile.retries" in caught.value.hint
    assert make().cache is not None
    assert make().cache.names == []  # type: ignore[union-attr]


def test_what_is_certain_is_not_tried_again_and_kept(
    make: Make, programs: Programs, notes: list[str], tmp_path: Path
) -> None:
    log = FAILED % "Compilation failed: Compilation failed due to large activation tensors in model.\n"
    programs.compiler(Answer(log, exit_code=1))
    with pytest.raises(StageError, match=r"too large for the chip.*due to large activation tensors") as caught:
        make().compile(MODEL, notes.append)
    assert caught.value.where == str(programs.folder / "edgetpu_compiler")
    assert "layer hidden" in caught.value.what
    assert notes == [log]
    with pytest.raises(StageError, match="due to large activation tensors") as again:
        make(host=None).compile(MODEL, notes.append)
    assert again.value.where == "an earlier run, from the cache"
    assert len(programs.asked()) == 1
    (path,) = tmp_path.joinpath("cache").iterdir()
    assert f"Remove {path} to compile again." in notes[-1]
    path.unlink()
    programs.compiler(success(MODEL))
    assert make().compile(MODEL, pytest.fail) is not None


def test_a_failure_that_is_not_known_is_not_kept(make: Make, programs: Programs, notes: list[str]) -> None:
    """The machine may be the cause: too little memory or disk space."""
    programs.compiler(Answer(f"Edge TPU Compiler version {VERSION}\nNo space left on device\n", exit_code=1))
    with pytest.raises(StageError, match="exit code 1, No space left on device"):
        make().compile(MODEL, notes.append)
    assert len(programs.asked()) == 1
    assert make(host=None).compile(MODEL, pytest.fail) is None


@pytest.mark.parametrize("options", [{"intermediate_tensors": ("hidden",)}, {"search_delegate": True}])
def test_a_model_that_was_cut_may_have_other_outputs(make: Make, programs: Programs, options: dict[str, Any]) -> None:
    other = compiled(tiny.classifier(classes=5))
    programs.compiler(Answer(LOG, {"model_edgetpu.tflite": other}))
    assert make(options).compile(MODEL, pytest.fail) is not None
    with pytest.raises(StageError, match="has other inputs or outputs"):
        make().compile(MODEL, lambda line: None)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (Answer("Edge TPU Compiler version 15.0.340273435\n"), "0, no error message and no compiled model"),
        (success(MODEL, log="too late\n", exit_code=1), "1, too late"),
    ],
)
def test_a_compiler_that_contradicts_itself(make: Make, programs: Programs, answer: Answer, message: str) -> None:
    programs.compiler(answer)
    with pytest.raises(StageError, match=f"exit code {message}"):
        make().compile(MODEL, lambda line: None)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"compiled", "is not a .tflite file"),
        (MODEL, "has no edgetpu-custom-op"),
        (compiled(tiny.classifier((8, 8, 1))), "has other inputs or outputs"),
        (compiled(MODEL).replace(b"DWN1", b"XXXX"), "holds no Edge TPU package"),
    ],
    ids=["no model", "not compiled", "another model", "a fake"],
)
def test_a_file_that_the_compiler_never_made(
    make: Make, programs: Programs, notes: list[str], content: bytes, message: str
) -> None:
    """Programs that imitate the compiler are in circulation. Their results are not cached."""
    programs.compiler(Answer(LOG, {"model_edgetpu.tflite": content}))
    with pytest.raises(StageError, match=message):
        make().compile(MODEL, notes.append)
    assert not (make().cache.folder).exists()  # type: ignore[union-attr]


@pytest.mark.parametrize("runtime", [None, 11])
def test_a_success_that_maps_nothing(make: Make, programs: Programs, notes: list[str], runtime: int | None) -> None:
    log = LOG.replace("Mapped to Edge TPU", "Operation not supported")
    programs.compiler(Answer(log, {"model_edgetpu.tflite": MODEL}))
    with pytest.raises(StageError, match="no operator of the model would run on the Edge TPU") as caught:
        make({"min_runtime_version": runtime}).compile(MODEL, notes.append)
    assert ("min_runtime_version" in caught.value.hint) == (runtime is not None)


# --- the cache --------------------------------------------------------------------------


def test_another_model_options_or_version_is_something_else(make: Make, programs: Programs) -> None:
    programs.compiler(success(MODEL))
    make().compile(MODEL, pytest.fail)
    assert make(host=None).compile(tiny.classifier(seed=1), pytest.fail) is None
    assert make({"all_subgraphs": True}, host=None).compile(MODEL, pytest.fail) is None
    assert make(host=None, compiler_version="15.0").compile(MODEL, pytest.fail) is None
    assert make(host=None, compiler_version="16.0", usual="15.0").compile(MODEL, pytest.fail) is not None
    assert make({"child_timeout_s": 9}, host=None).compile(MODEL, pytest.fail) is not None
    shutil.rmtree(programs.folder)
    for host in (Local(programs.folder / "edgetpu_compiler", programs.folder), Docker("coral", "c"), Ssh("there", "c")):
        assert make(host=host).compile(MODEL, pytest.fail) is not None


@pytest.mark.parametrize(
    ("log", "content"),
    [
        (LOG, compiled(tiny.classifier((8, 8, 1)))),
        (LOG, MODEL),
        (LOG, b"no model"),
        (LOG.replace(VERSION, "15.0.1"), compiled(MODEL)),
        (CHANCE, None),
    ],
    ids=["another model", "not compiled", "no model", "another version", "chance"],
)
def test_a_well_formed_entry_that_is_not_true(
    make: Make, programs: Programs, notes: list[str], log: str, content: bytes | None
) -> None:
    programs.compiler(success(MODEL))
    job = make()
    assert job.cache is not None
    files = {} if content is None else {"model_edgetpu.tflite": content}
    job.cache.keep(
        MODEL, compiler.arguments(job.settings), VERSION, compiler.CompilerRun(0 if files else 1, log, files)
    )
    done = job.compile(MODEL, notes.append)
    assert done is not None
    assert done.files["model_edgetpu.tflite"] == compiled(MODEL)
    assert len(programs.asked()) == 1


def test_a_cache_that_cannot_be_written_costs_nothing_but_the_cache(
    make: Make, programs: Programs, notes: list[str], unwritable: Path
) -> None:
    programs.compiler(success(MODEL))
    assert make(cache=str(unwritable / "cache")).compile(MODEL, notes.append) is not None
    assert len(notes) == 1
    assert "cannot be cached" in notes[0]


# --- its version ------------------------------------------------------------------------


def test_the_version_that_is_required(make: Make, programs: Programs) -> None:
    programs.compiler(success(MODEL))
    for version in ("15.0", "16.0.1"):
        with pytest.raises(StageError, match=rf"is version {VERSION}.*requires {version}"):
            make(compiler_version=version, cache=None).compile(MODEL, pytest.fail)
    for required in ("16.0", VERSION, None):
        assert make(compiler_version=required, cache=None).compile(MODEL, pytest.fail) is not None


# --- recorded and real ------------------------------------------------------------------


@pytest.mark.skipif(not LOGS, reason=f"no recorded logs in {EDGETPU}; see CORALLINE_SHARED")
@pytest.mark.parametrize("path", LOGS, ids=lambda path: path.parent.name)
def test_recorded_runs(make: Make, programs: Programs, path: Path) -> None:
    """The log and the compiled model of a real run are replayed."""
    model, real = (path.with_name(name).read_bytes() for name in ("model.tflite", "compiled.tflite"))
    programs.compiler(Answer(path.read_text(), {"model_edgetpu.tflite": real}))
    done = make(usual="1.0").compile(model, pytest.fail)
    assert done is not None
    assert (done.log, done.files["model_edgetpu.tflite"]) == (path.read_text(), real)
    version = done.reports[0].version
    again = make(host=None, compiler_version=version).compile(model, pytest.fail)
    assert again == done


REAL = shutil.which("edgetpu_compiler")


@pytest.mark.skipif(REAL is None, reason="the vendor's edgetpu_compiler is not on PATH: it cannot be shipped")
def test_the_real_compiler(make: Make) -> None:
    done = make(host=Local(Path(str(REAL)))).compile(MODEL, print)
    assert done is not None
    assert sum(report.mapped or 0 for report in done.reports) == 2
    assert [report.unknown for report in done.reports] == [()]
    assert inspection.inspect_graph(graph.parse(done.files["model_edgetpu.tflite"])).cached_bytes > 0
