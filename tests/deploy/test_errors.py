"""Errors of the operating system and a missing numpy, as every command of the runner reports them."""

from __future__ import annotations

import errno
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import devices
import pytest

from deploy.contract import errors
from deploy.contract.errors import INSTALL, address_error, file_error


@pytest.mark.parametrize("number", sorted(errors._CAUSES))
def test_every_cause_is_a_sentence_with_a_hint(number: int) -> None:
    error = file_error(OSError(number, os.strerror(number), "/a/b"))
    assert error.exit_code == 6
    assert error.what.startswith("/a/b: ")
    assert os.strerror(number) not in error.what
    assert error.hint
    assert "Errno" not in str(error)


def test_other_causes_have_the_text_of_the_system() -> None:
    error = file_error(OSError(errno.EDOM, os.strerror(errno.EDOM), "/a"))
    assert error.what == f"/a: {os.strerror(errno.EDOM)}"
    assert file_error(OSError("plain text")).what == "plain text"
    assert file_error(OSError()).what == "OSError"
    assert file_error(OSError(errno.ENOENT, "--draw: the folder does not exist", "/a")).what.startswith("/a: --draw")
    assert file_error(OSError(errno.EXDEV, os.strerror(errno.EXDEV), b"/a", None, b"/\xff")).what.startswith("/\udcff")


@pytest.mark.parametrize(
    ("number", "says"),
    [(errno.EADDRINUSE, "another process"), (errno.EACCES, "below 1024"), (errno.EADDRNOTAVAIL, "ip addr")],
)
def test_addresses(number: int, says: str) -> None:
    error = address_error(OSError(number, os.strerror(number)), ("127.0.0.1", 80), False)
    assert says in str(error)
    assert str(error).startswith("127.0.0.1:80: ")
    assert "[::1]:80: " in str(address_error(OSError(number, ""), ("::1", 80, 0, 0), False))


def test_a_port_in_use(path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = devices.runner("serve", path, "--port", port, "--json")
    assert done.returncode == 6
    assert f"127.0.0.1:{port}: another process listens on this address; to do: end it" in done.stderr
    assert json.loads(done.stdout)["error"]["hint"].startswith("end it")


@pytest.mark.parametrize(
    "arguments",
    [
        ["verify", "{folder}"],
        ["verify", "{bundle}", "--out", "{none}/x"],
        ["serve", "{bundle}", "--host", "203.0.113.1", "--token-file", "{token}"],
        ["serve", "{bundle}", "--unix", "{none}/s"],
        ["serve", "{bundle}", "--token-file", "{none}"],
        ["learn", "{bundle}", "--name", "x", "{none}"],
    ],
    ids=" ".join,
)
def test_no_command_shows_an_errno(arguments: list[str], path: Path, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("t" * 32)
    token.chmod(0o600)
    places = {"bundle": path, "none": tmp_path / "none", "folder": tmp_path, "token": token}
    done = devices.runner(*(argument.format(**places) for argument in arguments))
    assert done.returncode in (2, 3, 6), done.stderr
    assert "Errno" not in done.stderr
    assert "Traceback" not in done.stderr
    assert "; to do: " in done.stderr


@pytest.mark.parametrize("arguments", [["run", "x"], ["serve", "x"], ["verify", "x"], ["bench", "x"], ["learn", "x"]])
@pytest.mark.parametrize("reason", ["No module named 'numpy'", "numpy.core failed\\nIMPORTANT: PLEASE READ THIS"])
def test_without_numpy(arguments: list[str], reason: str, tmp_path: Path) -> None:
    (tmp_path / "numpy.py").write_text(f"raise ImportError({reason!r})\n".replace("\\\\n", "\\n"))
    pyz = devices.pyz(tmp_path / "runner.pyz")
    done = devices.runner(*arguments, "--json", pyz=pyz, PYTHONPATH=tmp_path)
    assert done.returncode == 11
    assert "Traceback" not in done.stderr
    assert "IMPORTANT" not in done.stderr
    assert done.stderr.endswith(f"to do: {INSTALL}\n")
    assert json.loads(done.stdout)["error"]["kind"] == "no_numpy"


@pytest.mark.parametrize("library", ["waitress", "prometheus_client"])
def test_serve_without_its_libraries(library: str) -> None:
    program = f"import sys; sys.modules[{library!r}] = None; from deploy.__main__ import main; sys.exit(main())"
    command = [sys.executable, "-c", program, "serve", "x.coralline", "--json"]
    done = subprocess.run(command, env=devices.environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 11
    assert done.stderr.count("\n") == 1
    assert (
        f"without {library}; to do: python3 -m pip install 'waitress>=3.0.1,<4' 'prometheus_client>=0.20'"
        in done.stderr
    )
    assert json.loads(done.stdout)["error"]["kind"] == "no_waitress"


def test_a_bug_is_no_missing_numpy(tmp_path: Path) -> None:
    (tmp_path / "numpy.py").write_text("raise ImportError('something else')\n")
    done = devices.runner("run", "x", pyz=devices.pyz(tmp_path / "runner.pyz"), PYTHONPATH=tmp_path)
    assert done.returncode == 1
