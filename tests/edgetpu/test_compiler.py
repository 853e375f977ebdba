"""The vendor's compiler, played by a script: what is asked of it, and what is made of all that it may answer."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from compress.edgetpu import compiler
from compress.errors import StageError
from compress.target import load

TARGET = load("edgetpu")
LOG = """\
Edge TPU Compiler version 16.0.384591198
Started a compilation timeout timer of 180 seconds.

Model compiled successfully in 329 ms.

Input model: model.tflite
Input size: 2.78MiB
Output model: model_edgetpu.tflite
Output size: 2.93MiB
On-chip memory used for caching model parameters: 3.33MiB
On-chip memory remaining for caching model parameters: 4.87MiB
Off-chip memory used for streaming uncached model parameters: 175.00KiB
Number of Edge TPU subgraphs: 1
Total number of operations: 31
Operation log: model_edgetpu.log

Operator                       Count      Status

CONV_2D                        14         Mapped to Edge TPU
SOFTMAX                        1          Mapped to Edge TPU
Compilation child process completed within timeout period.
Compilation succeeded!
"""
WRITES = "(folder / (model.stem + '_edgetpu.tflite')).write_bytes(b'compiled ' + model.read_bytes())\n"

Program = Callable[..., Path]


@pytest.fixture
def program(tmp_path: Path) -> Program:
    """Writes an executable that does `body`, with `model` and `folder` from its arguments."""

    def write(body: str, name: str = "edgetpu_compiler") -> Path:
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        head = "import sys, time, pathlib\nmodel, folder = pathlib.Path(sys.argv[-1]), pathlib.Path(sys.argv[3])\n"
        path.write_text(f"#!{sys.executable} -I\n{head}{body}")
        path.chmod(0o755)
        return path

    return write


def run(path: Path, folder: Path, timeout_s: float = 60.0) -> compiler.Compiled:
    (folder / "out").mkdir()
    (folder / "model.tflite").write_bytes(b"model")
    return compiler.compile_model(path, folder / "model.tflite", folder / "out", timeout_s)


def test_success(tmp_path: Path, program: Program) -> None:
    done = run(program(f"{WRITES}print({LOG!r}, end='')"), tmp_path)
    assert done.log == LOG
    assert done.on_chip_bytes == 3.33 * 1024 * 1024
    assert done.off_chip_bytes == 175 * 1024
    assert (tmp_path / "out" / "model_edgetpu.tflite").read_bytes() == b"compiled model"


def test_what_is_asked(tmp_path: Path, program: Program) -> None:
    """Nothing of what is typed meanwhile goes to the compiler."""
    (tmp_path / "typed").write_text("y")
    kept, typed = os.dup(0), os.open(tmp_path / "typed", os.O_RDONLY)
    os.dup2(typed, 0)
    try:
        done = asked(tmp_path, program)
    finally:
        os.dup2(kept, 0)
        os.close(kept)
        os.close(typed)
    assert done.log == f"{['-s', '-o', str(tmp_path / 'out'), str(tmp_path / 'model.tflite')]}\n''\n"


def asked(tmp_path: Path, program: Program) -> compiler.Compiled:
    return run(program(f"{WRITES}print(sys.argv[1:])\nprint(repr(sys.stdin.read()), file=sys.stderr)"), tmp_path)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            "print('ERROR: Attempting to use a delegate that only supports static-sized tensors.')\n"
            "print('Compilation failed: Model failed in Tflite interpreter.\\n\\nCompilation failed!\\n')\nsys.exit(1)",
            r"the compiler failed \(exit code 1\): Compilation failed!",
        ),
        (
            "print('Internal compiler error. Aborting!', file=sys.stderr)\nsys.exit(255)",
            "255.*: Internal compiler error",
        ),
        ("sys.exit(3)", r"\(exit code 3\): no message"),
        ("import os\nos.abort()", r"\(exit code -6\): no message"),
        (f"{WRITES}print('too late')\nsys.exit(1)", r"\(exit code 1\): too late"),
        (
            "print('Compilation child process completed within timeout period.\\nCompilation failed!')",
            r"0\): Compilation fail",
        ),
        ("", r"\(exit code 0\): no message"),
        ("(folder / 'model_edgetpu.tflite').mkdir()", r"\(exit code 0\): no message"),
    ],
)
def test_failure(tmp_path: Path, program: Program, body: str, message: str) -> None:
    path = program(body)
    with pytest.raises(StageError, match=message) as caught:
        run(path, tmp_path)
    assert caught.value.where == str(path)


def test_it_takes_too_long(tmp_path: Path, program: Program) -> None:
    path = program(f"{WRITES}time.sleep(600)")
    with pytest.raises(StageError, match=r"took longer than 0\.5 s"):
        run(path, tmp_path, timeout_s=0.5)


def test_output_that_is_no_text(tmp_path: Path, program: Program) -> None:
    noise = r"sys.stdout.buffer.write(b'\xff\xfe\x00garbage\r\n' + bytes(range(128, 256)) + b'\n')"
    done = run(program(f"{WRITES}{noise}"), tmp_path)
    assert "garbage" in done.log
    assert done.on_chip_bytes is None
    failing = program(f"{noise}\nsys.exit(1)", "failing")
    with pytest.raises(StageError, match="exit code 1"):
        compiler.compile_model(failing, tmp_path / "model.tflite", tmp_path / "out", 60.0)


def test_a_file_that_is_no_program(tmp_path: Path, program: Program) -> None:
    path = program("")
    path.write_bytes(b"\x7fELF no program")
    with pytest.raises(StageError, match="the compiler cannot be run: Exec format error"):
        run(path, tmp_path)
    path.write_text("#!/nonexistent/interpreter\n")
    with pytest.raises(StageError, match="the compiler cannot be run"):
        compiler.compile_model(path, tmp_path / "model.tflite", tmp_path / "out", 60.0)


# --- finding it -------------------------------------------------------------------------


def test_it_is_found_on_path(tmp_path: Path, program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert compiler.find(None, TARGET) is None
    path = program("")
    assert compiler.find(None, TARGET) == path
    path.chmod(0o644)
    assert compiler.find(None, TARGET) is None


def test_a_setting_names_it(tmp_path: Path, program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    path = program("", "another")
    assert compiler.find(str(path), TARGET) == path
    monkeypatch.setenv("HOME", str(tmp_path))
    assert compiler.find("~/bin/another", TARGET) == path


def test_a_bare_name(tmp_path: Path, program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    path = program(f"{WRITES}print('the one that was named')", "mine")
    monkeypatch.chdir(path.parent)
    found = compiler.find("mine", TARGET)
    assert found == path
    assert run(found, tmp_path).log == "the one that was named\n"


@pytest.mark.parametrize("setting", ["absent", "folder", "text", ""])
def test_a_setting_that_names_no_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "text").write_text("#!/bin/sh\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StageError, match=r"is not a program that can be run; check compile\.compiler"):
        compiler.find(setting, TARGET)


def test_identity_changes_with_the_program(program: Program, tmp_path: Path) -> None:
    assert compiler.identity(None) == {"compiler": "none"}
    path = program("print(1)")
    first = compiler.identity(path)
    assert first == {"compiler": hashlib.sha256(path.read_bytes()).hexdigest()}
    (tmp_path / "link").symlink_to(path)
    assert compiler.identity(tmp_path / "link") == first
    assert compiler.identity(program("print(2)")) != first


def test_how_to_compile_names_the_command() -> None:
    assert TARGET.tables["compiler"]["name"] in compiler.HOW_TO_COMPILE


# --- the memory it reports --------------------------------------------------------------

ON, OFF = (
    "On-chip memory used for caching model parameters",
    "Off-chip memory used for streaming uncached model parameters",
)


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        ("0.00B", 0),
        ("768.00B", 768),
        ("66.00KiB", 66 * 1024),
        ("1.25KiB", 1280),
        ("7.67MiB", 7.67 * 2**20),
        ("64MiB", 64 * 2**20),
        ("1.50GiB", 1.5 * 2**30),
        (" 2.00KiB  ", 2048),
    ],
)
def test_memory(shown: str, expected: float) -> None:
    for line, other in ((ON, OFF), (OFF, ON)):
        log = f"first line\n{line}: {shown}\n{other.replace('used', 'remaining')}: 1.00MiB\nlast line\n"
        found = {ON: compiler._memory(log, "On-chip memory used"), OFF: compiler._memory(log, "Off-chip memory used")}
        assert found[line] == pytest.approx(expected, abs=0)
        assert found[other] is None


@pytest.mark.parametrize(
    "shown", ["", "?", "MiB", "1.2.3MiB", ".MiB", "1,5MiB", "1.5MB", "1.5", "-1.0B", "nanB", "1.0B (?)", "\u0663B"]
)
def test_memory_that_cannot_be_read(shown: str) -> None:
    assert compiler._memory(f"{ON}: {shown}\n", "On-chip memory used") is None


def test_no_memory_lines(tmp_path: Path, program: Program) -> None:
    done = run(program(f"{WRITES}print('Edge TPU Compiler version 2.0.291256449')"), tmp_path)
    assert (done.on_chip_bytes, done.off_chip_bytes) == (None, None)
