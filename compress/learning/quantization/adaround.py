"""AdaRound: each weight is rounded up or down, whichever is better for the layer's output.

Rounding to the nearest step is best for a single weight, but not for the sum that it is part
of. For each layer the directions are trained on the layer's own inputs and outputs.

Source: Nagel et al., Up or Down? Adaptive Rounding for Post-Training Quantization, ICML 2020.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from compress.core.progress import SILENT, Progress
from compress.learning.quantization.plan import grid, gridded, packed, rounded
from compress.model.ir.keras_graph import Layer, LayerOutput, Network, build, subnetwork
from compress.model.ir.layer_specs import spec_of
from compress.model.ir.tensorflow import keras, run

STEPS = 400
"""Training steps of a layer; chosen, with a larger learning rate than in the paper, which takes 10,000 steps."""
BATCH = 32
"""Samples of a step; the same as in the paper."""
LEARNING_RATE = 0.2
"""Of Adam; chosen for few steps."""
PENALTY = 20.0
"""Weight of the term that drives each direction to 0 or 1, relative to the error of rounding to the nearest."""
MAX_VALUES = 20_000_000
"""Input and output values of a layer that are in memory at once."""
STRETCH = (-0.1, 1.1)
"""The rectified sigmoid of the paper, equations 23 and 24."""
SEED = 0


def rounded_up(network: Network, samples: NDArray[np.float32], progress: Progress = SILENT) -> dict[str, str]:
    """Return by layer which weights are rounded up, packed as in a plan; layers that gain nothing are left out.

    Args:
        network: in canonical form, with the factors and bias shifts of the plan.
        samples: preprocessed calibration samples [n, ...].
        progress: receives the number of layers that are done.
    """
    chosen = {}
    nearest = gridded(network)
    layers = [layer for layer, call in network.in_order() if spec_of(layer).kernel is not None and call == 0]
    for number, layer in enumerate(layers):
        if len(layer.calls) > 1:
            continue
        progress.update(number, len(layers))
        inputs, outputs = _inputs_and_outputs(network, layer, samples)
        up = _directions(layer, inputs, outputs)
        error_of_nearest = _error(layer, nearest.layers[layer.name].weights[0], inputs, outputs)
        if _error(layer, rounded(layer, up), inputs, outputs) < error_of_nearest:
            chosen[layer.name] = packed(up)
    return chosen


def _error(
    layer: Layer, kernel: NDArray[np.float32], inputs: NDArray[np.float32], expected: NDArray[np.float32]
) -> float:
    """Return the mean squared error of a layer's outputs with another kernel."""
    live = _live(layer, inputs)
    live.set_weights([kernel, *layer.weights[1:]])
    outputs = [np.asarray(live(inputs[start : start + BATCH])) for start in range(0, len(inputs), BATCH)]
    return float(((np.concatenate(outputs) - expected) ** 2).mean())


def _live(layer: Layer, inputs: NDArray[np.float32]) -> Any:
    live = keras().layers.deserialize(dict(layer.entry))
    live.build((None, *inputs.shape[1:]))
    return live


def _inputs_and_outputs(
    network: Network, layer: Layer, samples: NDArray[np.float32]
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return a layer's inputs and outputs in the float network, so that it does not compensate for other layers."""
    tensors = [layer.inputs()[0], LayerOutput(layer.name)]
    values_per_sample = sum(int(np.prod([size or 1 for size in network.shapes[tensor]])) for tensor in tensors)
    chosen = samples[: max(MAX_VALUES // values_per_sample, 8)]
    model = build(subnetwork(network, tensors))
    batches = [chosen[start : start + BATCH] for start in range(0, len(chosen), BATCH)]
    values = [keras().tree.flatten(run(model, batch)) for batch in batches]
    inputs, outputs = (np.concatenate([np.asarray(value) for value in part]) for part in zip(*values, strict=True))
    return inputs, outputs


def _directions(layer: Layer, inputs: NDArray[np.float32], outputs: NDArray[np.float32]) -> NDArray[np.bool_]:
    """Return which weights of one layer are rounded up."""
    import tensorflow

    library = keras()
    live = _live(layer, inputs)
    kernel = layer.weights[0].astype(np.float32)
    scale = grid(layer)
    below = np.floor(kernel / scale)
    part = kernel / scale - below
    low, high = STRETCH
    start = np.clip((part - low) / (high - low), 1e-3, 1 - 1e-3)
    free = tensorflow.Variable(np.log(start / (1 - start)).astype(np.float32))
    optimizer = library.optimizers.Adam(LEARNING_RATE)
    rest = [tensorflow.constant(weight) for weight in layer.weights[1:]]

    def error(choice: Any, x: Any, y: Any) -> Any:
        kernel = tensorflow.clip_by_value(below + choice, -127.0, 127.0) * scale
        actual, _ = live.stateless_call([kernel, *rest], [], x)
        return tensorflow.reduce_mean((actual - y) ** 2)

    error_of_nearest = float(error(np.rint(part), inputs[:BATCH], outputs[:BATCH])) or 1.0

    @tensorflow.function
    def step(x, y, sharpness, weight):  # type: ignore[no-untyped-def]
        with tensorflow.GradientTape() as tape:
            choice = tensorflow.clip_by_value(tensorflow.sigmoid(free) * (high - low) + low, 0.0, 1.0)
            undecided = tensorflow.reduce_mean(1 - tensorflow.abs(2 * choice - 1) ** sharpness)
            loss = error(choice, x, y) / error_of_nearest + weight * undecided
        optimizer.apply([tape.gradient(loss, free)], [free])

    generator = np.random.default_rng(SEED)
    for count in range(STEPS):
        batch = generator.integers(0, len(inputs), min(BATCH, len(inputs)))
        sharpness = 20.0 - 18.0 * count / STEPS
        weight = PENALTY * (count > STEPS // 5)
        step(
            tensorflow.constant(inputs[batch]),
            tensorflow.constant(outputs[batch]),
            tensorflow.constant(sharpness, "float32"),
            tensorflow.constant(weight, "float32"),
        )
    return np.asarray(free.numpy() >= 0)
