"""`search_architecture` as a stage: limits, errors, and continuation after an interruption."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blobs import Blobs, Noting, context
from pydantic import ValidationError

from compress.architecture_search import search, training
from compress.artifact import MODEL_KERAS, SELECTED, Artifact, Kind
from compress.errors import StageError
from compress.execution import Execution
from compress.ir.tensorflow import keras as seeded
from compress.ir.tensorflow import run
from compress.pruning.cost import TrialConversion
from compress.stage import Context
from compress.stages import working_model
from compress.stages.search_architecture import SearchArchitecture
from compress.stages.trial_conversion import TrialConverter
from compress.targets import load
from compress.training import checkpoint
from compress.training.subset import Subset

pytestmark = [
    pytest.mark.tensorflow,
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),  # Keras' own, in model.save
]
SETTINGS: dict[str, Any] = {
    "size_bytes": 6000,
    "widths": (0.25, 0.5),
    "multiple": 4,
    "random": 1,
    "candidates": 10,
    "population": 4,
    "samples": 64,
    "epochs": 2,
    "batch_size": 32,
    "learning_rate": 0.01,
}


@pytest.fixture(scope="module")
def untrained(keras: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    keras.utils.set_random_seed(0)
    layers = keras.layers
    image = keras.Input((8, 8, 1))
    x = layers.Conv2D(16, 3, strides=2, padding="same", use_bias=False, name="stem")(image)
    x = layers.ReLU()(layers.BatchNormalization(momentum=0.9)(x))
    y = layers.Conv2D(16, 3, padding="same", activation="relu", name="inner")(x)
    y = layers.Conv2D(16, 1, use_bias=False, name="outer")(y)
    x = layers.Add(name="sum")([x, layers.BatchNormalization(momentum=0.9)(y)])
    x = layers.Dropout(0.2)(layers.GlobalAveragePooling2D()(x))
    model = keras.Model(image, layers.Dense(2, activation="softmax", name="scores")(x))
    folder = tmp_path_factory.mktemp("untrained")
    working_model.write_keras(model, folder)
    return folder


@pytest.fixture
def original(keras: Any, untrained: Path, tmp_path: Path) -> Artifact:
    folder = shutil.copytree(untrained, tmp_path / "given")
    return Artifact("0" * 64, Kind.UNTRAINED, folder, dict.fromkeys((MODEL_KERAS,), ""), {}, 0)


@pytest.fixture
def work(original: Artifact, tmp_path: Path) -> Context:
    for name in ("made", "unfinished"):
        (tmp_path / name).mkdir()
    plain = context(Blobs(), tmp_path / "made")
    return replace(plain, original=original, target=load("edgetpu"), unfinished=tmp_path / "unfinished")


def test_the_model_is_the_best_sub_network_within_the_limit(keras: Any, original: Artifact, work: Context) -> None:
    facts = SearchArchitecture(**SETTINGS).run(original, work)
    model = keras.saving.load_model(work.folder / MODEL_KERAS)
    assert facts["chosen"]["size_bytes"] <= 6000 < facts["largest"]["size_bytes"]
    assert facts["evaluated"] <= 10
    assert facts["warnings"] == []
    assert facts[SELECTED]  # so that the next training is not compared with this result
    equal = facts["equal"]
    assert equal["samples"] == len(Blobs().labels("validation"))
    assert 1 <= equal["sub_networks"] <= facts["evaluated"]
    assert facts["front"][-1]["validation"] == equal["best"]
    assert equal["best"] - equal["error"] <= facts["chosen"]["validation"] <= equal["best"]
    assert facts["layers"]["stem"] == {"before": 16, "after": model.get_layer("stem").filters}
    assert facts["chosen"]["parameters"] == model.count_params()
    predicted = np.asarray(run(model, Blobs().inputs("validation"))).argmax(axis=1)
    accuracy = float((predicted == Blobs().labels("validation")).mean())
    assert accuracy == pytest.approx(facts["chosen"]["validation"], abs=0.1)  # the statistics of batch norms differ


def test_an_interrupted_search_ends_as_if_it_had_not_been(
    keras: Any, original: Artifact, work: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted once in the training and once among the candidates."""
    monkeypatch.setattr(checkpoint, "EVERY_S", 0.0)
    monkeypatch.setattr(search, "SAVED_EVERY", 2)
    stage = SearchArchitecture(**SETTINGS)
    model = working_model.read(original, work)
    weights = model.get_weights()

    def run_search(search_context: Context) -> Any:
        seeded(work.seed)
        model.set_weights(weights)
        return search.search(
            model, stage._options(), stage, search_context, lambda *_: TrialConversion(macs=1, missing="no file")
        )

    with monkeypatch.context() as stopped:
        stopped.setattr(training.DrawnChoices, "_draw", counted(training.DrawnChoices._draw, 5))
        with pytest.raises(KeyboardInterrupt):
            run_search(replace(work, progress=Noting()))
    with monkeypatch.context() as stopped:
        # The largest, the smallest, and six candidates.
        stopped.setattr(search._Values, "quality", counted(search._Values.quality, 8))
        with pytest.raises(KeyboardInterrupt):
            run_search(replace(work, progress=Noting()))
    evaluations: list[object] = []
    evaluate = search._Values.quality

    def watched(*arguments: Any) -> Any:
        evaluations.append(arguments)
        return evaluate(*arguments)

    monkeypatch.setattr(search._Values, "quality", watched)
    again = run_search(replace(work, progress=(progress := Noting())))
    resumed = len(evaluations)
    warning, continued = progress.noted
    assert warning.endswith("since there is no 8-bit file: no file")
    assert continued == "continues after the training of all sub-networks"
    assert again.facts["warnings"] == [warning.removeprefix("search_architecture: ")]
    uninterrupted = run_search(replace(work, unfinished=None, progress=Noting()))
    assert len(evaluations) - resumed == resumed + 6  # the values of six candidates were known
    assert again.facts == uninterrupted.facts
    inputs = Blobs().inputs("validation")
    np.testing.assert_allclose(
        np.asarray(run(again.model, inputs)), np.asarray(run(uninterrupted.model, inputs)), atol=1e-6
    )


def counted(function: Any, calls: int) -> Any:
    """Return a function that is interrupted after a number of calls."""
    done = 0

    def interrupted(*arguments: Any) -> Any:
        nonlocal done
        done += 1
        if done > calls:
            raise KeyboardInterrupt
        return function(*arguments)

    return interrupted


def test_a_limit_below_the_smallest_sub_network_is_refused_before_the_training(
    keras: Any, original: Artifact, work: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "_trained", lambda *_: pytest.fail("it was trained"))
    with pytest.raises(StageError, match=r"the smallest one has size_bytes .* \(limit 100\)"):
        SearchArchitecture(**SETTINGS | {"size_bytes": 100}).run(original, work)


def test_a_limit_that_only_the_smallest_sub_network_meets(
    keras: Any, work: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files of all others are larger than predicted, as those of layers that cannot be followed may be."""
    layers = keras.layers
    image = keras.Input((8, 8, 1))
    x = layers.Conv2D(16, 3, padding="same")(image)
    for _ in range(2):
        y = layers.LayerNormalization()(layers.DepthwiseConv2D(3, padding="same")(x))
        x = layers.Add()([x, layers.Conv2D(16, 1)(layers.Conv2D(32, 1, activation="gelu")(y))])
    model = keras.Model(image, layers.Dense(2, activation="softmax")(layers.GlobalAveragePooling2D()(x)))
    stage = SearchArchitecture(latency_ms=0.5821, **{**SETTINGS, "size_bytes": None, "epochs": 1})
    converter = TrialConverter(Blobs().inputs("train"), work.target)
    result = search.search(model, stage._options(), stage, replace(work, progress=Noting()), converter)
    assert result.facts["largest"]["latency_ms"] > 0.7  # without the files of the blocks it is 0.69
    assert result.facts["chosen"]["latency_ms"] == result.facts["smallest"]["latency_ms"] <= 0.5821
    assert not any(result.facts["blocks"].values())
    assert result.facts["warnings"] == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"size_bytes": None}, "set at least one limit: latency_ms, size_bytes, streamed_bytes"),
        ({"precision": "mixed_float16"}, "precision\n  Input should be 'float32'"),
        ({"widths": (), "depth": False, "kernels": False}, "nothing may be smaller"),
        ({"widths": (1.5,)}, "less than 1"),
        ({"subset": Subset(by="random", share=0.5)}, "trained on all samples"),
    ],
)
def test_settings_that_cannot_work_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        SearchArchitecture(**{**SETTINGS, **changes})


def test_limits_that_a_target_does_not_predict_are_refused() -> None:
    refusal = SearchArchitecture(latency_ms=1.0).refused_by_target(load("cpu"))
    assert refusal is not None
    assert refusal.what == "latency_ms is not predicted for the target cpu"
    assert refusal.allowed == "size_bytes"
    unknown = SearchArchitecture(latency_ms=1.0, host="moon").refused_by_target(load("edgetpu"))
    assert unknown is not None
    assert SearchArchitecture(latency_ms=1.0, host="usb2").refused_by_target(load("edgetpu")) is None


def test_several_devices_are_refused() -> None:
    stage = SearchArchitecture(latency_ms=1.0)
    assert stage.refused_by_execution(Execution()) is None
    assert stage.refused_by_execution(Execution(strategy="mirrored")) == (
        "it trains on one device, and execution has `strategy: mirrored`",
        "strategy: one",
        "",
    )
