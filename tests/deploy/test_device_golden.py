"""Golden vectors and three-way accuracy, on bundles whose answers are known."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import detector_files
import devices
import numpy as np
import pytest
import tiny

import compress.core.measurement as host
from compress.model.tflite import graph
from deploy.contract import bundle
from deploy.runner import accuracy, golden, measurement, runtime
from deploy.runner.model import Model
from deploy.runner.runtime import Runtime, RuntimeOptions

pytestmark = pytest.mark.usefixtures("nowhere")


@pytest.fixture(scope="module")
def content() -> bytes:
    return devices.packed()


def changed(content: bytes, steps: int, machine: str | None = None) -> bundle.Bundle:
    """Return a bundle in which one value of the golden int8 outputs is wrong by some steps."""
    opened = bundle.Bundle(content)
    golden = opened.array("golden-output-int8.npy")
    golden[1, 0] += steps if golden[1, 0] < 0 else -steps
    opened.members["golden-output-int8.npy"] = bundle.array_bytes(golden)
    if machine is not None:
        opened.manifest["golden"]["machine"] = machine
    return opened


def test_golden_outputs_are_equal_here(content: bytes) -> None:
    report = golden.verify(bundle.Bundle(content), RuntimeOptions(""))
    assert report["ok"] is True
    assert {role: comparison["verdict"] for role, comparison in report["golden"].items()} == {
        "original": "equal",
        "int8": "equal",
        "compiled": "not run",
    }
    assert report["golden"]["int8"]["largest_steps"] == 0
    assert report["golden"]["compiled"]["error"]["kind"] == "library_missing"
    assert "int8      golden outputs: equal, 3 of 3 equal" in golden.text(report)
    assert json.loads(json.dumps(report)) == report


@pytest.mark.parametrize(
    ("steps", "machine", "verdict"),
    [
        (2, "x86_64", "different"),
        (2, "another", "close"),
        (2, None, "close"),
        (golden.CLOSE_STEPS + 1, "another", "different"),
    ],
)
def test_equal_is_asked_where_the_kernels_are_the_same(
    content: bytes, steps: int, machine: str | None, verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    report = golden.verify(changed(content, steps, machine), RuntimeOptions(""))
    int8 = report["golden"]["int8"]
    assert (int8["verdict"], int8["largest_steps"], int8["equal"]) == (verdict, steps, 2)
    assert report["ok"] is (verdict != "different")
    layer = int8["first_layer"]
    assert (layer["layer"], layer["note"].startswith("optimized and plain kernels agree in every layer")) == (
        None,
        True,
    )
    assert f"by up to {steps} steps" in golden.text(report)


def install(monkeypatch: pytest.MonkeyPatch, read: Callable[[Any, int, Any], Any]) -> None:
    """Install a runtime that returns `read(interpreter, index, value)` for a tensor.

    `interpreter.kernels` is the name of its op resolver; None: the default kernels.
    """
    real_runtime = runtime.find()

    class Interpreter(real_runtime.module.Interpreter):  # type: ignore[misc, name-defined]
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            resolver = options.get("experimental_op_resolver_type")
            self.kernels = resolver and resolver.name

        def get_tensor(self, index: int) -> Any:
            return read(self, index, super().get_tensor(index))

    module = SimpleNamespace(Interpreter=Interpreter, OpResolverType=real_runtime.module.OpResolverType)
    fake = Runtime(real_runtime.name, real_runtime.version, module, real_runtime.arguments)
    monkeypatch.setattr(runtime, "find", lambda: fake)


def optimized(monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    """Install a runtime whose optimized kernels, but not its plain ones, give outputs that are some steps higher.

    With more than CLOSE_STEPS_OPTIMIZED steps, the scores are also in the reverse order.
    """

    def read(interpreter: Any, index: int, value: Any) -> Any:
        if interpreter.kernels == "BUILTIN_REF" or index != interpreter.get_output_details()[0]["index"]:
            return value
        return value + np.int8(steps) if steps <= golden.CLOSE_STEPS_OPTIMIZED else value[:, ::-1]

    install(monkeypatch, read)


@pytest.mark.parametrize(
    ("machine", "steps", "verdict", "says"),
    [
        ("aarch64", golden.CLOSE_STEPS_OPTIMIZED, "close", "the plain C++ kernels give the golden outputs"),
        ("aarch64", golden.CLOSE_STEPS_OPTIMIZED + 1, "different", "give the same answer for 0.333 of 3"),
        ("x86_64", 1, "different", "the kernels are the same"),
    ],
)
def test_optimized_kernels_that_round_in_another_way(
    content: bytes, machine: str, steps: int, verdict: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runtimes differ on aarch64, even if the golden outputs come from the same kind of machine."""
    opened = bundle.Bundle(content)
    opened.manifest["golden"]["machine"] = machine
    monkeypatch.setattr(platform, "machine", lambda: machine)
    optimized(monkeypatch, steps)
    comparison = golden.golden(opened, "int8", RuntimeOptions("cpu"))
    assert (comparison["verdict"], comparison["equal"]) == (verdict, 0)
    assert comparison["largest_steps"] >= steps
    assert says in comparison["note"]
    assert comparison["first_layer"]["layer"] == "scores"


@pytest.mark.parametrize(("broken", "verdict"), [(False, "equal"), (True, "different")])
def test_default_kernels_that_answer_otherwise(
    content: bytes, broken: bool, verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As seen in an emulator: the reproducible kernels were right, but the kernels that applications run were wrong."""

    def read(interpreter: Any, index: int, value: Any) -> Any:
        is_output = index == interpreter.get_output_details()[0]["index"]
        return -value if broken and interpreter.kernels is None and is_output else value

    install(monkeypatch, read)
    comparison = golden.golden(bundle.Bundle(content), "int8", RuntimeOptions("cpu"))
    assert comparison["verdict"] == verdict
    assert (comparison["default_same_answers"]["share"] < 1) is broken
    assert ("the default kernels, which applications run, differ" in comparison["note"]) is broken


SCORE = {"sure": 110, "less": 80, "none": -128}
"""Stored scores of a detector, whose probabilities are 0.99, 0.95 and 0.0006."""
Found = dict[tuple[int, int], tuple[int, str]]
"""The class and the score of the objects, by the row and column of their cell."""


def finding(objects: Found, background: int) -> np.ndarray:
    """Return the scores of the first map of a detector: int8 [1, 8, 8, 3]."""
    scores = np.full((1, 8, 8, 3), background, np.int8)
    for cell, (label, score) in objects.items():
        scores[(0, *cell, label)] = SCORE[score]
    return scores


def verified_detector(
    folder: Path, monkeypatch: pytest.MonkeyPatch, found: Found, found_by_default: Found, **manifest: Any
) -> dict[str, Any]:
    """Return the verdict on a detector that finds other things with the default kernels.

    It finds objects in bright images only. With the default kernels, the scores of the background are higher too, but
    not high enough for objects.
    """

    def read(interpreter: Any, index: int, value: Any) -> Any:
        name = next(detail["name"] for detail in interpreter.get_tensor_details() if detail["index"] == index)
        if not name.startswith("scores"):
            return value
        is_default = interpreter.kernels is None
        is_bright = interpreter.get_tensor(interpreter.get_input_details()[0]["index"]).max() > 0
        background = SCORE["none"] + 40 * is_default
        objects = (found_by_default if is_default else found) if is_bright and name == "scores0-1" else {}
        return finding(objects, background) if value.shape[1] == 8 else np.full_like(value, background)

    opened = bundle.read(str(detector_files.small_bundle(folder, 64, [{"scale": {"from": [0, 255], "to": [0, 1]}}])))
    opened.manifest.update(manifest)
    opened.members["in.npy"] = bundle.array_bytes(np.full((64, 64, 3), 255 * ("evaluation" not in manifest), np.uint8))
    opened.members["photos.npy"] = bundle.array_bytes(np.full((2, 64, 64, 3), 255, np.uint8))
    install(monkeypatch, read)
    with Model(opened, "int8", "cpu", 1, "reproducible") as model:
        outputs = model.session.run(model.prepare(opened.array("in.npy")))
    opened.members["out.npy"] = bundle.array_bytes(outputs)
    opened.manifest["golden"] = {"inputs": ["in.npy"], "outputs": {"int8": "out.npy"}, "machine": platform.machine()}
    return golden.golden(opened, "int8", RuntimeOptions("cpu"))


@pytest.mark.parametrize(
    ("found", "found_by_default", "share", "count"),
    [
        # Another object, of another class, has the highest score.
        ({(1, 1): (0, "sure"), (6, 6): (1, "less")}, {(1, 1): (0, "less"), (6, 6): (1, "sure")}, 1.0, 4),
        # Two classes have the highest score.
        ({(1, 1): (0, "sure"), (6, 6): (1, "sure")}, {(1, 1): (0, "less"), (6, 6): (1, "sure")}, 1.0, 4),
        # The best object is the same, and another one is missing, of another class, or elsewhere.
        ({(1, 1): (0, "sure"), (6, 6): (1, "less")}, {(1, 1): (0, "sure")}, 2 / 3, 3),
        ({(1, 1): (0, "sure"), (6, 6): (1, "less")}, {(1, 1): (0, "sure"), (6, 6): (2, "less")}, 0.5, 4),
        ({(1, 1): (0, "sure"), (6, 6): (1, "less")}, {(1, 1): (0, "sure"), (6, 2): (1, "less")}, 0.5, 4),
    ],
)
def test_detectors_are_judged_by_their_objects(
    found: Found, found_by_default: Found, share: float, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    comparison = verified_detector(tmp_path, monkeypatch, found, found_by_default)
    assert comparison["default_steps"] > golden.CLOSE_STEPS_OPTIMIZED
    assert comparison["default_same_answers"] == {"share": pytest.approx(share), "total": count}
    assert comparison["verdict"] == ("equal" if share == 1 else "different")


@pytest.mark.parametrize(("found_by_default", "verdict"), [({(1, 1): (0, "less")}, "equal"), ({}, "different")])
def test_objects_are_looked_for_in_the_evaluation_sample_if_golden_inputs_have_none(
    found_by_default: Found, verdict: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluation = {"inputs": ["photos.npy"], "labels": None, "outputs": {}}
    found: Found = {(1, 1): (0, "sure")}
    comparison = verified_detector(tmp_path, monkeypatch, found, found_by_default, evaluation=evaluation)
    assert "same_answers" not in comparison
    assert comparison["default_same_answers"]["total"] == 2 + 2 * len(found_by_default)
    assert comparison["verdict"] == verdict


@pytest.mark.parametrize("manifest", [{}, {"evaluation": {"inputs": ["photos.npy"], "labels": None, "outputs": {}}}])
def test_nothing_found_is_no_proof(manifest: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    comparison = verified_detector(tmp_path, monkeypatch, {}, {}, **manifest)
    assert comparison["verdict"] == "different"
    assert "have a ratio of signal to error of" in comparison["note"]


def test_golden_outputs_of_another_shape(content: bytes) -> None:
    opened = bundle.Bundle(content)
    opened.members["golden-output-int8.npy"] = bundle.array_bytes(np.zeros((3, 4), np.int8))
    comparison = golden.golden(opened, "int8", RuntimeOptions("cpu"))
    assert comparison["verdict"] == "different"


def test_nothing_that_could_be_run_is_not_fine(content: bytes) -> None:
    opened = bundle.Bundle(content)
    opened.manifest["golden"]["outputs"] = {}
    assert golden.verify(opened, RuntimeOptions(""))["ok"] is False


def test_the_layer_of_the_first_difference() -> None:
    """The plain kernels of this runtime leave out the ReLU."""
    sound = tiny.classifier()
    parsed = graph.parse(sound)
    parsed.source.subgraphs[0].operators[0].builtinOptions.fusedActivationFunction = 0
    parsed.source.subgraphs[0].tensors[1].quantization.zeroPoint = [0]
    other = graph.serialize(parsed)
    real_runtime = runtime.find()

    def interpreter(model_content: bytes, **more: Any) -> Any:
        plain = more["experimental_op_resolver_type"] == real_runtime.module.OpResolverType.BUILTIN_REF
        return real_runtime.module.Interpreter(model_content=other if plain else model_content, **more)

    module = SimpleNamespace(Interpreter=interpreter, OpResolverType=real_runtime.module.OpResolverType)
    fake = Runtime("fake", "1", module, real_runtime.arguments)
    layer = golden.first_layer(fake, sound, [np.full((1, 4, 4, 1), 50, np.int8)])
    assert (layer["layer"], layer["operator"]) == ("hidden", "CONV_2D")
    assert layer["note"].startswith("the optimized kernel and the plain one differ by up to")


def test_runtimes_that_keep_no_tensors_are_told() -> None:
    layer = golden.first_layer(Runtime("tflite_runtime", "2.4.0", None, frozenset()), b"", None)
    assert layer == {"layer": None, "note": "tflite_runtime 2.4.0 does not keep intermediate tensors"}


def test_three_ways(content: bytes) -> None:
    opened = bundle.Bundle(content)
    report = accuracy.compare(opened, RuntimeOptions(""))
    samples, labels = opened.evaluation()
    assert (len(samples), report["samples"], report["preprocessing"]) == (30, 30, opened.preprocessing.digest)
    predictions = {}
    for role in ("original", "int8"):
        model = Model(opened, role, kernels="reproducible")
        predictions[role] = [model(sample).index for sample in samples]
        assert report["models"][role]["predictions"] == predictions[role]
        right = sum(a == b for a, b in zip(predictions[role], labels, strict=True))
        assert report["models"][role]["accuracy"]["value"] == right / 30
    assert report["models"]["compiled"]["accuracy"]["how"] == "missing"
    (pair,) = report["pairs"]
    assert (pair["from"], pair["to"]) == ("original", "int8")
    same = sum(a == b for a, b in zip(predictions["original"], predictions["int8"], strict=True))
    assert pair["agreement"]["value"] == same / 30
    assert sum(row["samples"] for row in pair["per_class"]) == 30
    lost = sum(row["change"] for row in pair["per_class"])
    assert pair["accuracy_drop"]["value"] == pytest.approx(-lost / 30)
    assert "int8" in accuracy.text(report)
    assert json.loads(json.dumps(report)) == report


def test_three_ways_with_the_stand_in(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "tiny.coralline"
    path.write_bytes(content)
    root = devices.host(tmp_path / "root")
    done = devices.runner("bench", path, "--json", "--runs", 5, LD_LIBRARY_PATH=devices.stand_in(), CORALLINE_ROOT=root)
    report = json.loads(done.stdout)
    assert done.returncode == 0, done.stderr
    assert [(pair["from"], pair["to"]) for pair in report["accuracy"]["pairs"]] == [
        ("original", "int8"),
        ("original", "compiled"),
        ("int8", "compiled"),
    ]
    assert report["accuracy"]["pairs"][2]["agreement"]["value"] == 1
    assert report["golden"]["compiled"]["verdict"] == "equal"
    assert set(report["benchmark"]["cold_start"]) >= {"library", "delegate", "libedgetpu"}


def test_a_bundle_without_an_evaluation_sample() -> None:
    report = accuracy.compare(bundle.Bundle(devices.packed(samples=0)), RuntimeOptions("cpu"))
    assert report == {"accuracy": measurement.missing("fraction", "the bundle has no evaluation sample")}
    assert accuracy.text(report) == "accuracy: not measured: the bundle has no evaluation sample"


@pytest.mark.parametrize(("successes", "trials"), [(0, 5), (5, 5), (3, 7), (98, 100)])
def test_shares_are_those_of_the_host(successes: int, trials: int) -> None:
    assert measurement.proportion(successes, trials, "x") == host.proportion(successes, trials, "x").to_json()


def test_the_interval_of_a_drop_is_near_the_hosts() -> None:
    random = np.random.default_rng(0)
    before, after = random.random(400) < 0.9, random.random(400) < 0.85
    ours, theirs = measurement.paired_drop(before, after), host.drop(before, after)
    assert ours["value"] == pytest.approx(theirs.value)
    assert [ours["low"], ours["high"]] == pytest.approx([theirs.low, theirs.high], abs=0.01)
