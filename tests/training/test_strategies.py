"""Training on several devices: logical devices of the CPU stand in for GPUs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from blobs import Blobs, context
from paths import ROOT
from pydantic import ValidationError

from compress.errors import StageError
from compress.execution import Execution
from compress.progress import SilentProgress
from compress.training import loop, strategies
from compress.training.batches import validation_batch_size

pytestmark = [
    pytest.mark.tensorflow,
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),  # Keras' own
]

TRAINED = """
import json, sys
from dataclasses import replace
from pathlib import Path
from compress.ir.tensorflow import keras

devices, more, norm, folder = int(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3] == "norm", Path(sys.argv[4])
keras(0)
import tensorflow
cpu, = tensorflow.config.list_physical_devices("CPU")
tensorflow.config.set_logical_device_configuration(cpu, [tensorflow.config.LogicalDeviceConfiguration()] * devices)
from blobs import Blobs, context
from compress.execution import Execution
from compress.training import loop

layers = keras().layers
stack = [keras().Input((8, 8, 1)), layers.Conv2D(8, 3)] + [layers.BatchNormalization(momentum=0.9)] * norm
model = keras().Sequential([*stack, layers.ReLU(), layers.Flatten(), layers.Dense(2, "softmax")])
chosen = {"epochs": 3, "batch_size": 18, "learning_rate": 0.01, "weight_decay": 0.1, **more.pop("settings", {})}
settings = loop.TrainingSettings(**chosen)
given = replace(context(Blobs(), folder), execution=Execution(**more), unfinished=folder)
print(json.dumps(loop.fit(model, loop.own_loss(model, given), settings, given)["history"]))
"""


def history(tmp_path: Path, devices: int, norm: bool = False, **more: Any) -> list[dict[str, float]]:
    """The history of a training in a process with some logical devices."""
    path = os.pathsep.join(map(str, (ROOT, ROOT / "tests" / "support")))
    command = [sys.executable, "-c", TRAINED, str(devices), json.dumps(more), "norm" if norm else "", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}, check=False)
    assert done.returncode == 0, done.stderr
    return list(json.loads(done.stdout.splitlines()[-1]))


def flat(rows: list[dict[str, float]]) -> list[float]:
    return [value for row in rows for value in row.values()]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, float]]:
    return history(tmp_path_factory.mktemp("alone"), 1)


@pytest.mark.parametrize("devices", [2, 3])
def test_several_devices_train_the_same_model(tmp_path: Path, alone: Any, devices: int) -> None:
    """Without batch norms, only the order of additions differs: 96 samples in batches of 18, the last one smaller."""
    several = history(tmp_path, devices, strategy="mirrored")
    for row, expected in zip(several, alone, strict=True):
        # Keras weights the parts of the last validation batch, 1, 1 and 0 samples on three devices, not quite equally.
        assert row.pop("val_loss") == pytest.approx(expected["val_loss"], rel=0.05)
        assert row == pytest.approx({name: expected[name] for name in row}, rel=0.01, abs=1e-4)


def test_batch_norms_on_several_devices(tmp_path: Path) -> None:
    several = history(tmp_path, 2, norm=True, strategy="mirrored")
    assert several[-1]["val_accuracy"] == 1.0


@pytest.mark.parametrize("settings", [{"precision": "mixed_bfloat16"}, {"ema": 0.9}, {"early_stopping": 1}])
def test_settings_on_several_devices(tmp_path: Path, settings: dict[str, Any]) -> None:
    assert history(tmp_path, 2, strategy="mirrored", settings=settings)[-1]["val_accuracy"] == 1.0


@pytest.mark.parametrize("more", [{"jit_compile": True}, {"steps_per_execution": 4}])
def test_compilation_and_steps_change_nothing_but_rounding(tmp_path: Path, alone: Any, more: dict[str, Any]) -> None:
    assert flat(history(tmp_path, 1, **more)) == pytest.approx(flat(alone), rel=1e-3, abs=1e-5)


def test_an_interrupted_training_on_several_devices_goes_on(
    keras: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint of one device is read by several: weights and optimizer are the same."""
    from compress.training import checkpoint

    class StoppedError(Exception):
        pass

    monkeypatch.setattr(checkpoint, "EVERY_S", -1.0)
    keras.utils.set_random_seed(0)
    layers = keras.layers
    model = keras.Sequential([keras.Input((8, 8, 1)), layers.Flatten(), layers.Dense(2, "softmax")])
    start = model.get_weights()
    given = replace(context(Blobs(), tmp_path), unfinished=tmp_path)
    settings = loop.TrainingSettings(epochs=4, batch_size=16)

    class Stop(keras.callbacks.Callback):  # type: ignore[misc]
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            if epoch == 2:
                raise StoppedError

    with pytest.raises(StoppedError):
        loop.fit(model, loop.own_loss(model, given), settings, given, [lambda trained: Stop()])
    model.set_weights(start)
    import tensorflow

    monkeypatch.setattr(strategies, "strategy", lambda execution: tensorflow.distribute.MirroredStrategy(["CPU:0"]))
    copied = replace(given, execution=Execution(strategy="mirrored"), progress=SilentProgress())
    resumed = loop.fit(model, loop.own_loss(model, copied), settings, copied)["history"]
    assert len(resumed) == 4
    assert not all(np.array_equal(one, two) for one, two in zip(start, model.get_weights(), strict=True))


@pytest.mark.parametrize(("most", "used"), [(1, 1), (4, 3), (5, 3), (6, 6), (100, 6)])
def test_a_call_never_begins_the_next_epoch(most: int, used: int) -> None:
    assert loop._steps_per_execution(most, 6) == used


@pytest.mark.parametrize(
    ("samples", "devices", "size"), [(5, 1, 5), (1000, 1, 32), (1000, 3, 30), (10, 4, 8), (64, 64, 64)]
)
def test_the_first_validation_batch_is_divided_equally(samples: int, devices: int, size: int) -> None:
    assert validation_batch_size(samples, devices) == size


def test_missing_devices_are_errors() -> None:
    with pytest.raises(StageError, match=r"strategy: mirrored needs several devices.*only /device:CPU:0") as raised:
        strategies.strategy(Execution(strategy="mirrored"))
    assert "CUDA_VISIBLE_DEVICES" in str(raised.value.hint)
    with pytest.raises(StageError, match="strategy: tpu found no TPU"):
        strategies.strategy(Execution(strategy="tpu"))
    three = SimpleNamespace(num_replicas_in_sync=3)
    with pytest.raises(StageError, match=r"batch_size: 20 samples.* 3 devices") as raised:
        strategies.refuse_batches(100, 20, three)
    assert raised.value.allowed == "multiples of 3, such as 21"
    with pytest.raises(StageError, match="the last of 6 batches has 2 samples for 3 devices"):
        strategies.refuse_batches(92, 18, three)
    for samples in (90, 93):
        strategies.refuse_batches(samples, 18, three)
    with pytest.raises(StageError, match="2 validation samples are fewer than 3 devices"):
        validation_batch_size(2, 3)
    with pytest.raises(ValidationError):
        Execution(strategy="many")  # type: ignore[arg-type]
