"""The runner's command line, in separate processes, on every interpreter that has a runtime."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import devices
import numpy as np
import pytest
from PIL import Image

from deploy import __main__ as command
from deploy.contract import bundle, errors
from deploy.contract.errors import ArgumentError
from deploy.runner import samples

pytestmark = pytest.mark.usefixtures("nowhere")


@pytest.mark.parametrize("python", devices.pythons())
def test_every_verb_on_every_interpreter(path: Path, python: str, tmp_path: Path) -> None:
    pyz = devices.pyz(tmp_path / "runner.pyz")
    for verb in ("run", "bench", "verify"):
        more = ["--runs", "5"] if verb == "bench" else []
        done = devices.runner(verb, path, "--json", *more, python=python, pyz=pyz)
        assert done.returncode == 0, done.stderr
        report = json.loads(done.stdout)
        assert (report["schema_version"], report["verb"], report["bundle"]["name"]) == (1, verb, "tiny")


@pytest.mark.parametrize("python", devices.pythons())
def test_the_same_answers_everywhere(path: Path, python: str) -> None:
    reports = [
        json.loads(devices.runner("run", path, "--json", python=interpreter).stdout)
        for interpreter in (python, sys.executable)
    ]
    labels = [[[top["label"] for top in row["top"]] for row in report["answers"]] for report in reports]
    assert labels[0] == labels[1]


def test_run_takes_arrays_and_images(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (image,) = devices.images(1)
    np.save(tmp_path / "image.npy", image)
    Image.fromarray(image[..., 0]).save(tmp_path / "image.png")
    assert command.main(["run", str(path), str(tmp_path / "image.npy"), str(tmp_path / "image.png"), "--json"]) == 0
    first, second = json.loads(capsys.readouterr().out)["answers"]
    assert first["image"] == str(tmp_path / "image.npy")
    assert first["top"] == second["top"]
    assert [row["label"] for row in first["top"]] == ["apple", "pear", "plum"]


def test_a_folder_stands_for_the_samples_in_it_and_in_its_subfolders(tmp_path: Path) -> None:
    names = ("b.JPG", "a.png", "pear/2.jpg", "apple/1.jpg", "apple/more/3.npy")
    for name in (*names, "notes.txt", ".hidden.jpg", ".cache/4.jpg", "apple/.5.jpg"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    paths = samples.listed(["first.jpg", str(tmp_path)])
    assert paths == [
        "first.jpg",
        *(str(tmp_path / name) for name in ("a.png", "b.JPG", "apple/1.jpg", "apple/more/3.npy", "pear/2.jpg")),
    ]


def test_a_folder_without_samples_is_refused(tmp_path: Path) -> None:
    (tmp_path / "photos" / "notes").mkdir(parents=True)
    (tmp_path / "photos" / "notes" / "read.txt").touch()
    with pytest.raises(ArgumentError, match="has no samples"):
        samples.listed([str(tmp_path / "photos")])


def test_a_folder_with_damaged_images_is_run_to_its_end(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Files that are no images, that have another shape, and that cannot be read."""
    folder = tmp_path / "photos"
    folder.mkdir()
    (image,) = devices.images(1)
    for name in ("a.npy", "d.npy"):
        np.save(folder / name, image)
    (folder / "b.jpg").write_bytes(b"no image")
    np.save(folder / "c.npy", np.zeros((3, 3, 2, 2), np.uint8))
    (folder / "e.png").symlink_to(folder / "missing.png")
    assert command.main(["run", str(path), str(folder)]) == 3
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    assert [Path(line.partition(":")[0]).name for line in lines] == ["a.npy", "b.jpg", "c.npy", "d.npy", "e.png"]
    assert lines[0].partition(":")[2] == lines[3].partition(":")[2]
    assert "3 of 5 samples cannot be used" in captured.err
    assert command.main(["run", str(path), str(folder), "--json"]) == 3
    answers = json.loads(capsys.readouterr().out)["answers"]
    assert [row.get("error", {}).get("kind") for row in answers] == [None, "image", "image", None, "file"]
    assert command.main(["run", str(path), str(folder / "b.jpg")]) == 3
    assert "b.jpg" in capsys.readouterr().err


def test_files_are_decoded_as_in_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Colour photos for a model that was trained on grey ones, and the other way round."""
    (grey,) = devices.images(1)
    Image.fromarray(np.repeat(grey, 3, axis=2)).save(tmp_path / "colour.bmp")
    np.save(tmp_path / "grey.npy", grey)
    files = [str(tmp_path / "colour.bmp"), str(tmp_path / "grey.npy")]
    path = write(tmp_path, "grey.coralline", devices.packed(decoding={"image_channels": 1}))
    assert command.main(["run", str(path), *files, "--json"]) == 0
    first, second = json.loads(capsys.readouterr().out)["answers"]
    assert first["top"] == second["top"]
    old = write(tmp_path, "old.coralline", devices.packed())
    assert command.main(["run", str(old), files[0]]) == 3
    assert (
        "the sample has the shape [4, 4, 3] after preprocessing, and the model takes [4, 4, 1]"
        in capsys.readouterr().err
    )
    Image.fromarray(grey[..., 0]).save(tmp_path / "grey.png")
    opened = bundle.Bundle(devices.packed(decoding={"image_channels": 3}))
    assert samples.read(str(tmp_path / "grey.png"), opened.decoding).shape == (6, 5, 3)


def test_without_images_the_golden_inputs_are_run(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["run", str(path), "--top", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [re.sub(r"[\d.]+$", "N", line) for line in lines] == [
        "golden-input-0.npy: apple N",
        "golden-input-1.npy: pear N",
        "golden-input-2.npy: apple N",
    ]


def write(folder: Path, name: str, content: bytes) -> Path:
    (folder / name).write_bytes(content)
    return folder / name


@pytest.mark.parametrize(
    ("arguments", "code", "kind", "says"),
    [
        (["run", "BUNDLE", "nothing.npy"], 6, "file", "it does not exist"),
        (["run", "nothing.coralline"], 6, "file", "it does not exist"),
        (["run", "BUNDLE", "text.npy"], 3, "image", "text.npy is not an array"),
        (["run", "BUNDLE", "text.png"], 3, "image", "text.png: the image cannot be decoded: its format is unknown"),
        (["run", "BUNDLE", "color.npy"], 3, "image", "the model takes [4, 4, 1]"),
        (["run", "BUNDLE", "--top", "0"], 2, "arguments", "--top is 0, and must be at least 1"),
        (["run", "BUNDLE", "--role", "compiled"], 12, "library_missing", "libedgetpu.so.1 is not installed"),
        (["run", "BUNDLE", "--device", "gpu"], 2, "arguments", "is not a device"),
        (["verify", "text.png"], 8, "changed", "not a bundle"),
        (["verify", "broken.coralline"], 8, "changed", "not a bundle, or damaged"),
        (["bench", "BUNDLE", "--runs", "0"], 2, "arguments", "must be from 1 to"),
        (["bench", "BUNDLE", "--meter", "nothing.csv"], 6, "file", "nothing.csv"),
    ],
)
def test_errors_have_exit_codes(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    arguments: list[str], code: int, kind: str, says: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "text.npy", b"text")
    write(tmp_path, "text.png", b"text")
    write(tmp_path, "broken.coralline", path.read_bytes()[:-5])
    np.save(tmp_path / "color.npy", np.zeros((4, 4, 3), np.uint8))
    arguments = [str(path) if argument == "BUNDLE" else argument for argument in arguments]
    assert command.main([*arguments, "--json"]) == code
    captured = capsys.readouterr()
    error = json.loads(captured.out)["error"]
    assert (error["kind"], error["exit_code"]) == (kind, code)
    assert says in captured.err
    assert "Traceback" not in captured.err


def test_the_table_of_exit_codes_is_complete() -> None:
    table = {int(code) for code in re.findall(r"^    (\d+) ", str(errors.__doc__), re.MULTILINE)}
    types = [member for member in vars(errors).values() if isinstance(member, type)]
    classes = [error_type for error_type in types if issubclass(error_type, errors.DeviceError)]
    codes = {error_type.exit_code for error_type in classes} | {bundle.BundleError.exit_code, errors.EXIT_FILES}
    assert table == {0, *codes, errors.EXIT_UNSOUND, errors.EXIT_INTERRUPTED, errors.EXIT_PIPE}


def test_models_that_answer_otherwise_are_13(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    contents = devices.models()
    opened = bundle.Bundle(devices.packed(contents, samples=0))
    other = devices.packed({**contents, "int8": devices.tiny.classifier(seed=5)}, samples=0)
    members = {**opened.members, "golden-output-int8.npy": bundle.Bundle(other).members["golden-output-int8.npy"]}
    path = write(tmp_path, "wrong.coralline", bundle.pack(opened.manifest, members))
    assert command.main(["verify", str(path), "--json"]) == 13
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    assert (report["ok"], report["golden"]["int8"]["verdict"]) == (False, "different")
    assert "the outputs of the models differ from the golden outputs" in captured.err


@pytest.mark.parametrize("verb", ["run", "bench", "verify", "serve"])
def test_a_crash_on_the_cpu_is_a_finding(verb: str, path: Path, tmp_path: Path) -> None:
    folder = devices.crashing_runtime(tmp_path / "packages")
    port = ["--port", 0] * (verb == "serve")
    done = devices.runner(verb, path, "--json", *port, PYTHONPATH=f"{devices.ROOT}:{folder}")
    error = json.loads(done.stdout)["error"]
    assert (done.returncode, error["kind"]) == (11, "crash")
    assert "ended by SIGILL after the TFLite runtime was imported; on the CPU, with ai_edge_litert 9.9" in done.stderr


def test_an_edge_tpu_that_cannot_be_used_is_12(path: Path, tmp_path: Path) -> None:
    more = {"LD_LIBRARY_PATH": devices.stand_in(), "CORALLINE_ROOT": devices.host(tmp_path)}
    done = devices.runner("verify", path, "--json", **more, EDGETPU_STAND_IN="crash-run")
    report = json.loads(done.stdout)
    assert (done.returncode, report["ok"], report["blocked"]["kind"]) == (12, True, "crash")
    done = devices.runner("verify", path, "--json", **more)
    assert (done.returncode, json.loads(done.stdout)["golden"]["compiled"]["verdict"]) == (0, "equal")
    done = devices.runner(
        "verify", path, "--device", "pci", LD_LIBRARY_PATH=devices.stand_in(), EDGETPU_STAND_IN="null"
    )
    assert done.returncode == 12


def test_scores_that_are_no_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    opened = bundle.Bundle(devices.packed({"original": devices.models()["original"]}, samples=0))
    name = opened.manifest["golden"]["inputs"][0]
    members = {**opened.members, name: bundle.array_bytes(np.full((6, 5, 1), np.nan, np.float32))}
    path = write(tmp_path, "nan.coralline", bundle.pack(opened.manifest, members))
    assert command.main(["run", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["answers"][0]["top"][0]["score"] is None
    assert command.main(["run", str(path)]) == 0
    assert "not a number" in capsys.readouterr().out
    assert command.main(["verify", str(path), "--json"]) == 13
    assert json.loads(capsys.readouterr().out)["golden"]["original"]["largest_difference"] is None


def test_out_is_written_whole_or_not_at_all(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "results" / "results.json"
    out.parent.mkdir()
    out.write_text("before")
    monkeypatch.setattr(os, "fsync", lambda number: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    assert command.main(["run", str(path), "--out", str(out)]) == 6
    assert "the disk is full" in capsys.readouterr().err
    assert ([file.name for file in out.parent.iterdir()], out.read_text()) == (["results.json"], "before")
    monkeypatch.undo()
    assert command.main(["run", str(path), "--out", str(out), "--role", "int8", "--json"]) == 0
    assert out.read_text() == capsys.readouterr().out
    assert [file.name for file in out.parent.iterdir()] == ["results.json"]


def test_ctrl_c_is_130(path: Path) -> None:
    arguments = [sys.executable, "-W", "error", "-m", "deploy", "bench", str(path), "--no-cold", "--seconds", "60"]
    process = subprocess.Popen(
        arguments, env=devices.environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    for line in process.stderr:
        if "steady state" in line:
            break
    process.send_signal(signal.SIGINT)
    out, noise = process.communicate(timeout=30)
    assert (process.returncode, out) == (130, "")
    assert "runner: interrupted" in noise
    assert "Traceback" not in noise


def test_without_an_edge_tpu_it_says_so(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["run", str(path)]) == 0
    assert "no Edge TPU is on USB or PCIe: the int8 model runs on the CPU" in capsys.readouterr().err


def test_help_imports_no_numpy() -> None:
    code = "import sys; sys.modules['numpy'] = None; from deploy.__main__ import main; main(['--help'])"
    done: Any = subprocess.run([sys.executable, "-c", code], env=devices.environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "verify" in done.stdout
