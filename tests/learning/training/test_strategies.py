"""Training on several devices: logical devices of the CPU stand in for GPUs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from blobs import Blobs, context
from paths import ROOT
from pydantic import ValidationError

from compress.core.errors import StageError
from compress.core.progress import SilentProgress
from compress.learning.context import Context, Execution
from compress.learning.training import loop, strategies
from compress.learning.training.strategies import Devices

pytestmark = pytest.mark.tensorflow

TRAINED = """
import json, sys
from dataclasses import replace
from pathlib import Path
from compress.model.ir.tensorflow import keras

devices, cases, folder = int(sys.argv[1]), json.loads(sys.argv[2]), Path(sys.argv[3])
keras(0)
import tensorflow
cpu, = tensorflow.config.list_physical_devices("CPU")
tensorflow.config.set_logical_device_configuration(cpu, [tensorflow.config.LogicalDeviceConfiguration()] * devices)
from blobs import Blobs, context
from compress.learning.context import Context, Execution
from compress.learning.training import loop

layers, histories = keras().layers, {}

def checked(worker):
    class Equal(keras().callbacks.Callback):
        def on_test_begin(self, logs=None):
            for variable in worker.weights:
                first, *others = [each.numpy() for each in variable.value.values]
                assert all((first == other).all() for other in others), variable.path

    return Equal()

for name, case in cases.items():
    keras(0).utils.clear_session()
    norms = [layers.BatchNormalization(momentum=0.9)] if "norm" in name else []
    stack = [keras().Input((8, 8, 1)), layers.Conv2D(8, 3), *norms, layers.ReLU()]
    model = keras().Sequential([*stack, layers.Flatten(), layers.Dense(2, "softmax")])
    chosen = {"epochs": 3, "batch_size": 10, "learning_rate": 0.01, "weight_decay": 0.1, **case.pop("settings", {})}
    given = replace(context(Blobs(), folder), execution=Execution(**case), unfinished=folder / name)
    checks = [checked] if "norm" in name else []
    found = loop.fit(model, loop.own_loss(model, given), loop.TrainingSettings(**chosen), given, checks)
    histories[name] = found["history"]
print(json.dumps(histories))
"""
SETTINGS: dict[str, dict[str, Any]] = {
    "16 bits": {"precision": "mixed_bfloat16"},
    "moving average": {"ema": 0.9},
    "early stopping": {"early_stopping": 1},
}
SEVERAL: dict[str, dict[str, Any]] = {
    "plain": {},
    "norm": {},
    **{name: {"settings": settings} for name, settings in SETTINGS.items()},
}
History = list[dict[str, float]]


def histories(folder: Path, devices: int, cases: Mapping[str, Mapping[str, Any]]) -> dict[str, History]:
    """Return the histories of trainings in a process with some logical devices."""
    return dict(json.loads(output(TRAINED, str(devices), json.dumps(cases), str(folder)).splitlines()[-1]))


def output(program: str, *arguments: str) -> str:
    """Return the output of a Python program."""
    path = os.pathsep.join(map(str, (ROOT, ROOT / "tests" / "support")))
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, History]:
    return histories(tmp_path_factory.mktemp("alone"), 1, {"plain": {}})


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, History]:
    cases = {name: {"strategy": "mirrored", **case} for name, case in SEVERAL.items()}
    return histories(tmp_path_factory.mktemp("two"), 2, cases)


def assert_same(several: History, alone: History) -> None:
    """Without batch norms, only the order of additions differs: 96 samples in batches of 10, the last one smaller."""
    for row, expected in zip(several, alone, strict=True):
        assert row == pytest.approx(expected, rel=0.01, abs=1e-4)


def test_two_devices_train_the_same_model(two: dict[str, History], alone: dict[str, History]) -> None:
    assert_same(two["plain"], alone["plain"])


def test_three_devices_train_the_same_model(tmp_path: Path, alone: dict[str, History]) -> None:
    assert_same(histories(tmp_path, 3, {"plain": {"strategy": "mirrored"}})["plain"], alone["plain"])


@pytest.mark.parametrize("name", ["norm", *SETTINGS])
def test_settings_on_several_devices(two: dict[str, History], name: str) -> None:
    assert two[name][-1]["val_accuracy"] == 1.0


def fitted(model: Any, given: Context, callback: Any = None, epochs: int = 1) -> Any:
    settings = loop.TrainingSettings(epochs=epochs, batch_size=16)
    return loop.fit(model, loop.own_loss(model, given), settings, given, [lambda _: callback] if callback else ())


def test_an_interrupted_training_on_several_devices_goes_on(
    keras: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A training with MirroredStrategy continues from the checkpoint of a training without a strategy."""
    from compress.learning.training import checkpoint

    monkeypatch.setattr(checkpoint, "EVERY_S", -1.0)
    keras.utils.set_random_seed(0)
    layers = keras.layers
    model = keras.Sequential([keras.Input((8, 8, 1)), layers.Flatten(), layers.Dense(2, "softmax")])
    start = model.get_weights()
    training_context = replace(context(Blobs(), tmp_path), unfinished=tmp_path)

    class Stop(keras.callbacks.Callback):  # type: ignore[misc]
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            if epoch == 2:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fitted(model, training_context, Stop(), epochs=4)
    model.set_weights(start)
    import tensorflow

    monkeypatch.setattr(strategies, "strategy", lambda name: tensorflow.distribute.MirroredStrategy(["CPU:0"]))
    copied = replace(training_context, execution=Execution(strategy="mirrored"), progress=SilentProgress())
    resumed = fitted(model, copied, epochs=4)["history"]
    assert len(resumed) == 4
    assert not all(np.array_equal(one, two) for one, two in zip(start, model.get_weights(), strict=True))


@pytest.mark.parametrize("workers", [1, 3])
def test_every_sample_is_on_one_device(keras: Any, workers: int) -> None:
    import tensorflow

    samples = np.arange(22)
    batches = tensorflow.data.Dataset.from_tensor_slices((samples, {"labels": samples})).batch(17)
    contexts = [tensorflow.distribute.InputContext(workers, number, 3) for number in range(workers)]
    strategy = SimpleNamespace(num_replicas_in_sync=3, distribute_datasets_from_function=lambda function: function)
    divided = Devices(strategy).distributed(batches)
    parts = [divided(given).take(4 * 3 // workers).as_numpy_iterator() for given in contexts]
    seen = [next(part) for _ in range(4) for part in parts for _ in range(3 // workers)]
    assert [len(rows) for rows, _ in seen] == 2 * [5, 6, 6, 1, 2, 2]  # it has no end
    np.testing.assert_array_equal(np.concatenate([rows for rows, _ in seen]), [*samples, *samples])
    np.testing.assert_array_equal(np.concatenate([fields["labels"] for _, fields in seen]), [*samples, *samples])


def test_missing_devices_are_errors() -> None:
    with pytest.raises(StageError, match=r"strategy: mirrored needs several devices.*only /device:CPU:0") as raised:
        strategies.strategy("mirrored")
    assert "CUDA_VISIBLE_DEVICES" in str(raised.value.hint)
    with pytest.raises(StageError, match="strategy: tpu found no TPU"):
        strategies.strategy("tpu")
    three = Devices(SimpleNamespace(num_replicas_in_sync=3))
    for samples, size in ((92, 18), (2, 18), (92, 2)):
        with pytest.raises(StageError, match="one batch has 2, which are fewer than the 3 devices"):
            three.refuse(samples, 90, size, 1, "float32")
    with pytest.raises(StageError, match="2 validation samples are fewer than the 3 devices"):
        three.refuse(90, 2, 18, 1, "float32")
    for samples in (90, 93):
        three.refuse(samples, 90, 20, 1, "mixed_bfloat16")
    with pytest.raises(StageError, match="gradient_accumulation cannot be used on several devices"):
        three.refuse(90, 90, 18, 2, "float32")
    with pytest.raises(StageError, match="mixed_float16 cannot be used on several devices"):
        three.refuse(90, 90, 18, 1, "mixed_float16")
    with pytest.raises(ValidationError):
        Execution(strategy="many")  # type: ignore[arg-type]
