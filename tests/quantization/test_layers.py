"""Every kind of layer through post-training quantization, beside what training computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import layers
import numpy as np
import pytest

from compress.edgetpu.legalize import legalize
from compress.edgetpu.placement import place
from compress.quantization import calibration, conversion, fake, points
from compress.quantization.search import snr_db
from compress.target import load
from compress.tflite import graph
from compress.tflite.runtime import Model
from compress.training import network
from compress.training.folding import canonical

pytestmark = pytest.mark.tensorflow


@pytest.mark.parametrize("name", layers.ALL)
def test_the_file_is_whole_precise_and_what_training_computes(keras: Any, name: str, tmp_path: Path) -> None:
    samples = np.random.default_rng(5).random((40, 12, 12, 3), np.float32)
    model = layers.model(keras, layers.ALL[name])
    folded = canonical(network.read(model))
    plan = calibration.calibrate(folded, samples)
    content = conversion.convert(folded, plan)  # refuses float operators
    (tmp_path / "m.tflite").write_bytes(content)
    found = Model(tmp_path / "m.tflite", reproducible=True).scores(samples)
    wanted = np.asarray(model(samples, training=False))
    assert snr_db(wanted, found).mean() > 25
    trained = network.build(fake.with_rounded_weights(fake.insert(folded, points.find(folded), plan)))
    simulated = np.asarray(trained(samples, training=False))
    step = (simulated.max() - simulated.min()) / 255
    assert np.mean(np.abs(found - simulated) <= 2.5 * step) > 0.95
    feeds = [[sample[np.newaxis]] for sample in samples[:4]]
    rewritten = legalize(graph.parse(content), load("edgetpu"), feeds, io="INT8").graph
    assert [op.op for op in place(rewritten, load("edgetpu")).ops if op.placement == "cpu"] == []
