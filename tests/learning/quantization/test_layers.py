"""Every kind of layer in post-training quantization, compared with the simulation of QAT, and in QAT."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import layers
import networks
import numpy as np
import pytest
from blobs import Blobs, context

from compress.learning.quantization import calibration, export, qat, quantizer_placement
from compress.learning.quantization.plan import QuantizationPlan, nudged
from compress.learning.quantization.search import file_outputs
from compress.learning.training.loop import TrainingSettings
from compress.model.ir import keras_graph
from compress.model.ir.passes.fold import canonical
from compress.model.tflite import graph
from compress.targets import load
from compress.targets.edgetpu.legalize import legalize
from compress.targets.edgetpu.placement import place
from compress.tasks.base import snr_db
from deploy.contract.preprocessing import dequantize, quantize

pytestmark = pytest.mark.tensorflow


@pytest.mark.parametrize("name", layers.ALL)
def test_the_file_is_whole_precise_and_what_training_computes(keras: Any, name: str) -> None:
    samples = np.random.default_rng(5).random((40, 12, 12, 3), np.float32)
    model = layers.model(keras, layers.ALL[name])
    folded = canonical(keras_graph.read(model))
    plan = calibration.calibrate(folded, samples)
    content = export.convert(folded, plan)  # refuses float operators
    actual = file_outputs(content, samples)
    expected = np.asarray(model(samples, training=False))
    assert snr_db(expected, actual).mean() > 25
    simulated = np.asarray(qat.simulated(folded, plan)(samples, training=False))
    step = (simulated.max() - simulated.min()) / 255
    assert np.mean(np.abs(actual - simulated) <= 2.5 * step) > 0.95
    feeds = [[sample[np.newaxis]] for sample in samples[:4]]
    rewritten = legalize(graph.parse(content), load("edgetpu"), feeds, io="INT8").graph
    assert [op.op for op in place(rewritten, load("edgetpu")).ops if op.placement == "cpu"] == []


IN_ONE = (
    *("Rescaling", "LayerNormalization", "hard_sigmoid", "hard_silu", "swish", "PReLU", "LeakyReLU", "Softmax"),
    *("Concatenate", "UpSampling2D", "bilinear UpSampling2D", "Dropout", "custom activation", "squeeze and excite"),
    *("BatchNormalization", "SeparableConv2D", "Conv2DTranspose", "DepthwiseConv2D", "Conv1D", "ReLU6", "operators"),
)


@pytest.mark.parametrize("names", [IN_ONE[:7], IN_ONE[7:14], IN_ONE[14:]], ids=lambda names: names[0])
def test_layers_train_with_rounding(keras: Any, names: tuple[str, ...], tmp_path: Path) -> None:
    """The model has one branch for each kind of layer, joined at the end."""
    image = keras.Input((12, 12, 3))
    starts = [keras.layers.Conv2D(8, 3, padding="same")(image) for _ in names]
    ends = [
        keras.layers.GlobalAveragePooling2D()(layers.ALL[name](keras, x)) for name, x in zip(names, starts, strict=True)
    ]
    model = networks.randomized(keras.Model(image, keras.layers.Dense(2)(keras.layers.Concatenate()(ends))))
    data = Images()
    folded = canonical(keras_graph.read(model))
    plan = calibration.calibrate(folded, data.inputs("train"))
    settings = TrainingSettings(epochs=1, batch_size=16, learning_rate=0.001)
    trained, learnt, _ = qat.train(folded, plan, settings, context(data, tmp_path))
    actual = file_outputs(export.convert(trained, learnt), data.inputs("validation"))
    simulated = np.asarray(qat.simulated(trained, learnt)(data.inputs("validation"), training=False))
    assert snr_db(simulated, actual).mean() > 25


@dataclass
class Images(Blobs):
    """Larger blobs in colour."""

    input_shape: tuple[int, ...] = (12, 12, 3)

    def inputs(self, split: Any) -> np.ndarray:
        return np.pad(super().inputs(split), ((0, 0), (2, 2), (2, 2), (0, 0)), "edge").repeat(3, axis=-1)


def test_two_inputs_and_two_outputs_round_in_training_as_in_the_file(keras: Any, tmp_path: Path) -> None:
    """The test works below data sets and runtime.Model, which have one input and one output."""
    import tensorflow
    from ai_edge_litert.interpreter import Interpreter

    left, right = keras.Input((8, 8, 2), name="left"), keras.Input((4,), name="right")
    x = keras.layers.Conv2D(4, 3, activation="relu")(left)
    both = keras.layers.Concatenate()([keras.layers.GlobalAveragePooling2D()(x), keras.layers.Dense(4)(right)])
    ends = [keras.layers.Dense(3, name="three")(both), keras.layers.Dense(2, activation="softmax", name="two")(both)]
    folded = canonical(keras_graph.read(networks.randomized(keras.Model([left, right], ends))))
    points = quantizer_placement.find(folded)
    prescribed = quantizer_placement.fixed(folded, points)
    plan = QuantizationPlan({name: prescribed.get(name, nudged(-3.0, 3.0)) for name in points.values()}, "by hand")
    model = qat.simulated(folded, plan)
    random = np.random.default_rng(0)
    samples = [random.random((16, 8, 8, 2), np.float32), random.random((16, 4), np.float32)]
    with tensorflow.GradientTape() as tape:
        predictions = model(samples, training=True)
        loss = sum(tensorflow.reduce_mean(prediction**2) for prediction in predictions)
    gradients = tape.gradient(loss, model.trainable_variables)
    assert all(np.abs(gradient).max() > 0 for gradient in gradients)
    interpreter = Interpreter(model_content=export.convert(folded, plan))
    interpreter.allocate_tensors()
    inputs, outputs = interpreter.get_input_details(), interpreter.get_output_details()
    for row in range(16):
        for detail, values in zip(
            sorted(inputs, key=lambda input_detail: len(input_detail["shape"])), samples[::-1], strict=True
        ):
            interpreter.set_tensor(detail["index"], quantize(values[row : row + 1], *detail["quantization"], np.int8))
        interpreter.invoke()
        by_size = {detail["shape"][-1]: detail for detail in outputs}
        for expected in predictions:
            detail = by_size[expected.shape[-1]]
            scores = dequantize(interpreter.get_tensor(detail["index"]), *detail["quantization"])
            np.testing.assert_allclose(scores[0], expected[row], atol=2.5 * detail["quantization"][0])
