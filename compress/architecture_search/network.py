"""A network whose sub-networks share its weights: each runs on slices of them, and costs what it would cost alone.

The network is one Keras model. A sub-network runs the same layers with other values for their variables: the weights of
the kept channels, the centres of kernels, and a factor of 0 for residual blocks that are left out. Which channels are
kept is an input, so that all sub-networks share one traced graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache, cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from compress.architecture_search.elastic import ElasticNetwork, SubNetwork, is_elastic_convolution
from compress.ir.channel_groups import ChannelGroups, Layout, Mask
from compress.ir.keras_graph import Layer, LayerOutput, Network, build, map_tensors, read
from compress.ir.layer_specs import spec_of
from compress.ir.tensorflow import batch_signature, keras, run
from compress.training.bn_recalibration import measuring

PACKAGE = "coralline"
GATE = "BlockGate"


class ChoiceTensors(NamedTuple):
    """A sub-network as arrays, or as tensors.

    Attributes:
        kept: for each channel number whether it is kept: bool [channels].
        blocks: for each residual block 1 or 0: float32 [blocks].
        kernels: for each elastic kernel its size: int32 [kernels].
    """

    kept: Any
    blocks: Any
    kernels: Any


class _Slices(NamedTuple):
    """The part of a variable that a sub-network uses.

    Attributes:
        variable: the Keras variable.
        axes: for each axis with elastic channels the index of its layout.
        kernel: the index of its elastic kernel, or None.
        gate: the index of the residual block that it is the factor of, or None.
    """

    variable: Any
    axes: tuple[tuple[int, int], ...]
    kernel: int | None = None
    gate: int | None = None


class SharedNetwork:
    """A network that runs as any of its sub-networks.

    Args:
        elastic: the network and what may be smaller.

    Attributes:
        model: the largest network as a Keras model. Training changes its weights in place.
    """

    def __init__(self, elastic: ElasticNetwork) -> None:
        self.elastic = elastic
        self._gates = _gate_names(elastic)
        self.model: Any = build(_gated(elastic, self._gates))
        self._layouts: list[Layout] = []
        self._slices = list(self._all_slices())

    def choice(self, sub_network: SubNetwork) -> ChoiceTensors:
        """Return a sub-network as arrays."""
        kept: Mask = self.elastic.kept_channels(sub_network.widths)
        return ChoiceTensors(kept, np.array(sub_network.blocks, np.float32), np.array(sub_network.kernels, np.int32))

    def run(self, inputs: Any, choice: ChoiceTensors, training: bool = False) -> Any:
        """Return the outputs of a sub-network, inside of a traced function: there, numbers of channels are open.

        Args:
            inputs: samples [n, ...].
            choice: the sub-network.
            training: whether dropout is active, and batch norms normalize by the batch; no statistics are updated.
        """
        with self._scope(choice):
            return run(self.model, inputs, training)

    def statistics(self, inputs: NDArray[np.float32], choice: ChoiceTensors) -> list[Any]:
        """Return means and variances of all batch norms of a sub-network on some samples, as one batch."""
        return list(self._statistics(inputs, choice))

    def outputs(self, inputs: NDArray[np.float32], choice: ChoiceTensors, statistics: Sequence[Any]) -> Any:
        """Return the outputs of a sub-network with these statistics of its batch norms."""
        return self._outputs(inputs, choice, list(statistics))

    def trained(self) -> ElasticNetwork:
        """Return the elastic network with the current weights of the model."""
        weights = {name: layer.weights for name, layer in read(self.model).layers.items()}
        layers = {name: replace(layer, weights=weights[name]) for name, layer in self.elastic.network.layers.items()}
        return replace(self.elastic, network=replace(self.elastic.network, layers=layers))

    @property
    def _norms(self) -> list[Any]:
        kind = keras().layers.BatchNormalization
        return [layer for layer in self.model._flatten_layers() if isinstance(layer, kind) and layer.trainable]

    @property
    def _convolutions(self) -> list[Any]:
        layers = self.elastic.network.layers.values()
        names = [layer.name for layer in layers if layer.calls and is_elastic_convolution(layer)]
        return [self.model.get_layer(name) for name in names]

    @property
    def _signature(self) -> tuple[Any, ChoiceTensors]:
        import tensorflow

        channels = len(self.elastic.channels.group)
        kept = tensorflow.TensorSpec([channels], "bool")
        blocks = tensorflow.TensorSpec([len(self.elastic.blocks)], "float32")
        kernels = tensorflow.TensorSpec([len(self.elastic.kernels)], "int32")
        return batch_signature(self.model), ChoiceTensors(kept, blocks, kernels)

    @cached_property
    def _statistics(self) -> Any:
        import tensorflow

        @tensorflow.function(input_signature=self._signature)  # type: ignore[untyped-decorator]
        def statistics(inputs: Any, choice: ChoiceTensors) -> Any:
            with ExitStack() as measured, self._scope(choice) as scope:
                for norm in self._norms:
                    measured.enter_context(measuring(norm))
                run(self.model, inputs)
                variables = [
                    statistic for norm in self._norms for statistic in (norm.moving_mean, norm.moving_variance)
                ]
                return [scope.get_current_value(variable) for variable in variables]

        return statistics

    @cached_property
    def _outputs(self) -> Any:
        import tensorflow

        vectors = [tensorflow.TensorSpec([None], "float32")] * (2 * len(self._norms))

        @tensorflow.function(input_signature=(*self._signature, vectors))  # type: ignore[untyped-decorator]
        def outputs(inputs: Any, choice: ChoiceTensors, statistics: Any) -> Any:
            with self._scope(choice) as scope:
                variables = [
                    statistic for norm in self._norms for statistic in (norm.moving_mean, norm.moving_variance)
                ]
                for variable, value in zip(variables, statistics, strict=True):
                    scope.add_update((variable, value))
                return run(self.model, inputs)

        return outputs

    @contextmanager
    def _scope(self, choice: ChoiceTensors) -> Iterator[Any]:
        """Give all variables the values that a sub-network has of them."""
        import tensorflow

        kept = tensorflow.convert_to_tensor(choice.kept)
        channels = [tensorflow.where(tensorflow.gather(kept, layout))[:, 0] for layout in self._layouts]
        values = []
        for part in self._slices:
            value = tensorflow.convert_to_tensor(part.variable.value)
            if part.gate is not None:
                value = tensorflow.convert_to_tensor(choice.blocks)[part.gate]
            if part.kernel is not None:
                size = tensorflow.convert_to_tensor(choice.kernels)[part.kernel]
                full = value.shape[0]
                margin = (full - size) // 2
                value = value[margin : full - margin, margin : full - margin]
            for axis, layout in part.axes:
                value = tensorflow.gather(value, channels[layout], axis=axis)
            values.append((part.variable, value))
        with ExitStack() as changed:
            for layer in self._convolutions:
                changed.enter_context(_with_any_width(layer))
            scope = changed.enter_context(keras().StatelessScope())
            for pair in values:
                scope.add_update(pair)  # `state_mapping` would refuse other shapes
            yield scope

    def _all_slices(self) -> Iterator[_Slices]:
        kernels = {kernel.layer: index for index, kernel in enumerate(self.elastic.kernels)}
        indices: dict[bytes, int] = {}
        for layer in self.elastic.network.layers.values():
            if not layer.weights or not layer.calls:
                continue
            variables = self.model.get_layer(layer.name).weights
            for weight_index, layouts in enumerate(weight_layouts(layer, self.elastic.channels)):
                axes = []
                for axis, layout in layouts:
                    if not self._is_elastic(layout):
                        continue
                    if layout.tobytes() not in indices:
                        indices[layout.tobytes()] = len(self._layouts)
                        self._layouts.append(layout)
                    axes.append((axis, indices[layout.tobytes()]))
                kernel = kernels.get(layer.name) if weight_index == 0 else None
                if axes or kernel is not None:
                    yield _Slices(variables[weight_index], tuple(axes), kernel)
        for index, name in enumerate(self._gates):
            yield _Slices(self.model.get_layer(name).weights[0], (), gate=index)

    def _is_elastic(self, layout: Layout) -> bool:
        """Whether some channels of a layout may be left out."""
        smallest = self.elastic.kept_channels(self.elastic.smallest.widths)
        return not bool(smallest[layout].all())


def weight_layouts(layer: Layer, channels: ChannelGroups) -> list[tuple[tuple[int, Layout], ...]]:
    """Return for each array of weights of a layer the axes that run along channels, counted from 0, with their layouts.

    The layer is one that `channel_groups.remove` makes narrower; of other layers, the channels are pinned.
    """
    spec = spec_of(layer)
    inputs = channels.layouts[layer.inputs()[0]]
    outputs = channels.layouts[LayerOutput(layer.name)]
    result: list[tuple[tuple[int, Layout], ...]] = []
    for axes, kernel in zip(spec.kernels, layer.weights, strict=False):
        rank = kernel.ndim
        if axes.depthwise:
            result.append(((axes.into % rank, inputs),))
            inputs = np.repeat(inputs, layer.config["depth_multiplier"])
        else:
            result.append(((axes.into % rank, inputs), (axes.out % rank, outputs)))
    for array in layer.weights[len(spec.kernels) :]:
        by_channel = array.ndim > 0 and array.shape[-1] == len(outputs) and (spec.kernels or spec.weights_by_channel)
        result.append(((array.ndim - 1, outputs),) if by_channel else ())
    return result


@contextmanager
def _with_any_width(layer: Any) -> Iterator[None]:
    """Make a convolution run with any number of channels.

    Keras gives the bias the number of channels in the settings, and lets XLA compile a convolution again for every
    number of channels that is not known when the graph is traced. TensorFlow pads a dilated convolution only where that
    number is known.
    """
    import tensorflow

    margins = _margins_of_dilation(layer)

    def convolution(inputs: Any) -> Any:
        kernel = tensorflow.convert_to_tensor(layer.kernel)
        padding = layer.padding.upper()
        if margins is not None:
            inputs, padding = tensorflow.pad(inputs, margins), "VALID"
        if hasattr(layer, "depth_multiplier"):
            strides = (1, *layer.strides, 1)
            outputs = tensorflow.nn.depthwise_conv2d(inputs, kernel, strides, padding, dilations=layer.dilation_rate)
        else:
            outputs = tensorflow.nn.convolution(inputs, kernel, layer.strides, padding, dilations=layer.dilation_rate)
        if layer.use_bias:
            outputs += tensorflow.convert_to_tensor(layer.bias)
        return outputs if layer.activation is None else layer.activation(outputs)

    layer.call = convolution
    try:
        yield
    finally:
        del layer.call


def _margins_of_dilation(layer: Any) -> list[tuple[int, int]] | None:
    """Return the zeros before and after each axis that keep the size in a dilated convolution; None if it has none.

    Its strides are 1. With an odd number of zeros, TensorFlow puts one more at the end.
    """
    if layer.padding != "same" or max(layer.dilation_rate) == 1:
        return None
    totals = [(size - 1) * rate for size, rate in zip(layer.kernel_size, layer.dilation_rate, strict=True)]
    return [(0, 0), *((total // 2, total - total // 2) for total in totals), (0, 0)]


def _gate_names(elastic: ElasticNetwork) -> list[str]:
    """Return for each residual block the name of its gate, which no layer of the network has."""
    return [elastic.network.free_name(f"{block.addition}_gate") for block in elastic.blocks]


def _gated(elastic: ElasticNetwork, names: Sequence[str]) -> Network:
    """Return the network with a factor on each residual block, in layers with these names."""
    _gate_class()
    network = elastic.network
    layers = dict(network.layers)
    shapes = dict(network.shapes)
    for block, name in zip(elastic.blocks, names, strict=True):
        entry = {"module": None, "class_name": GATE, "config": {"name": name}, "registered_name": f"{PACKAGE}>{GATE}"}
        calls = ({"args": [block.end], "kwargs": {}},)
        layers[name] = Layer(name, GATE, entry, calls, (np.ones((), np.float32),))
        shapes[LayerOutput(name)] = network.shapes[block.end]
        addition = layers[block.addition]
        layers[block.addition] = replace(
            addition, calls=map_tensors(addition.calls, {block.end: LayerOutput(name)}.get)
        )
    return replace(network, layers=layers, shapes=shapes)


@cache
def _gate_class() -> Any:
    """Define and register the gate layer once; Keras is imported late."""
    library = keras()

    class BlockGate(library.layers.Layer):  # type: ignore[misc, name-defined]
        """Multiplication by one factor, which is 1 in the largest network."""

        def build(self, shape: Any) -> None:
            del shape
            self.factor = self.add_weight(shape=(), initializer="ones", trainable=False, name="factor")

        def call(self, x: Any) -> Any:
            return x * self.factor

    return library.saving.register_keras_serializable(PACKAGE, GATE)(BlockGate)
