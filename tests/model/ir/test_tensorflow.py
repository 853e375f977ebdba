from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.tensorflow

STRIDED = """
import numpy as np
from compress.model.ir.tensorflow import keras
library = keras(0)
image = library.Input((64, 64, 1))
x = library.layers.Conv2D(16, 1, 2, padding="same", use_bias=False)(image)
model = library.Model(image, library.layers.Dense(7)(library.layers.GlobalAveragePooling2D()(x)))
model.compile("adam", "mse", jit_compile=False)
model.fit(np.random.rand(128, 64, 64, 1), np.random.rand(128, 7), batch_size=64, epochs=4, verbose=0)
"""


def test_the_gradient_of_a_strided_pointwise_convolution_does_not_crash() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TF_ENABLE_ONEDNN_OPTS"}
    done = subprocess.run([sys.executable, "-c", STRIDED], check=False, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]


TRACED = """
import tensorflow
from compress.model.ir.tensorflow import keras

@tensorflow.function
def positive(x):
    return keras().ops.relu(x)

positive(tensorflow.constant([1.0]))
"""


def test_the_environment_is_not_printed_where_losses_are_traced(tmp_path: Path) -> None:
    (tmp_path / "traced.py").write_text(TRACED)
    environment = {**os.environ, "TOKEN": "not-for-logs", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, tmp_path / "traced.py"], check=True, capture_output=True, text=True, env=environment
    )
    assert "not-for-logs" not in done.stdout + done.stderr
