"""Attention masks in 8 bits: limited to what the softmax can tell apart, and what is masked stays masked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from compress.learning.quantization import attention_masks, export, float_tflite, post_training
from compress.learning.quantization.search import file_outputs
from compress.learning.quantization.settings import PostTrainingSettings
from compress.model.ir import keras_graph

pytestmark = pytest.mark.tensorflow
STEPS = 12
LOWEST = float(np.finfo(np.float32).min)
CAUSAL = np.triu(np.ones((1, STEPS, STEPS), np.float32), 1)
SAMPLES = np.random.default_rng(5).standard_normal((48, STEPS, 8)).astype(np.float32)


def attention(keras: Any, masked: Callable[[Any, Any], Any]) -> Any:
    """Return a model with one attention, whose scores and whose first inputs `masked` changes."""
    inputs = keras.Input((STEPS, 8))
    query, key, value = (keras.layers.Dense(8, name=name)(inputs) for name in ("query", "key", "value"))
    scores = keras.ops.matmul(query, keras.ops.transpose(key, (0, 2, 1)))
    shares = keras.layers.Softmax()(masked(scores, inputs))
    return keras.Model(inputs, keras.layers.Dense(4, name="answer")(keras.ops.matmul(shares, value)))


def snr(model: Any, content: bytes) -> float:
    """Return the signal-to-noise ratio of an 8-bit file in dB."""
    expected = np.asarray(model(SAMPLES))
    actual = file_outputs(content, SAMPLES).reshape(expected.shape)
    return float(10 * np.log10((expected**2).sum() / ((expected - actual) ** 2).sum()))


def constant(value: float) -> Callable[[Any, Any], Any]:
    mask = np.where(CAUSAL > 0, np.float32(value), np.float32(0))
    return lambda scores, inputs: scores + mask


def subtracted(scores: Any, inputs: Any) -> Any:
    return scores - CAUSAL * np.float32(1e9)


def twice(scores: Any, inputs: Any) -> Any:
    return constant(-np.inf)(constant(LOWEST)(scores, inputs), inputs)


@pytest.mark.parametrize("masked", [constant(-1e4), constant(-1e9), constant(LOWEST), constant(-np.inf), subtracted])
def test_a_mask_takes_no_steps_from_the_scores(masked: Callable[[Any, Any], Any], keras: Any) -> None:
    keras.utils.set_random_seed(1)
    model = attention(keras, masked)
    notes: list[str] = []
    settings = PostTrainingSettings(ranges="minmax", equalize="off", correct_bias="off")
    result = post_training.quantize(model, SAMPLES[:32], SAMPLES[32:], settings, note=notes.append)
    assert any("attention mask" in note and "is limited to" in note for note in notes)
    assert snr(model, result.content) > 25


def selected(scores: Any, inputs: Any) -> Any:
    from keras import ops

    return ops.where(CAUSAL > 0, np.float32(-np.inf), scores)


@pytest.mark.parametrize("masked", [constant(-1e4), constant(LOWEST), constant(-np.inf), selected])
def test_a_file_without_layers_is_limited_too(masked: Callable[[Any, Any], Any], keras: Any) -> None:
    keras.utils.set_random_seed(1)
    model = attention(keras, masked)
    content = float_tflite.convert(export.convert_float(model), SAMPLES[:32])
    assert snr(model, content) > 25


@pytest.mark.parametrize("masked", [constant(-1e4), constant(-np.inf), subtracted, twice])
def test_what_is_masked_stays_masked(masked: Callable[[Any, Any], Any], keras: Any) -> None:
    keras.utils.set_random_seed(1)
    model = attention(keras, masked)
    network, notes = attention_masks.limited(keras_graph.read(model), SAMPLES)
    assert notes
    np.testing.assert_allclose(keras_graph.build(network)(SAMPLES), model(SAMPLES), atol=0.5 / 256)


def test_marks_in_an_input_mask_too(keras: Any) -> None:
    keras.utils.set_random_seed(1)
    samples = np.abs(SAMPLES) / np.abs(SAMPLES).max()

    def masked(scores: Any, inputs: Any) -> Any:
        marks = keras.ops.sign(keras.layers.ReLU(threshold=0.1)(inputs[:, None, :, 0]))
        return scores + marks * np.float32(-1e4)

    model = attention(keras, masked)
    network, notes = attention_masks.limited(keras_graph.read(model), samples)
    assert len(notes) == 1
    np.testing.assert_allclose(keras_graph.build(network)(samples), model(samples), atol=0.5 / 256)


def test_other_constants_stay(keras: Any) -> None:
    bias = np.random.default_rng(2).uniform(-3, 3, (1, STEPS, STEPS)).astype(np.float32)
    network = keras_graph.read(attention(keras, lambda scores, inputs: scores + bias))
    assert attention_masks.limited(network, SAMPLES) == (network, [])
    inputs = keras.Input((8,))
    network = keras_graph.read(keras.Model(inputs, keras.layers.Dense(3)(inputs) + np.float32(-1e4)))
    assert attention_masks.limited(network, SAMPLES[:, 0]) == (network, [])
