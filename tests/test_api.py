"""The public API: the examples of docs/api.md, typed results, silence."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny
from paths import ROOT

import compress
from compress.errors import ModelError, PipelineError, StageError
from compress.measurement import Measurement

BLOCKS = re.findall(r"(<!-- tensorflow -->\n)?```python\n(.*?)```", (ROOT / "docs" / "api.md").read_text(), re.S)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tiny.project(tmp_path)
    monkeypatch.chdir(tmp_path)
    return path


def test_the_examples(project: Path) -> None:
    names: dict[str, Any] = {}
    examples = [code for marked, code in BLOCKS if not marked]
    assert len(examples) == 3
    for code in examples:
        exec(code, names)
    assert names["result"].model == Path("runs/tiny/model.tflite")
    assert names["result"].bundle.exists()
    assert names["result"].report.exists()
    assert names["result"].original["size_bytes"] == names["result"].result["size_bytes"]
    assert {operator.placement for operator in names["placement"].ops} == {"tpu"}
    assert Path("legal.tflite").exists()


@pytest.mark.tensorflow
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # of Keras, in model.save
def test_the_example_of_load_model(project: Path) -> None:
    import numpy as np

    from compress.ir import tensorflow

    keras = tensorflow.keras()
    inputs = keras.Input((4,))
    original = keras.Model(inputs, keras.layers.Dense(3)(inputs))
    original.save("model.keras")
    ((_, code),) = [block for block in BLOCKS if block[0]]
    names = {"compress": compress}
    exec(code, names)
    samples = np.ones((2, 4), np.float32)
    np.testing.assert_allclose(names["model"](samples), original(samples), rtol=1e-5)


def test_a_run_is_silent_and_leaves_signals_alone(project: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    result = compress.run(project)
    assert capfd.readouterr() == ("", "")
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    assert result.status == "ok"
    assert all(isinstance(each, Measurement) for each in result.result.values())


def test_the_traceback_of_an_unexpected_error_is_in_the_log(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*ignored: object) -> None:
        raise ZeroDivisionError("unexpected")

    monkeypatch.setattr("compress.stages.package.Package.run", fail)
    with pytest.raises(StageError, match=r"ZeroDivisionError: unexpected; the traceback is in runs/\w+/run\.log"):
        compress.run(project)
    (log,) = Path("runs").glob("*/run.log")
    assert "in fail\n" in log.read_text()


def test_a_result_over_the_budget_is_returned(tmp_path: Path) -> None:
    result = compress.run(tiny.project(tmp_path, [], budget={"size_bytes": 1}), out=tmp_path / "out")
    assert (result.status, result.bundle) == ("over budget", None)


def test_wrong_arguments(project: Path) -> None:
    with pytest.raises(PipelineError, match="there is no stage 'compil' to force; allowed: model, compile, package"):
        compress.run(project, force=["compil"])
    with pytest.raises(ModelError, match=r"gone\.tflite"):
        compress.check("gone.tflite")
    with pytest.raises(PipelineError, match="usb4"):
        compress.estimate("model.tflite", "usb4")


def test_names() -> None:
    assert all(getattr(compress, name) for name in compress.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        compress.nothing  # noqa: B018
    assert (ROOT / "compress" / "py.typed").exists()


def test_the_package_itself_is_light() -> None:
    code = "import sys, compress; sys.exit(bool({'numpy', 'pydantic', 'keras', 'compress.api'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
