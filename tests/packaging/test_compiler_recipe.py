"""packaging/compiler: the script that installs the compiler, the container, the command for PATH, and the notebook.

Neither Docker nor the compiler is available here: stand-ins for docker, apt-get, curl and gpg record their calls.
The image was never built.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import tiny
from packages import compiled
from paths import ROOT
from stand_in import LOG, Answer, Programs, success

from compress.core.artifact import MODEL_COMPILED, MODEL_TFLITE, Artifact, Kind
from compress.learning.context import Context
from compress.pipeline.stages.compile import Compile
from compress.targets import load

FOLDER = ROOT / "packaging" / "compiler"
INSTALL = (FOLDER / "install.sh").read_text()
PAGE = (ROOT / "docs" / "hardware" / "compiler.md").read_text()
VERSION = load("edgetpu").compiler.version
MODEL = tiny.classifier()
SHELLS = [shell for shell in ("dash", "bash", "sh") if shutil.which(shell)]

# --- install.sh -----------------------------------------------------------------------

_NOTE = """
with pathlib.Path({notes!r}).open("a") as stream:
    stream.write(json.dumps([pathlib.Path(sys.argv[0]).name, *sys.argv[1:]]) + "\\n")
"""
_CURL = "\npathlib.Path(sys.argv[sys.argv.index('--output') + 1]).write_bytes(b'the key')\n"
_GPG = "\npathlib.Path(sys.argv[sys.argv.index('--output') + 1]).write_bytes(b'dearmored')\n"


@pytest.fixture
def system(programs: Programs) -> Callable[..., list[list[str]]]:
    """Return a function that runs install.sh on a system of stand-ins, and returns their recorded calls."""
    notes = programs.folder / "noted"

    def run(shell: str, root: Path, architecture: str = "amd64", curl: str = _CURL) -> list[list[str]]:
        note = _NOTE.format(notes=str(notes))
        programs.write("dpkg", f"print({architecture!r})")
        for name, more in (("apt-get", ""), ("curl", curl), ("gpg", _GPG), ("edgetpu_compiler", "")):
            programs.write(name, note + more)
        done = subprocess.run(
            [shell, FOLDER / "install.sh"],
            env=os.environ | {"DESTDIR": str(root)}, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert (done.returncode == 0) == (curl == _CURL and architecture == "amd64"), done.stderr
        if architecture != "amd64":
            assert "x86-64 (amd64) only; this system is arm64" in done.stderr
        return [json.loads(line) for line in notes.read_text().splitlines()] if notes.exists() else []

    return run


@pytest.mark.parametrize("shell", SHELLS)
def test_the_compiler_is_installed_from_a_signed_archive(system: Any, tmp_path: Path, shell: str) -> None:
    calls = system(shell, tmp_path / "root")
    assert [call[0] for call in calls] == [
        "apt-get", "apt-get", "curl", "gpg", "apt-get", "apt-get", "edgetpu_compiler",
    ]  # fmt: skip
    assert calls[5][-1] == f"edgetpu-compiler={VERSION}"
    assert calls[6][1:] == ["--version"]
    keyring = tmp_path / "root/usr/share/keyrings/coral-edgetpu.gpg"
    assert keyring.read_bytes() == b"dearmored"
    assert keyring.stat().st_mode & 0o777 == 0o644
    (source,) = (tmp_path / "root/etc/apt/sources.list.d").iterdir()
    assert source.read_text() == (
        "deb [arch=amd64 signed-by=/usr/share/keyrings/coral-edgetpu.gpg] "
        "https://packages.cloud.google.com/apt coral-edgetpu-stable main\n"
    )
    assert [path.name for path in (tmp_path / "there").iterdir()] == []  # the temporary key is removed


def test_an_arm_system_is_refused_before_any_change(system: Any, tmp_path: Path) -> None:
    assert system("sh", tmp_path / "root", architecture="arm64") == []
    assert not (tmp_path / "root").exists()


def test_without_the_key_nothing_is_installed(system: Any, tmp_path: Path) -> None:
    calls = system("sh", tmp_path / "root", curl="\nsys.exit(22)\n")
    assert [call[0] for call in calls] == ["apt-get", "apt-get", "curl"]
    assert not (tmp_path / "root").exists()


def test_signatures_are_never_skipped() -> None:
    everything = "\n".join(path.read_text() for path in FOLDER.iterdir()) + PAGE
    assert not re.search(r"trusted=yes|allow-unauthenticated|allow-insecure|--insecure|curl -k", everything)
    assert not re.search(r"^[^#\n]*\bapt-key add", everything, re.MULTILINE)


# --- Dockerfile -----------------------------------------------------------------------


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile's instructions with their arguments, without comments."""
    lines = [line for line in (FOLDER / "Dockerfile").read_text().splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    pairs = (line.partition(" ") for line in joined.splitlines() if line)
    return [(name, argument) for name, _, argument in pairs]


def test_the_image_runs_the_installed_compiler_as_a_user() -> None:
    names = [name for name, _ in instructions()]
    assert names == ["FROM", "COPY", "RUN", "USER", "WORKDIR", "ENTRYPOINT"]
    arguments = dict(instructions())
    assert arguments["FROM"] == "--platform=linux/amd64 debian:12-slim"
    assert (FOLDER / arguments["COPY"].split()[0]).is_file()
    assert arguments["RUN"].startswith(f"sh {arguments['COPY'].split()[1]} && ")
    assert f"useradd --create-home --uid 1000 {arguments['USER']}" in arguments["RUN"]
    assert arguments["USER"] != "root"
    assert json.loads(arguments["ENTRYPOINT"]) == ["edgetpu_compiler"]


# --- the command for PATH -------------------------------------------------------------

_DOCKER = """
if os.path.exists({notes!r}):
    os.remove({notes!r})
arguments = sys.argv[1:]
pathlib.Path({notes!r}).write_text(json.dumps(arguments))
at = arguments.index("--entrypoint")
(folder,) = [part for part in arguments if part.endswith(":/work")]
assert arguments[at + 1] == "timeout" and arguments[at + 4] == "edgetpu_compiler", arguments
os.chdir(folder[: -len(":/work")])
sys.exit(subprocess.call([{inside!r}, *arguments[at + 5 :]]))
"""


@pytest.fixture
def container(programs: Programs) -> Callable[..., list[str]]:
    """Install a stand-in for docker with a compiler in its containers; return a function for its last arguments."""
    inside = programs.compiler(success(MODEL), name="compiler-inside")
    notes = programs.folder / "docker-arguments"
    programs.write("docker", _DOCKER.format(notes=str(notes), inside=str(inside)))
    return lambda: json.loads(notes.read_text())  # type: ignore[no-any-return]


def wrapper(*arguments: str, cwd: Path, **more: str) -> subprocess.CompletedProcess[str]:
    command = [FOLDER / "edgetpu_compiler", *arguments]
    return subprocess.run(command, cwd=cwd, env=os.environ | more, capture_output=True, text=True, check=False)


def test_the_command_runs_the_container_in_the_working_folder(
    container: Callable[..., list[str]], tmp_path: Path
) -> None:
    (tmp_path / "here" / "model.tflite").write_bytes(MODEL)
    done = wrapper("-s", "-i", "a b", "model.tflite", cwd=tmp_path / "here")
    assert (done.returncode, done.stdout) == (0, LOG)
    assert (tmp_path / "here" / MODEL_COMPILED).read_bytes() == compiled(MODEL)
    arguments = container()
    assert arguments[-7:] == ["edgetpu-compiler:16.0", "3600", "edgetpu_compiler", "-s", "-i", "a b", "model.tflite"]
    for option in (["--network", "none"], ["--cap-drop", "ALL"], ["--user", f"{os.getuid()}:{os.getgid()}"]):
        at = arguments.index(option[0])
        assert arguments[at : at + 2] == option
    assert {"--rm", "--init"} < set(arguments)


def test_image_and_limit_can_be_chosen(container: Callable[..., list[str]], tmp_path: Path) -> None:
    (tmp_path / "here" / "model.tflite").write_bytes(MODEL)
    wrapper(
        "-s", "model.tflite", cwd=tmp_path / "here", EDGETPU_COMPILER_IMAGE="ours:1", EDGETPU_COMPILER_LIMIT="60"
    )  # fmt: skip
    assert container()[-5:-2] == ["ours:1", "60", "edgetpu_compiler"]


@pytest.mark.parametrize("argument", ["/tmp/model.tflite", "../model.tflite", "a/../../m.tflite", "--out_dir=/tmp"])
def test_files_that_the_container_does_not_see_are_refused(
    container: Callable[..., list[str]], argument: str, tmp_path: Path
) -> None:
    done = wrapper("-s", argument, cwd=tmp_path / "here")
    assert done.returncode == 2
    assert f"{argument} is outside of the working folder" in done.stderr
    assert not (tmp_path / "bin" / "docker-arguments").exists()


def test_without_docker(programs: Programs, tmp_path: Path) -> None:
    for name in ("sh", "env", "id"):
        (programs.folder / name).symlink_to(shutil.which(name) or name)
    done = wrapper("-s", "model.tflite", cwd=tmp_path / "here", PATH=str(programs.folder))
    assert done.returncode == 127
    assert "docker was not found; docs/hardware/compiler.md" in done.stderr


@pytest.mark.parametrize("named", [True, False])
def test_a_pipeline_compiles_with_the_command(
    container: Callable[..., list[str]], programs: Programs, tmp_path: Path, named: bool
) -> None:
    if not named:
        shutil.copy(FOLDER / "edgetpu_compiler", programs.folder)
    (tmp_path / "given").mkdir()
    (tmp_path / "given" / MODEL_TFLITE).write_bytes(MODEL)
    digests = {MODEL_TFLITE: hashlib.sha256(MODEL).hexdigest()}
    artifact = Artifact("0" * 64, Kind.TFLITE, tmp_path / "given", digests, {}, 0.0)
    nothing: Any = None
    context = Context("tiny", tmp_path / "here", nothing, nothing, load("edgetpu"), 0, False, tiny.Notes())
    stage = Compile(compiler=str(FOLDER / "edgetpu_compiler")) if named else Compile()
    assert stage.run(artifact, context)["compiled"] is True
    assert (tmp_path / "here" / MODEL_COMPILED).read_bytes() == compiled(MODEL)


def test_a_pipeline_takes_the_image_of_the_page() -> None:
    (image,) = set(re.findall(r"docker build --tag (\S+)", PAGE))
    assert f"compile: {{docker: {image}}}" in PAGE.replace("'", "").replace('"', "")
    assert Compile(docker=image).docker == image
    assert image.endswith(f":{VERSION}")


# --- the notebook ---------------------------------------------------------------------

NOTEBOOK: dict[str, Any] = json.loads((FOLDER / "compile.ipynb").read_text())
CELLS = {cell["id"]: cell for cell in NOTEBOOK["cells"]}
SOURCES = {name: "".join(cell["source"]) for name, cell in CELLS.items()}


def test_the_notebook_is_valid() -> None:
    """It has Jupyter's format 4.5, without stored outputs. `nbformat` 5.11 accepts the file too (2026-11)."""
    assert (NOTEBOOK["nbformat"], NOTEBOOK["nbformat_minor"]) == (4, 5)
    assert len(CELLS) == len(NOTEBOOK["cells"])
    for name, cell in CELLS.items():
        assert re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", name)
        results = {"outputs", "execution_count"} if cell["cell_type"] == "code" else set()
        assert cell.keys() == {"cell_type", "id", "metadata", "source"} | results
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None


def test_the_notebook_installs_with_the_same_script() -> None:
    assert SOURCES["install"] == f"%%bash\n{INSTALL}".rstrip("\n")
    script = SOURCES["install"].removeprefix("%%bash\n")
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)


def test_the_other_cells_are_python() -> None:
    for name, cell in CELLS.items():
        if cell["cell_type"] == "code" and name != "install":
            ast.parse(SOURCES[name])


def run_cells(namespace: dict[str, Any]) -> None:
    for name in ("upload", "compile", "download"):
        exec(compile(SOURCES[name], name, "exec"), namespace)


def test_the_notebook_compiles_a_model(
    programs: Programs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    programs.compiler(success(MODEL))
    monkeypatch.chdir(tmp_path / "here")
    Path("model.tflite").write_bytes(MODEL)
    run_cells({})
    assert Path(MODEL_COMPILED).read_bytes() == compiled(MODEL)
    assert Path("compiler.log").read_text() == LOG
    assert "CONV_2D" in capsys.readouterr().out


def test_the_notebook_uploads_and_downloads_on_colab(
    programs: Programs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs.compiler(success(MODEL))
    monkeypatch.chdir(tmp_path / "here")
    downloaded: list[str] = []
    colab = ModuleType("google.colab")
    colab.files = ModuleType("files")  # type: ignore[attr-defined]
    colab.files.upload = lambda: {"mine.tflite": MODEL}  # type: ignore[attr-defined]
    colab.files.download = downloaded.append  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "google", ModuleType("google"))
    monkeypatch.setitem(sys.modules, "google.colab", colab)
    run_cells({})
    assert downloaded == [MODEL_COMPILED, "compiler.log"]


@pytest.mark.parametrize(
    ("content", "answer", "message"),
    [
        (None, Answer(), "does not exist: copy your model there"),
        (b"a photo", Answer(), "is not a .tflite file"),
        (MODEL, Answer(exit_code=1), "the compiler failed"),
    ],
)
def test_what_the_notebook_refuses(
    content: bytes | None, answer: Answer, message: str,
    programs: Programs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    programs.compiler(answer)
    monkeypatch.chdir(tmp_path / "here")
    if content is not None:
        Path("model.tflite").write_bytes(content)
    with pytest.raises(SystemExit, match=message):
        run_cells({})
