"""Fixtures that all tests share, such as projects to run; and reproducible fuzzing without time limits."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import stand_in
import tiny
import works

MOUNT, UMOUNT = (shutil.which(name, path="/usr/bin:/bin:/usr/sbin:/sbin") for name in ("mount", "umount"))

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in the background of a shell; child processes inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Tests start many programs: with bytecode files, only the first of them compiles the packages.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

hypothesis.settings.register_profile(
    "coralline", deadline=None, database=None, derandomize=True, suppress_health_check=list(hypothesis.HealthCheck)
)
hypothesis.settings.load_profile("coralline")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put files with slow tests first, then those with TensorFlow: short files fill the workers at the end."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    tensorflow = {item.path for item in items if item.get_closest_marker("tensorflow")}
    items.sort(key=lambda item: (item.path not in slow, item.path not in tensorflow))


@pytest.fixture(autouse=True, scope="session")
def _only_what_is_declared() -> Iterator[None]:
    """Give every stage and probe of the product the context that the runner gives: with what it declares in `needs`."""
    with pytest.MonkeyPatch.context() as patch:
        for kind in works.KINDS:
            if "run" in vars(kind):
                patch.setattr(kind, "run", works.with_declared_context(kind.run))
        yield


@pytest.fixture
def coralline(tmp_path: Path) -> tiny.Coralline:
    """Return a function that runs the command line in tmp_path."""

    def run(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
        options = {"cwd": tmp_path, "env": tiny.environment(), "capture_output": True, "text": True} | options
        return subprocess.run(tiny.command(*arguments), check=False, **options)

    return run


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Return a function that writes a project into tmp_path/project: `tiny.project`."""
    monkeypatch.setenv("PATH", "")
    return lambda *stages, **keys: tiny.project(tmp_path / "project", *stages, **keys)


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> stand_in.Programs:
    """Put stand-ins for edgetpu_compiler, docker and ssh on PATH before the real ones; no real compiler is found."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("there", "here"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.setenv("TMPDIR", str(tmp_path / "there"))  # where mktemp makes its folders
    return stand_in.Programs(folder)


@pytest.fixture(scope="session")
def keras() -> Any:
    """Keras on TensorFlow, imported once."""
    from compress.model.ir.tensorflow import keras

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of TensorFlow's own import
        return keras(0)


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Yield a function that mounts a small separate file system, or skips the test."""
    folder = tmp_path / "mounted"
    folder.mkdir()

    def mount(options: str = "size=256k,nr_inodes=200") -> Path:
        if MOUNT is None:
            pytest.skip("there is no mount command")
        command = [MOUNT, "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        if done.returncode != 0:
            pytest.skip(f"a file system cannot be mounted here: {done.stderr.strip()}")
        return folder

    yield mount
    while os.path.ismount(folder):
        subprocess.run([str(UMOUNT), "-l", str(folder)], check=True)


@pytest.fixture
def unwritable(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """Yield a folder that cannot be written. For root, who may write anywhere, it is a read-only file system."""
    if os.geteuid() == 0:
        mount = request.getfixturevalue("mounted")
        mount()
        yield mount("remount,ro")
    else:
        folder = tmp_path / "unwritable"
        folder.mkdir(mode=0o500)
        yield folder
        folder.chmod(0o700)
