"""`python -m compress import`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import tiny
from paths import ROOT

from compress.surface.cli.main import main

FACTS = {"inputs", "outputs", "layers", "parameters", "parity_max_abs", "parity_max_rel", "parity_against", "refused"}


def ran(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, dict[str, Any]]:
    code = main(["import", *map(str, arguments), "--json"])
    return code, json.loads(capsys.readouterr().out)


def real(name: str) -> Path:
    path = Path(os.environ.get("CORALLINE_SHARED", ROOT.parent / "shared")) / "models" / "keras" / name
    if not path.exists():
        pytest.skip(f"{path} is not there; CORALLINE_SHARED names the folder of shared files")
    return path


@pytest.mark.tensorflow
def test_a_model_is_imported_and_imported_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.keras"
    np.save(tmp_path / "samples.npy", np.random.default_rng(0).random((3, 96, 96, 3)))
    code, report = ran(capsys, real("vww_96.h5"), "-o", out, "--inputs", tmp_path / "samples.npy")
    assert (code, report["status"]) == (0, "imported")
    assert report.keys() >= FACTS
    assert (report["producer"], report["parameters"], report["refused"]) == ("Keras 2.4.0", 221_794, [])
    assert report["inputs"] == [{"name": "input_1", "dtype": "float32", "shape": [None, 96, 96, 3]}]
    assert report["parity_max_abs"] < 1e-5
    assert report["parity_against"].startswith("tf-keras ")
    assert report["parity_samples"] == 5
    assert (report["out"], report["replaced"]) == (str(out), False)
    content = out.read_bytes()
    code, again = ran(capsys, out, "-o", tmp_path / "again.keras")
    assert (code, again["format"], again["parameters"]) == (0, "Keras archive", 221_794)
    assert again["parity_against"].startswith("keras 3.")
    assert main(["import", str(out), "-o", str(tmp_path / "again.keras")]) == 0
    assert "in place of the file that was there" in capsys.readouterr().out
    assert out.read_bytes() == content


def test_a_quantized_file_says_what_it_can_be_used_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "m.tflite"
    path.write_bytes(tiny.classifier(int8=True))
    code, report = ran(capsys, path)
    assert (code, report["status"], report["format"]) == (0, "read", "TFLite file, quantized")
    assert set(report["uses"]) >= {"check", "legalize", "compile", "package", "measure"}
    assert main(["import", str(path)]) == 0
    assert "quantized already" in capsys.readouterr().out


@pytest.mark.tensorflow
def test_a_quantized_file_becomes_a_float_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "m.tflite"
    path.write_bytes(tiny.classifier(int8=True))
    code, report = ran(capsys, path, "-o", tmp_path / "out.keras", "--layers")
    assert (code, report["status"], (tmp_path / "out.keras").is_file()) == (0, "imported", True)
    assert report["rounding"]["largest_steps"] < 1
    assert (report["rounding"]["operators"], len(report["rounding"]["inputs"])) == (2, 1)
    assert any("has values from 0 to 1 in steps of 0.003922" in note for note in report["notes"])
    kinds = [layer["kind"] for layer in report["layer_list"]]
    assert [kind for kind in kinds if kind in ("InputLayer", "Conv2D", "Dense")] == ["InputLayer", "Conv2D", "Dense"]
    assert main(["import", str(path), "-o", str(tmp_path / "out.keras"), "--layers"]) == 0
    text = capsys.readouterr().out
    assert "steps at most between an operator of the file and its float form, in 2 operators" in text
    assert ": Dense [3]" in text


@pytest.mark.tensorflow
def test_a_float_tflite_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "m.tflite"
    path.write_bytes(tiny.classifier(int8=False))
    code, report = ran(capsys, path)
    assert (code, report["status"], report["out"]) == (0, "imported", None)
    assert report["parity_against"].startswith("ai-edge-litert ")
    assert report["parity_max_rel"] < 1e-5


def refusing(path: Path, *layers: Any) -> Path:
    with h5py.File(path, "w") as file:
        file.create_group("model_weights")
        file.attrs["model_config"] = json.dumps({"class_name": "Sequential", "config": {"layers": layers}})
        file.attrs["keras_version"] = "2.4.0"
    return path


@pytest.mark.tensorflow
def test_everything_refused_is_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code_layer = {"class_name": "Lambda", "config": {"name": "code", "function": ["4wEA", None, None]}}
    path = refusing(tmp_path / "m.h5", code_layer, {"class_name": "Mine", "config": {"name": "own"}})
    code, report = ran(capsys, path)
    assert (code, report["status"], report["producer"]) == (4, "failed", "Keras 2.4.0")
    assert [(row["node"], row["operator"]) for row in report["refused"]] == [("code", "Lambda"), ("own", "Mine")]
    assert "bytes of bytecode, whose source is not in the file" in report["refused"][0]["reason"]
    path = refusing(tmp_path / "n.h5", {"class_name": "LocallyConnected2D", "config": {"name": "local"}})
    code, report = ran(capsys, path, "--trust")
    expected = {"node": "local", "operator": "LocallyConnected2D", "reason": "Keras 3 has no such layer"}
    assert (code, report["refused"]) == (4, [expected])


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["missing.h5"], 4, "does not exist"),
        (["model.txt"], 4, "has an unsupported format"),
        (["model.h5", "-o", "model.h5"], 2, "allowed: a name that ends in .keras"),
        (["model.h5", "--inputs", "model.txt"], 3, "an .npy file of samples"),
        (["model.h5", "--signature", "x"], 4, "has no signatures"),
        (
            ["model.h5", "--shape", "x=1,3"],
            4,
            "'shape' cannot be used with this format; allowed: 'shape' with an .onnx file",
        ),
        (["model.onnx", "--shape", "x=1,a"], 2, "'x=1,a' is not an input with its shape, such as images=1,3,320,320"),
        (["model.onnx", "--shape", "1,3"], 2, "'1,3' is not an input with its shape"),
        (["model.onnx", "--shape", "x=0"], 2, "'x=0' is not an input with its shape"),
        ([], 2, "required"),
    ],
)
def test_what_is_wrong_is_said_with_its_exit_code(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    code: int,
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("model.txt", "model.h5"):
        Path(name).write_text("nothing")
    assert main(["import", *arguments]) == code
    assert message in capsys.readouterr().err
    assert Path("model.h5").read_text() == "nothing"
