"""Draft files: the float and 8-bit .tflite files of a network, made in seconds; only their shapes are exact.

The cost of most layers follows from their shapes. What the converter, `legalize` and the compiler make of the other
layers is only known from a file.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from compress.errors import ModelError, StageError
from compress.ir.keras_graph import Layer, LayerOutput, Network, build
from compress.ir.layer_specs import spec_of
from compress.ir.passes import fold
from compress.pruning.cost import Draft
from compress.quantization import calibration, export
from compress.targets.base import Target
from compress.tflite import graph
from compress.tflite import macs as arithmetic

SAMPLES = 16
"""So many are run through a draft."""


def draft(network: Network, samples: NDArray[np.float32], target: Target) -> Draft:
    """Makes both files of a network.

    Args:
        network: any.
        samples: preprocessed samples [n, ...], of which SAMPLES are used.
        target: what the 8-bit file is made for.

    Raises:
        ModelError: TensorFlow Lite does not have what a layer does.
    """
    model, some = build(network), samples[:SAMPLES]
    macs = arithmetic.total_macs(graph.parse(export.convert_float(model)))
    steps = _biased(fold.canonical(network))
    try:
        try:
            content = export.convert(steps, calibration.calibrate(steps, some))
        except export.FloatOperatorsError:
            content = export.convert_calibrated(model, some)
        made = graph.parse(content)
        made = target.legalize(made, [[sample[np.newaxis]] for sample in some], io="INT8").graph
        checked = target.check(made)
        if checked.failure is not None:
            return Draft(macs, missing=checked.summary)
    except (StageError, ModelError) as error:
        return Draft(macs, missing=error.what)
    return Draft(macs, len(graph.serialize(made)), made)


def _biased(network: Network) -> Network:
    """The network with biases wherever training, or `quantize`, may yet put some: the compiler drops those of 0."""

    def biased(layer: Layer) -> Layer:
        if spec_of(layer).kernel is None or not layer.calls or any(each.any() for each in layer.weights[1:]):
            return layer
        bias = np.ones(network.shapes[LayerOutput(layer.name)][-1] or 1, np.float32)
        return replace(layer, weights=(layer.weights[0], bias)).configured(use_bias=True)

    return network.edited({name: biased(layer) for name, layer in network.layers.items()}, {})
