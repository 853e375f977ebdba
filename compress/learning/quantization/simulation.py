"""The quantized network in float arithmetic, with ranges and weights that change without a rebuild.

The simulation rounds the same tensors to the same steps as the .tflite file, and shows the values inside the network.
Only the rounding inside integer operators differs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compress.learning.quantization import equalization, fake_quantization, quantizer_placement
from compress.learning.quantization.activation_statistics import batches
from compress.learning.quantization.plan import QuantizationPlan, edited, gridded, shifted
from compress.model.ir.keras_graph import Layer, LayerOutput, Network, build, subnetwork, tensors_in
from compress.model.ir.layer_specs import spec_of
from compress.model.ir.tensorflow import flattened, run, set_weights, split_inputs

Samples = NDArray[np.float32]
Observer = Callable[[Any, tuple[Any, ...], Any], Any]
"""Given a layer, its inputs and its output, returns the output that the next layers use."""


class Simulation:
    """A Keras model that computes a network in float arithmetic, or rounded by a plan.

    Attributes:
        network: in canonical form, with a bias in every layer whose outputs a plan can shift.
        points: by rounded tensor its point.
        tensors: by point one of its tensors.
        quantizers: by point the layer that rounds it.
        model: the outputs of the network, then the values of `tensors`.
    """

    def __init__(self, network: Network) -> None:
        # A bias, 0 at first, in every layer that takes a shift.
        without = [layer.name for layer in network.layers.values() if takes_shift(layer) and len(layer.weights) == 1]
        zeros = {name: (0.0,) * int(network.shapes[LayerOutput(name)][-1] or 0) for name in without}
        self.network = shifted(network, zeros)
        self.points = quantizer_placement.find(self.network)
        self.tensors = {point: tensor for tensor, point in self.points.items()}
        names = fake_quantization.layer_names(self.network, self.points)
        start = QuantizationPlan(dict.fromkeys(self.tensors, (-1.0, 1.0)), "")
        rounding = fake_quantization.insert(self.network, self.points, start, self.tensors.keys())
        outputs = list(tensors_in(rounding.outputs))
        values = []
        for point, tensor in self.tensors.items():  # tensors of one point are the calls of its quantizer, in order
            calls = [other for other, name in self.points.items() if name == point]
            values.append(LayerOutput(names[point], calls.index(tensor)))
        self.model = build(subnetwork(fake_quantization.switched(rounding), [*outputs, *values]))
        self._output_count = len(outputs)
        self._layers = {layer.name: layer for layer in self.model.operations}
        self.quantizers = {point: self._layers[names[point]] for point in self.tensors}

    def use_float(self, plan: QuantizationPlan | None = None) -> None:
        """Compute the float network, with its channels scaled as a plan says."""
        self.assign_weights(equalization.applied(self.network, plan.factors if plan else {}))
        self.switch(on=False)

    def use_plan(self, plan: QuantizationPlan) -> None:
        """Compute the network as a plan quantizes it."""
        self.assign_weights(gridded(edited(self.network, plan), plan))
        self.assign_ranges(plan)
        self.switch(on=True)

    def assign_weights(self, network: Network) -> None:
        """Take the kernels and biases of another network with the same layers."""
        for layer in network.layers.values():
            if spec_of(layer).kernel is not None:
                self.assign_layer(layer.name, network)

    def assign_layer(self, name: str, network: Network) -> None:
        """Take the weights of one layer of another network."""
        set_weights(self._layers[name], list(network.layers[name].weights))

    def assign_ranges(self, plan: QuantizationPlan) -> None:
        """Take the ranges of a plan."""
        for point, quantizer in self.quantizers.items():
            low, high = plan.ranges[point]
            quantizer.low.assign(low)
            quantizer.high.assign(high)

    def switch(self, *, on: bool) -> None:
        """Switch the rounding of all points on or off."""
        for quantizer in self.quantizers.values():
            quantizer.on.assign(float(on))

    def values(self, samples: Samples) -> tuple[NDArray[np.float32], dict[str, NDArray[np.float32]]]:
        """Compute the outputs of the network [n, outputs], and one tensor of each point [n, ...].

        The samples are some dozen at most, since all values are in memory at once.
        """
        import tensorflow

        # As tensors: Keras warns about the structure of the inputs if it converts arrays itself.
        results = [run(self.model, tensorflow.constant(batch)) for batch in batches(self.network, samples)]
        outputs = [flattened(result[: self._output_count]) for result in results]
        parts = [[np.asarray(value) for value in result[self._output_count :]] for result in results]
        by_point = zip(self.tensors, zip(*parts, strict=True), strict=True)
        return np.concatenate(outputs), {point: np.concatenate(pieces) for point, pieces in by_point}

    def run_layers(self, samples: Samples, observe: Observer) -> list[Any]:
        """Compute the outputs of the network for one batch, layer by layer.

        `observe` is called with each layer, its inputs and its output, and returns what the next layers use.
        """

        def observing(operation: Any) -> Any:
            if operation.name not in self._layers:
                return operation
            return lambda *inputs, **options: observe(operation, inputs, operation(*inputs, **options))

        outputs = self.model._run_through_graph(split_inputs(self.model.inputs, samples), operation_fn=observing)
        return list(outputs[: self._output_count])


def takes_shift(layer: Layer) -> bool:
    """Return whether a layer has one output whose values its own bias can shift."""
    channels_last = layer.config.get("data_format") != "channels_first"
    return spec_of(layer).kernel is not None and len(layer.calls) == 1 and channels_last
