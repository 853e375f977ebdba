"""The choice of the runtime, its abilities, and the meaning of its errors."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from deploy.contract.errors import ArgumentError, RuntimeLibraryError
from deploy.runner import runtime
from deploy.runner.runtime import Runtime, RuntimeOptions, load_error


class Interpreter:
    """The interpreter of TFLite 2.4, which has no op resolvers."""

    def __init__(self, model_path: Any = None, model_content: Any = None, num_threads: Any = None) -> None:
        raise SystemError("<built-in method> returned a result with an error set")


def package(monkeypatch: pytest.MonkeyPatch, name: str, version: str) -> None:
    """Install a package that looks like a TFLite runtime."""
    top, module = ModuleType(name), ModuleType(f"{name}.interpreter")
    top.__dict__.update(__version__=version, __path__=[], interpreter=module)
    module.__dict__.update(Interpreter=Interpreter)
    monkeypatch.setitem(sys.modules, name, top)
    monkeypatch.setitem(sys.modules, module.__name__, module)


@pytest.fixture
def none(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Remove all runtimes."""
    monkeypatch.delenv("CORALLINE_RUNTIME", raising=False)
    for name in ("ai_edge_litert", "tflite_runtime", "tensorflow"):
        for loaded in [module_name for module_name in sys.modules if module_name.partition(".")[0] == name]:
            monkeypatch.delitem(sys.modules, loaded)
        monkeypatch.setattr(sys, "path", [])
        monkeypatch.setattr(sys, "meta_path", [Nothing(name), *sys.meta_path])
    return monkeypatch


class Nothing:
    """An import finder that reports a package as not installed."""

    def __init__(self, name: str) -> None:
        self.name = name

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.partition(".")[0] == self.name:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def test_no_runtime_is_told_with_the_command(none: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeLibraryError, match=r"no TFLite runtime .* to do: python3 -m pip install") as caught:
        runtime.find()
    assert (caught.value.kind, caught.value.exit_code) == ("no_runtime", 11)


def test_the_order_is_the_documented_one(none: pytest.MonkeyPatch) -> None:
    package(none, "tflite_runtime", "2.5.0.post1")
    assert runtime.find().name == "tflite_runtime"
    package(none, "ai_edge_litert", "2.3.0")
    assert runtime.find().name == "ai_edge_litert"
    none.setenv("CORALLINE_RUNTIME", "tflite_runtime")
    assert runtime.find().name == "tflite_runtime"
    none.setenv("CORALLINE_RUNTIME", "torch")
    with pytest.raises(
        ArgumentError, match="CORALLINE_RUNTIME is 'torch'; to do: set it to one of: ai_edge_litert, tflite_runtime"
    ):
        runtime.find()


def test_a_runtime_that_cannot_be_imported_is_told(none: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Broken(Nothing):
        def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
            if name == self.name:
                raise ImportError("libstdc++.so.6: version `GLIBCXX_3.4.29' not found")

    none.setattr(sys, "meta_path", [Broken("ai_edge_litert"), *sys.meta_path])
    with pytest.raises(RuntimeLibraryError, match="is installed but cannot be imported: libstdc") as caught:
        runtime.find()
    assert caught.value.kind == "runtime_broken"


def test_old_runtimes_have_fewer_kernels(none: pytest.MonkeyPatch) -> None:
    package(none, "ai_edge_litert", "0.0")
    old_runtime = runtime.find()
    assert (old_runtime.kernels(), old_runtime.keeps_tensors, runtime.reproducible(old_runtime)) == (
        ("default",),
        False,
        "default",
    )
    with pytest.raises(RuntimeLibraryError, match="has no reproducible kernels"):
        runtime.allocated_interpreter(old_runtime, b"", RuntimeOptions(kernels="reproducible"), None)


@pytest.mark.skipif(np.__version__ < "2", reason="numpy 1 is here")
def test_tflite_runtime_beside_numpy_2(none: pytest.MonkeyPatch) -> None:
    package(none, "tflite_runtime", "2.14.0")
    with pytest.raises(RuntimeLibraryError, match=r"built for numpy 1, and numpy 2.* pip install 'numpy<2'") as caught:
        runtime.InferenceSession(runtime.find(), b"", RuntimeOptions())
    assert caught.value.kind == "numpy_2"
    package(none, "tflite_runtime", "2.17.0")  # a custom build: its interpreter raises the error
    with pytest.raises(RuntimeLibraryError, match="was built for numpy 1"):
        runtime.InferenceSession(runtime.find(), b"", RuntimeOptions())


FOUND = Runtime("tflite_runtime", "2.5.0", SimpleNamespace(), frozenset())


@pytest.mark.parametrize(
    ("text", "kind", "says"),
    [
        ("Encountered unresolved custom op: edgetpu-custom-op.Node number 0", "no_delegate", "--role compiled"),
        (
            "Package requires runtime version (14), which is newer than this runtime version (13).",
            "old_library",
            "needs Edge TPU runtime 14, and the installed libedgetpu has runtime 13; to do: sudo apt-get install",
        ),
        (
            "Didn't find op for builtin opcode 'FULLY_CONNECTED' version '9'. An older version",
            "model_too_new",
            "has no FULLY_CONNECTED of version 9",
        ),
        ("something\nelse", "model", "tflite_runtime 2.5.0 refuses the model: something"),
        ("", "model", "refuses the model: RuntimeError"),
    ],
)
def test_refusals_have_names(text: str, kind: str, says: str) -> None:
    error = load_error(FOUND, RuntimeError(text))
    assert (error.kind, says in str(error)) == (kind, True), str(error)


@pytest.mark.parametrize(
    ("name", "version", "newer"),
    [("tflite_runtime", "2.5.0.post1", False), ("tensorflow", "2.11.1", False), ("tflite_runtime", "2.14.0", True)],
)
def test_what_is_too_new_for_libedgetpu(name: str, version: str, newer: bool) -> None:
    assert Runtime(name, version, None, frozenset()).too_new_for_libedgetpu_16 is newer


@pytest.mark.parametrize("device", ["", "cpu", "usb", "pci", "usb:0", "pci:1", ":2"])
def test_devices(device: str) -> None:
    assert RuntimeOptions(device).device == device


@pytest.mark.parametrize("device", ["tpu", "usb:", "usb:-1", "usb:0\n", "cpu:0", "usb:1234"])
def test_no_devices(device: str) -> None:
    with pytest.raises(ArgumentError, match="is not a device"):
        RuntimeOptions(device)


def test_pycoral_is_the_right_one_or_not(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    assert runtime.pycoral() == "missing"
    (tmp_path / "pycoral").mkdir()
    (tmp_path / "pycoral" / "__init__.py").write_text("class CoralReefAtlas: pass\n")
    assert runtime.pycoral() == "other"
    monkeypatch.delitem(sys.modules, "pycoral")
    (tmp_path / "pycoral" / "utils").mkdir()
    (tmp_path / "pycoral" / "utils" / "__init__.py").touch()
    (tmp_path / "pycoral" / "utils" / "edgetpu.py").write_text("def make_interpreter(): pass\n")
    assert runtime.pycoral() == "coral"
    for name in ("pycoral", "pycoral.utils", "pycoral.utils.edgetpu"):
        monkeypatch.delitem(sys.modules, name)
    (tmp_path / "pycoral" / "utils" / "edgetpu.py").write_text("from pycoral.pybind import _pywrap_coral\n")
    assert runtime.pycoral() == "coral"  # built for another Python
