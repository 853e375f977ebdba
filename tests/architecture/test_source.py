"""Rules of the source code about class names, names of tasks, and models of unknown origin."""

from __future__ import annotations

import ast
import functools
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from paths import ROOT

from compress.tasks import TASKS

ALLOWED = (
    "compress/tasks/",
    "compress/data/",
    "deploy/contract/",
    "deploy/runner/answers.py",
    "deploy/runner/drawing.py",
)
RUNTIMES = {"Interpreter", "InferenceSession"}
CHILDREN = {"compress/model/tflite/runtime.py", "compress/model/importers/onnx/child_processes.py"}
"""The modules that create an interpreter or a session, in functions that a child process calls."""
SAVED_MODELS = {"compress/model/importers/saved_model/conversion.py"}
"""The module that calls `tf.saved_model.load`, in the function that `sandbox.run` calls."""
BUILDERS = {
    "compress/model/importers/keras/keras_file.py": "builds layers of a fixed list from a checked configuration",
    "compress/model/importers/saved_model/keras_model.py": "the same, from the configuration in a SavedModel",
}
"""The modules that call `load_model` or `model_from_json` of Keras in the main process, and the reason why each may."""


@functools.cache
def source(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def modules(*packages: str) -> Iterator[Path]:
    for package in packages:
        yield from sorted((ROOT / package).rglob("*.py"))


def test_no_class_name_is_used_twice() -> None:
    places = defaultdict[str, list[str]](list)
    for path in modules("compress", "darwinn", "deploy"):
        for node in ast.walk(ast.parse(source(path))):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert {name: locations for name, locations in places.items() if len(locations) > 1} == {}


# --- tasks: nothing outside compress/tasks and the data sources branches on the name of a task ---


def comparisons(text: str) -> list[int]:
    """Return the lines that compare a value with the name of a task, or match one."""
    lines = []
    for node in ast.walk(ast.parse(text)):
        parts: list[ast.AST] = []
        if isinstance(node, ast.Compare):
            parts = [node.left, *node.comparators]
        elif isinstance(node, ast.MatchValue):
            parts = [node.value]
        constants = [constant for part in parts for constant in ast.walk(part) if isinstance(constant, ast.Constant)]
        lines += [constant.lineno for constant in constants if constant.value in TASKS]
    return lines


def test_no_other_module_branches_on_the_task() -> None:
    assert comparisons(source(ROOT / "deploy" / "contract" / "bundle.py"))  # it may, and does
    branches = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in modules("compress", "darwinn", "deploy")
        if not path.relative_to(ROOT).as_posix().startswith(ALLOWED)
        for line in comparisons(source(path))
    ]
    assert branches == []


# --- models of unknown origin run in a child process with limits ---


def callers(names: set[str], owner: str = "") -> set[str]:
    """Return the modules with a call of one of these names; with `owner`, only calls whose dotted name contains it."""
    found = set()
    for path in modules("compress"):
        text = source(path)
        if not any(name in text for name in names) or owner not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.Call):
                continue
            called = ast.unparse(node.func).split(".")
            if called[-1] in names and (not owner or owner in called):
                found.add(str(path.relative_to(ROOT)))
    return found


def test_interpreters_and_sessions_are_created_in_child_processes() -> None:
    assert callers(RUNTIMES) == CHILDREN


def test_graphs_of_saved_models_are_loaded_in_a_child_process() -> None:
    assert callers({"load"}, "saved_model") == SAVED_MODELS


def test_keras_loads_models_in_one_place() -> None:
    assert callers({"load_model"}, "saving") | callers({"model_from_json"}) == set(BUILDERS)


def test_no_module_refers_to_the_interpreter_of_the_runtime() -> None:
    """`LoadedModel` and `Runner` use only the isolated interpreter."""
    named = {path for path in modules("compress") if "ai_edge_litert.interpreter" in source(path)}
    assert {str(path.relative_to(ROOT)) for path in named} == {"compress/model/tflite/runtime.py"}
