"""Rules about imports: the modules that each package may import, and where in a module."""

from __future__ import annotations

import ast
import functools
import graphlib
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import tiny
from paths import ROOT
from tiny import Coralline, environment

from compress.surface.cli.main import main

DEVICE_SIDE = ("coralline_pycoral", "deploy")
PACKAGES = ("compress", "darwinn", *DEVICE_SIDE)
CODE = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
LATE = ("tensorflow", "keras", "tf_keras", "tensorflow_model_optimization")
TENSORFLOW_ROOMS = ("model/ir", "model/importers", "tasks", "learning")
SLOW = {*LATE, "scipy", "h5py", "onnx"}

WRAPPER = """
import sys
from compress.__main__ import main
try:
    code = main(sys.argv[2:])
except SystemExit as end:
    code = end.code
with open(sys.argv[1], "w") as stream:
    stream.write("\\n".join(sys.modules))
sys.exit(code)
"""


def imported(tmp_path: Path, *arguments: object, before: str = "") -> set[str]:
    """Return the top-level modules that a command has imported by its end."""
    command = [sys.executable, "-W", "error", "-c", before + WRAPPER, tmp_path / "modules", *arguments]
    done = subprocess.run(
        [str(part) for part in command], cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return {name.partition(".")[0] for name in (tmp_path / "modules").read_text().split()}


@pytest.mark.parametrize("arguments", [["--help"], ["stages", "--help"], ["schema", "--help"]])
def test_help_needs_nothing_but_python(tmp_path: Path, arguments: list[str]) -> None:
    block = (
        "import sys\nfor name in ('numpy', 'pydantic', 'ruamel', 'rich', 'PIL', 'jinja2'): sys.modules[name] = None\n"
    )
    modules = imported(tmp_path, *arguments, before=block)
    assert not modules & {*SLOW, "ai_edge_litert"}


@pytest.mark.parametrize(
    "arguments",
    [["stages"], ["stages", "--json"], ["schema"], [ROOT / "pipeline.yaml", "--dry-run"]],
    ids=lambda arguments: " ".join(Path(str(argument)).name for argument in arguments),
)
def test_commands_that_do_no_work_import_nothing_slow(tmp_path: Path, arguments: list[object]) -> None:
    assert not imported(tmp_path, *arguments) & SLOW


def test_a_run_with_nothing_to_do_imports_nothing_slow(tmp_path: Path, coralline: Coralline) -> None:
    path = tiny.project(tmp_path / "project")
    assert coralline(path).returncode == 0
    assert not imported(tmp_path, path, "--json") & SLOW  # ai_edge_litert is: its schema identifies the model
    record = json.loads((tmp_path / "runs" / "tiny" / "report.json").read_text())
    assert set(tiny.statuses(record).values()) == {"cached"}


def test_a_run_of_stages_that_need_no_tensorflow_does_not_import_it(tmp_path: Path) -> None:
    assert not imported(tmp_path, tiny.project(tmp_path / "project")) & SLOW


MODULES = [".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in CODE]
EACH = """
import sys
for name in sys.argv[1:]:
    try:
        __import__(name)
    except Exception as error:
        print(f"{name}: {type(error).__name__}: {error}")
    print(*(f"{name} imports {slow}" for slow in SLOW & sys.modules.keys()), sep="\\n", end="")
"""


def test_every_module_can_be_imported_and_imports_nothing_slow() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", f"SLOW = {SLOW!r}\n{EACH}", *MODULES],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ""


def test_the_working_directory_does_not_shadow_what_is_shipped(tmp_path: Path) -> None:
    for name in ("models", "calibration_data", "runs", "tests"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('imported from the working directory')\n")
    imported(tmp_path, ROOT / "pipeline.yaml", "--dry-run", "--out", tmp_path / "out")


# --- checks of the source code ----------------------------------------------------------


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def imports(tree: ast.AST, late: bool = False) -> Iterator[tuple[str, int, bool]]:
    """Yield imported modules with their lines, and whether the import is late (in a function, or for type checkers)."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno, late) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((f"{node.module}.{alias.name}", node.lineno, late) for alias in node.names)
        function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        typing = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING" and not node.orelse
        yield from imports(node, late or function or typing)


def test_every_module_can_be_imported_first() -> None:
    """The order of imports does not matter if the imports outside of functions have no cycle."""
    graph: dict[str, set[str]] = {}
    for module, path in zip(MODULES, CODE, strict=True):
        names = {name for name, _, late in imports(parsed(path)) if not late}
        modules = {name if name in MODULES else name.rpartition(".")[0] for name in names} & {*MODULES}
        packages = {package for name in modules for package in MODULES if name.startswith(f"{package}.")}
        graph[module] = modules | {package for package in packages if not f"{module}.".startswith(f"{package}.")}
    assert {*graphlib.TopologicalSorter(graph).static_order()} == {*MODULES}


def test_tensorflow_is_imported_late_and_in_few_rooms_only() -> None:
    found = {(name, late) for name, _, late in imports(parsed(ROOT / "compress" / "model" / "ir" / "tensorflow.py"))}
    assert {("tensorflow", True), ("keras", True), ("numpy", False)} <= found
    rooms = [ROOT / "compress" / room for room in TENSORFLOW_ROOMS]
    rooms.append(ROOT / "deploy" / "runner" / "runtime.py")  # on a device where TensorFlow is the only runtime
    violations = [
        f"{path}:{line} imports {name}"
        for path in CODE
        for name, line, late in imports(parsed(path))
        if name.partition(".")[0] in LATE and not (late and any(path.is_relative_to(room) for room in rooms))
    ]
    assert violations == []


def test_nothing_is_imported_by_way_of_a_string() -> None:
    violations = [
        f"{path}:{node.lineno}"
        for path in CODE
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in ("import_module", "__import__")
    ]
    assert violations == []


def test_the_device_side_needs_numpy_alone() -> None:
    always = {*sys.stdlib_module_names, "numpy", *DEVICE_SIDE}
    if_installed = {"tflite_runtime", "ai_edge_litert", "tensorflow", "PIL", "pycoral", "tuf"}
    of_the_service = {"prometheus_client", "waitress"}  # `serve` imports the folder late, and says what is missing
    violations = [
        f"{path}:{line} imports {name}"
        for path in CODE
        if path.is_relative_to(ROOT / "deploy") or path.is_relative_to(ROOT / "coralline_pycoral")
        for name, line, late in imports(parsed(path))
        if name.partition(".")[0] not in (always | if_installed if late else always)
        and not (path.parent.name == "service" and name.partition(".")[0] in of_the_service)
    ]
    assert violations == []


CHIP = re.compile(r"edge_?tpu|coral(?!line)", re.IGNORECASE)
CHIP_IN_CODE = {
    "compress/targets/__init__.py": "the default target",
    "compress/core/artifact.py": "the compiled model's file names are those that the vendor's compiler and runtime use",
}
"""Modules of compress that name the chip in code, each with the reason; the target's folder and the commands may."""


def words_of_code(tree: ast.AST) -> Iterator[str]:
    """Yield every identifier, and every string without spaces: strings with spaces are text for people."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.arg | ast.keyword):
            yield node.arg or ""
        elif isinstance(node, ast.alias | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and " " not in node.value:
            yield node.value


def test_few_modules_know_the_chip() -> None:
    compress = ROOT / "compress"
    words = {*words_of_code(parsed(compress / "targets" / "__init__.py"))}
    assert {"DEFAULT", "TARGET", "allowed", "load", "compress.targets.base", "edgetpu"} <= words
    allowed = (compress / "targets" / "edgetpu", compress / "surface" / "cli")
    others = [path for path in CODE if path.is_relative_to(compress) and not path.is_relative_to(allowed[0])]
    others = [path for path in others if not path.is_relative_to(allowed[1])]
    modules = {str(path.relative_to(ROOT)) for path in others if any(map(CHIP.search, words_of_code(parsed(path))))}
    assert modules == CHIP_IN_CODE.keys()


def test_the_command_is_the_module() -> None:
    (script,) = entry_points(group="console_scripts", name="coralline")
    loaded: Callable[..., int] = script.load()
    assert loaded is main
