"""Fixtures that all tests share, the choice of quick tests, and reproducible fuzzing without time limits."""

from __future__ import annotations

import ast
import functools
import json
import os
import resource
import shutil
import signal
import subprocess
import warnings
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import interpreters
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


DURATIONS = Path(__file__).parent / "durations.json"
"""CPU seconds of the test functions that take longer than LONG_SECONDS, each with all its parameters."""
LONG_SECONDS = 0.5


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that measures the tests."""
    text = f"write the test functions that take more than {LONG_SECONDS} s of CPU time to {DURATIONS.name}"
    parser.addoption("--record-durations", action="store_true", help=text)


def pytest_configure(config: pytest.Config) -> None:
    """Measure the tests with the option."""
    if config.getoption("--record-durations"):
        config.pluginmanager.register(Recording())


@pytest.hookimpl(tryfirst=True)  # before pytest selects by marker
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark long tests, and put their files first, then TensorFlow: short files fill the workers at the end."""
    durations = json.loads(DURATIONS.read_text(encoding="utf-8"))
    for item in items:
        if _has_old_interpreter(item):
            item.add_marker("night")
        elif _function(item) in durations and not item.get_closest_marker("essential"):
            item.add_marker("long")
    long = {item.path for item in items if item.get_closest_marker("long")}
    tensorflow = {item.path for item in items if item.get_closest_marker("tensorflow")}
    items.sort(key=lambda item: (item.path not in long, item.path not in tensorflow))


def _has_old_interpreter(item: pytest.Item) -> bool:
    """Return whether a test has a Python other than 3.7, the oldest one, which `make test-all` tests."""
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    version = parameters.get("interpreter", parameters.get("python"))
    return isinstance(version, str) and version in [*interpreters.RUNTIMES][1:]


def _function(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[0]


class Recording:
    """CPU seconds of test functions, with those of the programs that they start and with their share of fixtures.

    CPU time is hardly longer on a busy machine. A fixture that several tests share counts in equal parts for the test
    functions that use it, and TensorFlow's import for none.
    """

    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._fixtures: defaultdict[object, float] = defaultdict(float)
        self._users: defaultdict[object, set[str]] = defaultdict(set)
        self._phase_start = 0.0
        self._shared_seconds = 0.0

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self) -> None:
        """Import TensorFlow, which the first test would have to pay for."""
        _import_keras()

    def pytest_runtest_logstart(self) -> None:
        """Start to measure a test."""
        self._phase_start = _cpu_seconds()

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Generator[None, object, object]:
        """Measure a fixture that several tests share, without the fixtures that it needs itself."""
        if fixturedef.scope == "function":
            return (yield)
        start, inner = _cpu_seconds(), self._shared_seconds
        try:
            return (yield)
        finally:
            seconds = _cpu_seconds() - start - (self._shared_seconds - inner)
            self._fixtures[fixturedef] += seconds
            self._shared_seconds += seconds

    def pytest_runtest_makereport(self, item: pytest.Item) -> None:
        """Add a phase of a test to its function."""
        now = _cpu_seconds()
        self._seconds[_function(item)] += now - self._phase_start - self._shared_seconds
        self._phase_start, self._shared_seconds = now, 0.0
        for definitions in item._fixtureinfo.name2fixturedefs.values():
            self._users[definitions[-1]].add(_function(item))

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Write the durations, or send them from a worker; functions that exist and did not run stay as they were."""
        for fixture, seconds in self._fixtures.items():
            for function in self._users[fixture]:
                self._seconds[function] += seconds / len(self._users[fixture])
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["durations"] = dict(self._seconds)
            return
        durations = json.loads(DURATIONS.read_text(encoding="utf-8")) | self._seconds
        durations = {
            name: round(value, 2)
            for name, value in sorted(durations.items())
            if value > LONG_SECONDS and _exists(name, session.config.rootpath)
        }
        DURATIONS.write_text(json.dumps(durations, indent=0) + "\n", encoding="utf-8")

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Add the durations of a worker."""
        for function, seconds in getattr(node, "workeroutput", {}).get("durations", {}).items():
            self._seconds[function] += seconds


def _exists(function: str, root: Path) -> bool:
    """Return whether a test function, `file::name`, is still in its file."""
    file, *_, name = function.split("::")
    return name in _functions(root / file)


@functools.cache
def _functions(path: Path) -> set[str]:
    """Return the names of the functions in a file; none if there is no such file."""
    if not path.exists():
        return set()
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef)}


def _cpu_seconds() -> float:
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


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
    return _import_keras()


def _import_keras() -> Any:
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
