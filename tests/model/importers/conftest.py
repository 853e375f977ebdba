"""Keras and tf_keras without their warnings, which are errors here, and the real models if there are any."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from paths import SHARED

from compress.model.importers.onnx import child_processes
from compress.model.ir import tensorflow


@pytest.fixture
def real_model() -> Callable[[str], Path]:
    """Return a function that finds a real model file, or skips the test."""

    def find(name: str) -> Path:
        path = SHARED / "models" / (name if "/" in name else f"keras/{name}")
        if not path.exists():
            pytest.skip(f"{path} is not there; CORALLINE_SHARED names the folder of shared files")
        return path

    return find


@pytest.fixture(scope="session")
def keras() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return tensorflow.keras()


@pytest.fixture(scope="session")
def tf_keras(keras: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import tf_keras

        return tf_keras


@pytest.fixture
def saved(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that gives a model (of either Keras) random weights, and saves it."""

    def save(model: Any, name: str) -> Path:
        random = np.random.default_rng(7)
        for weight in model.weights:
            if "float" in str(weight.dtype):
                low = 0.1 if "variance" in weight.name else -0.4
                weight.assign(random.uniform(low, low + 0.8, weight.shape))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model.save(tmp_path / name)
        return tmp_path / name

    return save


@pytest.fixture
def saved_onnx(tmp_path: Path) -> Callable[[Any], Path]:
    """Return a function that writes an ONNX model of `one_node`."""

    def save(model: Any) -> Path:
        path = tmp_path / "model.onnx"
        path.write_bytes(model.proto().SerializeToString())
        return path

    return save


@pytest.fixture
def onnx_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run ONNX models without child processes, which take a second each. Only for models that do not crash."""
    monkeypatch.setattr(child_processes, "check_readable", lambda path, shapes: None)

    def run_folder(folder: Path, count: int) -> None:
        try:
            child_processes.run_session(folder, count)
        except Exception as error:  # as in `run_in_child`
            raise child_processes.OnnxRuntimeFailedError(str(error)) from error

    monkeypatch.setattr(child_processes, "run_folder", run_folder)
