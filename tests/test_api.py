"""The public API: the examples of docs/api.md, typed results, silence."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from paths import ROOT

import compress
from compress.core.errors import DataError, ModelError, PipelineError, StageError
from compress.core.measurement import Measurement

BLOCKS = re.findall(r"(<!-- tensorflow -->\n)?```python\n(.*?)```", (ROOT / "docs" / "api.md").read_text(), re.S)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tiny.project(tmp_path)
    monkeypatch.chdir(tmp_path)
    return path


@pytest.mark.essential
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
def test_the_example_of_load_model(project: Path) -> None:
    import numpy as np

    from compress.model.ir import tensorflow

    keras = tensorflow.keras()
    inputs = keras.Input((4,))
    original = keras.Model(inputs, keras.layers.Dense(3)(inputs))
    original.save("model.keras")
    code = next(code for marked, code in BLOCKS if marked and "load_model" in code)
    names = {"compress": compress}
    exec(code, names)
    samples = np.ones((2, 4), np.float32)
    np.testing.assert_allclose(names["model"](samples), original(samples), rtol=1e-5)


def test_a_run_is_silent_and_leaves_signals_alone(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    result = compress.run(project)
    assert capsys.readouterr() == ("", "")  # the TFLite runtime's native log is not caught
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    assert result.status == "ok"
    assert all(isinstance(measurement, Measurement) for measurement in result.result.values())


def test_the_traceback_of_an_unexpected_error_is_in_the_log(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*ignored: object) -> None:
        raise ZeroDivisionError("unexpected")

    monkeypatch.setattr("compress.pipeline.stages.package.Package.run", fail)
    with pytest.raises(StageError, match=r"ZeroDivisionError: unexpected; the traceback is in runs/\w+/run\.log"):
        compress.run(project)
    (log,) = Path("runs").glob("*/run.log")
    assert "in fail\n" in log.read_text()


def test_a_result_over_the_budget_is_returned(tmp_path: Path) -> None:
    result = compress.run(tiny.project(tmp_path, [], budget={"size_bytes": 1}), out=tmp_path / "out")
    assert (result.status, result.bundle) == ("over budget", None)


def test_wrong_arguments(project: Path) -> None:
    with pytest.raises(PipelineError, match="force: unknown stage 'compil'; allowed: model, compile, package"):
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
    heavy = {"numpy", "pydantic", "keras", "compress.surface.api"}
    code = f"import sys, compress; sys.exit(bool({heavy} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


@pytest.mark.tensorflow
def test_the_example_of_a_model_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keras: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    keras.utils.set_random_seed(0)
    code = next(code for marked, code in BLOCKS if marked and "compress.prune" in code)
    names: dict[str, Any] = {"compress": compress}
    exec(code, names)
    shown = capsys.readouterr()
    assert shown.out.startswith(str(len(names["quantized"].content)))
    assert shown.err == ""
    assert names["smaller"].count_params() < names["original"].count_params()
    assert compress.check("digits.tflite").complete
    inputs, labels = names["data"].inputs("test"), names["data"].labels("test")
    accuracy = float((np.asarray(names["student"](inputs)).argmax(axis=1) == labels).mean())
    assert accuracy > 0.3
    assert [path.name for path in tmp_path.iterdir()] == ["digits.tflite"]


def arrays(count: int = 40) -> tuple[np.ndarray, np.ndarray]:
    return np.zeros((count, 4, 4, 1), np.uint8), np.arange(count) % 2


def test_splits_of_arrays_that_are_not_passed_are_taken_from_training() -> None:
    data = compress.Dataset.from_arrays(arrays(), test=arrays(6), class_names=["a", "b"])
    assert {split: len(data.inputs(split)) for split in ("train", "validation", "test")} == {
        "train": 36,
        "validation": 4,
        "test": 6,
    }


def test_the_digest_of_arrays_follows_their_content() -> None:
    samples, labels = arrays()
    digest = compress.Dataset.from_arrays((samples, labels), class_names=["a", "b"]).digest
    assert compress.Dataset.from_arrays((samples.copy(), labels), class_names=["a", "b"]).digest == digest
    changed = samples.copy()
    changed[0, 0, 0, 0] = 1
    assert compress.Dataset.from_arrays((changed, labels), class_names=["a", "b"]).digest != digest
    assert compress.Dataset.from_arrays((samples, 1 - labels), class_names=["a", "b"]).digest != digest


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ((np.zeros((3, 4)), np.zeros(2, int)), "3 samples have 2 labels"),
        ((np.zeros((3, 4)), np.full(3, np.nan)), "labels have values that are NaN"),
        ((np.zeros((3, 4)), np.array(["a", "b", "c"])), "labels are <U1"),
        ((np.array(["a", "b"]), np.zeros(2, int)), "samples are <U1"),
    ],
)
def test_arrays_that_do_not_fit_together(train: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        compress.Dataset.from_arrays(train, class_names=["a", "b"])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"epoch": 1}, "prune: epoch: Extra inputs are not permitted; allowed: .*epochs"),
        ({"keep": 2.0}, "prune: keep: Input should be less than 1"),
        ({"distill": object()}, "prune: a setting is not a plain value"),
        ({"objective": "latency", "host": "mars"}, "unknown host 'mars'"),
    ],
)
def test_wrong_settings_of_a_stage(settings: dict[str, Any], message: str) -> None:
    data = compress.Dataset.from_arrays(arrays(), class_names=["a", "b"])
    with pytest.raises(PipelineError, match=message):
        compress.prune(None, data, **settings)


def test_the_data_of_a_pipeline_file(project: Path) -> None:
    assert compress.load_data(project).class_names
