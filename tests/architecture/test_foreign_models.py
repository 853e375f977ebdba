"""Modules that run a model of unknown origin run it in a child process with limits."""

from __future__ import annotations

import ast

from paths import ROOT

CODE = sorted((ROOT / "compress").rglob("*.py"))
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


def callers(names: set[str], owner: str = "") -> set[str]:
    """Return the modules with a call of one of these names; with `owner`, only calls whose dotted name contains it."""
    modules = set()
    for path in CODE:
        text = path.read_text(encoding="utf-8")
        if not any(name in text for name in names) or owner not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.Call):
                continue
            called = ast.unparse(node.func).split(".")
            if called[-1] in names and (not owner or owner in called):
                modules.add(str(path.relative_to(ROOT)))
    return modules


def test_interpreters_and_sessions_are_created_in_child_processes() -> None:
    assert callers(RUNTIMES) == CHILDREN


def test_graphs_of_saved_models_are_loaded_in_a_child_process() -> None:
    assert callers({"load"}, "saved_model") == SAVED_MODELS


def test_keras_loads_models_in_one_place() -> None:
    assert callers({"load_model"}, "saving") | callers({"model_from_json"}) == set(BUILDERS)


def test_no_module_refers_to_the_interpreter_of_the_runtime() -> None:
    """`LoadedModel` and `Runner` use only the isolated interpreter."""
    named = {path for path in CODE if "ai_edge_litert.interpreter" in path.read_text(encoding="utf-8")}
    assert {str(path.relative_to(ROOT)) for path in named} == {"compress/model/tflite/runtime.py"}
