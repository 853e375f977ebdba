"""Rebuild of a network in tf-keras, for tools that do not support Keras 3: the reverse of `importers.keras2`.

Layers with weights become the tf-keras layers of the same name, with the same weights. All others
stay the Keras 3 layers that they are and run inside the tf-keras model, so that nothing needs a
counterpart that only computes; layers with weights that have none run there too, untrained.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compress.core.errors import ModelError
from compress.model.importers.keras.keras2 import TOLERANCE, difference
from compress.model.ir.keras_graph import Layer, LayerOutput, Network, build, tensors_in
from compress.model.ir.layer_specs import spec_of
from compress.model.ir.passes import fold
from compress.model.ir.tensorflow import keras

Change = Callable[[Layer, Any], Any]
"""(layer, its counterpart with weights, or None where there is none) -> the tf-keras layer to use, or None."""


@dataclass(frozen=True)
class Legacy:
    """A network in tf-keras.

    Attributes:
        model: the tf-keras model.
        variables: by layer its weights, in the network's order; they stay the same when a tool wraps the layer.
        frozen: layers with weights that cannot be trained in tf-keras: what they are.
    """

    model: Any
    variables: Mapping[str, list[Any]]
    frozen: Mapping[str, str]

    def weights(self) -> dict[str, tuple[NDArray[np.float32], ...]]:
        """Return the current weights of every layer with a counterpart."""
        return {name: tuple(variable.numpy() for variable in variables) for name, variables in self.variables.items()}


def library(seed: int | None = None) -> Any:
    """tf-keras; with a seed, everything random starts from it."""
    keras(seed)
    import tf_keras

    if seed is not None:
        tf_keras.utils.set_random_seed(seed)
    return tf_keras


def unchanged(layer: Layer, counterpart: Any) -> Any:
    """Return a layer unchanged."""
    del layer
    return counterpart


def plain(network: Network) -> Legacy:
    """Rebuild the network in tf-keras, and compare the outputs.

    Raises:
        ModelError: its outputs differ.
    """
    legacy_model = legacy(network)
    largest = difference(legacy_model.model, build(network))
    if not largest <= TOLERANCE:
        raise ModelError(
            f"the outputs of the model rebuilt in tf-keras differ by {largest:.2g} of the largest output",
            allowed=f"{TOLERANCE:g}",
            hint="use the stages that work in Keras 3, and report which layers the model has",
        )
    return legacy_model


def legacy(network: Network, change: Change = unchanged) -> Legacy:
    """Rebuild the network in tf-keras, with changed layers.

    Args:
        network: any network; activations inside layers become separate layers.
        change: what to use instead of a layer.
    """
    return _Building(fold.split_activations(network), change).build()


class _Building:
    """One rebuild: the layers and tensors built so far."""

    def __init__(self, network: Network, change: Change) -> None:
        self.network, self.change = network, change
        self.tf_keras, self.keras = library(), keras()
        self.live = {operation.name: operation for operation in build(network).operations}
        self.layers: dict[str, Any] = {}
        self.variables: dict[str, list[Any]] = {}
        self.frozen: dict[str, str] = {}
        self.tensors: dict[LayerOutput, Any] = {}

    def build(self) -> Legacy:
        """Call every layer in order; return the model."""
        for layer, call in self.network.in_order():
            if not layer.calls:
                shape, dtype = self.network.shapes[LayerOutput(layer.name)], self.live[layer.name].dtype
                outputs = self.tf_keras.Input(shape, name=layer.name, dtype=dtype)
            else:
                outputs = self._called(layer, call)
            for number, tensor in enumerate(self.keras.tree.flatten(outputs)):
                self.tensors[LayerOutput(layer.name, call, number)] = tensor
        ends = [self._filled(structure) for structure in (self.network.inputs, self.network.outputs)]
        ends = [end[0] if isinstance(end, list) and len(end) == 1 else end for end in ends]
        return Legacy(self.tf_keras.Model(*ends, name=self.network.name), self.variables, self.frozen)

    def _called(self, layer: Layer, call: int) -> Any:
        inputs = layer.inputs(call)
        if layer.name not in self.layers:
            counterpart = self._counterpart(layer)
            self.layers[layer.name] = self.change(layer, counterpart)
            if layer.weights and counterpart is None:
                self.frozen[layer.name] = layer.kind
        legacy_layer = self.layers[layer.name]
        if legacy_layer is not None:
            return legacy_layer(self.tensors[inputs[0]])
        name = layer.name if call == 0 else f"{layer.name}_call{call}"
        kept = _kept(self.tf_keras, self.live[layer.name], layer.calls[call], bool(layer.weights))
        return kept(name=name)([self.tensors[tensor] for tensor in inputs])

    def _counterpart(self, layer: Layer) -> Any:
        """Return the tf-keras layer of the same name with the same weights, if there is one."""
        custom = not isinstance(layer.config.get("activation", "linear"), str)
        if not (layer.weights and spec_of(layer).keras2) or custom:
            return None
        kind = getattr(self.tf_keras.layers, layer.kind)
        counterpart = kind(**dict(_options(layer, kind)), name=layer.name)
        counterpart.build((None, *self.network.shapes[layer.inputs()[0]]))
        counterpart.set_weights(list(layer.weights))
        self.variables[layer.name] = list(counterpart.weights)
        return counterpart

    def _filled(self, structure: Any) -> Any:
        return _filled(self.keras, structure, self.tensors)


def _options(layer: Layer, kind: Any) -> Iterator[tuple[str, Any]]:
    """Return the settings of a Keras 3 layer that its counterpart has too, without initializers."""
    accepted = inspect.signature(kind.__init__).parameters
    yield "trainable", layer.config.get("trainable", True)
    for name, value in layer.config.items():
        if name in accepted and name != "name" and not name.endswith("_initializer"):
            if isinstance(value, dict):  # regularizers and constraints, in the form of Keras 2
                value = {key: value[key] for key in ("class_name", "config")}
            yield name, value


def _kept(tf_keras: Any, live: Any, structure: Any, frozen: bool) -> Any:
    """Return a tf-keras layer class that makes one call of a Keras 3 layer with a list of tensors."""
    library = keras()
    trains = "training" in inspect.signature(live.call).parameters

    class Kept(tf_keras.layers.Layer):  # type: ignore[misc]
        def call(self, inputs: Any, training: Any = None) -> Any:
            tensors = inputs if isinstance(inputs, list | tuple) else [inputs]
            filled = _filled(library, structure, dict(zip(tensors_in(structure), tensors, strict=True)))
            kwargs = {key: value for key, value in filled["kwargs"].items() if value is not None}
            if trains and training is not None:  # as in Keras 3, stronger than what a call was recorded with
                kwargs["training"] = training and not frozen
            return live(*filled["args"], **kwargs)

    return Kept


def _filled(library: Any, structure: Any, tensors: Mapping[LayerOutput, Any]) -> Any:
    """Return a structure with values in place of `LayerOutput`."""
    return library.tree.map_structure(lambda leaf: tensors[leaf] if isinstance(leaf, LayerOutput) else leaf, structure)
