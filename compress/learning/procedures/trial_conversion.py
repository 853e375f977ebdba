"""Trial conversion: fast float and 8-bit .tflite files of a network, to predict its costs.

The costs of most layers follow from their shapes. What the converter, `legalize` and the compiler make of the other
layers is only known from a file. The files have the right shapes and operators, but poor quantization ranges.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compress.core.errors import ModelError, StageError
from compress.learning.pruning.cost import TrialConversion
from compress.learning.quantization import attention_masks, calibration, export
from compress.model.ir.keras_graph import Layer, LayerOutput, Network, build
from compress.model.ir.layer_specs import spec_of
from compress.model.ir.passes import cut_lookup, fold
from compress.model.tflite import graph
from compress.model.tflite.graph import Graph
from compress.model.tflite.macs import total_macs
from compress.targets.base import Target

SAMPLES = 16
"""Number of samples for the quantization ranges."""
LOOP = "WHILE"


@dataclass(frozen=True)
class TrialConverter:
    """Converts networks to .tflite files for a target.

    Attributes:
        samples: preprocessed samples [n, ...], of which SAMPLES are used.
        target: the target of the 8-bit file.
        known: models whose float .tflite file exists already, each with that file.
    """

    samples: NDArray[np.float32]
    target: Target
    known: Sequence[tuple[Any, bytes]] = ()

    def __call__(self, network: Network, model: Any) -> TrialConversion:
        """Convert a network.

        Args:
            network: the network.
            model: the same as a Keras model.

        Raises:
            ModelError: TensorFlow Lite does not have an operator for a layer.
        """
        known = next((content for other, content in self.known if other is model), None)
        float_graph = graph.parse(known or export.convert_float(model))
        macs = total_macs(float_graph)
        has_loop = any(operator.name == LOOP for operator in float_graph.operators)
        try:
            quantized = self._quantized(network, model)
            placement = self.target.check(quantized)
        except (StageError, ModelError) as error:
            return TrialConversion(macs, has_loop, missing=error.what)
        if placement.failure is not None:
            return TrialConversion(macs, has_loop, missing=placement.summary)
        return TrialConversion(macs, has_loop, len(graph.serialize(quantized)), quantized)

    def _quantized(self, network: Network, model: Any) -> Graph:
        """Return the 8-bit file, rewritten for the target, without the lookup of an embedding, as from `quantize`."""
        samples = self.samples[:SAMPLES]
        lookup = cut_lookup.cut(network)
        if lookup is not None:
            samples, network, model = lookup.rows(samples), lookup.network, build(lookup.network)
        canonical = fold.canonical(attention_masks.limited(network, samples)[0])
        biased = {name: _with_bias(layer, canonical) for name, layer in canonical.layers.items()}
        canonical = canonical.edited(biased, {})
        try:
            content = export.convert(canonical, calibration.calibrate(canonical, samples))
        except export.FloatOperatorsError:
            content = export.convert_calibrated(model, samples)
        quantized = graph.parse(content)
        return self.target.legalize(quantized, quantized.feeds(samples), io="INT8").graph


def _with_bias(layer: Layer, network: Network) -> Layer:
    """Return the layer with a non-zero bias if training or `quantize` may add one: zeros would be dropped."""
    if spec_of(layer).kernel is None or not layer.calls or any(weight.any() for weight in layer.weights[1:]):
        return layer
    bias = np.ones(network.shapes[LayerOutput(layer.name)][-1] or 1, np.float32)
    return replace(layer, weights=(layer.weights[0], bias)).configured(use_bias=True)
