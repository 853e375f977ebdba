"""Bundles of every kind of model, packed by the stage, on the device: several inputs and outputs, and no labels."""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import devices
import numpy as np
import pytest
import several
import tiny
from serving import serving

from compress.bundling import packing
from compress.bundling.packing import Packing, pack
from compress.core.artifact import BUNDLE_FILE, Artifact, Kind
from compress.data.dataset import Dataset
from compress.learning.context import Context
from compress.model.tflite.interpreter import LoadedModel
from compress.pipeline.probes.original_outputs import TaughtByOriginal
from compress.pipeline.stages.package import Package
from compress.targets import load
from compress.tasks import TASKS
from deploy import Model, NamedOutputs
from deploy import __main__ as command
from deploy.contract import bundle
from deploy.contract.errors import ImageError
from deploy.contract.tensors import TensorDescription
from deploy.runner import accuracy, answers, golden, measurement
from deploy.runner.answers import Answer, ChosenLabels
from deploy.runner.runtime import RuntimeOptions
from deploy.service.serve import _facts

pytestmark = pytest.mark.usefixtures("nowhere")

SAMPLES = 40
random = np.random.default_rng(11)
IMAGES = random.random((SAMPLES, 4, 4, 1), np.float32)
STATES = random.uniform(-4, 4, (SAMPLES, *several.STATE)).astype(np.float32)
ROWS = np.concatenate([IMAGES.reshape(SAMPLES, -1), STATES.reshape(SAMPLES, -1)], axis=1)
CPU = RuntimeOptions("cpu")
Make = Callable[..., bytes]
Pack = Callable[..., bundle.Bundle]


def artifact(folder: Path, content: bytes) -> Artifact:
    folder.mkdir(parents=True)
    (folder / "model.tflite").write_bytes(content)
    digests = {"model.tflite": hashlib.sha256(content).hexdigest()}
    return Artifact(hashlib.sha256(content).hexdigest(), Kind.TFLITE, folder, digests, {}, 0.0)


@pytest.fixture
def packed(tmp_path: Path) -> Pack:
    """Return a function that packs a model for data, with the stage."""

    def make(
        model: Make, samples: Any, labels: Any = None, specification: Any = None, **settings: Any
    ) -> bundle.Bundle:
        changes = {name: settings.pop(name) for name in ("golden", "evaluation") if name in settings}
        data: Any = Dataset.from_arrays((samples, labels), **settings)
        original = artifact(tmp_path / "original", model(int8=False))
        if TASKS[data.task].learns_from_original:
            data = TaughtByOriginal(data, original, tiny.Notes())
        folder = tmp_path / "work"
        folder.mkdir()
        context = Context(
            "tiny", folder, data, original, load("edgetpu"), 0, False, tiny.Notes(), specification=specification
        )
        Package(**changes).run(artifact(tmp_path / "int8", model()), context)
        return bundle.read(str(folder / BUNDLE_FILE))

    return make


OUTPUTS = [
    {"name": "scores", "shape": [3], "form": "values", "deviation": 1.0},
    {"name": "next", "shape": [2, 3], "form": "values", "deviation": 1.0},
    {"name": "mask", "shape": [4, 4, 2], "form": "values", "deviation": 1.0},
]


@pytest.fixture
def two_inputs(packed: Pack) -> bundle.Bundle:
    """Return a bundle of the model with two inputs and three outputs, of data without labels."""
    return packed(several.two_inputs, ROWS, specification={"outputs": OUTPUTS})


def host_rows(opened: bundle.Bundle, role: str, folder: Path, rows: Any) -> Any:
    (folder / "m.tflite").write_bytes(opened.content(role))
    return LoadedModel(folder / "m.tflite", reproducible=True).scores(rows)


def test_several_inputs_and_outputs_are_described(two_inputs: bundle.Bundle) -> None:
    assert (two_inputs.task, list(two_inputs.labels)) == ("outputs", [])
    model = two_inputs.models["int8"]
    assert [tensor.name for tensor in model.inputs] == ["image", "state"]
    assert [(tensor.name, tensor.dtype, tensor.shape) for tensor in model.outputs] == [
        ("scores", "int8", (1, 3)),
        ("next", "int8", (1, 2, 3)),
        ("mask", "float32", (1, 4, 4, 2)),
    ]
    scales = [tensor.scale for tensor in model.outputs]
    assert scales[0] != scales[1]
    assert scales[2] is None
    entry = two_inputs.manifest["evaluation"]
    assert "labels" not in entry
    assert two_inputs.array(entry["outputs"]["int8"]).shape == (8, 3 + 6 + 32)
    assert entry["metrics"]["error_int8"]["value"] > 0


def test_several_inputs_by_name_and_in_order(two_inputs: bundle.Bundle, tmp_path: Path) -> None:
    expected = host_rows(two_inputs, "int8", tmp_path, ROWS[:3])
    with Model(two_inputs, "int8", kernels="reproducible") as model:
        for index in range(3):
            named = model({"state": STATES[index], "image": IMAGES[index]})
            assert isinstance(named, NamedOutputs)
            assert {name: named[name].shape for name in named} == {"scores": (3,), "next": (2, 3), "mask": (4, 4, 2)}
            flat = np.concatenate([named[name].ravel() for name in named])
            np.testing.assert_array_equal(flat, expected[index])
            for other in ([IMAGES[index], STATES[index]], ROWS[index]):
                again = model(other)
                assert all(np.array_equal(again[name], named[name]) for name in named)
        assert len(model.batch(list(ROWS[:4]))) == 4


@pytest.mark.parametrize(
    ("sample", "says"),
    [
        ({"image": IMAGES[0]}, "the sample has the inputs image; to do: pass image, state"),
        ({}, r"the sample has the inputs \(none\)"),
        ([IMAGES[0]], "the model has 2 inputs; to do: pass a map or a list of arrays for image, state"),
        ("text", "the bundle takes no texts"),
        ([IMAGES[0], STATES[0].T], r"the input state is float32 \[3, 2\]; to do: pass an array of the shape \[2, 3\]"),
        ([IMAGES[0], STATES[0].astype(str)], "the input state is <U"),
        (ROWS[0][1:], r"has the shape \[21\] after preprocessing, and the model takes \[22\]"),
    ],
)
def test_inputs_that_do_not_fit(two_inputs: bundle.Bundle, sample: Any, says: str) -> None:
    with Model(two_inputs, "int8") as model, pytest.raises(ImageError, match=says):
        model(sample)


def test_inputs_are_written_where_the_runtime_reads_them(two_inputs: bundle.Bundle) -> None:
    with Model(two_inputs, "int8", kernels="reproducible") as model:
        tensors = model.prepare(ROWS[5])

        def fill(image: Any, state: Any) -> None:
            assert image.base is not None  # it is the memory of the runtime
            image[...], state[...] = tensors

        filled, answered = model.filled(fill), model.answer(tensors)
        assert all(np.array_equal(filled[name], answered[name]) for name in answered)


def test_verify_compares_each_output(two_inputs: bundle.Bundle) -> None:
    report = golden.verify(two_inputs, CPU)
    assert report["ok"] is True
    assert {role: comparison["verdict"] for role, comparison in report["golden"].items()} == {
        "original": "equal",
        "int8": "equal",
    }
    int8 = report["golden"]["int8"]
    assert int8["outputs"] == [
        {"name": "scores", "largest_steps": 0},
        {"name": "next", "largest_steps": 0},
        {"name": "mask", "largest_difference": 0.0},
    ]
    assert "same_answers" not in int8
    assert "answers the same" not in golden.text(report)


@pytest.mark.parametrize(
    ("place", "change", "verdict", "name"),
    [(0, 3, "close", "scores"), (0, 9, "different", "scores"), (3, 3, "close", "next"), (9, 0.5, "different", "mask")],
)
def test_each_output_has_its_own_steps(
    two_inputs: bundle.Bundle, place: int, change: float, verdict: str, name: str
) -> None:
    """Rows are float32. They contain steps for two outputs and real values for the third."""
    stored = two_inputs.array("golden-output-int8.npy")
    assert stored.dtype == np.float32
    stored[1, place] += change if stored[1, place] < 0 else -change
    two_inputs.members["golden-output-int8.npy"] = bundle.array_bytes(stored)
    two_inputs.manifest["golden"]["machine"] = "another"
    comparison = golden.golden(two_inputs, "int8", CPU)
    assert (comparison["verdict"], comparison["equal"], comparison["samples"]) == (verdict, 2, 3)
    key = "largest_difference" if name == "mask" else "largest_steps"
    assert {output["name"]: bool(output.get(key)) for output in comparison["outputs"]}[name] is True
    assert comparison[key] == pytest.approx(change)


@pytest.mark.parametrize(("every", "verdict"), [(100, "close"), (2, "different")])
def test_a_few_of_many_values_may_differ_by_more_steps(every: int, verdict: str) -> None:
    content = several.segmenter(classes=16)
    opened = bundle.Bundle(devices.packed({"int8": content}, samples=0, machine="another", task="segmentation"))
    stored = opened.array("golden-output-int8.npy")
    flat = stored.reshape(-1)
    flat[::every] += np.where(flat[::every] < 0, 9, -9).astype(np.int8)
    opened.members["golden-output-int8.npy"] = bundle.array_bytes(stored)
    comparison = golden.golden(opened, "int8", CPU)
    assert (comparison["verdict"], comparison["largest_steps"]) == (verdict, 9)


@pytest.mark.parametrize(("change", "verdict"), [(1e-7, "close"), (1e-4, "different")])
def test_float_outputs_may_be_rounded_in_another_way(two_inputs: bundle.Bundle, change: float, verdict: str) -> None:
    """The kernels are the same, and the runtime may have another version."""
    stored = two_inputs.array("golden-output-int8.npy")
    place = int(stored[1, 9:].argmax()) + 9
    stored[1, place] *= 1 + change
    two_inputs.members["golden-output-int8.npy"] = bundle.array_bytes(stored)
    comparison = golden.golden(two_inputs, "int8", CPU)
    same = golden._same_kernels(Model(two_inputs, "int8", kernels="reproducible"))
    assert (comparison["verdict"], comparison["equal"]) == (verdict if same else "close", 2)


def test_outputs_are_compared_with_those_of_the_original(two_inputs: bundle.Bundle, tmp_path: Path) -> None:
    report = accuracy.compare(two_inputs, CPU)
    assert (report["samples"], report["reference"], report["pairs"]) == (8, "original", [])
    samples = np.stack(two_inputs.samples(two_inputs.manifest["evaluation"]))
    rows = {role: host_rows(two_inputs, role, tmp_path, samples) for role in ("original", "int8")}
    for place, (name, first, last) in enumerate((("scores", 0, 3), ("next", 3, 9), ("mask", 9, 41))):
        before, after = (rows[role][:, first:last].astype(np.float64) for role in ("original", "int8"))
        ours = report["models"]["int8"]["outputs"][place]
        assert ours["name"] == name
        expected = 10 * np.log10((before**2).sum() / ((after - before) ** 2).sum())
        assert ours["sqnr_db"]["value"] == pytest.approx(expected, abs=1e-3)
        assert ours["largest_difference"]["value"] == pytest.approx(np.abs(after - before).max(), rel=1e-6)
        assert report["models"]["original"]["outputs"][place]["sqnr_db"]["value"] == measurement.BEST_DB
    text = accuracy.text(report)
    assert "outputs on 8 samples, compared with those of the original model on the host" in text
    assert "  int8      scores: SQNR " in text
    assert json.loads(json.dumps(report)) == report
    assert accuracy.compare(two_inputs, CPU, 3)["samples"] == 3


def test_outputs_of_the_host_that_do_not_fit(two_inputs: bundle.Bundle) -> None:
    two_inputs.members["evaluation-output-original.npy"] = bundle.array_bytes(np.zeros((8, 5), np.float32))
    with pytest.raises(bundle.BundleError, match="are not 8 rows of 41 values"):
        accuracy.compare(two_inputs, CPU)


@pytest.mark.parametrize("python", devices.pythons())
def test_the_commands_for_several_inputs(two_inputs: bundle.Bundle, python: str, tmp_path: Path) -> None:
    path = tmp_path / "work" / BUNDLE_FILE
    np.savez(tmp_path / "sample.npz", state=STATES[0], image=IMAGES[0])
    verbs = (["run", path, tmp_path / "sample.npz"], ["verify", path], ["bench", path, "--runs", 3, "--no-cold"])
    done = [devices.runner(*verb, "--json", python=python) for verb in verbs]
    assert [process.returncode for process in done] == [0, 0, 0], [process.stderr for process in done]
    ran, verified, measured = (json.loads(process.stdout) for process in done)
    (answer,) = ran["answers"]
    assert [(row["name"], row["shape"]) for row in answer["outputs"]] == [
        ("scores", [3]),
        ("next", [2, 3]),
        ("mask", [4, 4, 2]),
    ]
    assert {comparison["verdict"] for comparison in verified["golden"].values()} <= {"equal", "close"}
    assert len(measured["accuracy"]["models"]["int8"]["outputs"]) == 3
    shown = devices.runner("run", path, tmp_path / "sample.npz", "--top", 2, python=python).stdout
    assert "scores [3] [" in shown
    assert ", ...]" in shown


# --- the service ------------------------------------------------------------------------


def npz(**arrays: Any) -> bytes:
    stream = io.BytesIO()
    np.savez(stream, **arrays)
    return stream.getvalue()


def compressed() -> bytes:
    stream = io.BytesIO()
    np.savez_compressed(stream, image=IMAGES[0], state=STATES[0])
    return stream.getvalue()


def overlapping() -> bytes:
    """Return an archive whose members share their bytes."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as file:
        file.writestr("image.npy", bundle.array_bytes(IMAGES[0]))
        info = file.infolist()[0]
        for index in range(3):
            twin = zipfile.ZipInfo(f"state{index}.npy")
            for name in ("header_offset", "file_size", "compress_size", "CRC"):
                setattr(twin, name, getattr(info, name))
            file.filelist.append(twin)
    return stream.getvalue()


def test_the_service_takes_several_inputs(two_inputs: bundle.Bundle) -> None:
    with Model(two_inputs, "int8") as model, serving(model, _facts(model)) as service:
        facts = service.ask("GET", "/v1/model")[2]
        assert facts["task"] == "outputs"
        assert [tensor["name"] for tensor in facts["inputs"]] == ["image", "state"]
        assert [tensor["shape"] for tensor in facts["outputs"]] == [[1, 3], [1, 2, 3], [1, 4, 4, 2]]
        expected = model([IMAGES[1], STATES[1]])
        for body in (npz(image=IMAGES[1], state=STATES[1]), bundle.array_bytes(ROWS[1])):
            status, _, answer = service.ask("POST", "/v1/predict", body)
            assert status == 200, answer
            assert answer["outputs"] == expected.rows()
            assert [row["values"] for row in answer["outputs"]] == [expected[name].tolist() for name in expected]


def test_all_values_of_large_outputs(two_inputs: bundle.Bundle) -> None:
    body = bundle.array_bytes(ROWS[1])
    with Model(two_inputs, "int8") as model, serving(model) as service:
        expected = model(ROWS[1])
        status, _, content = service.ask("POST", "/v1/predict?format=npz", body)
        assert status == 200
        with np.load(io.BytesIO(content)) as file:
            assert sorted(file.files) == sorted(expected)
            assert all(np.array_equal(file[name], expected[name]) for name in expected)
        assert service.ask("POST", "/v1/predict?format=xml", body)[0] == 400
    opened = bundle.Bundle(devices.packed(samples=0))
    with (
        Model(opened, "int8") as model,
        serving(model, {"name": "x", "role": "int8", "answers": opened.answers}) as service,
    ):
        status, _, answer = service.ask("POST", "/v1/predict?format=npz", bundle.array_bytes(devices.images(1)[0]))
        assert status == 400
        assert "for models whose answer is arrays" in answer["error"]["what"]


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (npz(image=IMAGES[0]), "the sample has the inputs image"),
        (npz(image=IMAGES[0], state=np.full(several.STATE, np.nan)), "NaN or infinite"),
        (npz(image=IMAGES[0], state=np.array([{}], object)), "is not a .npy array of numbers"),
        (npz(**{f"x{index}": np.zeros(1) for index in range(70)}), "has 70 members; to do: send at most 64"),
        (compressed(), "is compressed, or not a .npy array"),
        (overlapping(), "the .npz file cannot be read: File name in directory"),
    ],
)
def test_several_inputs_that_are_refused(two_inputs: bundle.Bundle, body: bytes, says: str) -> None:
    with Model(two_inputs, "int8") as model, serving(model) as service:
        status, _, answer = service.ask("POST", "/v1/predict", body)
        assert status == 400
        assert says in answer["error"]["what"] + "; to do: " + answer["error"]["hint"]
        assert service.server.failures.count == 0


# --- other tasks ------------------------------------------------------------------------


@pytest.mark.parametrize("sigmoid", [True, False])
def test_a_binary_classifier(packed: Pack, sigmoid: bool, tmp_path: Path) -> None:
    def model(*, int8: bool = True) -> bytes:
        return several.binary(int8=int8, sigmoid=sigmoid)

    binary = "probability" if sigmoid else "logit"
    labels = np.arange(SAMPLES) % 2
    opened = packed(model, IMAGES, labels, {"binary": binary}, class_names=("cat", "dog"))
    assert opened.manifest["binary"] == binary
    raw = host_rows(opened, "int8", tmp_path, IMAGES)[:, 0].astype(np.float64)
    likely = raw if sigmoid else 1 / (1 + np.exp(-raw))
    with Model(opened, "int8", kernels="reproducible") as loaded:
        for image, probability in zip(IMAGES, likely, strict=True):
            answer = loaded(image)
            assert isinstance(answer, Answer)
            np.testing.assert_allclose(answer.scores, [1 - probability, probability], atol=1e-6)
            assert answer.label == ("dog" if probability > 0.5 else "cat")
    assert 0 < (likely > 0.5).mean() < 1
    report = accuracy.compare(opened, CPU)
    assert (
        report["models"]["int8"]["accuracy"]["value"]
        == opened.manifest["evaluation"]["metrics"]["accuracy_int8"]["value"]
    )
    int8 = golden.verify(opened, CPU)["golden"]["int8"]
    assert (int8["verdict"], int8["same_answers"]) == ("equal", {"share": 1.0, "total": 4})


def test_a_segmenter(packed: Pack, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    masks = random.integers(0, 3, (SAMPLES, 4, 4))
    opened = packed(
        several.segmenter, IMAGES, masks, {"classes": 3}, class_names=("sky", "road", "tree"), task="segmentation"
    )
    assert (opened.task, list(opened.labels)) == ("segmentation", ["sky", "road", "tree"])
    with Model(opened, "int8", kernels="reproducible") as model:
        answer = model(IMAGES[0])
    np.testing.assert_array_equal(answer.first.ravel(), host_rows(opened, "int8", tmp_path, IMAGES[:1])[0])
    assert answer["mask"].argmax(axis=-1).shape == (4, 4)
    assert answers.to_json(answer, 3)["outputs"][0]["values"] == answer["mask"].tolist()
    assert repr(answer) == "NamedOutputs(mask [4, 4, 3])"
    assert "miou_int8" in opened.manifest["evaluation"]["metrics"]
    (output,) = accuracy.compare(opened, CPU)["models"]["int8"]["outputs"]
    assert 20 < output["sqnr_db"]["value"] < 80
    assert command.main(["run", str(tmp_path / "work" / BUNDLE_FILE), "--role", "int8"]) == 0
    assert "golden-input-0.npy: mask [4, 4, 3] [" in capsys.readouterr().out


def test_large_outputs_do_not_fill_the_bundle(packed: Pack, monkeypatch: pytest.MonkeyPatch) -> None:
    """For each sample, the image takes 64 bytes, and the outputs of both models take 5 * 48."""
    masks = random.integers(0, 3, (SAMPLES, 4, 4))
    monkeypatch.setattr(packing, "MAX_EVALUATION_BYTES", 3 * (64 + 5 * 48) + 1)
    opened = packed(
        several.segmenter, IMAGES, masks, {"classes": 3}, class_names=("a", "b", "c"), task="segmentation", golden=20
    )
    assert len(opened.samples(opened.manifest["evaluation"])) == 3
    assert len(opened.manifest["golden"]["inputs"]) == 3


@pytest.mark.parametrize("binary", ["probability", "logit"])
def test_a_multi_label_classifier(binary: str) -> None:
    contents = {"int8": tiny.classifier()}
    opened = bundle.Bundle(devices.packed(contents, samples=0, task="multi_label", binary=binary))
    limit = 0.5 if binary == "probability" else 0.0
    counts = set()
    with Model(opened, "int8", kernels="reproducible") as model:
        for image in devices.images(20):
            answer = model(image)
            assert isinstance(answer, ChosenLabels)
            raw = answer["scores"]
            likely = raw if binary == "probability" else 1 / (1 + np.exp(-raw))
            np.testing.assert_allclose(answer.scores, likely, rtol=1e-6)
            chosen = [label for label, value in zip(devices.LABELS, raw, strict=True) if value > limit]
            assert sorted(label for label, _ in answer.chosen()) == sorted(chosen)
            assert answers.to_json(answer, 1) == {"labels": answer.rows(1)}
            assert len(answer.rows(1)) == min(len(chosen), 1)
            counts.add(len(chosen))
    assert len(counts) > 1


def test_values_that_json_does_not_have() -> None:
    outputs = NamedOutputs(
        {"x": np.array([[1.5, np.nan], [np.inf, -2]], np.float32), "y": np.arange(6, dtype=np.float32)}
    )
    assert outputs.rows(4) == [
        {"name": "x", "shape": [2, 2], "values": [[1.5, None], [None, -2.0]]},
        {
            "name": "y",
            "shape": [6],
            "note": "the first 4 of 6 values; .npz has all of them",
            "values": [0.0, 1.0, 2.0, 3.0],
        },
    ]
    assert (len(outputs), list(outputs)) == (2, ["x", "y"])


# --- bundles without data ---------------------------------------------------------------


def without_data(folder: Path, roles: tuple[str, ...]) -> bundle.Bundle:
    files = {}
    for role in roles:
        files[role] = folder / f"{role}.tflite"
        files[role].write_bytes(devices.models()[role])
    content = pack(Packing("bare", files, TASKS["outputs"], {}, tiny.Notes()))
    (folder / "bare.coralline").write_bytes(content)
    return bundle.Bundle(content)


@pytest.mark.parametrize("roles", [("int8",), ("int8", "compiled"), ("original", "int8")])
def test_a_bundle_without_data(roles: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    opened = without_data(tmp_path, roles)
    assert (opened.manifest["golden"]["inputs"], opened.manifest["evaluation"]) == ([], None)
    report = golden.verify(opened, CPU)
    assert report["ok"] is True
    assert {comparison["verdict"] for comparison in report["golden"].values()} == {"not run"}
    assert report["golden"]["int8"]["note"] == "the bundle has no golden inputs; the model loads and runs"
    with Model(opened, "int8") as model:
        assert model(IMAGES[0])["scores"].shape == (3,)
    path = str(tmp_path / "bare.coralline")
    assert command.main(["bench", path, "--runs", "3", "--role", "int8", "--json"]) == 0
    measured = json.loads(capsys.readouterr().out)
    assert measured["benchmark"]["preprocessing"]["note"] == "the bundle has no golden inputs"
    assert measured["accuracy"]["accuracy"]["how"] == "missing"
    assert command.main(["verify", path]) == 0
    assert command.main(["run", path, "--role", "int8"]) == 2
    assert "the bundle has no golden inputs; to do: name the files of samples" in capsys.readouterr().err


def test_a_bundle_without_an_original(two_inputs: bundle.Bundle) -> None:
    """Its int8 outputs on the host are the reference."""
    manifest = two_inputs.manifest
    del manifest["models"]["original"]
    for part in ("golden", "evaluation"):
        manifest[part]["outputs"].pop("original")
    opened = bundle.Bundle(bundle.pack(manifest, two_inputs.members))
    report = accuracy.compare(opened, CPU)
    assert report["reference"] == "int8"
    assert {row["sqnr_db"]["value"] for row in report["models"]["int8"]["outputs"]} == {measurement.BEST_DB}
    with Model(opened) as model:
        assert model.role == "int8"


# --- descriptions -----------------------------------------------------------------------


def detail(name: str, shape: tuple[int, ...] = (1, 3)) -> dict[str, Any]:
    return {"name": name, "shape": np.array(shape), "dtype": np.int8, "quantization": (0.5, 3)}


@pytest.mark.parametrize(
    ("tensor", "name"),
    [
        ("scores", "scores"),
        ("serving_default_image:0", "image"),
        ("Identity", "output"),
        ("Identity_3", "output_3"),
        ("StatefulPartitionedCall:2", "output_2"),
        ("StatefulPartitionedCall_1:0", "output_1"),
        ("model/dense/Softmax;model/dense/MatMul", "model/dense/Softmax"),
    ],
)
def test_names_for_applications(tensor: str, name: str) -> None:
    assert packing.plain_name(tensor) == name


def test_names_of_tensors_are_unique() -> None:
    tensors = TensorDescription.of([detail("x"), detail("x"), detail("")])
    assert [tensor.name for tensor in tensors] == ["x", "x_2", ""]
    assert [TensorDescription.parsed(tensor.to_json()) for tensor in tensors] == tensors


def test_outputs_are_put_into_the_order_of_the_manifest(two_inputs: bundle.Bundle) -> None:
    """Outputs are matched by name, or by all other properties if a compiler renamed them."""
    with Model(two_inputs, "int8", kernels="reproducible") as model:
        session, expected = model.session, model.bundle.models["int8"].outputs
        reference = model(ROWS[0])
        for names in (("scores", "next", "mask"), ("a", "b", "c")):
            renamed = [tensor._replace(tensor=name) for tensor, name in zip(expected, names, strict=True)]
            session.outputs = [renamed[place] for place in (2, 0, 1)]
            session.output_indices = [session.output_indices[place] for place in (2, 0, 1)]
            session.arrange(session.inputs, expected)
            assert [tensor.values for tensor in session.outputs] == [tensor.values for tensor in expected]
            outputs = model(ROWS[0])
            assert all(np.array_equal(outputs[name], reference[name]) for name in reference)
